"""Softmax attention over a block of examples, with all heads side by side.

For head i and example X (tokens are rows) the attention of row a is the softmax over b of

    x_a Θ_i x_b + c_i x_b        (c_i is the head's key bias, zero if there is none).

Two choices keep every product large and free of copies. A query row that carries a constant 1
turns the key bias into one more row of Θ_i. And the heads are theta as columns, (p, heads·d), so
that (queries @ theta) reshaped to (n, tokens·heads, d) lists the rows (a, i) in the order that
all later products want: scores, attention and features never need a transposed copy.
"""

from __future__ import annotations

from onelayer.array import backend
from onelayer.array.backend import Array


def pack(attention: Array, key_bias: Array | None = None) -> Array:
    """(m, d, d) and (m, d) -> (p, m·d), p = d or, with a key bias as the last row, d + 1."""
    xp = backend.namespace(attention)
    if key_bias is not None:
        attention = xp.concat([attention, key_bias[:, None, :]], axis=1)
    heads, rows, dim = attention.shape
    return xp.reshape(xp.permute_dims(attention, (1, 0, 2)), (rows, heads * dim))


def unpack(theta: Array, dim: int) -> Array:
    """(p, m·d) -> (m, p, d): the inverse of `pack`, a key bias left in place as the last row."""
    xp = backend.namespace(theta)
    rows = theta.shape[0]
    return xp.permute_dims(xp.reshape(theta, (rows, -1, dim)), (1, 0, 2))


def with_constant(X: Array) -> Array:
    """Every token extended by a constant 1."""
    xp = backend.namespace(X)
    return xp.concat([X, backend.ones((*X.shape[:2], 1), X)], axis=2)


def allowed_pairs(mask: Array | None, causal: bool, X: Array) -> Array | None:
    """Which keys each row may attend to, (n or 1, tokens, tokens); None where all may all."""
    xp = backend.namespace(X)
    if mask is None and not causal:
        return None
    tokens = X.shape[1]
    device = backend.device(X)
    allowed = xp.ones((1, tokens, tokens), dtype=xp.bool, device=device)
    if causal:
        allowed = xp.tril(allowed)
    if mask is not None:
        allowed = allowed & mask[:, None, :]
    return allowed


def weights(queries: Array, keys: Array, theta: Array, allowed: Array | None) -> Array:
    """Attention of every row and head, (n, tokens·heads, tokens), rows in the order (a, i).

    A row that may attend to no key gets zeros: it attends to nothing.
    """
    xp = backend.namespace(queries, theta)
    n, tokens, rows = queries.shape
    dim = keys.shape[2]
    heads = theta.shape[1] // dim
    projected = xp.reshape(queries, (n * tokens, rows)) @ theta
    projected = xp.reshape(projected, (n, tokens * heads, dim))
    scores = projected @ backend.transpose(keys)
    if allowed is None:
        scores = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
        return scores / xp.sum(scores, axis=-1, keepdims=True)
    scores = xp.reshape(scores, (n, tokens, heads, tokens))
    allowed = allowed[:, :, None, :]
    nothing = xp.zeros_like(scores)
    highest = xp.max(xp.where(allowed, scores, nothing - xp.inf), axis=-1, keepdims=True)
    scores = xp.where(allowed, xp.exp(xp.where(allowed, scores - highest, nothing)), nothing)
    total = xp.sum(scores, axis=-1, keepdims=True)
    scores = scores / xp.where(total == 0, xp.ones_like(total), total)
    return xp.reshape(scores, (n, tokens * heads, tokens))


def features(attention: Array, keys: Array) -> Array:
    """The attended tokens of every row, heads side by side: (n·tokens, heads·d)."""
    xp = backend.namespace(attention)
    n, tokens, dim = keys.shape
    heads = attention.shape[1] // tokens
    return xp.reshape(attention @ keys, (n * tokens, heads * dim))
