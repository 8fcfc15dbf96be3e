"""The six phases of the provable learner, as steps on one explicit state.

    1  crude sum of the projections       projection_sum.crude
    2  sculpt a body around the heads     sculpt.sculpt
    3  refine the sum                     projection_sum.refined
    4  sculpt again                       sculpt.sculpt
    5  extract the heads' affine space    affine_hull.extract
    6  solve for heads and projections    candidates.solve

(Chen and Li, arXiv 2402.04084.) Phases 3 and 4 are repeated while the sum is poor and gets much
better by it. A phase that cannot go on says why, and the state keeps what was reached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from onelayer.recovery.phases import affine_hull, candidates, projection_sum
from onelayer.recovery.phases.affine_hull import Space
from onelayer.recovery.phases.candidates import Found
from onelayer.recovery.phases.examples import Examples
from onelayer.recovery.phases.projection_sum import Estimate
from onelayer.recovery.phases.sculpt import Sculpture, sculpt
from onelayer.recovery.reasons import Reason
from onelayer.recovery.trace import Log
from onelayer.recovery.whitening import WhitenedExamples

# Phases 3 and 4 are repeated while the sum is worse than this, and gets better by this factor.
_MOST_ROUNDS, _GOOD_SUM, _WORTHWHILE = 4, 0.005, 0.7
_FEWEST_IN_PROGRAM = 1024  # slabs of the quadratic program, or four per unknown


@dataclass(frozen=True)
class Measurement:
    """What a phase estimated: from how many examples, with which error, in words."""

    examples: int
    error: float
    note: str


@dataclass(frozen=True, eq=False)
class State:
    """What the phases know so far; `refusal` says why they cannot go on."""

    examples: Examples
    fitted: WhitenedExamples  # some of the examples in memory, for the regressions of phase 6
    other: WhitenedExamples  # further ones, to choose by
    heads: int | None  # None while their number is not known
    sum: Estimate | None = None
    sculpture: Sculpture | None = None
    space: Space | None = None
    found: Found | None = None
    refusal: Reason | None = None


Phase = Callable[[State], tuple[State, Measurement]]
Watch = Callable[[str, State], None]


def run(state: State, log: Log, watch: Watch = lambda *_: None) -> State:
    """All six phases, or as many as can be done; each writes its row to the trace.

    `watch` is called after every phase with its name and the state.
    """

    def take(number: int, name: str, phase: Phase, state: State) -> State:
        name = f"phase {number}: {name}"
        taken = _take(number, name, phase, state, log)
        if taken is not state:
            watch(name, taken)
        return taken

    def rounded(state: State) -> State:
        state = take(3, "refined sum", refined_sum, state)
        return take(4, "sculpt again", sculpted, state)

    state = take(1, "crude sum of projections", crude_sum, state)
    state = rounded(take(2, "sculpt", sculpted, state))
    for _ in range(_MOST_ROUNDS - 1):
        if not _GOOD_SUM < _error(state) < math.inf:
            break
        before, state = state, rounded(state)
        gained = _error(state) < _WORTHWHILE * _error(before)
        state = min(before, state, key=_error)  # a round that failed or did harm is forgotten
        if not gained:
            break
    return take(6, "candidates", solved, take(5, "span", extracted, state))


def _take(number: int, name: str, phase: Phase, state: State, log: Log) -> State:
    """One phase, unless an earlier one refused or time is up."""
    if state.refusal is not None:
        return state
    if log.spent:
        return replace(state, refusal=Reason.BUDGET_SPENT)
    log.stage = name
    state, measured = phase(state)
    log.write(
        name, state.heads or 0, measured.examples, measured.error, note=measured.note, phase=number
    )
    return state


def _error(state: State) -> float:
    """Of the sum of the projections; infinite for a state that cannot go on."""
    return math.inf if state.sum is None or state.refusal is not None else state.sum.error


def crude_sum(state: State) -> tuple[State, Measurement]:
    """Phase 1."""
    examples = state.examples
    if examples.out_dim < examples.tokens:
        text = f"{examples.tokens} tokens, outputs of dimension {examples.out_dim}"
        return replace(state, refusal=Reason.AGREEMENT_HIDDEN), Measurement(0, math.inf, text)
    estimate = projection_sum.crude(examples)
    text = "W by correlation; its error from the rows that agree best with it"
    refusal = None if math.isfinite(estimate.error) else Reason.AGREEMENT_HIDDEN
    state = replace(state, sum=estimate, refusal=refusal)
    return state, Measurement(examples.count, estimate.error, text)


def sculpted(state: State) -> tuple[State, Measurement]:
    """Phases 2 and 4."""
    assert state.sum is not None
    result = sculpt(state.examples, state.sum.projection_sum, state.sum.error, state.heads)
    count = state.examples.count
    if result is None:
        text = "too few slabs that are narrow and fit together"
        return replace(state, refusal=Reason.TOO_FEW_AGREEMENTS), Measurement(count, math.inf, text)
    body = result.body
    text = (
        f"{int(body.two_sided.sum())} slabs, {int((~body.two_sided).sum())} one-sided, "
        f"{result.rejected:.0%} rejected; how far two halves of them are apart"
    )
    error = affine_hull.distance_of_halves(body, result.free)
    return replace(state, sculpture=result), Measurement(count, error, text)


def refined_sum(state: State) -> tuple[State, Measurement]:
    """Phase 3."""
    assert state.sculpture is not None
    examples, dim = state.examples, state.examples.dim
    most = max(_FEWEST_IN_PROGRAM, 4 * dim * dim)
    thin = state.sculpture.body.narrowed(state.sculpture.centre, most)
    point = thin.minimum_norm()
    if point is None:  # the solver gave up; the middle of the slabs is a point of the hull too
        point = state.sculpture.centre
    estimate = projection_sum.refined(examples, point.reshape(dim, dim))
    text = f"W from the {estimate.rows} rows with the largest margins; a bound from residuals"
    measured = Measurement(examples.count, estimate.error, text)
    if not math.isfinite(estimate.error):
        return replace(state, refusal=Reason.NO_LARGE_MARGINS), measured
    return replace(state, sum=estimate), measured


def extracted(state: State) -> tuple[State, Measurement]:
    """Phase 5."""
    assert state.sculpture is not None
    space = affine_hull.extract(state.sculpture, state.heads)
    text = f"{len(space.basis)} free directions, gap {space.gap:.3g}; how far two halves are apart"
    refusal = None if affine_hull.has_clear_gap(space) else Reason.SPAN_NOT_FOUND
    state = replace(state, space=space, heads=space.heads, refusal=refusal)
    return state, Measurement(state.examples.count, space.error, text)


def solved(state: State) -> tuple[State, Measurement]:
    """Phase 6."""
    assert state.sculpture is not None
    assert state.space is not None
    found = candidates.solve(state.space, state.sculpture.body, state.fitted, state.other)
    count = state.fitted.examples
    if found is None:
        text = "no net in the body"
        return replace(state, refusal=Reason.NO_CANDIDATES), Measurement(count, math.inf, text)
    text = (
        f"{found.tuples} tuples of candidates, the best refined; the error is of held-out outputs"
    )
    return replace(state, found=found), Measurement(count, found.held_out_error, text)
