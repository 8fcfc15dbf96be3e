"""Sums over blocks of examples: the one primitive that everything else here is made of.

A block is small enough for its working arrays to stay in a processor's cache, and for the memory
of a pass to be bounded whatever the number of examples. The terms are added in the order of the
blocks, and the blocks do not depend on the machine, so that results repeat bit for bit.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from typing import TypeVar

from threadpoolctl import threadpool_limits

from onelayer.arrays import Array

Block = TypeVar("Block")
Result = TypeVar("Result")

# Timed on products of 16 to 64 dimensions: smaller blocks pay for calls, larger ones for memory.
BLOCK_BYTES = 2 * 2**20

_pool: ContextVar[ThreadPoolExecutor | None] = ContextVar("pool", default=None)


def slices(n: int, bytes_per_example: int, block_bytes: int = BLOCK_BYTES) -> Iterator[slice]:
    """Cut n examples into equal blocks of at most `block_bytes`, at least one example each.

    Their number is even unless it is one: most machines have an even number of cores.

    >>> list(slices(5, bytes_per_example=100, block_bytes=200))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    count = -(-n * bytes_per_example // block_bytes)
    if count > 1:
        count += count % 2
    size = -(-n // max(1, min(count, n)))
    for start in range(0, n, size):
        yield slice(start, min(n, start + size))


def map_over(blocks: Iterable[Block], term: Callable[[Block], Result]) -> list[Result]:
    """`term(block)` for all blocks, in their order."""
    blocks = list(blocks)
    pool = _pool.get() if len(blocks) > 1 else None
    return list(map(term, blocks) if pool is None else pool.map(term, blocks))


def sum_over(blocks: Iterable[Block], term: Callable[[Block], Array]) -> Array:
    """The sum of `term(block)` over the blocks, in their order.

    >>> sum_over([1, 2, 3], lambda block: block * block)
    14
    """
    return reduce(operator.add, map_over(blocks, term))


@contextmanager
def side_by_side() -> Iterator[None]:
    """Within this context blocks are worked on by all cores, one block a thread.

    BLAS gets one thread for each: its own threads gain nothing on products of this size, and wait
    for each other in a busy loop, which on a machine with other work made sums ten times slower.
    """
    with (
        threadpool_limits(limits=1, user_api="blas"),
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        token = _pool.set(pool)
        try:
            yield
        finally:
            _pool.reset(token)
