"""Strategy for large problems: descent on factors of the heads, then Gauss-Newton from its basin.

A step that sees all equations takes seconds, and from random heads dozens of them are needed. So
minibatch descent goes first (`factored/descent.py`), on the factors of the heads and, where the
rank of the attention matrices is known, with projections of the same rank, as multi-head attention
has them. If no such layer explains the outputs the projections are widened to full rank, and
descent goes on. Steps on all factors at once follow (`factored/gauss_newton.py`). What they find is
fitted with projections eliminated, and of any rank, as in small problems: usually a single fit, as
it is exact already.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from onelayer.array.backend import Array
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.factored import convert, descent, model
from onelayer.recovery.factored import gauss_newton as joint
from onelayer.recovery.factored.convert import HalfWhitened
from onelayer.recovery.factored.descent import Descent
from onelayer.recovery.factored.gauss_newton import JointStep
from onelayer.recovery.factored.model import Factors
from onelayer.recovery.gauss_newton.levenberg_marquardt import FAST, StepPolicy
from onelayer.recovery.gauss_newton.stopping import Ending, StageOutcome
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.strategies import cost
from onelayer.recovery.strategies.small import Small


class Large(Small):
    """Heads located by descent, and found by steps on all their factors."""

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
        """Float32 far from a fit; preconditioned unless steps are cautious."""
        return {"preconditioned": policy is FAST, "coarse": True}

    def run(self, heads: int, resumed: Array | None = None) -> StageOutcome:
        """Write the expected cost to the trace, then search."""
        search, problem = self.search, self.search.problem
        examples = min(self.subset_size(heads), problem.examples)
        plan = cost.plan(problem, heads, examples, search.rank, search.settings)
        search.log.write("plan", heads, plan.examples, 1.0, note=str(plan))
        if resumed is not None:
            count = min(self.subset_size(search.heads_in(resumed)), problem.examples)
            few = problem.sample(count)
            resumed = self._found(convert.factors(few, resumed, search.rank), known=True)
        return super().run(heads, resumed)

    def start(self, heads: int, policy: StepPolicy) -> Array:  # noqa: ARG002
        """Heads found by descent and by steps on all factors."""
        search, problem = self.search, self.search.problem
        shape = heads, problem.dim, problem.out_dim
        value_rank = convert.value_rank(search.rank, problem)
        drawn = model.random(
            shape, search.rank, value_rank, problem.constant, search.rng, problem.whitening
        )
        return self._found(drawn)

    def grow(self, fit: Fit, extra: int) -> Array:
        """More heads, from a start of their own: descent finds them all at once."""
        return self.start(fit.heads + extra, FAST)

    def fit(
        self, name: str, theta: Array, heads: int, policy: StepPolicy, attempt: int = 0
    ) -> StageOutcome:
        """As for small problems, but an exact fit to few examples is the end."""
        search, count = self.search, self.search.heads_in(theta)
        while (subset := self.subset(count, attempt)) is not None:
            outcome = self.stage(f"{name}, few examples", theta, policy, subset)
            theta, attempt = outcome.fit.theta, attempt + 1
            if count == heads and (search.log.late() or self._is_exact(outcome)):
                return outcome  # a fit to all examples would only cost
            if outcome.ending is not Ending.STUCK:
                break
        return self.pruned(name, self.stage(name, theta, policy), heads, policy)

    def _found(self, factors: Factors, known: bool = False) -> Array:
        """The heads that descent and steps on all factors find from random or `known` factors."""
        search, numbers = self.search, self.search.settings.large
        few = self._sample(numbers.descent_equations, factors.heads)
        between = HalfWhitened.of(few)
        few, factors = between.examples(few), between.enter(factors) if known else factors
        descended = partial(self._descended, between)
        factors, loss = descended(Descent("descent", factors, few, search.rng))
        factors, loss = self._with_missing_heads(factors, loss, few, descended)
        if factors.value is not None and loss > numbers.narrow_loss and not search.log.spent:
            wider = model.widened(factors)
            found = descended(Descent("wider projections", wider, few, search.rng))
            factors, loss = min(((factors, loss), found), key=lambda one: one[1])
        factors = between.leave(factors)
        if factors.value is not None and not search.log.spent:
            factors = self._stepped(factors)
        return search.of_rank(convert.theta(factors, search.problem))

    def _with_missing_heads(
        self,
        factors: Factors,
        loss: float,
        examples: WhitenedExamples,
        descended: Callable[[Descent], tuple[Factors, float]],
    ) -> tuple[Factors, float]:
        """Draw the head that explains least again, as long as that helps.

        Where descent ends above the basin one or two heads are missing, and others do little or
        are found twice. With the others in place a random head soon finds a missing one.
        """
        search, numbers = self.search, self.search.settings.large
        while numbers.basin_loss < loss <= numbers.narrow_loss and not search.log.spent:
            parts = examples.sample(numbers.redrawn_examples).parts(numbers.part_rows)
            drawn = descent.redrawn(factors, parts, search.rng)
            found = descended(descent.short("a head redrawn", drawn, examples, search.rng))
            if found[1] > numbers.redrawn_share * loss:
                break
            factors, loss = found
        return factors, loss

    def _sample(self, equations: float, heads: int) -> WhitenedExamples:
        """The examples, or a sample in memory with as many equations per unknown."""
        search, problem = self.search, self.search.problem
        count = cost.factored_examples(problem, equations, heads, search.rank)
        if problem.in_memory and count >= problem.examples:
            return problem
        return problem.sample(min(count, problem.examples))

    def _descended(self, between: HalfWhitened, state: Descent) -> tuple[Factors, float]:
        """The factors after descent on half-whitened examples, and their loss."""
        search, first = self.search, state.steps
        search.log.stage = state.name

        def report(state: Descent) -> None:
            note = f"step {state.steps}, rate {state.rate:.1e}"
            factors = between.leave(state.factors)
            self._write(state.name, factors, state.examples, state.loss, note=note)

        found = state.run(report, self._stopped)
        taken = state.steps - first
        rows = float(taken * descent.SETTINGS.rows)
        search.count_operations(taken, 3 * rows * cost.row_operations(found))
        return found, state.loss

    def _stepped(self, factors: Factors) -> Factors:
        """The factors after steps on all of them at once."""
        search = self.search
        few = self._sample(search.settings.large.joint_equations, factors.heads)
        search.log.stage = "all factors"
        parts = few.parts(search.settings.large.part_rows)

        def report(state: JointStep) -> None:
            taken = {"damping": state.damping, "products": state.products}
            self._write("all factors", state.factors, few, state.loss, **taken)
            rows = float(few.examples * few.tokens * (state.products + 3))
            search.count_operations(state.products, 3 * rows * cost.row_operations(factors))

        exact = search.exact_error
        return joint.run(factors, parts, search.tol, search.rng, report, self._stopped, exact)

    def _write(
        self,
        stage: str,
        factors: Factors,
        examples: WhitenedExamples,
        loss: float,
        **more: Any,
    ) -> None:
        """A row of the trace, and a layer for the checkpoint."""
        problem = self.search.problem

        def layer() -> tuple[Array, Array]:
            return convert.theta(factors, problem), convert.weights(factors, problem)

        place = (stage, factors.heads, examples.examples, loss**0.5)
        self.search.note_layer(*place, layer, **more)

    def _stopped(self) -> bool:
        return self.search.log.spent

    def _is_exact(self, outcome: StageOutcome) -> bool:
        """Whether a fit to a subset is exact, and so on held-out examples."""
        if outcome.ending is not Ending.REACHED:
            return False
        fit, factor = outcome.fit, self.search.settings.large.exact_factor
        return self.search.held_out_error(fit) <= factor * max(fit.error, self.search.tol)
