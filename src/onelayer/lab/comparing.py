"""What rules and figures share that compare a few models or targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from onelayer.lab.claim import CannotJudge, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def median(results: Results, name: str) -> float:
    """The median of a measured value; infinite if most cells did not reach one."""
    return float(np.median(results.numbers(name)))


def at_least_two(results: Results, parameter: str) -> list[int]:
    """The values of a parameter in ascending order; no verdict if there is only one."""
    values = sorted(results.of(parameter))
    if len(values) < 2:
        raise CannotJudge(f"{parameter} has one value, {values[0]}: nothing to compare it with")
    return values


def require(results: Results, parameter: str, values: Sequence[object]) -> None:
    """No verdict where one of these values of a parameter was not measured."""
    missing = [str(value) for value in values if value not in results.of(parameter)]
    if missing:
        raise CannotJudge(f"the rule needs {parameter} = {', '.join(missing)}, not measured here")


def spaced(axes: Axes, values: Sequence[float], most: int = 5) -> None:
    """A logarithmic x axis with ticks at some of the measured values, at most so many."""
    chosen = sorted(values)[:: -(-len(values) // most)]
    axes.set_xscale("log")
    axes.set_xticks(chosen, [f"{value:g}" for value in chosen])
    axes.set_xticks([], minor=True)
