"""The commands `onelayer claims list | run | show`, `onelayer report` and `onelayer export`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import progress as bars
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table
from rich.text import Text
from typer import Argument, Option

from onelayer.cli.terminal import (
    Command,
    Commands,
    check_folder,
    err,
    fail,
    out,
    plain_errors,
    say,
)
from onelayer.io.safetensors_files import write_whole
from onelayer.lab import claims as registry
from onelayer.lab import export as exporting
from onelayer.lab import figures, outcomes
from onelayer.lab import report as reporting
from onelayer.lab.claim import SIZES, Claim, Size
from onelayer.lab.outcomes import Entry
from onelayer.lab.run import Plan, Tally, run
from onelayer.lab.store import Store

claims: typer.Typer = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="The claims of both papers as experiments with a verdict.",
)

Names = Annotated[list[str] | None, Argument(metavar="[NAME]...", help="Claims; default: all.")]
StoreFile = Annotated[Path, Option("--store", metavar="FILE", help="File of the measurements.")]
Quick = Annotated[bool, Option("--quick", help="Small sizes: seconds for each claim.")]
Paper = Annotated[bool, Option("--paper", help="Sizes as in the papers, or large: up to hours.")]
_SET = "Change a setting (see show) of all claims that are run."
Changes = Annotated[list[str] | None, Option("--set", metavar="NAME=VALUE,..", help=_SET)]
Cluster = Annotated[str | None, Option(metavar="ADDRESS", help="Scheduler of a Dask cluster.")]
RetryFailed = Annotated[bool, Option("--retry-failed", help="Measure failed cells again.")]
ReportFile = Annotated[
    Path, Option("--output", "-o", help="An .html file, or .md or .txt for a table.")
]
_FIGURES = "Write the figures of all verdicts, as .pdf and .svg."
FiguresFolder = Annotated[Path | None, Option("--figures", metavar="FOLDER", help=_FIGURES)]
ExportFile = Annotated[
    Path, Option("--output", "-o", help="A .parquet file, or .csv or .txt for text.")
]

_STORE = Path("onelayer-lab.sqlite")
_TEXT = (".md", ".txt")  # names of files for a table in Markdown
_LONG = 3000  # characters of an error that are shown
_ERRORS = 3  # errors that are shown
_LINES = 10  # lines of a log
_COLOURS = {"holds": "green", "fails": "red", "undecided": "yellow"}


@claims.command("list", cls=Command)
def list_claims() -> None:
    """List all claims, with the number of cells at each size.

    Example:

        onelayer claims list
    """
    names, counts = Column("name", no_wrap=True), (Column(s, justify="right") for s in SIZES)
    title = "Claims, with their cells by size"
    table = Table(names, "claim", *counts, title=title, title_justify="left")
    for source, group in groupby(registry.known().values(), key=lambda claim: claim.source):
        table.add_row("", f"[bold]{escape(source)}")
        for claim in group:
            sizes = [str(len(list(claim.cells(claim.settings(size))))) for size in SIZES]
            kind = "" if claim.kind == "claim" else " [dim](conjecture)"
            table.add_row(claim.name, escape(claim.title) + kind, *sizes)
        table.add_section()
    out.print(table)


@claims.command(cls=Command)
def show(
    name: Annotated[str, Argument(help="The name of a claim.")],
    store: StoreFile = _STORE,
) -> None:
    """Show the prediction, the rule, the settings and the measurements of a claim.

    Example:

        onelayer claims show sample-size
    """
    with plain_errors():
        (claim,) = registry.named([name])
        entries = outcomes.of_last_runs(Store(store), [claim]) if store.exists() else []
    out.print(Text(claim.title, style="bold"), sep="\n")
    out.print(Text(f"{claim.source}, {claim.kind}\n", style="dim"))
    out.print(Text(f"Predicted: {claim.prediction}\n"), Text(f"Rule: {claim.rule}\n"), sep="\n")
    name_column, title = Column("name", no_wrap=True), "Settings (--set NAME=VALUE,..)"
    table = Table(name_column, *SIZES, title=title, title_justify="left")
    for setting in claim.settings("quick"):
        values = [claim.settings(size)[setting] for size in SIZES]
        texts = [", ".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for v in values]
        table.add_row(setting, *map(escape, texts))
    out.print(table)
    for entry in entries:
        _print_entry(entry)


@claims.command("run", cls=Command)
def run_claims(
    names: Names = None,
    quick: Quick = False,
    paper: Paper = False,
    changes: Changes = None,
    workers: Annotated[int | None, Option(min=1, help="Processes; default: one per core.")] = None,
    cluster: Cluster = None,
    retry_failed: RetryFailed = False,
    store: StoreFile = _STORE,
) -> None:
    """Measure claims and print their verdicts.

    Cells that are in the file already are not measured again. After an interruption the same
    command continues. The exit status is 0 if all cells were measured, for any verdicts, 1 if some
    failed, and 2 if something is wrong with the call.

    Examples:

        onelayer claims run --quick

        onelayer claims run sample-size keys --set seeds=2 --set dim=8

        onelayer claims run --paper --cluster tcp://scheduler:8786
    """
    if workers is not None and cluster is not None:
        fail("--workers are of this machine and --cluster has its own, expected one of the two")
    with plain_errors(f"interrupted; what is finished is in {store}: the same command continues"):
        check_folder(store)
        size = _size(quick, paper)
        chosen = registry.named(names or [])
        plans = [Plan(claim, size, _settings(changes or [], claim)) for claim in chosen]
        if workers is None:  # as many as the cores that this process may use
            allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
            workers = len(allowed(0))
        with live_progress(err, sum(len(plan.cells) for plan in plans)) as progress:
            tally = run(
                plans,
                Store(store),
                workers=workers,
                cluster=cluster,
                retry_failed=retry_failed,
                progress=progress,
            )
        entries = outcomes.of_plans(Store(store), plans)
    out.print(_verdicts(entries))
    if tally.failed:
        failed = f"{tally.failed} of {tally.total} cells failed"
        fail(f"{failed}: onelayer claims show NAME says why, --retry-failed tries again", code=1)


def report(
    output: ReportFile = Path("onelayer-report.html"),
    quick: Quick = False,
    paper: Paper = False,
    figures_folder: FiguresFolder = None,
    store: StoreFile = _STORE,
) -> None:
    """Write a page with the verdict, figure and cells of every claim that was run.

    Each claim is shown as it was run last; --quick and --paper choose the size instead. The page
    is one file that needs no network.

    Examples:

        onelayer report

        onelayer report -o results.md --figures figures/
    """
    with plain_errors():
        suffix = output.suffix.lower()
        if suffix not in (".html", *_TEXT):
            expected = ", ".join((".html", *_TEXT))
            raise ValueError(f"{output} ends in {output.suffix!r}, expected one of {expected}")
        check_folder(output)
        if figures_folder is not None:
            figures_folder.mkdir(parents=True, exist_ok=True)
        chosen, known = Store(store), list(registry.known().values())
        if quick or paper:
            entries = outcomes.of_plans(chosen, [Plan(c, _size(quick, paper)) for c in known])
        else:
            entries = outcomes.of_last_runs(chosen, known)
        if not entries:
            raise ValueError(f"{store} holds no claims: onelayer claims run measures some")
        if suffix in _TEXT:
            text = reporting.markdown(entries)
        else:
            text = reporting.page(entries, outcomes.about(chosen))
        write_whole(output, text.encode())
        if figures_folder is not None:
            _write_figures(entries, figures_folder)
    out.print(_verdicts(entries))
    say(f"Wrote {output}.")


def export(output: ExportFile, names: Names = None, store: StoreFile = _STORE) -> None:
    """Write every measured cell as a row of a table, for other programs.

    Examples:

        onelayer export -o cells.csv

        onelayer export noise -o noise.parquet
    """
    with plain_errors():
        check_folder(output)
        wanted = {claim.name for claim in registry.named(names or [])}
        cells = [c for c in Store(store).results() if c.claim in wanted or not names]
        exporting.write(cells, output)
    say(f"Wrote {len(cells)} cells to {output}.")


@contextmanager
def live_progress(console: Console, total: int) -> Iterator[Callable[[Tally], None]]:
    """A `progress` for `run`: live on a terminal, a line for each tenth of the cells in a log."""
    if not console.is_terminal:
        last = -1

        def log(tally: Tally) -> None:
            nonlocal last
            finished = tally.done + tally.failed
            part = _LINES * finished // max(1, tally.total)
            if part > last:
                last = part
                say(f"{finished} of {tally.total} cells, {tally.failed} failed", console)

        yield log
        return
    name, failures = "{task.description}", "cells{task.fields[failed]}"
    done = bars.SpinnerColumn(), name, bars.BarColumn(), bars.MofNCompleteColumn(), failures
    times = bars.TimeElapsedColumn(), "left:", bars.TimeRemainingColumn()
    with bars.Progress(*done, *times, console=console, transient=True) as display:
        task = display.add_task("starting", total=total, failed="")

        def show(tally: Tally) -> None:
            failed = f", [red]{tally.failed} failed[/red]" if tally.failed else ""
            finished, claim = tally.done + tally.failed, tally.claim or "starting"
            display.update(task, completed=finished, description=claim, failed=failed)

        yield show


def _size(quick: bool, paper: bool) -> Size:
    if quick and paper:
        raise ValueError("got --quick and --paper, expected one of the two")
    return "quick" if quick else "paper" if paper else "default"


def _settings(texts: Sequence[str], claim: Claim) -> dict[str, Any]:
    """Changed settings from NAME=VALUE,.. texts, checked against those of the claim."""
    found: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"got --set {text}, expected NAME=VALUE or NAME=VALUE,VALUE")
        parts: list[Any] = re.split(r",(?![^{]*\})", value)  # not within f_{1,2}
        for i, part in enumerate(parts):
            with suppress(ValueError):  # text that is not JSON stays text
                parts[i] = json.loads(part)
        found[name] = parts if len(parts) > 1 else parts[0]
    claim.settings("default", found)  # refuses unknown names and types
    return found


def _verdicts(entries: Sequence[Entry]) -> Table:
    columns = (Column(name, no_wrap=True) for name in ("claim", "size", "verdict", "checks"))
    table = Table(*columns, "what was measured", title="Verdicts", title_justify="left")
    for entry in entries:
        verdict = entry.verdict
        held = sum(check.holds for check in verdict.checks)
        # What is missing, what does not hold, or else the first check that holds.
        shown = [check for check in verdict.checks if not check.holds] or verdict.checks[:1]
        table.add_row(
            entry.claim.name,
            entry.size,
            f"[{_COLOURS[verdict.outcome]}]{verdict.outcome}",
            f"{held}/{len(verdict.checks)}" if verdict.checks else "",
            escape("; ".join(f"{c.statement}: {c.measured}" for c in shown) or verdict.why),
        )
    return table


def _print_entry(entry: Entry) -> None:
    title = f"Measured at size {entry.size}: {entry.verdict.outcome}"
    why = escape(entry.verdict.why) or None
    table = Table("check", "measured", "holds", title=title, title_justify="left", caption=why)
    for check in entry.verdict.checks:
        mark = "[green]yes" if check.holds else "[red]no"
        table.add_row(escape(check.statement), escape(check.measured), mark)
    out.print(table)
    failed = [cell for cell in entry.cells if cell.status == "failed"]
    for cell in failed[:_ERRORS]:
        error = cell.error if len(cell.error) <= _LONG else f"... {cell.error[-_LONG:]}"
        out.print(Text(f"Failed at {dict(cell.parameters)}:\n{error}", style="red"))
    if len(failed) > _ERRORS:
        out.print(f"and {len(failed) - _ERRORS} more that failed")


def _write_figures(entries: Sequence[Entry], folder: Path) -> None:
    for entry in entries:
        if not entry.verdict.checks:
            continue
        claim, results = entry.claim, entry.results
        try:
            drawn = {kind: figures.render(claim, results, kind) for kind in figures.FORMATS}
        except ImportError:
            raise
        except Exception as error:  # unusual settings of one claim must not stop the others
            say(f"no figure of {claim.name}: {type(error).__name__}: {error}", err)
            continue
        for kind, content in drawn.items():
            write_whole(folder / f"{claim.name}.{kind}", content)
