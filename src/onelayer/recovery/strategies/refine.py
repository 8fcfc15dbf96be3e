"""method="refine": Gauss-Newton steps, from the examples to the result."""

from __future__ import annotations

import numpy as np

from onelayer.array import threads
from onelayer.array.backend import Array
from onelayer.layer import AttentionLayer
from onelayer.recovery import holdout, verdict
from onelayer.recovery.diagnosis import noise
from onelayer.recovery.diagnosis.second_opinion import SecondOpinion
from onelayer.recovery.gauss_newton.stopping import StageOutcome
from onelayer.recovery.reasons import Reason
from onelayer.recovery.result import Recovery
from onelayer.recovery.run import RecoveryRun
from onelayer.recovery.strategies import checkpoint, cost
from onelayer.recovery.strategies.checkpoint import Checkpointer
from onelayer.recovery.strategies.head_count import HeadCount, for_heads
from onelayer.recovery.strategies.search import Search


def refine(run: RecoveryRun, initial: AttentionLayer | None = None) -> Recovery:
    """Gauss-Newton steps, from random starts, from descent, from a layer or from a checkpoint."""
    options, examples, path = run.options, run.examples, run.options.checkpoint
    resumed = initial
    if path is not None and options.resume:
        resumed = checkpoint.load(path, options.known_heads, examples.shape[2:], options.bias)
    run.log.stage = "whitening"
    training, held_out = holdout.split(examples, options, run.log.progress, run.rng)
    inputs = training.span
    note = f"inputs vary along {inputs.rank} of {examples.shape[2]} directions"
    if inputs.rank:
        note += f", spread {inputs.deviations[0]:.2g} to {inputs.deviations[-1]:.2g}"
    run.note("span of the inputs", note)
    with threads.single_threaded_blas(cost.step_operations(training, options.known_heads or 1)):
        half = held_out.examples // 2
        others = held_out.take(np.arange(half)) if half else held_out
        writer = None
        if path is not None:
            trust = run.settings.stage.overfitted
            writer = Checkpointer(path, training, trust, resumed=options.resume)
        search = run.search(training, others, noise_examples=held_out, checkpointer=writer)
        opinion = SecondOpinion(examples, options.bias, options.causal, options.device)
        theta = None if resumed is None else search.of_rank(training.heads_of(resumed))
        outcome = _searched(run, search, opinion, theta)
        enough = held_out.examples >= noise.FEWEST  # to tell noise from a wrong model
        if search.used_validation and half:  # the certificate needs examples that were not used
            held_out = held_out.take(np.arange(half, held_out.examples))
        certificate = run.certify(outcome.fit, search, held_out)
        reason = verdict.of_search(search, outcome, certificate, options.head_tol)
        reason = _diagnosed(reason, opinion, search, outcome, enough)
    return run.result(training, outcome.fit, reason, certificate, opinion)


def _searched(
    run: RecoveryRun, search: Search, opinion: SecondOpinion, resumed: Array | None
) -> StageOutcome:
    """The outcome of the search; its best fit is written also if the search is interrupted."""
    heads, restarts = run.options.known_heads, run.options.restarts
    checkpointer = search.checkpointer
    try:
        if heads is None:
            outcome = HeadCount(search, restarts, opinion.review).run(resumed)
        else:
            outcome = for_heads(search, heads, restarts, opinion.review).run(heads, resumed)
        if checkpointer is not None:
            checkpointer.finish(outcome.fit, outcome.solved)
        return outcome
    finally:
        if checkpointer is not None:
            checkpointer.flush()


def _diagnosed(
    reason: Reason, opinion: SecondOpinion, search: Search, outcome: StageOutcome, enough: bool
) -> Reason:
    """The reason, changed where the examples look like those of another model."""
    if reason is Reason.LOCAL_MINIMUM and opinion.suspicious:
        reason = Reason.WRONG_MODEL
    certain = bool(opinion.better) or opinion.suspicious or enough
    if reason is Reason.WRONG_MODEL and not certain:
        reason = Reason.TOO_FEW_EXAMPLES
    if reason in (Reason.WRONG_MODEL, Reason.LOCAL_MINIMUM) and not opinion.suspicious:
        opinion.look_at(search, outcome.fit)
    if not reason.good:
        opinion.suspect()
    return reason
