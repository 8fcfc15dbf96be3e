"""Ridge regression in float32 with the accuracy of float64.

The product K = Φ Φᵀ is nearly all of the work, and twice as fast in float32. Its factor in float32
is an approximate inverse of K + α: coefficients c are corrected by solving for the residual
y - Φ (Φᵀ c) - α c, computed in float64 from the features, until it is small. A round costs as much
as a few predictions and gains three or four digits.

Features have a large mean, since relu(.) >= 0, so that K has one eigenvalue far above all others;
rounding errors of the factor are as large as it and would hide α. So the mean is removed panel by
panel: with m the mean feature of a panel Φ_b at unit length, and u = Φ_b m,

    Φ_b Φ_bᵀ = (Φ_b - u mᵀ)(Φ_b - u mᵀ)ᵀ + u uᵀ,

exactly, as Φ_b - u mᵀ is orthogonal to m. The first terms are factored; the second form a matrix of
low rank, which Woodbury's formula adds to the inverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onelayer.array import backend, linalg
from onelayer.array.backend import Array, NumpyArray
from onelayer.features.progress import Track
from onelayer.features.solvers import nested_sizes
from onelayer.features.solvers.design import Panels
from onelayer.features.solvers.nested_sizes import Columns

_ROUNDS = 10
_PROGRESS = 0.3  # stop if a round leaves more of the residual than this
_SETTLED = 1e-9  # relative to the targets; weights are then right to about 1e-10


def solve(
    phi: Panels, targets: Array, alpha: float, sizes: Sequence[int], track: Track
) -> list[tuple[Array, Array]] | None:
    """Weights Φᵀ c (features, t) and c (n, t) of every size; None if corrections do not settle."""
    columns = Columns(sizes, targets.shape[1])
    inverse = _approximate_inverse(phi.single(), alpha, columns, track)
    if inverse is None:
        return None
    right = columns.side_by_side([targets[:size, :] for size in sizes])
    dual = backend.zeros(right.shape, right)
    weights = backend.zeros((phi.columns, right.shape[1]), right)
    residual, error, settled = right, np.inf, 0
    for _ in range(_ROUNDS):
        its = slice(settled * columns.targets, None)
        unsettled = columns.after(settled)
        dual[:, its] += inverse.times(residual, settled)
        weights[:, its], fitted = _predictions(phi, dual[:, its], unsettled, track)
        residual = unsettled.cleared(right[:, its] - fitted - alpha * dual[:, its])
        errors = _relative(residual, right[:, its], columns.targets)
        previous, error = error, errors.max()
        if error <= _SETTLED:
            return list(zip(columns.split(weights), columns.split(dual), strict=True))
        if not error <= _PROGRESS * previous:
            return None
        done = int(np.argmax(errors > _SETTLED))  # smaller problems settle sooner
        residual, settled = residual[:, done * columns.targets :], settled + done
    return None


@dataclass(frozen=True)
class _Inverse:
    """(L Lᵀ + U Uᵀ)⁻¹ for the problems of all sizes, by a factor L in float32."""

    lower: Array  # L (n, n)
    spikes: Array  # U (n, r)
    woodbury: list[Array]  # for every size, (L Lᵀ)⁻¹ U (1 + Uᵀ (L Lᵀ)⁻¹ U)⁻¹, (n, r)
    columns: Columns

    def times(self, right: Array, first: int) -> Array:
        """The inverse times the columns of all sizes but the first ones, in float64."""
        columns = self.columns.after(first)
        found = backend.double(nested_sizes.solve(self.lower, backend.single(right), columns))
        for i, factor in enumerate(self.woodbury[first:]):
            part = found[:, columns.of(i)]
            found[:, columns.of(i)] = part - factor @ (backend.transpose(self.spikes) @ part)
        return found


def _approximate_inverse(
    phi: Panels, alpha: float, columns: Columns, track: Track
) -> _Inverse | None:
    """From features in float32; None if their products are not positive definite in it."""
    xp = backend.namespace(phi.sample)
    kernel = backend.zeros((phi.rows, phi.rows), phi.sample)
    spikes = []
    for part in track(phi.column_panels(), "Gram matrix"):
        panel = phi.by_columns(part)
        mean = xp.mean(panel, axis=0)
        length = float(xp.linalg.vector_norm(mean))
        mean = mean / length if length > 0 else mean
        spikes.append(panel @ mean)
        kernel = linalg.add_gram(kernel, linalg.less_outer(panel, spikes[-1], mean))
    linalg.add_to_diagonal(kernel, alpha)
    lower = linalg.cholesky(kernel)
    if lower is None:
        return None
    together, wide = xp.stack(spikes, axis=1), Columns(columns.sizes, len(spikes))
    right = wide.side_by_side([together[:size, :] for size in wide.sizes])
    solved = wide.split(backend.double(nested_sizes.solve(lower, right, wide)))
    together = backend.double(together)
    one = xp.eye(len(spikes), dtype=together.dtype, device=backend.device(together))
    woodbury = []
    for z in solved:
        inner = one + backend.transpose(backend.transpose(together) @ z)
        woodbury.append(backend.transpose(xp.linalg.solve(inner, backend.transpose(z))))
    return _Inverse(lower, together, woodbury, columns)


def _predictions(phi: Panels, dual: Array, columns: Columns, track: Track) -> tuple[Array, Array]:
    """The weights Φᵀ c and their predictions Φ Φᵀ c, for the problems of all sizes."""
    weights = backend.zeros((phi.columns, dual.shape[1]), dual)
    fitted = backend.zeros(dual.shape, dual)
    for part in track(phi.column_panels(), "correction"):
        panel = phi.by_columns(part)
        found = columns.weights(panel, dual)
        columns.add_fitted(fitted, panel, found)
        weights[part, :] = found
    return weights, fitted


def _relative(residual: Array, right: Array, targets: int) -> NumpyArray:
    """|residual| / |right| of every size, for the worst of its targets."""
    norms = [np.linalg.norm(backend.to_numpy(matrix), axis=0) for matrix in (residual, right)]
    relative = norms[0] / np.where(norms[1] == 0, 1.0, norms[1])
    worst: NumpyArray = relative.reshape(-1, targets).max(axis=1)
    return worst
