"""Where heads are, by correlations of third order: a start for large problems.

To first order in Θ the attention of row a is uniform plus (x_a Θ_i (x_b - x̄)) / k, so that

    y_a = x̄ Σ_i W_i + (1/k) Σ_i Σ_b (x_a Θ_i (x_b - x̄)) x_b W_i + ..,

a cubic form in the tokens with coefficients T = Σ_i Θ_i ⊗ W_i. As a matrix from the entries of a W
to those of a Θ it has rank m, and its left singular vectors span the heads. It is estimated by
correlating outputs, less what is linear in the tokens, with products of three tokens. Of these,
x_a x_b x_b with b other than a are used, since powers of one token are not independent. T has d⁴
entries and is never formed: products with it are products with the Jacobian at uniform attention,
sums over examples. Five rounds of block Krylov iteration (Musco and Musco 2015) find what plain
orthogonal iteration does not find in eight.

Terms of higher order add other products of Θ_i and W_i to T, distributed over many singular values,
and so does the noise of a finite sample. With n k² products of tokens against d² directions it
hides the weaker heads unless n k² is many times d²: of a random layer of scale 2.5 in 384
dimensions 10,000 examples of 8 tokens show every head (cosine 0.75), 2,500 hardly any.

In the span of the heads each is a combination of m directions: m² numbers instead of m d². That
small problem is solved by Gauss-Newton steps within the span, and has shown no bad minima: 8 of 8
starts on random layers in 384 dimensions ended at the same loss, and 10 of 10 on layers of a
pretrained transformer within one per cent of it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from onelayer.array import backend, krylov, linalg, threads
from onelayer.array.backend import Array
from onelayer.array.blocks import sum_over
from onelayer.data.chunks import Chunks, InMemory
from onelayer.data.progress import Progress, no_progress
from onelayer.heads import dense
from onelayer.recovery.gauss_newton.batches import Batches, Block, Rows

_SPARE = 4  # directions that the iteration carries beside those asked for
_ROUNDS = 5
_SCORE = 1.0  # standard deviation of the scores of random heads
_RIDGE = 1e-10  # of the regression on tokens, relative to its mean eigenvalue


@dataclass(frozen=True, eq=False)
class Span:
    """Heads that are combinations of orthonormal directions (count, p·d).

    `strengths` are the singular values of the directions, in descending order.
    """

    dim: int
    directions: Array
    strengths: np.ndarray[Any, Any]

    @property
    def theta(self) -> Array:
        """The directions as heads (p, count·d)."""
        return dense.unflatten(self.directions, self.dim)

    def drawn(self, heads: int, rng: np.random.Generator) -> Array:
        """Random heads (p, heads·d) with scores of moderate size on whitened tokens."""
        count = int(self.directions.shape[0])
        coefficients = rng.standard_normal((heads, count)) * (_SCORE / count**0.5)
        drawn = backend.like(coefficients, self.directions) @ self.directions
        return dense.unflatten(drawn, self.dim)


@dataclass(frozen=True, eq=False)
class Within:
    """Restricts steps to directions within a span.

    `inputs` are the scores x_a D x_b for all directions D of the span, arrays (n, k, count, k)
    block by block: changes of all scores are combinations of them.
    """

    span: Span
    inputs: Rows

    def project(self, direction: Array) -> Array:
        """The nearest allowed direction to (p, m·d)."""
        return self.lift(self._coefficients(direction))

    def scores_jvp(self, direction: Array) -> Callable[..., Array]:
        return partial(_combined_scores, coefficients=self._coefficients(direction))

    def scores_vjp(self, _reference: Array) -> Callable[..., Array]:
        return _coefficients_vjp

    def lift(self, coefficients: Array) -> Array:
        """(m, count) -> (p, m·d)."""
        basis = backend.like(self.span.directions, coefficients)
        return dense.unflatten(coefficients @ basis, self.span.dim)

    def retract(self, theta: Array, direction: Array) -> tuple[Array, Within]:
        """The moved heads; the span is flat, so directions stay the same."""
        return theta + direction, self

    def _coefficients(self, direction: Array) -> Array:
        """(p, m·d) -> (m, count)."""
        basis = backend.like(self.span.directions, direction)
        return dense.flatten(direction, self.span.dim) @ backend.transpose(basis)


def within(span: Span, batches: Batches) -> Within:
    """The directions within a span, for steps on these examples.

    Scores are always held: in float32 they take less memory than the examples.
    """
    scores = batches.in_single(int(span.directions.shape[0])).map(
        _scores, backend.single(span.theta)
    )
    return Within(span, InMemory(tuple(scores.collect())))


def span(
    batches: Batches,
    count: int,
    rng: np.random.Generator,
    rows: Chunks[Any] | None = None,
    progress: Progress = no_progress,
) -> Span:
    """The `count` strongest directions in what is not linear in the tokens, or in given rows.

    `rows` are tuples of arrays (n·k, e), block by block, such as the residuals of a fit.
    """
    rows = _not_linear(batches) if rows is None else rows
    sample = batches.chunks.map(_sample).reduce(_first)
    query_dim, out_dim = sample.shape
    numbers = query_dim + batches.dim + batches.tokens + out_dim
    parts = batches.persist(batches.chunks.map(_parts, rows), numbers, 4)
    size = batches.dim * min(sample.shape)  # there are no more directions
    spread = min(count + _SPARE, size)
    xp = backend.namespace(sample)

    def heads_from(projections: Array) -> Array:
        """(spread, d·e) -> (spread, p·d)."""
        projections = xp.reshape(projections, (-1, out_dim))
        heads = parts.map(_heads_from, projections).reduce(operator.add)
        return dense.flatten(heads, batches.dim)

    def projections_from(heads: Array) -> Array:
        """(spread, p·d) -> (spread, d·e)."""
        theta = dense.unflatten(backend.like(heads, sample), batches.dim)
        projections = parts.map(_projections_from, theta).reduce(operator.add)
        return xp.reshape(projections, (spread, -1))

    start = rng.standard_normal((spread, batches.dim * out_dim))
    with threads.allow_tf32(sample):
        directions, strengths = krylov.block_krylov(
            heads_from,
            projections_from,
            backend.like(start, sample),
            _ROUNDS,
            size // spread,
            progress,
        )
    return Span(batches.dim, directions[:count, :], backend.to_numpy(strengths[:count]))


# Within a span, for one chunk, a sequence of blocks


def _scores(blocks: Sequence[Block], theta: Array) -> tuple[Array, ...]:
    def of_block(block: Block) -> Array:
        n, tokens, dim = block.keys.shape
        shape = (n, tokens, dense.count(theta, dim), tokens)
        return backend.namespace(theta).reshape(dense.scores(block, theta), shape)

    return tuple(map(of_block, blocks))


def _combined_scores(scores: Array, coefficients: Array) -> Array:
    """How scores of all heads change along combinations of directions, (n, k·m, k)."""
    n, tokens, _, _ = scores.shape
    combined = coefficients @ backend.like(scores, coefficients)
    shape = (n, tokens * coefficients.shape[0], tokens)
    return backend.namespace(combined).reshape(combined, shape)


def _coefficients_vjp(scores: Array, change: Array) -> Array:
    """Inner products of changes of attention with the scores of the directions, (m, count)."""
    xp, (n, tokens, _, _) = backend.namespace(change), scores.shape
    change = xp.reshape(change, (n, tokens, change.shape[1] // tokens, tokens))
    flat, against = (
        xp.reshape(xp.permute_dims(one, (2, 0, 1, 3)), (one.shape[2], n * tokens**2))
        for one in (change, backend.like(scores, change))
    )
    return flat @ backend.transpose(against)


# For one chunk, a sequence of blocks. Products are in float32: only directions come from them.


@dataclass(frozen=True)
class _Part:
    """The arrays of a block that products with T need."""

    queries: Array  # (n·k, p)
    keys: Array  # (n, k, d)
    others: Array  # (n, k, k), attention of every row to all other tokens alike
    rows: Array  # (n·k, e)

    def attention(self, heads: int) -> Array:
        """The same attention for all heads, (n, k·heads, k)."""
        n, tokens, _ = self.others.shape
        every = self.others[:, :, None, :] * backend.ones((1, 1, heads, 1), self.others)
        return backend.namespace(every).reshape(every, (n, tokens * heads, tokens))


def _heads_from(parts: Sequence[_Part], projections: Array) -> Array:
    """T times projections (s·d, e): heads (p, s·d)."""

    def term(part: _Part) -> Array:
        moved = part.rows @ backend.transpose(projections)
        spread = part.attention(moved.shape[1] // part.keys.shape[2])
        return backend.transpose(part.queries) @ dense.features_jvp(part.keys, spread, moved)

    return sum_over(parts, term)


def _projections_from(parts: Sequence[_Part], heads: Array) -> Array:
    """Tᵀ times heads (p, s·d): projections (s·d, e)."""

    def term(part: _Part) -> Array:
        moved = part.queries @ heads
        spread = part.attention(moved.shape[1] // part.keys.shape[2])
        return backend.transpose(dense.features_jvp(part.keys, spread, moved)) @ part.rows

    return sum_over(parts, term)


def _parts(blocks: Sequence[Block], rows: Sequence[Array]) -> tuple[_Part, ...]:
    small = backend.single
    return tuple(
        _Part(
            dense.flat_tokens(small(block.queries)),
            small(block.keys),
            small(_others(block)),
            small(y),
        )
        for block, y in zip(blocks, rows, strict=True)
    )


def _others(block: Block) -> Array:
    """Uniform attention (n, k, k) to the allowed tokens other than the row's own."""
    xp = backend.namespace(block.keys)
    tokens, device = block.keys.shape[1], backend.device(block.keys)
    allowed = ~xp.eye(tokens, dtype=xp.bool, device=device)[None, :, :]
    if block.allowed is not None:
        allowed = allowed & block.allowed
    zero = backend.zeros((block.queries.shape[2], block.keys.shape[2]), block.keys)
    return dense.attention(block, zero, allowed)


