"""What rules and figures share that are about numbers of examples and powers of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from onelayer.lab import comparing, figures
from onelayer.lab.claim import Parameters, Result, Results, Settings, grid

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MODELS = {"rfa": "RFA", "brfa": "BRFA", "rfmlp": "RFMLP"}  # by name, as they are written
_OWN = {
    "rfa": "attention_examples",
    "brfa": "attention_examples",
    "rfmlp": "network_examples",
}


def cells(settings: Settings) -> list[Parameters]:
    """All combinations, where attention and network learn from as many examples as is theirs.

    >>> both = {"model": ["rfa", "rfmlp"], "attention_examples": 8, "network_examples": 64}
    >>> cells({**both, "seeds": 1})
    [{'model': 'rfa', 'seed': 0, 'examples': 8}, {'model': 'rfmlp', 'seed': 0, 'examples': 64}]
    """
    shared = {name: value for name, value in settings.items() if name not in _OWN.values()}
    largest: dict[Any, Any] = {model: settings[name] for model, name in _OWN.items()}
    return [{**cell, "examples": largest[cell["model"]]} for cell in grid(shared)]


def by_size(results: Results) -> Results:
    """The points of learning curves as results of their own, with their size as `examples`.

    A cell has measured its "sizes", and lists with a value for every one of them.

    >>> curve = Result({"seed": 0}, {"sizes": [8, 16], "error": [0.5, 0.25]})
    >>> [(point["examples"], point["error"]) for point in by_size(Results((curve,)))]
    [(8, 0.5), (16, 0.25)]
    """
    return Results(tuple(point for cell in results for point in _points(cell)))


def _points(cell: Result) -> list[Result]:
    lists = {k: v for k, v in cell.measured.items() if isinstance(v, list) and k != "sizes"}
    return [
        Result({**cell.parameters, "examples": size}, {k: v[i] for k, v in lists.items()})
        for i, size in enumerate(cell["sizes"])
    ]


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The a of the power law c x^a that fits y best, in logarithms.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def draw_needed(axes: Axes, results: Results, target: str) -> None:
    """The examples that every model needs for a target, against the number of keys.

    An open triangle at the largest size says that it was not enough, in the median.
    """
    for number, (model, part) in enumerate(results.by("model")):
        figures.curve(axes, part, "keys", target, MODELS[model], number)
        by_keys = {keys: comparing.median(cells, target) for keys, cells in part.by("keys")}
        beyond = [keys for keys, size in by_keys.items() if size == np.inf]
        if beyond:
            largest = [part.of("examples")[0]] * len(beyond)
            label, colour = f"{MODELS[model]}: more than this", figures.COLOURS[number]
            axes.plot(beyond, largest, "^", color=colour, fillstyle="none", label=label)
    axes.set(xscale="log", yscale="log", xlabel="keys $N$", ylabel="examples needed")
    ticks = results.of("keys")
    axes.set_xticks(ticks, [str(keys) for keys in ticks])
    axes.minorticks_off()
