"""When a stage of a search is over, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from onelayer.recovery.gauss_newton.levenberg_marquardt import SolverState
from onelayer.recovery.gauss_newton.varpro import Fit


class Ending(Enum):
    """Why a stage ended."""

    REACHED = "reached"  # the target error
    STATIONARY = "stationary"  # no step lowers the loss
    STUCK = "stuck"  # steps lower the loss too slowly
    BUDGET = "budget"  # the limit of steps or seconds is reached


@dataclass(frozen=True)
class StageOutcome:
    """A fit, and why its stage ended."""

    state: SolverState  # on all training examples, unless a fit to few is exact or time ran out
    ending: Ending
    noise: bool = False  # whether noise is left
    misfit: bool = False  # whether the model is wrong

    @property
    def fit(self) -> Fit:
        return self.state.fit

    @property
    def solved(self) -> bool:
        return self.ending is Ending.REACHED or self.noise


@dataclass(frozen=True)
class StoppingRule:
    """When a stage is over. Shares are of the loss."""

    target: float  # error
    least_gain: float = 1e-7  # a step that gains less than this share gains nothing
    exact: float = 0.0  # error that counts as reached once steps gain little: rounding is left
    expected: float = 0.7  # a stage is stuck if the policy's patience leaves more than this share
    near_error: float = 1e-5  # near a fit slow progress is conditioning: be patient
    near_patience: int = 40
    rounding_gain: float = 0.5  # near a fit, steps on more than rounding gain more than this share

    def ending(self, state: SolverState, losses: list[float]) -> Ending | None:
        """Why a stage with these losses ends at this state; None while it goes on."""
        if state.fit.error <= self.target:
            return Ending.REACHED
        finest = not (state.rough or state.single)
        if finest and state.fit.error <= self.exact and state.gain < self.rounding_gain:
            return Ending.REACHED
        if state.exhausted:
            return Ending.STATIONARY
        if len(losses) > 1 and state.gain < self.least_gain and state.damping < 1e-2:
            return Ending.STATIONARY
        near = state.fit.error < self.near_error
        patience = self.near_patience if near else state.current_policy.patience
        return Ending.STUCK if _leaves(losses, self.expected, patience) else None


def _leaves(losses: list[float], share: float, steps: int) -> bool:
    """Whether the last steps have left more than this share of the loss."""
    return len(losses) > steps and losses[-1] > share * losses[-1 - steps]
