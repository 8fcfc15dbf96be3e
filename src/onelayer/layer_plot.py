"""The heads of one or two layers as images: `AttentionLayer.plot` and `plot_attention`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    images: Sequence[NumpyArray],
    matched: NumpyArray,
    heads: Iterable[int] | None,
    axes: Any,
    signed: bool = True,
    tokens: Sequence[str] | None = None,
) -> Grid:
    """Draw images (m, p, q) of heads of a layer and, below, of those matched in another layer.

    Without `signed` the images have no negative numbers. Tokens are labels of rows and columns.
    """
    chosen = _chosen(heads, len(images[0]))
    rows = [chosen, [int(matched[head]) for head in chosen]][: len(images)]
    what = f"{len(chosen)} heads" + (" of two layers" if len(rows) > 1 else "")
    tile = min(_TILE, (_WIDEST - _BESIDE) / len(chosen))
    size = (tile * len(chosen) + _BESIDE, (tile + _TITLE) * len(rows) + 0.1)
    grid = plotting.grid_or_new(axes, len(rows), len(chosen), what, size)
    shown = [
        found[head] for found, row in zip(images, rows, strict=True) for head in row if head >= 0
    ]
    largest = float(np.abs(shown).max()) or 1.0  # a scale of colours needs a length
    for line, found, row in zip(grid, images, rows, strict=True):
        for ax, head in zip(line, row, strict=True):
            if head < 0:  # the other layer has fewer heads
                ax.set_axis_off()
                ax.set_title("none", fontsize="medium")
                continue
            image = plotting.heat_map(ax, found[head], largest, signed)
            ax.set_title(f"head {head}", fontsize="medium")
    if len(rows) > 1:
        for line, name in zip(grid, ("this layer", "other"), strict=True):
            line[0].set_ylabel(name)
    if tokens is not None:
        _label(grid, tokens)
    ticks = (-largest, 0.0, largest) if signed else (0.0, largest)
    grid[0, 0].figure.colorbar(image, ax=list(grid.flat), shrink=0.8, ticks=ticks, format="%.2g")
    return grid


def images(layer: LayerWeights, inside: Span | None) -> NumpyArray:
    """The attention matrices or, on a span, VᵀΘV with the strongest directions first."""
    attention = backend.to_numpy(layer.attention).astype(float)
    return attention if inside is None else inside.basis.T @ attention @ inside.basis


def _label(grid: Grid, tokens: Sequence[str]) -> None:
    """Write tokens to the left of the grid and below it."""
    for line in grid:
        line[0].set_yticks(range(len(tokens)), tokens, fontsize="small")
    for ax in grid[-1]:
        ax.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize="small")


def _chosen(heads: Iterable[int] | None, count: int) -> list[int]:
    if heads is None:
        return list(range(count))
    chosen = [checks.whole_number(head, "a head", least=0) for head in heads]
    if not chosen or max(chosen) >= count:
        raise ValueError(f"heads are {chosen}, expected at least one, each below {count}")
    return chosen
