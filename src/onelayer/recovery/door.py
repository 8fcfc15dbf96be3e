"""The door of `recover`: every argument checked before any work is done."""

from __future__ import annotations

from typing import Any, Literal

from onelayer import arrays, checks
from onelayer.arrays import Array

_LARGEST_TOL = 1e-3
_LARGEST_ENTRY = 1e100  # of X, or one over it: beyond, scores are not representable
_FEWEST_TO_SCULPT = 20
_LEAST_DIM_TO_SCULPT, _LARGEST_DIM_TO_SCULPT = 2, 48  # beyond, slabs alone take gigabytes
METHODS = ("auto", "refine", "sculpt")


def examples(X: Any, Y: Any, mask: Any) -> tuple[Array, Array, Array | None]:
    """X, Y and the mask, checked, in X's namespace and on X's device; integers stay integers."""
    X, Y = (arrays.detached(arrays.as_array(value, name)) for value, name in ((X, "X"), (Y, "Y")))
    X = checks.plain_token_array(X)
    Y = arrays.beside(checks.plain_token_array(Y, "Y"), X)
    if Y.shape[0] != X.shape[0]:
        raise ValueError(
            f"X has {X.shape[0]} examples, but Y has {Y.shape[0]}: expected one output an example"
        )
    if Y.shape[1] != X.shape[1]:
        raise ValueError(
            f"X has {X.shape[1]} tokens of dimension {X.shape[2]}, but Y has {Y.shape[1]} rows: "
            "expected one output row per token"
        )
    largest = arrays.largest(X)
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


def number_of_heads(heads: Any) -> int | Literal["auto"]:
    if isinstance(heads, str):
        if heads != "auto":
            raise ValueError(f"heads is {heads!r}, expected a whole number or 'auto'")
        return "auto"
    return checks.positive_int(heads, "heads")


def tolerance(tol: Any) -> float:
    number = checks.positive_number(tol, "tol")
    if number > _LARGEST_TOL:
        raise ValueError(
            f"tol is {number:g}, expected at most {_LARGEST_TOL:g}: a looser fit is no recovery"
        )
    return number


def known_rank(rank: Any, dim: int) -> int | None:
    """None for full rank, which a rank of the whole dimension is too."""
    if rank is None:
        return None
    rank = checks.positive_int(rank, "rank")
    if rank > dim:
        raise ValueError(f"rank is {rank}, expected at most {dim}, the dimension of a token")
    return None if rank == dim else rank


def method(method: Any) -> None:
    """One of the methods."""
    if method not in METHODS:
        raise ValueError(f"method is {method!r}, expected 'auto', 'refine' or 'sculpt'")


def sculpting(X: Array, heads: int | Literal["auto"], **given: bool) -> None:
    """Refuse what `sculpt` cannot do where it was asked for."""
    why = why_not_sculpt(X, heads, **given)
    if why is not None:
        raise ValueError(why)


def why_not_sculpt(X: Array, heads: int | Literal["auto"], **given: bool) -> str | None:
    """What is in the way of method='sculpt', None if nothing is; `given` are other options."""
    n, _, dim = X.shape
    for name in (name for name, value in given.items() if value):
        return (
            f"method='sculpt' was asked for with {name}, expected neither biases nor masks: "
            "method='refine' finds such layers"
        )
    if n < _FEWEST_TO_SCULPT:
        return f"X has {n} examples, expected at least {_FEWEST_TO_SCULPT} for method='sculpt'"
    if dim < _LEAST_DIM_TO_SCULPT:
        return (
            f"X has tokens of dimension {dim}, expected at least {_LEAST_DIM_TO_SCULPT} for "
            "method='sculpt'"
        )
    if dim > _LARGEST_DIM_TO_SCULPT:
        return (
            f"X has tokens of dimension {dim}, expected at most {_LARGEST_DIM_TO_SCULPT} for "
            "method='sculpt', which works with dim² x dim² matrices: method='refine' does not"
        )
    if heads != "auto" and heads > dim * dim // 4:
        return (
            f"heads is {heads}, expected at most {dim * dim // 4} for method='sculpt' with tokens "
            f"of dimension {dim}"
        )
    return None
