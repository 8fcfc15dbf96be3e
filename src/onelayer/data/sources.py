"""Where examples come from: arrays, large files, functions and Dask, cut into chunks alike.

What is given is recognised here and nowhere else; `readers.py` reads it, and `chunks.py` has what
is done with chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data.chunks import Chunk as Chunk
from onelayer.data.chunks import Chunks, InMemory
from onelayer.data.readers import Dask, Files, Functions, is_dask, is_function, plain

CHUNK_BYTES = 64 * 2**20  # of a file, read at a time


@dataclass(frozen=True, eq=False)
class Source:
    """Examples in chunks: of one `Chunk` after the other, which begin at positions `starts`.

    `samples` has one example of every array, by which their shapes, dtypes and kinds are known.
    """

    chunks: Chunks[Chunk]
    starts: np.ndarray[Any, Any]  # and, at the end, the number of examples
    samples: tuple[Array, ...]

    def __len__(self) -> int:
        return int(self.starts[-1] - self.starts[0])

    @property
    def lengths(self) -> InMemory[int]:
        """How many examples each of the chunks is to have."""
        return InMemory(tuple(int(length) for length in np.diff(self.starts)))

    def between(self, start: int, stop: int) -> Source:
        """The examples at positions of a range; they keep their positions."""
        if (start, stop) == (self.starts[0], self.starts[-1]):
            return self
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left")) if start < stop else first
        some = self.chunks.pick(range(first, last))
        starts = np.clip(self.starts[first : last + 1], start, stop)
        return Source(some.map(Chunk.between, start, stop), starts, self.samples)

    def rows(self, positions: np.ndarray[Any, Any]) -> tuple[Array | None, ...]:
        """The examples at ascending positions, brought here."""
        if len(positions) == 0:
            return tuple(None if one is None else one[:0, ...] for one in self.samples)
        inside = np.searchsorted(self.starts, positions, side="right") - 1
        some = self.chunks.pick(sorted(set(inside.tolist())))
        parts = some.map(Chunk.rows, positions).collect()
        return tuple(None if one[0] is None else _joined(one) for one in zip(*parts, strict=True))

    def first(self, count: int) -> tuple[Array | None, ...]:
        """The first examples, brought here."""
        return self.rows(np.arange(count))


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else backend.namespace(parts[0]).concat(list(parts), axis=0)


def is_streamed(value: Any) -> bool:
    """Whether examples are to be read chunk by chunk: from a large file, a function, or Dask."""
    return is_dask(value) or is_function(value) or _is_large_file(value)


def here(*together: Array | None) -> Source:
    """Arrays in memory as one chunk; None stays None."""
    samples = tuple(None if array is None else array[:1, ...] for array in together)
    chunk = Chunk(0, together)
    return Source(InMemory((chunk,)), np.array([0, len(chunk)]), samples)


def in_pieces(*together: Array | None) -> Source:
    """Arrays in memory, or in files, in chunks that are worked on one by one; None stays None."""
    return source({str(i): array for i, array in enumerate(together)})


def source(given: Mapping[str, Any]) -> Source:
    """Arrays by their names, of which one at least is elsewhere, cut alike; None stays None.

    >>> blocks = lambda: (np.full((2, 3), i) for i in range(4))
    >>> found = source({"X": blocks, "y": np.arange(8)})
    >>> len(found), found.rows(np.array([1, 6]))[1]
    (8, array([1, 6]))
    """
    reader, places = _opened(given)
    samples = _with_gaps(Chunk(0, reader.samples()), places).arrays
    found, starts = reader.cut()
    return Source(found.map(_with_gaps, places) if None in places else found, starts, samples)


def sample(given: Mapping[str, Any]) -> tuple[Array, ...]:
    """One example of every array, of which only the shape, dtype and kind are to be read.

    Nothing is gone through for it, but for the first block of functions.
    """
    reader, places = _opened(given)
    return _with_gaps(Chunk(0, reader.samples()), places).arrays


def mapped(
    work: Callable[[Chunk], Array], given: Mapping[str, Any], row_shape: tuple[int, ...], dtype: Any
) -> Any:
    """`work(chunk)` of shape (len(chunk), *row_shape) for all chunks, in the kind that was given.

    For Dask it is a Dask array that is computed where the chunks are, when it is asked for; for
    functions a function that gives block by block; for files a numpy array.

    >>> double = mapped(lambda chunk: 2 * chunk.arrays[0], {"X": lambda: [np.eye(2)]}, (2,), float)
    >>> next(double())
    array([[2., 0.],
           [0., 2.]])
    """
    reader, places = _opened(given)
    return reader.mapped(partial(_on_all, work, places), row_shape, dtype)


_Places: TypeAlias = tuple[int | None, ...]  # of what was given, among what there is of it


def _opened(given: Mapping[str, Any]) -> tuple[Dask | Functions | Files, _Places]:
    """A reader of those that are not None, and where they are among all."""
    there = {n: _array_or_elsewhere(value, n) for n, value in given.items() if value is not None}
    order = {name: i for i, name in enumerate(there)}
    places = tuple(order.get(name) for name in given)
    if any(map(is_dask, there.values())):
        return Dask(there), places
    if any(map(is_function, there.values())):
        return Functions(there), places
    return Files(there, CHUNK_BYTES), places


def _array_or_elsewhere(value: Any, name: str) -> Any:
    refuse_generator(value, name)
    return value if is_dask(value) or is_function(value) else plain(value, name)


def _with_gaps(chunk: Chunk, places: _Places) -> Chunk:
    return Chunk(chunk.start, tuple(None if i is None else chunk.arrays[i] for i in places))


def _on_all(work: Callable[[Chunk], Array], places: _Places, chunk: Chunk) -> Array:
    return work(_with_gaps(chunk, places))


def refuse_generator(value: Any, name: str) -> None:
    """A generator, or any other iterator, is read up after one pass."""
    if isinstance(value, Iterator):
        raise TypeError(
            f"{name} is a {type(value).__name__}, which can be read only once, "
            "expected a function that returns a new one for every pass"
        )


def _is_large_file(value: Any) -> bool:
    return isinstance(value, np.memmap) and value.ndim == 3 and value.nbytes > CHUNK_BYTES
