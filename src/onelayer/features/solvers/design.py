"""Φ, the features of all examples, in panels: (n, M(d+1)) numbers need never exist at once.

Two ways through it are enough. Panels of columns hold all examples and a few heads, for n x n
products; panels of rows hold a few examples and all heads, for products of features and for
predictions. Features are computed in tiles that stay in a processor's cache, and computed again
each time: timed at the paper's sizes, keeping them in memory was no faster.

A `Design` has its examples in memory; a `SpreadDesign` leaves them where they live, and makes a
`Design` of every chunk of them there.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.data import sets as sets_module
from onelayer.data.chunks import Chunk, Progress, no_progress
from onelayer.data.sets import Sets
from onelayer.data.sources import Source

# A panel is wide enough for a product with it to be worth the n x n numbers it is added to.
PANEL_BYTES = 128 * 2**20


def row_panels(rows: int, columns: int, sample: Array) -> list[slice]:
    """Φ (rows, columns), of numbers like those of the sample, cut into panels of examples."""
    return list(blocks.slices(rows, backend.itemsize(sample) * columns, _panel_bytes(sample)))


def _panel_bytes(sample: Array) -> int:
    """On a GPU a panel is as large as a block: that is as much as there is room for."""
    return PANEL_BYTES if backend.gpu_memory(sample) is None else blocks.block_bytes(sample)


class FeatureMap(Protocol):
    """From tokens to features: `prepare` what all features share, then compute some columns.

    There are `size` features, computed in whole units: the features of one head, or one neuron.
    """

    @property
    def unit(self) -> int: ...
    @property
    def size(self) -> int: ...
    def like(self, reference: Array) -> Self: ...
    def workspace(self, tokens: int) -> int: ...
    def prepare(self, tokens: Array, mask: Array | None) -> Any: ...
    def features(self, prepared: Any, part: slice) -> Array: ...


class Design:
    """The features of `sets`, each row times `row_scale` if there is one.

    They are computed in the kind, on the device and with the dtype of `sample`, which are those of
    the examples where it is not given: blocks of examples are moved there one by one.
    """

    def __init__(
        self,
        feature_map: FeatureMap,
        sets: Sets,
        row_scale: Array | None = None,
        sample: Array | None = None,
    ) -> None:
        self.sample = sets.sample if sample is None else sample
        self._map = feature_map.like(self.sample)
        self._sets = sets
        self._row_scale = None if row_scale is None else backend.like(row_scale, self.sample)
        self._prepared: list[tuple[slice, Any]] = []
        self._memory: Array | None = None
        self._block_bytes = blocks.block_bytes(self.sample)

    def single(self) -> Design:
        """The same features in float32."""
        return Design(self._map, self._sets, self._row_scale, backend.single(self.sample))

    @property
    def rows(self) -> int:
        """The number of examples."""
        return len(self._sets)

    @property
    def columns(self) -> int:
        """The number of features."""
        return self._map.size

    @property
    def ones(self) -> Array:
        """What a constant 1 becomes with its rows scaled, (n,)."""
        scale = self._row_scale
        return backend.ones((self.rows,), self.sample) if scale is None else scale

    def column_panels(self) -> list[slice]:
        """Φ cut into panels of whole units."""
        unit = self._map.unit
        per_head = backend.itemsize(self.sample) * self.rows * unit
        heads = blocks.slices(self.columns // unit, per_head, _panel_bytes(self.sample))
        return [slice(part.start * unit, part.stop * unit) for part in heads]

    def row_panels(self) -> list[slice]:
        """Φ cut into panels of examples."""
        return row_panels(self.rows, self.columns, self.sample)

    def by_columns(self, part: slice) -> Array:
        """A panel of columns, (n, columns); it lasts until the next panel is asked for."""
        panel = self._panel(self.rows, part.stop - part.start)
        if not self._prepared:
            self._prepared = [(rows, self._prepare(rows)) for rows in self._blocks(0, self.rows)]
        blocks.run_over(self._prepared, lambda one: self._fill(panel, *one, part), panel)
        if self._row_scale is not None:
            panel *= self._row_scale[:, None]
        return panel

    def by_rows(self, part: slice) -> Array:
        """A panel of rows, (rows, M(d+1)); it lasts until the next panel is asked for."""
        panel = self._panel(part.stop - part.start, self.columns)

        def fill(rows: slice) -> None:
            here = slice(rows.start - part.start, rows.stop - part.start)
            self._fill(panel, here, self._prepare(rows), slice(0, self.columns))

        blocks.run_over(self._blocks(part.start, part.stop), fill, panel)
        if self._row_scale is not None:
            panel *= self._row_scale[part, None]
        return panel

    def product(self, weights: Array) -> Array:
        """Φ @ weights, (n, t)."""
        xp = backend.namespace(self.sample)
        weights = backend.like(weights, self.sample)
        parts = self.row_panels()
        return xp.concat(blocks.map_over(parts, lambda part: self.by_rows(part) @ weights), axis=0)

    def _panel(self, rows: int, columns: int) -> Array:
        """Memory for a panel, the same each time: fresh memory is slow to come by."""
        if self._memory is None or self._memory.shape[0] < rows * columns:
            self._memory = backend.zeros((rows * columns,), self.sample)
        xp = backend.namespace(self._memory)
        return xp.reshape(self._memory[: rows * columns], (rows, columns))

    def _blocks(self, start: int, stop: int) -> list[slice]:
        """Examples few enough for their tokens to take a small part of a cache."""
        per_example = 32 * max(self._sets.longest * (self._sets.dim + 1), 1024)
        return list(blocks.slices(stop, per_example, self._block_bytes, start))

    def _prepare(self, rows: slice) -> Any:
        tokens, mask = self._sets.block(rows)
        there = None if mask is None else backend.as_device(mask, self.sample)
        return self._map.prepare(backend.like(tokens, self.sample), there)

    def _fill(self, panel: Array, rows: slice, prepared: Any, part: slice) -> None:
        """Columns `part` of Φ for the prepared examples, tile by tile, into rows of a panel."""
        unit = self._map.unit
        per_head = 8 * (rows.stop - rows.start) * self._map.workspace(self._sets.longest)
        for heads in blocks.slices((part.stop - part.start) // unit, per_head, self._block_bytes):
            to = slice(heads.start * unit, heads.stop * unit)
            columns = slice(part.start + to.start, part.start + to.stop)
            panel[rows, to] = self._map.features(prepared, columns)


@dataclass(frozen=True, eq=False)
class SpreadDesign:
    """Features and targets of examples wherever they live: a `Design` for every chunk of them.

    Chunks hold sets, targets (n, t) and the scale (n,) of their rows, or None.
    """

    features: FeatureMap
    examples: Source
    sample: Array  # of the kind, on the device and with the dtype in which all is computed

    @property
    def columns(self) -> int:
        """The number of features."""
        return self.features.size

    @property
    def steps(self) -> int:
        """Of which one pass tells: panels of what is in memory, chunks of what is not."""
        there = self.examples.chunks
        if not there.in_memory:
            return len(there)
        lengths = [len(chunk) for chunk in there.collect()]
        return sum(len(row_panels(length, self.columns, self.sample)) for length in lengths)

    def between(self, start: int, stop: int) -> SpreadDesign:
        """The same of some of the examples."""
        return replace(self, examples=self.examples.between(start, stop))

    def here(self) -> tuple[Design, Array]:
        """One design of all examples, brought here, and their targets (n, t)."""
        sets, targets, scale = brought(self.examples)
        design = Design(self.features, sets, scale, self.sample)
        return design, backend.as_device(targets, self.sample)

    def summed(self, work: Callable[..., Any], *shared: Any, told: Progress = no_progress) -> Any:
        """The sum of `work(design, targets, *shared, told)` over all chunks, brought here.

        Work in memory tells of its panels itself; from elsewhere only whole chunks are told of.
        """
        in_memory = self.examples.chunks.in_memory
        by_panel, by_chunk = (told, no_progress) if in_memory else (no_progress, told)
        features = (self.features, self.sample)
        values = self.examples.chunks.map(_on_design, features, work, shared, by_panel)
        return values.reduce(operator.add, by_chunk)


def brought(examples: Source) -> tuple[Sets, Array, Array | None]:
    """Sets, targets and the scale of rows of all examples, in memory."""
    parts = [chunk.arrays for chunk in examples.chunks.collect()]
    if len(parts) == 1:
        sets, targets, scale = parts[0]
        return sets, targets, scale
    sets, targets, scales = zip(*parts, strict=True)
    xp = backend.namespace(targets[0])
    scale = None if scales[0] is None else xp.concat(scales, axis=0)
    return sets_module.joined(sets), xp.concat(targets, axis=0), scale


def _on_design(
    chunk: Chunk,
    features: tuple[FeatureMap, Array],
    work: Callable[..., Any],
    shared: tuple[Any, ...],
    told: Progress,
) -> Any:
    feature_map, sample = features
    sets, targets, scale = chunk.arrays
    design = Design(feature_map, sets, scale, sample)
    return work(design, backend.as_device(targets, sample), *shared, told)
