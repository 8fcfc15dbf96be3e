"""The storage of examples is recognised here. Each kind implements `storage.Storage` in a file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data.chunks import Chunk, Chunks, InMemory
from onelayer.data.dask import DaskArrays
from onelayer.data.files import LargeFiles
from onelayer.data.functions import Functions
from onelayer.data.memory import Memory
from onelayer.data.storage import Positions, Storage, plain_array

# Kinds of storage that are read chunk by chunk. Of several kinds, the first reads all arrays.
STORAGES: tuple[type[Storage], ...] = (DaskArrays, Functions, LargeFiles)


@dataclass(frozen=True, eq=False)
class Source:
    """Examples in chunks."""

    chunks: Chunks[Chunk]
    starts: Positions  # of the chunks and, at the end, the number of examples
    samples: tuple[Array, ...]  # one example of every array, for shapes, dtypes and kinds

    def __len__(self) -> int:
        return int(self.starts[-1] - self.starts[0])

    @property
    def lengths(self) -> InMemory[int]:
        """The number of examples that each chunk has to have."""
        return InMemory(tuple(np.diff(self.starts).tolist()))

    def between(self, start: int, stop: int) -> Source:
        """The examples at positions of a range; they keep their positions."""
        if (start, stop) == (self.starts[0], self.starts[-1]):
            return self
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left")) if start < stop else first
        some = self.chunks.pick(range(first, last))
        starts = np.clip(self.starts[first : last + 1], start, stop)
        return Source(some.map(Chunk.between, start, stop), starts, self.samples)

    def rows(self, positions: Positions) -> tuple[Array | None, ...]:
        """The examples at some positions, in their order, brought to this process."""
        if len(positions) == 0:
            return tuple(None if one is None else one[:0, ...] for one in self.samples)
        if len(self.chunks) == 1:
            return self.chunks.map(Chunk.take, positions - self.starts[0]).collect()[0]
        ascending = np.sort(positions)
        inside = np.searchsorted(self.starts, ascending, side="right") - 1
        some = self.chunks.pick(sorted(set(inside.tolist())))
        parts = some.map(Chunk.rows, ascending).collect()
        found = Chunk(0, tuple(_joined(arrays) for arrays in zip(*parts, strict=True)))
        if np.array_equal(ascending, positions):
            return found.arrays
        return found.take(np.searchsorted(ascending, positions))

    def first(self, count: int) -> tuple[Array | None, ...]:
        """The first `count` examples, brought to this process."""
        return self.rows(np.arange(count))

    def in_pieces(self) -> Source:
        """The same examples, cut into pieces that are worked on one by one if in memory."""
        if not self.chunks.in_memory:
            return self
        (chunk,) = self.chunks.collect()
        named = {str(i): array for i, array in enumerate(chunk.arrays)}
        return _source(*_present(named, LargeFiles))


def _joined(parts: Sequence[Array | None]) -> Array | None:
    if parts[0] is None or len(parts) == 1:
        return parts[0]
    return backend.namespace(parts[0]).concat(list(parts), axis=0)


def is_streamed(value: object) -> bool:
    """Whether examples are read chunk by chunk: from a large file, a function, or Dask."""
    return any(storage.recognises(value) for storage in STORAGES)


def in_memory(*together: Array | None) -> Source:
    """Arrays in memory as one chunk, without a copy; None stays None."""
    samples = tuple(None if array is None else array[:1, ...] for array in together)
    chunk = Chunk(0, together)
    return Source(InMemory((chunk,)), np.array([0, len(chunk)]), samples)


def source(given: Mapping[str, Any]) -> Source:
    """Arrays by their names, wherever they live, cut into chunks alike; None stays None.

    >>> blocks = lambda: (np.full((2, 3), i) for i in range(4))
    >>> found = source({"X": blocks, "y": np.arange(8)})
    >>> len(found), found.rows(np.array([1, 6]))[1]
    (8, array([1, 6]))
    """
    return _source(*_opened(given))


def sample(given: Mapping[str, Any]) -> tuple[Array, ...]:
    """One example of every array. Of functions the first block is computed."""
    storage, places = _opened(given)
    return _with_gaps(Chunk(0, storage.samples()), places).arrays


def mapped(
    work: Callable[[Chunk], Array], given: Mapping[str, Any], row_shape: tuple[int, ...], dtype: Any
) -> Any:
    """`work(chunk)` of shape (len(chunk), *row_shape) for all chunks, in the storage of `given`.

    For Dask the result is a Dask array, for functions a function that returns an iterator over
    blocks, and for files a numpy array.

    >>> double = mapped(lambda chunk: 2 * chunk.arrays[0], {"X": lambda: [np.eye(2)]}, (2,), float)
    >>> next(double())
    array([[2., 0.],
           [0., 2.]])
    """
    storage, places = _opened(given)
    return storage.mapped(partial(_on_all, work, places), row_shape, dtype)


def refuse_generator(value: object, name: str) -> None:
    """Refuse an iterator, which is exhausted after one pass."""
    if isinstance(value, Iterator):
        raise TypeError(
            f"{name} is a {type(value).__name__}, which can be read only once, "
            "expected a function that returns a new one for every pass"
        )


_Places: TypeAlias = tuple[int | None, ...]  # of the given arrays among those that are not None


def _opened(given: Mapping[str, Any]) -> tuple[Storage, _Places]:
    there = dict(given)
    for name, value in given.items():
        refuse_generator(value, name)
        if value is not None and not is_streamed(value):
            there[name] = plain_array(value, name)
    kinds = (kind for kind in STORAGES if any(map(kind.recognises, there.values())))
    return _present(there, next(kinds, Memory))


def _present(given: Mapping[str, Any], kind: type[Storage]) -> tuple[Storage, _Places]:
    """A storage of the arrays that are not None, and their places among all."""
    there = {name: value for name, value in given.items() if value is not None}
    order = {name: i for i, name in enumerate(there)}
    return kind(there), tuple(order.get(name) for name in given)


def _source(storage: Storage, places: _Places) -> Source:
    samples = _with_gaps(Chunk(0, storage.samples()), places).arrays
    found, starts = storage.chunks()
    return Source(found.map(_with_gaps, places) if None in places else found, starts, samples)


def _with_gaps(chunk: Chunk, places: _Places) -> Chunk:
    return Chunk(chunk.start, tuple(None if i is None else chunk.arrays[i] for i in places))


def _on_all(work: Callable[[Chunk], Array], places: _Places, chunk: Chunk) -> Array:
    return work(_with_gaps(chunk, places))
