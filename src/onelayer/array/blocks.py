"""Sums over blocks of examples, the primitive that all algorithms are built on.

The working arrays of a block fit in a processor's cache, and the memory of a pass does not grow
with the number of examples. Terms are added in the order of the blocks, so that results repeat bit
for bit.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import reduce
from typing import TypeVar

from onelayer.array import backend, threads
from onelayer.array.backend import Array

Block = TypeVar("Block")
Result = TypeVar("Result")

# Timed on products of 16 to 64 dimensions: smaller blocks pay for calls, larger ones for memory.
BLOCK_BYTES = 4 * 2**20
_GPU_BLOCK_BYTES = 512 * 2**20  # a GPU has no cache to speak of, and a call costs it more
_GPU_ROWS = 2**15
_GPU_SHARE = 32  # one part in 32 of a GPU's free memory: work needs dozens of arrays


def block_bytes(reference: Array) -> int:
    """The size of blocks for work on arrays like this one: small on a CPU, large on a GPU.

    If little memory of a GPU is free it is a smaller power of two, so that blocks, and the order of
    sums, do not depend on the exact number of free bytes.
    """
    free = backend.gpu_memory(reference)
    if free is None:
        return BLOCK_BYTES
    return min(_GPU_BLOCK_BYTES, 1 << max(BLOCK_BYTES, free // _GPU_SHARE).bit_length() - 1)


def block_rows(rows: int, reference: Array) -> int:
    """The rows of a block that has this many on a CPU: more on a GPU, where calls cost more."""
    return rows if backend.gpu_memory(reference) is None else max(rows, _GPU_ROWS)


def slices(
    n: int, bytes_per_example: int, block_bytes: int = BLOCK_BYTES, start: int = 0
) -> Iterator[slice]:
    """Cut n examples, from `start` on, into blocks of about `block_bytes`, at least one each.

    >>> list(slices(5, bytes_per_example=100, block_bytes=200))
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, block_bytes // max(1, bytes_per_example))
    for first in range(start, n, size):
        yield slice(first, min(n, first + size))


def map_over(blocks: Iterable[Block], term: Callable[[Block], Result]) -> list[Result]:
    """`term(block)` for all blocks, in their order."""
    return list(map(term, blocks))


def sum_over(blocks: Iterable[Block], term: Callable[[Block], Array]) -> Array:
    """The sum of `term(block)` over the blocks, in their order."""
    return reduce(operator.add, map(term, blocks))


def run_over(blocks: Sequence[Block], work: Callable[[Block], None], reference: Array) -> None:
    """`work(block)` for all blocks: in threads and in any order for numpy, else one by one.

    `reference` is an array of the kind that is worked on. Each block has one thread, which is
    faster than BLAS threads for small products and passes over memory.
    """
    count = min(threads.blas_threads(reference), len(blocks))
    with threads.single_threaded_blas(0):
        if count <= 1:
            map_over(blocks, work)
        else:
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(work, blocks))


def fold_over(
    blocks: Iterable[Block],
    work: Callable[[Block], Result],
    merge: Callable[[Result, Result], Result],
    reference: Array,
) -> Result:
    """The results of `work(block)` merged in the order of the blocks, few of them held at a time.

    For numpy the work is done in threads, as in `run_over`.
    """
    count = threads.blas_threads(reference)
    with threads.single_threaded_blas(0):
        if count <= 1:
            return reduce(merge, map(work, blocks))
        with ThreadPoolExecutor(count) as pool:
            return reduce(merge, _in_order(pool, blocks, work, 2 * count))


def _in_order(
    pool: ThreadPoolExecutor, blocks: Iterable[Block], work: Callable[[Block], Result], most: int
) -> Iterator[Result]:
    """Results in the order of the blocks, at most `most` of them pending."""
    pending: deque[Future[Result]] = deque()
    for block in blocks:
        pending.append(pool.submit(work, block))
        if len(pending) >= most:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
