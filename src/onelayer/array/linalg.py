"""Dense linear algebra on symmetric and triangular matrices, for every backend."""

from __future__ import annotations

import math

import array_api_compat
import numpy as np
import scipy.linalg
from scipy.linalg import get_blas_funcs, get_lapack_funcs

from onelayer.array import backend
from onelayer.array.backend import Array


def add_gram(total: Array, rows: Array) -> Array:
    """total (m, m) + rows rowsᵀ for rows (m, k), in the memory of `total` where possible.

    Only the lower triangle is computed. Entries above the diagonal are arbitrary.
    """
    if array_api_compat.is_numpy_array(total):
        (syrk,) = get_blas_funcs(("syrk",), (total,))
        # BLAS stores by columns: the lower triangle of `total` is the upper one of its transpose.
        factor, transposed = (rows, 0) if rows.flags.f_contiguous else (rows.T, 1)
        return syrk(1.0, factor, beta=1.0, c=total.T, trans=transposed, lower=0, overwrite_c=1).T
    for part in _strips(total.shape[0]):  # a strip ends at the diagonal
        total[part, : part.stop] += rows[part, :] @ backend.transpose(rows[: part.stop, :])
    return total


def less_outer(matrix: Array, column: Array, row: Array) -> Array:
    """matrix - column rowᵀ, in the matrix's memory."""
    if array_api_compat.is_numpy_array(matrix) and matrix.size > 0:  # BLAS refuses empty ones
        (ger,) = get_blas_funcs(("ger",), (matrix,))
        return ger(-1.0, row, column, a=matrix.T, overwrite_a=1).T
    matrix -= column[:, None] * row[None, :]
    return matrix


def add_to_diagonal(matrix: Array, value: float) -> None:
    """matrix + value · identity, in place."""
    if array_api_compat.is_numpy_array(matrix):
        np.einsum("ii->i", matrix)[:] += value
    elif array_api_compat.is_torch_array(matrix):
        matrix.diagonal().add_(value)
    else:
        size, xp = matrix.shape[0], backend.namespace(matrix)
        matrix += value * xp.eye(size, dtype=matrix.dtype, device=backend.device(matrix))


def cholesky(matrix: Array) -> Array | None:
    """The lower factor of a symmetric matrix given by its lower triangle, in its memory for numpy.

    None if the matrix is not positive definite in its precision. Entries above the diagonal are
    arbitrary.
    """
    if array_api_compat.is_numpy_array(matrix):
        (potrf,) = get_lapack_funcs(("potrf",), (matrix,))
        upper, info = potrf(matrix.T, lower=0, overwrite_a=1, clean=0)
        return upper.T if info == 0 and np.isfinite(upper[-1, -1]) else None
    if array_api_compat.is_torch_array(matrix):
        factor, info = backend.namespace(matrix).linalg.cholesky_ex(matrix)
        return factor if int(info) == 0 else None
    try:
        factor = backend.namespace(matrix).linalg.cholesky(mirrored(matrix))
    except np.linalg.LinAlgError:
        return None
    return factor if math.isfinite(factor[-1, -1]) else None  # not every backend raises


def inverse(matrix: Array) -> Array:
    """The inverse of a symmetric matrix; for numpy in its memory and by its Cholesky factor."""
    if not array_api_compat.is_numpy_array(matrix):
        return symmetrised(backend.namespace(matrix).linalg.inv(matrix))
    diagonal = matrix.diagonal().copy()
    factor = cholesky(matrix)
    if factor is None:  # entries above the diagonal are unchanged
        np.einsum("ii->i", matrix)[:] = diagonal
        return symmetrised(np.linalg.inv(np.triu(matrix) + np.triu(matrix, k=1).T))
    (potri,) = get_lapack_funcs(("potri",), (matrix,))
    upper, _ = potri(factor.T, lower=0, overwrite_c=1)
    inverted: Array = upper.T
    for strip in _strips(len(inverted)):  # copies the lower triangle to the upper one
        inverted[: strip.start, strip] = inverted[strip, : strip.start].T
        inverted[strip, strip] = mirrored(inverted[strip, strip])
    return inverted


def symmetrised(matrix: Array) -> Array:
    """The mean of a matrix and its transpose."""
    return (matrix + backend.transpose(matrix)) / 2


def solve_lower(lower: Array, right: Array, transposed: bool = False) -> Array:
    """lower⁻¹ right, or lower⁻ᵀ right; only the triangle on and below the diagonal is read."""
    xp = backend.namespace(lower)
    if array_api_compat.is_numpy_array(lower):
        (trsm,) = get_blas_funcs(("trsm",), (lower,))
        return trsm(1.0, lower.T, right, lower=0, trans_a=0 if transposed else 1)
    if array_api_compat.is_torch_array(lower):
        factor = lower.mT if transposed else lower
        return xp.linalg.solve_triangular(factor, right, upper=transposed)
    triangle = xp.tril(lower)
    return xp.linalg.solve(backend.transpose(triangle) if transposed else triangle, right)


def eigh(matrix: Array) -> tuple[Array, Array]:
    """Eigenvalues, ascending, and eigenvectors of a matrix given by its lower triangle.

    All are NaN if the diagonal has overflowed.
    """
    xp = backend.namespace(matrix)
    if not bool(xp.all(xp.isfinite(xp.linalg.diagonal(matrix)))):
        return xp.nan * xp.linalg.diagonal(matrix), xp.nan * matrix
    if array_api_compat.is_numpy_array(matrix):
        values, vectors = scipy.linalg.eigh(matrix, lower=True, driver="evd", check_finite=False)
    else:
        values, vectors = xp.linalg.eigh(mirrored(matrix))
    return values, vectors


def mirrored(matrix: Array) -> Array:
    """The symmetric matrix whose lower triangle is given."""
    xp = backend.namespace(matrix)
    return xp.tril(matrix) + backend.transpose(xp.tril(matrix, k=-1))


def symmetric_product(matrix: Array, vector: Array) -> Array:
    """matrix @ vector, (n,), for a symmetric matrix (n, n) given by its lower triangle."""
    product = backend.zeros(vector.shape, vector)
    for part in _strips(matrix.shape[0]):
        left, diagonal = matrix[part, : part.start], mirrored(matrix[part, part])
        product[part] += left @ vector[: part.start] + diagonal @ vector[part]
        product[: part.start] += backend.transpose(left) @ vector[part]
    return product


def _strips(size: int) -> list[slice]:
    """At most eight slices of a range."""
    step = -(-size // 8)
    return [slice(start, min(size, start + step)) for start in range(0, size, step)]
