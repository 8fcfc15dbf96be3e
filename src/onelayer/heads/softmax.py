"""Attention as the softmax of scores, its derivative, and which keys a row may attend to."""

from __future__ import annotations

from onelayer.array import backend
from onelayer.array.backend import Array

_FEW_KEYS = 16  # up to as many, a sum over them is faster as a product with a matrix of ones


def allowed_pairs(mask: Array | None, causal: bool, X: Array) -> Array | None:
    """Which keys each row may attend to, (n or 1, k, k), or None if every row sees every key."""
    if mask is None and not causal:
        return None
    xp, tokens = backend.namespace(X), X.shape[1]
    allowed = xp.ones((1, tokens, tokens), dtype=xp.bool, device=backend.device(X))
    if causal:
        allowed = xp.tril(allowed)
    return allowed if mask is None else allowed & mask[:, None, :]


def softmax(scores: Array, allowed: Array | None) -> Array:
    """Attention (n, k·m, k) from scores of the same shape; zero for a row that may see no key."""
    xp = backend.namespace(scores)
    if allowed is None:
        scores = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
        return scores / xp.sum(scores, axis=-1, keepdims=True)
    shape, tokens = scores.shape, scores.shape[2]
    scores = xp.reshape(scores, (shape[0], tokens, shape[1] // tokens, tokens))
    allowed = allowed[:, :, None, :]
    nothing = xp.zeros_like(scores)
    highest = xp.max(xp.where(allowed, scores, nothing - xp.inf), axis=-1, keepdims=True)
    scores = xp.where(allowed, xp.exp(xp.where(allowed, scores - highest, nothing)), nothing)
    total = xp.sum(scores, axis=-1, keepdims=True)
    return xp.reshape(scores / xp.where(total == 0, xp.ones_like(total), total), shape)


def softmax_jvp(attention: Array, change: Array) -> Array:
    """P_ab (t_ab - Σ_c P_ac t_ac) for attention P and changes t of its scores; also the vjp."""
    tokens, weighted = change.shape[2], attention * change
    if tokens <= _FEW_KEYS:
        mean = weighted @ backend.ones((tokens, tokens), change)
    else:
        mean = backend.namespace(change).sum(weighted, axis=-1, keepdims=True)
    weighted -= attention * mean
    return weighted
