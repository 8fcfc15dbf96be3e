"""The interface of a kind of storage, and checks that all kinds share.

To add a kind of storage, subclass `Storage` in a file of its own and add the class to `STORAGES` in
`sources.py`. Chunks are `InMemory`, `Streamed`, or a new subclass of `chunks.Chunks`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data.chunks import Chunk, Chunks

Work: TypeAlias = Callable[[Chunk], Array]
Shape: TypeAlias = tuple[int, ...]
Positions: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Storage(ABC):
    """Arrays by their names, at least one of them in this kind of storage, all cut alike.

    The others are arrays in memory, or in a storage that comes later in `sources.STORAGES`.
    """

    given: Mapping[str, Any]

    @staticmethod
    @abstractmethod
    def recognises(value: object) -> bool:
        """Whether a value that a user passed is in this kind of storage."""

    def samples(self) -> tuple[Array, ...]:
        """One example of every array, for its shape, dtype and kind."""
        return tuple(array[:1, ...] for array in self.given.values())

    @abstractmethod
    def chunks(self) -> tuple[Chunks[Chunk], Positions]:
        """The chunks and the positions at which they start, with the number of examples at the end.

        Raises ValueError if the arrays have different lengths.
        """

    @abstractmethod
    def mapped(self, work: Work, row_shape: Shape, dtype: Any) -> Any:
        """`work(chunk)`, an array (len(chunk), *row_shape), of all chunks.

        In this storage where that is natural, else as a numpy array.
        """


def plain_array(value: Any, name: str) -> Array:
    """A value in memory, or in a file mapped into memory, as an array of examples."""
    array = backend.detached(backend.as_array(value, name))
    if array.ndim == 0:
        raise ValueError(f"{name} is a single value, expected an array of examples")
    return array


def common_length(lengths: Mapping[str, int]) -> int:
    """The length that all arrays have."""
    (first, expected), *others = lengths.items()
    for name, length in others:
        if length != expected:
            raise ValueError(
                f"{name} has {length} rows, expected {expected}: one for each example of {first}"
            )
    return expected
