"""The examples of one recovery: whitened, split, and cut into blocks.

Recovery works in coordinates in which tokens have unit second moments. With x = x' A⁻¹, where
A = (E xᵀx)^(-1/2), the score x_a Θ x_b is x'_a (A⁻¹ Θ A⁻¹) x'_b, so nothing is lost and the
least-squares problem no longer inherits the conditioning of the inputs. Outputs are divided by
their root mean square, so that all errors are relative.

A `Problem` holds its examples in memory. A `SpreadProblem` leaves them where they live and whitens
them chunk by chunk, whenever they are asked for; it can bring a random sample of them here.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np

from onelayer import arrays, attention, blocks, chunks
from onelayer.arrays import Array
from onelayer.chunks import Chunks, InMemory, Told, untold
from onelayer.layer import AttentionLayer
from onelayer.recovery import passes
from onelayer.recovery.cut import Block, Cut, anew, groups, numbers_per_row
from onelayer.sources import Chunk, Source

# A direction in which tokens hardly move is not blown up beyond this: nothing can be learned there.
_WHITENING_FLOOR = 1e-12

Positions: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Frame:
    """What all examples of a problem share, with what is needed to come back from it."""

    tokens: int
    dim: int
    out_dim: int
    causal: bool
    bias: bool
    whitening: Array  # A, symmetric
    output_scale: float

    @property
    def query_dim(self) -> int:
        """Rows of an attention matrix, the key bias counted as one."""
        return self.dim + int(self.bias)

    @property
    def frame(self) -> Frame:
        """This alone, without any examples."""
        return Frame(*(getattr(self, field.name) for field in fields(Frame)))

    def unknowns(self, heads: int, rank: int | None) -> int:
        """The number of free numbers in a layer of this shape."""
        return unknowns(self.dim, self.out_dim, heads, rank, self.bias)

    def whitened(self, X: Array, Y: Array, mask: Array | None) -> Problem:
        """Examples as they were given, in memory and on the device of the whitening matrix."""
        X, Y = (arrays.double(array) for array in _without_padding(X, Y, mask))
        X, Y = X @ self.whitening, Y / self.output_scale
        return Problem(**vars(self.frame), X=X, Y=Y, mask=mask)

    def layer(self, stacked: Array, weights: Array) -> AttentionLayer:
        """The layer in the caller's coordinates: Θ = A Θ' A, c = A c', W = A W', b = b'."""
        xp = arrays.namespace(stacked)
        dim, A = self.dim, self.whitening
        theta = attention.unstack(stacked, dim)
        columns = theta.shape[0] * dim
        projection = xp.reshape(weights[:columns, :], (-1, dim, self.out_dim))
        key_bias = theta[:, dim, :] @ A if self.bias else None
        output_bias = weights[columns, :] * self.output_scale if self.bias else None
        return AttentionLayer(
            A @ theta[:, :dim, :] @ A, A @ projection * self.output_scale, key_bias, output_bias
        )

    def _bytes_per_example(self, heads: int) -> int:
        """Attention and features of one example."""
        return 8 * self.tokens * heads * (self.dim + self.tokens)

    def _held_per_example(self, heads: int) -> int:
        """The bytes that are held of one example between two passes, if there is room."""
        return 8 * self.tokens * numbers_per_row(heads, self.dim, self.tokens, self.out_dim)

    def _cut(self, spread: Chunks, examples: int, equations: int, room: int) -> Cut:
        shape = (self.tokens, self.dim, self.out_dim)
        return Cut(spread, examples, *shape, equations, self.bias, room)


@dataclass(frozen=True)
class Problem(Frame):
    """Examples in memory, in whitened coordinates and in random order."""

    X: Array  # whitened tokens (n, k, d)
    Y: Array  # outputs over their root mean square (n, k, e)
    mask: Array | None

    @property
    def examples(self) -> int:
        return int(self.X.shape[0])

    @property
    def equations(self) -> int:
        """The number of observed numbers."""
        return counted(self.X, self.mask) * self.out_dim

    def take(self, index: Positions) -> Problem:
        """The problem on some of the examples."""
        X, Y = arrays.rows(self.X, index), arrays.rows(self.Y, index)
        mask = None if self.mask is None else arrays.rows(self.mask, index)
        return replace(self, X=X, Y=Y, mask=mask)

    def sample(self, count: int) -> Problem:
        """The problem on so many examples, drawn at random."""
        return self.take(np.arange(count))

    def cut(self, heads: int) -> Cut:
        """The examples in blocks, all in one chunk if what is computed from them can be held."""
        parts = self.blocks(heads)
        size = self.examples * self._held_per_example(heads)
        room = chunks.room(self.X)
        spread = InMemory((parts,)) if size <= room else anew(groups(parts, size))
        return self._cut(spread, self.examples, self.equations, room)

    def blocks(self, heads: int) -> tuple[Block, ...]:
        """The examples in blocks; a single one, empty, where there are no examples."""
        # Sums over blocks are as large as the square of their features: with smaller blocks most of
        # the time would go by with adding them up.
        size = max(blocks.block_bytes(self.X), 4 * (heads * self.dim) ** 2)
        parts = list(blocks.slices(self.examples, self._bytes_per_example(heads), size))
        return tuple(self._block(part) for part in parts or [slice(0, 0)])

    def _block(self, part: slice) -> Block:
        xp = arrays.namespace(self.X)
        keys = self.X[part, ...]
        outputs = xp.reshape(self.Y[part, ...], (-1, self.out_dim))
        queries = attention.with_constant(keys) if self.bias else keys
        if self.mask is None:
            allowed = attention.allowed_pairs(None, self.causal, keys)
            return Block(queries, keys, outputs, allowed, None)
        mask = self.mask[part, ...]
        allowed = attention.allowed_pairs(mask, self.causal, keys) & mask[:, :, None]
        counted = xp.astype(xp.reshape(mask, (-1, 1)), keys.dtype)
        return Block(queries, keys, outputs * counted, allowed, counted)


