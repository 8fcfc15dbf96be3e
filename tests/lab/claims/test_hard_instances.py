import numpy as np
import pytest
from lab_cases import judged, made_up, measured

from onelayer import inputs, recover
from onelayer.lab.claims import known
from onelayer.lab.claims.hard_instances import FRESH, layer_of
from onelayer.lab.recovery_setup import fewest_examples, worst_head
from onelayer.lab.seeds import generator

NAME = "hard-instances"
GRID = {"heads": [1, 3, 5], "tokens": [3, 4], "largest": 8}


def predicted(layer, heads, largest, **_):
    """Random layers take twice the count; one bit as well, three take 8 times, more is too many."""
    parity = layer == "parity"
    times = {1: 2, 3: 8}.get(heads) if parity else 2
    return {
        "times": times,
        "tried": times or largest,
        "error": 0.01 if times else 0.6,
        "head_error": 0.9 if parity else 1e-3,
        "reason": "exact" if times else "budget_spent",
        "sculpt_reason": "agreement_hidden",
        "sculpt_converged": False,
        "wrong_claims": 0,
    }


def changed(change, **where):
    def measure(**cell):
        here = all(cell[name] == value for name, value in where.items())
        return predicted(**cell) | (change if here else {})

    return measure


def test_parities_that_get_harder_with_bits_are_as_predicted():
    assert judged(NAME, predicted, **GRID) == ("holds", [])
    assert judged(NAME, predicted, size="default") == ("holds", [])


@pytest.mark.parametrize(
    ("measure", "statement"),
    [
        (
            changed({"times": 8}, layer="random", heads=3, tokens=4),
            "random layers are learned from at most 4 times the examples of counting",
        ),
        (
            changed({"times": 7}, layer="parity", heads=5, tokens=4),
            "parities of the most bits take at least 4 times as many, or are not learned",
        ),
        (
            changed({"times": None, "tried": 8}, layer="parity", heads=1, tokens=3),
            "that factor is larger for the most bits than for the fewest",
        ),
        (
            changed({"sculpt_converged": True}, layer="parity", heads=1, seed=1),
            "the six phases refuse every parity",
        ),
        (
            changed({"wrong_claims": 1}, layer="parity", heads=5, seed=0),
            "no result that is said to be right has outputs off by more than 5%",
        ),
    ],
)
def test_every_part_of_the_rule_can_fail(measure, statement):
    assert judged(NAME, measure, **GRID) == ("fails", [statement])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"heads": 5}, "parities of two numbers of bits are compared with random layers"),
        ({"layer": "parity"}, "parities of two numbers of bits are compared with random layers"),
        ({"largest": 2}, "parities are not learned from 2 times the count: try more"),
    ],
)
def test_without_anything_to_compare_there_is_no_verdict(changes, why):
    results = made_up(NAME, predicted, **GRID | changes)
    verdict = known()[NAME].verdict(results)
    assert (verdict.outcome, verdict.why) == ("undecided", why)


def test_a_parity_is_one():
    X = inputs.boolean(200, 3, 6)
    mixed = np.abs(X[:, :, 0].sum(axis=1)) < 3  # both signs of coordinate 0
    outputs = layer_of("parity", 3, 6, seed=0)(X)[mixed, :, 0]
    np.testing.assert_allclose(outputs, X[mixed][:, :, 2:5].prod(axis=2), atol=1e-9)


@pytest.mark.slow
def test_examples_are_doubled_until_outputs_are_right():
    tiny = {"heads": [1, 3], "dim": 5, "tokens": 3, "largest": 4, "max_steps": 40}
    results = measured(NAME, **tiny, seeds=1)
    assert [cell["sculpt_reason"] for cell in results] == ["agreement_hidden"] * 4
    assert [cell["wrong_claims"] for cell in results] == [0] * 4
    easy = results.where(layer="random", heads=1).cells[0]
    assert easy["times"] in (1, 2, 4)
    fresh = inputs.boolean(FRESH, 3, 5, generator(0, "fresh inputs"))
    for cell in results:
        times = cell["tried"]
        assert times == (cell["times"] or 4)
        count = int(np.ceil(times * fewest_examples(cell["heads"], 5, 3, out_dim=1)))
        truth = layer_of(cell["layer"], cell["heads"], 5, seed=0)
        X = inputs.boolean(count, 3, 5, generator(0, "inputs"))
        how = {"method": "refine", "seed": generator(0, "search"), "max_steps": 40, "tol": 1e-3}
        found = recover(X, truth(X), cell["heads"], **how)
        wrong, size = found.layer(fresh) - truth(fresh), truth(fresh)
        assert cell["error"] == pytest.approx(np.sqrt(np.mean(wrong**2) / np.mean(size**2)))
        assert (cell["error"] <= 0.05) == (cell["times"] is not None)
        assert cell["head_error"] == worst_head(found.layer, truth)
        assert cell["reason"] == found.reason.name.lower()
