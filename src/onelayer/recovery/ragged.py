"""Examples of different lengths: lists of arrays (tokens, dim), padded to the longest."""

from __future__ import annotations

from typing import Any

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import NumpyArray


def is_ragged(value: object) -> bool:
    """Whether this is a list of arrays (tokens, dim) of different lengths."""
    if not isinstance(value, list):
        return False
    shapes = [tuple(getattr(one, "shape", ())) for one in value]
    return all(len(shape) == 2 for shape in shapes) and len({shape[0] for shape in shapes}) > 1


def padded(X: list[Any], Y: Any, mask: Any, observed: Any) -> tuple[Any, ...]:
    """X and Y as arrays with zeros for padding, the mask of tokens, and `observed` likewise.

    Masks are made from the lengths, so none may be given; `observed` may be a list of arrays
    (tokens,), or what is not a list.
    """
    if mask is not None:
        raise ValueError(
            "mask was given with a list X of examples of different lengths, expected None: "
            "the lengths say what is padding"
        )
    lengths = [int(one.shape[0]) for one in X]
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    if isinstance(observed, list):
        observed = _joined(observed, lengths, "observed")
    return _joined(X, lengths, "X"), _joined(Y, lengths, "Y"), mask, observed


def _joined(values: Any, lengths: list[int], name: str) -> NumpyArray:
    """Arrays with these lengths in one array, zeros after their ends."""
    if not isinstance(values, list):
        raise TypeError(
            f"{name} is a {type(values).__name__}, expected a list of arrays as X is, "
            "with a row for each token"
        )
    if len(values) != len(lengths):
        raise ValueError(f"{name} has {len(values)} examples, expected {len(lengths)} as X has")
    arrays = [backend.to_numpy(backend.as_array(one, name)) for one in values]
    rest = arrays[0].shape[1:]
    for i, (array, length) in enumerate(zip(arrays, lengths, strict=True)):
        if array.shape != (length, *rest):
            raise ValueError(
                f"{name} has shape {array.shape} at example {i}, expected {(length, *rest)}"
            )
    found = np.zeros((len(lengths), max(lengths), *rest), np.result_type(*arrays))
    for row, array in zip(found, arrays, strict=True):
        row[: len(array)] = array
    return found
