"""Heads with any attention matrix: the layout of their parameters, scores and features.

For head i and example X (tokens are rows) the score of row a and key b is

    x_a Θ_i x_b + c_i x_b        (c_i is the head's key bias, zero if there is none).

Two choices keep every product large and free of copies. A query that ends with a constant 1 turns
the key bias into one more row of Θ_i. And theta (p, m·d) holds the heads side by side, so that
(queries @ theta) reshaped to (n, k·m, d) lists the rows (a, i) in the order that all later products
need: scores, attention and features never need a transposed copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.heads.base import Inputs
from onelayer.heads.softmax import softmax, softmax_jvp


def pack(attention: Array, key_bias: Array | None = None) -> Array:
    """Theta (p, m·d) from attention (m, d, d) and key biases (m, d); p = d + 1 with these, or d."""
    if key_bias is not None:
        rows = [attention, key_bias[:, None, :]]
        attention = backend.namespace(attention).concat(rows, axis=1)
    return side_by_side(attention)


def unpack(theta: Array, dim: int) -> tuple[Array, Array | None]:
    """Attention matrices (m, d, d) and key biases (m, d) or None: the inverse of `pack`."""
    heads = by_head(theta, dim)
    return heads[:, :dim, :], (heads[:, dim, :] if theta.shape[0] > dim else None)


def unpack_weights(weights: Array, heads: int, dim: int) -> tuple[Array, Array | None]:
    """Projections (m, d, e) and the output bias (e,) or None, from weights (m·d or m·d + 1, e)."""
    rows = heads * dim
    projection = backend.namespace(weights).reshape(weights[:rows, :], (heads, dim, -1))
    return projection, (weights[rows, :] if weights.shape[0] > rows else None)


def side_by_side(matrices: Array) -> Array:
    """(m, p, q) -> (p, m·q)."""
    heads, rows, columns = matrices.shape
    xp = backend.namespace(matrices)
    return xp.reshape(xp.permute_dims(matrices, (1, 0, 2)), (rows, heads * columns))


def by_head(theta: Array, dim: int) -> Array:
    """(p, m·q) -> (m, p, q) for q = dim: the inverse of `side_by_side`."""
    xp = backend.namespace(theta)
    return xp.permute_dims(xp.reshape(theta, (theta.shape[0], -1, dim)), (1, 0, 2))


def flatten(theta: Array, dim: int) -> Array:
    """All numbers of each head in one row, (m, p·d)."""
    heads = by_head(theta, dim)
    return backend.namespace(theta).reshape(heads, (heads.shape[0], -1))


def unflatten(rows: Array, dim: int) -> Array:
    """The inverse of `flatten`."""
    return side_by_side(backend.namespace(rows).reshape(rows, (rows.shape[0], -1, dim)))


def count(theta: Array, dim: int) -> int:
    """The number of heads."""
    return int(theta.shape[1] // dim)


def concat(thetas: Sequence[Array]) -> Array:
    """The heads of all arrays in one."""
    return backend.namespace(*thetas).concat(list(thetas), axis=1)


def drop(theta: Array, head: int, dim: int) -> Array:
    """Theta without one of its heads."""
    return concat([theta[:, : head * dim], theta[:, (head + 1) * dim :]])


def random(heads: int, dim: int, key_bias: bool, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Theta with standard normal entries."""
    return rng.standard_normal((dim + int(key_bias), heads * dim))


def head_index(theta: Array, dim: int) -> np.ndarray[Any, Any]:
    """The head that each entry of theta belongs to, in the shape of theta."""
    return np.broadcast_to(np.arange(theta.shape[1]) // dim, theta.shape)


def outer(queries: np.ndarray[Any, Any], change: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The derivative of what rows compute by theta, from that by their queries times theta.

    Queries (n, k, p) and changes (n, k, m, d, e) give (n·k, e, numbers in theta).
    """
    (n, tokens, heads, dim, out_dim), query_dim = change.shape, queries.shape[2]
    change = np.moveaxis(change, -1, 2).reshape(n * tokens, out_dim, 1, heads * dim)
    formed = change * queries.reshape(n * tokens, 1, query_dim, 1)
    return np.asarray(formed.reshape(n * tokens, out_dim, query_dim * heads * dim))


def with_constant(X: Array) -> Array:
    """Every token extended by a constant 1."""
    return backend.namespace(X).concat([X, backend.ones((*X.shape[:2], 1), X)], axis=2)


def flat_tokens(tokens: Array) -> Array:
    """Tokens (n, k, d) one below the other, (n·k, d)."""
    return backend.namespace(tokens).reshape(tokens, (-1, tokens.shape[2]))


def scores(inputs: Inputs, theta: Array) -> Array:
    """Scores of every row and head, (n, k·m, k), rows in the order (a, i); linear in theta."""
    return scores_of(inputs.keys, flat_tokens(inputs.queries) @ theta)


def scores_of(keys: Array, rows: Array) -> Array:
    """r_ai x_b for rows r (n·k, m·d), (n, k·m, k)."""
    n, tokens, dim = keys.shape
    by_example = (n, tokens * (rows.shape[1] // dim), dim)
    return backend.namespace(rows).reshape(rows, by_example) @ backend.transpose(keys)


def scores_vjp(inputs: Inputs, change: Array) -> Array:
    """Σ_ab change_ab x_aᵀ x_b of every head, in the shape of theta: the transpose of `scores`."""
    return backend.transpose(flat_tokens(inputs.queries)) @ features(change, inputs.keys)


def attention(inputs: Inputs, theta: Array, allowed: Array | None) -> Array:
    """Attention of every row and head, (n, k·m, k), rows in the order (a, i)."""
    return softmax(scores(inputs, theta), allowed)


def features(attention: Array, keys: Array) -> Array:
    """The attended tokens of every row, heads side by side: (n·k, m·d)."""
    n, tokens, dim = keys.shape
    shape = (n * tokens, attention.shape[1] // tokens * dim)
    return backend.namespace(attention).reshape(attention @ keys, shape)


def features_jvp(keys: Array, attention: Array, rows: Array) -> Array:
    """How features change with scores r_ai x_b for rows r (n·k, m·d); the map is symmetric."""
    return features(softmax_jvp(attention, scores_of(keys, rows)), keys)


class FullSpace:
    """All directions: theta may move anywhere."""

    inputs = None

    def dimension(self, theta: Array) -> int:
        """The number of independent directions."""
        return int(theta.shape[0] * theta.shape[1])

    def project(self, direction: Array) -> Array:
        return direction

    def retract(self, theta: Array, direction: Array) -> tuple[Array, FullSpace]:
        return theta + direction, self

    def scores_jvp(self, direction: Array) -> Callable[..., Array]:
        return partial(scores, theta=direction)

    def scores_vjp(self, _reference: Array) -> Callable[..., Array]:
        return scores_vjp

    def lift(self, total: Array) -> Array:
        return total


FULL_SPACE = FullSpace()
