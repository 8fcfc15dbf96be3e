"""Kernels of random features in infinite number, in closed form, and Gram matrices in tiles.

Both kernels are sums of `relu_moments` over pairs: of keys for attention, of examples for neurons.
Everything is computed where the examples are: in numpy, or in torch on a CPU or a GPU. Pairs are
taken in blocks whose working arrays stay in a processor's cache, or on a GPU fill a part of its
memory, for there it is the calls that cost (`blocks.block_bytes`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

from onelayer.array import backend, blocks, linalg
from onelayer.array.backend import Array
from onelayer.features import relu_moments
from onelayer.features.progress import Track, untracked

Tile: TypeAlias = tuple[slice, slice]

_WORK = relu_moments.WORK + 2  # arrays of the size of a block of pairs
_WIDTH = 64  # examples on the long side of a block on a CPU: the length of its innermost loops
_TILE = 256  # examples on one side of a tile of a Gram matrix, at least


def attention_kernel_block(
    tokens: Array, mask: Array | None, others: Array, others_mask: Array | None, bias: Array | None
) -> Array:
    """The kernel of random-feature attention between examples and others, (n, n').

    `tokens` is (n, N+1, D), `others` (n', N'+1, D): token 0 is the query, the rest are keys, each
    with the constant 1 among its D coordinates. Keys whose mask is False do not count; an example
    without a key has kernel 0 with all. With W = W_0 + Gaussian entries of variance 1/4, where
    W_0 is `bias`, or 0 for None,

        K = 1/(N N') Σ_ij E[relu(x_0ᵀ W x_i) relu(x'_0ᵀ W x'_j)] <x_i, x'_j>.

    >>> import numpy as np
    >>> x = np.array([[[1.0, 1.0], [-1.0, 1.0]]])
    >>> attention_kernel_block(x, None, x, None, None).round(12)  # 1/2 variance |x_1|²
    array([[1.]])
    """
    rows, columns = _side(tokens, mask, bias), _side(others, others_mask, bias)
    n, row_keys, _ = rows.keys.shape
    m, column_keys, _ = columns.keys.shape
    kernel = backend.zeros((n, m), tokens)
    if 0 in (n, m, row_keys, column_keys):
        return kernel
    pairs = relu_moments.block_pairs(tokens)
    longest = _WIDTH * pairs // relu_moments.CACHED_PAIRS
    width = max(1, min(m, longest, pairs // column_keys))
    per_key = column_keys * width
    largest = max(per_key, min(pairs, n * row_keys * per_key))
    work = backend.empty((_WORK * largest,), tokens)  # allocated once: fresh memory is slow
    for across in blocks.slices(m, 1, width):
        right = columns.part(across, slice(None)).with_examples_innermost()
        for down in blocks.slices(n, per_key * row_keys, pairs):
            for keys in blocks.slices(row_keys, per_key, pairs):
                kernel[down, across] += _sum_over_keys(rows.part(down, keys), right, work)
    return kernel


def mlp_kernel_block(flat: Array, others: Array, std: float) -> Array:
    """The kernel of the features relu(<w, x>) with w ~ N(0, std² I) between rows, (n, n').

    `flat` is (n, P) and `others` (n', P), none of their rows zero: with ρ their correlations,
    K = std² |x| |x'| (√(1 - ρ²) + ρ (π - arccos ρ)) / 2π.

    >>> import numpy as np
    >>> x = np.array([[3.0, 4.0], [-3.0, -4.0]])
    >>> mlp_kernel_block(x, x, std=2.0).round(12)  # 1/2 variance |x|²
    array([[50.,  0.],
           [ 0., 50.]])
    """
    norms, other_norms = _norms(flat), _norms(others)
    kernel = (flat / norms[:, None]) @ backend.transpose(others / other_norms[:, None])
    relu_moments.replace_all_by_arc_cosines(kernel)
    kernel *= std**2 * norms[:, None]
    kernel *= other_norms
    return kernel


def tile_size(reference: Array, pairs: int) -> int:
    """How many examples are on one side of a tile of a Gram matrix of arrays like this one.

    An entry takes `pairs` pairs of keys. Where entries are small a tile is as large as a block of
    pairs, which on a GPU is thousands of examples and a few hundred on a CPU.
    """
    return max(_TILE, math.isqrt(relu_moments.block_pairs(reference) // max(1, pairs)))


def tiles(count: int, others: int | None, size: int) -> list[Tile]:
    """The tiles (rows, columns) that `gram` computes, in its order.

    With `others` None the matrix is symmetric: only tiles on and below the diagonal are listed.

    >>> tiles(3, None, size=2)
    [(slice(0, 2, None), slice(0, 2, None)),
     (slice(2, 3, None), slice(0, 2, None)),
     (slice(2, 3, None), slice(2, 3, None))]
    >>> len(tiles(3, 3, size=2))
    4
    """
    rows = list(blocks.slices(count, 1, size))
    columns = rows if others is None else list(blocks.slices(others, 1, size))
    return [(a, b) for a in rows for b in columns if others is not None or b.start <= a.start]


def gram(
    count: int,
    others: int | None,
    block: Callable[[slice, slice], Array],
    reference: Array,
    size: int,
    track: Track = untracked,
) -> Array:
    """The matrix (count, others) whose parts are `block(rows, columns)`, tile by tile.

    It has the namespace, device and dtype of `reference`. With `others` None it is (count, count)
    and symmetric to the last bit: the tiles above the diagonal are not computed but mirrored.
    `track` sees all `tiles` before the first is computed, and each as its turn comes.

    >>> import numpy as np
    >>> x = np.array([1.0, 2.0, 3.0])
    >>> gram(3, None, lambda rows, columns: np.outer(x[rows], x[columns]), x, size=2)
    array([[1., 2., 3.],
           [2., 4., 6.],
           [3., 6., 9.]])
    """
    matrix = backend.empty((count, count if others is None else others), reference)
    for rows, columns in track(tiles(count, others, size), "kernel"):
        part = block(rows, columns)
        if others is None and rows == columns:
            part = linalg.symmetrised(part)  # rounding may differ between the halves
        matrix[rows, columns] = part
        if others is None and rows != columns:
            matrix[columns, rows] = backend.transpose(part)
    return matrix


class _Side(NamedTuple):
    """Examples on one side of the kernel: what is known for each key before any pair is formed."""

    queries: Array  # (n, D) unit vectors
    keys: Array  # (n, N, D) unit vectors
    weights: Array  # (n, N): standard deviation times length, over the number of keys
    means: Array | None  # (n, N): h, in standard deviations; None where all are 0

    def part(self, examples: slice, keys: slice) -> _Side:
        """Some of the examples, with some of their keys."""
        means = None if self.means is None else self.means[examples, keys]
        return _Side(
            self.queries[examples, :],
            self.keys[examples, keys, :],
            self.weights[examples, keys],
            means,
        )

    def with_examples_innermost(self) -> _Side:
        """The same in another order in memory, in which the keys are one matrix (D, N · n)."""
        xp = backend.namespace(self.keys)
        by_coordinate = backend.contiguous(xp.permute_dims(self.keys, (2, 1, 0)))
        return self._replace(keys=xp.permute_dims(by_coordinate, (2, 1, 0)))


def _side(tokens: Array, mask: Array | None, bias: Array | None) -> _Side:
    """What `attention_kernel_block` needs to know of the examples on one of its sides."""
    xp = backend.namespace(tokens)
    lengths = _norms(tokens)
    units = tokens / lengths[:, :, None]
    queries, keys = units[:, 0, :], units[:, 1:, :]
    weights = 0.5 * lengths[:, :1] * lengths[:, 1:] ** 2
    if mask is None:
        weights /= max(1, weights.shape[1])
    else:
        weights *= mask[:, 1:]
        weights /= backend.clip(xp.sum(mask[:, 1:], axis=1, keepdims=True), 1, None)
    means = None
    if bias is not None:
        means = 2.0 * (keys @ (queries @ bias)[:, :, None])[:, :, 0]
    return _Side(queries, keys, weights, means)


def _sum_over_keys(rows: _Side, columns: _Side, work: Array) -> Array:
    """Σ_ij of weights, moments and cosines, (n, n').

    All pairs lie in one array (n, N, N', n'): the innermost axis, over which the cosine of the
    queries varies, is long, and the sum over i is a product of the weights with a matrix.
    """
    xp = backend.namespace(work)
    n, row_keys, dim = rows.keys.shape
    m, column_keys, _ = columns.keys.shape
    left = xp.reshape(rows.keys, (n * row_keys, dim))
    right = xp.reshape(xp.permute_dims(columns.keys, (2, 1, 0)), (dim, column_keys * m))
    shape = (n, row_keys, column_keys, m)
    work = xp.reshape(work[: _WORK * math.prod(shape)], (_WORK, *shape))
    cosines, rho, rest = work[0, ...], work[1, ...], work[2:, ...]
    xp.matmul(left, right, out=xp.reshape(cosines, (n * row_keys, column_keys * m)))
    query_cosines = rows.queries @ backend.transpose(columns.queries)
    xp.multiply(cosines, query_cosines[:, None, None, :], out=rho)
    if rows.means is None or columns.means is None:
        relu_moments.replace_by_arc_cosines(rho, rest)
    else:
        means = backend.contiguous(backend.transpose(columns.means))
        relu_moments.replace_by_moments(rows.means[:, :, None, None], means, rho, rest)
    rho *= cosines
    summed = rows.weights[:, None, :] @ xp.reshape(rho, (n, row_keys, column_keys * m))
    summed = xp.reshape(summed, (n, column_keys, m))
    return xp.einsum("abc,cb->ac", summed, columns.weights)


def _norms(vectors: Array) -> Array:
    """The lengths along the last axis."""
    xp = backend.namespace(vectors)
    return xp.sqrt(xp.einsum("...i,...i->...", vectors, vectors))
