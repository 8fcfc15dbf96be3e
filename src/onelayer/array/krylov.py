"""Conjugate gradients and Lanczos steps, as functions of a matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array

LinearMap: TypeAlias = Callable[[Array], Array]


def identity(vector: Array) -> Array:
    return vector


def never() -> bool:
    """Never stop early."""
    return False


def conjugate_gradients(
    product: LinearMap,
    right: Array,
    tolerance: float,
    most: int,
    precondition: LinearMap = identity,
    stop: Callable[[], bool] = never,
    reference: Array | None = None,
) -> tuple[list[Array], int]:
    """Solve A d = right for a positive semidefinite A, given by its `product`.

    Iterations end when the squared residual, in the norm of the preconditioner, has fallen to
    `tolerance` of what it was, after `most` of them, or when `stop()` is true. They are in the
    precision of `reference`. Returns the iterates after 1, 2, 4, .. products with the last one at
    the end, and the number of products.
    """
    xp = backend.namespace(right)
    size = float(xp.sum(right * precondition(right))) ** 0.5
    if size == 0:
        return [right], 0
    residual = xp.astype(right / size, (right if reference is None else reference).dtype)
    direction, solution = precondition(residual), xp.zeros_like(residual)
    current, used, path = 1.0, 0, []
    while current > tolerance and used < most and not stop():
        image = product(direction)
        curvature = float(xp.sum(direction * image))
        if not curvature > 0:  # only rounding errors are left
            break
        if used and used & (used - 1) == 0:
            path.append(solution)
        length = current / curvature
        solution = solution + length * direction
        residual = residual - length * image
        ready = precondition(residual)
        following = float(xp.sum(residual * ready))
        direction = ready + (following / current) * direction
        current, used = following, used + 1
    return [xp.astype(one, right.dtype) * size for one in [*path, solution]], used


class Ritz(NamedTuple):
    """Ritz values in ascending order, the vector of the smallest, and whether that converged."""

    values: np.ndarray[Any, Any]
    vector: Array
    converged: bool


def lanczos(
    product: LinearMap,
    start: Array,
    dimension: int,
    accurate: Callable[[np.ndarray[Any, Any], float], bool],
    steps: tuple[int, int],
    project: LinearMap = identity,
) -> Ritz:
    """Extreme eigenvalues of a symmetric matrix on a subspace of some dimension.

    The smallest Ritz value is an upper bound of the smallest eigenvalue. The iteration ends when
    `accurate(values, residual)` holds for the Ritz values and the residual of the smallest one,
    after at least `steps[0]` and at most `steps[1]` of them. New vectors are made orthogonal to all
    before, twice, and projected on the subspace: what rounding adds outside of it would grow to a
    vector that the matrix sends to zero.
    """
    xp = backend.namespace(start)
    shape, size = start.shape, math.prod(start.shape)
    basis = xp.reshape(start / backend.squared_norm(start) ** 0.5, (1, size))
    diagonal: list[float] = []
    off_diagonal: list[float] = []
    while True:
        image = xp.reshape(product(xp.reshape(basis[-1, :], shape)), (size,))
        diagonal.append(float(xp.sum(image * basis[-1, :])))
        for _ in range(2):
            image = image - (basis @ image) @ basis
        image = xp.reshape(project(xp.reshape(image, shape)), (size,))
        length = backend.squared_norm(image) ** 0.5
        matrix = np.diag(diagonal) + np.diag(off_diagonal, 1) + np.diag(off_diagonal, -1)
        values, vectors = np.linalg.eigh(matrix)
        done, (fewest, most) = len(diagonal), steps
        exhausted = length <= 10 * backend.epsilon(start) * max(float(values[-1]), 0.0)
        converged = done >= fewest and accurate(values, length * abs(vectors[-1, 0]))
        if exhausted or converged or done >= min(most, dimension):
            vector = xp.reshape(backend.like(vectors[:, 0], start) @ basis, shape)
            return Ritz(values, vector, exhausted or converged or done >= dimension)
        off_diagonal.append(length)
        basis = xp.concat([basis, xp.reshape(image / length, (1, size))], axis=0)
