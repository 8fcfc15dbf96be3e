"""The two methods of `recover`, from checked arguments to an answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from onelayer import arrays, attention
from onelayer.arrays import Array
from onelayer.layer import AttentionLayer
from onelayer.recovery import examples, lowrank, phases, problem, reduced
from onelayer.recovery.certificate import Certificate, certify
from onelayer.recovery.problem import Problem
from onelayer.recovery.reasons import Reason
from onelayer.recovery.search import Ending, Outcome, Search
from onelayer.recovery.trace import Log

# Held out: a twentieth, or a fifth where examples are plenty, but never more than this many.
_MOST_HELD_OUT = 2000
_PLENTY = 6.0  # equations per unknown
_OVERFITTED = 4.0  # held-out error over fitted error
_SMALL = 1e-7  # a held-out error below this is never held against a layer
_DELTA = 0.05  # the certificate's bounds hold with probability 1 - _DELTA
# Phase 6 and polishing see this many examples, or equations per unknown.
_FITTED, _EQUATIONS = 3000, 30.0
# Without polishing a layer is believed up to this error of the space of its heads, and if held-out
# outputs are off by no more than twice that error, or by this much: what is left over beyond it may
# be noise, or a head with a small projection, which only polishing can tell apart.
_COARSE, _FINE = 0.06, 1e-3
_UNEXPLAINED = 0.3  # a held-out error from which heads are not even roughly right


@dataclass(frozen=True)
class Task:
    """The checked arguments of one recovery."""

    X: Array
    Y: Array
    mask: Array | None
    heads: int | Literal["auto"]
    rank: int | None
    bias: bool
    causal: bool
    tol: float
    device: str | None
    restarts: int
    polish: bool

    @property
    def precision(self) -> float:
        """The relative rounding error of the outputs as they were given."""
        return arrays.epsilon(arrays.floating(self.Y[:1, ...]))


@dataclass(frozen=True, eq=False)
class Answer:
    """What a method found."""

    layer: AttentionLayer
    reason: Reason
    error: float
    certificate: Certificate


def refine(task: Task, log: Log, rng: np.random.Generator) -> Answer:
    """Gauss-Newton steps from random starts."""
    given = (task.X, task.Y, task.mask)
    placed = [None if a is None else arrays.place(a, task.device) for a in given]
    whole = problem.pose(placed[0], placed[1], placed[2], task.causal, task.bias)
    fitted, held_out = _split(whole, 1 if task.heads == "auto" else task.heads, task.rank, rng)
    with arrays.calm_threads(_product_size(fitted, task.heads)):
        half = held_out.examples // 2
        seen = held_out.take(np.arange(half)) if half else held_out
        search = _search(task, fitted, seen, log, rng)
        unknown = task.heads == "auto"
        outcome = search.unknown_heads() if unknown else search.known_heads(int(task.heads))
        if search.looked and half:  # decisions rested on these: the certificate is for the others
            held_out = held_out.take(np.arange(half, held_out.examples))
        certificate = certify(outcome.state.fit, fitted, held_out, task.rank, rng, _DELTA)
    reason = _reason(outcome, certificate, fitted, task, search.richer_error)
    return _answer(task, whole, outcome.state.fit, reason, certificate)


def sculpt(task: Task, log: Log, rng: np.random.Generator) -> Answer:
    """The six phases, and Gauss-Newton steps from where they end if polishing is asked for."""
    log.stage = "whitening"
    state, held_out = begin(task, log, rng)
    state = phases.run(state, log)
    fitted = state.fitted
    with arrays.calm_threads(_product_size(fitted, state.heads or 1)):
        search = _search(task, fitted, state.other, log, rng)
        stacked = lowrank.nearest(_heads_so_far(state), fitted.dim, task.rank)
        outcome = None
        if task.polish and state.refusal is None:
            outcome = search.polished(stacked, may_grow=task.heads == "auto")
            fit = outcome.state.fit
        else:
            fit = reduced.fit(fitted.blocks(_heads(stacked)), stacked, False, fitted.equations())
        certificate = certify(fit, fitted, held_out, task.rank, rng, _DELTA)
    if state.refusal is not None:
        reason = state.refusal
    elif outcome is not None:
        reason = _reason(outcome, certificate, fitted, task, search.richer_error)
    else:
        reason = _unpolished_reason(state, certificate)
    return _answer(task, fitted, fit, reason, certificate)


def begin(task: Task, log: Log, rng: np.random.Generator) -> tuple[phases.State, Problem]:
    """The state before the first phase, and the examples of the certificate."""
    n = int(task.X.shape[0])
    held_out = np.sort(rng.choice(n, min(max(2, n // 20), _MOST_HELD_OUT), replace=False))
    source = examples.gather(task.X, task.Y, held_out, task.device, log.passing)
    other, unseen = source.problem(held_out[::2]), source.problem(held_out[1::2])
    heads = None if task.heads == "auto" else task.heads
    unknowns = other.unknowns(heads or 4, task.rank)
    enough = int(_EQUATIONS * unknowns / (source.tokens * source.out_dim))
    fitted = source.problem(source.positions(max(_FITTED, enough), rng))
    return phases.State(source, fitted, other, heads), unseen


def _heads_so_far(state: phases.State) -> Array:
    """The heads of phase 6, or the best guess of the phase that was reached, side by side."""
    if state.found is not None:
        return state.found.fit.stacked
    dim = state.fitted.dim
    point = np.zeros((dim, dim))
    if state.sculpture is not None:
        point = state.sculpture.centre.reshape(dim, dim)
    heads = np.broadcast_to(point, (state.heads or 1, dim, dim))
    return attention.stack(arrays.like(np.array(heads), state.fitted.X))


def _heads(stacked: Array) -> int:
    return int(stacked.shape[1] // stacked.shape[0])


def _search(
    task: Task, fitted: Problem, seen: Problem, log: Log, rng: np.random.Generator
) -> Search:
    return Search(fitted, seen, task.rank, task.tol, task.precision, task.restarts, rng, log)


def _answer(
    task: Task, posed: Problem, fit: reduced.Fit, reason: Reason, certificate: Certificate
) -> Answer:
    layer = posed.layer(fit.stacked, fit.weights).to(arrays.floating(task.X[:1, ...]))
    return Answer(layer, reason, fit.error, certificate)


def _split(
    whole: Problem, heads: int, rank: int | None, rng: np.random.Generator
) -> tuple[Problem, Problem]:
    """Examples to fit and examples held out, more of these where there are plenty."""
    n = whole.examples
    plenty = whole.equations() > _PLENTY * whole.unknowns(heads, rank)
    held_out = min(max(1, n // (5 if plenty else 20)), _MOST_HELD_OUT)
    order = rng.permutation(n)
    return whole.take(order[held_out:]), whole.take(order[:held_out])


def _product_size(fitted: Problem, heads: int | Literal["auto"]) -> float:
    """Floating point operations of the largest product in a step."""
    columns = fitted.dim * (1 if heads == "auto" else heads)
    return 2.0 * fitted.examples * fitted.tokens * fitted.dim * columns


def _reason(
    outcome: Outcome,
    certificate: Certificate,
    fitted: Problem,
    task: Task,
    richer_error: float,
) -> Reason:
    fit = outcome.state.fit
    if fitted.equations() < fitted.unknowns(fit.heads, task.rank):
        return Reason.TOO_FEW_EXAMPLES
    # A layer that explains what it was fitted to, and not what it has not seen, was fitted to
    # too few examples. Noise is seen again in the held-out error, hence the factor.
    overfitted = certificate.error > _OVERFITTED * max(fit.error, task.tol, _SMALL)
    if not outcome.solved:
        return _why_unsolved(outcome, overfitted, certificate.error, richer_error)
    if overfitted:
        return Reason.TOO_FEW_EXAMPLES
    if not certificate.determined.all():
        return Reason.HEADS_NOT_DETERMINED
    return Reason.EXACT if outcome.ending is Ending.REACHED else Reason.NOISE_FLOOR


def _why_unsolved(
    outcome: Outcome, overfitted: bool, held_out_error: float, richer_error: float
) -> Reason:
    if outcome.ending is Ending.BUDGET:
        return Reason.BUDGET_SPENT
    if richer_error < 0.5 * held_out_error:
        return Reason.TOO_FEW_HEADS
    return Reason.TOO_FEW_EXAMPLES if overfitted else Reason.LOCAL_MINIMUM


def _unpolished_reason(state: phases.State, certificate: Certificate) -> Reason:
    """How far the heads of phase 6 are to be believed: as their space and held-out outputs are."""
    assert state.space is not None
    if certificate.error > _UNEXPLAINED:
        return Reason.NO_CANDIDATES
    if not certificate.determined.all():
        return Reason.HEADS_NOT_DETERMINED
    error = state.space.error
    fine = error <= _COARSE and certificate.error <= max(2 * error, _FINE)
    return Reason.APPROXIMATE if fine else Reason.COARSE
