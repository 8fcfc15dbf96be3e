"""Which tokens an output row depends on, estimated from raw examples.

Let z_b be the whitened token at place b and y_a the output row at place a. A ridge regression of
all outputs on all tokens has blocks B_ab, and on examples that it has not seen the energy

    E_ab = E <y_a - Σ_{c≠b} z_c B_ac, z_b B_ab>

is the part of y_a that z_b explains linearly: zero on average if y_a does not depend on z_b, for
any number of coefficients. Two halves of the examples predict each other. A layer without positions
treats all pairs a ≠ b alike; causal, padded and windowed attention do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import scipy.linalg

Values: TypeAlias = np.ndarray[Any, Any]

# Two halves that predict each other have dependent sums, at worst equal ones: standard errors are
# larger than those of independent examples by at most this factor.
DEPENDENT = np.sqrt(2.0)
_RANK = 1e-10  # smallest variance of a direction that occurs, relative to the largest
_VARYING = 0.1  # smallest variance of tokens at a place, relative to all, that counts as varying
_MOST_PLACES = 16  # longer sequences are averaged over neighbouring places
_MOST_COORDINATES = 48  # of a token and of an output: more are mixed at random


@dataclass(frozen=True)
class Energies:
    """E_ab as shares of the mean squared length of an output row."""

    by_example: Values  # (n, k, k), relative to the variance of tokens at place b
    varying: Values  # (k,), where there is any

    @property
    def places(self) -> int:
        return int(self.by_example.shape[1])

    @property
    def offset(self) -> Values:
        """b - a of all pairs of rows a and keys b, (k, k)."""
        place = np.arange(self.places)
        return np.asarray(place[None, :] - place[:, None])

    def mean(self, pairs: Values) -> tuple[float, float]:
        """The mean energy of some pairs (k, k) of rows and keys, and its standard error."""
        pairs = pairs * self.varying
        if not np.any(pairs):
            return np.nan, np.nan  # for which no comparison holds
        weights = pairs / np.sum(pairs)
        each = np.sum(self.by_example * weights, axis=(1, 2))
        return float(np.mean(each)), DEPENDENT * float(np.std(each)) / np.sqrt(len(each))


def whitened(X: Values, present: Values) -> Values:
    """Tokens (n, k, r) with mean 0, unit covariance in all r directions, and 0 if not present."""
    rows = X[present > 0]
    mean = rows.mean(axis=0)
    centred = rows - mean
    values, vectors = np.linalg.eigh(centred.T @ centred / max(len(rows), 1))
    kept = values > max(_RANK * float(values[-1]), np.finfo(np.float64).tiny)
    matrix = vectors[:, kept] / np.sqrt(values[kept])
    return np.asarray(((X - mean) @ matrix) * present[:, :, None])


def energies(tokens: Values, outputs: Values, rng: np.random.Generator) -> Energies:
    """How much each output row depends on each token: whitened tokens (n, k, r), outputs (n, k, e).

    Means of a place say nothing about dependence and are subtracted: a token that all examples have
    in one place would otherwise count as a constant.
    """
    z, y = (_reduced(values, rng) for values in (tokens, outputs))
    n, places, rank = z.shape
    out_dim = y.shape[2]
    found = np.zeros((n, places, places))
    flat, targets = z.reshape(n, -1), y.reshape(n, -1)
    for fitted, judged in halves(n):
        blocks = ridge(flat[fitted], targets[fitted]).reshape(places, rank, places, out_dim)
        parts = np.einsum("jbr,brae->jabe", z[judged], blocks, optimize=True)
        left = y[judged] - parts.sum(axis=2)
        found[judged] = np.sum((left[:, :, None, :] + parts) * parts, axis=3)
    variance = np.mean(z**2, axis=(0, 2))
    varying = variance > _VARYING * variance.mean()
    size = np.mean(np.sum(y**2, axis=2)) * np.where(varying, variance / variance.mean(), 1.0)
    return Energies(found / size, varying)


def halves(n: int) -> list[tuple[slice, slice]]:
    """Two pairs of halves of the examples: one to fit, the other to predict."""
    first, second = slice(0, n // 2), slice(n // 2, n)
    return [(first, second), (second, first)]


def ridge(features: Values, targets: Values) -> Values:
    """Ridge regression with the penalty for targets of which features explain about half."""
    gram = features.T @ features
    # p μ for p uncorrelated features of mean square μ
    penalty = float(np.trace(gram)) / max(len(features), 1) or 1.0
    gram[np.diag_indices_from(gram)] += penalty
    return np.asarray(scipy.linalg.solve(gram, features.T @ targets, assume_a="pos"))


def _reduced(values: Values, rng: np.random.Generator) -> Values:
    """Values (n, k, f) of fewer coordinates and places where there are many, centred by place."""
    _, tokens, size = values.shape
    if size > _MOST_COORDINATES:
        values = values @ (rng.standard_normal((size, _MOST_COORDINATES)) / np.sqrt(size))
    if tokens > _MOST_PLACES:
        groups = np.array_split(np.arange(tokens), _MOST_PLACES)
        values = np.stack([values[:, group].mean(axis=1) for group in groups], axis=1)
    return np.asarray(values - values.mean(axis=0))
