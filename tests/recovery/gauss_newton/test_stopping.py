from dataclasses import replace

import pytest
from cases import random_case

from onelayer.heads import dense
from onelayer.recovery.gauss_newton import levenberg_marquardt
from onelayer.recovery.gauss_newton.stopping import Ending, StoppingRule


def at(error, **changes):
    """A state in the middle of a stage."""
    case = random_case(0, n=30)
    state = levenberg_marquardt.begin(
        case.problem().batches(len(case.attention)), dense.pack(case.attention)
    )
    return replace(state, fit=replace(state.fit, loss=error**2), **{"gain": 0.5, **changes})


def losses(*errors):
    return [error**2 for error in errors]


def test_a_stage_goes_on_while_steps_help():
    assert StoppingRule(1e-12).ending(at(0.1), losses(0.4, 0.2, 0.1)) is None


def test_a_stage_ends_at_its_target():
    assert StoppingRule(0.2).ending(at(0.1), losses(0.4, 0.1)) is Ending.REACHED


@pytest.mark.parametrize(
    ("gain", "ending"), [(0.1, Ending.REACHED), (0.9, None)], ids=["rounding", "progress"]
)
def test_what_rounding_leaves_is_exact_once_steps_gain_little(gain, ending):
    state = at(4e-13, gain=gain, single=False)
    seen = losses(1e-3, 1e-9, 4e-13)
    assert StoppingRule(3e-13, exact=1e-10).ending(state, seen) is ending
    assert StoppingRule(3e-13).ending(state, seen) is None  # not where steps are cheap
    rounded = replace(state, single=True)  # a finer solve may gain more
    assert StoppingRule(3e-13, exact=1e-10).ending(rounded, seen) is None


def test_a_stage_ends_where_no_step_helps():
    assert StoppingRule(1e-12).ending(at(0.1, damping=1e9), losses(0.2, 0.1)) is Ending.STATIONARY
    still = at(0.1, gain=1e-9, damping=1e-4)
    assert StoppingRule(1e-12).ending(still, losses(0.1, 0.1)) is Ending.STATIONARY


def test_near_a_fit_patience_is_longer():
    slow = [1.0 + 0.001 * i for i in range(40, 0, -1)]
    near, far = (losses(*[error * one for one in slow]) for error in (1e-6, 1e-4))
    assert StoppingRule(1e-12).ending(at(1.001e-6), near) is None
    assert StoppingRule(1e-12).ending(at(1.001e-4), far) is Ending.STUCK
    longer = losses(1.1e-6, *[1e-6 * one for one in slow])
    assert StoppingRule(1e-12).ending(at(1.001e-6), longer) is Ending.STUCK


def test_patience_ends():
    slow = losses(*[0.12 - 0.001 * i for i in range(14)])
    assert StoppingRule(1e-12).ending(at(0.107), slow) is Ending.STUCK
