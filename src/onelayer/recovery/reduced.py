"""The reduced problem: projections eliminated, only the attention matrices left to find.

Write P_i for the attention of head i and H = [P_1 X .. P_m X] for the attended tokens of all heads
side by side. Given the Θ_i, the best projections solve a linear regression, W = (HᵀH)⁻¹ Hᵀ Y, and
the loss that remains, |Y - H W|², is a function of the Θ_i alone (variable projection, Golub and
Pereyra 1973). A change dΘ_i moves row a of the output by

    Σ_b P_ab (t_ab - Σ_c P_ac t_ac) x_b W_i,        t = X dΘ_i Xᵀ,

which defines J; the part of it that a change of W can undo is projected away (Kaufman 1975):

    S = Jᵀ (I - H (HᵀH)⁻¹ Hᵀ) J.

S is never formed. A product with it costs about as much as two forward passes and is a sum over
chunks of examples, in each of which it is a sum over blocks. What is computed from a chunk stays
where the chunk is; matrices of the size of the weights and of the attention matrices travel.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from onelayer import arrays, attention
from onelayer.arrays import Array
from onelayer.blocks import map_over, sum_over
from onelayer.chunks import Chunks, OneByOne, each, merged
from onelayer.recovery.problem import Block, Cut, Problem

# Relative to the mean eigenvalue of HᵀH: they keep the inverse finite when heads coincide.
_RIDGE = 1e-13
SINGULAR_RIDGE = 1e-10
_UNSEEN = 1e-11  # eigenvalues below this, relative to the largest, are zero

# With few keys a sum over them is faster as a product with a matrix of ones.
_FEW_KEYS = 16


@dataclass(frozen=True)
class Attended:
    """A block's attention P (n, k·m, k) and features H (n·k, F) at one Θ."""

    attention: Array
    features: Array


