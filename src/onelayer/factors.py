"""Heads as factors of query, key, value and output: `AttentionLayer.factors`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onelayer.array import backend, checks
from onelayer.array.backend import Array


@dataclass(frozen=True, eq=False)
class HeadFactors:
    """Factors of attention matrices, Θ_i = Q_i K_iᵀ, and of projections, W_i = V_i O_i.

    Norms are balanced: columns of Q_i and K_i have the same norm, and so have columns of V_i and
    rows of O_i. The columns of each factor are orthogonal, in the order of singular values, the
    largest first, and zero where the rank of a head is smaller than that of others.

    Attributes
    ----------
    query, key : array of shape (m, d, r)
        Scores are (x_a Q_i) · (x_b K_i), and are not divided by √r.
    value : array of shape (m, d, q)
        What tokens are read through.
    output : array of shape (m, q, e)
        Where that is written to.

    Examples
    --------
    >>> from onelayer import AttentionLayer
    >>> factors = AttentionLayer.random(heads=4, dim=16, rank=3, out_dim=8).factors()
    >>> factors.query.shape, factors.value.shape, factors.output.shape
    ((4, 16, 3), (4, 16, 8), (4, 8, 8))
    """

    query: Array
    key: Array
    value: Array
    output: Array


def balanced(matrices: Array, rank: int | None, name: str) -> tuple[Array, Array]:
    """A (m, p, r) and B (m, r, q) with the same norms, A B the best approximation of rank r.

    Signs are such that the entry of the largest size in every column of A is positive.
    """
    plain = backend.to_numpy(matrices).astype(float)
    most = min(plain.shape[1:])
    if rank is not None and checks.positive_int(rank, name) > most:
        raise ValueError(f"{name} is {rank}, expected at most {most}, the rank a head can have")
    left, sizes, right = np.linalg.svd(plain, full_matrices=False)
    least = max(plain.shape[1:]) * backend.epsilon(matrices) * sizes[:, :1]
    sizes = np.where(sizes > least, sizes, 0.0)
    if rank is None:
        rank = max(1, int(np.count_nonzero(sizes, axis=1).max()))
    left, roots, right = left[:, :, :rank], np.sqrt(sizes[:, :rank]), right[:, :rank, :]
    largest = np.take_along_axis(left, np.abs(left).argmax(axis=1)[:, None, :], axis=1)[:, 0, :]
    roots = np.where(largest < 0, -roots, roots)
    found = left * roots[:, None, :], roots[:, :, None] * right
    return backend.like(found[0], matrices), backend.like(found[1], matrices)
