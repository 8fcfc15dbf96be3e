"""The heads of one or two layers as images: `AttentionLayer.plot`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from onelayer import plotting
from onelayer.array import backend, checks
from onelayer.array.backend import NumpyArray
from onelayer.plotting import Grid
from onelayer.span import Span

if TYPE_CHECKING:
    from onelayer.weights import LayerWeights

_TILE, _TITLE = 1.1, 0.3  # inches of a head, and of its title
_BESIDE = 1.2  # inches of what is beside the heads
_WIDEST = 16.0  # inches of a figure: more heads than fit get smaller tiles


def draw(
    layer: LayerWeights,
    other: LayerWeights | None,
    matched: NumpyArray,
    inside: Span | None,
    heads: Iterable[int] | None,
    axes: Any,
) -> Grid:
    """Draw heads of a layer and, below, those of another that were matched with them."""
    chosen = _chosen(heads, layer.heads)
    rows = [(layer, chosen)]
    if other is not None:
        rows.append((other, [int(matched[head]) for head in chosen]))
    what = f"{len(chosen)} heads" + (" of two layers" if other is not None else "")
    tile = min(_TILE, (_WIDEST - _BESIDE) / len(chosen))
    size = (tile * len(chosen) + _BESIDE, (tile + _TITLE) * len(rows) + 0.1)
    grid = plotting.grid_or_new(axes, len(rows), len(chosen), what, size)
    images = [_images(one, inside) for one, _ in rows]
    largest = max(
        float(np.abs(found[head]).max())
        for found, (_, numbers) in zip(images, rows, strict=True)
        for head in numbers
        if head >= 0
    )
    largest = largest or 1.0  # a scale of colours needs a length
    for line, found, (_, numbers) in zip(grid, images, rows, strict=True):
        for ax, head in zip(line, numbers, strict=True):
            if head < 0:  # the other layer has fewer heads
                ax.set_axis_off()
                ax.set_title("none", fontsize="medium")
                continue
            image = plotting.heat_map(ax, found[head], largest)
            ax.set_title(f"head {head}", fontsize="medium")
    if other is not None:
        for line, name in zip(grid, ("this layer", "other"), strict=True):
            line[0].set_ylabel(name)
    ticks = (-largest, 0.0, largest)
    grid[0, 0].figure.colorbar(image, ax=list(grid.flat), shrink=0.8, ticks=ticks, format="%.2g")
    return grid


def _chosen(heads: Iterable[int] | None, count: int) -> list[int]:
    if heads is None:
        return list(range(count))
    chosen = [checks.whole_number(head, "a head", least=0) for head in heads]
    if not chosen or max(chosen) >= count:
        raise ValueError(f"heads are {chosen}, expected at least one, each below {count}")
    return chosen


def _images(layer: LayerWeights, inside: Span | None) -> NumpyArray:
    """The attention matrices or, on a span, VᵀΘV with the strongest directions first."""
    attention = backend.to_numpy(layer.attention).astype(float)
    return attention if inside is None else inside.basis.T @ attention @ inside.basis
