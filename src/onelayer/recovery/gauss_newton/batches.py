"""Examples in blocks that are ready for products, and what is held in memory between passes.

What is computed from examples in memory is held with them, if it fits in the memory budget.
Otherwise the examples are read chunk by chunk, and it is computed again in every pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.array.blocks import sum_over
from onelayer.data.chunks import Chunks

T = TypeVar("T")
R = TypeVar("R")
PerBlock: TypeAlias = Chunks[tuple[T, ...]]  # a value for every block, chunk by chunk
Rows: TypeAlias = PerBlock[Array]  # arrays (n·k, e)


@dataclass(frozen=True)
class Block:
    """Some examples, ready for products: queries (n, k, p), keys (n, k, d), outputs (n·k, e).

    `allowed` (n or 1, k, k) says which keys a row may attend to, None for all. Rows of padding, and
    rows whose outputs are not observed, attend to nothing and have zero outputs, so they drop out
    of every sum; `counted` (n·k, 1) is 1 for the other rows, None where all count. `offset` (d,) is
    added to the attended tokens, if any.
    """

    queries: Array
    keys: Array
    outputs: Array
    allowed: Array | None
    counted: Array | None
    offset: Array | None = None


@dataclass(frozen=True, eq=False)
class Batches:
    """The examples of a problem in blocks whose size suits some number of heads."""

    chunks: PerBlock[Block]
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

    def persist(self, values: Chunks[T], numbers: int, itemsize: int = 8) -> Chunks[T]:
        """Values with this many numbers per row, held for the next pass if they fit."""
        return values.persist(float(itemsize) * self.rows * numbers, self.memory_budget)

    def in_single(self, heads: int) -> PerBlock[Block]:
        """The blocks in float32."""
        held = self.persist(map_blocks(in_single, self.chunks), 2 * self.dim + 1 + self.out_dim, 4)
        if held.in_memory and not self.chunks.in_memory:
            # What is computed from blocks in memory is held too, so they are streamed if that of
            # all heads would not fit.
            size = 4 * self.rows * numbers_per_row(heads, self.dim, self.tokens, self.out_dim)
            return held if size <= self.memory_budget else held.recompute()
        return held


def numbers_per_row(heads: int, dim: int, tokens: int, out_dim: int) -> int:
    """Numbers computed per row: attention, features, and tokens projected by all heads."""
    return heads * (dim + tokens + out_dim)


def in_single(block: Block) -> Block:
    given = {k: v for k, v in vars(block).items() if k != "allowed" and v is not None}
    return replace(block, **{k: backend.single(v) for k, v in given.items()})


def map_blocks(work: Callable[..., R], first: PerBlock[T], *others: PerBlock[Any]) -> PerBlock[R]:
    """`work(block, *values)` for every block and what belongs to it."""
    return first.map(_map_chunk, *others, work)


def sum_blocks(work: Callable[..., R], first: PerBlock[T], *others: PerBlock[Any]) -> R:
    """The sum of `work(block, *values)` over all blocks, in their order."""
    totals: Chunks[R] = first.map(_sum_chunk, *others, work)
    return totals.reduce(operator.add)


def _map_chunk(*arguments: Any) -> tuple[Any, ...]:
    *values, work = arguments
    return tuple(work(*place) for place in zip(*values, strict=True))


def _sum_chunk(*arguments: Any) -> Any:
    *values, work = arguments
    return sum_over(zip(*values, strict=True), lambda place: work(*place))
