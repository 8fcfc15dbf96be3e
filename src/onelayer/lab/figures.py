"""Figures of claims for a paper: measurements with their spread over seeds, and predictions.

A claim's `draw` fills a matplotlib figure with these parts, and `render` returns it as a file.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onelayer import plotting
from onelayer.lab.claim import Claim, Results
from onelayer.plotting import COLOURS as COLOURS
from onelayer.plotting import MARKERS as MARKERS
from onelayer.plotting import style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure as Figure
    from matplotlib.figure import SubFigure as SubFigure
else:  # matplotlib is optional: claims take their annotations from here
    Axes = Figure = SubFigure = Any

_FILES = {
    "pdf.fonttype": 42,  # text stays text
    "svg.fonttype": "path",  # and is the same everywhere
    "svg.hashsalt": "onelayer",  # the same figure is the same file
}
_LABELS_IN_A_ROW = 80  # characters of all labels of a legend that fit below a figure
FORMATS = ("svg", "pdf")
AXIS_LABELS = {"examples": "examples $n$", "heads": "heads $M$"}


def curve(
    axes: Axes, results: Results, x: str, y: str, label: str | None = None, number: int = 0
) -> None:
    """Draw the median of y over the cells of every x, with a band from minimum to maximum.

    `number` chooses colour and marker. Cells without a value are left out. Numeric x are sorted.
    """
    points = []
    for value, part in results.by(x):
        values = part.numbers(y, missing=np.nan)
        values = values[np.isfinite(values)]
        if values.size:
            points.append((value, np.median(values), values.min(), values.max()))
    if all(isinstance(value, int | float) for value, *_ in points):
        points.sort()
    if points:
        at, middle, low, high = map(np.array, zip(*points, strict=True))
        colour, marker = style(number)
        axes.plot(at, middle, color=colour, marker=marker, markersize=4, label=label)
        axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
        # The band has no area where there is one x only.
        axes.vlines(at, low, high, color=colour, alpha=0.5, linewidth=1)


def curves(
    axes: Axes,
    results: Results,
    x: str,
    y: str,
    by: str,
    label: Callable[[Any], str] = str,
    first: int = 0,
) -> None:
    """Draw one curve for every value of the parameter `by`, numbered from `first`."""
    for number, (value, part) in enumerate(results.by(by), first):
        curve(axes, part, x, y, label(value), number)


def panels(
    figure: Figure,
    shown: Mapping[str, tuple[Results, str]],
    x: str,
    by: str,
    label: Callable[[Any], str] = str,
    ylabel: str = "test error / variance",
    **subplots: Any,
) -> list[Axes]:
    """Draw panels side by side, by title: results, and the measured value y to draw against x.

    Every panel has one curve for every value of the parameter `by`. `subplots` are options of
    `Figure.subplots`. Both axes are logarithmic, with ticks at the measured x.
    """
    made = figure.subplots(1, len(shown), squeeze=False, **subplots)[0]
    for axes, (title, (results, y)) in zip(made, shown.items(), strict=True):
        curves(axes, results, x, y, by, label)
        log_ticks(axes, results.of(x))
        axes.set(yscale="log", xlabel=AXIS_LABELS[x], title=title)
    made[0].set_ylabel(ylabel)
    return list(made)


def predicted(
    axes: Axes, x: Sequence[float], y: Sequence[float], label: str = "predicted", number: int = -1
) -> None:
    """Draw a prediction: dashed, black unless `number` chooses the colour of a measured curve."""
    axes.plot(x, y, color=style(number)[0], linestyle="--", linewidth=1, label=label)


def level(axes: Axes, x: Sequence[float], value: float, label: str, number: int = -1) -> None:
    """Draw a prediction that is the same for all x."""
    predicted(axes, x, [value] * len(x), label, number)


def log_ticks(axes: Axes, values: Sequence[float], most: int = 5) -> None:
    """Set a logarithmic x axis with ticks at the measured values, thinned to at most `most`."""
    chosen = sorted(values)[:: -(-len(values) // most)]
    axes.set_xscale("log")
    axes.set_xticks(chosen, [f"{value:g}" for value in chosen])
    axes.set_xticks([], minor=True)


def tick_examples(axes: Axes, examples: Sequence[int]) -> None:
    """Set ticks at the measured numbers of examples."""
    axes.set_xticks(examples, [f"{n // 1000}k" if n >= 10_000 else str(n) for n in examples])
    axes.set_xticks([], minor=True)


def examples_needed(axes: Axes, results: Results, target: str) -> None:
    """Draw the examples that every model needs for a target, against the number of keys.

    An open triangle marks the largest size where it was not enough in the median.
    """
    for number, (model, part) in enumerate(results.by("model")):
        curve(axes, part, "keys", target, model.upper(), number)
        beyond = [n for n, size in part.medians(target, by="keys").items() if size == np.inf]
        if beyond:
            largest = [part.of("examples")[0]] * len(beyond)
            label = f"{model.upper()}: more than this"
            axes.plot(beyond, largest, "^", color=COLOURS[number], fillstyle="none", label=label)
    axes.set(xscale="log", yscale="log", xlabel="keys $N$", ylabel="examples needed")
    axes.set_xticks(results.of("keys"), [str(keys) for keys in results.of("keys")])
    axes.minorticks_off()


def heat_maps(
    figure: Figure | SubFigure,
    matrices: Sequence[Sequence[Any]],
    rows: Sequence[str],
    columns: Sequence[str],
) -> None:
    """Draw matrices side by side, a row of the figure per list, on one scale about 0."""
    largest = max(float(np.abs(np.asarray(m)).max()) for row in matrices for m in row) or 1.0
    grid = figure.subplots(len(matrices), len(matrices[0]), squeeze=False)
    for i, row in enumerate(matrices):
        for j, matrix in enumerate(row):
            image = plotting.heat_map(grid[i, j], matrix, largest)
        grid[i, 0].set_ylabel(rows[i])
    for axes, title in zip(grid[0], columns, strict=True):
        axes.set_title(title)
    figure.colorbar(image, ax=grid, shrink=0.8)


def render(claim: Claim, results: Results, file_format: str = "svg") -> bytes:
    """Return the claim's figure as a file: svg or pdf, the same bytes for the same results.

    A figure without a legend gets one below, with the labels of all axes.
    """

    def draw(figure: Figure) -> None:
        claim.draw(results, figure)
        _add_legend(figure)

    return drawn(draw, file_format)


def _add_legend(figure: Figure) -> None:
    figures = figure, *figure.subfigs
    if any(f.legends for f in figures) or any(axes.get_legend() for axes in figure.axes):
        return
    found = [axes.get_legend_handles_labels() for axes in figure.axes]
    labels = {text: handle for part in found for handle, text in zip(*part, strict=True)}
    if labels:
        rows = 1 if len("".join(labels)) <= _LABELS_IN_A_ROW else 2
        ncols = -(-len(labels) // rows)
        figure.legend(labels.values(), labels, loc="outside lower center", ncols=ncols)


def drawn(draw: Callable[[Figure], None], file_format: str = "svg") -> bytes:
    """Return a figure as a file; `draw` fills it and may change its size."""
    if file_format not in FORMATS:
        raise ValueError(f"the format is {file_format!r}, expected one of {', '.join(FORMATS)}")
    plotting.needed("a figure")
    from matplotlib.figure import Figure

    with plotting.styled(**_FILES):
        figure = Figure(figsize=(7.0, 3.2))
        draw(figure)
        content = io.BytesIO()
        undated = {"Date": None} if file_format == "svg" else {"CreationDate": None}
        figure.savefig(content, format=file_format, metadata=undated)
    return content.getvalue()
