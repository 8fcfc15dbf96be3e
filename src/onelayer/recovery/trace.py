"""The trace of a recovery: one row per step, and the budget that is counted in rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from onelayer.data.progress import StageProgress, no_stage_progress


@dataclass(frozen=True)
class TraceRow:
    """One step of a recovery.

    Attributes
    ----------
    step : int
        Number of the row, from 0.
    stage : str
        Name of the stage that the step belongs to.
    heads : int
        Number of heads of the model; 0 while it is not known.
    examples : int
        Number of examples that the step used.
    error : float
        Relative root mean square error on these examples. In the six phases of
        ``method="sculpt"`` it is the relative error of what the phase estimated, measured as
        `note` says.
    damping : float
        Levenberg-Marquardt damping for the next step, relative to the mean curvature.
    products : int
        Products with the Gauss-Newton matrix that the step took.
    seconds : float
        Time since the recovery started.
    held_out_error : float or None
        Relative error on held-out examples, where a decision depends on it.
    note : str
        What was measured or decided, in words; empty for most steps.
    phase : int or None
        Number of the phase: 1 to 6 for those of the paper, larger for measurements between them.

    Examples
    --------
    >>> import onelayer as ol
    >>> layer = ol.AttentionLayer.random(heads=2, dim=4, seed=0)
    >>> X = ol.inputs.boolean(200, 3, 4, seed=1)
    >>> rows = []
    >>> found = ol.recover(X, layer(X), heads=2, progress=rows.append)
    >>> rows == found.trace, rows[-1].error < 1e-6
    (True, True)
    """

    step: int
    stage: str
    heads: int
    examples: int
    error: float
    damping: float
    products: int
    seconds: float
    held_out_error: float | None = None
    note: str = ""
    phase: int | None = None


@dataclass
class Log:
    """The trace so far, the budget, and the listeners of one recovery."""

    max_steps: int
    max_seconds: float | None
    listener: Callable[[TraceRow], None] | None = None  # called with every row
    report: StageProgress = no_stage_progress  # called during passes over the examples
    stage: str = ""  # the current stage, for `progress`
    rows: list[TraceRow] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def write(
        self,
        stage: str,
        heads: int,
        examples: int,
        error: float,
        *,
        damping: float = 0.0,
        products: int = 0,
        held_out_error: float | None = None,
        note: str = "",
        phase: int | None = None,
    ) -> None:
        """Append a row to the trace, and pass it to the listener."""
        place = (len(self.rows), stage, heads, examples)
        taken = (damping, products, self.seconds)
        row = TraceRow(*place, error, *taken, held_out_error, note, phase)
        self.rows.append(row)
        if self.listener is not None:
            self.listener(row)

    def progress(self, share: float) -> None:
        """Report the share of a pass over the examples that the current stage has done."""
        self.report(self.stage, share)

    @property
    def seconds(self) -> float:
        """Time since the recovery started."""
        return time.perf_counter() - self.started

    def late(self) -> bool:
        """Whether the time limit is exceeded."""
        return self.max_seconds is not None and self.seconds > self.max_seconds

    @property
    def spent(self) -> bool:
        """Whether the limit of steps or of time is reached."""
        return self.late() or len(self.rows) >= self.max_steps
