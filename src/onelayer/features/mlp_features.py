"""Features of a random network with one hidden layer that reads all tokens in a row.

    φ_m(x) = M^{-1/2} σ(⟨w_m, vec(x_0, .., x_N, 1)⟩),    w_m from N(0, I/(N+2)),

is RFMLP of arXiv 2307.11353: tokens on the unit sphere have |vec|² = N + 2, so that each
preactivation has variance 1. Sets shorter than the longest at fit are padded with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array, NumpyArray
from onelayer.features.activations import Activation
from onelayer.features.activations.relu import RELU
from onelayer.features.attention_features import masked_normal


@dataclass(frozen=True)
class MLPMap:
    """Random neurons, drawn once: `weights` (P, M), for `tokens` tokens of a fixed dimension."""

    weights: Array
    tokens: int
    activation: Activation = RELU

    @property
    def unit(self) -> int:
        return 1

    @property
    def size(self) -> int:
        return int(self.weights.shape[1])

    def like(self, reference: Array) -> MLPMap:
        return replace(self, weights=backend.like(self.weights, reference))

    def workspace(self, tokens: int) -> int:  # noqa: ARG002 - the same for any number of tokens
        return 2

    def prepare(self, tokens: Array, mask: Array | None) -> Array:
        """Rows vec(x_0, .., x_N, 1), (b, P), times M^{-1/2} if the activation is homogeneous."""
        rows = flattened(tokens, mask, self.tokens)
        return rows * self.size**-0.5 if self.activation.homogeneous else rows

    def features(self, prepared: Array, part: slice) -> Array:
        found = self.activation.apply(prepared @ self.weights[:, part])
        return found if self.activation.homogeneous else found * self.size**-0.5


def draw(
    features: int,
    tokens: int,
    dim: int,
    rng: np.random.Generator,
    varying: NumpyArray | None = None,
    activation: Activation = RELU,
) -> MLPMap:
    """Draw neurons for `varying` (dim,) coordinates; the first do not depend on their number."""
    varying = np.ones(dim, bool) if varying is None else varying
    used = np.append(np.tile(varying, tokens), True)
    weights = masked_normal(rng, np.ones(features, bool), used) / np.sqrt(tokens + 1)
    return MLPMap(np.ascontiguousarray(weights.T), tokens, activation)


def flattened(tokens: Array, mask: Array | None, count: int) -> Array:
    """vec(x_0, .., x_N, 1) of every example, (b, count·d + 1); missing tokens are zero."""
    xp = backend.namespace(tokens)
    n, there, dim = tokens.shape
    if there > count:
        raise ValueError(
            f"X has sets of {there} tokens, expected at most {count} as at fit: "
            "a network that reads tokens in a row has no place for more"
        )
    if mask is not None:
        tokens = xp.where(mask[:, :, None], tokens, backend.zeros((1, 1, 1), tokens))
    rows = xp.reshape(tokens, (n, there * dim))
    padding = backend.zeros((n, (count - there) * dim), tokens)
    return xp.concat([rows, padding, backend.ones((n, 1), tokens)], axis=1)
