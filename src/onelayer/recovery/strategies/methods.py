"""The two methods of `recover`, from checked arguments to an answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np

from onelayer.array import backend, threads
from onelayer.array.backend import Array
from onelayer.array.rounding import Rounding, rounding
from onelayer.data import chunks
from onelayer.heads import dense
from onelayer.layer import AttentionLayer
from onelayer.recovery import whitening
from onelayer.recovery.certificate import Certificate, certify
from onelayer.recovery.diagnosis import copies, noise
from onelayer.recovery.diagnosis.advice import advice
from onelayer.recovery.diagnosis.second_opinion import SecondOpinion
from onelayer.recovery.gauss_newton import low_rank, varpro
from onelayer.recovery.gauss_newton.stopping import Ending, StageOutcome
from onelayer.recovery.phases import driver, examples
from onelayer.recovery.phases.state import PhaseState
from onelayer.recovery.reasons import Reason
from onelayer.recovery.strategies.checkpoint import Checkpointer
from onelayer.recovery.strategies.search import Search
from onelayer.recovery.trace import Log
from onelayer.recovery.validation import ValidatedExamples
from onelayer.recovery.whitening import AnyExamples, Positions, WhitenedExamples, Whitening

# Held out: a twentieth, or a fifth where examples are plenty, but never more than this many.
_MOST_HELD_OUT = 2000
_PLENTY = 6.0  # equations per unknown
_MOST_DRAWN = 4_000_000  # examples that stay elsewhere: no more of them are ever sampled from
_OVERFITTED = 4.0  # held-out error over fitted error
_SMALL = 1e-7  # a held-out error below this is never held against a layer
_SHARP, _SHARP_TOLS = 1e-9, 1e3  # error bars below this, or so many times `tol`, are small enough
_ROUNDED = 1000  # examples that are looked at to see how outputs were rounded
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

    given: ValidatedExamples
    heads: int | Literal["auto"]
    rank: int | None
    bias: bool
    causal: bool
    tol: float
    device: str | None
    restarts: int
    polish: bool
    head_tol: float = 0.1  # error bars up to which heads count as found
    checkpoint: Path | None = None
    resumed: AttentionLayer | None = None  # what to go on from

    @cached_property
    def rounding(self) -> Rounding:
        """How the outputs were rounded before they were given."""
        X, Y, mask = self.given.source.first(min(_ROUNDED, len(self.given.source)))
        return rounding(whitening.without_padding(X, Y, mask)[1])

    def within(self, frame: Whitening) -> Task:
        """The same with a rank that matrices on the span of the inputs can have."""
        return replace(self, rank=frame.rank(self.rank))


@dataclass(frozen=True, eq=False)
class Answer:
    """What a method found."""

    layer: AttentionLayer
    reason: Reason
    advice: str
    error: float
    certificate: Certificate


def refine(task: Task, log: Log, rng: np.random.Generator) -> Answer:
    """Gauss-Newton steps, from random starts, from correlations or from a checkpoint."""
    log.stage = "whitening"
    fitted, held_out = _posed(task, log, rng)
    task = task.within(fitted)
    _note_span(fitted, task, log)
    with threads.single_threaded_blas(_product_size(fitted, task.heads)):
        half, enough = held_out.examples // 2, held_out.examples >= noise.FEWEST
        seen = held_out.take(np.arange(half)) if half else held_out
        search = _search(task, fitted, seen, log, rng)
        opinion = SecondOpinion(task.given, task.bias, task.causal, task.device)
        search.doubt, search.judges = opinion, held_out
        if task.resumed is not None:
            begun = fitted.heads_of(task.resumed)
            search.begun = low_rank.nearest(begun, fitted.dim, task.rank)
        checkpointer = None
        if task.checkpoint is not None:
            checkpointer = Checkpointer(task.checkpoint, fitted, resumed=search.begun is not None)
            search.checkpointer = checkpointer
        outcome = _searched(task, search, checkpointer)
        if search.looked and half:  # decisions rested on these: the certificate is for the others
            held_out = held_out.take(np.arange(half, held_out.examples))
        certificate = _certified(task, outcome.state.fit, fitted, held_out, rng)
        reason = _reason(outcome, certificate, fitted, task, search.richer_error)
        if reason is Reason.LOCAL_MINIMUM and opinion.suspicious:
            reason = Reason.WRONG_MODEL
        certain = bool(opinion.better) or opinion.suspicious or enough
        if reason is Reason.WRONG_MODEL and not certain:
            reason = Reason.TOO_FEW_EXAMPLES  # to tell noise from a wrong model
        if reason in (Reason.WRONG_MODEL, Reason.LOCAL_MINIMUM) and not opinion.suspicious:
            opinion.look_at(search, outcome.state.fit)
        if not reason.good:
            opinion.suspect()
    return _answer(task, fitted, outcome.state.fit, reason, certificate, opinion)


def _searched(task: Task, search: Search, checkpointer: Checkpointer | None) -> StageOutcome:
    """The outcome of a search; the best that it came to is kept also where it is interrupted."""
    try:
        unknown = task.heads == "auto"
        outcome = search.unknown_heads() if unknown else search.known_heads(int(task.heads))
        if checkpointer is not None:
            checkpointer.finish(outcome.state.fit, outcome.solved)
        return outcome
    finally:
        if checkpointer is not None:
            checkpointer.flush()


def sculpt(task: Task, log: Log, rng: np.random.Generator) -> Answer:
    """The six phases, and Gauss-Newton steps from where they end if polishing is asked for."""
    log.stage = "whitening"
    state, held_out = begin(task, log, rng)
    task = task.within(state.fitted)
    state = driver.run(state, log)
    fitted = state.fitted
    with threads.single_threaded_blas(_product_size(fitted, state.heads or 1)):
        search = _search(task, fitted, state.other, log, rng)
        theta = low_rank.nearest(_heads_so_far(state), fitted.dim, task.rank)
        outcome = None
        if task.polish and state.refusal is None:
            outcome = search.polished(theta, may_grow=task.heads == "auto")
            fit = outcome.state.fit
        else:
            fit = varpro.fit(fitted.batches(_heads(theta)), theta)
        certificate = _certified(task, fit, fitted, held_out, rng)
    if state.refusal is not None:
        reason = state.refusal
    elif outcome is not None:
        reason = _reason(outcome, certificate, fitted, task, search.richer_error)
    else:
        reason = _unpolished_reason(state, certificate, task.head_tol)
    return _answer(task, fitted, fit, reason, certificate)


def begin(task: Task, log: Log, rng: np.random.Generator) -> tuple[PhaseState, WhitenedExamples]:
    """The state before the first phase, and the examples of the certificate."""
    n, *_ = task.given.shape
    held_out = np.sort(rng.choice(n, min(max(2, n // 20), _MOST_HELD_OUT), replace=False))
    scales = whitening.scales_of(task.given.largest)
    source = examples.gather(task.given.source, scales, held_out, task.device, log.progress)
    other, unseen = source.problem(held_out[::2]), source.problem(held_out[1::2])
    heads = None if task.heads == "auto" else task.heads
    unknowns = other.unknowns(heads or 4, task.rank)
    enough = int(_EQUATIONS * unknowns / (source.tokens * source.out_dim))
    fitted = source.problem(source.positions(max(_FITTED, enough), rng))
    return PhaseState(source, fitted, other, heads), unseen


def _heads_so_far(state: PhaseState) -> Array:
    """The heads of phase 6, or the best guess of the phase that was reached, side by side."""
    if state.found is not None:
        return state.found.fit.theta
    dim = state.fitted.dim
    point = np.zeros((dim, dim))
    if state.sculpture is not None:
        point = state.sculpture.centre.reshape(dim, dim)
    heads = np.broadcast_to(point, (state.heads or 1, dim, dim))
    return dense.pack(backend.like(np.array(heads), state.fitted.X))


def _heads(theta: Array) -> int:
    return int(theta.shape[1] // theta.shape[0])


def _search(
    task: Task, fitted: AnyExamples, seen: WhitenedExamples, log: Log, rng: np.random.Generator
) -> Search:
    error = task.rounding.error / fitted.output_scale
    search = Search(fitted, seen, task.rank, task.tol, error, task.restarts, rng, log)
    search.patient = log.max_seconds is not None
    return search


def _certified(
    task: Task,
    fit: varpro.Fit,
    fitted: AnyExamples,
    held_out: WhitenedExamples,
    rng: np.random.Generator,
) -> Certificate:
    error, sharp = task.rounding.error / fitted.output_scale, max(_SHARP, _SHARP_TOLS * task.tol)
    stored = backend.epsilon(backend.floating(task.given.source.samples[0]))
    return certify(fit, fitted, held_out, task.rank, error, rng, sharp, stored)


def _note_span(fitted: AnyExamples, task: Task, log: Log) -> None:
    """A row of the trace for the directions that the inputs have."""
    given, inputs = task.given.shape[2], fitted.span
    note = f"inputs vary along {inputs.rank} of {given} directions"
    if inputs.rank:
        note += f", spread {inputs.deviations[0]:.2g} to {inputs.deviations[-1]:.2g}"
    heads = 0 if task.heads == "auto" else task.heads
    log.write("span of the inputs", heads, task.given.shape[0], 1.0, note=note)


def _answer(
    task: Task,
    posed: Whitening,
    fit: varpro.Fit,
    reason: Reason,
    certificate: Certificate,
    opinion: SecondOpinion | None = None,
) -> Answer:
    sample = backend.floating(task.given.source.samples[0])
    layer = posed.layer(fit.theta, fit.weights).to(sample)
    dim, scale = task.given.shape[2], posed.output_scale
    words = advice(reason, certificate, dim, task.head_tol, task.rounding, scale, opinion)
    return Answer(layer, reason, words, fit.error, certificate)


def _posed(task: Task, log: Log, rng: np.random.Generator) -> tuple[AnyExamples, WhitenedExamples]:
    """Examples to fit, and examples held out, which are in memory; both in random order.

    Those to fit are in memory too if they came so and have room there. Otherwise they stay where
    they are: one pass over them finds their frame, and each further pass reads them again.
    """
    given = task.given
    n, tokens, dim, out_dim = given.shape
    sample = backend.place(given.source.samples[0], task.device)
    fits = 8 * n * tokens * (dim + out_dim) <= chunks.memory_budget(sample)
    if given.source.chunks.in_memory and fits:
        (chunk,) = given.source.chunks.collect()
        fitted_at, held_out_at = copies.split(chunk, _held_out(task), rng)
        X, Y, mask = (whitening.place_or_none(one, task.device) for one in chunk.arrays)
        whole = whitening.whiten(X, Y, mask, task.causal, task.bias)
        return whole.take(fitted_at), whole.take(held_out_at)
    source = given.source
    if source.chunks.in_memory:
        source = source.in_pieces()
    spread = whitening.whiten_streamed(
        source,
        whitening.scales_of(given.largest),
        held_out=np.arange(0),
        order=_drawn(n, rng),
        causal=task.causal,
        bias=task.bias,
        device=task.device,
        told=log.progress,
    )
    return spread.split(_held_out(task))


def _held_out(task: Task) -> int:
    """How many examples are held out: more where there are plenty."""
    n, _, dim, out_dim = task.given.shape
    heads = 1 if task.heads == "auto" else task.heads
    unknowns = whitening.unknowns(dim, out_dim, heads, task.rank, task.bias)
    plenty = task.given.rows * out_dim > _PLENTY * unknowns
    if not plenty:
        return min(max(1, n // 20), _MOST_HELD_OUT)
    # With few examples more of them, so that they are enough to tell noise by.
    return min(max(n // 5, min(n // 3, 2 * noise.FEWEST), 1), _MOST_HELD_OUT)


def _drawn(n: int, rng: np.random.Generator) -> Positions:
    """Positions in random order, of all examples or of as many as are ever brought here."""
    return rng.permutation(n) if n <= _MOST_DRAWN else rng.choice(n, _MOST_DRAWN, replace=False)


def _product_size(fitted: AnyExamples, heads: int | Literal["auto"]) -> float:
    """Floating point operations of the largest product in a step."""
    columns = fitted.dim * (1 if heads == "auto" else heads)
    return 2.0 * fitted.examples * fitted.tokens * fitted.dim * columns


def _reason(
    outcome: StageOutcome,
    certificate: Certificate,
    fitted: AnyExamples,
    task: Task,
    richer_error: float,
) -> Reason:
    fit = outcome.state.fit
    if fitted.equations < fitted.unknowns(fit.heads, task.rank):
        return Reason.TOO_FEW_EXAMPLES
    # A layer that explains what it was fitted to, and not what it has not seen, was fitted to
    # too few examples. Noise is seen again in the held-out error, hence the factor.
    overfitted = certificate.error > _OVERFITTED * max(fit.error, task.tol, _SMALL)
    if not outcome.solved:
        return _why_unsolved(outcome, overfitted, certificate.error, richer_error)
    if overfitted:
        return Reason.TOO_FEW_EXAMPLES
    if certificate.uncertain_heads(task.head_tol):
        return Reason.HEADS_NOT_DETERMINED
    return Reason.EXACT if outcome.ending is Ending.REACHED else Reason.NOISE_FLOOR


def _why_unsolved(
    outcome: StageOutcome, overfitted: bool, held_out_error: float, richer_error: float
) -> Reason:
    if outcome.ending is Ending.BUDGET:
        return Reason.BUDGET_SPENT
    if richer_error < 0.5 * held_out_error:
        return Reason.TOO_FEW_HEADS
    if outcome.misfit:
        return Reason.WRONG_MODEL
    return Reason.TOO_FEW_EXAMPLES if overfitted else Reason.LOCAL_MINIMUM


def _unpolished_reason(state: PhaseState, certificate: Certificate, head_tol: float) -> Reason:
    """How far the heads of phase 6 are to be believed: as their space and held-out outputs are."""
    assert state.hull is not None
    if certificate.error > _UNEXPLAINED:
        return Reason.NO_CANDIDATES
    if not certificate.determined.all():
        return Reason.HEADS_NOT_DETERMINED
    error = state.hull.error
    fine = error <= _COARSE and certificate.error <= max(2 * error, _FINE)
    sure = not certificate.uncertain_heads(head_tol)
    return Reason.APPROXIMATE if fine and sure else Reason.COARSE
