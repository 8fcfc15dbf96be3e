"""Strategy for small problems: random starts, and escapes from bad minima.

From a random start most stages reach an exact fit. The others end in a minimum where some true
heads are missing and others are found twice. What helps there, measured on stuck runs (8
dimensions, 4 and 8 heads, scale 10, four equations per unknown):

    a fresh start with the same number of heads    15 of 23
    the stuck heads and one or two more, pruned    42 of 46
    a fresh start with one head more, pruned       21 of 23
    half of the heads drawn again                  16 of 23

So escapes alternate between growing the best stuck heads and fresh starts with a spare head.
Pruning drops the head that costs least, which merges heads that were found twice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.heads import dense, low_rank
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.gauss_newton import levenberg_marquardt
from onelayer.recovery.gauss_newton.levenberg_marquardt import CAUTIOUS, FAST, StepPolicy
from onelayer.recovery.gauss_newton.stopping import Ending, StageOutcome, StoppingRule
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.strategies import cost, pruning
from onelayer.recovery.strategies.search import Search

# Asked once about a first fit that explains too little. Returns a better outcome or the same one,
# and whether the examples look like those of another model.
Review: TypeAlias = Callable[["Small", StageOutcome], tuple[StageOutcome, bool]]


@dataclass
class Small:
    """Finds a known number of heads. Other strategies use its parts, and `Large` replaces some."""

    search: Search
    restarts: int = 0
    review: Review | None = None
    tries_other_models: ClassVar[bool] = True  # in a review: steps are cheap enough

    def run(self, heads: int, resumed: Array | None = None) -> StageOutcome:
        """The best outcome over a first start, or resumed heads, and escapes."""
        equations = self.search.equations_per_unknown(heads)
        policy = self.first_policy(equations)
        theta = self.start(heads, policy) if resumed is None else resumed
        first = self.fit("start" if resumed is None else "resumed", theta, heads, policy)
        return first if equations < 1 else self.escape(first)

    def first_policy(self, equations: float) -> StepPolicy:
        """Cautious steps if there are few equations per unknown."""
        return CAUTIOUS if equations < self.search.settings.small.scarce_equations else FAST

    def start(self, heads: int, policy: StepPolicy) -> Array:
        """Random attention matrices with small scores: all heads near uniform attention."""
        problem = self.search.problem
        entries = dense.random(heads, problem.dim, problem.constant, self.search.rng)
        small = entries * (policy.start_score / problem.dim)
        return self.search.of_rank(backend.like(small, problem.whitening))

    def grow(self, fit: Fit, extra: int) -> Array:
        """The attention matrices of a fit, and of `extra` random heads."""
        return dense.concat([fit.theta, self.start(extra, FAST)])

    def stage(
        self,
        name: str,
        theta: Array,
        policy: StepPolicy = FAST,
        problem: WhitenedExamples | None = None,
        target: float | None = None,
    ) -> StageOutcome:
        """Take steps from `theta` until the stage ends, on all training examples by default."""
        search = self.search
        batches = (problem or search.problem).batches(search.heads_in(theta))
        space = low_rank.tangent(theta, search.problem.dim, search.rank)
        state = levenberg_marquardt.begin(
            batches, theta, space, policy, **self.solver_options(policy)
        )
        rule = StoppingRule(
            target=search.tol if target is None else target,
            exact=self.exact_error,
        )
        outcome = search.steps(name, state, rule)
        return replace(outcome, state=levenberg_marquardt.in_full(outcome.state))

    def solver_options(self, policy: StepPolicy) -> dict[str, bool]:  # noqa: ARG002
        """Options of the solver in a stage of these steps: plain steps in float64."""
        return {}

    @property
    def exact_error(self) -> float:
        """The error at which a stage ends; 0 to continue until no step helps."""
        rounded = self.search.rounding > self.search.settings.stage.coarse_rounding
        return self.search.exact_error if rounded else 0.0

    def fit(
        self, name: str, theta: Array, heads: int, policy: StepPolicy, attempt: int = 0
    ) -> StageOutcome:
        """Stages on subsets of the examples, then on all; pruned to `heads` in the end.

        A stage on a subset runs to the end, which without noise leaves nothing to do for all
        examples. Where it is stuck the subset is doubled, and so it is for each
        further attempt: more examples, fewer bad minima.
        """
        count = self.search.heads_in(theta)
        target = self.search.tol / self.search.settings.escape.subset_precision
        while (subset := self.subset(count, attempt)) is not None:
            outcome = self.stage(f"{name}, few examples", theta, policy, subset, target)
            theta, policy, attempt = outcome.fit.theta, FAST, attempt + 1
            if outcome.ending is not Ending.STUCK:
                break
        return self.pruned(name, self.stage(name, theta, policy), heads, policy)

    def pruned(
        self, name: str, outcome: StageOutcome, heads: int, policy: StepPolicy
    ) -> StageOutcome:
        """The outcome with spare heads dropped, and a stage from the others."""
        if outcome.fit.heads <= heads:
            return outcome
        self.search.validate_richer(name, outcome)
        return self.stage(f"{name}, pruned", pruning.prune(outcome.fit, heads), policy)

    def subset(self, heads: int, attempt: int = 0) -> WhitenedExamples | None:
        """Subset of examples for a first stage, or None if it would be nearly all of them."""
        problem, numbers = self.search.problem, self.search.settings.escape
        count = self.subset_size(heads, attempt)
        return problem.sample(count) if numbers.worthwhile * count <= problem.examples else None

    def subset_size(self, heads: int, attempt: int = 0) -> int:
        """The number of examples of a first stage; each further attempt doubles it."""
        search, equations = self.search, self.first_equations * 2**attempt
        return cost.examples_for(search.problem, equations, heads, search.rank)

    @property
    def first_equations(self) -> float:
        """Equations per unknown in a first stage."""
        return self.search.settings.small.first_equations

    def escape(self, best: StageOutcome) -> StageOutcome:
        """Improve an outcome by growing it and by fresh starts, until the examples are explained.

        The residuals count as noise once growing did not improve the fit, a fresh start led to the
        same heads again (or growing did, if little is left), fits with more heads are no better on
        held-out examples, and the inputs do not predict the residuals. If they do, and another
        attempt leads to these heads once more, the model is wrong.
        """
        search, restarts = self.search, self.restarts
        numbers = search.settings.escape
        if self.review is not None and not best.solved and not search.log.spent:
            best, suspicious = self.review(self, best)
            if best.misfit:
                return best
            restarts = min(restarts, numbers.suspicious_restarts) if suspicious else restarts
        grown = refused = False
        for attempt in range(1, restarts + 1):
            if best.solved or search.log.spent or search.hopeless:
                break
            outcome, grow, spare = self._attempt(best.fit, attempt)
            grown = grown or grow or not spare
            same = self._same(best, outcome)
            again = same and grown and (not grow or best.fit.error < numbers.good_error)
            if again and refused:
                return replace(best, misfit=True)
            if again:
                # Tested once per minimum: repeated often enough, the test would pass by chance.
                refused = not search.noise_remains(best.fit)
                best = replace(best, noise=not refused)
            elif outcome.fit.loss < best.fit.loss:
                grown, refused = grown and same, refused and same
                best = outcome
        if search.log.spent and not best.solved:
            best = StageOutcome(best.state, Ending.BUDGET)
        return best

    def _attempt(self, fit: Fit, attempt: int) -> tuple[StageOutcome, bool, int]:
        """An escape from a fit: its outcome, whether the fit was grown, and the spare heads."""
        heads, spare = fit.heads, 1 + attempt // 2 % 2
        fewest = self.search.settings.escape.fewest_equations
        if self.search.equations_per_unknown(heads + spare) < fewest:
            spare = 0
        grow = attempt % 2 == 1 and spare > 0
        if grow:
            name, theta = f"grow {attempt}", self.grow(fit, spare)
        else:
            name, theta = f"restart {attempt}", self.start(heads + spare, CAUTIOUS)
        return self.fit(name, theta, heads, CAUTIOUS, attempt), grow, spare

    def _same(self, first: StageOutcome, second: StageOutcome) -> bool:
        """Whether two outcomes are the same minimum: equal losses, equal heads."""
        problem, numbers = self.search.problem, self.search.settings.escape
        fits = first.fit, second.fit
        if abs(fits[0].loss - fits[1].loss) > numbers.same_loss * fits[0].loss:
            return False
        layers = [problem.in_whitened_coordinates(fit.theta, fit.weights) for fit in fits]
        return bool(layers[1].distance(layers[0]).attention.max() < numbers.same_heads)
