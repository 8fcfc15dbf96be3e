"""The true errors of the six phases, beside the errors that the phases measure themselves.

The phases of `recover` are run once more, with identical results, and compared with the true layer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelayer.inputs import Seed
from onelayer.lab.recovery_setup import worst_head
from onelayer.layer import AttentionLayer
from onelayer.recovery import validation
from onelayer.recovery.options import Options
from onelayer.recovery.phases import affine_hull, driver
from onelayer.recovery.phases.state import Phase, PhaseState, Step
from onelayer.recovery.run import RecoveryRun
from onelayer.recovery.strategies import sculpt
from onelayer.recovery.trace import Log


@dataclass(frozen=True, eq=False)
class PhaseReport:
    """The result of one phase, or of one round of it.

    `measured` is the error that the phase measured itself. `true` is the relative error of what it
    estimated, infinite if it refused: of the sum of the projections after phases 1 and 3, the
    distance of the farthest head from the hull after 2, 4 and 5, and the error of the worst head
    after 6. `refusal` names the reason if the phase refused. `heads` are those of phase 6.
    """

    number: int
    name: str
    examples: int
    measured: float
    true: float
    refusal: str = ""
    heads: AttentionLayer | None = None


def phase_reports(X: Any, Y: Any, layer: AttentionLayer, seed: Seed) -> list[PhaseReport]:
    """The phases of `recover(X, Y, heads=layer.heads, method="sculpt", seed=seed)`, in order."""
    examples, options = validation.examples(X, Y, None), Options(layer.heads)
    log = Log(max_steps=100, max_seconds=None)
    reports: list[PhaseReport] = []

    def watch(phase: Phase, step: Step) -> None:
        state = step.state
        refusal = "" if state.refusal is None else state.refusal.name.lower()
        true = _true_error(phase.number, state, layer)
        measured = step.examples, step.error
        reports.append(
            PhaseReport(phase.number, phase.name, *measured, true, refusal, _heads(state))
        )

    rng = np.random.default_rng(seed)
    state, _ = sculpt.begin(RecoveryRun(examples, options, log, rng))
    driver.run(state, log, watch)
    return reports


def _true_error(phase: int, state: PhaseState, layer: AttentionLayer) -> float:
    if state.refusal is not None:
        return math.inf
    if phase in (1, 3):
        return _sum_error(state, layer)
    heads = _heads(state)
    return _hull_error(state, layer) if heads is None else worst_head(heads, layer)


def _sum_error(state: PhaseState, layer: AttentionLayer) -> float:
    """Of W = Σ W_i; the phases' tokens are X A and their outputs Y / s, so that W = A W' s."""
    assert state.sum is not None
    examples, total = state.examples, layer.projection.sum(axis=0)
    estimate = examples.whitening @ state.sum.projection_sum * examples.output_scale
    return float(np.linalg.norm(estimate - total) / np.linalg.norm(total))


def _hull_error(state: PhaseState, layer: AttentionLayer) -> float:
    """The distance of the farthest head from the hull, in the phases' units Θ' = A⁻¹ Θ A⁻¹."""
    assert state.sculpture is not None
    hull = affine_hull.extract(state.sculpture, layer.heads)
    inverse = np.linalg.inv(state.examples.whitening)
    heads = (inverse @ layer.attention @ inverse).reshape(layer.heads, -1)
    apart = heads - hull.centre
    apart -= (apart @ hull.basis.T) @ hull.basis
    return float(np.max(np.linalg.norm(apart, axis=1) / np.linalg.norm(heads, axis=1)))


def _heads(state: PhaseState) -> AttentionLayer | None:
    """The layer of phase 6, or None before it."""
    if state.found is None:
        return None
    fit = state.found.fit
    return state.fitted.layer(fit.theta, fit.weights)
