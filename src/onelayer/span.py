"""The affine span of tokens: which directions they have, and what heads do along them.

Tokens x with mean μ and covariance V diag(s²) Vᵀ, V (d, r) with orthonormal columns, are
x = μ + t Vᵀ for some t (r,). Softmax ignores what is constant along a row of scores, so that of a
head with attention matrix Θ and key bias c, tokens of this span see

    x_a Θ x_b + c x_b  =  t_a (Vᵀ Θ V) t_b + (Vᵀ (Θᵀ μ + c)) t_b + what depends on a alone,

and of its projection W only Vᵀ W, with μ W part of one constant for all heads. These are the heads
on the span. Everything else about Θ, c and W is a gauge: no outputs on such tokens depend on it.
LayerNorm, for instance, puts tokens on a hyperplane, and a vocabulary of v words on a span of at
most v - 1 directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from onelayer import arrays, blocks
from onelayer.arrays import Array
from onelayer.rounding import COARSEST, rounding

Matrix: TypeAlias = np.ndarray[Any, Any]

# A direction counts if tokens spread along it by more than this share of their largest spread
# (eigenvalues of a covariance are exact to rounding errors of the largest of them) ..
_LEAST_SPREAD = 1e-7
# .. and by more than so many roundings of the numbers they are made of.
_ROUNDINGS = 4.0


@dataclass(frozen=True, eq=False)
class Moments:
    """Sums over tokens: how many, their mean (d,), and their scatter about it, (d, d) or (d,)."""

    rows: int
    mean: Array
    scatter: Array

    def __add__(self, other: Moments) -> Moments:
        """Those of both: scatters about the common mean (Chan, Golub and LeVeque 1983)."""
        rows = self.rows + other.rows
        if not rows:
            return self
        share = other.rows / rows
        apart = other.mean - self.mean
        square = apart * apart if self.scatter.ndim == 1 else apart[:, None] * apart[None, :]
        between = self.rows * share * square
        return Moments(rows, self.mean + share * apart, self.scatter + other.scatter + between)


def moments(tokens: Array, there: Array | None = None, by_column: bool = False) -> Moments:
    """Moments of tokens (.., d) in float64; those that are not `there` (..) do not count.

    With `by_column` the scatter is that of every column alone, (d,).
    """
    xp = arrays.namespace(tokens)
    flat = xp.reshape(tokens, (-1, tokens.shape[-1]))
    if there is None:
        rows = int(flat.shape[0])
        mean = xp.sum(flat, axis=0) / max(rows, 1)
        centred = flat - mean
    else:
        counted = xp.astype(xp.reshape(there, (-1, 1)), flat.dtype)
        rows = round(float(xp.sum(counted)))
        mean = xp.sum(flat * counted, axis=0) / max(rows, 1)
        centred = (flat - mean) * counted
    if by_column:
        return Moments(rows, mean, xp.sum(centred * centred, axis=0))
    return Moments(rows, mean, arrays.transpose(centred) @ centred)


@dataclass(frozen=True, eq=False)
class Span:
    """The affine span of tokens: mean + t basisᵀ, strongest directions first.

    Attributes
    ----------
    mean : array (d,)
        The mean token μ.
    basis : array (d, r)
        Orthonormal directions V along which tokens spread.
    deviations : array (r,)
        Standard deviations of tokens along them.
    outside : array (d,)
        The part of the mean that no direction reaches: zero if the span contains the origin.
    """

    mean: Matrix
    basis: Matrix
    deviations: Matrix
    outside: Matrix

    @property
    def rank(self) -> int:
        """The number r of directions that the tokens have."""
        return int(self.basis.shape[1])

    def attention(self, attention: Matrix, key_bias: Matrix | None) -> Matrix:
        """What heads attend by on the span, (m, r + 1, r): VᵀΘV, and below it Vᵀ(Θᵀμ + c)."""
        inside = self.basis.T @ attention @ self.basis
        row = self.mean @ attention
        if key_bias is not None:
            row = row + key_bias
        return np.concatenate([inside, (row @ self.basis)[:, None, :]], axis=1)

    def projection(self, projection: Matrix) -> Matrix:
        """What heads project by on the span, (m, r, e): VᵀW."""
        return np.asarray(self.basis.T @ projection)

    def output_bias(self, projection: Matrix, output_bias: Matrix | None) -> Matrix:
        """The constant of the outputs on the span, (e,): b + Σ_i μ W_i."""
        constant = (self.mean @ projection).sum(axis=0)
        return np.asarray(constant if output_bias is None else constant + output_bias)


def span(found: Moments, sample: Array, scale: float = 1.0) -> Span:
    """The span of tokens with these moments, divided by `scale`, of which this is a sample.

    A direction counts if tokens spread along it by more than 1e-7 of their largest spread, and by
    more than rounding their entries would make them spread.
    """
    mean, scatter = arrays.to_numpy(found.mean), arrays.to_numpy(found.scatter)
    values, vectors = np.linalg.eigh(scatter / max(found.rows, 1))
    deviations, vectors = np.sqrt(np.maximum(values[::-1], 0.0)), vectors[:, ::-1]
    squares = np.diag(scatter) / max(found.rows, 1) + mean**2
    sizes = np.sqrt(squares @ vectors**2)  # of tokens along the directions, their mean included
    small = deviations.min() <= _ROUNDINGS * COARSEST * sizes.max()
    least = _ROUNDINGS * (rounding(sample).unit if small else 0.0)
    count = int(np.sum(deviations > np.maximum(_LEAST_SPREAD * deviations[0], least * sizes)))
    basis = vectors[:, :count]
    outside = mean - basis @ (basis.T @ mean)
    length = float(np.linalg.norm(outside))
    size = np.sqrt(squares @ outside**2) / (length or 1.0)
    largest = max(float(np.linalg.norm(mean)), deviations[0])
    if length <= max(_LEAST_SPREAD * largest, least * size):
        outside = np.zeros_like(outside)
    return Span(mean * scale, basis, deviations[:count] * scale, outside * scale)


def span_of(X: Array, mask: Array | None = None) -> Span:
    """The span of examples X (n, tokens, dim) in memory, without padding."""
    scale = arrays.largest(X) or 1.0  # squares of entries up to 1 neither overflow nor vanish
    total = None
    for part in blocks.slices(X.shape[0], 16 * X.shape[1] * X.shape[2]):
        there = None if mask is None else mask[part, ...]
        some = moments(arrays.double(X[part, ...]) / scale, there)
        total = some if total is None else total + some
    assert total is not None
    return span(total, X, scale)
