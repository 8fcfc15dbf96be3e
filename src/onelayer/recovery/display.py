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
    """Shows the latest step of a recovery: called with every row, and during passes over data.

    What it is expected to take, where the trace says so, stays in sight.
    """

    view: Live
    plan: str = ""

    def __call__(self, row: TraceRow) -> None:
        if row.stage == "plan":
            self.plan = row.note
        self._show(_line(row))

    def working(self, stage: str, share: float) -> None:
        """How far a stage is that goes through the examples."""
        table = Table.grid(padding=(0, 2))
        table.add_row(f"[bold]{stage}[/bold]", f"{share:.0%} of the way through the examples")
        self._show(table)

    def _show(self, line: Table) -> None:
        self.view.update(Group(Text(self.plan, style="dim"), line) if self.plan else line)


@contextmanager
def live(console: Console | None = None) -> Iterator[Display]:
    """A display for as long as the context lasts."""
    # On standard error, so that what a program prints can still be piped.
    console = console or Console(stderr=True)
    with Live(console=console, refresh_per_second=8, transient=True) as view:
        yield Display(view)


def _line(row: TraceRow) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(
        f"[bold]{row.stage}[/bold]",
        f"step {row.step}",
        f"{row.heads or '?'} heads",
        f"{row.examples} examples",
        f"relative error [cyan]{row.error:.1e}[/cyan]",
        _Clock(row.seconds),
    )
    return table


@dataclass(frozen=True)
class _Clock:
    """Seconds that go on with every refresh: large steps take their time."""

    seconds: float
    seen: float = field(default_factory=lambda: monotonic())

    def __rich__(self) -> Text:
        return Text(f"{self.seconds + monotonic() - self.seen:.1f} s")
