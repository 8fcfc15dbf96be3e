"""Products with J within the tangent space of matrices of low rank, at a third of the cost.

A tangent direction is D_i = L_i R_iᵀ of rank 2r (see `low_rank.py`), with one column more for the
row of the key bias. Its scores x_a D_i x_b are inner products of x_a L_i and x_b R_i, so that
tokens meet matrices with 2r columns where D_i itself has d. On the way back G_i, the sum over
examples of x_aᵀ C_ab x_b with C the changes of attention, is wanted in the tangent space alone,
and for that G_iᵀ U_i, G_i V_i and the row of the bias suffice.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.array.blocks import sum_over
from onelayer.data.chunks import Chunks
from onelayer.heads.dense import pack, unpack
from onelayer.recovery.gauss_newton import jacobian
from onelayer.recovery.gauss_newton.batches import Block
from onelayer.recovery.gauss_newton.jacobian import Jacobian
from onelayer.recovery.gauss_newton.varpro import Attended, flattened


def jvp(products: Jacobian, left: Array, right: Array, direction: Array) -> Chunks[Any]:
    """J dΘ of a direction (p, m·d) in the tangent space with the bases U and V, (m, d, r)."""
    left, right = backend.like(left, direction), backend.like(right, direction)
    factors = _factors(unpack(direction, left.shape[1]), left, right)
    moved: Chunks[Any] = products.blocks.map(
        _push, products.attended, products.images, *factors, left.shape[0]
    )
    return moved


def vjp(products: Jacobian, left: Array, right: Array, rows: Chunks[Any]) -> Array:
    """Jᵀ u, (p, m·d), projected on that tangent space."""
    left, right = backend.like(left, products.weights), backend.like(right, products.weights)
    bases = pack(backend.namespace(left).concat([left, right], axis=0))
    found = products.blocks.map(
        _pull, products.attended, products.images, rows, bases, left.shape[0]
    ).reduce(operator.add)
    return _direction(found, left, right, with_bias=products.batches.output_bias)


def _factors(heads: Array, left: Array, right: Array) -> tuple[Array, Array]:
    """L (p, m·q) and R (d, m·q) of tangent directions (m, p, d), q = 2 r, or one more for a bias.

    D = U Aᵀ + B Vᵀ with A = Dᵀ U, and B = D V less its part in U.
    """
    xp, turned = backend.namespace(heads), backend.transpose
    dim = heads.shape[2]
    matrix, bias = heads[:, :dim, :], heads[:, dim:, :]
    along = matrix @ right
    along = along - left @ (turned(left) @ along)
    rows = xp.concat([left, along], axis=2)
    columns = xp.concat([turned(matrix) @ left, right, turned(bias)], axis=2)
    if bias.shape[1]:  # the last row times the constant of a query
        below = backend.zeros((rows.shape[0], 1, rows.shape[2]), rows)
        constant = xp.concat([backend.zeros((dim, 1), rows), backend.ones((1, 1), rows)], axis=0)
        constant = constant[None, :, :] * backend.ones((rows.shape[0], 1, 1), rows)
        rows = xp.concat([xp.concat([rows, below], axis=1), constant], axis=2)
    return pack(rows), pack(columns)


def _direction(sums: Array, left: Array, right: Array, with_bias: bool) -> Array:
    """The projection of G on the tangent space, (p, m·d), from what `_pull` gives."""
    xp, turned = backend.namespace(sums), backend.transpose
    heads, _, rank = left.shape
    both = unpack(sums[:, : 2 * heads * rank], rank)
    across, along = both[:heads, ...], both[heads:, ...]  # Gᵀ U and G V, (m, d, r)
    along = along - left @ (turned(left) @ along)
    matrix = left @ turned(across) + along @ turned(right)
    if with_bias:
        bias = turned(sums[:, 2 * heads * rank :])[:, None, :]
        matrix = xp.concat([matrix, bias], axis=1)
    return pack(matrix)


# For one chunk, a sequence of blocks


def _push(
    blocks: Sequence[Block],
    attended: Sequence[Attended],
    images: Sequence[Array],
    left: Array,
    right: Array,
    heads: int,
) -> tuple[Array, ...]:
    """J L Rᵀ, (n·k, e) for every block."""

    def scores(block: Block) -> Array:
        rows, columns = _by_head(block.queries, left, heads), _by_head(block.keys, right, heads)
        return _by_row(rows @ backend.transpose(columns))

    return jacobian.outputs_changes(attended, images, map(scores, blocks))


def _pull(
    blocks: Sequence[Block],
    attended: Sequence[Attended],
    images: Sequence[Array],
    rows: Sequence[Array],
    bases: Array,
    heads: int,
) -> Array:
    """Gᵀ U, G V and the bias of G = Jᵀ u side by side, (d, 2 m·r + m), from [U V] (d, 2 m·r)."""

    def term(place: tuple[Block, Array]) -> Array:
        block, change = place
        xp, (n, tokens, _) = backend.namespace(change), block.keys.shape
        change = xp.permute_dims(xp.reshape(change, (n, tokens, heads, tokens)), (0, 2, 1, 3))
        queries, keys = block.queries[:, :, : block.keys.shape[2]], block.keys
        left, right = bases[:, : bases.shape[1] // 2], bases[:, bases.shape[1] // 2 :]
        across = backend.transpose(change) @ _by_head(queries, left, heads)
        along = change @ _by_head(keys, right, heads)
        sums = xp.sum(change, axis=2)[:, :, :, None]
        across, along, sums = (
            xp.reshape(_by_row(part), (n * tokens, heads * part.shape[3]))
            for part in (across, along, sums)
        )
        keys, queries = flattened(keys), flattened(queries)
        below = backend.transpose(keys) @ xp.concat([across, sums], axis=1)
        middle = backend.transpose(queries) @ along
        return xp.concat([below[:, : across.shape[1]], middle, below[:, across.shape[1] :]], axis=1)

    changes = jacobian.changes_from(attended, images, rows)
    return sum_over(zip(blocks, changes, strict=True), term)


def _by_head(tokens: Array, factor: Array, heads: int) -> Array:
    """Tokens (n, k, d) times factors (d, m·q) of all heads, (n, m, k, q)."""
    xp = backend.namespace(factor)
    n, count, _ = tokens.shape
    moved = xp.reshape(flattened(tokens) @ factor, (n, count, heads, factor.shape[1] // heads))
    return xp.permute_dims(moved, (0, 2, 1, 3))


def _by_row(by_head: Array) -> Array:
    """(n, m, k, q) -> (n, k, m, q)."""
    return backend.namespace(by_head).permute_dims(by_head, (0, 2, 1, 3))
