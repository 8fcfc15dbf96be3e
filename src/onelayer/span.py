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

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.array.moments import Moments, moments
from onelayer.array.rounding import COARSEST, rounding

Matrix: TypeAlias = np.ndarray[Any, Any]

# With columns at unit deviation a direction counts if tokens spread along it by more than this
# (eigenvalues of a covariance are exact to rounding errors of the largest of them) ..
_LEAST_SPREAD = 1e-7
# .. and by more than so many roundings of the numbers they are made of.
_ROUNDINGS = 3.0
_CONSTANT = 1e-12  # columns that vary by less than this share of their size are constant
_NOTHING = 1e-10  # as is what the mean has outside of the span


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
    whitening : array (d, r)
        A matrix A of the span such that (x - μ) A has mean zero and unit covariance.
    """

    mean: Matrix
    basis: Matrix
    deviations: Matrix
    outside: Matrix
    whitening: Matrix

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

    Columns are brought to unit deviation first: their units do not matter. There a direction counts
    if tokens spread along it by more than 1e-7, and by more than rounding their entries would make
    them spread. What a single column says is exact, however it was rounded.
    """
    mean, scatter = backend.to_numpy(found.mean), backend.to_numpy(found.scatter)
    squares = np.diag(scatter) / max(found.rows, 1)
    sizes = np.sqrt(squares + mean**2)
    varies = np.flatnonzero(np.sqrt(squares) > _CONSTANT * sizes)
    columns = np.sqrt(squares[varies])
    among = scatter[np.ix_(varies, varies)] / max(found.rows, 1) / columns / columns[:, None]
    values, vectors = np.linalg.eigh(among)
    spread = np.sqrt(np.maximum(values, 0.0))
    # How large tokens are along the directions, their mean included: that is what is rounded.
    along = np.sqrt((sizes[varies] / columns) ** 2 @ vectors**2)
    small = bool(np.any(spread <= _ROUNDINGS * COARSEST * along))
    unit = rounding(sample).unit if small else 0.0
    kept = spread > np.maximum(_LEAST_SPREAD, _ROUNDINGS * unit * along)
    back = np.zeros((int(kept.sum()), mean.size))  # whitened tokens times it are tokens
    back[:, varies] = (vectors[:, kept] * spread[kept]).T * columns
    _, deviations, basis = np.linalg.svd(back, full_matrices=False)
    whitening = np.zeros(back.T.shape)
    whitening[varies, :] = vectors[:, kept] / spread[kept] / columns[:, None]
    outside = mean - basis.T @ (basis @ mean)
    length = float(np.linalg.norm(outside))
    rounded = unit * np.sqrt((sizes * outside) @ (sizes * outside)) / (length or 1.0)
    largest = max(float(np.linalg.norm(mean)), deviations.max(initial=0.0))
    if len(back) == mean.size or length <= max(_NOTHING * largest, _ROUNDINGS * rounded):
        outside = np.zeros_like(outside)
    if len(back) < mean.size:  # of all matrices that do the same, the one within the span
        whitening = basis.T @ (basis @ whitening)
    return Span(mean * scale, basis.T, deviations * scale, outside * scale, whitening / scale)


def span_of(X: Array, mask: Array | None = None) -> Span:
    """The span of examples X (n, tokens, dim) in memory, without padding."""
    scale = backend.largest(X) or 1.0  # squares of entries up to 1 neither overflow nor vanish
    total = None
    for part in blocks.slices(X.shape[0], 16 * X.shape[1] * X.shape[2]):
        there = None if mask is None else mask[part, ...]
        some = moments(backend.double(X[part, ...]) / scale, there)
        total = some if total is None else total + some
    assert total is not None
    return span(total, X, scale)
