"""Attention matrices of known rank: the tangent space of the rank-r matrices, and back to them.

The set of d x d matrices of rank r is a manifold of dimension r (2d - r). With U and V bases of
the column and row spaces of Θ, a direction is projected on its tangent space by

    D -> U Uᵀ D + (D - U Uᵀ D) V Vᵀ,

and Θ + D goes back to the manifold by its best approximation of rank r. Working with Θ itself and
not with factors Q Kᵀ leaves no freedom to change the factors without changing Θ, which would make
the normal equations singular. The key bias, if there is one, is a further row and stays free.
"""

from __future__ import annotations

from dataclasses import dataclass

from onelayer import arrays
from onelayer.arrays import Array
from onelayer.attention import stack, unstack


@dataclass(frozen=True)
class Tangent:
    """The directions in which (p, m·d) stacked heads may move; all of them if `left` is None."""

    dim: int
    left: Array | None = None  # U (m, d, r)
    right: Array | None = None  # V (m, d, r)

    def directions(self, stacked: Array) -> int:
        """How many independent ones there are: the dimension of the tangent space."""
        rows, columns = stacked.shape
        if self.left is None:
            return int(rows * columns)
        rank = self.left.shape[2]
        return int(columns // self.dim * rank * (2 * self.dim - rank) + (rows - self.dim) * columns)

    def project(self, direction: Array) -> Array:
        """The nearest allowed direction."""
        if self.left is None or self.right is None:
            return direction
        xp = arrays.namespace(direction)
        left, right = (xp.astype(b, direction.dtype, copy=False) for b in (self.left, self.right))
        heads = unstack(direction, self.dim)
        matrix, rest = heads[:, : self.dim, :], heads[:, self.dim :, :]
        inside = left @ (arrays.transpose(left) @ matrix)
        matrix = inside + ((matrix - inside) @ right) @ arrays.transpose(right)
        return stack(xp.concat([matrix, rest], axis=1))


def tangent(stacked: Array, dim: int, rank: int | None) -> Tangent:
    """The tangent space at heads of this rank."""
    if rank is None:
        return Tangent(dim)
    xp = arrays.namespace(stacked)
    left, _, right = xp.linalg.svd(unstack(stacked, dim)[:, :dim, :], full_matrices=False)
    return Tangent(dim, left[:, :, :rank], arrays.transpose(right)[:, :, :rank])


def nearest(stacked: Array, dim: int, rank: int | None) -> Array:
    """The nearest heads of this rank."""
    if rank is None:
        return stacked
    xp = arrays.namespace(stacked)
    heads = unstack(stacked, dim)
    left, sizes, right = xp.linalg.svd(heads[:, :dim, :], full_matrices=False)
    matrix = (left[:, :, :rank] * sizes[:, None, :rank]) @ right[:, :rank, :]
    return stack(xp.concat([matrix, heads[:, dim:, :]], axis=1))
