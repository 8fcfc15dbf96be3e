import numpy as np
import pytest
from lab_cases import judged, made_up, measured

from onelayer.lab import recovery_setup
from onelayer.lab.claims import known

NAME = "inputs"
SMALL, LARGE = 4_000, 16_000


def predicted(method, **_):
    if method == "sculpt":
        return {"error": 0.02, "converged": True, "reason": "approximate"}
    return {"error": 1e-13, "converged": True, "reason": "exact"}


def changed(change, **where):
    def measure(**cell):
        here = all(cell[name] == value for name, value in where.items())
        return predicted(**cell) | (change if here else {})

    return measure


def test_errors_that_do_not_depend_on_the_inputs_are_as_predicted():
    assert judged(NAME, predicted) == ("holds", [])
    assert judged(NAME, predicted, size="default") == ("holds", [])


@pytest.mark.parametrize(
    ("measure", "statement"),
    [
        (
            changed({"error": 0.051}, method="sculpt", kind="sphere"),
            "six phases, not polished: heads within 0.05 on inputs of every kind",
        ),
        (
            changed({"error": 1.1e-9}, method="refine", kind="gaussian"),
            "Gauss-Newton steps: heads within 1e-09 on inputs of every kind",
        ),
        (
            changed({"error": 0.004}, method="sculpt", kind="boolean"),
            "six phases: errors at most 4 times that on Boolean inputs",
        ),
        (
            changed({"error": 0.11}, method="sculpt", examples=SMALL),
            "no result that is said to be right is off by more than 10%",
        ),
    ],
)
def test_every_part_of_the_rule_can_fail(measure, statement):
    assert judged(NAME, measure) == ("fails", [statement])


def test_few_examples_may_fail_if_they_say_so():
    unsure = changed({"error": 1.0, "converged": False}, method="sculpt", examples=SMALL)
    assert judged(NAME, unsure) == ("holds", [])


@pytest.mark.parametrize("kinds", [["boolean"], ["gaussian", "sphere"]])
def test_without_two_kinds_there_is_no_verdict(kinds):
    results = made_up(NAME, predicted, kind=kinds)
    verdict = known()[NAME].verdict(results)
    assert verdict.outcome == "undecided"
    assert verdict.why.startswith("inputs of another kind are compared with boolean ones")


@pytest.mark.parametrize("kind", ["boolean", "gaussian", "sphere"])
def test_scores_are_of_one_size_on_inputs_of_every_kind(kind):
    layer, X, Y = recovery_setup.instance(2, 6, 3, 4000, seed=0, kind=kind)
    scores = X @ layer.attention[0] @ np.swapaxes(X, 1, 2)
    between = scores[:, ~np.eye(3, dtype=bool)]  # with another token
    assert between.std() == pytest.approx(recovery_setup.SCALE, rel=0.1)
    np.testing.assert_array_equal(Y, layer(X))


@pytest.mark.slow
def test_measures_both_methods_on_inputs_of_every_kind():
    results = measured(
        NAME, heads=1, dim=7, tokens=2, sculpt_examples=[4000], refine_examples=[10, 200], seeds=1
    )
    assert len(results) == 3 + 6
    assert results.where(method="sculpt").numbers("error").max() < 0.05
    assert {cell["reason"] for cell in results.where(method="sculpt")} <= {"approximate", "coarse"}
    enough, few = (results.where(method="refine", examples=n) for n in (200, 10))
    assert enough.numbers("error").max() < 1e-9
    assert {cell["reason"] for cell in enough} == {"exact"}
    assert few.numbers("error").min() > 1e-3  # fewer equations than unknowns
    assert not any(cell["converged"] for cell in few)
