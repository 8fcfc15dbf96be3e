"""Measured conditions: of one layer, and over many layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelayer import plotting
from onelayer.array.backend import NumpyArray
from onelayer.plotting import Axes
from onelayer.summary import Summary, number

_SIZE = (6.4, 3.6)  # inches of a plot
_MARGIN = "times better than needed"


@dataclass(frozen=True)
class Condition:
    """One condition on a layer.

    Attributes
    ----------
    measured : float
        Value of the layer.
    needed : float
        Bound on the measured value.
    at_least : bool
        Whether `needed` is a lower bound; otherwise it is an upper bound.
    meaning : str
        What is measured.

    Examples
    --------
    >>> Condition(measured=1.7, needed=2.0, at_least=False, meaning="norm ratio").holds
    True
    """

    measured: float
    needed: float
    at_least: bool
    meaning: str

    @property
    def holds(self) -> bool:
        """Whether the layer meets the condition."""
        return bool(_meets(self.measured, self.needed, self.at_least))

    @property
    def margin(self) -> float:
        """How many times better the layer is than needed; below 1 the condition fails."""
        return float(_margins(self.measured, self.needed, self.at_least))


@dataclass(frozen=True, eq=False)
class ConditionSurvey:
    """One condition over many layers.

    Attributes
    ----------
    values : ndarray (samples,)
        Measured values in ascending order.
    needed : float
        Bound on the measured value.
    at_least : bool
        Whether `needed` is a lower bound; otherwise it is an upper bound.

    Examples
    --------
    >>> survey = ConditionSurvey(np.array([1.0, 2, 3, 4]), needed=2.0, at_least=True)
    >>> survey.share, survey.median
    (0.75, 2.0)
    """

    values: NumpyArray
    needed: float
    at_least: bool

    @property
    def share(self) -> float:
        """Share of the layers that meet the condition."""
        return float(np.mean(_meets(self.values, self.needed, self.at_least)))

    @property
    def median(self) -> float:
        """Smallest value that half of the layers do not exceed."""
        return self.quantile(0.5)

    @property
    def margins(self) -> NumpyArray:
        """How many times better each layer is than needed."""
        return np.asarray(_margins(self.values, self.needed, self.at_least))

    def quantile(self, q: float) -> float:
        """Smallest value that a share of the layers does not exceed.

        Parameters
        ----------
        q : float
            Share of the layers, from 0 to 1.

        Returns
        -------
        float
            One of the values.

        Raises
        ------
        ValueError
            If q is not a number from 0 to 1.

        Examples
        --------
        >>> ConditionSurvey(np.array([1.0, 2, 3, 4]), needed=2.0, at_least=True).quantile(0.75)
        3.0
        """
        if not 0 <= q <= 1:
            raise ValueError(f"q is {q!r}, expected a number from 0 to 1")
        return float(np.quantile(self.values, q, method="inverted_cdf"))


class Conditions(dict[str, Condition]):
    """The conditions of one layer by name, as `conditions` returns them.

    A dict in all respects, which prints as a table and draws itself.

    Examples
    --------
    >>> import onelayer as ol
    >>> found = ol.conditions(ol.AttentionLayer.random(heads=4, dim=16))
    >>> found["scale"].holds, found.failed
    (True, [])
    """

    @property
    def failed(self) -> list[str]:
        """Names of the conditions that the layer does not meet."""
        return [name for name, condition in self.items() if not condition.holds]

    def __repr__(self) -> str:
        return self._summary(4).text()

    def _repr_html_(self) -> str:
        return self._summary(5).html()

    def _summary(self, columns: int) -> Summary:
        """A table of the first columns: meanings are too wide for a screen of text."""
        title = f"{len(self) - len(self.failed)} of {len(self)} conditions hold"
        headings = ("condition", "measured", "needed", "holds", "meaning")[:columns]
        rows = [
            (name, number(c.measured), _needed(c), "yes" if c.holds else "no", c.meaning)[:columns]
            for name, c in self.items()
        ]
        return Summary(title, {}, headings, rows, frozenset({0, 3, 4}))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw how many times better than needed the layer is, a row for every condition.

        Conditions that any layer meets, whose needed value is 0, are left out. Margins of 0 and
        infinite ones are arrows at the ends of the logarithmic axis.

        Parameters
        ----------
        ax : matplotlib axes, optional
            Where to draw; axes of a new figure if None.

        Returns
        -------
        matplotlib axes

        Raises
        ------
        ImportError
            If matplotlib is not installed.

        Examples
        --------
        >>> import onelayer as ol
        >>> ol.conditions(ol.AttentionLayer.random(heads=4, dim=16)).plot().get_xlabel()
        'times better than needed'
        """
        ax = plotting.axes_or_new(ax, _SIZE)
        shown = {name: c for name, c in self.items() if c.needed > 0}
        rows = {name: row for row, name in enumerate(shown)}
        for number_, (label, holds) in enumerate((("met", True), ("not met", False))):
            part = {rows[name]: c.margin for name, c in shown.items() if c.holds == holds}
            if part:
                plotting.margins(ax, list(part), [[m] for m in part.values()], number_, label)
        _finish(ax, list(shown))
        plotting.legend_beside(ax)
        return ax


