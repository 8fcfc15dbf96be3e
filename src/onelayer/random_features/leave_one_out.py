"""The penalty α of least leave-one-out error, from one eigendecomposition, for every target.

With K = Φ Φᵀ = U diag(λ) Uᵀ and c = (K + α)⁻¹ y, the error at example i of the regression on all
others is

    c_i / ((K + α)⁻¹)_ii,

and with G = Φᵀ Φ = V diag(λ) Vᵀ the same number is (y - Φ v)_i / (1 - h_i), h the diagonal of
Φ (G + α)⁻¹ Φᵀ: a product for every α, and no regression is ever repeated. The squares of these
errors are a sum over examples, and computed where the examples are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onelayer import arrays
from onelayer.arrays import Array
from onelayer.chunks import Told
from onelayer.random_features.design import Design, SpreadDesign
from onelayer.random_features.progress import Track, ticking

_PATH = np.logspace(-12, 1, 53)  # multiples of the largest eigenvalue, four a decade

Found = tuple[Array, np.ndarray[Any, Any]]  # coefficients (rows, t), and the α of every target


def by_kernel(kernel: Array, targets: Array) -> Found:
    """Dual coefficients (n, t) from the lower triangle of K (n, n) and targets (n, t)."""
    xp = arrays.namespace(kernel)
    values, vectors = arrays.eigh(kernel)
    path = _path(values)
    inverse = _inverse(values, path)
    rotated = arrays.transpose(vectors) @ targets
    diagonal = (vectors * vectors) @ inverse
    size = _nonzero(xp.max(xp.abs(targets), axis=0))
    errors = []
    for i in range(path.size):
        left_out = vectors @ (rotated * inverse[:, i, None]) / diagonal[:, i, None] / size
        errors.append(arrays.to_numpy(xp.sum(left_out * left_out, axis=0)))
    return _with_the_best(values, vectors, rotated, path, np.stack(errors))


def by_features(
    design: SpreadDesign, gram: Array, moments: Array, largest: Array, track: Track
) -> Found:
    """Weights (p, t) from the lower triangle of G (p, p), moments Φᵀ y and one more pass over Φ.

    `largest` (t,) has the largest |y| of every target.
    """
    values, vectors = arrays.eigh(gram)
    path = _path(values)
    rotated = arrays.transpose(vectors) @ moments
    spectrum = _Spectrum(vectors, _inverse(values, path), rotated, _nonzero(largest))
    told = ticking(track, design.steps, "left out")
    errors = design.summed(_left_out, spectrum, told=told)
    return _with_the_best(values, vectors, rotated, path, errors)


class _Spectrum(NamedTuple):
    """What the errors of all examples are computed from."""

    vectors: Array  # (p, p)
    inverse: Array  # (p, alphas)
    rotated: Array  # (p, t)
    size: Array  # (t,)


def _left_out(
    design: Design, targets: Array, spectrum: _Spectrum, told: Told
) -> np.ndarray[Any, Any]:
    """The squared errors of all examples when they are left out, (alphas, t)."""
    vectors, inverse, rotated, size = spectrum
    xp = arrays.namespace(vectors)
    errors = np.zeros((inverse.shape[1], targets.shape[1]))
    panels = design.row_panels()
    for done, part in enumerate(panels, start=1):
        turned = design.by_rows(part) @ vectors
        free = 1.0 - (turned * turned) @ inverse  # an example that decides alone has none left
        free = xp.where(
            free > arrays.epsilon(free), free, arrays.epsilon(free) * xp.ones_like(free)
        )
        for i in range(errors.shape[0]):
            fitted = turned @ (rotated * inverse[:, i, None])
            left_out = (targets[part, :] - fitted) / free[:, i, None] / size
            errors[i] += arrays.to_numpy(xp.sum(left_out * left_out, axis=0))
        told(done / len(panels))
    return errors


def _nonzero(largest: Array) -> Array:
    """The largest value of every target, so that no square overflows; 1 where all are zero."""
    xp = arrays.namespace(largest)
    return xp.where(largest > 0, largest, xp.ones_like(largest))


def _path(values: Array) -> np.ndarray[Any, Any]:
    """The α to try: down to where rounding errors of the eigenvalues take over."""
    largest = float(values[-1])
    least = values.shape[0] * arrays.epsilon(values)
    path: np.ndarray[Any, Any] = (largest if largest > 0 else 1.0) * _PATH[least <= _PATH]
    return path


def _inverse(values: Array, path: np.ndarray[Any, Any]) -> Array:
    """1 / (λ + α), (eigenvalues, alphas)."""
    xp = arrays.namespace(values)
    positive = xp.where(values > 0, values, xp.zeros_like(values))
    return 1.0 / (positive[:, None] + arrays.like(path, values)[None, :])


def _with_the_best(
    values: Array,
    vectors: Array,
    rotated: Array,
    path: np.ndarray[Any, Any],
    errors: np.ndarray[Any, Any],
) -> Found:
    """The coefficients of the α of least error (alphas, t) for every target.

    Of several that are as good, the largest: which of them rounding favours must not matter.
    """
    as_good = errors <= errors.min(axis=0) * (1 + 1e-9)
    alphas = path[path.size - 1 - np.argmax(as_good[::-1], axis=0)]
    return vectors @ (rotated * _inverse(values, alphas)), alphas
