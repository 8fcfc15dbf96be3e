"""The result of a recovery."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from onelayer import plotting
from onelayer.layer import AttentionLayer
from onelayer.plotting import Axes
from onelayer.recovery.certificate import Certificate, table_of_bars
from onelayer.recovery.reasons import Reason
from onelayer.recovery.trace import TraceRow
from onelayer.summary import Summary, number

_NAMED = 6  # stages of a plot that get a name and a colour of their own; black is for levels
_OTHER = ("0.6", ".")  # colour and marker of the rest


# Reasons to end with a layer that explains the examples, more or less exactly.
_EXPLAINED = (
    Reason.EXACT,
    Reason.NOISE_FLOOR,
    Reason.HEADS_NOT_DETERMINED,
    Reason.APPROXIMATE,
    Reason.COARSE,
)


@dataclass(frozen=True, eq=False, repr=False)
class Recovery:
    """The result of `recover` and of `query`.

    `print(found)` shows the reason, the errors, the error bars of the heads and advice; a notebook
    shows the same as a table.

    Attributes
    ----------
    layer : AttentionLayer
        The best layer found. Of all layers that agree on the span of the inputs it is the one of
        least norm.
    converged : bool
        Whether the layer explains the outputs, to rounding or to a noise floor, and the error bar
        of every head is at most `head_tol`.
    reason : Reason
        Why the search ended, with a remedy if it did not converge.
    advice : str
        What was seen in the examples and what to change, in words; may be empty.
    relative_error : float
        Root mean square error on the training examples, relative to that of the outputs (about
        their mean, if the layer may have biases).
    trace : list of TraceRow
        One row per step.
    certificate : Certificate
        Error bars of the heads, and the error on held-out examples.
    seconds : float
        Duration of the recovery.
    queries : int or None
        Number of inputs that `query` asked for; None in results of `recover`.
    scalars : int or None
        Number of output entries from which `query` found the layer, before it was checked.
    scalars_returned : int or None
        Number of all output entries that `query` was given, with those of the check.

    Examples
    --------
    >>> import onelayer as ol
    >>> layer = ol.AttentionLayer.random(heads=2, dim=4, seed=0)
    >>> X = ol.inputs.boolean(200, 3, 4, seed=1)
    >>> found = ol.recover(X, layer(X), heads=2)
    >>> print(found)  # doctest: +ELLIPSIS
    Recovery: converged in ... s, ... steps
      reason          exact: the layer explains the examples to the error asked for, or to
                      rounding
      layer           AttentionLayer(heads=2, dim=4, out_dim=4)
      ...
    """

    layer: AttentionLayer
    converged: bool
    reason: Reason
    advice: str
    relative_error: float
    trace: list[TraceRow]
    certificate: Certificate
    seconds: float
    queries: int | None = None
    scalars: int | None = None
    scalars_returned: int | None = None

    def __repr__(self) -> str:
        return self._summary().text()

    def _repr_html_(self) -> str:
        return self._summary().html()

    def _summary(self) -> Summary:
        proof, ended = self.certificate, "converged" if self.converged else "not converged"
        facts = {
            "reason": str(self.reason),
            "layer": repr(self.layer),
            "relative error": f"{number(self.relative_error)} on the examples, "
            f"{number(proof.error)} on {proof.examples} that were held out",
            "inputs": f"vary along {proof.input_rank} of {self.layer.dim} directions",
        }
        if self.queries is not None:
            facts["queries"] = (
                f"{self.queries} inputs; the layer from {self.scalars} of "
                f"{self.scalars_returned} output entries"
            )
        if self.advice or self.reason.remedy:
            facts["what to try"] = self.advice or self.reason.remedy
        title = f"Recovery: {ended} in {self.seconds:.1f} s, {len(self.trace)} steps"
        if self.reason not in _EXPLAINED:
            facts["heads"] = "without error bars, which assume a layer that explains the examples"
            return Summary(title, facts)
        return Summary(title, facts, *table_of_bars(proof))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the relative error of every step, on a logarithmic scale.

        Stages of the search differ in colour and marker. Of many stages the longest are named, and
        the one that came to the least error. Open markers are errors on held-out examples where the
        search measured them, and the dashed line is that of the certificate. Steps that only note a
        decision are left out.

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
        >>> layer = ol.AttentionLayer.random(heads=2, dim=4, seed=0)
        >>> X = ol.inputs.boolean(200, 3, 4, seed=1)
        >>> ol.recover(X, layer(X), heads=2).plot().get_xlabel()
        'step'
        """
        ax = plotting.axes_or_new(ax)
        for label, rows, (colour, marker) in self._stages():
            steps, errors = [row.step for row in rows], [row.error for row in rows]
            ax.plot(steps, errors, color=colour, marker=marker, ms=3.5, lw=1.2, label=label)
        tested = {r.step: r.held_out_error for r in self.trace if r.held_out_error is not None}
        if tested:
            at, label = (list(tested), list(tested.values())), "held-out examples"
            ax.plot(*at, "o", color="black", fillstyle="none", ms=6, label=label)
        level, label = self.certificate.error, "certificate, held out"
        if level > 0:
            ax.axhline(level, color="black", linestyle="--", linewidth=1.0, label=label)
        ax.set(yscale="log", xlabel="step", ylabel="relative error")
        ax.locator_params(axis="x", integer=True)
        plotting.legend_beside(ax)
        return ax

    def _stages(self) -> Iterator[tuple[str, list[TraceRow], tuple[str, str]]]:
        """Label, rows, and colour and marker of stages that took steps; labels are given once.

        Stages without a name of their own come last.
        """
        rows = [row for row in self.trace if row.error > 0 and not _is_note(row)]
        runs = [(stage, list(part)) for stage, part in groupby(rows, lambda row: row.stage)]
        named = _named(runs)
        labelled: set[str] = set()
        for stage, part in sorted(runs, key=lambda run: run[0] not in named):
            shown = stage if stage in named else "other stages"
            look = plotting.style(named.index(stage)) if stage in named else _OTHER
            yield shown if shown not in labelled else "", part, look
            labelled.add(shown)


def _named(runs: list[tuple[str, list[TraceRow]]]) -> list[str]:
    """The stages that a plot names, in their order: the longest, and that of the least error."""
    rows: dict[str, list[TraceRow]] = {}
    for stage, part in runs:
        rows.setdefault(stage, []).extend(part)
    best = min(rows, key=lambda stage: min(row.error for row in rows[stage]), default="")
    longest = sorted(rows, key=lambda stage: (stage != best, -len(rows[stage])))[:_NAMED]
    return [stage for stage in rows if stage in longest]


def _is_note(row: TraceRow) -> bool:
    """Whether a row reports a decision: such rows have the error of no layer at all, 1."""
    return bool(row.note) and row.error == 1.0
