import re
from pathlib import Path

import numpy as np
import pytest
import scripts

from onelayer.lab.store import Store

FOLDER = Path(__file__).parents[1] / "examples"
TINY = {
    "digits_as_sets.py": ["--examples", "120"],
    "inputs_as_they_come.py": ["--dim", "6", "--examples", "150"],
    "learning_curves.py": [],
    "own_claim.py": ["--largest", "128", "--seeds", "1", "--workers", "1"],
    "query_a_layer.py": [],
    "recovered_heads.py": [],
}
OWN_TEST_FILE = {"conditions_in_practice.py", "real_transformer.py"}


def test_every_example_is_run():
    assert {*TINY, *OWN_TEST_FILE} == {path.name for path in FOLDER.glob("*.py")}


@pytest.fixture(scope="module")
def digits():
    """examples/digits_as_sets.py, imported as a module."""
    return scripts.module(FOLDER / "digits_as_sets.py")


@pytest.mark.slow
def test_digits_are_read_as_sets_and_as_flat_pixels():
    printed, stderr = scripts.output(FOLDER / "digits_as_sets.py", *TINY["digits_as_sets.py"])
    assert stderr == ""
    tasks, kinds, *rows = scripts.cells(printed)
    assert tasks == ["", "slant", "slant", "digit", "digit", ""]
    assert kinds == ["model", "whole", "partial", "whole", "partial", "seconds"]
    errors = {name: list(map(float, figures)) for name, *figures, _ in rows}
    assert list(errors)[-3:] == ["Ridge", "SVM", "random forest"]
    assert all(name.startswith("attention, ") for name in list(errors)[:-3])
    assert all(0 <= error < 150 for row in errors.values() for error in row)
    for with_places in ("attention, one-hot positions", "attention, places in tokens"):
        assert errors[with_places][0] < 10 < errors["attention, no places"][0]
    lines = [line for line in printed.splitlines() if line.startswith("- ")]
    assert [line.split(":")[0] for line in lines] == [
        f"- {task} of {kind} images" for task in ("slant", "digit") for kind in ("whole", "partial")
    ]


@pytest.mark.slow
def test_learning_curves_of_three_models_reach_the_error():
    printed, stderr = scripts.output(FOLDER / "learning_curves.py", *TINY["learning_curves.py"])
    assert stderr == ""
    found = dict(re.findall(r"^(\w+) reaches an error of 0.1 with (\d+) examples$", printed, re.M))
    assert list(found) == ["RFA", "BRFA", "RFMLP"]
    assert 16 < int(found["RFA"]) < int(found["BRFA"]) < int(found["RFMLP"]) < 1024
    assert "the bounds predict 4 times as many examples" in printed


@pytest.mark.slow
def test_heads_of_a_layer_are_recovered_within_their_bars():
    printed, stderr = scripts.output(FOLDER / "recovered_heads.py", *TINY["recovered_heads.py"])
    assert stderr == ""
    assert printed.startswith("exact: ")
    errors = re.findall(r"^head (\d): error (\S+), error bar (\S+)$", printed, re.M)
    assert [head for head, *_ in errors] == ["0", "1", "2", "3"]
    for _, error, bar in errors:
        assert 0 < float(error) < float(bar) < 1e-9


@pytest.mark.slow
def test_layers_are_found_by_fewer_scalars_than_twice_their_unknowns():
    printed, stderr = scripts.output(FOLDER / "query_a_layer.py", *TINY["query_a_layer.py"])
    assert stderr == ""
    heads, error = re.search(r"^(\d) heads, error (\S+), \d+ inputs$", printed, re.M).groups()
    assert heads == "4"
    assert 0 < float(error) < 1e-9
    used = dict(re.findall(r"^(\d) heads: True, (\d+) output entries$", printed, re.M))
    assert list(used) == ["1", "2", "4", "6", "8"]
    for count, entries in list(used.items())[1:]:
        assert 2 * 64 * int(count) < int(entries) < 4 * 64 * int(count) - 2 * int(count) + 1


@pytest.mark.slow
def test_bars_are_shown_beside_errors_for_examples_of_all_kinds():
    name = "inputs_as_they_come.py"
    printed, stderr = scripts.output_of_process(FOLDER / name, *TINY[name])
    assert stderr == ""
    rows = [row for row in scripts.cells(printed)[1:] if row[0]]
    assert [row[1] for row in rows] == ["yes", "yes", "yes", "yes", "no", "no"]
    assert [row[2] for row in rows] == ["6 of 6", "5 of 6", *["6 of 6"] * 4]
    for _, _, _, error, bar, *_ in rows[:4]:
        assert float(error) <= 3 * float(bar)
    advice = " ".join(row[-1] for row in scripts.cells(printed)[1:])
    assert "Inputs have too little signal along" in advice
    assert "pass causal=True" in advice


@pytest.mark.slow
def test_a_claim_of_ones_own_is_measured_and_reported(tmp_path):
    printed, stderr = scripts.output(
        FOLDER / "own_claim.py", *TINY["own_claim.py"], "--folder", tmp_path
    )
    assert stderr == ""
    rate = float(re.search(r"n\^-0.4 or faster: n\^(-?[0-9.]+)", printed)[1])
    assert -1.5 < rate < 0
    assert ("The claim holds." in printed) == (rate <= -0.4)
    (record,) = Store(tmp_path / "kink.sqlite").results()
    assert record.measured["sizes"] == [8, 16, 32, 64, 128]
    page = (tmp_path / "kink.html").read_text("utf-8")
    assert "A kink in the target does not slow attention down" in page
    assert "<img" in page
    assert "onelayer claims run" not in page  # the command does not know this claim


# Functions of digits_as_sets.py


def test_the_verdict_names_the_best_attention_and_where_it_stands(digits):
    noise = np.random.default_rng(0).normal(size=100)
    errors = {"attention, a": noise + 3, "attention, b": noise + 2, "Ridge": noise + 5}
    errors |= {"SVM": 2 - noise, "forest": noise + 2.5, "oracle": noise}
    assert digits.verdict(errors) == (
        "attention, b is ahead of Ridge and forest, level with SVM, behind oracle"
    )


def test_slant_is_the_shift_from_row_to_row(digits):
    upright, leaning, back = np.zeros((3, 8, 8))
    upright[1:7, 3] = leaning[range(8), range(8)] = back[range(8), range(7, -1, -1)] = 1.0
    found = digits.slant(np.stack([upright, leaning, back]), [0, 1, 2])
    np.testing.assert_allclose(found, np.array([0, 1, -1]) / np.sqrt(2 / 3), atol=1e-12)


def test_missing_patches_are_missing_for_all_models(digits):
    images = np.random.default_rng(1).uniform(size=(20, 8, 8))
    whole, partial = (digits.views(found, range(10)) for found in (images, digits.partial(images)))
    assert whole["tokens"]["X"].shape == (20, 17, 20)
    assert whole["patches"]["mask"].all()
    hidden = ~partial["tokens"]["mask"][:, 1:]
    assert 0.2 < hidden.mean() < 0.4
    assert np.isnan(partial["flat"]["X"]).sum() == 4 * hidden.sum()
    assert np.all(partial["patches"]["X"][:, 1:][hidden] == 0)
    patch, place = whole["tokens"]["X"][3, 6, :4], whole["tokens"]["X"][3, 6, 4:]  # row 1, column 1
    average = images[:10, 2:4, 2:4].mean(axis=0)
    np.testing.assert_allclose(patch, (images[3, 2:4, 2:4] - average).reshape(4))
    assert np.array_equal(place, np.eye(16)[5])