class ConditionSurveys(dict[str, ConditionSurvey]):
    """The conditions of many layers by name, as `survey_conditions` returns them.

    A dict in all respects, which prints as a table and draws itself.

    Examples
    --------
    >>> import onelayer as ol
    >>> survey = ol.survey_conditions(heads=2, dim=8, samples=20)
    >>> survey["incoherence"].share
    1.0
    """

    def __repr__(self) -> str:
        return self._summary().text()

    def _repr_html_(self) -> str:
        return self._summary().html()

    def _summary(self) -> Summary:
        layers = max((len(survey.values) for survey in self.values()), default=0)
        headings = ("condition", "median", "least", "largest", "needed", "met by")
        rows = [
            (
                name,
                *map(number, (s.median, s.values[0], s.values[-1])),
                _needed(s),
                f"{s.share:.0%}",
            )
            for name, s in self.items()
        ]
        return Summary(f"Conditions of {layers} layers", {}, headings, rows, frozenset({0}))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw how many times better than needed the layers are: median and range.

        Rows say which share of the layers meets the condition. Conditions that any layer meets,
        whose needed value is 0, are left out.

        Parameters
        ----------
        ax : matplotlib axes, optional
            Where to draw; axes of a new figure if None.

        Returns
        -------
        matplotlib axes

        Raises
        ------
        ImportError
            If matplotlib is not installed.

        Examples
        --------
        >>> import onelayer as ol
        >>> ol.survey_conditions(heads=2, dim=8, samples=20).plot().get_xlabel()
        'times better than needed'
        """
        ax = plotting.axes_or_new(ax, _SIZE)
        shown = {name: survey for name, survey in self.items() if survey.needed > 0}
        margins = [survey.margins for survey in shown.values()]
        plotting.margins(ax, range(len(shown)), margins, 0, "median and range")
        _finish(ax, [f"{name}, {survey.share:.0%}" for name, survey in shown.items()])
        plotting.legend_beside(ax)
        return ax


def _finish(ax: Axes, names: list[str]) -> None:
    """Name the rows, and mark what is needed."""
    ax.axvline(1.0, color="black", linestyle=":", linewidth=1, label="needed")
    ax.set_yticks(range(len(names)), names)
    ax.set_ylim(len(names) - 0.5, -0.5)
    ax.set(xscale="log", xlabel=_MARGIN)


def _meets(measured: Any, needed: float, at_least: bool) -> Any:
    return measured >= needed if at_least else measured <= needed


def _margins(measured: Any, needed: float, at_least: bool) -> Any:
    """Measured over needed or, of an upper bound, the other way round; a ratio to 0 is infinite."""
    part, whole = (measured, needed) if at_least else (needed, measured)
    part, whole = np.broadcast_arrays(np.asarray(part, float), np.asarray(whole, float))
    return np.divide(part, whole, out=np.full(part.shape, math.inf), where=whole > 0)


def _needed(condition: Condition | ConditionSurvey) -> str:
    return f"{'>=' if condition.at_least else '<='} {condition.needed:g}"
