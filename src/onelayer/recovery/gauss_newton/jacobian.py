"""Products with J and S at a fit: how outputs, and the loss, change with theta.

Both are defined in `varpro.py`. Neither is ever formed: a product is a sum over chunks of examples,
in each of which it is a sum over blocks. How theta changes scores is left to the family of heads
(see `onelayer.heads`); how scores change outputs is computed here, for all of them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.array.blocks import sum_over
from onelayer.data.chunks import Chunks
from onelayer.heads.base import Rows, TangentSpace
from onelayer.heads.dense import FULL_SPACE, flat_tokens, side_by_side
from onelayer.heads.softmax import softmax_jvp
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.gauss_newton.batches import Batches, Block, Blocks
from onelayer.recovery.gauss_newton.varpro import Attended, AttendedChunks, Fit


@dataclass(frozen=True, eq=False)
class Jacobian:
    """Products with J and S at one fit, in that fit's precision or in float32.

    `images` are the tokens as the heads project them, x_b W_i, arrays (n, m·k, e) block by block:
    changes of attention are summed up over them, with k products where W_i itself would take d.
    """

    batches: Batches
    blocks: Blocks
    attended: AttendedChunks
    images: Rows
    weights: Array
    inverse: Array

    def jvp(self, direction: Array, space: TangentSpace = FULL_SPACE) -> Rows:
        """J times a direction in the space, (n·k, e) for every block."""
        return space.jvp(self, direction)

    def vjp(self, rows: Rows, space: TangentSpace = FULL_SPACE) -> Array:
        """Jᵀ u, projected on the space."""
        return space.vjp(self, rows)

    def gauss_newton_product(self, direction: Array, space: TangentSpace = FULL_SPACE) -> Array:
        """S times a direction in the space, projected on it; S = Jᵀ (I - H (HᵀH)⁻¹ Hᵀ) J."""
        return self.vjp(self.unexplained(self.jvp(direction, space)), space)

    def unexplained(self, rows: Rows) -> Rows:
        """(I - H (HᵀH)⁻¹ Hᵀ) u: what no change of the weights can undo."""
        rows = varpro.persist_rows(self.batches, rows, self.weights)
        return rows.map(varpro.less_fitted, self.attended, self.inverse @ self.against(rows))

    def against(self, rows: Rows) -> Array:
        """Hᵀ u."""
        return self.attended.map(varpro.against_features, rows).reduce(operator.add)

    def through_scores(
        self, scores: Callable[..., Array], *parameters: object, inputs: Chunks[Any] | None = None
    ) -> Rows:
        """J times a direction that changes scores as `scores(block, *parameters)`."""
        inputs = self.blocks if inputs is None else inputs
        return inputs.map(_through_scores, self.attended, self.images, scores, *parameters)

    def back_through_scores(
        self,
        scores_vjp: Callable[..., Array],
        rows: Rows,
        *parameters: object,
        inputs: Chunks[Any] | None = None,
    ) -> Array:
        """The sum over blocks of `scores_vjp` at the changes of scores that rows call for."""
        inputs = self.blocks if inputs is None else inputs
        shared = (self.attended, self.images, rows, scores_vjp, *parameters)
        return inputs.map(_back_through_scores, *shared).reduce(operator.add)

    def sketched(self, count: int, rng: np.random.Generator) -> Jacobian:
        """The same for `count` random mixtures of the outputs: S on average, at a lower cost.

        Outputs are mixed by orthonormal columns Q (e, count) times the root of e / count: a layer
        with such outputs has the projections W_i Q.
        """
        outputs = int(self.weights.shape[1])
        mixtures, _ = np.linalg.qr(rng.standard_normal((outputs, count)))
        mixtures = mixtures * (outputs / count) ** 0.5
        weights = self.weights @ backend.like(mixtures, self.weights)
        return _with_images(self.batches, self.blocks, self.attended, weights, self.inverse)


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
            attended = varpro.persist_attended(batches, attended.map(_single_attended), theta)
    return _with_images(batches, blocks, attended, weights, inverse)


def gradient(fit: Fit, products: Jacobian | None = None, space: TangentSpace = FULL_SPACE) -> Array:
    """Jᵀ r on the space: minus half the gradient of the sum of squares.

    The regression part vanishes. `products` at the fit are used if they are as precise as it is.
    """
    if products is None or not fit.single:
        products = jacobian(fit)
    return backend.double(products.vjp(fit.residuals, space))


def _with_images(
    batches: Batches, blocks: Blocks, attended: AttendedChunks, weights: Array, inverse: Array
) -> Jacobian:
    """The products with these weights, tokens projected by them."""
    projections = varpro.projections(weights, batches)
    heads, _, out_dim = projections.shape
    images = blocks.map(_images, side_by_side(projections), heads)
    images = batches.persist(images, heads * out_dim, backend.itemsize(weights))
    return Jacobian(batches, blocks, attended, images, weights, inverse)


# For one chunk, a sequence of blocks


def _single_attended(attended: Sequence[Attended]) -> tuple[Attended, ...]:
    small = backend.single
    return tuple(Attended(small(one.attention), small(one.features)) for one in attended)


def _images(blocks: Sequence[Block], projections: Array, heads: int) -> tuple[Array, ...]:
    """x_b W_i for all tokens b and heads i, (n, m·k, e) for every block, from W_i (d, m·e)."""
    xp = backend.namespace(projections)
    out_dim = projections.shape[1] // heads

    def of_block(block: Block) -> Array:
        n, tokens, _ = block.keys.shape
        images = xp.reshape(flat_tokens(block.keys) @ projections, (n, tokens, heads, out_dim))
        return xp.reshape(xp.permute_dims(images, (0, 2, 1, 3)), (n, heads * tokens, out_dim))

    return tuple(map(of_block, blocks))


def _through_scores(
    blocks: Sequence[Any],
    attended: Sequence[Attended],
    images: Sequence[Array],
    scores: Callable[..., Array],
    *parameters: object,
) -> tuple[Array, ...]:
    """How outputs (n·k, e) change with scores, block by block."""

    def of_block(block: Any, one: Attended, image: Array) -> Array:
        change = softmax_jvp(one.attention, scores(block, *parameters))
        by_row = (change.shape[0], change.shape[2], image.shape[1])
        return flat_tokens(backend.namespace(change).reshape(change, by_row) @ image)

    return tuple(of_block(*place) for place in zip(blocks, attended, images, strict=True))


def _back_through_scores(
    blocks: Sequence[Any],
    attended: Sequence[Attended],
    images: Sequence[Array],
    rows: Sequence[Array],
    scores_vjp: Callable[..., Array],
    *parameters: object,
) -> Array:
    """The transposed product: outputs u_a (n·k, e) call for changes u_a W_iᵀ x_b of scores."""

    def term(place: tuple[Any, Attended, Array, Array]) -> Array:
        block, one, image, outputs = place
        xp, (n, _, tokens) = backend.namespace(outputs), one.attention.shape
        by_example = xp.reshape(outputs, (n, tokens, outputs.shape[1]))
        change = xp.reshape(by_example @ backend.transpose(image), one.attention.shape)
        return scores_vjp(block, softmax_jvp(one.attention, change), *parameters)

    return sum_over(zip(blocks, attended, images, rows, strict=True), term)
