"""An attention layer learned by gradient descent: Adam on all weights.

With P_i the attention of head i, the layer is F = Σ_i P_i X W_i. For the loss
L = Σ |F - Y|² / Σ |Y|² and R = 2 (F - Y) / Σ |Y|²,

    dL/dW_i = Σ (P_i X)ᵀ R,        dL/dΘ_i = Σ Xᵀ S_i X,

sums over examples, where S_i = P_i * (D_i - row sums of P_i * D_i) and D_i = R W_iᵀ Xᵀ.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onelayer.layer import AttentionLayer

Numbers = np.ndarray[Any, Any]

_DECAY = (0.9, 0.999)  # of Adam's means of gradients and of their squares (arXiv 1412.6980)
_TINY = 1e-12  # so that a gradient of 0 makes a step of 0


def fit(
    X: Numbers, Y: Numbers, heads: int, steps: int, rate: float, rng: np.random.Generator
) -> AttentionLayer:
    """The layer after `steps` steps, at a rate that falls to 0 along half a cosine.

    X is (n, tokens, dim), tokens of about the norm √dim, and Y is (n, tokens, out_dim).
    """
    dim, out_dim = X.shape[2], Y.shape[2]
    weights = [
        rng.standard_normal((heads, dim, dim)) / (2 * dim),
        rng.standard_normal((heads, dim, out_dim)) / math.sqrt(heads * dim),
    ]
    means, squares = ([np.zeros_like(w) for w in weights] for _ in range(2))
    for step in range(1, steps + 1):
        _, gradients = loss(weights[0], weights[1], X, Y)
        now = rate * (1 + math.cos(math.pi * step / steps)) / 2
        for weight, gradient, mean, square in zip(weights, gradients, means, squares, strict=True):
            mean += (1 - _DECAY[0]) * (gradient - mean)
            square += (1 - _DECAY[1]) * (gradient**2 - square)
            size = np.sqrt(square / (1 - _DECAY[1] ** step)) + _TINY
            weight -= now * (mean / (1 - _DECAY[0] ** step)) / size
    return AttentionLayer(weights[0], weights[1])


def loss(
    attention: Numbers, projection: Numbers, X: Numbers, Y: Numbers
) -> tuple[float, tuple[Numbers, Numbers]]:
    """Σ |F(X) - Y|² / Σ |Y|², and its gradients by `attention` and `projection`."""
    transposed = np.swapaxes(X, 1, 2)
    scores = X @ attention[:, None] @ transposed  # (heads, n, tokens, tokens)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    attended = weights @ X
    rest = np.sum(attended @ projection[:, None], axis=0) - Y
    scale = np.sum(Y**2)
    slope = 2 * rest / scale
    by_weight = slope @ np.swapaxes(projection, 1, 2)[:, None] @ transposed
    by_score = weights * (by_weight - np.sum(weights * by_weight, axis=3, keepdims=True))
    by_attention = np.sum(transposed @ by_score @ X, axis=1)
    by_projection = np.sum(np.swapaxes(attended, 2, 3) @ slope, axis=1)
    return float(np.sum(rest**2) / scale), (by_attention, by_projection)
