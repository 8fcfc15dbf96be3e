"""The examples of one recovery: whitened, split, and cut into blocks.

Recovery works in coordinates of the affine span of the tokens (see `onelayer.span`) in which they
have mean zero and unit covariance: z = (x - μ) A, A = V diag(1/s). The least-squares problem then
neither inherits the conditioning of the inputs nor has directions in which nothing can be learned.
In these coordinates scores are those of attention matrices Θ' with a key bias c', and outputs have
a constant b', whether or not the layer has biases:

    x_a Θ x_b + c x_b  =  z_a Θ' z_b + c' z_b + ..,     Θ' = B Θ Bᵀ,  c' = B (Θᵀ μ + c),  B = A⁺.

So Θ', c', W' = B W and b' are found, with queries [z, 1], if the layer may have biases, or if the
span does not contain the origin: then any c' and b' come from some Θ and W without biases.

Where the span contains the origin and the layer has no biases, c' and b' follow from Θ' and W':
with ν = μ A scores are (z_a + ν) Θ' z_b, and features P z + ν. Queries z + ν = x A are brought to
unit second moments as well, by M = (I + ννᵀ)^(-1/2). If the mean is small compared with the spread
nothing is gained by subtracting it, and z = x A with A made from second moments does for all.

Outputs are divided by their root mean square, so that all errors are relative; about their mean,
which is subtracted, where there is a constant.

`WhitenedExamples` are held in memory. `StreamedExamples` stay where they live and are whitened
whenever they are read; a random sample of them can be brought here.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np

from onelayer import span
from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.data import chunks
from onelayer.data.chunks import Chunks, InMemory, Progress, no_progress
from onelayer.data.sources import Chunk, Source
from onelayer.heads import dense
from onelayer.heads.softmax import allowed_pairs
from onelayer.layer import AttentionLayer
from onelayer.recovery import passes
from onelayer.recovery.gauss_newton.batches import (
    Batches,
    Block,
    groups,
    numbers_per_row,
    recompute,
)
from onelayer.span import Span

_ROUNDED = 100  # examples that are looked at to see how tokens were rounded
_ALIKE = 1e-3  # the least deviation over the largest of columns of like size
_LARGE_MEAN = 1.0  # in standard deviations of tokens: a larger one is subtracted

Positions: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Whitening:
    """What all examples of a problem share, with what is needed to come back from it."""

    tokens: int
    dim: int  # of whitened tokens
    out_dim: int
    causal: bool
    bias: bool  # whether the layer may have biases
    span: Span
    constant: bool  # whether there are a key bias and an output bias in whitened coordinates
    origin: Array  # (d,), subtracted from tokens before they are whitened
    whitening: Array  # A (d, dim)
    offset: Array | None  # ν (dim,), where queries and features have one
    output_mean: Array  # (out_dim,)
    output_scale: float

    @property
    def query_dim(self) -> int:
        """Rows of an attention matrix, the key bias counted as one."""
        return self.dim + int(self.constant)

    @property
    def transform(self) -> Whitening:
        """This alone, without any examples."""
        return Whitening(*(getattr(self, field.name) for field in fields(Whitening)))

    def rank(self, rank: int | None) -> int | None:
        """The rank of attention matrices on the span; None where any matrix has it."""
        return None if rank is None or rank >= self.dim else rank

    def unknowns(self, heads: int, rank: int | None) -> int:
        """The number of free numbers in a layer of this shape."""
        return unknowns(self.dim, self.out_dim, heads, rank, self.constant)

    def whitened(self, X: Array, Y: Array, mask: Array | None) -> WhitenedExamples:
        """Examples as they were given, in memory and on the device of the whitening matrix."""
        X, Y = backend.double(X), backend.double(Y)
        X, Y = (X - self.origin) @ self.whitening, (Y - self.output_mean) / self.output_scale
        X, Y = without_padding(X, Y, mask)
        return WhitenedExamples(**vars(self.transform), X=X, Y=Y, mask=mask)

    def queries(self, keys: Array) -> Array:
        """The queries (n, k, p) of whitened tokens: with a constant 1, or (z + ν) M."""
        if self.constant:
            return dense.with_constant(keys)
        return keys if self.offset is None else (keys + self.offset) @ self._evened()

    def _evened(self, power: float = -0.5) -> Array:
        """(I + ννᵀ)^power."""
        assert self.offset is not None
        nu, square = self.offset, backend.squared_norm(self.offset)
        one = backend.like(np.eye(self.dim), nu)
        return one + ((1 + square) ** power - 1) / (square or 1.0) * (nu[:, None] * nu[None, :])

    def layer(self, theta: Array, weights: Array) -> AttentionLayer:
        """The layer of least norm that does on the span what these heads and weights do."""
        attention, key_bias, projection, output_bias = self.matrices(theta, weights)
        constant = backend.to_numpy(self.output_mean)
        if self.bias:
            return AttentionLayer(attention, projection, key_bias, output_bias + constant)
        if self.constant:
            # n x = 1 for all tokens x: n cᵀ in Θ is a key bias, and n bᵀ in W an output bias.
            normal = self.span.outside / (self.span.outside @ self.span.outside)
            shared = (output_bias + constant) / attention.shape[0]
            attention = attention + normal[None, :, None] * key_bias[:, None, :]
            projection = projection + normal[None, :, None] * shared[None, None, :]
        return AttentionLayer(attention, projection)

    def matrices(self, theta: Array, weights: Array) -> tuple[Any, Any, Any, Any]:
        """Θ (m, d, d), c (m, d), W (m, d, e) and b (e,) of heads and weights, or of their changes.

        All four are linear in both, and zero outside of the span. Without a constant c and b are
        zero. In numpy.
        """
        A, mean = backend.to_numpy(self.whitening), backend.to_numpy(self.origin)
        inside, bias = dense.unpack(backend.to_numpy(theta), self.dim)
        values = backend.to_numpy(weights) * self.output_scale
        columns = len(inside) * self.dim
        if self.offset is not None:
            inside = backend.to_numpy(self._evened()) @ inside
        attention = A @ inside @ A.T
        projection = A @ values[:columns, :].reshape(-1, self.dim, self.out_dim)
        if bias is None:
            return attention, np.zeros(attention.shape[:2]), projection, np.zeros(self.out_dim)
        key_bias = bias @ A.T - mean @ attention
        return attention, key_bias, projection, values[columns, :] - (mean @ projection).sum(axis=0)

    def in_whitened_coordinates(self, theta: Array, weights: Array) -> AttentionLayer:
        """Heads and weights as a layer of whitened tokens, as they are, biases left out."""
        attention, _ = dense.unpack(theta, self.dim)
        shape = (attention.shape[0], self.dim, self.out_dim)
        projection = weights[: attention.shape[0] * self.dim, :]
        return AttentionLayer(attention, backend.namespace(weights).reshape(projection, shape))

    def heads_of(self, layer: AttentionLayer) -> Array:
        """The parameters theta of the heads of a layer in whitened coordinates."""
        attention = backend.to_numpy(layer.attention)
        back = np.linalg.pinv(backend.to_numpy(self.whitening))
        inside = back @ attention @ back.T
        if self.offset is not None:
            inside = backend.to_numpy(self._evened(0.5)) @ inside
        bias = None
        if self.constant:
            bias = backend.to_numpy(self.origin) @ attention
            if layer.key_bias is not None:
                bias = bias + backend.to_numpy(layer.key_bias)
            bias = bias @ back.T
        return backend.like(dense.pack(inside, bias), self.whitening)

    def _bytes_per_example(self, heads: int) -> int:
        """Attention and features of one example."""
        return 8 * self.tokens * heads * (self.dim + self.tokens)

    def _held_per_example(self, heads: int) -> int:
        """The bytes that are held of one example between two passes, if there is room."""
        return 8 * self.tokens * numbers_per_row(heads, self.dim, self.tokens, self.out_dim)

    def _batches(
        self, spread: Chunks[Any], examples: int, equations: int, memory_budget: int
    ) -> Batches:
        shape = (self.tokens, self.dim, self.out_dim)
        return Batches(spread, examples, *shape, equations, self.constant, memory_budget)


@dataclass(frozen=True)
class WhitenedExamples(Whitening):
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

    def take(self, index: Positions) -> WhitenedExamples:
        """The problem on some of the examples."""
        X, Y = backend.rows(self.X, index), backend.rows(self.Y, index)
        mask = None if self.mask is None else backend.rows(self.mask, index)
        return replace(self, X=X, Y=Y, mask=mask)

    def sample(self, count: int) -> WhitenedExamples:
        """The problem on so many examples, drawn at random."""
        return self.take(np.arange(count))

    def batches(self, heads: int) -> Batches:
        """The examples in blocks, all in one chunk if what is computed from them can be held."""
        parts = self.blocks(heads)
        size = self.examples * self._held_per_example(heads)
        budget = chunks.memory_budget(self.X)
        spread = InMemory((parts,)) if size <= budget else recompute(groups(parts, size))
        return self._batches(spread, self.examples, self.equations, budget)

    def blocks(self, heads: int) -> tuple[Block, ...]:
        """The examples in blocks; a single one, empty, where there are no examples."""
        # Sums over blocks are as large as the square of their features: with smaller blocks most of
        # the time would go by with adding them up.
        size = max(blocks.block_bytes(self.X), 4 * (heads * self.dim) ** 2)
        parts = list(blocks.slices(self.examples, self._bytes_per_example(heads), size))
        return tuple(self._block(part) for part in parts or [slice(0, 0)])

    def _block(self, part: slice) -> Block:
        xp = backend.namespace(self.X)
        keys = self.X[part, ...]
        outputs = xp.reshape(self.Y[part, ...], (-1, self.out_dim))
        queries = self.queries(keys)
        if self.mask is None:
            allowed = allowed_pairs(None, self.causal, keys)
            return Block(queries, keys, outputs, allowed, None, self.offset)
        mask = self.mask[part, ...]
        allowed = allowed_pairs(mask, self.causal, keys) & mask[:, :, None]
        counted = xp.astype(xp.reshape(mask, (-1, 1)), keys.dtype)
        return Block(queries, keys, outputs * counted, allowed, counted, self.offset)


@dataclass(frozen=True, eq=False)
class StreamedExamples(Whitening):
    """Examples that stay where they live; some of them, held out, are not among its own."""

    source: Source
    device: str | None
    held_out: Positions  # ascending
    order: Positions  # its own examples in random order, or as many of them as are ever sampled
    equations: int

    @property
    def examples(self) -> int:
        return len(self.source) - len(self.held_out)

    def at(self, positions: Positions) -> WhitenedExamples:
        """The examples at some positions, in their order, brought here."""
        ascending = np.sort(positions)
        X, Y, mask = (place_or_none(one, self.device) for one in self.source.rows(ascending))
        return self.whitened(X, Y, mask).take(np.searchsorted(ascending, positions))

    def sample(self, count: int) -> WhitenedExamples:
        """The problem on so many examples, drawn at random, in memory."""
        return self.at(self.order[:count])

    def split(self, count: int) -> tuple[StreamedExamples, WhitenedExamples]:
        """All but `count` random examples, and these, in memory."""
        out = self.sample(count)
        rest = replace(
            self,
            held_out=np.union1d(self.held_out, self.order[:count]),
            order=self.order[count:],
            equations=self.equations - out.equations,
        )
        return rest, out

    def batches(self, heads: int) -> Batches:
        """The examples in blocks, chunk by chunk, held where they are if there is room."""
        shared = (self.transform, self.held_out, self.device, heads)
        spread = self.source.chunks.map(_cut_chunk, *shared)
        budget = chunks.memory_budget(self.whitening)
        batches = self._batches(spread, self.examples, self.equations, budget)
        numbers = self.query_dim + self.dim + self.out_dim + self.tokens
        held = batches.persist(spread, numbers)
        if held.in_memory and self.examples * self._held_per_example(heads) > budget:
            held = recompute(held.collect())  # what is computed from them takes more than they do
        return replace(batches, chunks=held)


AnyExamples: TypeAlias = WhitenedExamples | StreamedExamples


def _cut_chunk(
    chunk: Chunk, transform: Whitening, held_out: Positions, device: str | None, heads: int
) -> tuple[Block, ...]:
    X, Y, mask = (place_or_none(one, device) for one in without(chunk, held_out))
    return transform.whitened(X, Y, mask).blocks(heads)


def without(chunk: Chunk, held_out: Positions) -> tuple[Array | None, ...]:
    """The arrays of a chunk without the examples at some ascending positions."""
    first, last = np.searchsorted(held_out, [chunk.start, chunk.start + len(chunk)])
    if first == last:
        return chunk.arrays
    kept = np.setdiff1d(np.arange(len(chunk)), held_out[first:last] - chunk.start)
    return tuple(None if one is None else backend.rows(one, kept) for one in chunk.arrays)


def place_or_none(array: Array | None, device: str | None) -> Array | None:
    """The array on a device; None stays None."""
    return None if array is None else backend.place(array, device)


def without_padding(X: Array, Y: Array, mask: Array | None) -> tuple[Array, Array]:
    """Whatever is in the padding, zeros can do no harm."""
    if mask is None:
        return X, Y
    xp = backend.namespace(X)
    there = mask[:, :, None]
    return xp.where(there, X, xp.zeros_like(X)), xp.where(there, Y, xp.zeros_like(Y))


def counted(X: Array, mask: Array | None) -> int:
    """Rows that are no padding."""
    if mask is None:
        return int(X.shape[0] * X.shape[1])
    xp = backend.namespace(mask)
    return int(xp.sum(xp.astype(mask, xp.int64)))


def unknowns(dim: int, out_dim: int, heads: int, rank: int | None, bias: bool) -> int:
    """The number of free numbers in a layer, heads being determined up to their order."""
    free = dim * dim if rank is None or rank > dim else rank * (2 * dim - rank)
    return heads * (free + dim * out_dim + dim * int(bias)) + out_dim * int(bias)


# Finding the transform


@dataclass(frozen=True)
class Moments:
    """Sums over examples: moments of tokens, and of outputs column by column (scatter (e,))."""

    tokens: span.Moments
    outputs: span.Moments

    def __add__(self, other: Moments) -> Moments:
        return Moments(self.tokens + other.tokens, self.outputs + other.outputs)


def moments(X: Array, Y: Array, mask: Array | None, scales: tuple[float, float]) -> Moments:
    """Those of some examples whose tokens and outputs are divided by these scales."""
    X, Y = without_padding(backend.double(X), backend.double(Y), mask)
    outputs = span.moments(Y / scales[1], mask, by_column=True)
    return Moments(span.moments(X / scales[0], mask), outputs)


def framed(
    found: Moments,
    scales: tuple[float, float],
    samples: tuple[Array, Array],
    causal: bool,
    bias: bool,
    linear: bool = False,
) -> Whitening:
    """The transform of examples of which these are the moments, and these some of them.

    A `linear` one has no constant and subtracts nothing: queries, keys and values are the same.
    """
    (_, tokens, _), out_dim = samples[0].shape, samples[1].shape[2]
    inputs = span.span(found.tokens, samples[0], scales[0])
    constant = not linear and (bias or bool(inputs.outside.any()))
    origin, whitening = _whitening(inputs, constant, linear)
    offset = None if constant or not origin.any() else origin @ whitening
    rows = max(found.outputs.rows, 1)
    mean, squares = found.outputs.mean, backend.to_numpy(found.outputs.scatter) / rows
    if not constant:
        squares = squares + backend.to_numpy(mean) ** 2
        mean = backend.zeros(mean.shape, mean)
    device = found.tokens.mean
    return Whitening(
        tokens,
        int(whitening.shape[1]),
        out_dim,
        causal,
        bias,
        inputs,
        constant,
        backend.like(origin, device),
        backend.like(whitening, device),
        None if offset is None else backend.like(offset, device),
        mean * scales[1],
        (float(squares.mean()) ** 0.5 or 1.0) * scales[1],
    )


def _whitening(inputs: Span, constant: bool, linear: bool) -> tuple[span.Matrix, span.Matrix]:
    """What is subtracted from tokens, and the matrix A (d, r) that they are multiplied by then."""
    A = inputs.whitening
    if not inputs.rank:  # nothing varies: one direction is kept, for there is no attention of none
        A = np.eye(inputs.mean.size, 1)
    mean = inputs.mean @ A
    if not linear and (constant or np.linalg.norm(mean) > _LARGE_MEAN):
        return inputs.mean, A
    if inputs.outside.any():
        return np.zeros_like(inputs.mean), _second_moments_root(inputs)
    # With all directions there, and columns of like size, coordinates stay close to those given.
    if inputs.rank == inputs.mean.size and inputs.deviations[-1] > _ALIKE * inputs.deviations[0]:
        return np.zeros_like(inputs.mean), _second_moments_root(inputs)
    square = float(mean @ mean)
    factor = ((1 + square) ** -0.5 - 1) / (square or 1.0)
    return np.zeros_like(inputs.mean), A + factor * np.outer(A @ mean, mean)


def _second_moments_root(inputs: Span) -> span.Matrix:
    """(E xᵀx)^(-1/2), symmetric if tokens have all directions, else (d, r)."""
    basis, deviations = inputs.basis, inputs.deviations
    if inputs.outside.any():
        basis = np.column_stack([basis, inputs.outside / np.linalg.norm(inputs.outside)])
        deviations = np.append(deviations, 0.0)
    mean = basis.T @ inputs.mean
    values, vectors = np.linalg.eigh(np.diag(deviations**2) + np.outer(mean, mean))
    vectors = basis @ vectors
    A = vectors / np.sqrt(values)
    return np.asarray(A @ vectors.T if A.shape[0] == A.shape[1] else A)


def scales_of(largest: tuple[float, float]) -> tuple[float, float]:
    """Largest entries are brought to 1 first, so that squares neither overflow nor vanish."""
    return largest[0] or 1.0, largest[1] or 1.0


def whiten(X: Array, Y: Array, mask: Array | None, causal: bool, bias: bool) -> WhitenedExamples:
    """The recovery problem of checked arrays X and Y, in float64 and whitened coordinates."""
    X, Y = without_padding(X, Y, mask)
    scales = scales_of((backend.largest(X), backend.largest(Y)))
    transform = framed(moments(X, Y, mask, scales), scales, (X, Y), causal, bias)
    return transform.whitened(X, Y, mask)


def whiten_streamed(
    source: Source,
    scales: tuple[float, float],
    held_out: Positions,
    order: Positions,
    causal: bool = False,
    bias: bool = False,
    linear: bool = False,
    device: str | None = None,
    told: Progress = no_progress,
) -> StreamedExamples:
    """The problem of examples that stay where they live, from one pass over them.

    `scales` are the largest entries, `held_out` the ascending positions of examples that are none
    of its own, and `order` those of its own in random order.
    """
    shared = (scales, held_out, device)
    found = passes.merged_over(source.chunks, _chunk_moments, operator.add, told, *shared)
    X, Y, mask = source.first(min(_ROUNDED, len(source)))
    X, Y = without_padding(X, Y, mask)
    transform = framed(found, scales, (X, Y), causal, bias, linear)
    return StreamedExamples(
        **vars(transform),
        source=source,
        device=device,
        held_out=held_out,
        order=order,
        equations=found.outputs.rows * transform.out_dim,
    )


def _chunk_moments(
    chunk: Chunk,
    scales: tuple[float, float],
    held_out: Positions,
    device: str | None,
    told: Progress = no_progress,
) -> Moments:
    X, Y, _ = chunk.arrays
    size = blocks.block_bytes(backend.place(X[:1, ...], device))

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
