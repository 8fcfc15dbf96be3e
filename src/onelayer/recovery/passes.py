"""A pass over the examples of a recovery, chunk by chunk and block by block, told how far it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from onelayer.array import blocks
from onelayer.array.backend import Array
from onelayer.data.chunks import Chunks, Progress

Result = TypeVar("Result")


def merged_over(
    spread: Chunks[Any],
    work: Callable[..., Result],
    merge: Callable[[Result, Result], Result],
    told: Progress,
    *shared: Any,
) -> Result:
    """`work(chunk, *shared)` of all chunks, merged; a single one in memory tells of its blocks."""
    told(0.0)
    if spread.in_memory:
        (chunk,) = spread.collect()
        return work(chunk, *shared, told=told)
    total: Result = spread.map(work, *shared).reduce(merge, told)
    return total


def fold_and_tell(
    parts: Sequence[slice],
    work: Callable[[slice], Result],
    merge: Callable[[Result, Result], Result],
    reference: Array,
    told: Progress,
) -> Result:
    """The results of the parts of a chunk merged in their order; `told` hears how far it is."""
    done = 1

    def merge_and_tell(total: Result, result: Result) -> Result:
        nonlocal done
        done += 1
        told(done / len(parts))
        return merge(total, result)

    return blocks.fold_over(parts, work, merge_and_tell, reference)
