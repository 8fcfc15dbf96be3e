"""The live display of a recovery."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from onelayer.recovery.trace import TraceRow


@contextmanager
def live(console: Console | None = None) -> Iterator[Callable[[TraceRow], None]]:
    """Show the latest step for as long as the context lasts; gives the function to call with it."""
    # On standard error, so that what a program prints can still be piped.
    console = console or Console(stderr=True)
    with Live(console=console, refresh_per_second=8, transient=True) as view:
        yield lambda row: view.update(_line(row))


def _line(row: TraceRow) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_row(
        f"[bold]{row.stage}[/bold]",
        f"step {row.step}",
        f"{row.heads} heads",
        f"{row.examples} examples",
        f"relative error [cyan]{row.error:.1e}[/cyan]",
        f"{row.seconds:.1f} s",
    )
    return table
