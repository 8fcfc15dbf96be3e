from types import SimpleNamespace

import numpy as np
import pytest

from onelayer import Reason
from onelayer.recovery import verdict
from onelayer.recovery.gauss_newton.stopping import Ending, StageOutcome
from onelayer.recovery.strategies.settings import DEFAULT


def certificate(error, uncertain=(), determined=True):
    return SimpleNamespace(
        error=error, uncertain_heads=lambda _: list(uncertain), determined=np.array([determined])
    )


def of_search(
    ending,
    error=1e-3,
    held_out=1e-3,
    *,
    noise=False,
    misfit=False,
    richer=np.inf,
    unknowns=1,
    uncertain=(),
):
    problem = SimpleNamespace(equations=10, unknowns=lambda *_: unknowns)
    search = SimpleNamespace(problem=problem, rank=None, tol=1e-12, richer_error=richer)
    state = SimpleNamespace(fit=SimpleNamespace(heads=1, error=error))
    outcome = StageOutcome(state, ending, noise, misfit)
    return verdict.of_search(search, outcome, certificate(held_out, uncertain), 0.1)


@pytest.mark.parametrize(
    ("ending", "options", "reason"),
    [
        (Ending.REACHED, {}, Reason.EXACT),
        (Ending.STATIONARY, {"noise": True}, Reason.NOISE_FLOOR),
        (Ending.REACHED, {"unknowns": 11}, Reason.TOO_FEW_EXAMPLES),
        (Ending.REACHED, {"held_out": 5e-3}, Reason.TOO_FEW_EXAMPLES),
        (Ending.REACHED, {"error": 1e-13, "held_out": 1e-8}, Reason.EXACT),
        (Ending.REACHED, {"uncertain": [0]}, Reason.HEADS_NOT_DETERMINED),
        (Ending.BUDGET, {"richer": 1e-9}, Reason.BUDGET_SPENT),
        (Ending.STUCK, {"richer": 1e-9, "misfit": True}, Reason.TOO_FEW_HEADS),
        (Ending.STUCK, {"misfit": True}, Reason.WRONG_MODEL),
        (Ending.STUCK, {"held_out": 5e-3}, Reason.TOO_FEW_EXAMPLES),
        (Ending.STUCK, {}, Reason.LOCAL_MINIMUM),
    ],
)
def test_the_reason_of_a_search(ending, options, reason):
    assert of_search(ending, **options) is reason


@pytest.mark.parametrize(
    ("hull", "options", "reason"),
    [
        (0.01, {"error": 0.02}, Reason.APPROXIMATE),
        (1e-5, {"error": 1e-3}, Reason.APPROXIMATE),
        (0.01, {"error": 0.03}, Reason.COARSE),
        (0.07, {"error": 0.02}, Reason.COARSE),
        (0.01, {"error": 0.02, "uncertain": [0]}, Reason.COARSE),
        (0.01, {"error": 0.02, "determined": False}, Reason.HEADS_NOT_DETERMINED),
        (0.01, {"error": 0.4, "determined": False}, Reason.NO_CANDIDATES),
    ],
)
def test_the_reason_of_phases_without_polishing(hull, options, reason):
    assert verdict.of_phases(hull, certificate(**options), 0.1, DEFAULT.sculpt) is reason
