"""Whitened examples, wherever they live, and their blocks for Gauss-Newton steps.

Examples in memory are whitened once. Others stay where they are and are whitened whenever they are
read; a random sample of them can be brought to memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.array.moments import Moments, moments
from onelayer.data import chunks, sources
from onelayer.data.chunks import CHUNK_BYTES, Chunk, InMemory
from onelayer.data.progress import Progress, no_progress
from onelayer.data.sources import Source
from onelayer.data.storage import Positions
from onelayer.heads.softmax import allowed_pairs
from onelayer.recovery import roles, whitening
from onelayer.recovery.gauss_newton.batches import Batches, Block, numbers_per_row
from onelayer.recovery.validation import ValidatedExamples, counted, without_padding
from onelayer.recovery.whitening import Whitening
from onelayer.span import span

_ROUNDED = 100  # examples by which it is decided how tokens were rounded
_NONE = np.arange(0)

Arrays: TypeAlias = tuple[Array, Array, Array | None]  # X, Y and the roles of tokens
Scales: TypeAlias = tuple[float, float]  # of X and Y
Both: TypeAlias = tuple[Moments, Moments]


@dataclass(frozen=True)
class Reader:
    """Reads chunks in whitened coordinates, without the examples that are held out."""

    transform: Whitening
    held_out: Positions
    device: str | None
    whitened: bool  # whether the chunks are in whitened coordinates already

    def __call__(self, chunk: Chunk) -> Arrays:
        X, Y, mask = chunk.without(self.held_out)
        return (X, Y, mask) if self.whitened else self.transform.apply(X, Y, mask, self.device)


@dataclass(frozen=True, eq=False)
class WhitenedExamples(Whitening):
    """Examples in whitened coordinates."""

    source: Source  # the examples: whitened if they are in memory, as given if not
    equations: int  # the number of observed numbers
    order: Positions  # in random order; of all examples, or of as many as are ever sampled
    held_out: Positions  # of examples of the source that do not belong to these, ascending
    device: str | None  # where examples are moved to when they are read
    progress: Progress = no_progress  # called with the share of a pass that is done

    @property
    def in_memory(self) -> bool:
        return self.source.chunks.in_memory

    @property
    def examples(self) -> int:
        return len(self.source) - len(self.held_out)

    @property
    def reader(self) -> Reader:
        return Reader(self.transform, self.held_out, self.device, self.in_memory)

    @property
    def arrays(self) -> Arrays:
        """X (n, k, d), Y (n, k, e) and the roles (n, k) of whitened examples in memory."""
        (chunk,) = self.source.chunks.collect()
        X, Y, mask = chunk.arrays
        return X, Y, mask

    @property
    def X(self) -> Array:
        return self.arrays[0]

    @property
    def Y(self) -> Array:
        return self.arrays[1]

    @property
    def mask(self) -> Array | None:
        return self.arrays[2]

    def take(self, positions: Positions) -> WhitenedExamples:
        """The examples at some positions of the source, in their order, in memory."""
        X, Y, mask = self.source.rows(positions)
        if not self.in_memory:
            X, Y, mask = self.apply(X, Y, mask, self.device)
        return hold(self, X, Y, mask)

    def sample(self, count: int) -> WhitenedExamples:
        """Random examples, in memory."""
        return self.take(self.order[:count])

    def split(self, count: int) -> tuple[WhitenedExamples, WhitenedExamples]:
        """All but `count` random examples, and these, in memory."""
        out = self.sample(count)
        rest = replace(
            self,
            equations=self.equations - out.equations,
            order=self.order[count:],
            held_out=np.union1d(self.held_out, self.order[:count]),
        )
        return rest, out

    def blocks(self, heads: int) -> tuple[Block, ...]:
        """Examples in memory in blocks; a single empty block if there are no examples."""
        return _blocks(self, self.arrays, heads)

    def parts(self, rows: int) -> list[Block]:
        """Examples in memory in blocks of about so many rows, or many more on a GPU."""
        X, Y, mask = self.arrays
        size = max(1, blocks.block_rows(rows, X) // self.tokens)
        return [
            block(self, X[part, ...], Y[part, ...], None if mask is None else mask[part, ...])
            for part in blocks.slices(X.shape[0], 1, size)
        ]

    def batches(self, heads: int) -> Batches:
        """The examples in blocks, chunk by chunk, held where they are if memory allows."""
        budget = chunks.memory_budget(self.whitening)
        shape = (self.examples, self.tokens, self.dim, self.out_dim, self.equations)
        found = self.source.chunks.map(_blocks_of_chunk, self.reader, heads)
        batches = Batches(found, *shape, self.constant, budget)
        held = batches.persist(found, self.query_dim + self.dim + self.out_dim + self.tokens)
        numbers = numbers_per_row(heads, self.dim, self.tokens, self.out_dim)
        size = 8 * self.examples * self.tokens * numbers
        if held.in_memory and size > budget:  # what is computed from the blocks is not held
            if self.in_memory:
                (parts,) = held.collect()
                step = max(1, len(parts) * CHUNK_BYTES // size)  # a chunk of what is computed
                starts = range(0, len(parts), step)
                held = InMemory(tuple(parts[start : start + step] for start in starts))
            held = held.recompute()
        return replace(batches, chunks=held)


def hold(transform: Whitening, X: Array, Y: Array, mask: Array | None) -> WhitenedExamples:
    """Whitened arrays as examples in memory."""
    return WhitenedExamples(
        **vars(transform.transform),
        source=sources.in_memory(X, Y, mask),
        equations=counted(X, mask) * transform.out_dim,
        order=np.arange(X.shape[0]),
        held_out=_NONE,
        device=None,
    )


def _blocks_of_chunk(chunk: Chunk, reader: Reader, heads: int) -> tuple[Block, ...]:
    return _blocks(reader.transform, reader(chunk), heads)


def _blocks(transform: Whitening, arrays: Arrays, heads: int) -> tuple[Block, ...]:
    X, Y, mask = arrays
    # Sums over blocks have the square of the number of features: with smaller blocks, adding them
    # would take most of the time.
    size = max(blocks.block_bytes(X), 4 * (heads * transform.dim) ** 2)
    per_example = 8 * transform.tokens * heads * (transform.dim + transform.tokens)
    parts = list(blocks.slices(X.shape[0], per_example, size)) or [slice(0, 0)]
    return tuple(
        block(transform, X[part, ...], Y[part, ...], None if mask is None else mask[part, ...])
        for part in parts
    )


def block(transform: Whitening, keys: Array, Y: Array, mask: Array | None) -> Block:
    """Whitened examples as one block."""
    xp, queries = backend.namespace(keys), transform.queries(keys)
    outputs = xp.reshape(Y, (-1, transform.out_dim))
    allowed = allowed_pairs(roles.there(mask), transform.causal, keys)
    observed = roles.observed(mask)
    if observed is None:
        return Block(queries, keys, outputs, allowed, None, transform.offset)
    counted = xp.astype(xp.reshape(observed, (-1, 1)), keys.dtype)
    allowed = allowed & observed[:, :, None]
    return Block(queries, keys, outputs * counted, allowed, counted, transform.offset)


def whiten(
    given: ValidatedExamples,
    causal: bool = False,
    bias: bool = False,
    *,
    linear: bool = False,
    hold_all: bool = False,
    order: Positions = _NONE,
    held_out: Positions = _NONE,
    device: str | None = None,
    progress: Progress = no_progress,
) -> WhitenedExamples:
    """Examples in whitened coordinates, which are found in one pass over them.

    They are whitened whenever they are read. With `hold_all` they must be in memory, are all
    whitened now, and held. A `linear` whitening subtracts nothing, so that queries, keys and values
    are the same. For the other arguments see `Whitening` and `WhitenedExamples`.
    """
    source, scales = given.source, (given.largest[0] or 1.0, given.largest[1] or 1.0)
    if hold_all:
        (chunk,) = source.chunks.collect()
        some = X, Y, mask = _on_device(chunk.arrays, device)
        inputs, outputs = _moments(some, scales)
    else:
        inputs, outputs = _moments_of(source, scales, held_out, device, progress)
        X, Y, mask = source.first(min(_ROUNDED, len(source)))
    tokens, _ = without_padding(X, Y, mask)
    found = span(inputs, tokens, scales[0])
    transform = whitening.fit(found, outputs, scales[1], X.shape[1], causal, bias, linear)
    if hold_all:
        return hold(transform, *transform.apply(X, Y, mask))
    return WhitenedExamples(
        **vars(transform),
        source=replace(source, chunks=source.chunks.recompute()),
        equations=outputs.rows * transform.out_dim,
        order=order,
        held_out=held_out,
        device=device,
        progress=progress,
    )


def _on_device(arrays: Sequence[Array | None], device: str | None) -> Arrays:
    X, Y, mask = (None if one is None else backend.place(one, device) for one in arrays)
    return X, Y, mask


def _moments_of(
    source: Source, scales: Scales, held_out: Positions, device: str | None, progress: Progress
) -> Both:
    """Moments of tokens and outputs, from a pass over all examples but those held out."""
    X, Y, _ = source.samples
    per_example = bytes_in_block(X.shape[1], X.shape[2], Y.shape[2])
    size = blocks.block_bytes(backend.place(X, device))

    def parts(chunk: Chunk) -> list[slice]:
        return list(blocks.slices(chunk.start + len(chunk), per_example, size, chunk.start))

    def work(chunk: Chunk, part: slice) -> Both:
        some = chunk.between(part.start, part.stop).without(held_out)
        return _moments(_on_device(some, device), scales)

    def merge(first: Both, second: Both) -> Both:
        return first[0] + second[0], first[1] + second[1]

    return source.chunks.fold(parts, work, merge, X, progress)


def _moments(arrays: Arrays, scales: Scales) -> Both:
    """Moments of tokens, and of outputs column by column, over their scales."""
    X, Y, mask = arrays
    X, Y = without_padding(backend.double(X), backend.double(Y), mask)
    inputs = moments(X / scales[0], roles.there(mask))
    return inputs, moments(Y / scales[1], roles.observed(mask), by_column=True)


def bytes_in_block(tokens: int, dim: int, out_dim: int) -> int:
    """Working memory of one example: tokens, outputs, what is computed from them, k x k scores."""
    return 8 * tokens * (2 * dim + 4 * out_dim + 6 * tokens)
