"""Where examples come from: arrays, large files, functions and Dask, cut into chunks alike.

The only file that knows where examples live; `chunks.py` has what is done with them.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelayer import arrays
from onelayer.arrays import Array
from onelayer.chunks import Chunks, OnCluster, OneByOne, each, gathered, pick

CHUNK_BYTES = 64 * 2**20  # of a file, read at a time


@dataclass(frozen=True)
class Chunk:
    """Consecutive examples, the first of them at position `start`: arrays that belong together."""

    start: int
    arrays: tuple[Array | None, ...]

    def __len__(self) -> int:
        return next(int(array.shape[0]) for array in self.arrays if array is not None)

    def between(self, start: int, stop: int) -> Chunk:
        """Those of the examples whose positions are in a range."""
        part = slice(max(0, start - self.start), max(0, stop - self.start))
        cut = (None if array is None else array[part, ...] for array in self.arrays)
        return Chunk(max(start, self.start), tuple(cut))

    def rows(self, positions: np.ndarray[Any, Any]) -> tuple[Array | None, ...]:
        """The examples at those of the ascending positions that are here."""
        first, last = np.searchsorted(positions, [self.start, self.start + len(self)])
        here = positions[first:last] - self.start
        return tuple(None if one is None else arrays.rows(one, here) for one in self.arrays)


@dataclass(frozen=True, eq=False)
class Source:
    """Examples in chunks: of one `Chunk` after the other, which begin at positions `starts`.

    `samples` has one example of every array, by which their shapes, dtypes and kinds are known.
    """

    chunks: Chunks
    starts: np.ndarray[Any, Any]  # and, at the end, the number of examples
    samples: tuple[Array | None, ...]

    def __len__(self) -> int:
        return int(self.starts[-1])

    def between(self, start: int, stop: int) -> Source:
        """The examples at positions of a range; they keep their positions."""
        if (start, stop) == (0, len(self)):
            return self
        first = int(np.searchsorted(self.starts, start, side="right")) - 1
        last = int(np.searchsorted(self.starts, stop, side="left"))
        some = pick(self.chunks, range(first, last))
        starts = np.clip(self.starts[first : last + 1], start, stop)
        return Source(each(Chunk.between, some, start, stop), starts, self.samples)

    def rows(self, positions: np.ndarray[Any, Any]) -> tuple[Array | None, ...]:
        """The examples at ascending positions, brought here."""
        inside = np.searchsorted(self.starts, positions, side="right") - 1
        some = pick(self.chunks, sorted(set(inside.tolist())))
        parts = gathered(each(Chunk.rows, some, positions))
        return tuple(None if one[0] is None else _joined(one) for one in zip(*parts, strict=True))

    def first(self, count: int) -> tuple[Array | None, ...]:
        """The first examples, brought here."""
        return self.rows(np.arange(count))


def _joined(parts: Sequence[Array]) -> Array:
    return parts[0] if len(parts) == 1 else arrays.namespace(parts[0]).concat(list(parts), axis=0)


def is_elsewhere(value: Any) -> bool:
    """Whether examples are to be read chunk by chunk: from a large file, a function, or Dask."""
    return _is_dask(value) or _is_function(value) or _is_large_file(value)


def source(given: Mapping[str, Any]) -> Source:
    """Arrays by their names, of which one at least is elsewhere, cut alike; None stays None.

    >>> blocks = lambda: (np.full((2, 3), i) for i in range(4))
    >>> found = source({"X": blocks, "y": np.arange(8)})
    >>> len(found), found.rows(np.array([1, 6]))[1]
    (8, array([1, 6]))
    """
    there = {name: value for name, value in given.items() if value is not None}
    for name, value in there.items():
        refuse_generator(value, name)
    reader: _Dask | _Functions | _Files
    if any(map(_is_dask, there.values())):
        reader = _Dask(there)
    elif any(map(_is_function, there.values())):
        reader = _Functions(there)
    else:
        reader = _Files(there)
    found = reader.source()
    order = {name: i for i, name in enumerate(there)}
    sample = tuple(found.samples[order[name]] if name in order else None for name in given)
    if len(there) == len(given):
        return found
    places = tuple(order.get(name) for name in given)
    return Source(each(_with_gaps, found.chunks, places), found.starts, sample)


def _with_gaps(chunk: Chunk, places: tuple[int | None, ...]) -> Chunk:
    return Chunk(chunk.start, tuple(None if i is None else chunk.arrays[i] for i in places))


def refuse_generator(value: Any, name: str) -> None:
    """A generator is read up after one pass."""
    if isinstance(value, Generator):
        raise TypeError(
            f"{name} is a generator, which can be read only once, "
            "expected a function that returns a new one for every pass"
        )


def _is_dask(value: Any) -> bool:
    array = sys.modules.get("dask.array")
    return array is not None and isinstance(value, array.Array)


def _is_function(value: Any) -> bool:
    """Whether blocks of examples are to be had by a call, or by going through the value anew."""
    if arrays.is_array(value) or isinstance(value, type | list | tuple | str | Iterator):
        return False
    if any(hasattr(value, name) for name in ("__len__", "__array__", "shape")):
        return False
    return callable(value) or isinstance(value, Iterable)


def _is_large_file(value: Any) -> bool:
    return isinstance(value, np.memmap) and value.ndim == 3 and value.nbytes > CHUNK_BYTES


def _check_rows(lengths: Mapping[str, int]) -> None:
    (first, expected), *others = lengths.items()
    for name, length in others:
        if length != expected:
            raise ValueError(
                f"{name} has {length} rows, expected {expected}: one for each example of {first}"
            )


@dataclass(frozen=True)
class _Files:
    """Arrays, of which at least one is a file mapped into memory, read a piece at a time."""

    given: Mapping[str, Any]

    def source(self) -> Source:
        together = list(self.given.values())
        _check_rows({name: len(array) for name, array in self.given.items()})
        n = len(together[0])
        per_example = max(1, sum(array[:1].nbytes for array in together))
        starts = np.append(np.arange(0, n, max(1, CHUNK_BYTES // per_example)), n)

        def read(positions: Sequence[int]) -> Iterator[Chunk]:
            for i in positions:
                part = slice(int(starts[i]), int(starts[i + 1]))
                yield Chunk(part.start, tuple(_read(array, part) for array in together))

        chunks = OneByOne(read, tuple(range(len(starts) - 1)))
        return Source(chunks, starts, tuple(array[:1] for array in together))


def _read(array: Array, part: slice) -> Array:
    """A part of an array; of a file a copy, and the pages it was read through are given back.

    They would count as memory of this process as long as nobody else wants it. Pages of a mapping
    that is private to the process ("c") hold what it has written, and stay.
    """
    if not isinstance(array, np.memmap):
        return array[part, ...]
    copy = np.array(array[part, ...])
    pages: Any = getattr(array, "_mmap", None)
    if array.mode in ("r", "r+") and hasattr(pages, "madvise"):
        pages.madvise(mmap.MADV_DONTNEED)
    return copy


@dataclass(frozen=True)
class _Functions:
    """Functions that give blocks of examples, anew for every pass; arrays are cut alike."""

    given: Mapping[str, Any]

    def source(self) -> Source:
        samples, lengths = None, []
        for blocks in self._blocks():
            samples = samples or tuple(block[:1, ...] for block in blocks)
            lengths.append(int(blocks[0].shape[0]))
        if samples is None:
            name = next(name for name, value in self.given.items() if _is_function(value))
            raise ValueError(f"{name} gives no examples, expected at least one")
        starts = np.append(0, np.cumsum(lengths))

        def read(positions: Sequence[int]) -> Iterator[Chunk]:
            wanted = iter(positions)
            next_one = next(wanted, None)
            for i, blocks in enumerate(self._blocks()):
                if i >= len(lengths) or int(blocks[0].shape[0]) != lengths[i]:
                    break
                if i == next_one:
                    yield Chunk(int(starts[i]), blocks)
                    next_one = next(wanted, None)
                    if next_one is None:
                        return
            raise ValueError(
                f"{', '.join(self._functions())} gave other blocks than in the first pass, "
                "expected the same in every pass"
            )

        return Source(OneByOne(read, tuple(range(len(lengths)))), starts, samples)

    def _functions(self) -> list[str]:
        return [name for name, value in self.given.items() if _is_function(value)]

    def _blocks(self) -> Iterator[tuple[Array, ...]]:
        """Blocks of all arrays side by side, empty ones passed over."""
        functions = {name: _asked(self.given[name], name) for name in self._functions()}
        start = 0
        while True:
            blocks = {name: next(blocks, None) for name, blocks in functions.items()}
            lengths = {name: 0 if one is None else len(one) for name, one in blocks.items()}
            _check_rows(lengths)
            length = next(iter(lengths.values()))
            if all(block is None for block in blocks.values()):
                break
            part = slice(start, start + length)
            start += length
            if length:
                yield tuple(
                    blocks[name] if name in blocks else _plain(self.given[name], name)[part, ...]
                    for name in self.given
                )
        whole = {name: len(value) for name, value in self.given.items() if name not in functions}
        _check_rows({next(iter(functions)): start} | whole)


def _asked(function: Any, name: str) -> Iterator[Array]:
    """The blocks of one pass, as arrays of one shape but for the first axis."""
    blocks = function() if callable(function) else iter(function)
    if not isinstance(blocks, Iterable):
        raise TypeError(
            f"{name} is a function that returns {type(blocks).__name__}, "
            "expected an iterator over blocks of examples"
        )
    shape: tuple[int, ...] | None = None
    for i, block in enumerate(blocks):
        array = _plain(block, f"block {i} of {name}")
        shape = tuple(array.shape[1:]) if shape is None else shape
        if tuple(array.shape[1:]) != shape:
            raise ValueError(
                f"block {i} of {name} has examples of shape {tuple(array.shape[1:])}, "
                f"expected {shape} as block 0 has"
            )
        yield array


def _plain(value: Any, name: str) -> Array:
    array = arrays.detached(arrays.as_array(value, name))
    if array.ndim == 0:
        raise ValueError(f"{name} is a number, expected an array of examples")
    return array


@dataclass(frozen=True)
class _Dask:
    """Dask arrays: on the cluster that is in use, or computed here chunk by chunk without one."""

    given: Mapping[str, Any]

    def source(self) -> Source:
        functions = [name for name, value in self.given.items() if _is_function(value)]
        if functions:
            raise TypeError(f"{functions[0]} is a function, expected a Dask array as others are")
        together = self._cut_alike()
        lengths = together[0].chunks[0]
        starts = np.append(0, np.cumsum(lengths))
        delayed = [array.to_delayed().ravel() for array in together]
        samples = tuple(np.empty((1, *one.shape[1:]), dtype=one.dtype) for one in together)
        client = _current_client()
        whole = tuple(i for i, length in enumerate(lengths) if length > 0)
        if client is not None:
            from dask import delayed as later

            make = later(_chunk, pure=False, traverse=False)
            values = [make(int(starts[i]), *(parts[i] for parts in delayed)) for i in whole]
            chunks: Chunks = OnCluster(tuple(values), client)
        else:
            chunks = OneByOne(_computed(delayed, starts), whole)
        return Source(chunks, np.append(starts[list(whole)], starts[-1]), samples)

    def _cut_alike(self) -> list[Any]:
        """All as Dask arrays, with the chunks of the first one that is."""
        import dask.array as da

        name, leading = next((n, value) for n, value in self.given.items() if _is_dask(value))
        if leading.ndim == 0 or np.isnan(leading.shape[0]):
            raise ValueError(
                f"{name} has chunks of unknown size, expected known ones: "
                f"{name}.compute_chunk_sizes() finds them"
            )
        cuts = leading.chunks[0]
        together = {
            name: value if _is_dask(value) else da.from_array(arrays.to_numpy(value), name=False)
            for name, value in self.given.items()
        }
        _check_rows({name: array.shape[0] for name, array in together.items()})
        return [array.rechunk((cuts, *array.shape[1:])) for array in together.values()]


def _chunk(start: int, *parts: Any) -> Chunk:
    return Chunk(start, parts)


def _computed(
    delayed: Sequence[Sequence[Any]], starts: np.ndarray[Any, Any]
) -> Callable[[Sequence[int]], Iterator[Chunk]]:
    def read(positions: Sequence[int]) -> Iterator[Chunk]:
        import dask

        for i in positions:
            yield Chunk(int(starts[i]), dask.compute(*(parts[i] for parts in delayed)))

    return read


def _current_client() -> Any:
    """The client of the cluster that is in use, None without one."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return None
    try:
        return distributed.default_client()
    except ValueError:
        return None
