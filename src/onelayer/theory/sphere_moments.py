"""Exact means and variances where tokens are independent and uniform on the unit sphere.

For a weighted sum Σ_i w_i F(x_0, x_i) over the keys they follow from three numbers, `PairMoments`:

    mean     = Σ_i w_i · E F,
    variance = Σ_i w_i² · E Var(F | x_0) + (Σ_i w_i)² · Var E[F | x_0].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from onelayer.array import backend

Numbers: TypeAlias = np.ndarray[Any, Any]


class PairMoments(NamedTuple):
    """F(x_0, x_i): its mean E F, and E Var(F | x_0) and Var E[F | x_0], which sum to Var F."""

    mean: float
    within: float
    between: float

    def of_sum(self, weights: Numbers) -> tuple[float, float]:
        """Mean and variance of Σ_i w_i F(x_0, x_i), for weights of any shape.

        >>> PairMoments(mean=1.0, within=4.0, between=0.0).of_sum(np.ones(8) / 8)
        (1.0, 0.5)
        """
        total = float(np.sum(weights))
        within = backend.squared_norm(weights) * self.within
        return total * self.mean, within + total**2 * self.between


def coordinate(power: int, dim: int) -> float:
    """E <u, x>^k for a unit vector u: (k-1)!! / (d (d+2) ... (d+k-2)) if k is even, else 0.

    >>> coordinate(2, dim=4), coordinate(3, dim=4), coordinate(4, dim=4)
    (0.25, 0.0, 0.125)
    """
    if power % 2:
        return 0.0
    return math.prod((2 * i + 1) / (dim + 2 * i) for i in range(power // 2))


def linear_power(power: int, beta: Numbers) -> tuple[float, float]:
    """Mean and variance of <β, x>^p."""
    scale = math.sqrt(backend.squared_norm(beta)) ** power
    mean = scale * coordinate(power, len(beta))
    return mean, scale**2 * coordinate(2 * power, len(beta)) - mean**2


def weighted_correlation(power: int, beta: Numbers) -> PairMoments:
    """F = <x_0, S x_i>^q <β, x_i>, for any orthogonal S.

    With t = <Sᵀx_0, x_i> and E[x_i | t] = t Sᵀx_0, the conditional mean E[F | x_0] is
    E[t^(q+1)] <β, Sᵀx_0>; and E F² = E[t^2q] E<β, x_i>², as t does not depend on where x_i is.
    """
    dim = len(beta)
    square = backend.squared_norm(beta) / dim
    between = coordinate(power + 1, dim) ** 2 * square
    return PairMoments(0.0, within=coordinate(2 * power, dim) * square - between, between=between)


def two_hops(keys: int, beta: Numbers) -> tuple[float, float]:
    """Mean and variance of x_0ᵀ A² β, A = (1/N) Σ_i x_i x_iᵀ: 0 and |β|² E tr(A⁴) / d².

    E tr(A⁴) = N^-4 Σ_ijkl E <x_i, x_j><x_j, x_k><x_k, x_l><x_l, x_i>, a sum over closed walks
    through the keys, sorted by how many of the four are different.
    """
    dim = len(beta)
    one = keys
    two = keys * (keys - 1) * (6 / dim + coordinate(4, dim))  # 3 + 1 or adjacent pairs; crossed
    three = 6 * keys * (keys - 1) * (keys - 2) / dim**2
    four = keys * (keys - 1) * (keys - 2) * (keys - 3) / dim**3
    return 0.0, backend.squared_norm(beta) * (one + two + three + four) / keys**4 / dim**2
