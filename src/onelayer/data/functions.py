"""Functions that return blocks of examples, and iterables of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data.chunks import Chunk, Streamed
from onelayer.data.dask import is_dask
from onelayer.data.files import read_rows
from onelayer.data.storage import Positions, Shape, Storage, Work, common_length, plain_array


class Functions(Storage):
    """Functions that return blocks, called once in every pass; arrays are cut like the blocks."""

    @staticmethod
    def recognises(value: object) -> bool:
        if backend.is_array(value) or isinstance(value, type | list | tuple | str | Iterator):
            return False
        if any(hasattr(value, name) for name in ("__getitem__", "__array__", "shape")):
            return False
        return callable(value) or isinstance(value, Iterable)

    @property
    def names(self) -> list[str]:
        """The names of the functions."""
        return [name for name, value in self.given.items() if self.recognises(value)]

    def samples(self) -> tuple[Array, ...]:
        for chunk in self._pass():
            return chunk.take(np.arange(1))  # copies, which do not keep the block in memory
        raise ValueError(f"{self.names[0]} gives no examples, expected at least one")

    def chunks(self) -> tuple[Streamed[Chunk], Positions]:
        starts = [0, *(chunk.start + len(chunk) for chunk in self._pass())]
        read = partial(self._read, starts)
        return Streamed(read, tuple(range(len(starts) - 1))), np.array(starts)

    def mapped(self, work: Work, _row_shape: Shape, _dtype: Any) -> Callable[[], Iterator[Array]]:
        return lambda: map(work, self._pass())

    def _read(self, starts: Sequence[int], positions: Sequence[int]) -> Iterator[Chunk]:
        wanted = set(positions)
        for i, chunk in enumerate(self._pass()):
            if [chunk.start + len(chunk)] != starts[i + 1 : i + 2]:
                break
            if i in wanted:
                yield chunk
                if i == positions[-1]:
                    return
        raise ValueError(
            f"{', '.join(self.names)} gave other blocks than in the first pass, "
            "expected the same in every pass"
        )

    def _pass(self) -> Iterator[Chunk]:
        """Blocks of all arrays that belong together, without empty ones."""
        functions = {name: _blocks(self.given[name], name) for name in self.names}
        whole = {n: int(array.shape[0]) for n, array in self.given.items() if n not in functions}
        start = 0
        for i in count():
            blocks = {name: next(blocks, None) for name, blocks in functions.items()}
            if all(block is None for block in blocks.values()):
                break
            lengths = {
                f"block {i} of {name}": 0 if block is None else int(block.shape[0])
                for name, block in blocks.items()
            }
            part = slice(start, start + common_length(lengths))
            if part.start < part.stop:
                blocks |= {name: read_rows(self.given[name], part) for name in whole}
                yield Chunk(start, tuple(blocks[name] for name in self.given))
            start = part.stop
        common_length({self.names[0]: start} | whole)


def _blocks(function: Any, name: str) -> Iterator[Array]:
    """The blocks of one pass, as arrays that differ in shape along the first axis only.

    They are copied, because a function may fill one buffer again and again.
    """
    blocks = function() if callable(function) else iter(function)
    if backend.is_array(blocks) or not isinstance(blocks, Iterable):
        raise TypeError(
            f"{name} is a function that returns {type(blocks).__name__}, "
            "expected an iterator over blocks of examples"
        )
    shape: Shape | None = None
    for i, block in enumerate(blocks):
        if is_dask(block):
            raise TypeError(f"block {i} of {name} is a Dask array, expected an array in memory")
        array = backend.copied(plain_array(block, f"block {i} of {name}"))
        shape = tuple(array.shape[1:]) if shape is None else shape
        if tuple(array.shape[1:]) != shape:
            raise ValueError(
                f"block {i} of {name} has examples of shape {tuple(array.shape[1:])}, "
                f"expected {shape} as block 0 has"
            )
        yield array