@dataclass(frozen=True, eq=False)
class SpreadProblem(Frame):
    """Examples that stay where they live; some of them, held out, are not among its own."""

    source: Source
    device: str | None
    held_out: Positions  # ascending
    order: Positions  # its own examples in random order, or as many of them as are ever sampled
    equations: int

    @property
    def examples(self) -> int:
        return len(self.source) - len(self.held_out)

    def at(self, positions: Positions) -> Problem:
        """The examples at some positions, in their order, brought here."""
        ascending = np.sort(positions)
        X, Y, mask = (place_or_none(one, self.device) for one in self.source.rows(ascending))
        return self.whitened(X, Y, mask).take(np.searchsorted(ascending, positions))

    def sample(self, count: int) -> Problem:
        """The problem on so many examples, drawn at random, in memory."""
        return self.at(self.order[:count])

    def split(self, count: int) -> tuple[SpreadProblem, Problem]:
        """The problem without so many random examples, and these, in memory and the same frame."""
        out = self.sample(count)
        rest = replace(
            self,
            held_out=np.union1d(self.held_out, self.order[:count]),
            order=self.order[count:],
            equations=self.equations - out.equations,
        )
        return rest, out

    def cut(self, heads: int) -> Cut:
        """The examples in blocks, chunk by chunk, held where they are if there is room."""
        shared = (self.frame, self.held_out, self.device, heads)
        spread = chunks.each(_cut_chunk, self.source.chunks, *shared)
        room = chunks.room(self.whitening)
        cut = self._cut(spread, self.examples, self.equations, room)
        numbers = self.query_dim + self.dim + self.out_dim + self.tokens
        held = cut.kept(spread, numbers)
        if isinstance(held, InMemory) and self.examples * self._held_per_example(heads) > room:
            held = anew(held.values)  # what is computed from them takes more than they do
        return replace(cut, chunks=held)


AnyProblem: TypeAlias = Problem | SpreadProblem


def _cut_chunk(
    chunk: Chunk, frame: Frame, held_out: Positions, device: str | None, heads: int
) -> tuple[Block, ...]:
    X, Y, mask = (place_or_none(one, device) for one in without(chunk, held_out))
    return frame.whitened(X, Y, mask).blocks(heads)


def without(chunk: Chunk, held_out: Positions) -> tuple[Array | None, ...]:
    """The arrays of a chunk without the examples at some ascending positions."""
    first, last = np.searchsorted(held_out, [chunk.start, chunk.start + len(chunk)])
    if first == last:
        return chunk.arrays
    kept = np.setdiff1d(np.arange(len(chunk)), held_out[first:last] - chunk.start)
    return tuple(None if one is None else arrays.rows(one, kept) for one in chunk.arrays)


def place_or_none(array: Array | None, device: str | None) -> Array | None:
    """The array on a device; None stays None."""
    return None if array is None else arrays.place(array, device)


def _without_padding(X: Array, Y: Array, mask: Array | None) -> tuple[Array, Array]:
    """Whatever is in the padding, zeros can do no harm."""
    if mask is None:
        return X, Y
    xp = arrays.namespace(X)
    there = mask[:, :, None]
    return xp.where(there, X, xp.zeros_like(X)), xp.where(there, Y, xp.zeros_like(Y))


def counted(X: Array, mask: Array | None) -> int:
    """Rows that are no padding."""
    if mask is None:
        return int(X.shape[0] * X.shape[1])
    xp = arrays.namespace(mask)
    return int(xp.sum(xp.astype(mask, xp.int64)))


def unknowns(dim: int, out_dim: int, heads: int, rank: int | None, bias: bool) -> int:
    """The number of free numbers in a layer, heads being determined up to their order."""
    free = dim * dim if rank is None else rank * (2 * dim - rank)
    return heads * (free + dim * out_dim + dim * int(bias)) + out_dim * int(bias)


