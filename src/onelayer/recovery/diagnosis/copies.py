"""Examples that are given more than once: copies are held out together, and count once.

A held-out example of which the fit has seen a copy proves nothing. And equal outputs of equal
inputs have equal noise, so that copies would make error bars too small.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data.sources import Chunk
from onelayer.recovery.equal_rows import first_equal

Positions: TypeAlias = np.ndarray[Any, Any]


def split(examples: Chunk, held_out: int, rng: np.random.Generator) -> tuple[Positions, Positions]:
    """Positions of examples to fit and of about so many to hold out, both in random order.

    Examples with the same inputs are on the same side; of those with the same outputs as well only
    the first is taken. If all inputs are the same there is nothing else to hold out.
    """
    X, Y, mask = examples.arrays
    inputs = _groups(X, mask)
    kept = _firsts(np.stack([inputs, _groups(Y)], axis=1))
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


def _groups(*arrays: Array | None) -> Positions:
    """For every example the number of the first that is equal to it, (n,)."""
    return first_equal(*(backend.to_numpy(one) for one in arrays if one is not None))


def _firsts(pairs: np.ndarray[Any, Any]) -> Positions:
    """Ascending positions of the first of equal rows."""
    return np.sort(np.unique(pairs, axis=0, return_index=True)[1])
