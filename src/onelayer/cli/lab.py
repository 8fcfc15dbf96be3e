"""The commands `onelayer claims list | run | show`, `onelayer report` and `onelayer export`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from onelayer.cli.progress import live
from onelayer.cli.terminal import err, fail, out
from onelayer.io.safetensors_files import write_whole
from onelayer.lab import claims as registry
from onelayer.lab import export as exporting
from onelayer.lab import figures, outcomes
from onelayer.lab import report as reporting
from onelayer.lab.claim import SIZES, Claim, Size
from onelayer.lab.run import Plan, run
from onelayer.lab.store import Store

claims = typer.Typer(
    no_args_is_help=True, help="The claims of both papers as experiments with a verdict."
)

StoreOption = Annotated[
    Path, typer.Option("--store", metavar="FILE", help="The file that holds what was measured.")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="Small sizes: seconds each.")]
PaperOption = Annotated[
    bool, typer.Option("--paper", help="The papers' sizes, or large ones: up to hours.")
]
_STORE = Path("onelayer-lab.sqlite")
_LONG = 3000  # characters of an error that are shown
_COLOURS = {"holds": "green", "fails": "red", "undecided": "yellow"}


@claims.command("list")
def list_claims() -> None:
    """List all claims, with the number of cells that each has at every size.

    Example:

        onelayer claims list
    """
    table = Table(title="Claims, with their cells by size", title_justify="left")
    table.add_column("name", no_wrap=True)
    table.add_column("claim")
    for size in SIZES:
        table.add_column(size, justify="right")
    for source, group in groupby(registry.known().values(), key=lambda claim: claim.source):
        table.add_row("", f"[bold]{escape(source)}")
        for claim in group:
            counts = [str(len(list(claim.cells(claim.settings(size))))) for size in SIZES]
            kind = "" if claim.kind == "claim" else " [dim](conjecture)"
            table.add_row(claim.name, escape(claim.title) + kind, *counts)
        table.add_section()
    out.print(table)


@claims.command()
def show(
    name: Annotated[str, typer.Argument(help="The name of a claim.")],
    store: StoreOption = _STORE,
) -> None:
    """Show what a claim predicts, how it is judged, its settings, and what was measured so far.

    Example:

        onelayer claims show sample-size
    """
    with _plain_errors():
        (claim,) = registry.named([name])
        entries = outcomes.of_last_runs(Store(store), [claim]) if store.exists() else []
    out.print(Text(claim.title, style="bold"), sep="\n")
    out.print(Text(f"{claim.source}, {claim.kind}\n", style="dim"))
    out.print(Text(f"Predicted: {claim.prediction}\n"), Text(f"Rule: {claim.rule}\n"), sep="\n")
    table = Table(title="Settings (--set NAME=VALUE,..)", title_justify="left")
    table.add_column("name", no_wrap=True)
    for size in SIZES:
        table.add_column(size)
    settings = [claim.settings(size) for size in SIZES]
    for setting in settings[0]:
        table.add_row(setting, *(escape(_shown(values[setting])) for values in settings))
    out.print(table)
    for entry in entries:
        _print_verdict(entry)


@claims.command("run")
def run_claims(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Claims, by default all.")
    ] = None,
    quick: QuickOption = False,
    paper: PaperOption = False,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE,..",
            help="Change a setting (see show), for all claims that are run.",
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes, by default one a core.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="The scheduler of a Dask cluster.")
    ] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Measure cells again that failed.")
    ] = False,
    store: StoreOption = _STORE,
) -> None:
    """Measure claims and print their verdicts.

    What is in the file already is not measured again: after an interruption the same command goes
    on. The exit status is 0 if all cells were measured, whatever the verdicts; 1 if some failed; 2
    if something is wrong with the call.

    Examples:

        onelayer claims run --quick

        onelayer claims run sample-size keys --set seeds=2 --set dim=8

        onelayer claims run --paper --cluster tcp://scheduler:8786
    """
    if workers is not None and cluster is not None:
        fail("--workers are of this machine and --cluster has its own, expected one of the two")
    with _plain_errors():
        _check_folder(store)
        size = _size(quick, paper)
        plans = [
            Plan(claim, size, _changes(changes or [], claim))
            for claim in registry.named(names or [])
        ]
        planned = [cell for plan in plans for cell in plan.cells]
    try:
        with _plain_errors(), live(err, len(planned)) as listener:
            progress = run(
                plans,
                Store(store),
                workers=workers or _cores(),
                cluster=cluster,
                retry_failed=retry_failed,
                progress=listener,
            )
    except KeyboardInterrupt:
        fail(f"interrupted; what is finished is in {store}: the same command goes on", code=130)
    with _plain_errors():
        entries = outcomes.of_plans(Store(store), plans)
    out.print(_verdicts(entries))
    if progress.failed:
        told = f"{progress.failed} of {progress.total} cells failed"
        fail(f"{told}: onelayer claims show NAME says why, --retry-failed tries again", code=1)


def report(
    output: Annotated[
        Path, typer.Option("--output", "-o", help="An .html file, or .md for the table alone.")
    ] = Path("onelayer-report.html"),
    quick: QuickOption = False,
    paper: PaperOption = False,
    figures_folder: Annotated[
        Path | None,
        typer.Option(
            "--figures",
            metavar="FOLDER",
            help="Write the figures of all verdicts, as .pdf and .svg.",
        ),
    ] = None,
    store: StoreOption = _STORE,
) -> None:
    """Write a page with the verdict, figure and cells of every claim that was run.

    Each claim is shown as it was run last; --quick and --paper choose the size instead. The page
    is one file that needs no network.

    Examples:

        onelayer report

        onelayer report -o docs/results.md --figures figures/
    """
    with _plain_errors():
        suffix = output.suffix.lower()
        if suffix not in (".html", ".md"):
            raise ValueError(f"{output} ends in {output.suffix!r}, expected .html or .md")
        _check_folder(output)
        if figures_folder is not None:
            figures_folder.mkdir(parents=True, exist_ok=True)
        chosen = Store(store)
        known = list(registry.known().values())
        if quick or paper:
            entries = outcomes.of_plans(chosen, [Plan(c, _size(quick, paper)) for c in known])
        else:
            entries = outcomes.of_last_runs(chosen, known)
        if not entries:
            raise ValueError(f"{store} holds no claims: onelayer claims run measures some")
        text = (
            reporting.markdown(entries)
            if suffix == ".md"
            else reporting.page(entries, outcomes.about(chosen))
        )
        write_whole(output, text.encode())
        if figures_folder is not None:
            _write_figures(entries, figures_folder)
    out.print(_verdicts(entries))
    out.print(f"Wrote {escape(str(output))}.", highlight=False, soft_wrap=True)


def export(
    output: Annotated[Path, typer.Option("--output", "-o", help="A .csv or .parquet file.")],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME]...", help="Claims, by default all.")
    ] = None,
    store: StoreOption = _STORE,
) -> None:
    """Write every measured cell, a row each, for other programs.

    Examples:

        onelayer export -o cells.csv

        onelayer export noise -o noise.parquet
    """
    with _plain_errors():
        _check_folder(output)
        wanted = {claim.name for claim in registry.named(names or [])}
        records = [r for r in Store(store).results() if r.claim in wanted or not names]
        exporting.write(records, output)
    text = f"Wrote {len(records)} cells to {escape(str(output))}."
    out.print(text, highlight=False, soft_wrap=True)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """What the caller or the machine got wrong, as a line instead of a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, ImportError) as error:
        fail(str(error))


