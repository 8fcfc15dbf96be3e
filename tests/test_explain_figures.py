"""The scripts that draw the figures of the explanation pages."""

import re
from pathlib import Path

import numpy as np
import pytest
import scripts

FOLDER = Path(__file__).parents[1] / "docs" / "figures"


def written(script, folder, *arguments):
    """What a script prints, after it has written its figure and nothing else to a folder."""
    printed, stderr = scripts.output(FOLDER / script, *arguments, "-o", folder)
    assert stderr == ""
    name = script.removesuffix(".py").replace("_", "-") + ".svg"
    assert [path.name for path in folder.iterdir()] == [name]
    assert "<svg" in (folder / name).read_text("utf-8")
    return printed


def test_every_figure_has_a_script_and_a_page():
    scripts_there = sorted(path.stem.replace("_", "-") for path in FOLDER.glob("explain_*.py"))
    assert sorted(path.stem for path in FOLDER.glob("explain-*.svg")) == scripts_there
    pages = "".join(path.read_text("utf-8") for path in (FOLDER.parent / "explanation").glob("*"))
    assert sorted(re.findall(r"\(\.\./figures/(explain-.*?)\.svg\)", pages)) == scripts_there


@pytest.mark.slow
def test_free_directions_stand_out_for_every_number_of_heads(tmp_path):
    printed = written("explain_free_directions.py", tmp_path, "--share", "0.2")
    rows = re.findall(r"^(\d) heads: (\d) free directions, gap (\S+)$", printed, re.MULTILINE)
    assert [(int(heads), int(free)) for heads, free, _ in rows] == [(1, 0), (2, 1), (3, 2)]
    assert all(float(gap) > 2 for *_, gap in rows)


@pytest.mark.slow
def test_too_few_examples_for_a_polytope_are_refused(tmp_path):
    script = scripts.module(FOLDER / "explain_free_directions.py")
    layer = script.ol.AttentionLayer.random(2, 8, scale=3.0, seed=0)
    X = script.ol.inputs.boolean(60, 3, 8, seed=1)
    with pytest.raises(SystemExit, match="phase 2 found too few slabs in 60 examples"):
        script.singular_values(X, layer(X), 2)


@pytest.mark.slow
def test_heads_with_small_bars_are_within_them(tmp_path):
    printed = written("explain_error_bars.py", tmp_path, "--seeds", "1")
    finite, accepted = re.findall(r"^(\d+) heads .*: (\S+)% within them$", printed, re.MULTILINE)
    assert int(finite[0]) >= int(accepted[0]) >= 20
    assert float(accepted[1]) >= 90


def test_bars_and_errors_are_those_of_the_same_head():
    script = scripts.module(FOLDER / "explain_error_bars.py")
    layer = script.ol.AttentionLayer.random(2, 8, seed=0, bias=True)
    layer.projection[0] *= 100  # the other head is hard to see in the noise
    rng = np.random.default_rng(1)
    pairs = script.heads_of(layer, rng.standard_normal((200, 4, 8)), 1e-4, rng)
    assert len(pairs) == 2
    (strong, error), (weak, larger) = pairs
    assert error <= strong < weak / 10
    assert larger > 10 * error
