"""The trace of a recovery: one row a step, and the budget that is counted in its rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from onelayer.recovery.gauss_newton.levenberg_marquardt import SolverState
from onelayer.recovery.gauss_newton.varpro import Fit


@dataclass(frozen=True)
class TraceRow:
    """One step: which stage, on how many heads and examples, what it reached at which cost.

    `error` is the relative root mean square error on the examples of the stage; in the six phases
    it is the relative error of what the phase estimated, measured as `note` says.
    """

    step: int
    stage: str
    heads: int  # 0 while their number is not known
    examples: int
    error: float
    damping: float
    products: int
    seconds: float
    held_out_error: float | None = None  # measured where a decision rests on it
    note: str = ""


@dataclass(frozen=True)
class Measured:
    """What a phase estimated: from how many examples, with which error, in words."""

    examples: int
    error: float
    note: str


@dataclass
class Log:
    """The trace, the budget and the listener: what every stage writes to."""

    max_steps: int
    max_seconds: float | None
    listener: Callable[[TraceRow], None] | None = None
    working: Callable[[str, float], None] | None = None  # told how far a pass over the data is
    keep: Callable[[Fit], None] | None = None  # told of every fit, to keep the best of them
    stage: str = ""  # the one that is under way
    rows: list[TraceRow] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)

    def add(self, stage: str, state: SolverState, held_out_error: float | None = None) -> None:
        """A row for a state after a step or, with its held-out error, after a stage."""
        fit = state.fit
        if self.keep is not None:
            self.keep(fit)
        self._write(
            TraceRow(
                step=len(self.rows),
                stage=stage,
                heads=fit.heads,
                examples=fit.batches.examples,
                error=fit.error,
                damping=state.damping,
                products=state.products if held_out_error is None else 0,
                seconds=self.seconds,
                held_out_error=held_out_error,
            )
        )

    def measured(self, stage: str, heads: int, measured: Measured) -> None:
        """A row for a phase, or for a choice that was made."""
        count, error, note = measured.examples, measured.error, measured.note
        step, seconds = len(self.rows), self.seconds
        self._write(TraceRow(step, stage, heads, count, error, 0.0, 0, seconds, None, note))

    def passing(self, share: float) -> None:
        """A pass over the examples of the stage under way has come so far."""
        if self.working is not None:
            self.working(self.stage, share)

    def _write(self, row: TraceRow) -> None:
        self.rows.append(row)
        if self.listener is not None:
            self.listener(row)

    @property
    def seconds(self) -> float:
        """Time since the search began."""
        return time.perf_counter() - self.started

    def late(self) -> bool:
        """Whether the time is spent."""
        return self.max_seconds is not None and self.seconds > self.max_seconds

    @property
    def spent(self) -> bool:
        """Whether the budget is."""
        return self.late() or len(self.rows) >= self.max_steps
