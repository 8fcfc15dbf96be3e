"""Standardization of tokens, learned in one pass over the examples of a fit.

Every coordinate of a token is centred and divided by its standard deviation times √k, where k is
the number of coordinates that vary, so that tokens have about unit norm, as the random weights
assume. A coordinate that does not vary becomes 0.

Means, and root sums of squares about them, are computed in float64 in two passes over a block of
tokens and merged from block to block: a mean far larger than the deviation costs no digits, and
squares do not overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array, NumpyArray

_CONSTANT = 4.0  # smallest deviation that counts, in rounding errors of the largest entry


@dataclass(frozen=True)
class TokenMoments:
    """Moments of tokens, for every coordinate (d,)."""

    weight: float  # of all tokens
    mean: NumpyArray
    root: NumpyArray  # the root of the weighted sum of squares about the mean
    largest: NumpyArray  # absolute value

    def __add__(self, other: TokenMoments) -> TokenMoments:
        weight = self.weight + other.weight
        share = other.weight / weight if weight > 0 else 0.0
        apart = other.mean - self.mean
        between = np.sqrt(self.weight * share) * np.abs(apart)
        return TokenMoments(
            weight,
            self.mean + share * apart,
            np.hypot(np.hypot(self.root, other.root), between),
            np.maximum(self.largest, other.largest),
        )


def moments(tokens: Array, weights: Array | None = None) -> TokenMoments:
    """Moments of tokens (count, d) with weights (count,), by default 1."""
    values = backend.to_numpy(tokens).astype(np.float64, copy=False)
    weight = np.ones(len(values)) if weights is None else backend.to_numpy(weights)
    values, weight = values[weight > 0], weight[weight > 0].astype(np.float64, copy=False)
    if len(values) == 0:
        nothing = np.zeros(tokens.shape[1])
        return TokenMoments(0.0, nothing, nothing, nothing)
    total = float(weight.sum())
    largest = np.abs(values).max(axis=0)
    mean = (weight / total) @ values
    apart = values - mean
    mean = mean + (weight / total) @ apart  # corrects rounding errors of the first pass
    apart = values - mean
    size = np.abs(apart).max(axis=0)
    apart /= np.where(size > 0, size, 1.0)
    root = size * np.sqrt(weight @ (apart * apart))
    return TokenMoments(total, mean, root, largest)


@dataclass(frozen=True)
class Standardization:
    """Subtract `offset` (d,) and multiply by `factor` (d,), 0 for coordinates that do not vary."""

    offset: NumpyArray
    factor: NumpyArray

    @classmethod
    def learned(cls, seen: TokenMoments, epsilon: float) -> Standardization:
        """From moments of tokens whose dtype has this relative precision."""
        deviation = seen.root / np.sqrt(seen.weight)
        if not (np.isfinite(deviation).all() and np.isfinite(seen.mean).all()):
            raise ValueError(
                f"X has entries up to {seen.largest.max():.3g}, of which the mean or the standard "
                "deviation overflows, expected smaller ones"
            )
        least = np.maximum(_CONSTANT * epsilon * seen.largest, np.finfo(np.float64).tiny)
        varies = deviation > least
        scale = deviation * np.sqrt(max(1, int(varies.sum())))
        factor = np.where(varies, 1.0 / np.where(varies, scale, 1.0), 0.0)
        return cls(seen.mean, factor)

    @property
    def scale(self) -> NumpyArray:
        """Divisors of the coordinates; 1 for those that do not vary."""
        varies = self.factor > 0
        return np.where(varies, 1.0 / np.where(varies, self.factor, 1.0), 1.0)

    def __call__(self, tokens: Array) -> Array:
        """Tokens (.., d) of the same kind and dtype, computed in float64."""
        double = backend.double(tokens)
        found = (double - backend.like(self.offset, double)) * backend.like(self.factor, double)
        return backend.like(found, tokens)
