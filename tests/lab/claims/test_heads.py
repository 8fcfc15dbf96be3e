import math

import pytest
from lab_cases import judged, made_up, measured

from onelayer import recover
from onelayer.lab import recovery_setup
from onelayer.lab.claims import known
from onelayer.lab.claims.heads import MAX_STEPS
from onelayer.lab.recovery_setup import fewest_examples, worst_head
from onelayer.lab.seeds import generator

NAME = "heads"


def predicted(method, heads, dim, tokens, **_):
    """Exponential for the six phases, twice the count for Gauss-Newton steps."""
    count = fewest_examples(heads, dim, tokens, dim)
    examples = 250 * 10 ** (heads - 1) if method == "sculpt" else 2 * count
    return {"examples": examples, "of_count": examples / count, "error": 0.0}


def changed(change, **where):
    def measure(**cell):
        here = all(cell[name] == value for name, value in where.items())
        return predicted(**cell) | (change(**cell) if here else {})

    return measure


def test_exponential_and_linear_growth_are_as_predicted():
    assert judged(NAME, predicted) == ("holds", [])
    assert judged(NAME, predicted, size="default") == ("holds", [])
    assert judged(NAME, predicted, sculpt_heads=[3, 1, 2]) == ("holds", [])


@pytest.mark.parametrize(
    ("measure", "statement"),
    [
        (
            changed(lambda heads, **_: {"examples": 250 * 3.9 ** (heads - 1)}, method="sculpt"),
            "each further head takes the six phases at least 4 times the examples",
        ),
        (
            changed(lambda **_: {"of_count": 4.1}, method="refine", heads=4, tokens=2),
            "Gauss-Newton steps need at most 4 times the examples of counting",
        ),
        (
            changed(lambda **_: {"examples": None, "of_count": None}, method="refine", tokens=4),
            "Gauss-Newton steps need at most 4 times the examples of counting",
        ),
    ],
)
def test_every_part_of_the_rule_can_fail(measure, statement):
    assert judged(NAME, measure) == ("fails", [statement])


def test_a_gap_between_numbers_of_heads_counts_as_several_heads():
    slow = changed(lambda heads, **_: {"examples": 250 * 4.1 ** (heads - 1)}, method="sculpt")
    assert judged(NAME, slow, sculpt_heads=[1, 3]) == ("holds", [])


@pytest.mark.parametrize(
    ("changes", "lost", "why"),
    [
        ({"sculpt_heads": 2}, {}, "growth takes two numbers of heads at least"),
        (
            {},
            {"method": "sculpt", "heads": 2},
            "the six phases did not succeed with the largest number of examples",
        ),
    ],
)
def test_without_growth_there_is_no_verdict(changes, lost, why):
    measure = changed(lambda **_: {"examples": None}, **lost) if lost else predicted
    results = made_up(NAME, measure, **changes)
    verdict = known()[NAME].verdict(results)
    assert (verdict.outcome, verdict.why) == ("undecided", why)


@pytest.mark.slow
def test_the_examples_needed_are_the_first_that_are_enough():
    tiny = {"sculpt_heads": [1, 2], "sculpt_largest": 400, "refine_heads": 1, "refine_tokens": 3}
    results = measured(NAME, dim=5, **tiny, refine_largest=40, seeds=1)
    assert [(c["method"], c["heads"], c["tokens"]) for c in results] == [
        ("sculpt", 1, 2),
        ("sculpt", 2, 2),
        ("refine", 1, 3),
    ]
    assert [cell["examples"] for cell in results.where(method="sculpt")] == [250, None]
    (refine,) = results.where(method="refine")
    count = fewest_examples(1, 5, 3, 5)
    steps = 2 * math.log2(refine["of_count"])
    assert round(steps) >= 1
    for size, enough in ((round(steps), True), (round(steps) - 1, False)):
        examples = math.ceil(count * math.sqrt(2) ** size)
        layer, X, Y = recovery_setup.instance(1, 5, 3, examples, seed=0)
        how = {"method": "refine", "seed": generator(0, "search"), "max_steps": MAX_STEPS}
        assert (worst_head(recover(X, Y, 1, **how).layer, layer) <= 0.05) == enough
        assert (examples == refine["examples"]) == enough
