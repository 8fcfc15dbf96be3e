"""recover(): the one driver. Recovery: the one result."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from onelayer.array import backend, checks
from onelayer.data.chunks import KEPT_BYTES
from onelayer.inputs import Seed
from onelayer.layer import AttentionLayer
from onelayer.recovery import display, validation
from onelayer.recovery.certificate import Certificate
from onelayer.recovery.reasons import Reason
from onelayer.recovery.strategies import methods
from onelayer.recovery.strategies.checkpoint import checked_path, load
from onelayer.recovery.strategies.methods import Answer, Task
from onelayer.recovery.trace import Log, TraceRow

_ROWS_TO_SCULPT = 100  # per entry of an attention matrix: with fewer it is not worth trying


@dataclass(frozen=True, eq=False)
class Recovery:
    """What `recover` found.

    Attributes
    ----------
    layer : AttentionLayer
        The best layer found; the one of least norm that does so on the span of the inputs.
    converged : bool
        Whether the outputs are explained, to rounding or to a noise floor, and every head's error
        bar is at most `head_tol`.
    reason : Reason
        Why the search ended, by name, with a remedy if it did not converge.
    advice : str
        What was seen in the examples and what to change, in words; may be empty.
    relative_error : float
        Root mean square error on the examples that the layer was fitted to, relative to that of the
        outputs (about their mean, if the layer may have biases).
    trace : list of TraceRow
        One row a step.
    certificate : Certificate
        Error bars of the heads, and the error on held-out examples.
    seconds : float
        The time that it took.
    """

    layer: AttentionLayer
    converged: bool
    reason: Reason
    advice: str
    relative_error: float
    trace: list[TraceRow]
    certificate: Certificate
    seconds: float


Progress = bool | Callable[[TraceRow], None] | None


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
    tol: float = 1e-12,
    head_tol: float = 0.1,
    seed: Seed = 0,
    device: str | None = None,
    progress: Progress = None,
    restarts: int = 20,
    max_steps: int = 3000,
    max_seconds: float | None = None,
    polish: bool = True,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
) -> Recovery:
    """Find the attention layer that maps the examples X to Y.

    X has shape (n, tokens, dim), Y shape (n, tokens, out_dim). `heads` is the number of heads, or
    "auto" for the smallest number that explains the examples. `rank` is the rank of the attention
    matrices where it is known (the head size); `bias=True` also finds key biases and an output
    bias; `causal` and `mask` (n, tokens), True for tokens that are there, are as in the layer's
    call, and outputs of padding are passed over. The search ends at a relative error of `tol`, at
    the rounding of the outputs, at the noise floor, after `restarts` further starts, or when
    `max_steps` or `max_seconds` are spent (the certificate comes on top: for large layers that is
    minutes on a CPU). Without `max_seconds` a hopeless search on a small problem is given up after
    a minute or so. `progress=True` shows a live display, a function is called with every row of the
    trace. The same seed gives the same bits.

    The result converges if the outputs are explained and the error bar of every head, a 95 % bound
    on its relative error on the span of the inputs, is at most `head_tol`. If it does not, `advice`
    says what was seen and what to change.

    `method="refine"` takes Gauss-Newton steps on the attention matrices with the projections
    eliminated. `method="sculpt"` is the provable algorithm in six phases (arXiv 2402.04084), for
    layers without biases and masks: it needs many more examples, but only passes over them, block
    by block, wherever they are, such as in memory-mapped files. `polish=True` hands what the six
    phases found to Gauss-Newton steps for exact weights; without, heads are right to about a
    percent. "auto" takes `refine` and, where that ends in a local minimum or the examples do not
    fit in memory, `sculpt` if it applies; the trace says which and why.

    `checkpoint` is a file to which `refine` writes the best layer so far, every ten seconds at
    most, and `resume=True` goes on from it after the search was killed, with the same examples or
    with others of the same layer. It is a file like any that `AttentionLayer.save` writes. With it
    "auto" always takes `refine`.

    >>> import onelayer as ol
    >>> layer = ol.AttentionLayer.random(heads=2, dim=4, seed=0)
    >>> X = ol.inputs.boolean(200, 3, 4, seed=1)
    >>> found = ol.recover(X, layer(X), heads=2)
    >>> found.converged, bool(found.layer.distance(layer).attention.max() < 1e-9)
    (True, True)
    """
    validation.method(method)
    heads = validation.number_of_heads(heads)
    tol = validation.tolerance(tol)
    head_tol = checks.positive_number(head_tol, "head_tol")
    restarts = checks.whole_number(restarts, "restarts", least=0)
    max_steps = checks.positive_int(max_steps, "max_steps")
    if max_seconds is not None:
        max_seconds = checks.positive_number(max_seconds, "max_seconds")
    if not isinstance(polish, bool):
        raise TypeError(f"polish is {polish!r}, expected True or False")
    kept = checked_path(checkpoint, resume)
    if kept is not None and method == "sculpt":
        raise ValueError("checkpoint is given with method 'sculpt', which keeps none")
    backend.check_device(device)
    rng = np.random.default_rng(seed)
    with _listening(progress) as listener:
        log = Log(max_steps, max_seconds, listener)
        if isinstance(listener, display.Display):
            log.report = listener.report
        log.stage = "looking at the examples"
        given = validation.examples(X, Y, mask, device, log.progress)
        if method == "sculpt":
            validation.sculpting(given, heads, bias=bias, causal=causal)
        rank = validation.known_rank(rank, given.shape[2])
        resumed = None
        if kept is not None and resume:
            known = None if heads == "auto" else heads
            resumed = load(kept, known, given.shape[2:], bias)
        task = Task(
            given, heads, rank, bias, causal, tol, device, restarts, polish, head_tol, kept, resumed
        )
        answer = _WAYS[method](task, log, rng)
    return Recovery(
        layer=answer.layer,
        converged=answer.reason.good,
        reason=answer.reason,
        advice=answer.advice,
        relative_error=answer.error,
        trace=log.rows,
        certificate=answer.certificate,
        seconds=log.seconds,
    )


def _automatic(task: Task, log: Log, rng: np.random.Generator) -> Answer:
    """`refine`, or `sculpt` where that is the better choice or the last resort."""
    if task.checkpoint is not None:
        _choose(task, log, "refine, since a checkpoint is kept")
        return methods.refine(task, log, rng)
    n, tokens, dim, out_dim = task.given.shape
    size = 8.0 * n * tokens * (dim + out_dim)
    fits, sculptable = size <= KEPT_BYTES, _can_be_sculpted(task)
    if not fits and sculptable:
        _choose(task, log, f"sculpt, since the examples take {size / 1e9:.1f} GB in memory")
        return methods.sculpt(task, log, rng)
    why = "the examples fit in memory" if fits else "sculpt does not apply"
    _choose(task, log, f"refine, since {why}")
    answer = methods.refine(task, log, rng)
    if answer.reason is not Reason.LOCAL_MINIMUM or not sculptable:
        return answer
    _choose(task, log, "sculpt, since refine ended in a local minimum")
    # Polished in any case: by a weaker standard a model that refine has refused might pass.
    second = methods.sculpt(replace(task, polish=True), log, rng)
    if second.reason.good:
        return second
    _choose(task, log, f"what refine found, since sculpt ended with {second.reason.name.lower()}")
    return answer


_WAYS = {"auto": _automatic, "refine": methods.refine, "sculpt": methods.sculpt}


def _can_be_sculpted(task: Task) -> bool:
    """Whether the six phases may be tried, and have a chance."""
    n, tokens, dim, out_dim = task.given.shape
    options = {"bias": task.bias, "causal": task.causal}
    possible = validation.why_not_sculpt(task.given, task.heads, **options) is None
    enough = n * tokens >= _ROWS_TO_SCULPT * dim * dim
    return possible and enough and out_dim >= tokens


def _choose(task: Task, log: Log, why: str) -> None:
    """A row of the trace for a choice of method; an error of 1 is that of no layer at all."""
    heads = 0 if task.heads == "auto" else task.heads
    log.write("auto", heads, task.given.shape[0], 1.0, note=why)


def _listening(progress: Progress) -> AbstractContextManager[Callable[[TraceRow], None] | None]:
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress is {progress!r}, expected True, False, None or a function")
    if progress is True:
        return display.live()
    return nullcontext(progress if callable(progress) else None)
