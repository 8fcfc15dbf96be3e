"""All heads along one direction of the keys: a sum of sigmoids.

For two tokens u and u - w the row of u is (u - w) ΣW_i + Σ_i σ(uΘ_i w) wW_i. With ΣW_i known
that leaves outputs z = ½ Σ_i tanh(u·a_i / 2) g_i for a_i = Θ_i w and g_i = wW_i: a network of one
hidden layer in u. If the g_i are linearly independent, the outputs of n rows span the same space as
the n-vectors tanh(U a_i / 2): its dimension is the number of heads, and each a_i is found alone, by
searching for an a such that tanh(U a / 2) lies in that space. A network does not change with the
sign of both a_i and g_i; signs follow from Σ g_i = w ΣW_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from scipy.optimize import least_squares

Matrix: TypeAlias = np.ndarray[Any, Any]

_NOISE_FACTOR = 30.0  # singular values above so many times the noise are those of heads
_SAME = 0.99  # cosine of two hidden units that are one
_SIGN = 0.2  # signs that are this far from ±1 are not found
_EXACT = 1e-6  # distance of a unit from the space of the outputs, or of a head's worth of noise


@dataclass(frozen=True, eq=False)
class Guide:
    """Scores a_i (m, p) and values g_i (m, e) of all heads along one direction."""

    scores: Matrix
    values: Matrix

    @property
    def heads(self) -> int:
        return len(self.scores)


def count(outputs: Matrix, noise: float) -> int:
    """The rank of outputs (n, e) whose entries have errors of this size."""
    values = np.linalg.svd(outputs, compute_uv=False)
    return int((values > _NOISE_FACTOR * noise * sum(outputs.shape) ** 0.5).sum())


def find(
    points: Matrix,
    outputs: Matrix,
    total: Matrix,
    heads: int,
    noise: float,
    rng: np.random.Generator,
    starts: int = 40,
) -> Guide | None:
    """The heads with these outputs (n, e) at points (n, p), whose values add up to `total`."""
    space = np.linalg.svd(outputs, full_matrices=False)[0][:, :heads]
    tolerance = max(_EXACT, noise / np.linalg.svd(outputs, compute_uv=False)[heads - 1] * 30)
    units: list[Matrix] = []
    for _ in range(starts * heads):
        found = _unit(points, space, rng)
        if found is not None and found[1] < tolerance:
            hidden = np.tanh(points @ np.stack([*units, found[0]]).T / 2)
            if np.linalg.svd(hidden / np.linalg.norm(hidden, axis=0))[1].min() > 1 - _SAME:
                units.append(found[0])
        if len(units) == heads:
            return _signed(points, outputs, total, np.stack(units))
    return None


def _unit(points: Matrix, space: Matrix, rng: np.random.Generator) -> tuple[Matrix, float] | None:
    """A hidden unit from a random start, and its distance from the space of the outputs."""

    def parts(unit: Matrix) -> tuple[Matrix, float, Matrix]:
        hidden = np.tanh(points @ unit / 2)
        length = float(np.linalg.norm(hidden)) or 1.0
        hidden = hidden / length
        return hidden, length, hidden - space @ (space.T @ hidden)

    def slope(unit: Matrix) -> Matrix:
        hidden, length, rest = parts(unit)
        change = (1 - (hidden * length) ** 2)[:, None] * points / (2 * length)
        return np.asarray(change - space @ (space.T @ change) - np.outer(rest, hidden @ change))

    start = rng.standard_normal(points.shape[1])
    start *= rng.uniform(0.5, 4.0) / np.linalg.norm(points @ start) * len(points) ** 0.5
    done = least_squares(
        lambda unit: parts(unit)[2], start, slope, xtol=1e-15, ftol=1e-15, gtol=1e-15, max_nfev=80
    )
    distance = float(np.linalg.norm(done.fun))
    return (done.x, distance) if np.isfinite(distance) else None


def _signed(points: Matrix, outputs: Matrix, total: Matrix, units: Matrix) -> Guide | None:
    """The heads of hidden units, with the signs with which their values add up to `total`."""
    hidden = np.tanh(points @ units.T / 2)
    values = np.linalg.lstsq(hidden / 2, outputs, rcond=None)[0]
    signs = np.linalg.lstsq(values.T, total, rcond=None)[0]
    if np.abs(np.abs(signs) - 1).max() > _SIGN:
        return None
    signs = np.sign(signs)[:, None]
    return Guide(units * signs, values * signs)
