"""Variable projection: the projections eliminated, only the parameters of the heads left to find.

Write P_i for the attention of head i and H = [P_1 X .. P_m X] for the attended tokens of all heads
side by side. Given the Θ_i, the best projections solve a linear regression, W = (HᵀH)⁻¹ Hᵀ Y, and
the loss that remains, |Y - H W|², is a function of the Θ_i alone (Golub and Pereyra 1973). A change
dΘ_i moves row a of the output by

    Σ_b P_ab (t_ab - Σ_c P_ac t_ac) x_b W_i,        t = X dΘ_i Xᵀ,

which defines J; the part of it that a change of W can undo is projected away (Kaufman 1975):

    S = Jᵀ (I - H (HᵀH)⁻¹ Hᵀ) J.

S is never formed. A product with it costs about as much as two forward passes and is a sum over
chunks of examples, in each of which it is a sum over blocks. What is computed from a chunk stays
where the chunk is; only matrices of the size of the weights and of theta travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from onelayer.array import backend, linalg
from onelayer.array.backend import Array
from onelayer.heads import dense
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.gauss_newton.batches import (
    Batches,
    Block,
    PerBlock,
    Rows,
    map_blocks,
    sum_blocks,
)

# Relative to the mean eigenvalue of HᵀH: they keep the inverse finite when heads coincide.
_RIDGE = 1e-13
_SINGLE_RIDGE = 1e-6  # where HᵀH is right to float32
SINGULAR_RIDGE = 1e-10
_UNSEEN = 1e-11  # eigenvalues below this, relative to the largest, are zero


@dataclass(frozen=True)
class Attended:
    """A block's attention P (n, k·m, k) and features H (n·k, F) at one theta."""

    attention: Array
    features: Array


@dataclass(frozen=True, eq=False)
class Fit:
    """All that is known at one theta: the best weights (F, e) and the residuals."""

    batches: Batches
    theta: Array
    attended: PerBlock[Attended]
    gram: Array  # HᵀH
    inverse: Array  # (HᵀH)⁺
    weights: Array  # projections, and the output bias as a last row where there is one
    residuals: Rows
    loss: float  # mean square of the residuals: relative, since outputs have unit mean square
    single: bool  # whether attention, features and residuals are float32

    @property
    def heads(self) -> int:
        return dense.count(self.theta, self.batches.dim)

    @property
    def error(self) -> float:
        """The root mean square of the residuals, relative to that of the outputs."""
        return math.sqrt(self.loss)

    @property
    def projection(self) -> Array:
        """The projections (m, d, e)."""
        return dense.unpack_weights(self.weights, self.heads, self.batches.dim)[0]