# Finding the frame


@dataclass(frozen=True)
class Moments:
    """Sums over examples: of xᵀx, of squared outputs, and of the rows that count."""

    tokens: Array
    outputs: float
    rows: int

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.tokens + other.tokens, self.outputs + other.outputs, self.rows + other.rows
        )


def moments(X: Array, Y: Array, mask: Array | None, scales: tuple[float, float]) -> Moments:
    """Those of some examples whose tokens and outputs are divided by these scales."""
    X, Y = (arrays.double(array) for array in _without_padding(X, Y, mask))
    X, Y = X / scales[0], Y / scales[1]
    flat = arrays.namespace(X).reshape(X, (-1, X.shape[2]))
    return Moments(arrays.transpose(flat) @ flat, arrays.squared_norm(Y), counted(X, mask))


def framed(
    found: Moments,
    scales: tuple[float, float],
    samples: tuple[Array, Array],
    causal: bool,
    bias: bool,
) -> Frame:
    """The frame of examples of which these are the moments, and this one example each."""
    (_, tokens, dim), out_dim = samples[0].shape, samples[1].shape[2]
    whitening = inverse_root(found.tokens / found.rows)
    mean_square = found.outputs / (found.rows * out_dim)
    output_scale = (mean_square**0.5 or 1.0) * scales[1]
    return Frame(tokens, dim, out_dim, causal, bias, whitening / scales[0], output_scale)


def scales_of(largest: tuple[float, float]) -> tuple[float, float]:
    """Largest entries are brought to 1 first, so that squares neither overflow nor vanish."""
    return largest[0] or 1.0, largest[1] or 1.0


def pose(X: Array, Y: Array, mask: Array | None, causal: bool, bias: bool) -> Problem:
    """The recovery problem of checked arrays X and Y, in float64 and whitened coordinates."""
    X, Y = (arrays.double(array) for array in _without_padding(X, Y, mask))
    scales = scales_of((arrays.largest(X), arrays.largest(Y)))
    X, Y = X / scales[0], Y / scales[1]
    frame = framed(moments(X, Y, mask, (1.0, 1.0)), (1.0, 1.0), (X, Y), causal, bias)
    posed = frame.whitened(X, Y, mask)
    return replace(
        posed,
        whitening=posed.whitening / scales[0],
        output_scale=posed.output_scale * scales[1],
    )


def pose_spread(
    source: Source,
    scales: tuple[float, float],
    held_out: Positions,
    order: Positions,
    causal: bool = False,
    bias: bool = False,
    device: str | None = None,
    told: Told = untold,
) -> SpreadProblem:
    """The problem of examples that stay where they live, from one pass over them.

    `scales` are the largest entries, `held_out` the ascending positions of examples that are none
    of its own, and `order` those of its own in random order.
    """
    shared = (scales, held_out, device)
    found = passes.merged_over(source.chunks, _chunk_moments, operator.add, told, *shared)
    X, Y, _ = source.samples
    frame = framed(found, scales, (X, Y), causal, bias)
    return SpreadProblem(
        **vars(frame),
        source=source,
        device=device,
        held_out=held_out,
        order=order,
        equations=found.rows * frame.out_dim,
    )


def _chunk_moments(
    chunk: Chunk,
    scales: tuple[float, float],
    held_out: Positions,
    device: str | None,
    told: Told = untold,
) -> Moments:
    X, Y, _ = chunk.arrays
    size = blocks.block_bytes(arrays.place(X[:1, ...], device))

    def term(part: slice) -> Moments:
        some = without(chunk.between(chunk.start + part.start, chunk.start + part.stop), held_out)
        X, Y, mask = (place_or_none(one, device) for one in some)
        return moments(X, Y, mask, scales)

    per_example = bytes_in_block(X.shape[1], X.shape[2], Y.shape[2])
    parts = list(blocks.slices(len(chunk), per_example, size))
    total: Moments = passes.fold_and_tell(parts, term, operator.add, X, told)
    return total


def bytes_in_block(tokens: int, dim: int, out_dim: int) -> int:
    """Of an example: tokens, outputs, their images, also centred, and k x k matrices of a row."""
    return 8 * tokens * (2 * dim + 4 * out_dim + 6 * tokens)


def inverse_root(moments: Array) -> Array:
    """(E xᵀx)^(-1/2) of tokens' second moments; directions that do not occur keep others' size."""
    xp = arrays.namespace(moments)
    values, vectors = xp.linalg.eigh(moments)
    largest = float(values[-1])
    if largest <= 0:
        return arrays.like(np.eye(moments.shape[0]), moments)
    values = xp.where(values > _WHITENING_FLOOR * largest, values, largest + 0 * values)
    return (vectors / xp.sqrt(values)) @ arrays.transpose(vectors)
