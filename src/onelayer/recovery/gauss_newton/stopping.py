"""When a stage of a search is over, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from onelayer.recovery.gauss_newton import levenberg_marquardt

_EXPECTED = 0.7  # a stage is stuck if its policy's patience leaves more than this share of the loss
_EAGER_PATIENCE = 5  # where something better is waiting and steps are dear
_HALTED, _HALTED_AFTER = 0.95, 2  # and two steps that leave more than this share end a stage there
_NEAR_PATIENCE, _NEAR_ERROR = 40, 1e-5  # near a fit slow progress is conditioning: be patient
_STATIONARY = 1e-7  # a step that gains less than this share of the loss gains nothing
_ROUNDING_GAIN = 0.5  # share of the loss: steps on what is not rounding gain more, near a fit


class Ending(Enum):
    """Why a stage ended."""

    REACHED = "reached"  # the error asked for
    STATIONARY = "stationary"  # no step lowers the loss any more
    STUCK = "stuck"  # steps lower the loss too slowly to get anywhere
    OVERFITTED = "overfitted"  # it fits the few examples that it has seen, and no others
    BUDGET = "budget"  # steps or seconds are spent


@dataclass(frozen=True)
class StageOutcome:
    """A fit, how it ended, whether noise is left over, and whether the model is known to be wrong.

    It is a fit to all training examples, unless one to few of them is exact or time was spent.
    """

    state: levenberg_marquardt.SolverState
    ending: Ending
    noise: bool = False
    misfit: bool = False

    @property
    def solved(self) -> bool:
        return self.ending is Ending.REACHED or self.noise


@dataclass(frozen=True)
class StoppingRule:
    """When a stage is over."""

    target: float  # error
    least_gain: float = _STATIONARY  # share of the loss that a step has to gain
    eager: bool = False  # whether something better is waiting, and steps are dear
    scarce: bool = False  # whether more examples are waiting too
    exact: float = 0.0  # error that counts as reached once steps gain little: rounding is left

    def ending(self, state: levenberg_marquardt.SolverState, losses: list[float]) -> Ending | None:
        """Why a stage with these losses ends at this state; None while it goes on."""
        if state.fit.error <= self.target:
            return Ending.REACHED
        finest = not (state.rough or state.single)
        if finest and state.fit.error <= self.exact and state.gain < _ROUNDING_GAIN:
            return Ending.REACHED
        if state.exhausted:
            return Ending.STATIONARY
        if len(losses) > 1 and state.gain < self.least_gain and state.damping < 1e-2:
            return Ending.STATIONARY
        patience = (
            _NEAR_PATIENCE if state.fit.error < _NEAR_ERROR else state.current_policy.patience
        )
        if self.eager and state.fit.error > _NEAR_ERROR:
            patience = _EAGER_PATIENCE
            if state.products > levenberg_marquardt.MOST_PRODUCTS or _halted(losses):
                return Ending.STUCK
        if len(losses) > patience and losses[-1] > _EXPECTED * losses[-1 - patience]:
            return Ending.STUCK
        return None


def _halted(losses: list[float]) -> bool:
    """Whether the last steps have gained next to nothing."""
    return len(losses) > _HALTED_AFTER and losses[-1] > _HALTED * losses[-1 - _HALTED_AFTER]
