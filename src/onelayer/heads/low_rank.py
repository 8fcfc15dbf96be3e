"""Heads with attention matrices of known rank: their tangent space, and retractions to them.

The set of d x d matrices of rank r is a manifold of dimension r (2d - r). With U and V bases of
the column and row spaces of Θ, a direction is projected on its tangent space by

    D -> U Uᵀ D + (D - U Uᵀ D) V Vᵀ,

and Θ + D is retracted to the manifold by its best approximation of rank r. Working with Θ itself
and not with factors Q Kᵀ leaves no freedom to change the factors without changing Θ, which would
make the normal equations singular. A key bias is free.

For D in the tangent space Θ + D has rank 2r at most: with A = Dᵀ U, and B = D V less its part in U,

    Θ + D = [U, B] [[Uᵀ Θ V + Aᵀ V, 1], [1, 0]] [V, A - V Vᵀ A]ᵀ,

so that two thin QR decompositions and the singular values of a 2r x 2r matrix replace those of the
d x d matrix, which would take most of the time of a step in 384 dimensions with r = 32.

Where r is far below d, products with the Jacobian use factors too, at a third of the cost. A
tangent direction is D_i = L_i R_iᵀ of rank 2r, with one column more for the row of the key bias.
Its scores x_a D_i x_b are inner products of x_a L_i and x_b R_i, so that tokens are multiplied by
matrices with 2r columns where D_i itself has d. In the transposed product G_i, the sum over
examples of x_aᵀ C_ab x_b with C the changes of attention, is needed in the tangent space only, and
for that G_iᵀ U_i, G_i V_i and the row of the bias suffice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.heads import dense
from onelayer.heads.base import Inputs
from onelayer.heads.dense import FULL_SPACE, FullSpace, flat_tokens, side_by_side

_THIN = 4  # products use factors if the rank is at most the dimension over this


@dataclass(frozen=True)
class LowRankTangent:
    """The tangent space at heads of rank r, by bases U and V (m, d, r)."""

    left: Array
    right: Array
    key_bias: bool
    inputs = None

    @property
    def _thin(self) -> bool:
        _, dim, rank = self.left.shape
        return bool(_THIN * rank <= dim)

    def _bases(self, reference: Array) -> list[Array]:
        return [backend.like(basis, reference) for basis in (self.left, self.right)]

    def dimension(self, theta: Array) -> int:
        """The number of independent directions."""
        heads, dim, rank = self.left.shape
        return int(heads * rank * (2 * dim - rank) + (theta.shape[0] - dim) * theta.shape[1])

    def project(self, direction: Array) -> Array:
        left, right = self._bases(direction)
        matrix, bias = dense.unpack(direction, left.shape[1])
        inside = left @ (backend.transpose(left) @ matrix)
        matrix = inside + ((matrix - inside) @ right) @ backend.transpose(right)
        return dense.pack(matrix, bias)

    def scores_jvp(self, direction: Array) -> Callable[..., Array]:
        if not self._thin:
            return partial(dense.scores, theta=direction)
        left, right = _factors(direction, *self._bases(direction))
        return partial(_scores, left=left, right=right, heads=self.left.shape[0])

    def scores_vjp(self, reference: Array) -> Callable[..., Array]:
        if not self._thin:
            return dense.scores_vjp
        bases = side_by_side(backend.namespace(reference).concat(self._bases(reference), axis=0))
        return partial(_scores_vjp, bases=bases, heads=self.left.shape[0])

    def lift(self, total: Array) -> Array:
        if not self._thin:
            return self.project(total)
        turned, (heads, _, rank) = backend.transpose, self.left.shape
        left, right = self._bases(total)
        both = dense.by_head(total[:, : 2 * heads * rank], rank)
        across, along = both[:heads, ...], both[heads:, ...]  # Gᵀ U and G V, (m, d, r)
        along = along - left @ (turned(left) @ along)
        matrix = left @ turned(across) + along @ turned(right)
        bias = turned(total[:, 2 * heads * rank :]) if self.key_bias else None
        return dense.pack(matrix, bias)

    def retract(self, theta: Array, direction: Array) -> tuple[Array, LowRankTangent]:
        _, dim, rank = self.left.shape
        if 2 * rank >= dim:
            whole = nearest(theta + direction, dim, rank)
            return whole, _tangent(whole, dim, rank)
        attention, bias = dense.unpack(theta, dim)
        change, bias_change = dense.unpack(direction, dim)
        matrix, left, right = _truncated_sum(attention, change, self.left, self.right)
        if bias is not None:
            bias = bias + bias_change
        return dense.pack(matrix, bias), LowRankTangent(left, right, self.key_bias)


Tangent: TypeAlias = FullSpace | LowRankTangent


def tangent(theta: Array, dim: int, rank: int | None) -> Tangent:
    """The tangent space at heads of this rank, or all directions if it is None."""
    return FULL_SPACE if rank is None else _tangent(theta, dim, rank)


def _tangent(theta: Array, dim: int, rank: int) -> LowRankTangent:
    attention, bias = dense.unpack(theta, dim)
    left, _, right = backend.namespace(theta).linalg.svd(attention, full_matrices=False)
    right = backend.transpose(right)
    return LowRankTangent(left[:, :, :rank], right[:, :, :rank], bias is not None)


def nearest(theta: Array, dim: int, rank: int | None) -> Array:
    """The nearest heads of this rank, or the heads themselves if it is None."""
    if rank is None:
        return theta
    attention, bias = dense.unpack(theta, dim)
    left, sizes, right = backend.namespace(theta).linalg.svd(attention, full_matrices=False)
    return dense.pack((left[:, :, :rank] * sizes[:, None, :rank]) @ right[:, :rank, :], bias)


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
    above = xp.concat([inside, turned(over)], axis=2)
    below = xp.concat([down, xp.zeros_like(down)], axis=2)
    core = xp.concat([above, below], axis=1)
    inner_left, sizes, inner_right = xp.linalg.svd(core, full_matrices=False)
    new_left = xp.concat([left, more_left], axis=2) @ inner_left[:, :, :rank]
    new_right = xp.concat([right, more_right], axis=2) @ turned(inner_right)[:, :, :rank]
    return (new_left * sizes[:, None, :rank]) @ turned(new_right), new_left, new_right


def _factors(direction: Array, left: Array, right: Array) -> tuple[Array, Array]:
    """L (p, m·q) and R (d, m·q) of a tangent direction, q = 2 r, or one more for a key bias."""
    xp, turned = backend.namespace(direction), backend.transpose
    matrix, bias = dense.unpack(direction, left.shape[1])
    along = matrix @ right  # D = U Aᵀ + B Vᵀ with A = Dᵀ U, and B = D V less its part in U
    along = along - left @ (turned(left) @ along)
    rows = xp.concat([left, along], axis=2)
    columns = [turned(matrix) @ left, right]
    if bias is not None:  # the last row times the constant of a query
        heads, dim, rank = left.shape
        below = backend.zeros((heads, 1, 2 * rank), rows)
        constant = xp.concat([backend.zeros((dim, 1), rows), backend.ones((1, 1), rows)], axis=0)
        constant = constant[None, :, :] * backend.ones((heads, 1, 1), rows)
        rows = xp.concat([xp.concat([rows, below], axis=1), constant], axis=2)
        columns.append(bias[:, :, None])
    return side_by_side(rows), side_by_side(xp.concat(columns, axis=2))


def _scores(inputs: Inputs, left: Array, right: Array, heads: int) -> Array:
    """How scores change along L Rᵀ, (n, k·m, k)."""
    rows, columns = _by_head(inputs.queries, left, heads), _by_head(inputs.keys, right, heads)
    xp, (n, tokens, _) = backend.namespace(left), inputs.keys.shape
    scores = xp.permute_dims(rows @ backend.transpose(columns), (0, 2, 1, 3))
    return xp.reshape(scores, (n, tokens * heads, tokens))


def _scores_vjp(inputs: Inputs, change: Array, bases: Array, heads: int) -> Array:
    """Gᵀ U, G V and the bias of G side by side, (d, 2 m·r + m), from [U V] (d, 2 m·r)."""
    xp, keys, (n, tokens, dim) = backend.namespace(change), inputs.keys, inputs.keys.shape
    change = xp.permute_dims(xp.reshape(change, (n, tokens, heads, tokens)), (0, 2, 1, 3))
    queries = inputs.queries[:, :, :dim]
    left, right = bases[:, : bases.shape[1] // 2], bases[:, bases.shape[1] // 2 :]
    across = backend.transpose(change) @ _by_head(queries, left, heads)
    along = change @ _by_head(keys, right, heads)
    sums = xp.sum(change, axis=2)[:, :, :, None]
    across, along, sums = (
        xp.reshape(xp.permute_dims(part, (0, 2, 1, 3)), (n * tokens, heads * part.shape[3]))
        for part in (across, along, sums)
    )
    below = backend.transpose(flat_tokens(keys)) @ xp.concat([across, sums], axis=1)
    middle = backend.transpose(flat_tokens(queries)) @ along
    return xp.concat([below[:, : across.shape[1]], middle, below[:, across.shape[1] :]], axis=1)


def _by_head(tokens: Array, factor: Array, heads: int) -> Array:
    """Tokens (n, k, d) times factors (d, m·q) of all heads, (n, m, k, q)."""
    xp, shape = backend.namespace(factor), (*tokens.shape[:2], heads, factor.shape[1] // heads)
    return xp.permute_dims(xp.reshape(flat_tokens(tokens) @ factor, shape), (0, 2, 1, 3))
