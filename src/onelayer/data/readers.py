"""Readers of examples in files, from functions and of Dask arrays, which cut them all alike.

Each of them has `samples()`, one example of every array by which its shape, dtype and kind are
known; `cut()`, the chunks and the positions at which they begin, with the number of examples at the
end; and `mapped(work, row_shape, dtype)`, the way back: something computed from every chunk, in the
kind that was given.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeAlias

import numpy as np

from onelayer.array import backend, threads
from onelayer.array.backend import Array
from onelayer.data.chunks import Chunk, Chunks, InMemory, Streamed
from onelayer.data.dask import OnCluster

Work: TypeAlias = Callable[[Chunk], Array]
Shape: TypeAlias = tuple[int, ...]
Positions: TypeAlias = np.ndarray[Any, Any]


def is_dask(value: Any) -> bool:
    """Whether it is a Dask array; nothing is imported to find out."""
    array = sys.modules.get("dask.array")
    return array is not None and isinstance(value, array.Array)


def is_function(value: Any) -> bool:
    """Whether blocks of examples are to be had by a call, or by going through the value anew."""
    if backend.is_array(value) or isinstance(value, type | list | tuple | str | Iterator):
        return False
    if any(hasattr(value, name) for name in ("__getitem__", "__array__", "shape")):
        return False
    return callable(value) or isinstance(value, Iterable)


def plain(value: Any, name: str) -> Array:
    """What is in memory, or in a file, as an array."""
    array = backend.detached(backend.as_array(value, name))
    if array.ndim == 0:
        raise ValueError(f"{name} is a single value, expected an array of examples")
    return array


def _check_rows(lengths: Mapping[str, int]) -> None:
    (first, expected), *others = lengths.items()
    for name, length in others:
        if length != expected:
            raise ValueError(
                f"{name} has {length} rows, expected {expected}: one for each example of {first}"
            )


@dataclass(frozen=True)
class Files:
    """Arrays, of which at least one is a file mapped into memory, read a piece at a time."""

    given: Mapping[str, Array]
    chunk_bytes: int

    def samples(self) -> tuple[Array, ...]:
        return tuple(array[:1, ...] for array in self.given.values())

    def cut(self) -> tuple[Chunks[Chunk], Positions]:
        starts = self._starts()
        return Streamed(partial(self._read, starts), tuple(range(len(starts) - 1))), starts

    def mapped(self, work: Work, row_shape: Shape, dtype: Any) -> np.ndarray[Any, Any]:
        starts = self._starts()
        outputs = np.empty((int(starts[-1]), *row_shape), dtype)
        for chunk in self._read(starts, range(len(starts) - 1)):
            outputs[chunk.start : chunk.start + len(chunk)] = backend.to_numpy(work(chunk))
        return outputs

    def _starts(self) -> Positions:
        lengths = {name: int(array.shape[0]) for name, array in self.given.items()}
        _check_rows(lengths)
        n = next(iter(lengths.values()))
        per_example = max(1, sum(backend.to_numpy(one).nbytes for one in self.samples()))
        return np.append(np.arange(0, n, max(1, self.chunk_bytes // per_example)), n)

    def _read(self, starts: Positions, positions: Sequence[int]) -> Iterator[Chunk]:
        for i in positions:
            part = slice(int(starts[i]), int(starts[i + 1]))
            yield Chunk(part.start, tuple(_read(array, part) for array in self.given.values()))


def _read(array: Array, part: slice) -> Array:
    """A part of an array; of a file a copy, and the pages it was read through are given back.

    They would count as memory of this process as long as nobody else wants it. Pages of a mapping
    that is private to the process ("c") hold what it has written, and stay.
    """
    if not isinstance(array, np.memmap):
        return array[part, ...]
    copy = np.array(array[part, ...])
    pages: Any = getattr(array, "_mmap", None)
    if array.mode != "c" and hasattr(pages, "madvise"):
        pages.madvise(mmap.MADV_DONTNEED)
    return copy


@dataclass(frozen=True)
class Functions:
    """Functions that give blocks of examples, anew for every pass; arrays are cut alike."""

    given: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        """Of the functions."""
        return [name for name, value in self.given.items() if is_function(value)]

    def samples(self) -> tuple[Array, ...]:
        for chunk in self._chunks():
            return _first_of(chunk)
        raise ValueError(f"{self.names[0]} gives no examples, expected at least one")

    def cut(self) -> tuple[Chunks[Chunk], Positions]:
        starts = [0, *(chunk.start + len(chunk) for chunk in self._chunks())]
        chunks: Streamed[Chunk] = Streamed(
            partial(self._read, starts), tuple(range(len(starts) - 1))
        )
        return chunks, np.array(starts)

    def mapped(self, work: Work, _row_shape: Shape, _dtype: Any) -> Callable[[], Iterator[Array]]:
        return lambda: map(work, self._chunks())

    def _read(self, starts: Sequence[int], positions: Sequence[int]) -> Iterator[Chunk]:
        wanted = iter(positions)
        next_one = next(wanted, None)
        for i, chunk in enumerate(self._chunks()):
            if [chunk.start + len(chunk)] != starts[i + 1 : i + 2]:
                break
            if i == next_one:
                yield chunk
                next_one = next(wanted, None)
                if next_one is None:
                    return
        raise ValueError(
            f"{', '.join(self.names)} gave other blocks than in the first pass, "
            "expected the same in every pass"
        )

    def _chunks(self) -> Iterator[Chunk]:
        """Blocks of all arrays side by side, empty ones passed over."""
        functions = {name: _asked(self.given[name], name) for name in self.names}
        start = 0
        for i in count():
            blocks = {name: next(blocks, None) for name, blocks in functions.items()}
            if all(block is None for block in blocks.values()):
                break
            lengths = {n: 0 if one is None else int(one.shape[0]) for n, one in blocks.items()}
            _check_rows({f"block {i} of {name}": length for name, length in lengths.items()})
            part = slice(start, start + next(iter(lengths.values())))
            if part.start < part.stop:
                yield Chunk(start, tuple(self._block(name, blocks, part) for name in self.given))
            start = part.stop
        whole = {n: int(array.shape[0]) for n, array in self.given.items() if n not in functions}
        _check_rows({self.names[0]: start} | whole)

    def _block(self, name: str, blocks: Mapping[str, Array], part: slice) -> Array:
        return blocks[name] if name in blocks else _read(self.given[name], part)


def _first_of(chunk: Chunk) -> tuple[Array, ...]:
    """Copies, lest they keep a whole block in memory."""
    return tuple(backend.rows(array, np.arange(1)) for array in chunk.arrays)


def _asked(function: Any, name: str) -> Iterator[Array]:
    """The blocks of one pass, as arrays of one shape but for the first axis.

    They are copied: whoever gives them may fill one buffer again and again.
    """
    blocks = function() if callable(function) else iter(function)
    if backend.is_array(blocks) or not isinstance(blocks, Iterable):
        raise TypeError(
            f"{name} is a function that returns {type(blocks).__name__}, "
            "expected an iterator over blocks of examples"
        )
    shape: tuple[int, ...] | None = None
    for i, block in enumerate(blocks):
        if is_dask(block):
            raise TypeError(f"block {i} of {name} is a Dask array, expected an array in memory")
        array = backend.copied(plain(block, f"block {i} of {name}"))
        shape = tuple(array.shape[1:]) if shape is None else shape
        if tuple(array.shape[1:]) != shape:
            raise ValueError(
                f"block {i} of {name} has examples of shape {tuple(array.shape[1:])}, "
                f"expected {shape} as block 0 has"
            )
        yield array


@dataclass(frozen=True)
class Dask:
    """Dask arrays: on the cluster that is in use, or computed here chunk by chunk without one."""

    given: Mapping[str, Any]

    def samples(self) -> tuple[Array, ...]:
        self._check()
        return tuple(
            np.zeros((1, *one.shape[1:]), one.dtype) if is_dask(one) else backend.to_numpy(one)[:1]
            for one in self.given.values()
        )

    def cut(self) -> tuple[Chunks[Chunk], Positions]:
        together = self._cut_alike()
        lengths = together[0].chunks[0]
        starts = np.append(0, np.cumsum(lengths, dtype=int))
        whole = [i for i, length in enumerate(lengths) if length > 0]
        begins = [int(starts[i]) for i in whole]
        # Optimised each by itself, an array from which another is computed would be read twice.
        delayed = [array.to_delayed(optimize_graph=False).ravel()[whole] for array in together]
        client = _current_client()
        if client is None:
            read = partial(_computed, begins, delayed)
            chunks: Chunks[Chunk] = Streamed(read, tuple(range(len(whole))))
        else:
            parts: list[OnCluster[Any]] = [OnCluster(tuple(values), client) for values in delayed]
            chunks = InMemory(tuple(begins)).map(_chunk, *parts)
        return chunks, np.array([*begins, starts[-1]])

    def mapped(self, work: Work, row_shape: Shape, dtype: Any) -> Any:
        """One task a chunk, to which `work` is sent once; what it holds may be large."""
        import dask.array as da
        from dask import delayed

        together = self._cut_alike()
        n, cuts = together[0].shape[0], together[0].chunks[0]
        axes = count(1)  # the first axis, 0, is the same for all, and others are not shared
        operands = [
            (array, (0, *(next(axes) for _ in array.shape[1:])))
            for array in (da.arange(n, chunks=(cuts,)), *together)
        ]
        rows = dict(zip(axes, row_shape, strict=False))
        return da.blockwise(
            partial(_on_block, row_shape, dtype),
            (0, *rows),
            *(one for operand in operands for one in operand),
            work=delayed(work, pure=False, traverse=False),
            new_axes=rows,
            concatenate=True,
            dtype=dtype,
            meta=np.empty((0,) * (1 + len(row_shape)), dtype),
        )

    def _check(self) -> None:
        for name, value in self.given.items():
            _check_cut(value, name)
        _check_rows({name: int(array.shape[0]) for name, array in self.given.items()})

    def _cut_alike(self) -> list[Any]:
        """All as Dask arrays, with the chunks of the first one that is."""
        import dask.array as da

        self._check()
        cuts = next(value.chunks[0] for value in self.given.values() if is_dask(value))
        return [
            array.rechunk((cuts, *array.shape[1:]))
            if is_dask(array)
            else da.from_array(backend.to_numpy(array), (cuts, *array.shape[1:]), name=False)
            for array in self.given.values()
        ]


def _check_cut(value: Any, name: str) -> None:
    """Refuse what cannot be cut along with other Dask arrays."""
    if is_function(value):
        raise TypeError(f"{name} is a function, expected a Dask array as others are")
    if value.ndim == 0:
        raise ValueError(f"{name} is a single value, expected an array of examples")
    if np.isnan(value.shape[0]):
        raise ValueError(
            f"{name} has chunks of unknown size, expected known ones: "
            f"{name}.compute_chunk_sizes() finds them"
        )


def _chunk(start: int, *parts: Any) -> Chunk:
    return Chunk(start, parts)


def _computed(
    begins: Sequence[int], delayed: Sequence[Sequence[Any]], positions: Sequence[int]
) -> Iterator[Chunk]:
    import dask

    for i in positions:
        yield Chunk(begins[i], dask.compute(*(parts[i] for parts in delayed)))


def _on_block(
    row_shape: Shape, dtype: Any, positions: Positions, *parts: Any, work: Work
) -> np.ndarray[Any, Any]:
    """`work` of a chunk, beside others that are at work on threads of their own."""
    if len(positions) == 0:
        return np.empty((0, *row_shape), dtype)
    with threads.single_threaded_blas(0):
        return backend.to_numpy(work(Chunk(int(positions[0]), parts)))


def _current_client() -> Any:
    """The client of the cluster that is in use, None without one."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return None
    try:
        return distributed.default_client()
    except ValueError:
        return None
