"""Products with J and S at a fit: how outputs, and the loss, change with theta.

Both are defined in `varpro.py`. Neither is ever formed: a product is a sum over chunks of examples,
in each of which it is a sum over blocks. How theta changes scores is left to the family of heads
(see `onelayer.heads`); how scores change outputs is computed here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.heads import dense
from onelayer.heads.base import TangentSpace
from onelayer.heads.dense import FULL_SPACE, flat_tokens
from onelayer.heads.softmax import softmax_jvp
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.gauss_newton.batches import (
    Batches,
    Block,
    PerBlock,
    Rows,
    map_blocks,
    sum_blocks,
)
from onelayer.recovery.gauss_newton.varpro import Attended, Fit


@dataclass(frozen=True, eq=False)
class Jacobian:
    """Products with J and S at one fit, in that fit's precision or in float32.

    `images` are the tokens as the heads project them, x_b W_i, arrays (n, m·k, e) block by block:
    changes of attention are summed up over them, with k products where W_i itself would take d.
    """

    batches: Batches
    blocks: PerBlock[Block]
    attended: PerBlock[Attended]
    images: Rows
    weights: Array
    inverse: Array

    def jvp(self, direction: Array, space: TangentSpace = FULL_SPACE) -> Rows:
        """J times a direction in the space, (n·k, e) for every block."""
        work = partial(_outputs_jvp, space.scores_jvp(direction))
        return map_blocks(work, self._inputs(space), self.attended, self.images)

    def vjp(self, rows: Rows, space: TangentSpace = FULL_SPACE) -> Array:
        """Jᵀ u, projected on the space."""
        work = partial(_outputs_vjp, space.scores_vjp(self.weights))
        values = (self._inputs(space), self.attended, self.images, rows)
        return space.lift(sum_blocks(work, *values))

    def _inputs(self, space: TangentSpace) -> PerBlock[Any]:
        return self.blocks if space.inputs is None else space.inputs

    def gauss_newton_product(self, direction: Array, space: TangentSpace = FULL_SPACE) -> Array:
        """S times a direction in the space, projected on it; S = Jᵀ (I - H (HᵀH)⁻¹ Hᵀ) J."""
        return self.vjp(self.unexplained(self.jvp(direction, space)), space)

    def unexplained(self, rows: Rows) -> Rows:
        """(I - H (HᵀH)⁻¹ Hᵀ) u: what no change of the weights can undo."""
        rows = varpro.persist_rows(self.batches, rows, self.weights)
        return varpro.less_fitted(rows, self.attended, self.inverse @ self.against(rows))

    def against(self, rows: Rows) -> Array:
        """Hᵀ u."""
        return sum_blocks(varpro.against_features, self.attended, rows)


def jacobian(fit: Fit, single: bool = False) -> Jacobian:
    """The products at a fit, in float32 if `single` or if the fit is."""
    batches, blocks, attended = fit.batches, fit.batches.chunks, fit.attended
    weights, inverse = fit.weights, fit.inverse
    if single or fit.single:
        weights, inverse = backend.single(weights), backend.single(inverse)
        theta, blocks = backend.single(fit.theta), batches.in_single(fit.heads)
        if attended.recomputed:  # then better in float32 as well
            attended = varpro.attended_at(batches, blocks, theta)
        elif not fit.single:
            singles = map_blocks(_single_attended, attended)
            attended = varpro.persist_attended(batches, singles, theta)
    images = _projected(batches, blocks, weights)
    return Jacobian(batches, blocks, attended, images, weights, inverse)


def gradient(fit: Fit, products: Jacobian | None = None, space: TangentSpace = FULL_SPACE) -> Array:
    """Jᵀ r on the space: minus half the gradient of the loss, as its regression part vanishes."""
    if products is None or not fit.single:  # products may be less precise than the fit
        products = jacobian(fit)
    return backend.double(products.vjp(fit.residuals, space))


def _projected(batches: Batches, blocks: PerBlock[Block], weights: Array) -> Rows:
    """Tokens as the heads project them (see `Jacobian`), held if they fit."""
    heads = (int(weights.shape[0]) - int(batches.output_bias)) // batches.dim
    projections, _ = dense.unpack_weights(weights, heads, batches.dim)
    work = partial(_images, projections=dense.side_by_side(projections), heads=heads)
    numbers = heads * weights.shape[1]
    return batches.persist(map_blocks(work, blocks), numbers, backend.itemsize(weights))


def _single_attended(one: Attended) -> Attended:
    return Attended(backend.single(one.attention), backend.single(one.features))


def _images(block: Block, projections: Array, heads: int) -> Array:
    """x_b W_i for all tokens b and heads i, (n, m·k, e), from W_i (d, m·e)."""
    xp, (n, tokens, _) = backend.namespace(projections), block.keys.shape
    out_dim = projections.shape[1] // heads
    images = xp.reshape(flat_tokens(block.keys) @ projections, (n, tokens, heads, out_dim))
    return xp.reshape(xp.permute_dims(images, (0, 2, 1, 3)), (n, heads * tokens, out_dim))


def _outputs_jvp(
    scores_jvp: Callable[..., Array], inputs: Any, attended: Attended, images: Array
) -> Array:
    """How outputs (n·k, e) change with scores."""
    change = softmax_jvp(attended.attention, scores_jvp(inputs))
    by_row = (change.shape[0], change.shape[2], images.shape[1])
    return flat_tokens(backend.namespace(change).reshape(change, by_row) @ images)


def _outputs_vjp(
    scores_vjp: Callable[..., Array], inputs: Any, attended: Attended, images: Array, rows: Array
) -> Array:
    """The transpose: outputs u_a (n·k, e) call for changes u_a W_iᵀ x_b of scores."""
    xp, shape = backend.namespace(rows), attended.attention.shape
    by_example = xp.reshape(rows, (shape[0], shape[2], rows.shape[1]))
    change = xp.reshape(by_example @ backend.transpose(images), shape)
    return scores_vjp(inputs, softmax_jvp(attended.attention, change))
