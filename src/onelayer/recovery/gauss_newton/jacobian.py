"""Products with J and S at a fit: how outputs, and the loss, change with the attention matrices.

Both are defined in `varpro.py`. Neither is ever formed: a product is a sum over chunks of
examples, in each of which it is a sum over blocks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.array.blocks import sum_over
from onelayer.data.chunks import Chunks
from onelayer.heads import dense
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.gauss_newton.batches import Batches, Block
from onelayer.recovery.gauss_newton.varpro import Attended, Fit

# With few keys a sum over them is faster as a product with a matrix of ones.
_FEW_KEYS = 16


class Directions(Protocol):
    """Where heads (p, m·d) may go: directions are projected, and steps stay among such heads.

    `jvp` is J times an allowed direction, and `vjp` Jᵀ times rows, projected.
    """

    def project(self, direction: Array) -> Array: ...
    def jvp(self, products: Jacobian, direction: Array) -> Chunks[Any]: ...
    def vjp(self, products: Jacobian, rows: Chunks[Any]) -> Array: ...
    def retract(self, theta: Array, direction: Array) -> tuple[Array, Self]: ...


@dataclass(frozen=True, eq=False)
class Jacobian:
    """Products with J and S at one fit, in that fit's precision or in float32.

    `images` are the tokens as the heads project them, x_b W_i, arrays (n, m·k, e) block by block:
    changes of attention are summed up over them, with k products where W_i itself would take d.
    """

    batches: Batches
    blocks: Chunks[Any]
    attended: Chunks[Any]
    images: Chunks[Any]
    weights: Array
    inverse: Array

    def vjp(self, rows: Chunks[Any]) -> Array:
        """Jᵀ u."""
        return self.blocks.map(_pull, self.attended, self.images, rows).reduce(operator.add)

    def gauss_newton_product(self, direction: Array, allowed: Directions | None = None) -> Array:
        """S dΘ = Jᵀ (I - H (HᵀH)⁻¹ Hᵀ) J dΘ, projected on the allowed directions if given."""
        if allowed is None:
            return self.vjp(self.unexplained(self.jvp(direction)))
        return allowed.vjp(self, self.unexplained(allowed.jvp(self, direction)))

    def jvp(self, direction: Array) -> Chunks[Any]:
        """J dΘ: (p, m·d) -> (n·k, e) for every block."""
        moved: Chunks[Any] = self.blocks.map(_push, self.attended, self.images, direction)
        return moved

    def unexplained(self, moved: Chunks[Any]) -> Chunks[Any]:
        """(I - H (HᵀH)⁻¹ Hᵀ) u: what no change of the weights can undo."""
        moved = varpro.kept_rows(self.batches, moved, self.weights)
        undone = self.inverse @ self.attended.map(varpro.against_features, moved).reduce(
            operator.add
        )
        left: Chunks[Any] = moved.map(varpro.less_fitted, self.attended, undone)
        return left

    def sketched(self, count: int, rng: np.random.Generator) -> Jacobian:
        """The same for so many random mixtures of the outputs: S on average, and far cheaper.

        Orthonormal columns Q (e, count), times the root of e / count, mix the outputs: a layer that
        answers with them has the projections W_i Q.
        """
        outputs = int(self.weights.shape[1])
        mixtures, _ = np.linalg.qr(rng.standard_normal((outputs, count)))
        mixtures = mixtures * (outputs / count) ** 0.5
        weights = self.weights @ backend.like(mixtures, self.weights)
        return _with_images(self.batches, self.blocks, self.attended, weights, self.inverse)


def squared_size(moved: Chunks[Any]) -> float:
    """|u|² of rows."""
    return float(moved.map(varpro.squares).reduce(operator.add))


# For one chunk, a sequence of blocks


def _push(
    blocks: Sequence[Block],
    attended: Sequence[Attended],
    images: Sequence[Array],
    direction: Array,
) -> tuple[Array, ...]:
    """J dΘ: (p, m·d) -> (n·k, e), block by block."""
    scores = (scores_of(one.keys, varpro.flattened(one.queries) @ direction) for one in blocks)
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
        moved = backend.namespace(change).reshape(change @ block.keys, shape)
        return backend.transpose(varpro.flattened(block.queries)) @ moved

    return sum_over(zip(blocks, changes_from(attended, images, rows), strict=True), term)


def outputs_changes(
    attended: Sequence[Attended], images: Sequence[Array], scores: Iterable[Array]
) -> tuple[Array, ...]:
    """How outputs (n·k, e) change with scores in the order of the attention, block by block."""

    def of_block(one: Attended, image: Array, moved: Array) -> Array:
        xp, (n, _, tokens) = backend.namespace(moved), one.attention.shape
        change = attention_change(one.attention, xp.reshape(moved, one.attention.shape))
        return varpro.flattened(xp.reshape(change, (n, tokens, image.shape[1])) @ image)

    return tuple(of_block(*place) for place in zip(attended, images, scores, strict=True))


def changes_from(
    attended: Sequence[Attended], images: Sequence[Array], rows: Sequence[Array]
) -> Iterator[Array]:
    """How attention would change with scores t_ab = u_a W_iᵀ x_b, (n, k·m, k), block by block."""
    for one, image, outputs in zip(attended, images, rows, strict=True):
        xp, (n, _, tokens) = backend.namespace(outputs), one.attention.shape
        by_example = xp.reshape(outputs, (n, tokens, outputs.shape[1]))
        scores = xp.reshape(by_example @ backend.transpose(image), one.attention.shape)
        yield attention_change(one.attention, scores)


def _side_by_side(weights: Array, heads: int, dim: int) -> Array:
    """The projections W_i (d, m·e) out of weights (F, e)."""
    one_below_the_other = weights[: heads * dim, :]
    xp = backend.namespace(weights)
    return dense.pack(xp.reshape(one_below_the_other, (heads, dim, weights.shape[1])))


def _images(blocks: Sequence[Block], side_by_side: Array, heads: int) -> tuple[Array, ...]:
    """x_b W_i for all tokens b and heads i, (n, m·k, e) for every block, from W_i (d, m·e)."""
    xp = backend.namespace(side_by_side)
    out_dim = side_by_side.shape[1] // heads

    def of_block(block: Block) -> Array:
        n, tokens, _ = block.keys.shape
        images = xp.reshape(
            varpro.flattened(block.keys) @ side_by_side, (n, tokens, heads, out_dim)
        )
        return xp.reshape(xp.permute_dims(images, (0, 2, 1, 3)), (n, heads * tokens, out_dim))

    return tuple(map(of_block, blocks))


def softmax_change(keys: Array, weights: Array, rows: Array) -> Array:
    """Rows r_ai (n·k, m·d) -> Σ_b P_ab (t_b - Σ_c P_ac t_c) x_b with t_b = r_ai x_b.

    This map is symmetric: it is the covariance of the tokens under the attention.
    """
    change = attention_change(weights, scores_of(keys, rows))
    return backend.namespace(rows).reshape(change @ keys, rows.shape)


def scores_of(keys: Array, rows: Array) -> Array:
    """r_ai x_b, (n, k·m, k)."""
    n, tokens, dim = keys.shape
    by_head = (n, tokens * (rows.shape[1] // dim), dim)
    return backend.namespace(rows).reshape(rows, by_head) @ backend.transpose(keys)


def attention_change(weights: Array, scores: Array) -> Array:
    """P_ab (t_ab - Σ_c P_ac t_ac): how attention changes with its scores t (n, k·m, k)."""
    xp = backend.namespace(scores)
    tokens = scores.shape[2]
    weighted = weights * scores
    if tokens <= _FEW_KEYS:
        mean = weighted @ backend.ones((tokens, tokens), scores)
    else:
        mean = xp.sum(weighted, axis=-1, keepdims=True)
    weighted -= weights * mean
    return weighted


def jacobian(fit: Fit, single: bool = False) -> Jacobian:
    """The products at a fit; `single` rounds all arrays to float32, at half the cost.

    Those at a fit in float32 are always so.
    """
    batches, blocks, attended = fit.batches, fit.batches.chunks, fit.attended
    weights, inverse = fit.weights, fit.inverse
    if single or fit.single:
        weights, inverse = backend.single(weights), backend.single(inverse)
        blocks = batches.in_single(fit.heads)
        if attended.recomputed:  # not held: computed anew, and rather in float32
            attended = varpro.attended_at(batches, blocks, backend.single(fit.theta))
        elif not fit.single:
            attended = batches.persist(
                attended.map(_single_attended), varpro.per_row(batches, fit.heads), 4
            )
    return _with_images(batches, blocks, attended, weights, inverse)


def _with_images(
    batches: Batches, blocks: Chunks[Any], attended: Chunks[Any], weights: Array, inverse: Array
) -> Jacobian:
    """The products with these weights, tokens projected by them."""
    heads = (int(weights.shape[0]) - int(batches.output_bias)) // batches.dim
    images = blocks.map(_images, _side_by_side(weights, heads, batches.dim), heads)
    images = batches.persist(images, heads * weights.shape[1], backend.itemsize(weights))
    return Jacobian(batches, blocks, attended, images, weights, inverse)


def _single_attended(attended: Sequence[Attended]) -> tuple[Attended, ...]:
    small = backend.single
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
        return backend.double(products.vjp(fit.residuals))
    return backend.double(allowed.vjp(products, fit.residuals))
