"""Φ, the features of all examples, in panels: (n, M(d+1)) numbers need never exist at once.

Two ways through it are enough. Panels of columns hold all examples and a few heads, for n x n
products; panels of rows hold a few examples and all heads, for products of features and for
predictions. Features are computed in tiles that stay in a processor's cache, and computed again
each time: timed at the paper's sizes, keeping them in memory was no faster.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any, Protocol, Self

from onelayer import arrays, blocks
from onelayer.arrays import Array
from onelayer.random_features.sets import Sets

# A panel is wide enough for a product with it to be worth the n x n numbers it is added to.
PANEL_BYTES = 128 * 2**20


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
    """The features of `sets`, each row times `row_scale` if there is one."""

    def __init__(
        self,
        feature_map: FeatureMap,
        sets: Sets,
        row_scale: Array | None = None,
        sample: Array | None = None,
    ) -> None:
        self.sample = sets.sample if sample is None else sample  # the kind and dtype of all panels
        self._map = feature_map.like(self.sample)
        self._sets = sets
        self._row_scale = None if row_scale is None else arrays.like(row_scale, self.sample)
        self._prepared: list[tuple[slice, Any]] = []
        self._memory: Array | None = None

    def first(self, count: int) -> Design:
        """The features of the first examples."""
        if count == self.rows:
            return self
        scale = None if self._row_scale is None else self._row_scale[:count]
        return Design(self._map, self._sets.first(count), scale, self.sample)

    def single(self) -> Design:
        """The same features in float32."""
        return Design(self._map, self._sets, self._row_scale, arrays.single(self.sample))

    def double(self) -> Design:
        """The same features in float64."""
        sample = arrays.double(self.sample)
        same = sample.dtype == self.sample.dtype
        return self if same else Design(self._map, self._sets, self._row_scale, sample)

    @property
    def rows(self) -> int:
        """The number of examples."""
        return len(self._sets)

    @property
    def columns(self) -> int:
        """The number of features."""
        return self._map.size

    def column_panels(self) -> list[slice]:
        """Φ cut into panels of whole units."""
        unit = self._map.unit
        per_head = arrays.itemsize(self.sample) * self.rows * unit
        heads = blocks.slices(self.columns // unit, per_head, PANEL_BYTES)
        return [slice(part.start * unit, part.stop * unit) for part in heads]

    def row_panels(self, cuts: Iterable[int] = ()) -> list[slice]:
        """Φ cut into panels of examples, with cuts after these numbers of examples too."""
        borders = sorted({0, *cuts, self.rows})
        per_example = arrays.itemsize(self.sample) * self.columns
        return [
            part
            for start, stop in pairwise(borders)
            for part in blocks.slices(stop, per_example, PANEL_BYTES, start)
        ]

    def by_columns(self, part: slice) -> Array:
        """A panel of columns, (n, columns); it lasts until the next panel is asked for."""
        panel = self._panel(self.rows, part.stop - part.start)
        if not self._prepared:
            self._prepared = [(rows, self._prepare(rows)) for rows in self._chunks(0, self.rows)]
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

        blocks.run_over(self._chunks(part.start, part.stop), fill, panel)
        if self._row_scale is not None:
            panel *= self._row_scale[part, None]
        return panel

    def product(self, weights: Array) -> Array:
        """Φ @ weights, (n, t)."""
        xp = arrays.namespace(self.sample)
        weights = arrays.like(weights, self.sample)
        parts = self.row_panels()
        return xp.concat(blocks.map_over(parts, lambda part: self.by_rows(part) @ weights), axis=0)

    def _panel(self, rows: int, columns: int) -> Array:
        """Memory for a panel, the same each time: fresh memory is slow to come by."""
        if self._memory is None or self._memory.shape[0] < rows * columns:
            self._memory = arrays.zeros((rows * columns,), self.sample)
        xp = arrays.namespace(self._memory)
        return xp.reshape(self._memory[: rows * columns], (rows, columns))

    def _chunks(self, start: int, stop: int) -> list[slice]:
        """Examples few enough for their tokens to take a small part of a cache."""
        per_example = 32 * max(self._sets.longest * (self._sets.dim + 1), 1024)
        return list(blocks.slices(stop, per_example, start=start))

    def _prepare(self, rows: slice) -> Any:
        tokens, mask = self._sets.block(rows)
        return self._map.prepare(arrays.like(tokens, self.sample), mask)

    def _fill(self, panel: Array, rows: slice, prepared: Any, part: slice) -> None:
        """Columns `part` of Φ for the prepared examples, tile by tile, into rows of a panel."""
        unit = self._map.unit
        per_head = 8 * (rows.stop - rows.start) * self._map.workspace(self._sets.longest)
        for heads in blocks.slices((part.stop - part.start) // unit, per_head):
            to = slice(heads.start * unit, heads.stop * unit)
            columns = slice(part.start + to.start, part.start + to.stop)
            panel[rows, to] = self._map.features(prepared, columns)
