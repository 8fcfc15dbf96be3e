"""Strategy for large problems: a start from correlations, and replacement of missing heads.

A step takes seconds, and a random start needs many times the examples. So the first heads are those
that correlations of outputs and tokens show (see `correlations.py`). Where a stage is stuck a weak
head is missing, hidden at the start by stronger ones, and another head explains next to nothing.
Correlations of the residuals show the missing head, which then replaces that one (see
`head_swaps.py`).
"""

from __future__ import annotations

import math

from onelayer.array.backend import Array
from onelayer.heads import dense
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.gauss_newton import levenberg_marquardt
from onelayer.recovery.gauss_newton.levenberg_marquardt import FAST, StepPolicy
from onelayer.recovery.gauss_newton.stopping import Ending, StageOutcome, StoppingRule
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.strategies import correlations, cost, head_swaps
from onelayer.recovery.strategies.small import Small


class Large(Small):
    """Heads located by correlations; stages that end early to replace missing heads."""

    tries_other_models = False

    @property
    def first_equations(self) -> float:
        return self.search.settings.large.first_equations

    @property
    def exact_error(self) -> float:
        return self.search.exact_error

    def first_policy(self, equations: float) -> StepPolicy:  # noqa: ARG002
        return FAST

    def solver_options(self, policy: StepPolicy) -> dict[str, bool]:
        """Float32 far from a fit; preconditioned unless steps are cautious, with a spare head."""
        return {"preconditioned": policy is FAST, "coarse": True}

    def run(self, heads: int, resumed: Array | None = None) -> StageOutcome:
        """Write the expected cost to the trace, then search."""
        problem = self.search.problem
        examples = min(self.subset_size(heads), problem.examples)
        plan = cost.plan(problem, heads, examples)
        self.search.log.write("plan", heads, examples, 1.0, note=str(plan))
        return super().run(heads, resumed)

    def start(self, heads: int, policy: StepPolicy) -> Array:  # noqa: ARG002
        """Heads within the span that correlations show, of the rank asked for."""
        search, problem = self.search, self.search.problem
        search.log.stage = "correlations"
        batches, progress = problem.batches(heads), search.log.progress
        found = correlations.span(batches, heads, search.rng, progress=progress)
        shares = found.strengths / (found.strengths[0] or 1.0)
        note = "singular values " + ", ".join(f"{share:.2f}" for share in shares)
        search.log.write("correlations", heads, problem.examples, 1.0, note=note)
        rows = problem.equations / (problem.examples * problem.out_dim)
        numbers = search.settings.large
        enough = math.ceil(numbers.located_rows * heads * problem.dim / rows)
        few = problem.sample(min(enough, problem.examples)).batches(heads)
        allowed, theta = found.subspace(few), found.drawn(heads, search.rng)
        state = levenberg_marquardt.begin(few, theta, allowed, coarse=True)
        rule = StoppingRule(search.tol, least_gain=numbers.located_gain)
        outcome = search.steps("within the span", state, rule)
        return search.of_rank(outcome.fit.theta)

    def grow(self, fit: Fit, extra: int) -> Array:
        rng = self.search.rng
        found = correlations.span(fit.batches, extra, rng, fit.residuals)
        return dense.concat([fit.theta, self.search.of_rank(found.drawn(extra, rng))])

    def fit(
        self, name: str, theta: Array, heads: int, policy: StepPolicy, attempt: int = 0
    ) -> StageOutcome:
        """As for small problems, with missing heads replaced if steps are fast."""
        if policy is not FAST:
            return super().fit(name, theta, heads, policy, attempt)
        search, count = self.search, self.search.heads_in(theta)
        target = search.tol / search.settings.escape.subset_precision
        while (subset := self.subset(count, attempt)) is not None:
            outcome = self.repaired_stage(f"{name}, few examples", theta, subset, target)
            theta, attempt = outcome.fit.theta, attempt + 1
            if count == heads and (search.log.late() or self._is_exact(outcome)):
                return outcome  # a fit to all examples would only cost
            if outcome.ending not in (Ending.STUCK, Ending.OVERFITTED):
                break
        outcome = self.repaired_stage(name, theta)
        if outcome.ending is Ending.STUCK:
            outcome = self.stage(name, outcome.fit.theta)  # without ending early
        return self.pruned(name, outcome, heads, policy)

    def repaired_stage(
        self,
        name: str,
        theta: Array,
        problem: WhitenedExamples | None = None,
        target: float | None = None,
    ) -> StageOutcome:
        """A stage that replaces a head whenever it is stuck, as long as that helps."""
        search = self.search
        outcome = self.stage(name, theta, FAST, problem, target, eager=True)
        while outcome.ending is Ending.STUCK and not search.log.spent:
            fit, log = outcome.fit, search.log
            log.stage = "correlations of residuals"
            head = head_swaps.missing(fit, search.problem, search.rank, search.rng, log.progress)
            repaired = head_swaps.repaired(fit, head)
            if repaired is None:
                break
            title = f"{name}, a head replaced"
            following = self.stage(title, repaired, FAST, problem, target, eager=True)
            outcome = following if following.fit.loss < fit.loss else outcome
            if following.fit.loss > search.settings.large.replaced_share * fit.loss:
                break
        return outcome

    def _is_exact(self, outcome: StageOutcome) -> bool:
        """Whether a fit to a subset is exact, and so on held-out examples."""
        if outcome.ending is not Ending.REACHED:
            return False
        fit, factor = outcome.fit, self.search.settings.large.exact_factor
        return self.search.held_out_error(fit) <= factor * max(fit.error, self.search.tol)
