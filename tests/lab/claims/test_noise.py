import pytest
from lab_cases import judged, made_up, measured

from onelayer.lab.claims import known

NAME = "noise"


def predicted(method, noise, examples, **_):
    if method == "sculpt":
        return {"error": 0.01 + noise, "converged": noise <= 0.01, "reason": "approximate"}
    error = noise * (100 / examples) ** 0.5
    return {"error": error, "converged": True, "reason": "noise_floor"}


def changed(change, **where):
    def measure(**cell):
        here = all(cell[name] == value for name, value in where.items())
        values = predicted(**cell)
        return values | (change(values["error"], **cell) if here else {})

    return measure


def test_errors_as_the_noise_and_the_root_of_examples_are_as_predicted():
    assert judged(NAME, predicted) == ("holds", [])
    assert judged(NAME, predicted, size="default") == ("holds", [])


@pytest.mark.parametrize(
    ("measure", "statement"),
    [
        (
            changed(lambda error, noise, **_: {"error": error * noise**0.11}, method="refine"),
            "errors of Gauss-Newton steps are as the noise to the 1 ± 0.1",
        ),
        (
            changed(lambda error, noise, **_: {"error": error * noise**-0.11}, method="refine"),
            "errors of Gauss-Newton steps are as the noise to the 1 ± 0.1",
        ),
        (
            changed(
                lambda error, examples, **_: {"error": error * examples**0.11}, method="refine"
            ),
            "errors of Gauss-Newton steps are as the examples to the -0.5 ± 0.1",
        ),
        (
            changed(lambda *_, **__: {"reason": "local_minimum"}, method="refine", seed=0),
            "at least 90% of Gauss-Newton searches end with noise_floor",
        ),
        (
            changed(lambda *_, **__: {"error": 0.051}, method="sculpt", noise=0.01),
            "the six phases find heads within 5% up to noise of 1%",
        ),
        (
            changed(lambda *_, **__: {"converged": True}, method="sculpt", noise=0.1),
            "no result that is said to be right is off by more than 10%",
        ),
    ],
)
def test_every_part_of_the_rule_can_fail(measure, statement):
    assert judged(NAME, measure, noise=[1e-5, 1e-2, 0.1]) == ("fails", [statement])


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"noise": 1e-3}, "exponents take two levels of noise and two numbers of examples"),
        ({"refine_examples": 500}, "exponents take two levels of noise and two numbers of"),
        ({"noise": [0.02, 0.05]}, "the six phases were not tried with noise of 0.01 or less"),
    ],
)
def test_without_anything_to_compare_there_is_no_verdict(changes, why):
    results = made_up(NAME, predicted, **changes)
    verdict = known()[NAME].verdict(results)
    assert verdict.outcome == "undecided"
    assert verdict.why.startswith(why)


@pytest.mark.slow
def test_errors_are_proportional_to_the_noise_that_was_added():
    results = measured(
        NAME, heads=1, dim=5, tokens=2, refine_examples=[100, 200], sculpt_examples=300, seeds=1
    )
    refine = results.where(method="refine")
    assert {cell["reason"] for cell in refine} == {"noise_floor"}
    for _, part in refine.by("examples"):
        low, high = part.numbers("error")
        assert high == pytest.approx(1000 * low, rel=0.1)
        # n k e = 1000 equations and more for 50 unknowns
        assert 0.1e-5 < low < 1e-5
    assert len(results.where(method="sculpt")) == 2
