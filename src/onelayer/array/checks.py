"""Validation of arguments: each check returns the value or says what it got and expected."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array


def positive_int(value: Any, name: str) -> int:
    """A whole number of at least 1."""
    return whole_number(value, name, least=1)


def whole_number(value: Any, name: str, least: int) -> int:
    """A whole number of at least `least`."""
    message = f"{name} is {value!r}, expected a whole number of at least {least}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(message)
    if value < least:
        raise ValueError(message)
    return int(value)


def positive_number(value: Any, name: str) -> float:
    """A finite number above 0."""
    message = f"{name} is {value!r}, expected a finite number above 0"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(message)
    if not 0 < float(value) < math.inf:
        raise ValueError(message)
    return float(value)


def numbers_of(value: Any, name: str) -> np.ndarray[Any, Any]:
    """A copy of any array of real and finite numbers, in float64 and in numpy."""
    return np.array(backend.to_numpy(backend.as_real(value, name)), dtype=np.float64)


def token_array(X: Any, name: str = "X") -> Array:
    """Examples of shape (n, tokens, dim): real, finite, not empty."""
    return backend.floating(plain_token_array(X, name))


def plain_token_array(X: Any, name: str = "X") -> Array:
    """The same, integers left as they are: for arrays that are too large to be copied."""
    array = backend.as_array(X, name)
    backend.check_real(array, name)
    backend.check_finite(array, name)
    token_shape(tuple(array.shape), name)
    return array


def token_shape(shape: tuple[int, ...], name: str = "X") -> None:
    """A shape (n, tokens, dim), with at least one of each."""
    if len(shape) != 3:
        raise ValueError(f"{name} has shape {shape}, expected three axes (examples, tokens, dim)")
    if 0 in shape:
        raise ValueError(f"{name} has shape {shape}, expected at least one example, token and dim")


def key_mask(mask: Any, X: Array, name: str = "mask", start: int = 0) -> Array | None:
    """A Boolean array (n, tokens), True for the tokens that are there; None if all are.

    Errors count examples from `start` on.
    """
    if mask is None:
        return None
    array = backend.as_device(backend.as_boolean(mask, name), X)
    expected = tuple(X.shape[:2])
    if tuple(array.shape) != expected:
        raise ValueError(
            f"{name} has shape {tuple(array.shape)}, expected {expected}: one entry per token of X"
        )
    xp = backend.namespace(array)
    empty = xp.astype(~xp.any(array, axis=1), xp.int64)
    if bool(xp.any(empty != 0)):
        raise ValueError(
            f"{name} leaves example {start + int(xp.argmax(empty))} without a token, "
            "expected at least one True in every row"
        )
    return array
