"""Products with J and S at a fit: how outputs, and the loss, change with the attention matrices.

Both are defined in `reduced.py`. Neither is ever formed: a product is a sum over chunks of
examples, in each of which it is a sum over blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np

from onelayer import arrays, attention
from onelayer.arrays import Array
from onelayer.blocks import sum_over
from onelayer.chunks import Chunks, OneByOne, each, merged
from onelayer.recovery import reduced
from onelayer.recovery.cut import Block, Cut
from onelayer.recovery.reduced import Attended, Fit

# With few keys a sum over them is faster as a product with a matrix of ones.
_FEW_KEYS = 16


class Directions(Protocol):
    """Where heads (p, m·d) may go: directions are projected, and steps stay among such heads.

    `pushed` is J times an allowed direction, and `pulled` Jᵀ times rows, projected.
    """

    def project(self, direction: Array) -> Array: ...
    def pushed(self, products: Jacobian, direction: Array) -> Chunks: ...
    def pulled(self, products: Jacobian, rows: Chunks) -> Array: ...
    def moved(self, stacked: Array, direction: Array) -> tuple[Array, Self]: ...


@dataclass(frozen=True, eq=False)
class Jacobian:
    """Products with J and S at one fit, in that fit's precision or in float32.

    `images` are the tokens as the heads project them, x_b W_i, arrays (n, m·k, e) block by block:
    changes of attention are summed up over them, with k products where W_i itself would take d.
    """

    cut: Cut
    blocks: Chunks
    attended: Chunks
    images: Chunks
    weights: Array
    inverse: Array

    def transposed(self, rows: Chunks) -> Array:
        """Jᵀ u."""
        return merged(each(_pull, self.blocks, self.attended, self.images, rows), operator.add)

    def normal(self, direction: Array) -> Array:
        """S dΘ = Jᵀ (I - H (HᵀH)⁻¹ Hᵀ) J dΘ."""
        return self.transposed(self.unexplained(self.pushed(direction)))

    def curved(self, allowed: Directions, direction: Array) -> Array:
        """S times an allowed direction, projected on the allowed ones."""
        return allowed.pulled(self, self.unexplained(allowed.pushed(self, direction)))

    def pushed(self, direction: Array) -> Chunks:
        """J dΘ: (p, m·d) -> (n·k, e) for every block."""
        moved: Chunks = each(_push, self.blocks, self.attended, self.images, direction)
        return moved

    def unexplained(self, moved: Chunks) -> Chunks:
        """(I - H (HᵀH)⁻¹ Hᵀ) u: what no change of the weights can undo."""
        moved = reduced.kept_rows(self.cut, moved, self.weights)
        undone = self.inverse @ merged(
            each(reduced.against_features, self.attended, moved), operator.add
        )
        left: Chunks = each(reduced.less_fitted, moved, self.attended, undone)
        return left

    def sketched(self, count: int, rng: np.random.Generator) -> Jacobian:
        """The same for so many random mixtures of the outputs: S on average, and far cheaper.

        Orthonormal columns Q (e, count), times the root of e / count, mix the outputs: a layer that
        answers with them has the projections W_i Q.
        """
        outputs = int(self.weights.shape[1])
        mixtures, _ = np.linalg.qr(rng.standard_normal((outputs, count)))
        mixtures = mixtures * (outputs / count) ** 0.5
        weights = self.weights @ arrays.like(mixtures, self.weights)
        return _with_images(self.cut, self.blocks, self.attended, weights, self.inverse)


def squared_size(moved: Chunks) -> float:
    """|u|² of rows."""
    return float(merged(each(reduced.squares, moved), operator.add))


# For one chunk, a sequence of blocks


def _push(
    blocks: Sequence[Block],
    attended: Sequence[Attended],
    images: Sequence[Array],
    direction: Array,
) -> tuple[Array, ...]:
    """J dΘ: (p, m·d) -> (n·k, e), block by block."""
    scores = (scores_of(one.keys, reduced.flattened(one.queries) @ direction) for one in blocks)
    return outputs_changes(attended, images, scores)


def _pull(
    blocks: Sequence[Block],
    attended: Sequence[Attended],
    images: Sequence[Array],
    rows: Sequence[Array],
) -> Array:
    """Jᵀ u: (n·k, e) -> (p, m·d), summed over the blocks."""

    def term(place: tuple[Block, Array]) -> Array:
        block, change = place
        n, tokens, dim = block.keys.shape
        shape = (n * tokens, change.shape[1] // tokens * dim)
        moved = arrays.namespace(change).reshape(change @ block.keys, shape)
        return arrays.transpose(reduced.flattened(block.queries)) @ moved

    return sum_over(zip(blocks, changes_from(attended, images, rows), strict=True), term)


def outputs_changes(
    attended: Sequence[Attended], images: Sequence[Array], scores: Iterable[Array]
) -> tuple[Array, ...]:
    """How outputs (n·k, e) change with scores in the order of the attention, block by block."""

    def of_block(one: Attended, image: Array, moved: Array) -> Array:
        xp, (n, _, tokens) = arrays.namespace(moved), one.attention.shape
        change = attention_change(one.attention, xp.reshape(moved, one.attention.shape))
        return reduced.flattened(xp.reshape(change, (n, tokens, image.shape[1])) @ image)

    return tuple(of_block(*place) for place in zip(attended, images, scores, strict=True))


def changes_from(
    attended: Sequence[Attended], images: Sequence[Array], rows: Sequence[Array]
) -> Iterator[Array]:
    """How attention would change with scores t_ab = u_a W_iᵀ x_b, (n, k·m, k), block by block."""
    for one, image, outputs in zip(attended, images, rows, strict=True):
        xp, (n, _, tokens) = arrays.namespace(outputs), one.attention.shape
        by_example = xp.reshape(outputs, (n, tokens, outputs.shape[1]))
        scores = xp.reshape(by_example @ arrays.transpose(image), one.attention.shape)
        yield attention_change(one.attention, scores)


def _side_by_side(weights: Array, heads: int, dim: int) -> Array:
    """The projections W_i (d, m·e) out of weights (F, e)."""
    one_below_the_other = weights[: heads * dim, :]
    xp = arrays.namespace(weights)
    return attention.stack(xp.reshape(one_below_the_other, (heads, dim, weights.shape[1])))


def _images(blocks: Sequence[Block], side_by_side: Array, heads: int) -> tuple[Array, ...]:
    """x_b W_i for all tokens b and heads i, (n, m·k, e) for every block, from W_i (d, m·e)."""
    xp = arrays.namespace(side_by_side)
    out_dim = side_by_side.shape[1] // heads

    def of_block(block: Block) -> Array:
        n, tokens, _ = block.keys.shape
        images = xp.reshape(
            reduced.flattened(block.keys) @ side_by_side, (n, tokens, heads, out_dim)
        )
        return xp.reshape(xp.permute_dims(images, (0, 2, 1, 3)), (n, heads * tokens, out_dim))

    return tuple(map(of_block, blocks))


def softmax_change(keys: Array, weights: Array, rows: Array) -> Array:
    """Rows r_ai (n·k, m·d) -> Σ_b P_ab (t_b - Σ_c P_ac t_c) x_b with t_b = r_ai x_b.

    This map is symmetric: it is the covariance of the tokens under the attention.
    """
    change = attention_change(weights, scores_of(keys, rows))
    return arrays.namespace(rows).reshape(change @ keys, rows.shape)


def scores_of(keys: Array, rows: Array) -> Array:
    """r_ai x_b, (n, k·m, k)."""
    n, tokens, dim = keys.shape
    by_head = (n, tokens * (rows.shape[1] // dim), dim)
    return arrays.namespace(rows).reshape(rows, by_head) @ arrays.transpose(keys)


def attention_change(weights: Array, scores: Array) -> Array:
    """P_ab (t_ab - Σ_c P_ac t_ac): how attention changes with its scores t (n, k·m, k)."""
    xp = arrays.namespace(scores)
    tokens = scores.shape[2]
    weighted = weights * scores
    if tokens <= _FEW_KEYS:
        mean = weighted @ arrays.ones((tokens, tokens), scores)
    else:
        mean = xp.sum(weighted, axis=-1, keepdims=True)
    weighted -= weights * mean
    return weighted


def jacobian(fit: Fit, single: bool = False) -> Jacobian:
    """The products at a fit; `single` rounds all arrays to float32, at half the cost.

    Those at a fit in float32 are always so.
    """
    cut, blocks, attended = fit.cut, fit.cut.chunks, fit.attended
    weights, inverse = fit.weights, fit.inverse
    if single or fit.single:
        weights, inverse = arrays.single(weights), arrays.single(inverse)
        blocks = cut.in_single(fit.heads)
        if isinstance(attended, OneByOne):  # not held: computed anew, and rather in float32
            attended = reduced.attended_at(cut, blocks, arrays.single(fit.stacked))
        elif not fit.single:
            attended = cut.kept(
                each(_single_attended, attended), reduced.per_row(cut, fit.heads), 4
            )
    return _with_images(cut, blocks, attended, weights, inverse)


def _with_images(
    cut: Cut, blocks: Chunks, attended: Chunks, weights: Array, inverse: Array
) -> Jacobian:
    """The products with these weights, tokens projected by them."""
    heads = (int(weights.shape[0]) - int(cut.output_bias)) // cut.dim
    images = each(_images, blocks, _side_by_side(weights, heads, cut.dim), heads)
    images = cut.kept(images, heads * weights.shape[1], arrays.itemsize(weights))
    return Jacobian(cut, blocks, attended, images, weights, inverse)


def _single_attended(attended: Sequence[Attended]) -> tuple[Attended, ...]:
    small = arrays.single
    return tuple(Attended(small(one.attention), small(one.features)) for one in attended)


def gradient(
    fit: Fit, products: Jacobian | None = None, allowed: Directions | None = None
) -> Array:
    """Jᵀ r: minus half the gradient of the sum of squares (the regression part vanishes).

    `products` at the fit are used if they are as precise as it is. Projected on what is `allowed`.
    """
    if products is None or not fit.single:
        products = jacobian(fit)
    if allowed is None:
        return arrays.double(products.transposed(fit.residuals))
    return arrays.double(allowed.pulled(products, fit.residuals))
