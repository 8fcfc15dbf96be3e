"""Ridge regression on features, for many targets and many sample sizes at once.

The objective is |Φ v - y|² + α |v|². With K = Φ Φᵀ the minimiser is v = Φᵀ c, (K + α) c = y, and
with G = Φᵀ Φ it is (G + α) v = Φᵀ y: the smaller of the two is solved, the first where there are
fewer examples than features.

For a given α all sample sizes up to the number of features come from one factorization of K + α,
see `nested.py`; where that is large it is solved at half the precision and corrected, see
`mixed.py`. Larger sizes share the sums that make G, each factors its own. α may be chosen by
leave-one-out, from an eigendecomposition for every size, see `leave_one_out.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.linalg import LinAlgWarning

from onelayer import arrays
from onelayer.arrays import Array
from onelayer.random_features import leave_one_out, mixed, nested
from onelayer.random_features.design import Design
from onelayer.random_features.leave_one_out import Found
from onelayer.random_features.nested import Columns
from onelayer.random_features.progress import Track, untracked

Alpha = float | None  # None: chosen by leave-one-out

_MIXED_FROM = 2e10  # operations: what takes fewer is done in float64 at once
_LARGEST_ALPHA = 1e30  # that float32 has room for


def solve_features(
    design: Design, targets: Array, alpha: Alpha, sizes: Sequence[int], track: Track = untracked
) -> list[Found]:
    """The weights v (features, t) on the first s examples, for every s of `sizes`, ascending.

    `targets` (n, t) are in float64, and so is all that is computed; the last size is n.
    """
    design = design.double()
    small = [size for size in sizes if size <= design.columns]
    large = sizes[len(small) :]
    found = [] if not small else _by_kernel(design.first(small[-1]), targets, alpha, small, track)
    return found if not large else found + _by_features(design, targets, alpha, large, track)


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
    shifted = xp.asarray(matrix, copy=True)
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
    design: Design, targets: Array, alpha: Alpha, sizes: Sequence[int], track: Track
) -> list[Found]:
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


def _by_features(
    design: Design, targets: Array, alpha: Alpha, sizes: Sequence[int], track: Track
) -> list[Found]:
    """For more examples than features: one p x p matrix, to which every size adds its examples."""
    gram = arrays.zeros((design.columns, design.columns), targets)
    moments = arrays.zeros((design.columns, targets.shape[1]), targets)
    found = []
    for part in track(design.row_panels(cuts=sizes), "Gram matrix"):
        panel = arrays.transpose(design.by_rows(part))
        gram = arrays.add_gram(gram, panel)
        moments = moments + panel @ targets[part, :]
        if part.stop in sizes and alpha is not None:
            found.append(_solve_one(gram, moments, alpha))
        elif part.stop in sizes:
            rows = design.row_panels(cuts=[part.stop])
            seen = [rows_part for rows_part in rows if rows_part.stop <= part.stop]
            found.append(
                leave_one_out.by_features(design, gram, moments, targets, track(seen, "left out"))
            )
    return found
