"""Margins by which layers meet the conditions, for rules and figures.

A cell has two values for every condition: the measured one under its name, and under its name and
"holds" whether it holds or, of several layers, in which share of them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from onelayer import plotting
from onelayer.lab.claim import Results
from onelayer.layer import AttentionLayer
from onelayer.plotting import Axes
from onelayer.recovery.conditions import conditions

GROUPS: dict[str, tuple[str, ...]] = {
    "scores spread": ("scale", "largest scale", "norm ratio", "effective rank", "singular gap"),
    "heads differ": ("distance", "incoherence", "attention independence"),
    "heads do not cancel": ("hull distance",),
    "projections can be told apart": ("sum size", "sum conditioning", "projection independence"),
}
# The needed values are the same for all layers.
ASKED = conditions(AttentionLayer.random(heads=2, dim=2))
# A ratio to 0 says nothing: every layer has singular gaps of at least 0.
COMPARED: tuple[str, ...] = tuple(
    name for names in GROUPS.values() for name in names if ASKED[name].needed > 0
)


def held(results: Results, name: str) -> float:
    """The share of layers that meet a condition."""
    return float(np.mean(results.numbers(f"{name} holds")))


def margin(name: str, measured: float) -> float:
    """How many times better than needed; below 1 the condition fails."""
    return replace(ASKED[name], measured=measured).margin


def draw(axes: Axes, series: Mapping[str, Results]) -> None:
    """Draw one row for each condition and one colour for each series: median and range."""
    for number, (label, results) in enumerate(series.items()):
        places = np.arange(len(COMPARED)) + 0.5 * ((number + 0.5) / len(series) - 0.5)
        values = [_margins(results, name) for name in COMPARED]
        plotting.margins(axes, list(places), values, number, label)
    axes.axvline(1.0, color="black", linestyle=":", linewidth=1, label="needed")
    axes.set_yticks(range(len(COMPARED)), COMPARED)
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="times better than needed")


def _margins(results: Results, name: str) -> np.ndarray[Any, Any]:
    values = np.concatenate([np.ravel(cell[name]) for cell in results])
    return np.array([margin(name, float(value)) for value in values])
