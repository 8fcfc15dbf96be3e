"""The reduced problem: projections eliminated, only the attention matrices left to find.

Write P_i for the attention of head i and H = [P_1 X .. P_m X] for the attended tokens of all heads
side by side. Given the Θ_i, the best projections solve a linear regression, W = (HᵀH)⁻¹ Hᵀ Y, and
the loss that remains, |Y - H W|², is a function of the Θ_i alone (variable projection, Golub and
Pereyra 1973). A change dΘ_i moves row a of the output by

    Σ_b P_ab (t_ab - Σ_c P_ac t_ac) x_b W_i,        t = X dΘ_i Xᵀ,

which defines J; the part of it that a change of W can undo is projected away (Kaufman 1975):

    S = Jᵀ (I - H (HᵀH)⁻¹ Hᵀ) J.

S is never formed. A product with it costs about as much as two forward passes and is a sum over
blocks of examples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from onelayer import arrays, attention
from onelayer.arrays import Array
from onelayer.blocks import map_over, sum_over
from onelayer.recovery.problem import Block, Problem

# Relative to the mean eigenvalue of HᵀH: they keep the inverse finite when heads coincide.
_RIDGE = 1e-13
SINGULAR_RIDGE = 1e-10
_UNSEEN = 1e-11  # eigenvalues below this, relative to the largest, are zero

# Attention and features of all examples are kept in memory up to this size.
_KEEP_BYTES = 2 * 2**30

# With few keys a sum over them is faster as a product with a matrix of ones.
_FEW_KEYS = 16


@dataclass(frozen=True)
class Attended:
    """A block's attention P (n, k·m, k) and features H (n·k, F) at one Θ."""

    attention: Array
    features: Array


