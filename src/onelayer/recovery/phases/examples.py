"""The examples of the six phases: read block by block, wherever they are, never held at once.

As in `problem`, tokens are whitened and outputs divided by their root mean square. On Boolean and
Gaussian inputs that changes next to nothing; tokens on the unit sphere grow to length √d, so that
the phases meet all three kinds of input in the same units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.data.chunks import Progress, no_progress
from onelayer.data.sources import Chunk, Source
from onelayer.recovery import passes
from onelayer.recovery.whitening import (
    StreamedExamples,
    WhitenedExamples,
    Whitening,
    bytes_in_block,
    whiten_streamed,
    without,
)

Result = TypeVar("Result")
Work = Callable[[Array, Array], Result]
Merge = Callable[[Result, Result], Result]


@dataclass(frozen=True, eq=False)
class Examples:
    """All examples but those that are held out, and how to read them."""

    spread: StreamedExamples
    passing: Progress = no_progress  # told how far a pass is

    @property
    def whitening(self) -> Array:
        return self.spread.whitening

    @property
    def count(self) -> int:
        return self.spread.examples

    @property
    def tokens(self) -> int:
        return self.spread.tokens

    @property
    def rows(self) -> int:
        return self.count * self.tokens

    @property
    def dim(self) -> int:
        return self.spread.dim

    @property
    def out_dim(self) -> int:
        return self.spread.out_dim

    def fold(self, work: Work[Result], merge: Merge[Result], most: int | None = None) -> Result:
        """`work(X, Y)` of every block, merged in their order; of about `most` examples if given."""
        source = self.spread.source
        size = self._block_size()
        chosen = None if most is None or most >= len(source) else _evenly(len(source), size, most)
        some = source.chunks.pick(_with_some(source, size, chosen))
        reading = _Reading(
            self.spread.transform, self.spread.held_out, self.spread.device, size, chosen
        )
        shared = (reading, work, merge)
        total: Result = passes.merged_over(some, _folded, merge, self.passing, *shared)
        return total

    def problem(self, positions: np.ndarray[Any, Any]) -> WhitenedExamples:
        """Some examples, by their ascending positions, held in memory for Gauss-Newton steps."""
        return self.spread.at(positions)

    def positions(self, most: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        """Random examples that are not held out, at most so many, ascending."""
        count, held_out = len(self.spread.source), self.spread.held_out
        positions = rng.choice(count, min(most + len(held_out), count), replace=False)
        return np.sort(positions[~np.isin(positions, held_out)][:most])

    def _block_size(self) -> int:
        """Examples in a block."""
        per_example = bytes_in_block(self.tokens, self.dim, self.out_dim)
        return max(1, blocks.block_bytes(self.whitening) // per_example)


@dataclass(frozen=True)
class _Reading:
    """How the blocks of a chunk are read; `chosen` are the numbers of the blocks, None for all.

    Blocks are counted over all examples, so that the chosen ones are the same wherever these live.
    """

    transform: Whitening
    held_out: np.ndarray[Any, Any]
    device: str | None
    size: int
    chosen: frozenset[int] | None

    def parts(self, chunk: Chunk) -> list[slice]:
        """The positions of the blocks in a chunk."""
        stop = chunk.start + len(chunk)
        numbers = range(chunk.start // self.size, -(-stop // self.size))
        return [
            slice(max(chunk.start, i * self.size), min(stop, (i + 1) * self.size))
            for i in numbers
            if self.chosen is None or i in self.chosen
        ]

    def whitened(self, chunk: Chunk, part: slice) -> tuple[Array, Array]:
        """The tokens and outputs of a block, those held out left out."""
        X, Y, _ = without(chunk.between(part.start, part.stop), self.held_out)
        X, Y = (backend.place(one, self.device) for one in (X, Y))
        found = self.transform.whitened(X, Y, None)
        return found.X, found.Y


def _folded(
    chunk: Chunk,
    reading: _Reading,
    work: Work[Result],
    merge: Merge[Result],
    told: Progress = no_progress,
) -> Result:
    """The results of a chunk's blocks merged in their order."""
    return passes.fold_and_tell(
        reading.parts(chunk),
        lambda part: work(*reading.whitened(chunk, part)),
        merge,
        reading.transform.whitening,
        told,
    )


def _evenly(count: int, size: int, most: int) -> frozenset[int]:
    """The numbers of so many blocks that they have about `most` examples, evenly spread."""
    total, wanted = -(-count // size), max(1, -(-most // size))
    return frozenset(i * total // wanted for i in range(min(wanted, total)))


def _with_some(source: Source, size: int, chosen: frozenset[int] | None) -> Sequence[int]:
    """The positions of the chunks that have some of the chosen blocks."""
    if chosen is None:
        return range(len(source.chunks))
    firsts = [i * size for i in chosen]
    lasts = [min(len(source), (i + 1) * size) - 1 for i in chosen]
    found = np.searchsorted(source.starts, [firsts, lasts], side="right") - 1
    return sorted({i for first, last in found.T for i in range(first, last + 1)})


def gather(
    source: Source,
    scales: tuple[float, float],
    held_out: np.ndarray[Any, Any],
    device: str | None = None,
    passing: Progress = no_progress,
) -> Examples:
    """The examples with their whitening, from one pass over those that are not held out."""
    nowhere = np.arange(0)
    spread = whiten_streamed(
        source, scales, held_out, order=nowhere, linear=True, device=device, told=passing
    )
    return Examples(spread, passing)
