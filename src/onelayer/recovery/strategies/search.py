"""Levenberg-Marquardt steps under a stopping rule and a budget, and tests of what they found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from onelayer.array.backend import Array
from onelayer.heads import dense, low_rank
from onelayer.recovery.diagnosis import noise
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.gauss_newton import levenberg_marquardt, varpro
from onelayer.recovery.gauss_newton.batches import Block
from onelayer.recovery.gauss_newton.levenberg_marquardt import SolverState
from onelayer.recovery.gauss_newton.stopping import Ending, StageOutcome, StoppingRule
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.strategies import cost, settings
from onelayer.recovery.strategies.checkpoint import Checkpointer
from onelayer.recovery.strategies.settings import Settings
from onelayer.recovery.trace import Log


@dataclass
class Search:
    """Examples, tolerances, random numbers and budget of a search, and its effort so far."""

    problem: WhitenedExamples  # the training examples
    held_out: WhitenedExamples
    rank: int | None
    tol: float
    rounding: float  # relative rounding error of the outputs as given
    rng: np.random.Generator
    log: Log
    noise_examples: WhitenedExamples | None = None  # for noise tests; `held_out` if None
    checkpointer: Checkpointer | None = None
    patient: bool = False  # whether to continue a search that looks hopeless
    settings: Settings = field(default_factory=lambda: settings.DEFAULT)
    richer_error: float = np.inf  # smallest held-out error of a fit with more heads than asked for
    used_validation: bool = False  # whether a decision depended on the held-out examples
    products: int = 0  # with the Gauss-Newton matrix, so far
    effort: float = 0.0  # seconds that these take, estimated from their operations

    def of_rank(self, theta: Array) -> Array:
        """The nearest attention matrices of the rank asked for."""
        return low_rank.nearest(theta, self.problem.dim, self.rank)

    def steps(self, name: str, state: SolverState, rule: StoppingRule) -> StageOutcome:
        """Take steps until the rule, the budget or the effort ends them."""
        losses = [state.fit.loss]
        self._record(name, state)
        while (ending := rule.ending(state, losses)) is None:
            if self.log.spent:
                return StageOutcome(state, Ending.BUDGET)
            if self.hopeless:
                return StageOutcome(state, Ending.STUCK)
            state = levenberg_marquardt.step(
                state, self.rng, self.log.late, rule.exact, rule.target
            )
            self._count(state)
            losses.append(state.fit.loss)
            self._record(name, state)
        if state.fit.error <= self.exact_error:
            ending = Ending.REACHED
        elif ending is Ending.STATIONARY and self.log.late():  # the time ran out within the step
            ending = Ending.BUDGET
        return StageOutcome(state, ending)

    def _record(self, stage: str, state: SolverState, held_out_error: float | None = None) -> None:
        """Write a row for a step or, with its held-out error, for the end of a stage."""
        fit, damping = state.fit, state.damping
        if self.checkpointer is not None:
            self.checkpointer.offer(fit)
        place = (stage, fit.heads, fit.batches.examples, fit.error)
        products = state.products if held_out_error is None else 0
        self.log.write(*place, damping=damping, products=products, held_out_error=held_out_error)

    def note_layer(
        self,
        stage: str,
        heads: int,
        examples: int,
        error: float,
        layer: Callable[[], tuple[Array, Array]],
        *,
        damping: float = 0.0,
        products: int = 0,
        note: str = "",
    ) -> None:
        """Write a row for a layer that is no fit: its theta and weights, if they are needed."""
        if self.checkpointer is not None:
            self.checkpointer.offer_layer(error, examples, layer)
        place = (stage, heads, examples, error)
        self.log.write(*place, damping=damping, products=products, note=note)

    def count_operations(self, products: int, operations: float) -> None:
        """Add products, or other work on the examples, to the effort."""
        self.products += products
        self.effort += operations * self.settings.stage.seconds_per_operation

    def _count(self, state: SolverState) -> None:
        """Add a step to the effort: its products, and a fit that costs about three of them."""
        numbers, count, fit = self.settings.stage, state.products + 3, state.fit
        operations = cost.product_operations(self.problem, fit.batches.examples, fit.heads)
        seconds = numbers.seconds_per_call + operations * numbers.seconds_per_operation
        self.products += count
        self.effort += count * seconds

    @property
    def hopeless(self) -> bool:
        """Whether the search took more effort than searches that end well."""
        numbers = self.settings.stage
        much = self.effort > numbers.hopeless_seconds and self.products > numbers.hopeless_products
        return much and not self.patient

    @property
    def exact_error(self) -> float:
        """An error that rounding alone may cause."""
        numbers = self.settings.stage
        if self.rounding > numbers.coarse_rounding:
            return min(numbers.rounding_factor * self.rounding, numbers.largest_rounding)
        return max(numbers.arithmetic_factor * self.rounding, numbers.elimination_error)

    def heads_in(self, theta: Array) -> int:
        return dense.count(theta, self.problem.dim)

    def equations_per_unknown(self, heads: int) -> float:
        return self.problem.equations / self.problem.unknowns(heads, self.rank)

    def held_out_error(self, fit: Fit) -> float:
        """The error on the held-out examples, on which a decision depends."""
        self.used_validation = True
        return varpro.held_out_error(fit, self.held_out)

    def validate(self, name: str, outcome: StageOutcome) -> float:
        """The held-out error of an outcome, with a row in the trace."""
        error = self.held_out_error(outcome.fit)
        self._record(f"{name}: held out", outcome.state, held_out_error=error)
        return error

    def validate_richer(self, name: str, outcome: StageOutcome) -> None:
        """Note the held-out error of an outcome with more heads than asked for."""
        self.richer_error = min(self.richer_error, self.validate(name, outcome))

    def noise_remains(self, fit: Fit) -> bool:
        """Whether neither more heads nor the inputs explain the residuals of a fit."""
        best = self.held_out_error(fit) < self.settings.stage.richer_factor * self.richer_error
        return best and noise.is_noise(fit, *self._residual_examples(fit), self.rng)

    def evidence(self, fit: Fit) -> dict[str, float]:
        """How well features of the inputs predict the residuals of a fit: Student's t by kind."""
        return noise.evidence(fit, *self._residual_examples(fit), self.rng)[0]

    def _residual_examples(self, fit: Fit) -> tuple[list[Block], Sequence[Block]]:
        """Training and held-out examples whose residuals are tested; a sample if streamed."""
        others = (self.noise_examples or self.held_out).blocks(fit.heads)
        if self.problem.in_memory:
            return [block for chunk in fit.batches.chunks.collect() for block in chunk], others
        sample = self.problem.sample(self.settings.stage.residual_examples)
        return list(sample.blocks(fit.heads)), others