def _sample(blocks: Sequence[Block]) -> Array:
    """Zeros (p, e) in the type and on the device of the products."""
    shape = int(blocks[0].queries.shape[2]), int(blocks[0].outputs.shape[1])
    return backend.zeros(shape, backend.single(blocks[0].outputs[:0, :]))


def _first(one: Array, _other: Array) -> Array:
    return one


# The part that is not linear in the tokens


def _not_linear(batches: Batches) -> Chunks[Any]:
    """The outputs less their regression on a row's own token, the mean of the others, and 1."""
    total = batches.chunks.map(_linear_sums).reduce(operator.add)
    xp = backend.namespace(total)
    features = 2 * batches.dim + 1
    gram = backend.copied(total[:features, :features])
    linalg.add_to_diagonal(gram, _RIDGE * float(xp.linalg.trace(gram)) / features or 1.0)
    weights = xp.linalg.solve(gram, total[:features, features:])
    left: Chunks[Any] = batches.chunks.map(_less_linear, weights)
    return left


def _linear_sums(blocks: Sequence[Block]) -> Array:
    """Products of all features and outputs with each other."""

    def term(block: Block) -> Array:
        both = backend.namespace(block.keys).concat([_linear(block), block.outputs], axis=1)
        return backend.transpose(both) @ both

    return sum_over(blocks, term)


def _less_linear(blocks: Sequence[Block], weights: Array) -> tuple[Array, ...]:
    return tuple(block.outputs - _linear(block) @ weights for block in blocks)


def _linear(block: Block) -> Array:
    """A row's own token, the mean of the others, and 1: (n·k, 2 d + 1), zero for padding."""
    xp = backend.namespace(block.keys)
    own = dense.flat_tokens(block.keys)
    others = dense.flat_tokens(_others(block) @ block.keys)
    one = backend.ones((own.shape[0], 1), own) if block.counted is None else block.counted
    return xp.concat([own, others, one], axis=1)
