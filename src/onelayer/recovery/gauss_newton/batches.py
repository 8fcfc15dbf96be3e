"""Examples in blocks that are ready for products, and what is held of what they give.

What is computed from examples that are held is held with them; where there is no room for it they
are gone through one chunk after the other, and anew in every pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data.chunks import CHUNK_BYTES, Chunks, Streamed


@dataclass(frozen=True)
class Block:
    """Some examples, ready for products: queries (n, k, p), keys (n, k, d), outputs (n·k, e).

    `allowed` (n or 1, k, k) says which keys a row may attend to, None for all. Rows of padding
    attend to nothing and have zero outputs, so they drop out of every sum; `counted` (n·k, 1) is 1
    for the other rows, None where all count. `offset` (d,) is added to the attended tokens, if any.
    """

    queries: Array
    keys: Array
    outputs: Array
    allowed: Array | None
    counted: Array | None
    offset: Array | None = None


@dataclass(frozen=True, eq=False)
class Batches:
    """The examples of a problem in blocks that suit the working arrays of so many heads."""

    chunks: Chunks[Any]  # of tuples of blocks
    examples: int
    tokens: int
    dim: int
    out_dim: int
    equations: int
    output_bias: bool
    memory_budget: int  # bytes that may be held between two passes

    @property
    def rows(self) -> int:
        return self.examples * self.tokens

    def persist(self, values: Any, numbers: int, itemsize: int = 8) -> Any:
        """Values of so many numbers a row, held for the next pass if there is room for them."""
        return values.persist(float(itemsize) * self.rows * numbers, self.memory_budget)

    def in_single(self, heads: int) -> Chunks[Any]:
        """The blocks in float32, for what is computed from them for so many heads.

        Held, what is computed from them would be held too: they are not if that has no room.
        """
        blocks = self.chunks.map(_in_single)
        held = self.persist(blocks, 2 * self.dim + 1 + self.out_dim, 4)
        if held.in_memory and not self.chunks.in_memory:
            size = 4 * self.rows * numbers_per_row(heads, self.dim, self.tokens, self.out_dim)
            return held if size <= self.memory_budget else recompute(held.values)
        spread: Chunks[Any] = held
        return spread


def numbers_per_row(heads: int, dim: int, tokens: int, out_dim: int) -> int:
    """What is computed of a row: attention, features, and tokens as all heads project them."""
    return heads * (dim + tokens + out_dim)


def _in_single(blocks: Sequence[Block]) -> tuple[Block, ...]:
    small = backend.single
    return tuple(
        Block(
            small(block.queries),
            small(block.keys),
            small(block.outputs),
            block.allowed,
            None if block.counted is None else small(block.counted),
            None if block.offset is None else small(block.offset),
        )
        for block in blocks
    )


def groups(parts: tuple[Block, ...], size: int) -> list[tuple[Block, ...]]:
    """Blocks in as many groups as it takes to compute `size` bytes from them chunk by chunk."""
    step = max(1, len(parts) * CHUNK_BYTES // size)
    return [parts[i : i + step] for i in range(0, len(parts), step)]


def recompute(groups: Sequence[tuple[Block, ...]]) -> Streamed[Any]:
    """Blocks in memory as chunks that are worked on one after the other, and anew in every pass."""

    def read(positions: Sequence[int]) -> Iterator[tuple[Block, ...]]:
        return (groups[i] for i in positions)

    return Streamed(read, tuple(range(len(groups))))
