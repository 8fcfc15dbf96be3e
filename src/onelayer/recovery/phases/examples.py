"""The examples of the six phases: read block by block, wherever they are, never held at once.

Tokens are whitened and outputs divided by their root mean square. On Boolean and
Gaussian inputs that changes next to nothing; tokens on the unit sphere grow to length √d, so that
the phases meet all three kinds of input in the same units.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from onelayer.array import blocks
from onelayer.array.backend import Array
from onelayer.data.chunks import Progress, no_progress
from onelayer.data.sources import Chunk, Source
from onelayer.recovery.examples import Reader, WhitenedExamples, bytes_in_block, whiten
from onelayer.recovery.validation import ValidatedExamples

Result = TypeVar("Result")
Work = Callable[[Array, Array], Result]
Merge = Callable[[Result, Result], Result]


@dataclass(frozen=True, eq=False)
class Examples:
    """All examples but those that are held out, and how to read them."""

    spread: WhitenedExamples
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
        reading = _Reading(self.spread.reader, size, chosen)

        def on_block(chunk: Chunk, part: slice) -> Result:
            return work(*reading.whitened(chunk, part))

        return some.fold(reading.parts, on_block, merge, self.whitening, self.passing)

    def problem(self, positions: np.ndarray[Any, Any]) -> WhitenedExamples:
        """Some examples, by their ascending positions, held in memory for Gauss-Newton steps."""
        return self.spread.take(positions)

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

    read: Reader
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
        """The tokens and outputs of a block, without those held out."""
        X, Y, _ = self.read(chunk.between(part.start, part.stop))
        return X, Y


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
    given: ValidatedExamples,
    held_out: np.ndarray[Any, Any],
    device: str | None = None,
    passing: Progress = no_progress,
) -> Examples:
    """The examples with their whitening, from one pass over those that are not held out."""
    spread = whiten(given, linear=True, held_out=held_out, device=device, progress=passing)
    return Examples(spread, passing)
