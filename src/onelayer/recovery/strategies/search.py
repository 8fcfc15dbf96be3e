"""Finding the right basin: starts, stages, escapes from bad minima, and the number of heads.

A stage is a run of Levenberg-Marquardt steps that ends by itself (see `Ending`). From a random
start most stages reach an exact fit; the others end in a minimum where some true heads are missing
and others found twice. What helps there, measured on stuck runs (8 dimensions, 4 and 8 heads,
scale 10, four equations per unknown):

    a fresh start with as many heads              15 of 23
    the stuck heads and one or two more, pruned   42 of 46
    a fresh start with one head more, pruned      21 of 23
    half of the heads drawn anew                  16 of 23

So escapes alternate between growing the best stuck heads and fresh starts with a head to spare.
Pruning drops the head that costs least (see `head_swaps.py`), which merges heads found twice.

Large problems do not begin at random: a step costs seconds there, and a random start needs many
times the examples. They begin with heads that correlations of outputs and tokens show (see
`correlations.py`). Where a stage is stuck a weak head is missing, hidden at the start by stronger
ones, and its place is taken by a head that explains next to nothing: correlations of the residuals
show the missing one, and it is put in that place (see `head_swaps.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.recovery.diagnosis import noise
from onelayer.recovery.gauss_newton import levenberg_marquardt, low_rank, varpro
from onelayer.recovery.gauss_newton.batches import Block
from onelayer.recovery.gauss_newton.stopping import Ending, StageOutcome, StoppingRule
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.strategies import correlations, head_swaps, plan
from onelayer.recovery.strategies.checkpoint import Checkpointer
from onelayer.recovery.trace import Log
from onelayer.recovery.whitening import AnyExamples, WhitenedExamples

# Fewer equations than this per unknown and a fit proves nothing, more heads still less.
_FEWEST_EQUATIONS = 1.2
# A first stage sees this many equations per unknown: enough to find the basin, and cheap.
_FIRST_EQUATIONS = 6.0
_LARGE_EQUATIONS = 4.0  # or of a large problem, whose steps are dear, so many
_WORTH_A_STAGE = 1.5  # a stage on few examples pays if all are at least so many times as many
_SCARCE_EQUATIONS = 3.5  # with fewer than this per unknown a first start at random is gentle too
# Examples are too few from this ratio of held-out error to error, above this error, on.
_OVERFITTED, _IN_BASIN = 3.0, 1e-3
_GLANCE = 250  # held-out examples that are enough to see that
_SAME_EXACT = 10.0  # times the error: held-out errors of an exact fit are not larger than that
_SAME_LOSS, _SAME_HEADS = 1e-3, 1e-2  # relative differences within which two minima are one
# A fit with this many times the rounding error of the outputs is exact: computing them in float32
# makes larger errors than rounding them to it once, which is all that was done to coarser ones.
_ARITHMETIC, _ROUNDED, _COARSE_ROUNDING = 5e2, 1.3, 1e-6
_MOST_ROUNDED = 0.1  # outputs that are rounded more than that say too little
_SURELY_GOOD = 0.1  # error below which a fit is in no bad minimum
_JUDGED = 20_000  # examples that stay elsewhere: so many are brought here to tell noise by
# A search that has taken this many seconds, by its operations, and so many products, without an
# end in sight is hopeless. Counted, not timed, so that results do not depend on the machine.
_HOPELESS_SECONDS, _HOPELESS_PRODUCTS = 25.0, 3000
_SECONDS_PER_OPERATION, _SECONDS_PER_CALL = 1 / 2e10, 3e-4
_DISTRUSTED_RESTARTS = 2  # are enough where the examples look like those of another model
_LARGE = 2e10  # floating point operations of a product with S, from which a problem is large
_LOCATED = 3e-2  # heads are found in their span well enough when a step gains less than this
_LOCATED_ROWS = 4.0  # for that so many rows per feature are enough
_REPAIRED = 0.95  # a head that was missing leaves less than this share of the loss
_ELIMINATION = 1e-10  # and so is one this good: the regression loses that where heads coincide


class Doubt(Protocol):
    """A second opinion on an outcome: a better one, or that another model explains the examples."""

    def improved(self, search: Search, outcome: StageOutcome) -> StageOutcome: ...
    @property
    def suspicious(self) -> bool: ...


@dataclass
class Search:
    """The setting of one search: examples, the rank asked for, the error aimed at."""

    problem: AnyExamples
    held_out: WhitenedExamples
    rank: int | None
    tol: float
    rounding: float  # relative rounding error of the outputs as they were given
    restarts: int
    rng: np.random.Generator
    log: Log
    begun: Array | None = None  # heads to go on from, of a search that was ended before
    richer_error: float = np.inf  # least held-out error of a fit with more heads than asked for
    looked: bool = False  # whether a decision has rested on the held-out examples
    judges: WhitenedExamples | None = (
        None  # held-out examples to tell noise by; as above by default
    )
    doubt: Doubt | None = None  # asked once, about a first fit that explains too little
    checkpointer: Checkpointer | None = None  # offered every fit
    patient: bool = False  # whether the search goes on however hopeless it is
    products: int = 0  # with S, so far
    effort: float = 0.0  # seconds that they take, by their operations

    def start(self, heads: int, policy: levenberg_marquardt.StepPolicy) -> Array:
        """Random attention matrices with small scores: all heads near uniform attention."""
        shape = (self.problem.query_dim, heads * self.problem.dim)
        entries = self.rng.standard_normal(shape) * (policy.start_score / self.problem.dim)
        theta = backend.like(entries, self.problem.whitening)
        return low_rank.nearest(theta, self.problem.dim, self.rank)

    def stage(
        self,
        name: str,
        theta: Array,
        policy: levenberg_marquardt.StepPolicy = levenberg_marquardt.FAST,
        problem: AnyExamples | None = None,
        target: float | None = None,
        eager: bool = False,
    ) -> StageOutcome:
        """Steps from `theta` until the stage ends; on all training examples by default.

        An eager stage is left sooner, for something better.
        """
        allowed = low_rank.tangent(theta, self.problem.dim, self.rank)
        heads = int(theta.shape[1] // self.problem.dim)
        dear = self.is_large(heads)
        state = levenberg_marquardt.begin(
            (problem or self.problem).batches(heads),
            theta,
            allowed,
            policy,
            weighted=dear
            and policy is levenberg_marquardt.FAST,  # a gentle search may have a head to spare
            coarse=dear,
        )
        rule = StoppingRule(
            target=self.tol if target is None else target,
            eager=eager,
            scarce=problem is not None,
            exact=self._exact if dear or self.rounding > _COARSE_ROUNDING else 0.0,
        )
        outcome = self._steps(name, state, rule)
        return replace(outcome, state=levenberg_marquardt.in_full(outcome.state))

    def _steps(
        self, name: str, state: levenberg_marquardt.SolverState, rule: StoppingRule
    ) -> StageOutcome:
        losses = [state.fit.loss]
        self._record(name, state)
        while (ending := rule.ending(state, losses)) is None:
            if rule.eager and rule.scarce and self._overfits(state.fit):
                return StageOutcome(state, Ending.OVERFITTED)
            if self.log.spent:
                return StageOutcome(state, Ending.BUDGET)
            if self.hopeless:
                return StageOutcome(state, Ending.STUCK)
            state = levenberg_marquardt.step(state, self.rng, self.log.late, rule.exact)
            self._count(state)
            losses.append(state.fit.loss)
            self._record(name, state)
        if state.fit.error <= self._exact:
            ending = Ending.REACHED
        elif ending is Ending.STATIONARY and self.log.late():  # a step that was broken off
            ending = Ending.BUDGET
        return StageOutcome(state, ending)

    def _record(
        self,
        stage: str,
        state: levenberg_marquardt.SolverState,
        held_out_error: float | None = None,
    ) -> None:
        """Write a row for a step or, with its held-out error, for the end of a stage."""
        fit = state.fit
        if self.checkpointer is not None:
            self.checkpointer.offer(fit)
        self.log.write(
            stage,
            fit.heads,
            fit.batches.examples,
            fit.error,
            damping=state.damping,
            products=state.products if held_out_error is None else 0,
            held_out_error=held_out_error,
        )

    def _count(self, state: levenberg_marquardt.SolverState) -> None:
        """Add a step to the effort: its products, and a fit that costs about three of them."""
        count = state.products + 3
        operations = self._product_operations(state.fit.batches.examples, state.fit.heads)
        self.products += count
        self.effort += count * (_SECONDS_PER_CALL + operations * _SECONDS_PER_OPERATION)

    @property
    def hopeless(self) -> bool:
        """Whether more effort was made than searches that end well take."""
        enough = self.effort > _HOPELESS_SECONDS and self.products > _HOPELESS_PRODUCTS
        return enough and not self.patient

    @property
    def _exact(self) -> float:
        """An error that rounding alone may make."""
        if self.rounding > _COARSE_ROUNDING:
            return min(_ROUNDED * self.rounding, _MOST_ROUNDED)
        return max(_ARITHMETIC * self.rounding, _ELIMINATION)

    def _overfits(self, fit: Fit) -> bool:
        """Whether a fit does far worse on other examples; one that is nearly exact never does."""
        self.looked = True
        others = self.held_out.sample(min(_GLANCE, self.held_out.examples))
        most = _OVERFITTED * fit.error
        return fit.error > _IN_BASIN and varpro.held_out_error(fit, others) > most

    def located(self, heads: int) -> Array:
        """Heads within the span that correlations show, of the rank asked for."""
        self.log.stage = "correlations"
        batches = self.problem.batches(heads)
        found = correlations.span(batches, heads, self.rng, told=self.log.progress)
        shares = found.strengths / (found.strengths[0] or 1.0)
        note = "singular values " + ", ".join(f"{share:.2f}" for share in shares)
        self.log.write("correlations", heads, self.problem.examples, 1.0, note=note)
        rows = self.problem.equations / (self.problem.examples * self.problem.out_dim)
        enough = math.ceil(_LOCATED_ROWS * heads * self.problem.dim / rows)
        few = self.problem.sample(min(enough, self.problem.examples)).batches(heads)
        allowed = correlations.within(found, few)
        state = levenberg_marquardt.begin(few, found.drawn(heads, self.rng), allowed, coarse=True)
        outcome = self._steps("within the span", state, StoppingRule(self.tol, least_gain=_LOCATED))
        return low_rank.nearest(outcome.state.fit.theta, self.problem.dim, self.rank)

    def first_heads(self, heads: int, policy: levenberg_marquardt.StepPolicy) -> Array:
        """Where to begin: blindly where steps are cheap, else where correlations say."""
        return self.located(heads) if self.is_large(heads) else self.start(heads, policy)

    def is_large(self, heads: int) -> bool:
        """Whether steps are so dear that the first heads are not to be a blind guess."""
        examples = min(self._holding(_FIRST_EQUATIONS, heads), self.problem.examples)
        return self._product_operations(examples, heads) > _LARGE

    def _product_operations(self, examples: int, heads: int) -> float:
        """Floating point operations of a product with S."""
        dim, out_dim = self.problem.dim, self.problem.out_dim
        return 4.0 * examples * self.problem.tokens * heads * dim * (dim + 2 * out_dim)

    def run(
        self,
        name: str,
        theta: Array,
        heads: int,
        policy: levenberg_marquardt.StepPolicy,
        attempt: int = 0,
    ) -> StageOutcome:
        """A stage on few examples where there are many, then on all; pruned to `heads` at the end.

        The stage on few examples goes on to the end, which without noise leaves nothing to do for
        all of them. Where it is stuck, or fits its examples alone, it sees twice as many, and so
        does each further attempt: more examples, fewer bad minima.
        """
        found = int(theta.shape[1] // self.problem.dim)
        large = policy is levenberg_marquardt.FAST and self.is_large(found)
        staged: Callable[..., StageOutcome] = self.repaired_stage if large else self.stage
        while (part := self._few(found, attempt)) is not None:
            few = staged(f"{name}, few examples", theta, policy, part, self.tol / 3)
            theta, policy, attempt = few.state.fit.theta, levenberg_marquardt.FAST, attempt + 1
            if large and found == heads and (self.log.late() or self._is_exact(few)):
                return few  # a fit to all of them would only cost
            if few.ending not in (Ending.STUCK, Ending.OVERFITTED):
                break
        outcome = staged(name, theta, policy)
        if large and outcome.ending is Ending.STUCK:
            outcome = self.stage(name, outcome.state.fit.theta, policy)  # no longer eager
        if outcome.state.fit.heads > heads:
            self.richer_error = min(self.richer_error, self.decide(name, outcome))
            outcome = self.stage(
                f"{name}, pruned", head_swaps.prune(outcome.state.fit, heads), policy
            )
        return outcome

    def _is_exact(self, few: StageOutcome) -> bool:
        """Whether a fit to few examples is exact, and as much so on others."""
        if few.ending is not Ending.REACHED:
            return False
        fit = few.state.fit
        most = _SAME_EXACT * max(fit.error, self.tol)
        self.looked = True
        return varpro.held_out_error(fit, self.held_out) <= most

    def repaired_stage(
        self,
        name: str,
        theta: Array,
        policy: levenberg_marquardt.StepPolicy = levenberg_marquardt.FAST,
        problem: AnyExamples | None = None,
        target: float | None = None,
    ) -> StageOutcome:
        """A stage that puts in a missing head whenever it is stuck, as long as that helps."""
        outcome = self.stage(name, theta, policy, problem, target, eager=True)
        while outcome.ending is Ending.STUCK and not self.log.spent:
            fit, told = outcome.state.fit, self.log.progress
            self.log.stage = "correlations of what is left over"
            head = head_swaps.missing(fit, self.problem, self.rank, self.rng, told)
            repaired = head_swaps.repaired(fit, head)
            if repaired is None:
                break
            following = self.stage(
                f"{name}, a head replaced", repaired, policy, problem, target, eager=True
            )
            before, after = outcome.state.fit.loss, following.state.fit.loss
            outcome = following if after < before else outcome
            if after > _REPAIRED * before:
                break
        return outcome

    def _few(self, heads: int, attempt: int = 0) -> WhitenedExamples | None:
        """As few examples as a first stage takes; None if all are hardly more."""
        count = self._enough(heads, attempt)
        worthwhile = _WORTH_A_STAGE * count <= self.problem.examples
        return self.problem.sample(count) if worthwhile else None

    def _enough(self, heads: int, attempt: int = 0) -> int:
        """How many examples a first stage takes."""
        equations = _LARGE_EQUATIONS if self.is_large(heads) else _FIRST_EQUATIONS
        return self._holding(equations * 2**attempt, heads)

    def _holding(self, equations: float, heads: int) -> int:
        """The number of examples that hold so many equations per unknown."""
        unknowns = self.problem.unknowns(heads, self.rank)
        per_example = self.problem.equations / self.problem.examples
        return int(np.ceil(equations * unknowns / per_example))

    def equations_per_unknown(self, heads: int) -> float:
        """How well so many heads are determined by counting."""
        return self.problem.equations / self.problem.unknowns(heads, self.rank)

    def known_heads(self, heads: int) -> StageOutcome:
        """The best outcome for a known number of heads, over a first start and escapes."""
        large = self.is_large(heads)
        scarce = self.equations_per_unknown(heads) < _SCARCE_EQUATIONS
        policy = levenberg_marquardt.CAUTIOUS if scarce and not large else levenberg_marquardt.FAST
        if large:
            examples = min(self._enough(heads), self.problem.examples)
            expected = plan.plan(self.problem, heads, examples)
            self.log.write("plan", heads, examples, 1.0, note=str(expected))
        if self.begun is None:
            first = self.run("start", self.first_heads(heads, policy), heads, policy)
        else:
            first = self.run("resumed", self.begun, heads, policy)
        hopeless = self.equations_per_unknown(heads) < 1
        return first if hopeless else self.escapes(first)

    def escapes(self, best: StageOutcome) -> StageOutcome:
        """Improve on an outcome by growing it and by fresh starts, until it is explained.

        What is left over counts as noise once growing could not improve on it, a fresh start has
        led to the same heads again (or growing has, if little is left over), fits with more heads
        are no better on unseen examples, and the residuals know nothing of the inputs. If they do
        know something, and another attempt leads to these heads once more, the model is wrong.
        """
        heads, restarts = best.state.fit.heads, self.restarts
        if self.doubt is not None and not best.solved and not self.log.spent:
            best = self.doubt.improved(self, best)
            if best.misfit:
                return best
            restarts = min(restarts, _DISTRUSTED_RESTARTS) if self.doubt.suspicious else restarts
        grown = refused = False
        for attempt in range(1, restarts + 1):
            if best.solved or self.log.spent or self.hopeless:
                break
            spare = 1 + attempt // 2 % 2
            if self.equations_per_unknown(heads + spare) < _FEWEST_EQUATIONS:
                spare = 0
            grow = attempt % 2 == 1 and spare > 0
            if grow:
                name, theta = f"grow {attempt}", self.grown(best.state.fit, spare)
            else:
                name, theta = (
                    f"restart {attempt}",
                    self.first_heads(heads + spare, levenberg_marquardt.CAUTIOUS),
                )
            outcome = self.run(name, theta, heads, levenberg_marquardt.CAUTIOUS, attempt)
            grown = grown or grow or spare == 0
            same = self.same(best, outcome)
            # Bad minima leave far more than this: there heads that grow back are enough.
            again = same and grown and (not grow or best.state.fit.error < _SURELY_GOOD)
            if again and refused:
                return replace(best, misfit=True)
            if again:
                # Asked once for a minimum: asked often enough, the test would pass by chance.
                refused = not self.noise_remains(best.state.fit)
                best = replace(best, noise=not refused)
            elif outcome.state.fit.loss < best.state.fit.loss:
                grown, refused = grown and same, refused and same
                best = outcome
        if self.log.spent and not best.solved:
            best = StageOutcome(best.state, Ending.BUDGET)
        return best

    def polished(self, theta: Array, may_grow: bool) -> StageOutcome:
        """Steps from heads that are nearly right, to an exact fit or to noise.

        Where that fails one more head is tried: it is taken if it explains everything and the
        number of heads `may_grow`, and otherwise shows whether there were too few.
        """
        outcome = self.stage("polish", theta)
        heads = outcome.state.fit.heads
        enough = self.equations_per_unknown(heads + 1) > _FEWEST_EQUATIONS
        if not outcome.solved and enough and not self.log.spent:
            name = "polish, one more head"
            richer = self.stage(name, self.grown(outcome.state.fit, 1))
            self.richer_error = self.decide(name, richer)
            if richer.solved and may_grow:
                return richer
        if outcome.solved or self.log.spent:
            return outcome
        return StageOutcome(outcome.state, outcome.ending, self.noise_remains(outcome.state.fit))

    def noise_remains(self, fit: Fit) -> bool:
        """Whether neither more heads nor the inputs explain what a fit leaves over."""
        self.looked = True
        enough_heads = varpro.held_out_error(fit, self.held_out) < 1.1 * self.richer_error
        return enough_heads and noise.is_noise(fit, *self._judged(fit), self.rng)

    def evidence(self, fit: Fit) -> list[noise.Evidence]:
        """How well features of the inputs predict what a fit leaves over."""
        return noise.evidence(fit, *self._judged(fit), self.rng)

    def _judged(self, fit: Fit) -> tuple[list[Block], Sequence[Block]]:
        """The examples whose residuals are looked at: those of a fit, and held-out ones.

        Of examples that stay elsewhere a sample is brought here.
        """
        others = (self.judges or self.held_out).blocks(fit.heads)
        if isinstance(self.problem, WhitenedExamples):
            return [block for chunk in fit.batches.chunks.collect() for block in chunk], others
        return list(self.problem.sample(_JUDGED).blocks(fit.heads)), others

    def same(self, first: StageOutcome, second: StageOutcome) -> bool:
        """Whether two outcomes are one minimum: equal losses, equal heads."""
        fits = first.state.fit, second.state.fit
        if abs(fits[0].loss - fits[1].loss) > _SAME_LOSS * fits[0].loss:
            return False
        layers = [self.problem.in_whitened_coordinates(fit.theta, fit.weights) for fit in fits]
        return bool(layers[1].distance(layers[0]).attention.max() < _SAME_HEADS)

    def grown(self, fit: Fit, extra: int) -> Array:
        """The heads of a fit and `extra` ones beside them: random, or where residuals say."""
        xp = backend.namespace(fit.theta)
        if self.is_large(fit.heads):
            found = correlations.span(fit.batches, extra, self.rng, fit.residuals)
            more = low_rank.nearest(found.drawn(extra, self.rng), self.problem.dim, self.rank)
        else:
            more = self.start(extra, levenberg_marquardt.FAST)
        return xp.concat([fit.theta, more], axis=1)

    def unknown_heads(self) -> StageOutcome:
        """The smallest number of heads that explains the examples.

        Heads are added, one and then half as many again, until the examples are explained or the
        held-out error no longer falls. Then heads are taken away again, the cheapest first, as
        long as the rest explains the examples as well. Every decision leaves its held-out error in
        the trace.
        """
        policy = levenberg_marquardt.FAST
        heads, name, theta = 1, "1 head", self.begun
        if theta is None:
            theta = self.start(heads, policy)
        else:
            heads = int(theta.shape[1] // self.problem.dim)
            name = f"resumed with {heads} head{'s' * (heads > 1)}"
        best = self.run(name, theta, heads, policy)
        best_error = self.decide(name, best)
        failures = 0
        while not best.solved and not self.log.spent and failures < 2:
            heads = best.state.fit.heads + max(1, best.state.fit.heads // 2) + failures
            if self.equations_per_unknown(heads) < _FEWEST_EQUATIONS:
                break
            name = f"{heads} heads"
            theta = self.grown(best.state.fit, heads - best.state.fit.heads)
            outcome = self.run(name, theta, heads, policy, attempt=failures)
            error = self.decide(name, outcome)
            if outcome.solved or error < 0.95 * best_error:
                best, best_error, failures = outcome, error, 0
            else:
                failures += 1
        best = self.fewest_heads(best, best_error)
        return best if best.solved else self.escapes(best)

    def fewest_heads(self, best: StageOutcome, best_error: float) -> StageOutcome:
        """Take heads away as long as the examples stay explained."""
        while best.state.fit.heads > 1 and not self.log.spent:
            heads = best.state.fit.heads - 1
            name = f"without one: {heads} head{'s' * (heads > 1)}"
            outcome = self.stage(name, head_swaps.prune(best.state.fit, heads))
            error = self.decide(name, outcome)
            if best.ending is Ending.REACHED:
                as_good = outcome.ending is Ending.REACHED
            else:
                as_good = error < 1.02 * best_error
            if not as_good:
                break
            best, best_error = outcome, error
        return best

    def decide(self, name: str, outcome: StageOutcome) -> float:
        """The held-out error of an outcome, written to the trace as the ground of a decision."""
        fit = outcome.state.fit
        error = varpro.held_out_error(fit, self.held_out)
        self.looked = True
        self._record(f"{name}: held out", outcome.state, held_out_error=error)
        return error