@dataclass(frozen=True, eq=False)
class Fit:
    """All that is known at one Θ: `stacked` (p, m·d), the best weights (F, e), what is left over.

    The weights hold the projections, and the output bias as a last row where there is one.
    """

    cut: Cut
    stacked: Array
    attended: Chunks  # of tuples of `Attended`
    gram: Array  # HᵀH
    inverse: Array  # (HᵀH)⁺
    weights: Array
    residuals: Chunks  # of tuples of arrays (n·k, e)
    loss: float  # mean square of the residuals: relative, since outputs have unit mean square

    @property
    def heads(self) -> int:
        return int(self.stacked.shape[1] // self.cut.dim)

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


def fit(cut: Cut, stacked: Array) -> Fit:
    """Eliminate the weights at `stacked`: sums for HᵀH and HᵀY, then residuals and a correction."""
    attended = _attended(cut, cut.chunks, stacked)
    gram = merged(each(_gram, attended), operator.add)
    inverse = _inverse(gram)
    outputs = each(_outputs, cut.chunks)
    weights = inverse @ merged(each(_against_features, attended, outputs), operator.add)
    residuals = _kept_rows(cut, each(_less_fitted, outputs, attended, weights), weights)
    # One correction by the residuals themselves: HᵀH has the squared condition number of H, and
    # the ridge a bias; both are gone after it wherever the weights are determined.
    correction = inverse @ merged(each(_against_features, attended, residuals), operator.add)
    residuals = _kept_rows(cut, each(_less_fitted, residuals, attended, correction), weights)
    loss = merged(each(_squares, residuals), operator.add) / cut.equations
    return Fit(cut, stacked, attended, gram, inverse, weights + correction, residuals, loss)


def _attended(cut: Cut, blocks: Chunks, stacked: Array) -> Chunks:
    """Attention and features of all blocks: held if there is room, computed anew otherwise."""
    values = each(_attend_all, blocks, stacked, cut.output_bias)
    numbers = _per_row(cut, int(stacked.shape[1] // cut.dim))
    kept: Chunks = cut.kept(values, numbers, arrays.itemsize(stacked))
    return kept


def _per_row(cut: Cut, heads: int) -> int:
    """The numbers that attention and features of so many heads have for a row."""
    return heads * (cut.dim + cut.tokens)


def _kept_rows(cut: Cut, rows: Chunks, weights: Array) -> Chunks:
    """Rows as long as the outputs, held if there is room."""
    kept: Chunks = cut.kept(rows, weights.shape[1], arrays.itemsize(weights))
    return kept


# For one chunk, a sequence of blocks


def _attend_all(blocks: Sequence[Block], stacked: Array, output_bias: bool) -> tuple[Attended, ...]:
    return tuple(map_over(blocks, lambda block: attend(block, stacked, output_bias)))


def _outputs(blocks: Sequence[Block]) -> tuple[Array, ...]:
    return tuple(block.outputs for block in blocks)


def _gram(attended: Sequence[Attended]) -> Array:
    """HᵀH."""
    return sum_over(attended, lambda one: arrays.transpose(one.features) @ one.features)


def _against_features(attended: Sequence[Attended], rows: Sequence[Array]) -> Array:
    """Hᵀ u."""
    pairs = zip(attended, rows, strict=True)
    return sum_over(pairs, lambda pair: arrays.transpose(pair[0].features) @ pair[1])


def _less_fitted(
    rows: Sequence[Array], attended: Sequence[Attended], weights: Array
) -> tuple[Array, ...]:
    """u - H W."""
    pairs = zip(rows, attended, strict=True)
    return tuple(row - one.features @ weights for row, one in pairs)


def _squares(rows: Sequence[Array]) -> float:
    return sum(arrays.squared_norm(row) for row in rows)


# On other examples, in memory


def residuals_on(fit: Fit, blocks: Sequence[Block]) -> list[Array]:
    """What a fit leaves over of other examples, block by block."""
    bias = fit.cut.output_bias
    return [
        block.outputs - attend(block, fit.stacked, bias).features @ fit.weights for block in blocks
    ]


def held_out_error(fit: Fit, problem: Problem) -> float:
    """The relative root mean square error of a fit on other examples."""
    residuals = residuals_on(fit, problem.blocks(fit.heads))
    total = sum(arrays.squared_norm(residual) for residual in residuals)
    return float((total / problem.equations) ** 0.5)


# The inverse


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


# Products with J and S


@dataclass(frozen=True, eq=False)
class Jacobian:
    """Products with J and S at one fit, in that fit's precision or in float32."""

    cut: Cut
    blocks: Chunks
    attended: Chunks
    weights: Array
    inverse: Array

    def transposed(self, rows: Chunks) -> Array:
        """Jᵀ u."""
        return merged(each(_pull, self.blocks, self.attended, rows, self.weights), operator.add)

    def squared_size(self, direction: Array) -> float:
        """|J dΘ|²."""
        return float(merged(each(_squares, self.pushed(direction)), operator.add))

    def normal(self, direction: Array) -> Array:
        """S dΘ = Jᵀ (I - H (HᵀH)⁻¹ Hᵀ) J dΘ."""
        moved = _kept_rows(self.cut, self.pushed(direction), self.weights)
        undone = self.inverse @ merged(each(_against_features, self.attended, moved), operator.add)
        return self.transposed(each(_less_fitted, moved, self.attended, undone))

    def pushed(self, direction: Array) -> Chunks:
        """J dΘ: (p, m·d) -> (n·k, e) for every block."""
        moved: Chunks = each(_push, self.blocks, self.attended, direction, self.weights)
        return moved


def _push(
    blocks: Sequence[Block], attended: Sequence[Attended], direction: Array, weights: Array
) -> tuple[Array, ...]:
    weights = weights[: direction.shape[1], :]
    pairs = zip(blocks, attended, strict=True)
    return tuple(
        softmax_change(block.keys, one.attention, flattened(block.queries) @ direction) @ weights
        for block, one in pairs
    )


def _pull(
    blocks: Sequence[Block], attended: Sequence[Attended], rows: Sequence[Array], weights: Array
) -> Array:
    """Jᵀ u: (n·k, e) -> (p, m·d), summed over the blocks."""

    def term(place: tuple[Block, Attended, Array]) -> Array:
        block, one, outputs = place
        _, tokens, dim = block.keys.shape
        columns = one.attention.shape[1] // tokens * dim
        moved = outputs @ arrays.transpose(weights[:columns, :])
        change = softmax_change(block.keys, one.attention, moved)
        return arrays.transpose(flattened(block.queries)) @ change

    return sum_over(zip(blocks, attended, rows, strict=True), term)


def flattened(tokens: Array) -> Array:
    """Tokens (n, k, d) one below the other, (n·k, d)."""
    return arrays.namespace(tokens).reshape(tokens, (-1, tokens.shape[2]))


def softmax_change(keys: Array, weights: Array, rows: Array) -> Array:
    """Rows r_ai (n·k, m·d) -> Σ_b P_ab (t_b - Σ_c P_ac t_c) x_b with t_b = r_ai x_b.

    This map is symmetric (it is the covariance of the tokens under the attention), so that J and
    its transpose share it.
    """
    xp = arrays.namespace(rows)
    n, tokens, dim = keys.shape
    scores = xp.reshape(rows, (n, rows.shape[1] // dim * tokens, dim)) @ arrays.transpose(keys)
    weighted = weights * scores
    if tokens <= _FEW_KEYS:
        mean = weighted @ arrays.ones((tokens, tokens), keys)
    else:
        mean = xp.sum(weighted, axis=-1, keepdims=True)
    weighted -= weights * mean
    return xp.reshape(weighted @ keys, (n * tokens, rows.shape[1]))


def jacobian(fit: Fit, single: bool = False) -> Jacobian:
    """The products at a fit; `single` rounds all arrays to float32, at half the cost."""
    cut = fit.cut
    if not single:
        return Jacobian(cut, cut.chunks, fit.attended, fit.weights, fit.inverse)
    small = arrays.single
    blocks = cut.kept(each(_single_blocks, cut.chunks), 2 * cut.dim + 1, 4)
    if isinstance(fit.attended, OneByOne):  # not held: computed anew, and rather in float32
        attended = _attended(cut, blocks, small(fit.stacked))
    else:
        attended = cut.kept(each(_single_attended, fit.attended), _per_row(cut, fit.heads), 4)
    return Jacobian(cut, blocks, attended, small(fit.weights), small(fit.inverse))


def _single_blocks(blocks: Sequence[Block]) -> tuple[Block, ...]:
    small = arrays.single
    return tuple(
        Block(
            small(block.queries),
            small(block.keys),
            block.outputs,
            block.allowed,
            None if block.counted is None else small(block.counted),
        )
        for block in blocks
    )


def _single_attended(attended: Sequence[Attended]) -> tuple[Attended, ...]:
    small = arrays.single
    return tuple(Attended(small(one.attention), small(one.features)) for one in attended)


def gradient(fit: Fit) -> Array:
    """Jᵀ r: minus half the gradient of the sum of squares (the regression part vanishes)."""
    return jacobian(fit).transposed(fit.residuals)


def cost_of_dropping(fit: Fit) -> list[float]:
    """By how much the sum of squares grows when a head is left out and the rest refitted.

    With B the head's block of (HᵀH)⁻¹ that is tr(W_iᵀ B⁻¹ W_i): no pass over the examples is
    needed. It is near zero for a head without projection and for one of two equal heads.
    """
    xp = arrays.namespace(fit.stacked)
    dim = fit.cut.dim
    inverse = ridged_inverse(fit.gram)
    costs = []
    for head in range(fit.heads):
        part = slice(head * dim, (head + 1) * dim)
        weights = fit.weights[part, :]
        costs.append(float(xp.sum(weights * xp.linalg.solve(inverse[part, part], weights))))
    return costs
