"""The examples of one recovery: cut, whitened, split, and put into blocks.

Recovery works in coordinates in which tokens have unit second moments. With x = x' A⁻¹, where
A = (E xᵀx)^(-1/2), the score x_a Θ x_b is x'_a (A⁻¹ Θ A⁻¹) x'_b, so nothing is lost and the
least-squares problem no longer inherits the conditioning of the inputs. Outputs are divided by
their root mean square, so that all errors are relative.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onelayer import arrays, attention, blocks
from onelayer.arrays import Array
from onelayer.layer import AttentionLayer

# A direction in which tokens hardly move is not blown up beyond this: nothing can be learned there.
_WHITENING_FLOOR = 1e-12


@dataclass(frozen=True)
class Block:
    """Some examples, ready for products: queries (n, k, p), keys (n, k, d), outputs (n·k, e).

    `allowed` (n or 1, k, k) says which keys a row may attend to, None for all. Rows of padding
    attend to nothing and have zero outputs, so they drop out of every sum; `counted` (n·k, 1) is 1
    for the other rows, None where all count.
    """

    queries: Array
    keys: Array
    outputs: Array
    allowed: Array | None
    counted: Array | None


@dataclass(frozen=True)
class Problem:
    """Examples in whitened coordinates, with what is needed to come back from them."""

    X: Array  # whitened tokens (n, k, d)
    Y: Array  # outputs over their root mean square (n, k, e)
    mask: Array | None
    causal: bool
    bias: bool
    whitening: Array  # A, symmetric
    output_scale: float

    @property
    def examples(self) -> int:
        return int(self.X.shape[0])

    @property
    def tokens(self) -> int:
        return int(self.X.shape[1])

    @property
    def dim(self) -> int:
        return int(self.X.shape[2])

    @property
    def out_dim(self) -> int:
        return int(self.Y.shape[2])

    @property
    def query_dim(self) -> int:
        """Rows of an attention matrix, the key bias counted as one."""
        return self.dim + int(self.bias)

    def unknowns(self, heads: int, rank: int | None) -> int:
        """The number of free numbers in a layer of this shape."""
        dim = self.dim
        free = dim * dim if rank is None else rank * (2 * dim - rank)
        per_head = free + dim * self.out_dim + dim * int(self.bias)
        return heads * per_head + self.out_dim * int(self.bias)

    def equations(self) -> int:
        """The number of observed numbers."""
        if self.mask is None:
            return self.examples * self.tokens * self.out_dim
        xp = arrays.namespace(self.mask)
        return int(xp.sum(xp.astype(self.mask, xp.int64))) * self.out_dim

    def take(self, index: Array) -> Problem:
        """The problem on some of the examples."""
        mask = None if self.mask is None else arrays.rows(self.mask, index)
        X, Y = arrays.rows(self.X, index), arrays.rows(self.Y, index)
        return Problem(X, Y, mask, self.causal, self.bias, self.whitening, self.output_scale)

    def blocks(self, heads: int) -> tuple[Block, ...]:
        """The examples in blocks that suit the working arrays of so many heads."""
        per_example = 8 * self.tokens * heads * (self.dim + self.tokens)
        return tuple(self._block(part) for part in blocks.slices(self.examples, per_example))

    def _block(self, part: slice) -> Block:
        xp = arrays.namespace(self.X)
        keys = self.X[part, ...]
        outputs = xp.reshape(self.Y[part, ...], (-1, self.out_dim))
        queries = attention.with_constant(keys) if self.bias else keys
        if self.mask is None:
            allowed = attention.allowed_pairs(None, self.causal, keys)
            return Block(queries, keys, outputs, allowed, None)
        mask = self.mask[part, ...]
        allowed = attention.allowed_pairs(mask, self.causal, keys) & mask[:, :, None]
        counted = xp.astype(xp.reshape(mask, (-1, 1)), keys.dtype)
        return Block(queries, keys, outputs * counted, allowed, counted)

    def layer(self, stacked: Array, weights: Array) -> AttentionLayer:
        """The layer in the caller's coordinates: Θ = A Θ' A, c = A c', W = A W', b = b'."""
        xp = arrays.namespace(stacked)
        dim, A = self.dim, self.whitening
        theta = attention.unstack(stacked, dim)
        columns = theta.shape[0] * dim
        projection = xp.reshape(weights[:columns, :], (-1, dim, self.out_dim))
        key_bias = theta[:, dim, :] @ A if self.bias else None
        output_bias = weights[columns, :] * self.output_scale if self.bias else None
        return AttentionLayer(
            A @ theta[:, :dim, :] @ A, A @ projection * self.output_scale, key_bias, output_bias
        )


def pose(X: Array, Y: Array, mask: Array | None, causal: bool, bias: bool) -> Problem:
    """The recovery problem of checked arrays X and Y, in float64 and whitened coordinates."""
    xp = arrays.namespace(X)
    X, Y = arrays.double(X), arrays.double(Y)
    rows = int(X.shape[0] * X.shape[1])
    if mask is not None:  # whatever is in the padding, zeros can do no harm
        X, Y = (xp.where(mask[:, :, None], array, xp.zeros_like(array)) for array in (X, Y))
        rows = int(xp.sum(xp.astype(mask, xp.int64)))
    # Largest entries are brought to 1 first, so that squares neither overflow nor vanish.
    token_scale, output_scale = (arrays.largest(array) or 1.0 for array in (X, Y))
    X, Y = X / token_scale, Y / output_scale
    flat = xp.reshape(X, (-1, X.shape[2]))
    whitening = inverse_root(arrays.transpose(flat) @ flat / rows)
    mean_square = arrays.squared_norm(Y) / (rows * Y.shape[2])
    scale = mean_square**0.5 or 1.0
    return Problem(
        X @ whitening,
        Y / scale,
        mask,
        causal,
        bias,
        whitening / token_scale,
        scale * output_scale,
    )


def inverse_root(moments: Array) -> Array:
    """(E xᵀx)^(-1/2) of tokens' second moments; directions that do not occur keep others' size."""
    xp = arrays.namespace(moments)
    values, vectors = xp.linalg.eigh(moments)
    largest = float(values[-1])
    if largest <= 0:
        return arrays.like(np.eye(moments.shape[0]), moments)
    values = xp.where(values > _WHITENING_FLOOR * largest, values, largest + 0 * values)
    return (vectors / xp.sqrt(values)) @ arrays.transpose(vectors)
