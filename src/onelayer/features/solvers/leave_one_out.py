"""The penalty α of least leave-one-out error for every target, from one eigendecomposition.

With K = Φ Φᵀ = U diag(λ) Uᵀ and c = (K + α)⁻¹ y, the regression on all examples but i has at i the
error

    c_i / ((K + α)⁻¹)_ii,

and with G = Φᵀ Φ = V diag(λ) Vᵀ the same number is (y - Φ v)_i / (1 - h_i), h the diagonal of
Φ (G + α)⁻¹ Φᵀ: one product for every α. The squares of these errors are a sum over examples,
computed where the examples are.

With an intercept (see `intercept.py`) the first formula holds with Q (Qᵀ K Q + α)⁻¹ Qᵀ in place of
(K + α)⁻¹, and the second with centred features and targets, h_i gaining the share of example i in
the sum of the weights.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from onelayer.array import backend, linalg
from onelayer.array.backend import Array, NumpyArray
from onelayer.data.progress import Progress
from onelayer.features.progress import Track, ticking
from onelayer.features.solvers import intercept
from onelayer.features.solvers.design import Design, Panels
from onelayer.features.solvers.intercept import Centre, FeatureSums, Reflection, RidgeSolution

_PATH = np.logspace(-12, 1, 53)  # multiples of the largest eigenvalue, four a decade


def by_kernel(kernel: Array, targets: Array, ones: Array | None = None) -> RidgeSolution:
    """Dual coefficients (n, t) from K (n, n), its lower triangle; `ones` is s of `intercept.py`."""
    if ones is None:
        values, vectors = linalg.eigh(kernel)
        coefficients, alphas = _from_spectrum(values, vectors, targets, _path(values))
        return RidgeSolution(coefficients, alphas, backend.zeros((targets.shape[1],), targets))
    reflection = Reflection.of(kernel, ones)
    mean = intercept.mean_target(ones, targets)
    targets = targets - ones[:, None] * mean
    reduced = reflection.reduced(kernel)
    values, vectors = backend.zeros((0,), kernel), reduced
    if reduced.shape[0] > 0:  # a single example leaves an empty matrix
        values, vectors = linalg.eigh(reduced)
    values, path = _above_noise(values, reflection.mean)
    coefficients, alphas = _from_spectrum(values, reflection.expand(vectors), targets, path)
    return RidgeSolution(coefficients, alphas, mean + reflection.intercept(targets, coefficients))


def _from_spectrum(
    values: Array, vectors: Array, targets: Array, path: NumpyArray
) -> tuple[Array, NumpyArray]:
    xp = backend.namespace(targets)
    inverse = _inverse(values, path)
    rotated = backend.transpose(vectors) @ targets
    diagonal = (vectors * vectors) @ inverse
    diagonal = xp.where(diagonal > 0, diagonal, xp.ones_like(diagonal))  # nothing else is left
    size = _nonzero(xp.max(xp.abs(targets), axis=0))
    errors = []
    for i in range(path.size):
        left_out = vectors @ (rotated * inverse[:, i, None]) / diagonal[:, i, None] / size
        errors.append(backend.to_numpy(xp.sum(left_out * left_out, axis=0)))
    return _with_the_best(values, vectors, rotated, path, np.stack(errors))


def by_features(design: Design, sums: FeatureSums, track: Track) -> tuple[Array, NumpyArray]:
    """Weights (p, t) and penalties from sums over examples and one more pass over them."""
    values, vectors = linalg.eigh(sums.gram)
    path = _path(values)
    if sums.centre is not None:
        values, path = _above_noise(values, sums.centre.size)
    rotated = backend.transpose(vectors) @ sums.moments
    inverse, size = _inverse(values, path), _nonzero(sums.largest)
    spectrum = (vectors, inverse, rotated, size, sums.centre)
    errors = design.sum(_left_out, spectrum, progress=ticking(track, design.steps, "left out"))
    return _with_the_best(values, vectors, rotated, path, errors)


_Spectrum: TypeAlias = tuple[Array, Array, Array, Array, Centre | None]


def _left_out(phi: Panels, targets: Array, spectrum: _Spectrum, progress: Progress) -> NumpyArray:
    """The squared errors of all examples when they are left out, (alphas, t)."""
    vectors, inverse, rotated, size, centre = spectrum  # (p, p), (p, alphas), (p, t), (t,)
    xp = backend.namespace(vectors)
    errors = np.zeros((inverse.shape[1], targets.shape[1]))
    panels = phi.row_panels()
    for done, part in enumerate(panels, start=1):
        rows, wanted, alone = phi.by_rows(part), targets[part, :], 0.0
        if centre is not None:
            ones = phi.ones[part]
            rows, wanted = centre.centred(rows, wanted, ones)
            alone = (ones * ones / centre.weight)[:, None]
        turned = rows @ vectors
        # an example that determines its own prediction leaves no degrees of freedom
        free = 1.0 - alone - (turned * turned) @ inverse
        least = backend.epsilon(free)
        free = xp.where(free > least, free, least * xp.ones_like(free))
        for i in range(errors.shape[0]):
            fitted = turned @ (rotated * inverse[:, i, None])
            left_out = (wanted - fitted) / free[:, i, None] / size
            errors[i] += backend.to_numpy(xp.sum(left_out * left_out, axis=0))
        progress(done / len(panels))
    return errors


def _nonzero(largest: Array) -> Array:
    """The largest value of every target, so that no square overflows; 1 where all are zero."""
    xp = backend.namespace(largest)
    return xp.where(largest > 0, largest, xp.ones_like(largest))


def _path(values: Array) -> NumpyArray:
    """The α to try, above the rounding errors of the eigenvalues."""
    largest, least = float(values[-1]), values.shape[0] * backend.epsilon(values)
    path: NumpyArray = (largest if largest > 0 else 1.0) * _PATH[least <= _PATH]
    return path


def _above_noise(values: Array, mean: float) -> tuple[Array, NumpyArray]:
    """Eigenvalues about a mean, zero if they are rounding errors, and the α to try.

    Rounding errors are relative to `mean`, about the eigenvalue that the mean of the features had.
    """
    xp = backend.namespace(values)
    largest = float(values[-1]) if values.shape[0] > 0 else 0.0
    noise = max(values.shape[0], 1) * backend.epsilon(values) * (max(largest, 0.0) + mean)
    if not largest > noise:  # also where it is not a number
        return xp.zeros_like(values) * values, np.array([mean if mean > 0 else 1.0])
    path: NumpyArray = largest * _PATH
    return xp.where(values > noise, values, xp.zeros_like(values)), path[path >= noise]


def _inverse(values: Array, path: NumpyArray) -> Array:
    """1 / (λ + α), (eigenvalues, alphas)."""
    xp = backend.namespace(values)
    positive = xp.where(values > 0, values, xp.zeros_like(values))
    return 1.0 / (positive[:, None] + backend.like(path, values)[None, :])


def _with_the_best(
    values: Array, vectors: Array, rotated: Array, path: NumpyArray, errors: NumpyArray
) -> tuple[Array, NumpyArray]:
    """The coefficients of the α of least error (alphas, t) for every target, and these α."""
    # Of equally good ones the largest is taken, so that rounding does not decide.
    as_good = errors <= errors.min(axis=0) * (1 + 1e-9)
    alphas = path[path.size - 1 - np.argmax(as_good[::-1], axis=0)]
    return vectors @ (rotated * _inverse(values, alphas)), alphas
