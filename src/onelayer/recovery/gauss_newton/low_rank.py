"""Attention matrices of known rank: the tangent space of the rank-r matrices, and back to them.

The set of d x d matrices of rank r is a manifold of dimension r (2d - r). With U and V bases of
the column and row spaces of Θ, a direction is projected on its tangent space by

    D -> U Uᵀ D + (D - U Uᵀ D) V Vᵀ,

and Θ + D goes back to the manifold by its best approximation of rank r. Working with Θ itself and
not with factors Q Kᵀ leaves no freedom to change the factors without changing Θ, which would make
the normal equations singular. The key bias, if there is one, is a further row and stays free.

For D in the tangent space Θ + D has rank 2r at most: with A = Dᵀ U, and B = D V less its part in U,

    Θ + D = [U, B] [[Uᵀ Θ V + Aᵀ V, 1], [1, 0]] [V, A - V Vᵀ A]ᵀ,

so that two thin QR decompositions and the singular values of a 2r x 2r matrix do what those of the
d x d matrix would. In 384 dimensions with r = 32 that is all the difference between a step that
waits for them and one that does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data.chunks import Chunks
from onelayer.heads.dense import pack, unpack
from onelayer.recovery.gauss_newton import low_rank_products
from onelayer.recovery.gauss_newton.jacobian import Jacobian

_THIN = 4  # a rank of at most the dimension over this is so low that products gain by it


@dataclass(frozen=True)
class Tangent:
    """The directions in which (p, m·d) theta heads may move; all of them if `left` is None."""

    dim: int
    left: Array | None = None  # U (m, d, r)
    right: Array | None = None  # V (m, d, r)

    def directions(self, theta: Array) -> int:
        """How many independent ones there are: the dimension of the tangent space."""
        rows, columns = theta.shape
        if self.left is None:
            return int(rows * columns)
        rank = self.left.shape[2]
        return int(columns // self.dim * rank * (2 * self.dim - rank) + (rows - self.dim) * columns)

    def project(self, direction: Array) -> Array:
        """The nearest allowed direction."""
        if self.left is None or self.right is None:
            return direction
        xp = backend.namespace(direction)
        left, right = (xp.astype(b, direction.dtype, copy=False) for b in (self.left, self.right))
        heads = unpack(direction, self.dim)
        matrix, rest = heads[:, : self.dim, :], heads[:, self.dim :, :]
        inside = left @ (backend.transpose(left) @ matrix)
        matrix = inside + ((matrix - inside) @ right) @ backend.transpose(right)
        return pack(xp.concat([matrix, rest], axis=1))

    def jvp(self, products: Jacobian, direction: Array) -> Chunks[Any]:
        """J times an allowed direction."""
        thin = self._thin_bases()
        return (
            low_rank_products.jvp(products, *thin, direction) if thin else products.jvp(direction)
        )

    def vjp(self, products: Jacobian, rows: Chunks[Any]) -> Array:
        """Jᵀ u, projected on the allowed directions."""
        thin = self._thin_bases()
        if thin is None:
            return self.project(products.vjp(rows))
        return low_rank_products.vjp(products, *thin, rows)

    def _thin_bases(self) -> tuple[Array, Array] | None:
        """U and V where the rank is so low that products gain by factors."""
        if self.left is None or self.right is None or _THIN * self.left.shape[2] > self.dim:
            return None
        return self.left, self.right

    def retract(self, theta: Array, direction: Array) -> tuple[Array, Tangent]:
        """The nearest heads of the rank to those moved in an allowed direction, and their tangent.

        `theta` are the heads that this is the tangent space of.
        """
        if self.left is None or self.right is None:
            return theta + direction, self
        if 2 * self.left.shape[2] >= self.dim:
            whole = nearest(theta + direction, self.dim, self.left.shape[2])
            return whole, tangent(whole, self.dim, self.left.shape[2])
        xp = backend.namespace(theta)
        heads, change = unpack(theta, self.dim), unpack(direction, self.dim)
        matrix, left, right = _truncated_sum(
            heads[:, : self.dim, :], change[:, : self.dim, :], self.left, self.right
        )
        rest = heads[:, self.dim :, :] + change[:, self.dim :, :]
        return pack(xp.concat([matrix, rest], axis=1)), Tangent(self.dim, left, right)


def _truncated_sum(
    attention: Array, change: Array, left: Array, right: Array
) -> tuple[Array, Array, Array]:
    """The best approximation of rank r to Θ + D, all (m, d, d), and bases of its spaces."""
    xp = backend.namespace(attention)
    rank, turned = left.shape[2], backend.transpose
    across = turned(change) @ left  # A
    inside = turned(left) @ attention @ right + turned(across) @ right
    along = change @ right
    along = along - left @ (turned(left) @ along)  # B
    across = across - right @ (turned(right) @ across)
    (more_left, down), (more_right, over) = xp.linalg.qr(along), xp.linalg.qr(across)
    core = xp.concat(
        [
            xp.concat([inside, turned(over)], axis=2),
            xp.concat([down, xp.zeros_like(down)], axis=2),
        ],
        axis=1,
    )
    inner_left, sizes, inner_right = xp.linalg.svd(core, full_matrices=False)
    new_left = xp.concat([left, more_left], axis=2) @ inner_left[:, :, :rank]
    new_right = xp.concat([right, more_right], axis=2) @ turned(inner_right)[:, :, :rank]
    return (new_left * sizes[:, None, :rank]) @ turned(new_right), new_left, new_right


def tangent(theta: Array, dim: int, rank: int | None) -> Tangent:
    """The tangent space at heads of this rank."""
    if rank is None:
        return Tangent(dim)
    xp = backend.namespace(theta)
    left, _, right = xp.linalg.svd(unpack(theta, dim)[:, :dim, :], full_matrices=False)
    return Tangent(dim, left[:, :, :rank], backend.transpose(right)[:, :, :rank])


def nearest(theta: Array, dim: int, rank: int | None) -> Array:
    """The nearest heads of this rank."""
    if rank is None:
        return theta
    xp = backend.namespace(theta)
    heads = unpack(theta, dim)
    left, sizes, right = xp.linalg.svd(heads[:, :dim, :], full_matrices=False)
    matrix = (left[:, :, :rank] * sizes[:, None, :rank]) @ right[:, :rank, :]
    return pack(xp.concat([matrix, heads[:, dim:, :]], axis=1))
