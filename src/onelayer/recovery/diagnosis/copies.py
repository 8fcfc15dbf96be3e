"""Examples that are given more than once: copies are held out together, and count once.

A held-out example of which the fit has seen a copy proves nothing. And equal outputs of equal
inputs have equal noise, so that copies would make error bars too small.
"""

from __future__ import annotations

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import NumpyArray
from onelayer.data.chunks import Chunk
from onelayer.data.storage import Positions

DECIMALS = 9  # to which whitened tokens agree: their rounding depends on their place in memory


def split(examples: Chunk, held_out: int, rng: np.random.Generator) -> tuple[Positions, Positions]:
    """Positions of examples to fit and of about `held_out` others, both in random order.

    Examples with the same inputs are on the same side; of those with the same outputs as well only
    the first is taken. If all inputs are the same there is nothing else to hold out.
    """
    X, Y, *kinds = (backend.to_numpy(one) for one in examples.arrays if one is not None)
    inputs = first_equal(X, *kinds)
    kept = distinct(inputs, Y)
    held_out = max(1, held_out * len(kept) // len(inputs))
    inputs = np.unique(inputs[kept], return_inverse=True)[1]
    order = rng.permutation(int(inputs.max()) + 1)
    sizes = np.bincount(inputs)[order]
    chosen = np.cumsum(sizes) <= max(held_out, int(sizes[0]))
    if len(order) == 1:
        return kept, kept
    chosen[-1] = False  # at least one is left to fit
    place = np.argsort(order)[inputs]
    in_order = np.argsort(place, kind="stable")
    out = chosen[place[in_order]]
    return kept[in_order[~out]], kept[in_order[out]]


def row_keys(*arrays: NumpyArray, decimals: int | None = None) -> list[bytes]:
    """One key for every row, equal where all arrays have equal rows up to rounding; -0 equals 0."""
    rounded = (a if decimals is None else a.round(decimals) for a in arrays)
    rows = [np.ascontiguousarray(a + 0.0) for a in rounded]
    return [b"".join(row.tobytes() for row in together) for together in zip(*rows, strict=True)]


def first_equal(*arrays: NumpyArray) -> Positions:
    """For every row the position of the first row that is equal to it: [3, 4, 3] -> [0, 1, 0]."""
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(key, i) for i, key in enumerate(row_keys(*arrays))], dtype=int)


def distinct(*arrays: NumpyArray) -> Positions:
    """Ascending positions of rows that differ from all rows before them."""
    return np.unique(first_equal(*arrays))
