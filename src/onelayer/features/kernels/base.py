"""What a kernel defines, and its matrix for examples of any form, in tiles.

To add a kernel, write a class that follows `Kernel`, as `AttentionKernel` and `MLPKernel` do:
`matrix` computes its Gram matrix and `models.KernelModel` fits with it.

Kernels are computed in float64 for all dtypes of examples: rounding errors of float32 would give a
kernel matrix negative eigenvalues, of the size of small penalties. On a GPU torch computes them,
else numpy.
"""

from __future__ import annotations

import math
from typing import Any, Protocol, Self

from onelayer.array import backend, blocks, linalg
from onelayer.array.backend import Array
from onelayer.data.sets import Sets
from onelayer.features.activations import Activation
from onelayer.features.progress import Track, untracked

_TILE = 256  # examples on one side of a tile of a Gram matrix, at least


class Kernel(Protocol):
    """A kernel between examples."""

    @property
    def activation(self) -> Activation:
        """Of the random features that the kernel is the limit of."""

    def like(self, reference: Array) -> Self:
        """The same kernel in the namespace, on the device and with the dtype of `reference`."""

    def pairs(self, sets: Sets, others: Sets) -> int:
        """How many pairs of preactivations one entry sums over."""

    def prepare(self, tokens: Array, mask: Array | None) -> Any:
        """Tokens (b, T, d) and their mask (b, T) as one side of `block`."""

    def block(self, rows: Any, columns: Any) -> Array:
        """The kernel between two prepared sides, (b, b')."""


def matrix(
    kernel: Kernel, sets: Sets, others: Sets | None = None, track: Track = untracked
) -> Array:
    """The kernel matrix (n, n') of checked examples, in the namespace and on the device of `sets`.

    Without `others` it is symmetric to the last bit: tiles above the diagonal are mirrored.
    """
    columns = sets if others is None else others
    reference = backend.double(backend.gpu_or_numpy(sets.sample))
    placed = kernel.like(reference)

    def side(examples: Sets, part: slice) -> Any:
        tokens, mask = examples.block(part)
        there = None if mask is None else backend.as_device(mask, reference)
        return placed.prepare(backend.like(tokens, reference), there)

    size = tile_size(kernel.activation, reference, kernel.pairs(sets, columns))
    found = backend.empty((len(sets), len(columns)), reference)
    for down, across in track(
        tiles(len(sets), None if others is None else len(others), size), "kernel"
    ):
        block = placed.block(side(sets, down), side(columns, across))
        if others is None and down == across:
            block = linalg.symmetrised(block)  # rounding may differ between the halves
        found[down, across] = block
        if others is None and down != across:
            found[across, down] = backend.transpose(block)
    return backend.as_device(found, sets.sample)


def block_pairs(activation: Activation, reference: Array) -> int:
    """How many pairs fit a block whose working arrays stay in cache, or more on a GPU."""
    # Two arrays are in use beside those of the activation.
    return max(1, blocks.block_bytes(reference) // (8 * (activation.work + 2)))


def tile_size(activation: Activation, reference: Array, pairs: int) -> int:
    """Examples on a side of a tile, as large as a block if an entry of it sums over `pairs`."""
    return max(_TILE, math.isqrt(block_pairs(activation, reference) // max(1, pairs)))


def tiles(count: int, others: int | None, size: int) -> list[tuple[slice, slice]]:
    """The tiles (rows, columns) that `matrix` computes, in its order.

    With `others` None the matrix is symmetric: only tiles on and below the diagonal are listed.

    >>> tiles(3, None, size=2)
    [(slice(0, 2, None), slice(0, 2, None)),
     (slice(2, 3, None), slice(0, 2, None)),
     (slice(2, 3, None), slice(2, 3, None))]
    """
    rows = list(blocks.slices(count, 1, size))
    columns = rows if others is None else list(blocks.slices(others, 1, size))
    return [(a, b) for a in rows for b in columns if others is not None or b.start <= a.start]


def norms(vectors: Array) -> Array:
    """The lengths along the last axis."""
    xp = backend.namespace(vectors)
    return xp.sqrt(xp.einsum("...i,...i->...", vectors, vectors))
