"""The features of a random-feature network of one hidden layer, which reads its tokens in a row.

    φ_m(x) = M^{-1/2} relu(⟨w_m, vec(x_0, .., x_N, 1)⟩),    w_m from N(0, I/(N+2)),

the paper's RFMLP (arXiv 2307.11353): tokens on the unit sphere have |vec|² = N + 2, so that each
preactivation has variance 1. Sets shorter than the longest at fit are filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.features.attention_features import spread_out


@dataclass(frozen=True)
class MLPMap:
    """Random neurons, drawn once: `weights` (P, M), for `tokens` tokens of a fixed dimension."""

    weights: Array
    tokens: int

    @property
    def unit(self) -> int:
        """The number of features of one neuron."""
        return 1

    @property
    def size(self) -> int:
        """The number of features."""
        return int(self.weights.shape[1])

    def like(self, reference: Array) -> MLPMap:
        """The same map in the namespace, on the device and with the dtype of `reference`."""
        return replace(self, weights=backend.like(self.weights, reference))

    def workspace(self, tokens: int) -> int:  # noqa: ARG002 - the same for any number of tokens
        """The numbers in use for one neuron and one example while its feature is computed."""
        return 2

    def prepare(self, tokens: Array, mask: Array | None) -> Array:
        """Rows M^{-1/2} vec(x_0, .., x_N, 1), (b, P): relu lets the factor pass."""
        return flattened(tokens, mask, self.tokens) * self.size**-0.5

    def features(self, prepared: Array, part: slice) -> Array:
        """Columns `part` of Φ: (b, columns)."""
        return backend.relu(prepared @ self.weights[:, part])


def draw(
    features: int,
    tokens: int,
    dim: int,
    rng: np.random.Generator,
    varying: np.ndarray[Any, Any] | None = None,
) -> MLPMap:
    """Draw the neurons; more neurons of the same generator begin with the same ones.

    Weights are drawn for the coordinates of a token that are `varying` (dim,), all for None.
    """
    varying = np.ones(dim, bool) if varying is None else varying
    used = np.append(np.tile(varying, tokens), True)
    weights = spread_out(rng, np.ones(features, bool), used) / np.sqrt(tokens + 1)
    return MLPMap(np.ascontiguousarray(weights.T), tokens)


def flattened(tokens: Array, mask: Array | None, count: int) -> Array:
    """vec(x_0, .., x_N, 1) of every example, missing tokens zero: (b, count·d + 1)."""
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
