"""method="sculpt": the six phases, then Gauss-Newton steps for exact weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onelayer.array import backend, threads
from onelayer.array.backend import Array
from onelayer.data.storage import Positions
from onelayer.heads import dense
from onelayer.recovery import verdict
from onelayer.recovery.examples import WhitenedExamples, whiten
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.gauss_newton.stopping import StageOutcome
from onelayer.recovery.holdout import MOST_HELD_OUT
from onelayer.recovery.phases import driver
from onelayer.recovery.phases.state import PhaseState
from onelayer.recovery.result import Recovery
from onelayer.recovery.run import RecoveryRun
from onelayer.recovery.strategies import cost
from onelayer.recovery.strategies.head_count import for_heads
from onelayer.recovery.strategies.search import Search


@dataclass(frozen=True)
class SculptAndPolish:
    """Strategy of the six phases, polished by Gauss-Newton steps if that is asked for."""

    context: RecoveryRun

    def run(self) -> Recovery:
        """The result of the phases, or of polishing."""
        context, options = self.context, self.context.options
        state, held_out = begin(context)
        state = driver.run(state, context.log)
        training = state.fitted
        with threads.single_threaded_blas(cost.step_operations(training, state.heads or 1)):
            search = context.search(training, state.other)
            theta = search.of_rank(_heads_so_far(state))
            heads, polished = search.heads_in(theta), options.polish and state.refusal is None
            outcome = polish(search, theta, options.known_heads is None) if polished else None
            fit = outcome.fit if outcome else varpro.fit(training.batches(heads), theta)
            certificate = context.certify(fit, search, held_out)
        if state.refusal is not None:
            reason = state.refusal
        elif outcome is not None:
            reason = verdict.of_search(search, outcome, certificate, options.head_tol)
        else:
            assert state.hull is not None
            numbers, error = search.settings.sculpt, state.hull.error
            reason = verdict.of_phases(error, certificate, options.head_tol, numbers)
        return context.result(training, fit, reason, certificate)


def begin(run: RecoveryRun) -> tuple[PhaseState, WhitenedExamples]:
    """The state before the first phase, and the held-out examples of the certificate."""
    (n, *_), numbers = run.examples.shape, run.settings.sculpt
    run.log.stage = "whitening"
    held_out = np.sort(run.rng.choice(n, min(max(2, n // 20), MOST_HELD_OUT), replace=False))
    device, progress = run.options.device, run.log.progress
    source = whiten(run.examples, linear=True, held_out=held_out, device=device, progress=progress)
    other, unseen = source.take(held_out[::2]), source.take(held_out[1::2])
    heads = run.options.known_heads
    unknowns = other.unknowns(heads or 4, run.options.rank)
    enough = int(numbers.fitted_equations * unknowns / (source.tokens * source.out_dim))
    positions = random_positions(source, max(numbers.fitted_examples, enough), run.rng)
    return PhaseState(source, source.take(positions), other, heads), unseen


def random_positions(source: WhitenedExamples, most: int, rng: np.random.Generator) -> Positions:
    """Ascending positions of at most `most` random examples that are not held out."""
    count, held_out = len(source.source), source.held_out
    positions = rng.choice(count, min(most + len(held_out), count), replace=False)
    return np.sort(positions[~np.isin(positions, held_out)][:most])


def _heads_so_far(state: PhaseState) -> Array:
    """The heads of phase 6, or the best guess of the last phase that was reached."""
    if state.found is not None:
        return state.found.fit.theta
    dim, shape = state.fitted.dim, state.sculpture
    point = np.zeros((dim, dim)) if shape is None else shape.centre.reshape(dim, dim)
    heads = np.broadcast_to(point, (state.heads or 1, dim, dim))
    return dense.pack(backend.like(np.array(heads), state.fitted.X))


def polish(search: Search, theta: Array, may_grow: bool) -> StageOutcome:
    """Steps from heads that are nearly right, to an exact fit or to noise.

    Where that fails one more head is tried. It is taken if it explains everything and the number
    of heads `may_grow`; otherwise it shows whether there were too few.
    """
    strategy = for_heads(search, search.heads_in(theta))
    outcome = strategy.stage("polish", theta)
    fit, fewest = outcome.fit, search.settings.escape.fewest_equations
    enough = search.equations_per_unknown(fit.heads + 1) > fewest
    if not outcome.solved and enough and not search.log.spent:
        name = "polish, one more head"
        richer = strategy.stage(name, strategy.grow(fit, 1))
        search.validate_richer(name, richer)
        if richer.solved and may_grow:
            return richer
    if outcome.solved or search.log.spent:
        return outcome
    return StageOutcome(outcome.state, outcome.ending, search.noise_remains(fit))
