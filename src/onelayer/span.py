"""The affine span of tokens: which directions they have, and what heads do along them.

Tokens x with mean μ and covariance V diag(s²) Vᵀ, V (d, r) with orthonormal columns, are
x = μ + t Vᵀ for some t (r,). A head with attention matrix Θ and key bias c has the scores

    x_a Θ x_b + c x_b  =  t_a (Vᵀ Θ V) t_b + (Vᵀ (Θᵀ μ + c)) t_b + terms in a alone,

and softmax ignores terms in a alone. Of its projection W the outputs use Vᵀ W, and μ W in one
constant for all heads. These are the heads on the span. The rest of Θ, c and W is a gauge: outputs
on such tokens do not depend on it. LayerNorm, for instance, puts tokens on a hyperplane, and a
vocabulary of v words on a span of at most v - 1 directions.
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

# Smallest standard deviation along a direction of the span, with columns at unit deviation:
# eigenvalues of a covariance are exact to rounding errors of the largest of them ..
_LEAST_SPREAD = 1e-7
_ROUNDINGS = 3.0  # .. and the same in rounding errors of the tokens
_CONSTANT = 1e-12  # columns that vary by less than this share of their size are constant
_NOTHING = 1e-10  # a part of the mean outside of the span, smaller than this share, is zero


@dataclass(frozen=True, eq=False)
class Span:
    """The affine span of tokens: mean + t basisᵀ, strongest directions first."""

    mean: Matrix  # μ, (d,)
    basis: Matrix  # V, (d, r): orthonormal directions
    deviations: Matrix  # (r,), of tokens along the directions
    outside: Matrix  # (d,), the mean less its projection on V: zero if the span has the origin
    whitening: Matrix  # A, (d, r), within the span: (x - μ) A has mean zero and unit covariance

    @property
    def rank(self) -> int:
        """The number r of directions."""
        return int(self.basis.shape[1])

    def attention(self, attention: Matrix, key_bias: Matrix | None) -> Matrix:
        """Attention of heads on the span, (m, r + 1, r): VᵀΘV with the row Vᵀ(Θᵀμ + c) below."""
        inside = self.basis.T @ attention @ self.basis
        row = self.mean @ attention
        if key_bias is not None:
            row = row + key_bias
        return np.concatenate([inside, (row @ self.basis)[:, None, :]], axis=1)

    def projection(self, projection: Matrix) -> Matrix:
        """Projections of heads on the span, (m, r, e): VᵀW."""
        return np.asarray(self.basis.T @ projection)

    def output_bias(self, projection: Matrix, output_bias: Matrix) -> Matrix:
        """Output bias on the span, (e,): b + Σ_i μ W_i."""
        return np.asarray((self.mean @ projection).sum(axis=0) + output_bias)


def span(found: Moments, sample: Array, scale: float = 1.0) -> Span:
    """The span of tokens with these moments, divided by `scale`; `sample` has some of them.

    Columns are scaled to unit deviation first, so their units do not matter. A direction then
    belongs to the span if the deviation of tokens along it is more than 1e-7 and more than what
    rounding of their entries causes. A single column counts as exact, however it was rounded.
    """
    mean, scatter = backend.to_numpy(found.mean), backend.to_numpy(found.scatter)
    squares = np.diag(scatter) / max(found.rows, 1)
    sizes = np.sqrt(squares + mean**2)
    varies = np.flatnonzero(np.sqrt(squares) > _CONSTANT * sizes)
    columns = np.sqrt(squares[varies])
    among = scatter[np.ix_(varies, varies)] / max(found.rows, 1) / columns / columns[:, None]
    values, vectors = np.linalg.eigh(among)
    spread = np.sqrt(np.maximum(values, 0.0))
    # Root mean square of tokens along the directions, with their mean: these values are rounded.
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
    if len(back) < mean.size:  # of all matrices that whiten the tokens, the one within the span
        whitening = basis.T @ (basis @ whitening)
    return Span(mean * scale, basis.T, deviations * scale, outside * scale, whitening / scale)


def span_of(X: Array, mask: Array | None = None) -> Span:
    """The span of examples X (n, tokens, dim) in memory, without padding."""
    scale = backend.largest(X) or 1.0  # squares of entries up to 1 neither overflow nor vanish

    def moments_of(part: slice) -> Moments:
        there = None if mask is None else mask[part, ...]
        return moments(backend.double(X[part, ...]) / scale, there)

    parts = blocks.slices(X.shape[0], 16 * X.shape[1] * X.shape[2])
    return span(blocks.sum_over(parts, moments_of), X, scale)
