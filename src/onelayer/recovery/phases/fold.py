"""Folds over the whitened examples of the six phases, block by block, wherever they live.

Whitening without a constant hardly changes Boolean and Gaussian inputs. Tokens on the unit sphere
grow to length √d, so that the phases see all three kinds of input in the same units.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import pairwise
from typing import TypeVar

from onelayer.array import blocks
from onelayer.array.backend import Array
from onelayer.data.chunks import Chunk
from onelayer.recovery.examples import WhitenedExamples, bytes_in_block

Result = TypeVar("Result")


def fold(
    examples: WhitenedExamples,
    work: Callable[[Array, Array], Result],
    merge: Callable[[Result, Result], Result],
    most: int | None = None,
) -> Result:
    """`work(X, Y)` of all blocks, merged in their order.

    With `most`, only of evenly spaced blocks that have about this many examples. Blocks are counted
    over all examples, so that the same ones are chosen wherever the examples live.
    """
    source, read, count = examples.source, examples.reader, len(examples.source)
    per_example = bytes_in_block(examples.tokens, examples.dim, examples.out_dim)
    size = max(1, blocks.block_bytes(examples.whitening) // per_example)
    total = -(-count // size)
    chosen: Collection[int] = range(total)
    if most is not None and most < count:
        wanted = max(1, -(-most // size))
        chosen = {i * total // wanted for i in range(min(wanted, total))}

    def blocks_between(start: int, stop: int) -> list[int]:
        return [i for i in range(start // size, -(-stop // size)) if i in chosen]

    def parts(chunk: Chunk) -> list[slice]:
        start, stop = chunk.start, chunk.start + len(chunk)
        numbers = blocks_between(start, stop)
        return [slice(max(start, i * size), min(stop, (i + 1) * size)) for i in numbers]

    def on_block(chunk: Chunk, part: slice) -> Result:
        return work(*read(chunk.between(part.start, part.stop))[:2])

    ends = enumerate(pairwise(source.starts.tolist()))
    some = source.chunks.pick([i for i, between in ends if blocks_between(*between)])
    return some.fold(parts, on_block, merge, examples.whitening, examples.progress)
