"""The kernel of infinitely many random attention heads.

Pairs of keys are taken in blocks whose working arrays stay in a processor's cache, or on a GPU fill
a part of its memory, as calls dominate the cost there (`blocks.block_bytes`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.data.sets import Sets
from onelayer.features import queries
from onelayer.features.activations import Activation, Preactivations
from onelayer.features.kernels import base
from onelayer.heads import dense

_WIDTH = 64  # examples on the long side of a block on a CPU: the length of its innermost loops


@dataclass(frozen=True)
class AttentionKernel:
    """`attention_kernel` for any activation.

    Keys whose mask is False do not count; an example without a key has kernel 0 with all others.
    """

    bias: Array | None  # W_0 (D, D); None for zero, which is cheaper
    query: str
    activation: Activation

    def like(self, reference: Array) -> Self:
        bias = None if self.bias is None else backend.like(self.bias, reference)
        return replace(self, bias=bias)

    def pairs(self, sets: Sets, others: Sets) -> int:
        return queries.keys(self.query, sets.longest) * queries.keys(self.query, others.longest)

    def prepare(self, tokens: Array, mask: Array | None) -> Side:
        xp = backend.namespace(tokens)
        tokens, mask = queries.with_query_first(tokens, mask, self.query)
        tokens = dense.with_constant(tokens)
        lengths = base.norms(tokens)
        units = tokens / lengths[:, :, None]
        query, keys = units[:, 0, :], units[:, 1:, :]
        deviations = 0.5 * lengths[:, :1] * lengths[:, 1:]
        weights = lengths[:, 1:]
        if self.activation.homogeneous:
            weights = 0.5 * lengths[:, :1] * lengths[:, 1:] ** 2
        if mask is None:
            weights = weights / max(1, weights.shape[1])
        else:
            weights = weights * mask[:, 1:]
            weights /= backend.clip(xp.sum(mask[:, 1:], axis=1, keepdims=True), 1, None)
        means = None
        if self.bias is not None:
            means = 2.0 * (keys @ (query @ self.bias)[:, :, None])[:, :, 0]
        return Side(query, keys, weights, Preactivations(deviations, means))

    def block(self, rows: Side, columns: Side) -> Array:
        n, row_keys, _ = rows.keys.shape
        m, column_keys, _ = columns.keys.shape
        xp, kernel = backend.namespace(rows.keys), backend.zeros((n, m), rows.keys)
        if 0 in (n, m, row_keys, column_keys):
            return kernel
        arrays = self.activation.work + 2
        pairs = base.block_pairs(self.activation, kernel)
        longest = _WIDTH * pairs // (blocks.BLOCK_BYTES // (8 * arrays))
        width = max(1, min(m, longest, pairs // column_keys))
        per_key = column_keys * width
        largest = max(per_key, min(pairs, n * row_keys * per_key))
        work = backend.empty((arrays * largest,), kernel)  # allocated once: fresh memory is slow
        for across in blocks.slices(m, 1, width):
            right = columns.part(across, slice(None))
            # In memory the examples are innermost: the keys are one matrix (D, N · n).
            by_coordinate = backend.contiguous(xp.permute_dims(right.keys, (2, 1, 0)))
            right = right._replace(keys=xp.permute_dims(by_coordinate, (2, 1, 0)))
            for down in blocks.slices(n, per_key * row_keys, pairs):
                for keys in blocks.slices(row_keys, per_key, pairs):
                    left = rows.part(down, keys)
                    kernel[down, across] += _sum_over_keys(self.activation, left, right, work)
        return kernel


class Side(NamedTuple):
    """Examples on one side of the kernel: what is known for each key before any pair is formed."""

    queries: Array  # (n, D) unit vectors
    keys: Array  # (n, N, D) unit vectors
    weights: Array  # (n, N): what a moment is multiplied by, over the number of keys
    preactivations: Preactivations  # (n, N)

    def part(self, examples: slice, keys: slice) -> Side:
        return Side(
            self.queries[examples, :],
            self.keys[examples, keys, :],
            self.weights[examples, keys],
            self.preactivations.map(lambda array: array[examples, keys]),
        )


def _sum_over_keys(activation: Activation, rows: Side, columns: Side, work: Array) -> Array:
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
    arrays = activation.work + 2
    work = xp.reshape(work[: arrays * math.prod(shape)], (arrays, *shape))
    cosines, rho, rest = work[0, ...], work[1, ...], work[2:, ...]
    xp.matmul(left, right, out=xp.reshape(cosines, (n * row_keys, column_keys * m)))
    query_cosines = rows.queries @ backend.transpose(columns.queries)
    xp.multiply(cosines, query_cosines[:, None, None, :], out=rho)
    down = rows.preactivations.map(lambda array: array[:, :, None, None])
    across = columns.preactivations.map(lambda x: backend.contiguous(backend.transpose(x)))
    activation.closed_form()(down, across, rho, rest)
    rho *= cosines
    summed = rows.weights[:, None, :] @ xp.reshape(rho, (n, row_keys, column_keys * m))
    summed = xp.reshape(summed, (n, column_keys, m))
    return xp.einsum("abc,cb->ac", summed, columns.weights)
