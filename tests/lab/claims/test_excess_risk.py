import numpy as np
import pytest
from lab_cases import judged, measured

from onelayer.features.learning_curves import LearningCurve
from onelayer.lab import learning_setup
from onelayer.lab.claims.excess_risk import ERROR, TARGETS
from onelayer.theory import bounds

NAME = "excess-risk"
FIRST = ("f_{1,1}", 4)  # the easiest target, in the least dimension


def size(name, dim):
    """Examples needed, as far apart as the bounds allow and within reach."""
    order, least = (bounds.sample_size("rfa", TARGETS[n](d)) for n, d in ((name, dim), FIRST))
    return 20 * (order / least) ** 0.3


def as_predicted(examples, rates=None, sizes=None, **cell):
    """Curves with these rates and examples needed, by target, where they are not as predicted."""
    measured = {"sizes": learning_setup.sizes_up_to(examples)}
    for name in TARGETS:
        needed = (sizes or {}).get(name) or size(name, cell["dim"])
        rate = (rates or {}).get(name, -0.6)
        measured[name] = [ERROR * (n / needed) ** rate for n in measured["sizes"]]
        measured[f"needed {name}"] = needed if needed <= examples else None
    return measured


def test_holds_as_predicted():
    assert judged(NAME, as_predicted) == ("holds", [])


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize(("dim", "noise"), [(4, 0.0), (4, 0.5)])
def test_a_slow_learning_curve_fails(name, dim, noise):
    def measure(**cell):
        slow = {name: -0.3} if (cell["dim"], cell["noise"]) == (dim, noise) else {}
        return as_predicted(**cell, rates=slow)

    statement = f"from 0.1 on the error on {name} falls as n^-0.4 or faster, predicted n^-0.5"
    assert judged(NAME, measure) == ("fails", [statement])


GROWTH = "examples needed grow with d no faster than predicted, up to 2 times"


@pytest.mark.parametrize(("examples", "failed"), [(1024, []), (4096, [GROWTH]), (2048, [GROWTH])])
def test_growth_with_the_dimension_can_be_too_fast(examples, failed):
    """Also where the largest size is a lower bound, if it is a high one."""

    def measure(**cell):
        far = {"f_{1,3}": 2100.0} if cell["dim"] == 6 else {}
        return as_predicted(**cell, sizes=far)

    assert judged(NAME, measure, examples=examples) == ("fails" if failed else "holds", failed)


def test_a_wrong_ranking_fails():
    swap = {"f_{1,2}": "f_{2,1}", "f_{2,1}": "f_{1,2}"}

    def measure(**cell):
        sizes = {name: size(other, cell["dim"]) for name, other in swap.items()}
        return as_predicted(**cell, sizes=sizes)

    statement = "targets with a larger B(f)/Var need more examples"
    assert judged(NAME, measure) == ("fails", [statement])


def test_a_target_that_is_not_learned_is_no_failure():
    def measure(**cell):
        return as_predicted(**cell, sizes={"f_{1,3}": 1e9})

    assert judged(NAME, measure) == ("holds", [])


def test_cannot_judge_one_dimension_or_no_success():
    assert judged(NAME, as_predicted, dim=4) == ("undecided", [])
    nothing = dict.fromkeys(TARGETS, 1e9)
    assert judged(NAME, lambda **cell: as_predicted(**cell, sizes=nothing)) == ("undecided", [])


@pytest.mark.slow
def test_measures_learning_curves_without_and_with_noise():
    results = measured(NAME, dim=[2, 3], keys=2, heads=60, examples=128, seeds=1)
    for cell in results:
        errors = np.array([cell[name] for name in TARGETS]).T
        curve = LearningCurve(np.array(cell["sizes"]), errors, alpha=np.ones_like(errors))
        needed = [n if np.isfinite(n) else None for n in curve.samples_needed(ERROR)]
        assert [cell[f"needed {name}"] for name in TARGETS] == pytest.approx(needed)
    clean, noisy = (part for _, part in results.where(dim=3).by("noise"))
    assert clean.cells[0]["f_{1,1}"][-1] < 0.01 < noisy.cells[0]["f_{1,1}"][-1] < 0.5
