"""Strategy for small problems: random starts, since steps are cheap."""

from __future__ import annotations

from onelayer.array.backend import Array
from onelayer.heads import dense
from onelayer.recovery.gauss_newton.levenberg_marquardt import CAUTIOUS, FAST, StepPolicy
from onelayer.recovery.gauss_newton.stopping import StageOutcome
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.strategies.known_heads import KnownHeads
from onelayer.recovery.whitening import AnyExamples


class Small(KnownHeads):
    """Random starts and random spare heads; cautious steps if equations are scarce."""

    cheap = True

    def start(self, heads: int, policy: StepPolicy) -> Array:
        return self.search.random_start(heads, policy)

    def grow(self, fit: Fit, extra: int) -> Array:
        more = self.search.random_start(extra, FAST)
        return dense.concat([fit.theta, more])

    def first_policy(self, heads: int) -> StepPolicy:
        scarce = self.search.settings.small.scarce_equations
        return CAUTIOUS if self.search.equations_per_unknown(heads) < scarce else FAST

    @property
    def first_equations(self) -> float:
        return self.search.settings.small.first_equations

    def stage(
        self,
        name: str,
        theta: Array,
        policy: StepPolicy = FAST,
        problem: AnyExamples | None = None,
        target: float | None = None,
    ) -> StageOutcome:
        return self.search.stage(name, theta, policy, problem, target)
