"""The design matrix Φ, the features of all examples, in panels: it never exists as a whole.

Panels of columns hold all examples and a few heads, for n x n products; panels of rows hold a few
examples and all heads, for products of features and for predictions. Features are computed in tiles
that stay in a processor's cache, and recomputed in every pass: at the sizes of the paper keeping
them in memory was no faster.

`Panels` has the features of one chunk of examples, `Design` those of all chunks, wherever they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.data.chunks import Chunk
from onelayer.data.progress import Progress, no_progress
from onelayer.data.sets import Sets, joined
from onelayer.data.sources import Source

T = TypeVar("T")

# A panel is wide enough for a product with it to be worth the n x n numbers it is added to.
PANEL_BYTES = 128 * 2**20


def _panels(count: int, size: int, sample: Array) -> list[slice]:
    """Panels of `count` rows or units of columns of `size` numbers like those of the sample."""
    # On a GPU a panel is as large as a block, which is what its memory allows.
    most = PANEL_BYTES if backend.gpu_memory(sample) is None else blocks.block_bytes(sample)
    return list(blocks.slices(count, backend.itemsize(sample) * size, most))


class FeatureMap(Protocol):
    """From tokens to features: `prepare` what all features share, then compute some columns."""

    @property
    def unit(self) -> int:
        """The number of features of one head or neuron; columns come in whole units."""

    @property
    def size(self) -> int:
        """The number of features."""

    def like(self, reference: Array) -> Self:
        """The same map in the namespace, on the device and with the dtype of `reference`."""

    def workspace(self, tokens: int) -> int:
        """How many numbers are in use for one unit of one example."""

    def prepare(self, tokens: Array, mask: Array | None) -> Any:
        """Tokens (b, T, d), finite also where their mask (b, T) is False, for `features`."""

    def features(self, prepared: Any, part: slice) -> Array:
        """Columns `part` of Φ, in whole units: (b, columns)."""


class Panels:
    """Features of `sets`, rows times `row_scale`, in the kind, device and dtype of `sample`."""

    def __init__(
        self,
        feature_map: FeatureMap,
        sets: Sets,
        row_scale: Array | None = None,
        sample: Array | None = None,
    ) -> None:
        self.sample: Array = sets.sample if sample is None else sample
        self.rows: int = len(sets)  # examples
        self.columns: int = feature_map.size  # features
        self._map, self._sets = feature_map.like(self.sample), sets
        self._row_scale = None if row_scale is None else backend.like(row_scale, self.sample)
        self._prepared: list[tuple[slice, Any]] = []
        self._memory: Array | None = None
        self._block_bytes = blocks.block_bytes(self.sample)

    def single(self) -> Panels:
        """The same features in float32."""
        return Panels(self._map, self._sets, self._row_scale, backend.single(self.sample))

    @property
    def ones(self) -> Array:
        """The constant 1 with its rows scaled, (n,)."""
        scale = self._row_scale
        return backend.ones((self.rows,), self.sample) if scale is None else scale

    def column_panels(self) -> list[slice]:
        """Slices of columns, in whole units."""
        unit = self._map.unit
        heads = _panels(self.columns // unit, self.rows * unit, self.sample)
        return [slice(part.start * unit, part.stop * unit) for part in heads]

    def row_panels(self) -> list[slice]:
        return _panels(self.rows, self.columns, self.sample)

    def by_columns(self, part: slice) -> Array:
        """A panel of columns, (n, columns), in memory that the next panel overwrites."""
        panel = self._panel(self.rows, part.stop - part.start)
        if not self._prepared:
            self._prepared = [(rows, self._prepare(rows)) for rows in self._blocks(0, self.rows)]
        blocks.run_over(self._prepared, lambda one: self._fill(panel, *one, part), panel)
        if self._row_scale is not None:
            panel *= self._row_scale[:, None]
        return panel

    def by_rows(self, part: slice) -> Array:
        """A panel of rows, (rows, columns), in memory that the next panel overwrites."""
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
        """Memory for a panel, reused: allocating it anew is slow."""
        if self._memory is None or self._memory.shape[0] < rows * columns:
            self._memory = backend.zeros((rows * columns,), self.sample)
        found = self._memory[: rows * columns]
        return backend.namespace(found).reshape(found, (rows, columns))

    def _blocks(self, start: int, stop: int) -> list[slice]:
        """Slices of examples whose tokens take a small part of a cache."""
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
class Design:
    """`Panels` for every chunk: sets, targets (n, t) and the scale (n,) of rows or None."""

    features: FeatureMap
    examples: Source
    sample: Array  # has the kind, device and dtype in which all is computed

    @property
    def steps(self) -> int:
        """How often one pass reports progress: by panels in memory, else by chunks."""
        chunks = self.examples.chunks
        if not chunks.in_memory:
            return len(chunks)
        lengths = [len(chunk) for chunk in chunks.collect()]
        return sum(len(_panels(length, self.features.size, self.sample)) for length in lengths)

    def between(self, start: int, stop: int) -> Design:
        return replace(self, examples=self.examples.between(start, stop))

    def here(self) -> tuple[Panels, Array]:
        """Panels of all examples, collected in memory, and their targets (n, t)."""
        sets, targets, scale = collect(self.examples)
        panels = Panels(self.features, sets, scale, self.sample)
        return panels, backend.as_device(targets, self.sample)

    def sum(self, work: Callable[..., T], *shared: object, progress: Progress = no_progress) -> T:
        """The sum of `work(panels, targets, *shared, progress)` over all chunks."""
        in_memory = self.examples.chunks.in_memory
        by_panel, by_chunk = (progress, no_progress) if in_memory else (no_progress, progress)
        features = (self.features, self.sample)
        values = self.examples.chunks.map(_on_panels, features, work, shared, by_panel)
        found: T = values.reduce(operator.add, by_chunk)
        return found


def collect(examples: Source) -> tuple[Sets, Array, Array | None]:
    """Sets, targets and the scale of rows of all examples, in memory."""
    parts = [chunk.arrays for chunk in examples.chunks.collect()]
    sets, targets, scales = zip(*parts, strict=True)
    if len(parts) == 1:
        return sets[0], targets[0], scales[0]
    xp = backend.namespace(targets[0])
    scale = None if scales[0] is None else xp.concat(scales, axis=0)
    return joined(sets), xp.concat(targets, axis=0), scale


def _on_panels(
    chunk: Chunk,
    features: tuple[FeatureMap, Array],
    work: Callable[..., T],
    shared: tuple[object, ...],
    progress: Progress,
) -> T:
    feature_map, sample = features
    sets, targets, scale = chunk.arrays
    panels = Panels(feature_map, sets, scale, sample)
    return work(panels, backend.as_device(targets, sample), *shared, progress)
