"""Chunks of examples, wherever they live: one interface for memory, files, functions and clusters.

Everything in this package is a sum over examples, so algorithms are written once over chunks:

    chunks.map(work, ..)     something computed from every chunk, where the chunk is
    chunks.reduce(merge)     all values merged into one, and brought to this process
    chunks.collect()         all values in a list, brought to this process
    chunks.fold(parts, ..)   the same for the parts of every chunk, with progress by parts
    chunks.persist(size)     values held where they are for the next pass, if memory allows

`InMemory` computes at once and holds what it has; examples in memory are the case of one chunk.
`Streamed` computes nothing before it is reduced, and never holds more than one chunk. `OnCluster`
(in `dask.py`) does the same on the workers of a Dask cluster.

Chunks are merged in their order, by a tree that depends only on their number, so results repeat
bit for bit. `work` must not change its arguments. A chunk is tens of megabytes, read at a time;
work on it is done in blocks that suit a processor's cache (`onelayer.array.blocks`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count
from operator import attrgetter
from typing import Any, ClassVar, Generic, TypeVar, cast

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.array.blocks import fold_over
from onelayer.data.progress import Progress, no_progress

CHUNK_BYTES = 64 * 2**20  # of a file, read at a time
KEPT_BYTES = 2 * 2**30  # held in memory between two passes

T = TypeVar("T")
R = TypeVar("R")
Part = TypeVar("Part")


@dataclass(frozen=True)
class Chunk:
    """Consecutive examples, the first of them at position `start`: arrays that belong together."""

    start: int
    arrays: tuple[Array, ...]  # None for an array that was not given

    def __len__(self) -> int:
        return next(int(array.shape[0]) for array in self.arrays if array is not None)

    def between(self, start: int, stop: int) -> Chunk:
        """The examples with positions in a range."""
        part = slice(max(0, start - self.start), max(0, stop - self.start))
        cut = (None if array is None else array[part, ...] for array in self.arrays)
        return Chunk(max(start, self.start), tuple(cut))

    def take(self, index: np.ndarray[Any, Any]) -> tuple[Array | None, ...]:
        """The examples at some indices, counted from the start of this chunk."""
        return tuple(None if one is None else backend.rows(one, index) for one in self.arrays)

    def rows(self, positions: np.ndarray[Any, Any]) -> tuple[Array | None, ...]:
        """The examples at those of the ascending positions that are in this chunk."""
        return self.take(self._among(positions))

    def without(self, positions: np.ndarray[Any, Any]) -> tuple[Array | None, ...]:
        """All examples but those at some ascending positions."""
        excluded = self._among(positions)
        if len(excluded) == 0:
            return self.arrays
        return self.take(np.setdiff1d(np.arange(len(self)), excluded))

    def _among(self, positions: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        first, last = np.searchsorted(positions, [self.start, self.start + len(self)])
        return positions[first:last] - self.start


class Chunks(ABC, Generic[T]):
    """One value for every chunk, computed or yet to be computed.

    Work on chunks of different kinds is done where the kind with the largest `_precedence` is.
    """

    _precedence: ClassVar[int]
    in_memory: ClassVar[bool] = False  # whether all values are held in this process
    recomputed: ClassVar[bool] = False  # whether values are computed again in every pass
    remote: ClassVar[bool] = False  # whether values are computed by other processes

    @abstractmethod
    def __len__(self) -> int:
        """The number of chunks."""

    def map(self, work: Callable[..., R], *others: object) -> Chunks[R]:
        """`work(value, *others)` for every chunk; of others that are chunks it sees one value each.

        The remaining arguments are the same for all; on a cluster they are sent once.

        >>> InMemory((1, 2)).map(lambda a, b, c: a * b + c, InMemory((3, 4)), 10).collect()
        [13, 18]
        """
        arguments = (self, *others)
        aligned = [one for one in arguments if isinstance(one, Chunks)]
        leading = max(aligned, key=lambda one: one._precedence)
        for one in aligned:
            if len(one) != len(leading):
                raise ValueError(
                    f"got {len(one)} and {len(leading)} chunks, expected equal numbers"
                )
            if not (one.in_memory or leading._same_pass(one)):
                raise ValueError("got chunks of two sources, expected them to be read in one pass")
        return leading._map(work, arguments)

    def reduce(self, merge: Callable[[T, T], T], progress: Progress = no_progress) -> T:
        """All values merged in the order of the chunks, brought to this process."""
        if len(self) == 0:
            raise ValueError("got no chunks to merge, expected at least one")
        return self._reduce(merge, progress)

    def fold(
        self,
        parts: Callable[[T], Sequence[Part]],
        work: Callable[[T, Part], R],
        merge: Callable[[R, R], R],
        reference: Array,
        progress: Progress = no_progress,
    ) -> R:
        """`work(value, part)` for the parts of every value, merged in their order.

        `reference` is an array of the kind that `work` uses. Progress is by parts in this process.

        >>> InMemory(("ab", "c")).fold(list, lambda _, one: one.upper(), str.__add__, np.ones(1))
        'ABC'
        """
        progress(0.0)
        started = count()

        def fold_value(value: T) -> R:
            before = next(started)

            def report(share: float) -> None:
                progress((before + share) / len(self))

            return fold_parts(value, parts, work, merge, reference, report)

        return self.map(fold_value).reduce(merge)

    @abstractmethod
    def collect(self, progress: Progress = no_progress) -> list[T]:
        """All values in the order of the chunks, brought to this process."""

    @abstractmethod
    def persist(self, size: float, limit: float = KEPT_BYTES) -> Chunks[T]:
        """The same values, held between passes if `size` bytes fit.

        `limit` is that of this process; a cluster has one of its own.
        """

    def recompute(self) -> Chunks[T]:
        """The same values; what is computed from them is computed again in every pass."""
        return self

    @abstractmethod
    def pick(self, positions: Sequence[int]) -> Chunks[T]:
        """The chunks at some positions, in ascending order."""

    @abstractmethod
    def _map(self, work: Callable[..., R], arguments: Sequence[object]) -> Chunks[R]: ...

    @abstractmethod
    def _reduce(self, merge: Callable[[T, T], T], progress: Progress) -> T: ...

    @abstractmethod
    def _same_pass(self, other: Chunks[Any]) -> bool:
        """Whether values of other chunks, not in memory, are available where these are computed."""

    @abstractmethod
    def _value_at(self, position: int, visit: Visit | None) -> object:
        """The value at a position, on the way of a streamed pass if there is one."""


@dataclass(frozen=True)
class InMemory(Chunks[T]):
    """Values of all chunks, held in this process."""

    values: tuple[T, ...]
    _precedence = 0
    in_memory = True

    def __len__(self) -> int:
        return len(self.values)

    def collect(self, progress: Progress = no_progress) -> list[T]:
        return list(self.values)

    def persist(self, size: float, limit: float = KEPT_BYTES) -> InMemory[T]:
        return self

    def pick(self, positions: Sequence[int]) -> InMemory[T]:
        return InMemory(tuple(self.values[i] for i in positions))

    def recompute(self) -> Streamed[T]:
        return Streamed(lambda positions: (self.values[i] for i in positions), (*range(len(self)),))

    def _map(self, work: Callable[..., R], arguments: Sequence[object]) -> InMemory[R]:
        seen = ([value_at(one, i) for one in arguments] for i in range(len(self)))
        return InMemory(tuple(work(*values) for values in seen))

    def _reduce(self, merge: Callable[[T, T], T], progress: Progress) -> T:
        return reduce(merge, self.values)

    def _same_pass(self, other: Chunks[Any]) -> bool:
        return other.in_memory

    def _value_at(self, position: int, visit: Visit | None) -> object:
        return self.values[position]


@dataclass(frozen=True)
class Visit:
    """A chunk on its way through a streamed pass, with what was computed from it so far."""

    position: int
    origin: Any
    known: dict[int, Any] = field(default_factory=dict)

    def value(self, of: Streamed[T]) -> T:
        """The value of some chunks for this chunk, computed once in a pass."""
        if id(of) not in self.known:
            self.known[id(of)] = of.compute(self)
        return cast(T, self.known[id(of)])


@dataclass(frozen=True, eq=False)
class Streamed(Chunks[T]):
    """Values that are computed again in every pass, one chunk after the other.

    `read` yields what was read of the chunks at some positions, and `compute` the value from that.
    Values that depend on one another share `read`; a pass computes each once for every chunk.
    """

    read: Callable[[Sequence[int]], Iterator[Any]]
    positions: tuple[int, ...]
    compute: Callable[[Visit], T] = attrgetter("origin")
    _precedence = 1
    recomputed = True

    def __len__(self) -> int:
        return len(self.positions)

    def collect(self, progress: Progress = no_progress) -> list[T]:
        return list(self._values(progress))

    def persist(self, size: float, limit: float = KEPT_BYTES) -> Chunks[T]:
        return InMemory(tuple(self.collect())) if size <= limit else self

    def pick(self, positions: Sequence[int]) -> Streamed[T]:
        return replace(self, positions=tuple(self.positions[i] for i in positions))

    def _map(self, work: Callable[..., R], arguments: Sequence[object]) -> Streamed[R]:
        # Values in memory stay whole if some of the result is picked: they keep their index.
        index = {position: i for i, position in enumerate(self.positions)}

        def compute(visit: Visit) -> R:
            return work(*(value_at(one, index[visit.position], visit) for one in arguments))

        return Streamed(self.read, self.positions, compute)

    def _reduce(self, merge: Callable[[T, T], T], progress: Progress) -> T:
        return reduce(merge, self._values(progress))

    def _values(self, progress: Progress) -> Iterator[T]:
        origins = self.read(self.positions)
        values = map(lambda *visited: Visit(*visited).value(self), self.positions, origins)
        for done in range(1, len(self) + 1):
            yield next(values)  # without a name here that would hold it during the next read
            progress(done / len(self))

    def _same_pass(self, other: Chunks[Any]) -> bool:
        same = self.read is getattr(other, "read", None)
        return same and self.positions == getattr(other, "positions", None)

    def _value_at(self, position: int, visit: Visit | None) -> object:
        assert visit is not None
        return visit.value(self)


def value_at(argument: object, position: int, visit: Visit | None = None) -> object:
    """What `work` sees of an argument: of chunks the value at a position, else all of it."""
    return argument._value_at(position, visit) if isinstance(argument, Chunks) else argument


def fold_parts(
    value: T,
    parts: Callable[[T], Sequence[Part]],
    work: Callable[[T, Part], R],
    merge: Callable[[R, R], R],
    reference: Array,
    progress: Progress = no_progress,
) -> R:
    """`work(value, part)` for the parts of one value, merged in their order."""
    some = parts(value)
    done = count(2)

    def merge_and_report(total: R, result: R) -> R:
        merged = merge(total, result)
        progress(next(done) / len(some))
        return merged

    total = fold_over(some, lambda part: work(value, part), merge_and_report, reference)
    if len(some) == 1:
        progress(1.0)
    return total


def memory_budget(reference: Array) -> int:
    """The bytes of arrays like this one that may be held in memory between two passes.

    On a GPU it is at most a quarter of what is free: a power of two, as for blocks.
    """
    free = backend.gpu_memory(reference)
    return KEPT_BYTES if free is None else 1 << max(1, free // 4).bit_length() - 1