def _check_folder(output: Path) -> None:
    """Before the work rather than after it."""
    if not output.parent.is_dir():
        raise ValueError(f"{output.parent} is no folder, expected one to write {output.name} to")


def _size(quick: bool, paper: bool) -> Size:
    if quick and paper:
        raise ValueError("got --quick and --paper, expected one of the two")
    return "quick" if quick else "paper" if paper else "default"


def _cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _changes(texts: Sequence[str], claim: Claim) -> dict[str, Any]:
    """Changed settings from NAME=VALUE,.. with the types of the claim's own."""
    found: dict[str, Any] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator:
            raise ValueError(f"got --set {text}, expected NAME=VALUE or NAME=VALUE,VALUE")
        parts = [_value(part) for part in re.split(r",(?![^{]*\})", value)]  # not within f_{1,2}
        found[name] = parts if len(parts) > 1 else parts[0]
    claim.settings("default", found)  # refuses what it does not know
    return found


def _value(text: str) -> Any:
    """A number, true, false or null as in JSON; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _verdicts(entries: Sequence[outcomes.Entry]) -> Table:
    table = Table(title="Verdicts", title_justify="left")
    for column in ("claim", "size", "verdict", "checks", "what was measured"):
        table.add_column(column, no_wrap=column != "what was measured")
    for entry in entries:
        verdict = entry.verdict
        held = sum(check.holds for check in verdict.checks)
        table.add_row(
            entry.claim.name,
            entry.size,
            f"[{_COLOURS[verdict.outcome]}]{verdict.outcome}",
            f"{held}/{len(verdict.checks)}" if verdict.checks else "",
            escape(_told(entry)),
        )
    return table


def _told(entry: outcomes.Entry) -> str:
    """What is missing, what does not hold, or else the first thing that does."""
    verdict = entry.verdict
    if not verdict.checks:
        return verdict.why
    worst = [check for check in verdict.checks if not check.holds] or verdict.checks[:1]
    return "; ".join(f"{check.statement}: {check.measured}" for check in worst)


def _print_verdict(entry: outcomes.Entry) -> None:
    table = Table(
        title=f"Measured at size {entry.size}: {entry.verdict.outcome}",
        title_justify="left",
        caption=escape(entry.verdict.why) or None,
    )
    for column in ("check", "measured", "holds"):
        table.add_column(column)
    for check in entry.verdict.checks:
        mark = "[green]yes" if check.holds else "[red]no"
        table.add_row(escape(check.statement), escape(check.measured), mark)
    out.print(table)
    errors = [cell for cell in entry.cells if cell.status == "failed"]
    for cell in errors[:3]:
        told = cell.error if len(cell.error) <= _LONG else f"... {cell.error[-_LONG:]}"
        out.print(Text(f"Failed at {dict(cell.parameters)}:\n{told}", style="red"))
    if len(errors) > 3:
        out.print(f"and {len(errors) - 3} more that failed")


def _write_figures(entries: Sequence[outcomes.Entry], folder: Path) -> None:
    for entry in entries:
        if not entry.verdict.checks:
            continue
        try:
            drawn = {
                kind: figures.render(entry.claim, entry.results, kind) for kind in figures.FORMATS
            }
        except ImportError:
            raise
        except Exception as error:  # one claim with odd settings must not cost the others
            text = f"no figure of {entry.claim.name}: {type(error).__name__}: {error}"
            err.print(escape(text), highlight=False, soft_wrap=True)
            continue
        for kind, content in drawn.items():
            write_whole(folder / f"{entry.claim.name}.{kind}", content)
