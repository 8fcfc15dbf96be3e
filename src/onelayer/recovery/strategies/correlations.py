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

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from onelayer.array import backend, krylov, linalg, threads
from onelayer.array.backend import Array
from onelayer.data.chunks import InMemory
from onelayer.data.progress import Progress, no_progress
from onelayer.heads import dense, subspace
from onelayer.heads.subspace import Subspace
from onelayer.recovery.gauss_newton.batches import Batches, Block, Rows, map_blocks, sum_blocks

_SPARE = 4  # directions that the iteration carries beside those asked for
_ROUNDS = 5
_SCORE = 1.0  # standard deviation of the scores of random heads
_RIDGE = 1e-10  # of the regression on tokens, relative to its mean eigenvalue


@dataclass(frozen=True, eq=False)
class HeadSpan:
    """Heads that are combinations of orthonormal directions (count, p·d)."""

    dim: int
    directions: Array
    strengths: np.ndarray[Any, Any]  # their singular values, in descending order

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

    def subspace(self, batches: Batches) -> Subspace:
        """The span as the space of steps on these examples."""
        # Scores are always held: in float32 they take less memory than the examples.
        blocks = batches.in_single(int(self.directions.shape[0]))
        scores = map_blocks(partial(subspace.scores, theta=backend.single(self.theta)), blocks)
        return Subspace(self.dim, self.directions, InMemory(tuple(scores.collect())))


def span(
    batches: Batches,
    count: int,
    rng: np.random.Generator,
    rows: Rows | None = None,  # such as the residuals of a fit
    progress: Progress = no_progress,
) -> HeadSpan:
    """The `count` strongest directions in what is not linear in the tokens, or in given rows."""
    rows = _not_linear(batches) if rows is None else rows
    sample = batches.chunks.map(_sample).reduce(lambda first, _: first)
    query_dim, out_dim = sample.shape
    numbers = query_dim + batches.dim + batches.tokens + out_dim
    parts = batches.persist(map_blocks(_part, batches.chunks, rows), numbers, 4)
    xp, size = backend.namespace(sample), batches.dim * min(sample.shape)
    spread = min(count + _SPARE, size)  # there are no more directions than `size`

    def heads_from(projections: Array) -> Array:
        """(spread, d·e) -> (spread, p·d)."""
        projections = xp.reshape(projections, (-1, out_dim))
        theta = sum_blocks(partial(_heads_from, projections=projections), parts)
        return dense.flatten(theta, batches.dim)

    def projections_from(heads: Array) -> Array:
        """(spread, p·d) -> (spread, d·e)."""
        theta = dense.unflatten(backend.like(heads, sample), batches.dim)
        projections = sum_blocks(partial(_projections_from, theta=theta), parts)
        return xp.reshape(projections, (spread, -1))

    start = backend.like(rng.standard_normal((spread, batches.dim * out_dim)), sample)
    with threads.allow_tf32(sample):
        directions, strengths = krylov.block_krylov(
            heads_from, projections_from, start, _ROUNDS, size // spread, progress
        )
    return HeadSpan(batches.dim, directions[:count, :], backend.to_numpy(strengths[:count]))


@dataclass(frozen=True)
class _Part:
    """The arrays of a block for products with T, in float32: only directions come from them."""

    queries: Array  # (n·k, p)
    keys: Array  # (n, k, d)
    others: Array  # (n, k, k), attention of every row to all other tokens alike
    rows: Array  # (n·k, e)

    def features_jvp(self, rows: Array) -> Array:
        """How features change with scores r_ai x_b, rows (n·k, s·d), if all heads attend alike."""
        n, tokens, dim = self.keys.shape
        heads = rows.shape[1] // dim
        every = self.others[:, :, None, :] * backend.ones((1, 1, heads, 1), self.others)
        attention = backend.namespace(every).reshape(every, (n, tokens * heads, tokens))
        return dense.features_jvp(self.keys, attention, rows)


def _heads_from(part: _Part, projections: Array) -> Array:
    """T times projections (s·d, e): theta of s heads."""
    moved = part.rows @ backend.transpose(projections)
    return backend.transpose(part.queries) @ part.features_jvp(moved)


def _projections_from(part: _Part, theta: Array) -> Array:
    """Tᵀ times s heads: projections (s·d, e)."""
    return backend.transpose(part.features_jvp(part.queries @ theta)) @ part.rows


def _part(block: Block, rows: Array) -> _Part:
    arrays = (dense.flat_tokens(block.queries), block.keys, _others(block), rows)
    return _Part(*map(backend.single, arrays))


def _others(block: Block) -> Array:
    """Uniform attention (n, k, k) to the allowed tokens other than the row's own."""
    xp, tokens = backend.namespace(block.keys), block.keys.shape[1]
    allowed = ~xp.eye(tokens, dtype=xp.bool, device=backend.device(block.keys))[None, :, :]
    if block.allowed is not None:
        allowed = allowed & block.allowed
    zero = backend.zeros((block.queries.shape[2], block.keys.shape[2]), block.keys)
    return dense.attention(block, zero, allowed)


def _sample(blocks: Sequence[Block]) -> Array:
    """Zeros (p, e) in the type and on the device of the products."""
    shape = int(blocks[0].queries.shape[2]), int(blocks[0].outputs.shape[1])
    return backend.zeros(shape, backend.single(blocks[0].outputs[:0, :]))


def _not_linear(batches: Batches) -> Rows:
    """The outputs less their regression on a row's own token, the mean of the others, and 1."""
    total = sum_blocks(_linear_sums, batches.chunks)
    xp, features = backend.namespace(total), 2 * batches.dim + 1
    gram = backend.copied(total[:features, :features])
    linalg.add_to_diagonal(gram, _RIDGE * float(xp.linalg.trace(gram)) / features or 1.0)
    weights = xp.linalg.solve(gram, total[:features, features:])
    return map_blocks(partial(_less_linear, weights=weights), batches.chunks)


def _linear_sums(block: Block) -> Array:
    """Products of all features and outputs with each other."""
    both = backend.namespace(block.keys).concat([_linear(block), block.outputs], axis=1)
    return backend.transpose(both) @ both


def _less_linear(block: Block, weights: Array) -> Array:
    return block.outputs - _linear(block) @ weights


def _linear(block: Block) -> Array:
    """A row's own token, the mean of the others, and 1: (n·k, 2 d + 1), zero for padding."""
    own, others = dense.flat_tokens(block.keys), dense.flat_tokens(_others(block) @ block.keys)
    one = backend.ones((own.shape[0], 1), own) if block.counted is None else block.counted
    return backend.namespace(own).concat([own, others, one], axis=1)
