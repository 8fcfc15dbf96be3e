"""Rows on which all heads agree, and their common attention.

If every head gives row a of an example the same attention p, its output is y = p X W with
W = Σ_i W_i: a point in the affine hull of the tokens' images x_b W. So y is projected on that hull.
With D the images less their mean and p = 1/k + q,

    q = (y - mean) Dᵀ (D Dᵀ)⁺,        residual = |y - mean - q D|.

A row with a large residual shows heads that differ. A small residual is no proof, but an error of
size r in y moves p_b by r √((D Dᵀ)⁺_bb) at most, so residual and error of W together bound the
error of log p_b. The certificate by linear programming (is there a p ≥ 0 with Σ p = 1 and every
coordinate of y within τ of p X W?) gives the same result up to a factor √e in τ, see `certified`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from onelayer.array import backend
from onelayer.array.backend import Array, NumpyArray

# Squared distance of images that counts as zero, relative to its mean over the pairs of tokens.
_SAME_TOKEN = 1e-10


class Agreement(NamedTuple):
    """The attention of each row if all heads agree on it."""

    weights: Array  # p (n, k rows, k tokens), each row with sum 1, perhaps negative
    residual: Array  # (n, k): norm of what no p explains
    size: Array  # (n, k): about |p X W|, for uncorrelated images x_b W of the tokens
    spread: Array  # (n, k tokens): the largest change of p_b with an error of 1 in y


def agreement(X: Array, Y: Array, projection_sum: Array) -> Agreement:
    """The least-squares attention of all rows of tokens X (n, k, d) with outputs Y (n, k, e)."""
    xp = backend.namespace(X)
    tokens = X.shape[1]
    images = X @ projection_sum
    length = xp.sqrt(xp.sum(images * images, axis=(1, 2)) / tokens)
    centre = xp.mean(images, axis=1, keepdims=True)
    images, outputs = images - centre, Y - centre
    inverse = _centred_inverse(images @ backend.transpose(images), length)
    weights = (outputs @ backend.transpose(images)) @ inverse
    left = outputs - weights @ images
    weights = weights + 1 / tokens
    share = xp.sqrt(xp.sum(weights * weights, axis=2))  # at most 1 for p ≥ 0
    return Agreement(
        weights,
        xp.sqrt(xp.sum(left * left, axis=2)),
        length[:, None] * xp.clip(share, None, 1.0),
        xp.sqrt(xp.clip(xp.linalg.diagonal(inverse), 0.0, None)),
    )


def _centred_inverse(gram: Array, length: Array) -> Array:
    """The pseudo-inverses of matrices (n, k, k) that vanish on constants.

    They are very large where two tokens are equal. `length` (n,) is that of the images before they
    were centred. With J the projection on constants, (G + t J)⁻¹ = G⁺ + J / t.
    """
    xp = backend.namespace(gram)
    tokens = gram.shape[1]
    size = xp.sum(xp.linalg.diagonal(gram), axis=1) / max(1, tokens - 1)
    # If all tokens are equal only rounding errors are left, which must not be divided by.
    size = xp.where(size > _SAME_TOKEN**2 * length * length, size, xp.ones_like(size))
    size = size[:, None, None]
    constants = backend.like(np.full((tokens, tokens), 1 / tokens), gram)
    lifted = gram / size + constants + _SAME_TOKEN * backend.like(np.eye(tokens), gram)
    return (xp.linalg.inv(lifted) - constants) / size


def certified(
    X: NumpyArray, row_outputs: NumpyArray, projection_sum: NumpyArray, tolerance: NumpyArray
) -> NumpyArray:
    """For rows y (r, e) with tokens X (r, k, d): is there a p ≥ 0, Σ p = 1, |y - p X W|_∞ ≤ τ?

    One linear program for all rows: minimise Σ_r t_r subject to |y_r - p_r X_r W|_∞ ≤ t_r; then
    t_r is compared with `tolerance` (r,). A row with least-squares residual ρ and p ≥ 0 has
    ρ / √e ≤ t ≤ ρ, so the results are those of the least-squares test at τ, except for rows with
    residuals between τ and √e τ and for those that only a negative p explains.
    """
    images = X @ projection_sum  # (r, k, e)
    rows, tokens, out_dim = images.shape
    both = [np.concatenate([image.T, -image.T]) for image in images]
    block = sparse.block_diag(both, format="csr")
    slack = sparse.kron(sparse.eye(rows), np.full((2 * out_dim, 1), -1.0), format="csr")
    total = sparse.kron(sparse.eye(rows), np.ones((1, tokens)), format="csr")
    total = sparse.hstack([total, sparse.csr_matrix((rows, rows))])
    found = linprog(
        np.concatenate([np.zeros(rows * tokens), np.ones(rows)]),
        A_ub=sparse.hstack([block, slack], format="csr"),
        b_ub=np.concatenate([row_outputs, -row_outputs], axis=1).ravel(),
        A_eq=total,
        b_eq=np.ones(rows),
        method="highs",
    )
    if found.x is None:  # these programs are always feasible: the solver failed
        return np.zeros(rows, dtype=bool)
    return np.asarray(found.x[rows * tokens :] <= tolerance)