@dataclass(frozen=True)
class Fit:
    """All that is known at one Θ: `stacked` (p, m·d), the best weights (F, e), what is left over.

    The weights hold the projections, and the output bias as a last row where there is one.
    """

    blocks: tuple[Block, ...]
    stacked: Array
    attended: Sequence[Attended]
    gram: Array  # HᵀH
    inverse: Array  # (HᵀH)⁺
    weights: Array
    residuals: tuple[Array, ...]
    loss: float  # mean square of the residuals: relative, since outputs have unit mean square
    output_bias: bool

    @property
    def heads(self) -> int:
        return int(self.stacked.shape[1] // self.blocks[0].keys.shape[2])

    @property
    def error(self) -> float:
        """The root mean square of the residuals, relative to that of the outputs."""
        return math.sqrt(self.loss)


def attend(block: Block, stacked: Array, output_bias: bool) -> Attended:
    """Attention and features of a block; the output bias is a feature that is always 1."""
    xp = arrays.namespace(stacked)
    weights = attention.weights(block.queries, block.keys, stacked, block.allowed)
    features = attention.features(weights, block.keys)
    if output_bias:
        constant = block.counted
        if constant is None:
            constant = arrays.ones((features.shape[0], 1), features)
        features = xp.concat([features, constant], axis=1)
    return Attended(weights, features)


@dataclass(frozen=True)
class Recomputed(Sequence[Attended]):
    """The blocks' attention and features, computed anew each time they are asked for."""

    blocks: tuple[Block, ...]
    stacked: Array
    output_bias: bool

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitem__(self, part: Any) -> Any:
        if isinstance(part, slice):
            return Recomputed(self.blocks[part], self.stacked, self.output_bias)
        return attend(self.blocks[part], self.stacked, self.output_bias)


def attend_all(blocks: tuple[Block, ...], stacked: Array, output_bias: bool) -> Sequence[Attended]:
    """Attention and features of all blocks: kept if they fit in memory, recomputed otherwise."""
    tokens = blocks[0].keys.shape[1]
    rows = sum(int(block.outputs.shape[0]) for block in blocks)
    numbers = rows * (stacked.shape[1] + stacked.shape[1] // blocks[0].keys.shape[2] * tokens)
    recomputed = Recomputed(blocks, stacked, output_bias)
    if 8 * numbers > _KEEP_BYTES:
        return recomputed
    return map_over(range(len(blocks)), lambda part: recomputed[part])


def fit(blocks: tuple[Block, ...], stacked: Array, output_bias: bool, equations: int) -> Fit:
    """Eliminate the weights at `stacked`: sums for HᵀH and HᵀY, then residuals and a correction."""
    parts = range(len(blocks))
    attended = attend_all(blocks, stacked, output_bias)
    gram = sum_over(parts, lambda part: _gram(attended[part].features))
    inverse = _inverse(gram)
    weights = inverse @ _against_features(attended, [block.outputs for block in blocks])
    residuals = map_over(
        parts, lambda part: blocks[part].outputs - attended[part].features @ weights
    )
    # One correction by the residuals themselves: HᵀH has the squared condition number of H, and
    # the ridge a bias; both are gone after it wherever the weights are determined.
    correction = inverse @ _against_features(attended, residuals)
    weights = weights + correction
    residuals = map_over(parts, lambda part: residuals[part] - attended[part].features @ correction)
    loss = sum(arrays.squared_norm(residual) for residual in residuals) / equations
    return Fit(
        blocks, stacked, attended, gram, inverse, weights, tuple(residuals), loss, output_bias
    )


def residuals_on(fit: Fit, blocks: Sequence[Block]) -> list[Array]:
    """What a fit leaves over of other examples, block by block."""
    return [
        block.outputs - attend(block, fit.stacked, fit.output_bias).features @ fit.weights
        for block in blocks
    ]


def held_out_error(fit: Fit, problem: Problem) -> float:
    """The relative root mean square error of a fit on other examples."""
    residuals = residuals_on(fit, problem.blocks(fit.heads))
    total = sum(arrays.squared_norm(residual) for residual in residuals)
    return float((total / problem.equations()) ** 0.5)


def _gram(features: Array) -> Array:
    return arrays.transpose(features) @ features


def _against_features(attended: Sequence[Attended], outputs: Sequence[Array]) -> Array:
    """Hᵀ u summed over the blocks."""
    return sum_over(
        range(len(outputs)),
        lambda part: arrays.transpose(attended[part].features) @ outputs[part],
    )


def _inverse(gram: Array) -> Array:
    """(HᵀH)⁻¹, or the pseudo-inverse where features depend on one another.

    Then the weights are the smallest of all that fit as well. Any others carry large parts that
    cancel in H W but not in J, which is made of the W_i one by one: steps would be lost in them.
    """
    xp = arrays.namespace(gram)
    inverse = _with_ridge(gram, _RIDGE)
    if _is_singular(gram, inverse):
        values, vectors = xp.linalg.eigh(gram)
        seen = values > _UNSEEN * values[-1]
        vectors = vectors * xp.astype(seen, vectors.dtype)
        values = xp.where(seen, values, xp.ones_like(values))
        inverse = (vectors / values) @ arrays.transpose(vectors)
    return (inverse + arrays.transpose(inverse)) / 2


def ridged_inverse(gram: Array) -> Array:
    """(HᵀH + ridge)⁻¹, large in directions that features do not have: what pseudo-inverses hide."""
    inverse = _with_ridge(gram, _RIDGE)
    return _with_ridge(gram, SINGULAR_RIDGE) if _is_singular(gram, inverse) else inverse


def _with_ridge(gram: Array, ridge: float) -> Array:
    """The ridge is relative to the mean eigenvalue, and 1 if that is zero."""
    xp = arrays.namespace(gram)
    identity = xp.eye(gram.shape[0], dtype=gram.dtype, device=arrays.device(gram))
    return xp.linalg.inv(gram + (ridge * _mean_eigenvalue(gram) or 1.0) * identity)


def _is_singular(gram: Array, inverse: Array) -> bool:
    xp = arrays.namespace(gram)
    largest = float(xp.max(xp.abs(inverse))) * _mean_eigenvalue(gram)
    return not 0 < largest < 0.1 / SINGULAR_RIDGE  # so that NaN counts


def _mean_eigenvalue(gram: Array) -> float:
    return float(arrays.namespace(gram).linalg.trace(gram)) / int(gram.shape[0])


@dataclass(frozen=True)
class Jacobian:
    """Products with J and S at one fit, in that fit's precision or in float32."""

    blocks: tuple[Block, ...]
    attended: Sequence[Attended]
    weights: Array
    inverse: Array

    def push(self, part: int, attended: Attended, direction: Array) -> Array:
        """J dΘ on one block: (p, m·d) -> (n·k, e)."""
        queries = self._queries(part)
        moved = self._softmax_change(part, attended, queries @ direction)
        return moved @ self.weights[: direction.shape[1], :]

    def pull(self, part: int, attended: Attended, outputs: Array) -> Array:
        """Jᵀ u on one block: (n·k, e) -> (p, m·d)."""
        _, tokens, dim = self.blocks[part].keys.shape
        columns = attended.attention.shape[1] // tokens * dim
        moved = outputs @ arrays.transpose(self.weights[:columns, :])
        return arrays.transpose(self._queries(part)) @ self._softmax_change(part, attended, moved)

    def _queries(self, part: int) -> Array:
        queries = self.blocks[part].queries
        return arrays.namespace(queries).reshape(queries, (-1, queries.shape[2]))

    def _softmax_change(self, part: int, attended: Attended, rows: Array) -> Array:
        """Rows r_ai (n·k, m·d) -> Σ_b P_ab (t_b - Σ_c P_ac t_c) x_b with t_b = r_ai x_b.

        This map is symmetric (it is the covariance of the tokens under the attention), so that J
        and its transpose share it.
        """
        keys, weights = self.blocks[part].keys, attended.attention
        xp = arrays.namespace(rows)
        n, tokens, dim = keys.shape
        scores = xp.reshape(rows, (n, -1, dim)) @ arrays.transpose(keys)
        weighted = weights * scores
        if tokens <= _FEW_KEYS:
            mean = weighted @ arrays.ones((tokens, tokens), keys)
        else:
            mean = xp.sum(weighted, axis=-1, keepdims=True)
        weighted -= weights * mean
        return xp.reshape(weighted @ keys, (n * tokens, -1))

    def transposed(self, outputs: Sequence[Array]) -> Array:
        """Jᵀ u summed over the blocks."""
        return sum_over(
            range(len(self.blocks)),
            lambda part: self.pull(part, self.attended[part], outputs[part]),
        )

    def squared_size(self, direction: Array) -> float:
        """|J dΘ|²."""
        parts = range(len(self.blocks))
        moved = map_over(parts, lambda part: self.push(part, self.attended[part], direction))
        return sum(arrays.squared_norm(block) for block in moved)

    def normal(self, direction: Array) -> Array:
        """S dΘ = Jᵀ (I - H (HᵀH)⁻¹ Hᵀ) J dΘ."""
        parts = range(len(self.blocks))
        moved = map_over(parts, lambda part: self.push(part, self.attended[part], direction))
        undone = self.inverse @ _against_features(self.attended, moved)

        def back(part: int) -> Array:
            attended = self.attended[part]
            return self.pull(part, attended, moved[part] - attended.features @ undone)

        return sum_over(parts, back)


def jacobian(fit: Fit, single: bool = False) -> Jacobian:
    """The products at a fit; `single` rounds all arrays to float32, at half the cost."""
    if not single:
        return Jacobian(fit.blocks, fit.attended, fit.weights, fit.inverse)
    convert = arrays.single
    blocks = tuple(
        Block(convert(b.queries), convert(b.keys), b.outputs, b.allowed, _single(b.counted))
        for b in fit.blocks
    )
    attended: Sequence[Attended]
    if isinstance(fit.attended, Recomputed):
        attended = Recomputed(blocks, convert(fit.stacked), fit.output_bias)
    else:
        attended = tuple(Attended(convert(a.attention), convert(a.features)) for a in fit.attended)
    return Jacobian(blocks, attended, convert(fit.weights), convert(fit.inverse))


def _single(array: Array | None) -> Array | None:
    return None if array is None else arrays.single(array)


def gradient(fit: Fit) -> Array:
    """Jᵀ r: minus half the gradient of the sum of squares (the regression part vanishes)."""
    return jacobian(fit).transposed(fit.residuals)


def cost_of_dropping(fit: Fit) -> list[float]:
    """By how much the sum of squares grows when a head is left out and the rest refitted.

    With B the head's block of (HᵀH)⁻¹ that is tr(W_iᵀ B⁻¹ W_i): no pass over the examples is
    needed. It is near zero for a head without projection and for one of two equal heads.
    """
    xp = arrays.namespace(fit.stacked)
    dim = fit.blocks[0].keys.shape[2]
    inverse = ridged_inverse(fit.gram)
    costs = []
    for head in range(fit.heads):
        part = slice(head * dim, (head + 1) * dim)
        weights = fit.weights[part, :]
        costs.append(float(xp.sum(weights * xp.linalg.solve(inverse[part, part], weights))))
    return costs
