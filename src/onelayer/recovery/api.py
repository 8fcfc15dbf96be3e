"""recover(): validate, choose a method, run it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import numpy as np

from onelayer.array import checks
from onelayer.data.chunks import KEPT_BYTES
from onelayer.inputs import Seed
from onelayer.recovery import display, validation
from onelayer.recovery.options import Options
from onelayer.recovery.reasons import Reason
from onelayer.recovery.result import Recovery
from onelayer.recovery.run import RecoveryRun
from onelayer.recovery.strategies import refine as refinement
from onelayer.recovery.strategies.checkpoint import checked_path
from onelayer.recovery.strategies.sculpt import SculptAndPolish
from onelayer.recovery.trace import Log, TraceRow

_ROWS_TO_SCULPT = 100  # per entry of an attention matrix: with fewer the phases hardly succeed

Listener: TypeAlias = Callable[[TraceRow], None]


def recover(
    X: Any,
    Y: Any,
    heads: int | Literal["auto"],
    *,
    method: Literal["auto", "refine", "sculpt"] = "auto",
    rank: int | None = None,
    bias: bool = False,
    causal: bool = False,
    mask: Any = None,
    observed: Any = None,
    tol: float = 1e-12,
    head_tol: float = 0.1,
    seed: Seed = 0,
    device: str | None = None,
    progress: bool | Listener | None = None,
    restarts: int = 20,
    max_steps: int = 3000,
    max_seconds: float | None = None,
    polish: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
) -> Recovery:
    """Find the attention layer that maps the examples X to Y.

    Parameters
    ----------
    X, Y : array (n, tokens, dim) and (n, tokens, out_dim)
        Inputs and outputs of the layer: arrays, memory-mapped files, Dask arrays, or functions
        that return an iterator over blocks. Or lists of arrays (tokens, dim) and (tokens, out_dim)
        of different lengths, which are padded.
    heads : int or "auto"
        Number of heads; "auto" finds the smallest number that explains the examples.
    method : {"auto", "refine", "sculpt"}
        "refine" takes Gauss-Newton steps on the attention matrices with the projections
        eliminated. "sculpt" is the provable algorithm in six phases (arXiv 2402.04084), for layers
        without biases and masks. It needs many more examples, but only passes over them block by
        block. "auto" takes "refine", and "sculpt" where it applies and "refine" ends in a local
        minimum or the examples do not fit in memory; the trace says which and why.
    rank : int, optional
        Rank of the attention matrices where it is known (the head size).
    bias, causal : bool
        Whether the layer has key biases and an output bias, and whether tokens attend only to
        themselves and to earlier ones.
    mask : array (n, tokens), optional
        True for tokens, False for padding; outputs of padding are ignored.
    observed : "first", "last", array (n, tokens) or (tokens,), optional
        True where the output of a token is known, by default everywhere. The others may be
        anything, NaN too; their tokens are still attended to. "first" and "last" are the first and
        the last token that is no padding. Not with "sculpt".
    tol : float
        Relative error at which the search ends. It also ends at the rounding of the outputs, or at
        the noise floor.
    head_tol : float
        Largest error bar of a head, a 95 % bound on its relative error on the span of the inputs,
        with which the result counts as converged.
    seed : int, SeedSequence, BitGenerator or Generator
        The same seed gives the same bits.
    device : str, optional
        Device to compute on, such as "cuda"; by default where the examples are.
    progress : bool or callable, optional
        True shows a live display. A function is called with every `TraceRow`.
    restarts : int
        Further starts after a local minimum.
    max_steps, max_seconds : int and float, optional
        Budget of the search. The certificate comes on top: for large layers it takes minutes on a
        CPU. Without `max_seconds` a hopeless search on a small problem ends after about a minute.
    polish : bool
        Whether Gauss-Newton steps follow the six phases, without which heads are right to about a
        percent.
    checkpoint : path, optional
        File to which "refine" writes the best layer so far, at most every ten seconds, as
        `AttentionLayer.save` does. With it "auto" always takes "refine".
    resume : bool
        Whether to resume from the checkpoint, with the same examples or others of the same layer.

    Returns
    -------
    Recovery
        The layer, whether the search converged and why, a certificate, and advice on what to change
        if it did not converge.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> import onelayer as ol
    >>> layer = ol.AttentionLayer.random(heads=2, dim=4, seed=0)
    >>> X = ol.inputs.boolean(200, 3, 4, seed=1)
    >>> found = ol.recover(X, layer(X), heads=2)
    >>> found.converged, bool(found.layer.distance(layer).attention.max() < 1e-9)
    (True, True)
    """
    validation.method(method)
    options = Options(
        heads=heads,
        bias=bias,
        causal=causal,
        tol=tol,
        head_tol=head_tol,
        device=device,
        restarts=restarts,
        polish=polish,
        checkpoint=checked_path(checkpoint, resume, method),
        resume=resume,
    )
    rng = np.random.default_rng(seed)
    with open_log(max_steps, max_seconds, progress) as log:
        examples = validation.examples(X, Y, mask, device, log.progress, observed)
        rank = validation.known_rank(rank, examples.shape[2])
        return _METHODS[method](RecoveryRun(examples, replace(options, rank=rank), log, rng))


@contextmanager
def open_log(max_steps: Any, max_seconds: Any, progress: Any) -> Iterator[Log]:
    """A log with this budget, and with a live display or a listener if there is one."""
    max_steps = checks.positive_int(max_steps, "max_steps")
    if max_seconds is not None:
        max_seconds = checks.positive_number(max_seconds, "max_seconds")
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress is {progress!r}, expected True, False, None or a function")
    log = Log(max_steps, max_seconds, stage="reading the examples")
    with display.live() if progress is True else nullcontext() as view:
        if view is not None:
            log.listener, log.report = view, view.report
        elif callable(progress):
            log.listener = progress
        yield log


def _automatic(run: RecoveryRun) -> Recovery:
    """The result of "refine", or of "sculpt" where that is the better choice or the last resort."""
    if run.options.checkpoint is not None:
        run.note("auto", "refine, since a checkpoint is kept")
        return refinement.refine(run)
    n, tokens, dim, out_dim = run.examples.shape
    size = 8.0 * n * tokens * (dim + out_dim)
    fits, enough = size <= KEPT_BYTES, n * tokens >= _ROWS_TO_SCULPT * dim * dim
    sculptable = enough and out_dim >= tokens and _why_not_sculpt(run) is None
    if not fits and sculptable:
        run.note("auto", f"sculpt, since the examples take {size / 1e9:.1f} GB in memory")
        return SculptAndPolish(run).run()
    why = "the examples fit in memory" if fits else "sculpt does not apply"
    run.note("auto", f"refine, since {why}")
    first = refinement.refine(run)
    if first.reason is not Reason.LOCAL_MINIMUM or not sculptable:
        return first
    run.note("auto", "sculpt, since refine ended in a local minimum")
    # Polished in any case: by a weaker standard a model that refine refused might pass.
    polished = replace(run, options=replace(run.options, polish=True))
    second = SculptAndPolish(polished).run()
    if second.converged:
        return second
    run.note("auto", f"what refine found, since sculpt ended with {second.reason.name.lower()}")
    return replace(first, seconds=run.log.seconds)


def _sculpt(run: RecoveryRun) -> Recovery:
    if (why := _why_not_sculpt(run)) is not None:
        raise ValueError(why)
    return SculptAndPolish(run).run()


def _why_not_sculpt(run: RecoveryRun) -> str | None:
    options = run.options
    return validation.why_not_sculpt(run.examples, options.heads, options.bias, options.causal)


_METHODS: dict[str, Callable[[RecoveryRun], Recovery]] = {
    "auto": _automatic,
    "refine": refinement.refine,
    "sculpt": _sculpt,
}
