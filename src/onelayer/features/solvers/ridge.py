"""Ridge regression on features, for many targets and many sample sizes at once.

The objective is |Φ v - y|² + α |v|². With K = Φ Φᵀ the minimiser is v = Φᵀ c, (K + α) c = y, and
with G = Φᵀ Φ it is (G + α) v = Φᵀ y. The smaller of the two is solved: the first with fewer
examples than features.

For a given α all sample sizes up to the number of features come from one factorization of K + α
(`nested_sizes.py`); if it is large it is computed in float32 and corrected (`mixed_precision.py`).
Larger sizes share the sums that make up G, and each factors its own. α may be chosen by
leave-one-out, from an eigendecomposition for every size (`leave_one_out.py`). An intercept is exact
in all of these forms (`intercept.py`).

G and Φᵀ y are sums over examples, computed chunk by chunk where the examples are. For K all
examples are collected in memory.

On a GPU the large approximations, K and its factor in `mixed_precision.py`, are in float32. Numbers
that determine the result are in float64, although slower there: residuals that correct for the
factor, and G, whose condition number is the square of that of Φ.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from scipy.linalg import LinAlgWarning

from onelayer.array import backend, linalg
from onelayer.array.backend import Array
from onelayer.data.progress import Progress
from onelayer.features.progress import Track, ticking, untracked
from onelayer.features.solvers import intercept, leave_one_out, mixed_precision, nested_sizes
from onelayer.features.solvers.design import Design, Panels
from onelayer.features.solvers.intercept import Alpha, BorderedTargets, Reflection, RidgeSolution
from onelayer.features.solvers.nested_sizes import Columns

_MIXED_FROM = 2e10  # operations; smaller problems are solved in float64
_LARGEST_ALPHA = 1e30  # that does not overflow in float32


def solve_features(
    design: Design,
    alpha: Alpha,
    sizes: Sequence[int],
    track: Track = untracked,
    fit_intercept: bool = False,
) -> list[RidgeSolution]:
    """The weights v (features, t) on the first s examples, for every s of `sizes`, ascending."""
    design = replace(design, sample=backend.double(design.sample))
    small = [size for size in sizes if size <= design.features.size]
    large = sizes[len(small) :]
    found = _by_kernel(design, alpha, small, track, fit_intercept) if small else []
    if not large:
        return found
    parts = [design.between(start, stop) for start, stop in pairwise([0, *large])]
    ticks = ticking(track, sum(part.steps for part in parts), "Gram matrix")
    sums = None
    for part, size in zip(parts, large, strict=True):  # each adds examples to the earlier sums
        added = part.sum(_sums_of, fit_intercept, progress=ticks)
        sums = added if sums is None else sums + added
        found.append(_solve_sums(sums, design.between(0, size), alpha, track))
    return found


def solve_kernel(
    kernel: Array, targets: Array, alpha: Alpha, sizes: Sequence[int], ones: Array | None = None
) -> list[RidgeSolution]:
    """The dual coefficients c (s, t) of the first s examples, for every s of `sizes`, ascending.

    Of the kernel matrix (n, n) only the lower triangle is read. With `ones` (n,), a constant 1 with
    its rows scaled as those of the kernel and targets are, there is an intercept.
    """
    leading = [(kernel[:s, :s], targets[:s, :], None if ones is None else ones[:s]) for s in sizes]
    if alpha is None:
        return [leave_one_out.by_kernel(*problem) for problem in leading]
    lower = _factor(kernel, alpha)
    if lower is None:  # perhaps only the largest problems are singular
        return [_solve_one_kernel(*problem, alpha) for problem in leading]
    bordered = BorderedTargets.of(targets, ones)
    columns = Columns(sizes, bordered.right.shape[1])
    right = columns.side_by_side([bordered.right[:s, :] for s in sizes])
    solved = columns.split(nested_sizes.solve(lower, right, columns))
    dual = [c[:s, :] for s, c in zip(sizes, solved, strict=True)]
    return [bordered.solution(c, c, alpha) for c in dual]


def _factor(matrix: Array, alpha: float, rounding: float = 0.0) -> Array | None:
    """The lower factor of matrix + α, None if singular; entries have errors of `rounding` size."""
    xp = backend.namespace(matrix)
    lower = linalg.cholesky(_shifted(matrix, alpha))
    if lower is None:
        return None
    # Pivots relative to their diagonal entries do not depend on the scale of a row.
    left = xp.linalg.diagonal(lower) ** 2 / (xp.linalg.diagonal(matrix) + alpha + rounding)
    return lower if float(xp.min(left)) > matrix.shape[0] * backend.epsilon(matrix) else None


def _solve_one_kernel(
    kernel: Array, targets: Array, ones: Array | None, alpha: float
) -> RidgeSolution:
    """Dual coefficients of one size, for a kernel that may be singular.

    If it is, its rows and columns are scaled to a diagonal of ones: an example far larger than the
    others would leave no digits for them. All solutions c give the same weights Φᵀ c. For products
    of features, scaling would change which of many weights are the smallest.
    """
    bordered = BorderedTargets.of(targets, ones)
    lower = _factor(kernel, alpha)
    if lower is not None:
        dual = _solved(lower, bordered.right)
        return bordered.solution(dual, dual, alpha)
    _warn_singular(alpha)
    xp = backend.namespace(kernel)
    shifted = _shifted(kernel, alpha)
    diagonal = xp.linalg.diagonal(shifted)
    scale = xp.where(diagonal > 0, diagonal, xp.ones_like(diagonal)) ** -0.5
    shifted = shifted * scale[:, None] * scale[None, :]
    alphas = np.full(targets.shape[1], alpha)
    if ones is None:
        dual = _smallest(shifted, targets * scale[:, None])
        return RidgeSolution(scale[:, None] * dual, alphas, bordered.mean)
    reflection = Reflection.of(shifted, ones * scale)
    centred = bordered.right[:, :-1] * scale[:, None]
    reduced = reflection.reduced(shifted)
    dual = reflection.expand(_smallest(reduced, reflection.project(centred), reflection.mean))
    intercept = bordered.mean + reflection.intercept(centred, dual)
    return RidgeSolution(scale[:, None] * dual, alphas, intercept)


def _shifted(matrix: Array, alpha: float) -> Array:
    shifted = backend.copied(matrix)
    linalg.add_to_diagonal(shifted, alpha)
    return shifted


def _solved(lower: Array, right: Array) -> Array:
    return linalg.solve_lower(lower, linalg.solve_lower(lower, right), transposed=True)


def _warn_singular(alpha: float) -> None:
    warnings.warn(
        f"ridge regression with alpha={alpha:g} is singular to working precision: the smallest "
        "of its solutions was taken; a larger alpha, or alpha='loo', is better determined",
        LinAlgWarning,
        stacklevel=2,
    )


def _smallest(matrix: Array, right: Array, rounding: float = 0.0) -> Array:
    """matrix⁺ right, in which eigenvalues of the size of rounding errors count as zero."""
    xp = backend.namespace(matrix)
    if matrix.shape[0] == 0:  # a single example and its intercept
        return right
    values, vectors = linalg.eigh(matrix)
    noise = matrix.shape[0] * backend.epsilon(matrix) * (float(values[-1]) + rounding)
    safe = xp.where(values > noise, values, xp.inf * xp.ones_like(values))
    return vectors @ ((backend.transpose(vectors) @ right) / safe[:, None])


def _by_kernel(
    design: Design, alpha: Alpha, sizes: Sequence[int], track: Track, fit_intercept: bool
) -> list[RidgeSolution]:
    """For no more examples than features.

    All n examples of T tokens are n·T·d <= p·T·d numbers: fewer than the p x p of G, unless one
    example has more numbers than there are features.
    """
    phi, targets = design.between(0, sizes[-1]).here()
    ones = phi.ones if fit_intercept else None
    large = phi.rows**2 * phi.columns >= _MIXED_FROM
    if alpha is not None and large and alpha < _LARGEST_ALPHA:
        bordered = BorderedTargets.of(targets, ones)
        settled = mixed_precision.solve(phi, bordered.right, alpha, sizes, track)
        if settled is not None:
            return [
                bordered.solution(weights, dual[:size, :], alpha)
                for size, (weights, dual) in zip(sizes, settled, strict=True)
            ]
    gram = backend.zeros((phi.rows, phi.rows), phi.sample)  # Φ Φᵀ, its lower triangle
    for part in track(phi.column_panels(), "Gram matrix"):
        gram = linalg.add_gram(gram, phi.by_columns(part))
    found = solve_kernel(gram, targets, alpha, sizes, ones)
    columns = Columns(sizes, targets.shape[1])
    dual = columns.side_by_side([one.coefficients for one in found])
    weights = backend.zeros((phi.columns, dual.shape[1]), dual)  # Φᵀ c of all sizes
    for part in track(phi.column_panels(), "weights"):
        weights[part, :] = columns.weights(phi.by_columns(part), dual)
    pairs = zip(found, columns.split(weights), strict=True)
    return [one._replace(coefficients=v) for one, v in pairs]


def _solve_sums(
    sums: intercept.FeatureSums, design: Design, alpha: Alpha, track: Track
) -> RidgeSolution:
    gram, moments, centre = sums.gram, sums.moments, sums.centre
    if alpha is None:
        weights, alphas = leave_one_out.by_features(design, sums, track)
    else:
        # Centred features that do not vary are rounding errors; their products are squares of them.
        rounding = 0.0 if centre is None else centre.size * backend.epsilon(gram)
        lower, alphas = _factor(gram, alpha, rounding), np.full(moments.shape[1], alpha)
        if lower is not None:
            weights = _solved(lower, moments)
        else:
            _warn_singular(alpha)
            weights = _smallest(_shifted(gram, alpha), moments, rounding)
    if centre is None:
        return RidgeSolution(weights, alphas, backend.zeros((moments.shape[1],), moments))
    return RidgeSolution(weights, alphas, centre.targets - centre.features @ weights)


def _sums_of(
    phi: Panels, targets: Array, fit_intercept: bool, progress: Progress
) -> intercept.FeatureSums:
    """The sums over one chunk of examples, panel by panel."""
    xp = backend.namespace(targets)
    gram = backend.zeros((phi.columns, phi.columns), targets)
    moments = backend.zeros((phi.columns, targets.shape[1]), targets)
    sums = intercept.FeatureSums(gram, moments, xp.max(xp.abs(targets), axis=0), None)
    panels = phi.row_panels()
    for done, part in enumerate(panels, start=1):
        rows, right = phi.by_rows(part), targets[part, :]
        centre = None
        if fit_intercept:
            ones = phi.ones[part]
            centre = intercept.centre_of(rows, right, ones)
            rows, right = centre.centred(rows, right, ones)
        panel = backend.transpose(rows)
        gram = linalg.add_gram(sums.gram, panel)
        sums = replace(sums, gram=gram, moments=sums.moments + panel @ right)
        if centre is not None and sums.centre is not None:
            sums = sums.about(*sums.centre.merged(centre))
        else:
            sums = replace(sums, centre=centre)
        progress(done / len(panels))
    return sums
