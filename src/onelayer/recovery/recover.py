"""recover(): the one driver. Recovery: the one result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import numpy as np

from onelayer import arrays, checks
from onelayer.arrays import Array
from onelayer.inputs import Seed
from onelayer.layer import AttentionLayer
from onelayer.recovery import display, problem
from onelayer.recovery.certificate import Certificate, certify
from onelayer.recovery.problem import Problem
from onelayer.recovery.search import Ending, Outcome, Search
from onelayer.recovery.trace import Log, TraceRow

# Held out: a twentieth, or a fifth where examples are plenty, but never more than this many.
_MOST_HELD_OUT = 2000
_PLENTY = 6.0  # equations per unknown
_LARGEST_TOL = 1e-3
_LARGEST_ENTRY = 1e100  # of X, or one over it: beyond, scores are not representable
_OVERFITTED = 4.0  # held-out error over fitted error
_SMALL = 1e-7  # a held-out error below this is never held against a layer
_DELTA = 0.05  # the certificate's bounds hold with probability 1 - _DELTA


class Reason(Enum):
    """Why a recovery ended, with what to do about it."""

    EXACT = "the layer explains the examples to the error asked for, or to rounding"
    NOISE_FLOOR = "the layer explains the examples down to noise in the outputs"
    LOCAL_MINIMUM = "every start ended in a minimum that does not explain the examples"
    TOO_FEW_HEADS = "more heads than were asked for explain the examples, so many do not"
    TOO_FEW_EXAMPLES = "the examples do not determine a layer of this shape"
    HEADS_NOT_DETERMINED = "the examples are explained, but some heads could be others"
    BUDGET_SPENT = "steps or seconds ran out before the examples were explained"

    @property
    def remedy(self) -> str:
        """What to try next; empty where nothing is needed."""
        return _REMEDIES[self]

    def __str__(self) -> str:
        return f"{self.name.lower()}: {self.value}"


_REMEDIES = {
    Reason.EXACT: "",
    Reason.NOISE_FLOOR: "",
    Reason.LOCAL_MINIMUM: "use more examples, more restarts, bias=True, or another number of heads",
    Reason.TOO_FEW_HEADS: "ask for more heads, or heads='auto'",
    Reason.TOO_FEW_EXAMPLES: "use more examples, fewer heads, or rank= if the head size is known",
    Reason.HEADS_NOT_DETERMINED: (
        "see certificate.undetermined_heads: ask for fewer heads, or vary the inputs more"
    ),
    Reason.BUDGET_SPENT: "raise max_steps or max_seconds",
}


@dataclass(frozen=True, eq=False)
class Recovery:
    """What `recover` found.

    `layer` is the best layer found; `converged` says whether it is to be believed and `reason`
    why, with a remedy if not. `relative_error` is the root mean square error on the examples it was
    fitted to, relative to that of the outputs; `trace` has one row a step, `certificate` the error
    on held-out examples and which heads are determined.
    """

    layer: AttentionLayer
    converged: bool
    reason: Reason
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
    method: Literal["auto", "refine"] = "auto",
    rank: int | None = None,
    bias: bool = False,
    causal: bool = False,
    mask: Any = None,
    tol: float = 1e-12,
    seed: Seed = 0,
    device: str | None = None,
    progress: Progress = None,
    restarts: int = 20,
    max_steps: int = 3000,
    max_seconds: float | None = None,
) -> Recovery:
    """Find the attention layer that maps the examples X to Y.

    X has shape (n, tokens, dim), Y shape (n, tokens, out_dim). `heads` is the number of heads, or
    "auto" for the smallest number that explains the examples. `rank` is the rank of the attention
    matrices where it is known (the head size); `bias=True` also finds key biases and an output
    bias; `causal` and `mask` (n, tokens), True for tokens that are there, are as in the layer's
    call, and outputs of padding are passed over. The search ends at a relative error of `tol`, at
    the noise floor, after `restarts` further starts, or when `max_steps` or `max_seconds` are
    spent. `progress=True` shows a live display, a function is called with every row of the trace.
    The same seed gives the same bits. `method` "auto" and "refine" both mean Gauss-Newton steps on
    the attention matrices with the projections eliminated.

    >>> import onelayer as ol
    >>> layer = ol.AttentionLayer.random(heads=2, dim=4, seed=0)
    >>> X = ol.inputs.boolean(200, 3, 4, seed=1)
    >>> found = ol.recover(X, layer(X), heads=2)
    >>> found.converged, bool(found.layer.distance(layer).attention.max() < 1e-9)
    (True, True)
    """
    if method not in ("auto", "refine"):
        raise ValueError(f"method is {method!r}, expected 'auto' or 'refine'")
    X, Y, keys = _examples(X, Y, mask)
    heads = _checked_heads(heads)
    rank = _checked_rank(rank, X.shape[2])
    tol = _checked_tol(tol)
    restarts = checks.whole_number(restarts, "restarts", least=0)
    max_steps = checks.positive_int(max_steps, "max_steps")
    if max_seconds is not None:
        max_seconds = checks.positive_number(max_seconds, "max_seconds")
    arrays.check_device(device)
    rng = np.random.default_rng(seed)

    placed = [None if a is None else arrays.place(a, device) for a in (X, Y, keys)]
    whole = problem.pose(placed[0], placed[1], placed[2], causal, bias)
    fitted, held_out = _split(whole, 1 if heads == "auto" else heads, rank, rng)
    with _listening(progress) as listener, arrays.calm_threads(_product_size(fitted, heads)):
        log = Log(max_steps, max_seconds, listener)
        half = held_out.examples // 2
        seen = held_out.take(np.arange(half)) if half else held_out
        search = Search(fitted, seen, rank, tol, arrays.epsilon(Y), restarts, rng, log)
        outcome = search.unknown_heads() if heads == "auto" else search.known_heads(heads)
        if search.looked and half:  # decisions rested on these: the certificate is for the others
            held_out = held_out.take(np.arange(half, held_out.examples))
        certificate = certify(outcome.state.fit, fitted, held_out, rank, rng, _DELTA)
    fit = outcome.state.fit
    reason = _reason(outcome, certificate, fitted, rank, tol, search.richer_error)
    return Recovery(
        layer=whole.layer(fit.stacked, fit.weights).to(X),
        converged=reason in (Reason.EXACT, Reason.NOISE_FLOOR),
        reason=reason,
        relative_error=fit.error,
        trace=log.rows,
        certificate=certificate,
        seconds=log.seconds,
    )


def _examples(X: Any, Y: Any, mask: Any) -> tuple[Array, Array, Array | None]:
    """X, Y and the mask, checked, in X's namespace and on X's device."""
    X, Y = (arrays.detached(arrays.as_array(value, name)) for value, name in ((X, "X"), (Y, "Y")))
    X = checks.token_array(X)
    Y = arrays.beside(checks.token_array(Y, "Y"), X)
    if Y.shape[0] != X.shape[0]:
        raise ValueError(
            f"X has {X.shape[0]} examples, but Y has {Y.shape[0]}: expected one output an example"
        )
    if Y.shape[1] != X.shape[1]:
        raise ValueError(
            f"X has {X.shape[1]} tokens of dimension {X.shape[2]}, but Y has {Y.shape[1]} rows: "
            "expected one output row per token"
        )
    largest = float(arrays.namespace(X).max(arrays.namespace(X).abs(X)))
    if not (largest == 0 or 1 / _LARGEST_ENTRY < largest < _LARGEST_ENTRY):
        raise ValueError(
            f"X has entries up to {largest:.0e}, expected between {1 / _LARGEST_ENTRY:.0e} "
            f"and {_LARGEST_ENTRY:.0e}: scale it"
        )
    if X.shape[0] < 2:
        raise ValueError(
            "X has 1 example, expected at least 2: one is held out for the certificate"
        )
    return X, Y, checks.key_mask(mask, X)


def _checked_heads(heads: Any) -> int | Literal["auto"]:
    if isinstance(heads, str):
        if heads != "auto":
            raise ValueError(f"heads is {heads!r}, expected a whole number or 'auto'")
        return "auto"
    return checks.positive_int(heads, "heads")


def _checked_tol(tol: Any) -> float:
    number = checks.positive_number(tol, "tol")
    if number > _LARGEST_TOL:
        raise ValueError(
            f"tol is {number:g}, expected at most {_LARGEST_TOL:g}: a looser fit is no recovery"
        )
    return number


def _checked_rank(rank: Any, dim: int) -> int | None:
    """None for full rank, which a rank of the whole dimension is too."""
    if rank is None:
        return None
    rank = checks.positive_int(rank, "rank")
    if rank > dim:
        raise ValueError(f"rank is {rank}, expected at most {dim}, the dimension of a token")
    return None if rank == dim else rank


def _listening(progress: Progress) -> AbstractContextManager[Callable[[TraceRow], None] | None]:
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise TypeError(f"progress is {progress!r}, expected True, False, None or a function")
    if progress is True:
        return display.live()
    return nullcontext(progress if callable(progress) else None)


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
    rank: int | None,
    tol: float,
    richer_error: float,
) -> Reason:
    fit = outcome.state.fit
    if fitted.equations() < fitted.unknowns(fit.heads, rank):
        return Reason.TOO_FEW_EXAMPLES
    # A layer that explains what it was fitted to, and not what it has not seen, was fitted to
    # too few examples. Noise is seen again in the held-out error, hence the factor.
    overfitted = certificate.error > _OVERFITTED * max(fit.error, tol, _SMALL)
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
