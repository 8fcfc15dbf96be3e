"""The style of all plots, and their parts: axes in, axes out.

matplotlib is imported when something is drawn, and not before.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
    from matplotlib.image import AxesImage
else:  # matplotlib is optional: annotations are taken from here
    Axes = Figure = AxesImage = Any

Grid: TypeAlias = np.ndarray[Any, Any]  # of axes

# Colours that stay apart for all kinds of colour vision, and in grey (Okabe and Ito).
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DIVERGING = "RdBu"  # colours for numbers on both sides of 0
SEQUENTIAL = "Blues"  # .. and for numbers above 0
STYLE: dict[str, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.constrained_layout.use": True,
    "font.size": 9.0,
    "grid.alpha": 0.25,
    "legend.fontsize": 8.0,
    "legend.frameon": False,
}


def needed(what: str) -> None:
    """Raise an ImportError that says how to install matplotlib, if `what` cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"{what} needs matplotlib, which is not installed: pip install matplotlib"
        ) from error


def style(number: int) -> tuple[str, str]:
    """Return the colour and the marker of a curve, by its number; -1 is black."""
    return COLOURS[number % len(COLOURS)], MARKERS[number % len(MARKERS)]


def styled(**changes: Any) -> AbstractContextManager[None]:
    """Draw in the style of the package, whatever the settings of the user are."""
    from matplotlib import style as styles

    context: AbstractContextManager[None] = styles.context(["default", STYLE | changes])
    return context


def axes_or_new(ax: Axes | None, size: tuple[float, float] = (6.4, 3.2)) -> Axes:
    """Return the given axes, or those of a new figure of this size in inches."""
    needed("plot()")
    if ax is not None:
        return ax
    from matplotlib import pyplot

    with styled():
        made: Axes = pyplot.subplots(figsize=size)[1]
    return made


def grid_or_new(axes: Any, rows: int, columns: int, what: str, size: tuple[float, float]) -> Grid:
    """Return the given axes as an array (rows, columns), or those of a new figure."""
    needed("plot()")
    if axes is None:
        from matplotlib import pyplot

        with styled():
            _, made = pyplot.subplots(rows, columns, squeeze=False, figsize=size)
        return np.asarray(made)
    given = np.asarray(axes, dtype=object)
    if given.size != rows * columns:
        raise ValueError(f"axes has {given.size} axes, expected {rows * columns}: {what}")
    return given.reshape(rows, columns)


def heat_map(axes: Axes, matrix: Any, largest: float, signed: bool = True) -> AxesImage:
    """Draw a matrix without ticks, with colours from -largest, or 0 if not signed, to largest."""
    colours, least = (DIVERGING, -largest) if signed else (SEQUENTIAL, 0.0)
    image = axes.imshow(matrix, cmap=colours, vmin=least, vmax=largest)
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    return image


def legend_beside(axes: Axes) -> None:
    """Add a legend to the right of the axes, where it hides nothing."""
    place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)}
    axes.legend(**place, frameon=False, fontsize="small")


def margins(
    axes: Axes, rows: Sequence[float], values: Sequence[Any], number: int, label: str
) -> None:
    """Draw the median and the range of the values of every row, on a logarithmic axis.

    Medians that such an axis does not have, zero and infinity, are arrows at its ends.
    """
    colour, marker = style(number)
    shown = [np.asarray(value, dtype=float) for value in values]
    places = np.asarray(rows, dtype=float)
    medians = np.array([float(np.median(value)) for value in shown])
    ranges = [(value.min(), value.max()) for value in shown]
    inside = (medians > 0) & np.isfinite(medians)
    axes.hlines(places, *zip(*ranges, strict=True), color=colour)
    axes.plot(
        medians[inside], places[inside], color=colour, marker=marker, ms=4, ls="", label=label
    )
    ends = axes.get_yaxis_transform()  # x from 0 to 1, y as the rows
    for at, arrow, there in ((0.0, "<", medians <= 0), (1.0, ">", np.isinf(medians))):
        if there.any():
            axes.plot(
                np.full(int(there.sum()), at),
                places[there],
                color=colour,
                marker=arrow,
                ls="",
                clip_on=False,
                transform=ends,
            )