def attend(block: Block, theta: Array, output_bias: bool) -> Attended:
    """Attention and features of a block; the output bias is a feature that is always 1."""
    xp = backend.namespace(theta)
    weights = dense.attention(block, theta, block.allowed)
    features = dense.features(weights, block.keys)
    if block.offset is not None:
        offset = xp.tile(block.offset, (features.shape[1] // block.keys.shape[2],))[None, :]
        features = features + (offset if block.counted is None else offset * block.counted)
    if output_bias:
        ones = backend.ones((features.shape[0], 1), features)
        constant = ones if block.counted is None else block.counted
        features = xp.concat([features, constant], axis=1)
    return Attended(weights, features)


def fit(batches: Batches, theta: Array, single: bool = False) -> Fit:
    """Eliminate the weights at theta: sums for HᵀH and HᵀY, then residuals and a correction.

    In float32 if `single`: half the work, and enough as long as the error is far above its rounding
    errors. The inverse and the weights are always float64.
    """
    blocks = batches.in_single(dense.count(theta, batches.dim)) if single else batches.chunks
    attended = attended_at(batches, blocks, backend.single(theta) if single else theta)
    gram = backend.double(sum_blocks(_gram, attended))
    inverse = _inverse(gram, _SINGLE_RIDGE if single else _RIDGE)
    rows, total = map_blocks(attrgetter("outputs"), blocks), backend.zeros((1, 1), gram)
    # Once more with the residuals themselves: HᵀH has the squared condition number of H, and the
    # ridge a bias; both are gone after it wherever the weights are determined. In float32 residuals
    # are far above either.
    for _ in range(1 if single else 2):
        weights = inverse @ backend.double(sum_blocks(against_features, attended, rows))
        rounded = backend.single(weights) if single else weights
        rows = persist_rows(batches, less_fitted(rows, attended, rounded), rounded)
        total = total + weights
    loss = squared_size(rows) / batches.equations
    return Fit(batches, theta, attended, gram, inverse, total, rows, loss, single)


def attended_at(batches: Batches, blocks: PerBlock[Block], theta: Array) -> PerBlock[Attended]:
    """Attention and features of all blocks, held if they fit."""
    work = partial(attend, theta=theta, output_bias=batches.output_bias)
    return persist_attended(batches, map_blocks(work, blocks), theta)


def persist_attended(
    batches: Batches, values: PerBlock[Attended], theta: Array
) -> PerBlock[Attended]:
    """Attention and features in the precision of theta, held if they fit."""
    numbers = dense.count(theta, batches.dim) * (batches.dim + batches.tokens)
    return batches.persist(values, numbers, backend.itemsize(theta))


def persist_rows(batches: Batches, rows: Rows, weights: Array) -> Rows:
    """Rows (n·k, e) for weights (F, e), held if they fit."""
    return batches.persist(rows, weights.shape[1], backend.itemsize(weights))


def squared_size(rows: Rows) -> float:
    """|u|² of rows."""
    return sum_blocks(backend.squared_norm, rows)


def less_fitted(rows: Rows, attended: PerBlock[Attended], weights: Array) -> Rows:
    """u - H W."""
    return map_blocks(partial(_less_fitted, weights=weights), rows, attended)


def _less_fitted(row: Array, attended: Attended, weights: Array) -> Array:
    return row - attended.features @ weights


def against_features(attended: Attended, rows: Array) -> Array:
    """Hᵀ u of a block."""
    return backend.transpose(attended.features) @ rows


def _gram(attended: Attended) -> Array:
    return backend.transpose(attended.features) @ attended.features


def residuals_on(fit: Fit, blocks: Sequence[Block]) -> list[Array]:
    """The residuals of a fit on other examples, block by block."""
    bias = fit.batches.output_bias
    return [
        block.outputs - attend(block, fit.theta, bias).features @ fit.weights for block in blocks
    ]


def held_out_error(fit: Fit, examples: WhitenedExamples) -> float:
    """The relative root mean square error of a fit on other examples."""
    residuals = residuals_on(fit, examples.blocks(fit.heads))
    total = sum(backend.squared_norm(residual) for residual in residuals)
    return float((total / examples.equations) ** 0.5)


def _inverse(gram: Array, ridge: float = _RIDGE) -> Array:
    """(HᵀH)⁻¹, or the pseudo-inverse where features depend on one another.

    The pseudo-inverse gives the smallest weights of all that fit as well. Any others carry large
    parts that cancel in H W but not in J, which uses the W_i one by one: steps would be lost in
    them.
    """
    xp = backend.namespace(gram)
    inverse = _with_ridge(gram, ridge)
    if _is_singular(gram, inverse):
        values, vectors = xp.linalg.eigh(gram)
        seen = values > _UNSEEN * values[-1]
        vectors = vectors * xp.astype(seen, vectors.dtype)
        values = xp.where(seen, values, xp.ones_like(values))
        inverse = linalg.symmetrised((vectors / values) @ backend.transpose(vectors))
    return inverse


def inverse_blocks(fit: Fit) -> list[Array]:
    """The diagonal block (d, d) for every head of (HᵀH + ridge)⁻¹, large where features lack."""
    inverse = _with_ridge(fit.gram, _SINGLE_RIDGE if fit.single else _RIDGE)
    if not fit.single and _is_singular(fit.gram, inverse):
        inverse = _with_ridge(fit.gram, SINGULAR_RIDGE)
    dim = fit.batches.dim
    parts = [slice(head * dim, (head + 1) * dim) for head in range(fit.heads)]
    return [inverse[part, part] for part in parts]


def _with_ridge(gram: Array, ridge: float) -> Array:
    """The ridge is relative to the mean eigenvalue, and 1 if that is zero."""
    ridged = backend.copied(gram)
    linalg.add_to_diagonal(ridged, ridge * _mean_eigenvalue(gram) or 1.0)
    return linalg.inverse(ridged)


def _is_singular(gram: Array, inverse: Array) -> bool:
    xp = backend.namespace(gram)
    # No entry of a positive matrix is larger than those on its diagonal.
    largest = float(xp.max(xp.abs(xp.linalg.diagonal(inverse)))) * _mean_eigenvalue(gram)
    return not 0 < largest < 0.1 / SINGULAR_RIDGE  # so that NaN counts


def _mean_eigenvalue(gram: Array) -> float:
    return float(backend.namespace(gram).linalg.trace(gram)) / int(gram.shape[0])


def cost_of_dropping(fit: Fit) -> list[float]:
    """By how much the sum of squares grows when a head is left out and the rest refitted.

    With B the head's block of (HᵀH)⁻¹ that is tr(W_iᵀ B⁻¹ W_i): no pass over the examples is
    needed. It is near zero for a head without projection and for one of two equal heads.
    """
    xp, projection = backend.namespace(fit.theta), fit.projection
    return [
        float(xp.sum(projection[head, ...] * xp.linalg.solve(block, projection[head, ...])))
        for head, block in enumerate(inverse_blocks(fit))
    ]
