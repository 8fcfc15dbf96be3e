"""The live display of a run of claims: cells done, failed, time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from onelayer.lab.run import Progress

_LINES = 10  # that a run writes into a file instead


@contextmanager
def live(console: Console, total: int) -> Iterator[Callable[[Progress], None]]:
    """A listener for `run` that shows how far it is, for as long as the context lasts."""
    if not console.is_terminal:
        yield _lines(console)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("cells{task.fields[failed]}"),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total, failed="")

        def listen(progress: Progress) -> None:
            bar.update(
                task,
                completed=progress.done + progress.failed,
                description=progress.claim or "starting",
                failed=f", [red]{progress.failed} failed[/red]" if progress.failed else "",
            )

        yield listen


def _lines(console: Console) -> Callable[[Progress], None]:
    """A listener for logs: a line at the start and for every tenth of the cells."""
    told = -1

    def listen(progress: Progress) -> None:
        nonlocal told
        finished = progress.done + progress.failed
        part = _LINES * finished // max(1, progress.total)
        if part > told:
            told = part
            text = f"{finished} of {progress.total} cells, {progress.failed} failed"
            console.print(text, highlight=False, soft_wrap=True)

    return listen
