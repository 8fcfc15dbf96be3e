"""Arrays in memory: one chunk, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np

from onelayer.array.backend import Array
from onelayer.data.chunks import Chunk, InMemory
from onelayer.data.storage import Positions, Shape, Storage, Work, common_length


class Memory(Storage):
    """Arrays in memory, or in files that are small enough to be read at once."""

    @staticmethod
    def recognises(value: object) -> bool:  # noqa: ARG004 - any array that no other kind has
        return True

    def chunks(self) -> tuple[InMemory[Chunk], Positions]:
        n = common_length({name: int(array.shape[0]) for name, array in self.given.items()})
        return InMemory((self._chunk(),)), np.array([0, n])

    def mapped(self, work: Work, _row_shape: Shape, _dtype: Any) -> Array:
        return work(self._chunk())

    def _chunk(self) -> Chunk:
        return Chunk(0, tuple(self.given.values()))
