"""Ridge regression on features, for many targets and many sample sizes at once.

The objective is |Φ v - y|² + α |v|². With K = Φ Φᵀ the minimiser is v = Φᵀ c, (K + α) c = y, and
with G = Φᵀ Φ it is (G + α) v = Φᵀ y: the smaller of the two is solved, the first where there are
fewer examples than features.

For a given α all sample sizes up to the number of features come from one factorization of K + α,
see `nested.py`; where that is large it is solved at half the precision and corrected, see
`mixed.py`. Larger sizes share the sums that make G, each factors its own. α may be chosen by
leave-one-out, from an eigendecomposition for every size, see `leave_one_out.py`.

G and Φᵀ y are sums over examples, and computed chunk by chunk where the examples live. For K all
examples meet all others: they are brought here.

On a GPU all is as in memory. What is large and only an approximation is in float32, which GPUs are
made for: K and its factor, in `mixed.py`. What the result rests on is in float64, slower as it may
be there: the residuals that correct for that factor, and G, whose condition is the square of that
of Φ and has nothing to correct it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from scipy.linalg import LinAlgWarning

from onelayer import arrays
from onelayer.arrays import Array
from onelayer.chunks import Told
from onelayer.random_features import leave_one_out, mixed, nested
from onelayer.random_features.design import Design, SpreadDesign
from onelayer.random_features.leave_one_out import Found
from onelayer.random_features.nested import Columns
from onelayer.random_features.progress import Track, ticking, untracked

Alpha = float | None  # None: chosen by leave-one-out

_MIXED_FROM = 2e10  # operations: what takes fewer is done in float64 at once
_LARGEST_ALPHA = 1e30  # that float32 has room for


def solve_features(
    design: SpreadDesign, alpha: Alpha, sizes: Sequence[int], track: Track = untracked
) -> list[Found]:
    """The weights v (features, t) on the first s examples, for every s of `sizes`, ascending.

    Targets are in float64, and so is all that is computed.
    """
    design = replace(design, sample=arrays.double(design.sample))
    small = [size for size in sizes if size <= design.columns]
    large = sizes[len(small) :]
    found = [] if not small else _by_kernel(design, alpha, small, track)
    return found if not large else found + _by_features(design, alpha, large, track)


def solve_kernel(kernel: Array, targets: Array, alpha: Alpha, sizes: Sequence[int]) -> list[Found]:
    """The dual coefficients c (s, t) of the first s examples, for every s of `sizes`, ascending.

    Of the kernel matrix (n, n) only the triangle on and below the diagonal is read.
    """
    if alpha is None:
        return [leave_one_out.by_kernel(kernel[:s, :s], targets[:s, :]) for s in sizes]
    lower = _factor(kernel, alpha)
    if lower is None:  # perhaps only the largest problems are singular
        return [_solve_one(kernel[:s, :s], targets[:s, :], alpha, scaled=True) for s in sizes]
    columns = Columns(sizes, targets.shape[1])
    solved = nested.solve(lower, columns.spread([targets[:s, :] for s in sizes]), columns)
    dual = [c[:s, :] for s, c in zip(sizes, columns.split(solved), strict=True)]
    return _paired(dual, [np.full(targets.shape[1], alpha)] * len(sizes))


def _paired(coefficients: list[Array], alphas: list[np.ndarray[Any, Any]]) -> list[Found]:
    return list(zip(coefficients, alphas, strict=True))


def _factor(matrix: Array, alpha: float) -> Array | None:
    """The lower factor of matrix + α; None where that is singular to working precision."""
    xp = arrays.namespace(matrix)
    shifted = arrays.copied(matrix)
    arrays.add_to_diagonal(shifted, alpha)
    lower = arrays.cholesky(shifted)
    if lower is None:
        return None
    # A pivot is what is left of its diagonal entry: no row's own scale can hide or feign a loss.
    left = xp.linalg.diagonal(lower) ** 2 / (xp.linalg.diagonal(matrix) + alpha)
    return lower if float(xp.min(left)) > matrix.shape[0] * arrays.epsilon(matrix) else None


def _solve_one(matrix: Array, right: Array, alpha: float, scaled: bool = False) -> Found:
    """(matrix + α)⁻¹ right, or the smallest solution and a warning where that is singular."""
    chosen = np.full(right.shape[1], alpha)
    lower = _factor(matrix, alpha)
    if lower is not None:
        forward = arrays.solve_lower(lower, right)
        return arrays.solve_lower(lower, forward, transposed=True), chosen
    warnings.warn(
        f"ridge regression with alpha={alpha:g} is singular to working precision: the smallest "
        "of its solutions was taken; a larger alpha, or alpha='loo', is better determined",
        LinAlgWarning,
        stacklevel=2,
    )
    return _smallest(matrix, right, alpha, scaled), chosen


def _smallest(matrix: Array, right: Array, alpha: float, scaled: bool) -> Array:
    """(matrix + α)⁺ right, perhaps with rows and columns scaled to a diagonal of ones.

    That is for kernels: an example far larger than the others would leave no digits for them. All
    solutions c give the same weights Φᵀ c there. For products of features it would change which
    of many weights are the smallest.
    """
    xp = arrays.namespace(matrix)
    shifted = xp.asarray(matrix, copy=True)
    arrays.add_to_diagonal(shifted, alpha)
    diagonal = xp.linalg.diagonal(shifted)
    scale = xp.ones_like(diagonal)
    if scaled:
        scale = xp.where(diagonal > 0, diagonal, scale) ** -0.5
    values, vectors = arrays.eigh(shifted * scale[:, None] * scale[None, :])
    noise = matrix.shape[0] * arrays.epsilon(matrix) * float(values[-1])
    safe = xp.where(values > noise, values, xp.inf * xp.ones_like(values))
    rotated = arrays.transpose(vectors) @ (right * scale[:, None])
    return scale[:, None] * (vectors @ (rotated / safe[:, None]))


# From features, by n x n products


def _by_kernel(
    spread: SpreadDesign, alpha: Alpha, sizes: Sequence[int], track: Track
) -> list[Found]:
    """For no more examples than features.

    Brought here, n examples of T tokens are n·T·d <= p·T·d numbers: fewer than the p x p that
    would travel otherwise, unless an example alone has more numbers than there are features.
    """
    design, targets = spread.between(0, sizes[-1]).here()
    large = design.rows**2 * design.columns >= _MIXED_FROM
    if alpha is not None and large and alpha < _LARGEST_ALPHA:
        settled = mixed.solve(design, targets, alpha, sizes, track)
        if settled is not None:
            return _paired(settled, [np.full(targets.shape[1], alpha)] * len(sizes))
    dual = solve_kernel(_gram(design, track), targets, alpha, sizes)
    columns = Columns(sizes, targets.shape[1])
    weights = _weights(design, columns.spread([c for c, _ in dual]), columns, track)
    return _paired(columns.split(weights), [chosen for _, chosen in dual])


def _gram(design: Design, track: Track) -> Array:
    """Φ Φᵀ in float64, of which only the triangle on and below the diagonal is to be read."""
    total = arrays.zeros((design.rows, design.rows), design.sample)
    for part in track(design.column_panels(), "Gram matrix"):
        total = arrays.add_gram(total, design.by_columns(part))
    return total


def _weights(design: Design, dual: Array, columns: Columns, track: Track) -> Array:
    """Φᵀ c for the problems of all sizes, (features, sizes·t)."""
    found = arrays.zeros((design.columns, dual.shape[1]), dual)
    for part in track(design.column_panels(), "weights"):
        found[part, :] = columns.weights(design.by_columns(part), dual)
    return found


# From features, by products of features


@dataclass(frozen=True)
class _Sums:
    """What regression on features needs to know of examples."""

    gram: Array  # Φᵀ Φ (p, p), of which only the triangle on and below the diagonal is to be read
    moments: Array  # Φᵀ y (p, t)
    largest: Array  # the largest |y| of every target, (t,)

    def __add__(self, other: _Sums) -> _Sums:
        xp = arrays.namespace(self.gram)
        largest = xp.maximum(self.largest, other.largest)
        return _Sums(self.gram + other.gram, self.moments + other.moments, largest)


def _by_features(
    design: SpreadDesign, alpha: Alpha, sizes: Sequence[int], track: Track
) -> list[Found]:
    """For more examples than features: every size adds its examples to the sums of those before."""
    parts = [design.between(start, stop) for start, stop in pairwise([0, *sizes])]
    told = ticking(track, sum(part.steps for part in parts), "Gram matrix")
    sums, found = None, []
    for part, size in zip(parts, sizes, strict=True):
        its_own = part.summed(_sums_of, told=told)
        sums = its_own if sums is None else sums + its_own
        found.append(_solve_sums(sums, design.between(0, size), alpha, track))
    return found


def _solve_sums(sums: _Sums, design: SpreadDesign, alpha: Alpha, track: Track) -> Found:
    if alpha is not None:
        return _solve_one(sums.gram, sums.moments, alpha)
    return leave_one_out.by_features(design, sums.gram, sums.moments, sums.largest, track)


def _sums_of(design: Design, targets: Array, told: Told) -> _Sums:
    """The sums over one chunk of examples, panel by panel."""
    xp = arrays.namespace(targets)
    gram = arrays.zeros((design.columns, design.columns), targets)
    moments = arrays.zeros((design.columns, targets.shape[1]), targets)
    panels = design.row_panels()
    for done, part in enumerate(panels, start=1):
        panel = arrays.transpose(design.by_rows(part))
        gram = arrays.add_gram(gram, panel)
        moments = moments + panel @ targets[part, :]
        told(done / len(panels))
    return _Sums(gram, moments, xp.max(xp.abs(targets), axis=0))
