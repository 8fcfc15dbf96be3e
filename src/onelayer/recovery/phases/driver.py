"""The six phases of the provable algorithm (Chen and Li, arXiv 2402.04084), run in order.

`PHASES` lists them: a crude sum of the projections, a polytope around the heads, a refined sum and
a thinner polytope, the affine hull of the heads in it, and heads and projections in that hull.
Phases 3 and 4 are repeated while the sum is inaccurate and improves. A phase that cannot continue
refuses with a reason, and the state keeps what was reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from onelayer.recovery.phases.affine_hull import ExtractHull
from onelayer.recovery.phases.candidates import SolveCandidates
from onelayer.recovery.phases.projection_sum import CrudeSum, RefinedSum
from onelayer.recovery.phases.sculpt import Sculpt
from onelayer.recovery.phases.state import Phase, PhaseState, Step
from onelayer.recovery.reasons import Reason
from onelayer.recovery.trace import Log

Take: TypeAlias = Callable[[PhaseState, Phase], PhaseState]


@dataclass(frozen=True)
class Rounds:
    """Phases that are repeated while the sum of the projections is inaccurate and improves."""

    phases: tuple[Phase, ...]
    most: int = 4
    accurate: float = 0.005  # relative error of the sum below which another round gains nothing
    gain: float = 0.7  # a round that leaves more than this share of the error is the last

    def run(self, state: PhaseState, take: Take) -> PhaseState:
        """The state after all rounds; a round that failed or increased the error is discarded."""
        state = _in_order(self.phases, state, take)
        for _ in range(self.most - 1):
            if not self.accurate < _sum_error(state) < math.inf:
                break
            before, state = state, _in_order(self.phases, state, take)
            gained = _sum_error(state) < self.gain * _sum_error(before)
            state = min(before, state, key=_sum_error)
            if not gained:
                break
        return state


PHASES: tuple[Phase | Rounds, ...] = (
    CrudeSum(1, "crude sum of projections"),
    Sculpt(2, "sculpt"),
    Rounds((RefinedSum(3, "refined sum"), Sculpt(4, "sculpt again"))),
    ExtractHull(5, "span"),
    SolveCandidates(6, "candidates"),
)


def run(
    state: PhaseState,
    log: Log,
    watch: Callable[[Phase, Step], None] = lambda *_: None,  # called after every phase
    phases: tuple[Phase | Rounds, ...] = PHASES,
) -> PhaseState:
    """Run the phases until one refuses or the budget is spent; each adds a row to the trace."""

    def take(state: PhaseState, phase: Phase) -> PhaseState:
        if state.refusal is not None:
            return state
        if log.spent:
            return replace(state, refusal=Reason.BUDGET_SPENT)
        log.stage = phase.stage
        step = phase.step(state)
        if step.refused:
            step = replace(step, state=replace(step.state, refusal=phase.refusal))
        heads, number = step.state.heads or 0, phase.number
        log.write(phase.stage, heads, step.examples, step.error, note=step.note, phase=number)
        watch(phase, step)
        return step.state

    return _in_order(phases, state, take)


def _in_order(phases: tuple[Phase | Rounds, ...], state: PhaseState, take: Take) -> PhaseState:
    for phase in phases:
        state = phase.run(state, take) if isinstance(phase, Rounds) else take(state, phase)
    return state


def _sum_error(state: PhaseState) -> float:
    """The error of the sum of the projections, infinite for a state that was refused."""
    return math.inf if state.sum is None or state.refusal is not None else state.sum.error
