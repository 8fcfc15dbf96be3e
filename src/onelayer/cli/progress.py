"""The live display of a run of claims: cells done, failed, time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console

from onelayer.lab.run import Tally

_LINES = 10  # lines of a log


@contextmanager
def live(console: Console, total: int) -> Iterator[Callable[[Tally], None]]:
    """A `progress` for `run`, which shows the numbers of cells while the context lasts."""
    if not console.is_terminal:
        yield _log(console)
        return
    columns = (
        bars.SpinnerColumn(),
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.MofNCompleteColumn(),
        bars.TextColumn("cells{task.fields[failed]}"),
        bars.TimeElapsedColumn(),
        bars.TextColumn("left:"),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=console, transient=True) as display:
        task = display.add_task("starting", total=total, failed="")

        def show(tally: Tally) -> None:
            display.update(
                task,
                completed=tally.done + tally.failed,
                description=tally.claim or "starting",
                failed=f", [red]{tally.failed} failed[/red]" if tally.failed else "",
            )

        yield show


def _log(console: Console) -> Callable[[Tally], None]:
    """A `progress` for logs: a line at the start and for every tenth of the cells."""
    last = -1

    def show(tally: Tally) -> None:
        nonlocal last
        finished = tally.done + tally.failed
        part = _LINES * finished // max(1, tally.total)
        if part > last:
            last = part
            text = f"{finished} of {tally.total} cells, {tally.failed} failed"
            console.print(text, highlight=False, soft_wrap=True)

    return show
