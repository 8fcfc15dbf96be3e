"""The live display of a recovery."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from onelayer.recovery.trace import TraceRow


@dataclass
class Display:
    """Shows the latest row of the trace, and the progress of passes over the examples."""

    view: Live
    plan: str = ""  # the estimate of memory and time, where the trace has one, stays visible

    def __call__(self, row: TraceRow) -> None:
        if row.stage == "plan":
            self.plan = row.note
        self._show(
            f"[bold]{row.stage}[/bold]",
            f"step {row.step}",
            f"{row.heads or '?'} heads",
            f"{row.examples} examples",
            f"relative error [cyan]{row.error:.1e}[/cyan]",
            _Clock(row.seconds),
        )

    def report(self, stage: str, share: float) -> None:
        """Show the share of a pass over the examples that a stage has done."""
        self._show(f"[bold]{stage}[/bold]", f"{share:.0%} of the examples")

    def _show(self, *cells: str | _Clock) -> None:
        line = Table.grid(padding=(0, 2))
        line.add_row(*cells)
        self.view.update(Group(Text(self.plan, style="dim"), line) if self.plan else line)


@contextmanager
def live(console: Console | None = None) -> Iterator[Display]:
    """A display for as long as the context lasts."""
    # On standard error, so that what a program prints can still be piped.
    console = console or Console(stderr=True)
    with Live(console=console, refresh_per_second=8, transient=True) as view:
        yield Display(view)


@dataclass(frozen=True)
class _Clock:
    """Elapsed seconds, updated with every refresh: large steps take minutes."""

    seconds: float
    seen: float = field(default_factory=lambda: monotonic())

    def __rich__(self) -> Text:
        return Text(f"{self.seconds + monotonic() - self.seen:.1f} s")
