"""Does `recover` ever converge to a wrong layer?

`bars` recovers layers from examples of many kinds: badly scaled, nearly flat, repeated, rounded,
noisy (families.py). It compares the true errors of every head with the error bars of the
certificate. A converged run is wrong if the error of a head exceeds three times its bar and 1 %.
`models` runs `recover` on examples that no layer of the model explains, none of which may converge,
and on equally many noisy examples of a layer, of which 95 % should (misfits.py).

    python benchmarks/certainty.py bars --out build/bars.jsonl          # 1,000 runs, half an hour
    python benchmarks/certainty.py models --out build/models.jsonl      # 200 runs of each kind
    python benchmarks/certainty.py bars --runs 8 --dims 4 --max-seconds 1
    python benchmarks/certainty.py models --runs 3 --dims 4 --examples 60 90 --max-seconds 1

Every run is a function of its number. `--out` writes one JSON line per run, and runs with the same
settings that are already in the file are not repeated. Use a new file after a change of the
package: the records do not contain the version.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import families
import misfits
import numpy as np
from rich.console import Console
from rich.table import Table
from trials import Record, attempt, numbers, run_all

BARS_TO_EXCEED, ERROR_TO_EXCEED = 3.0, 0.01  # a converged head beyond both is wrong
HEAD_TOL = 0.1  # the default of `recover`: bars above it keep a run from converging
MEASURABLE = 1e-9  # smaller errors are rounding, and their ratio to a bar has no meaning
EXPLAINED = ("EXACT", "NOISE_FLOOR", "APPROXIMATE", "HEADS_NOT_DETERMINED")
INTERRUPTED = 130  # the usual exit status after an interrupt
JOBS = {"bars": 1000, "models": 200}
DIMS = {"bars": families.DIMS, "models": misfits.DIMS}


def main() -> None:
    options = arguments()
    dims = tuple(options.dims or DIMS[options.job])
    settings: Record = {"job": options.job, "dims": list(dims), "max_seconds": options.max_seconds}
    if options.job == "bars":
        trial = partial(bars_trial, dims=dims, max_seconds=options.max_seconds)
        runs = range(options.runs)
    else:
        settings["examples"] = options.examples
        trial = partial(
            models_trial,
            dims=dims,
            examples=tuple(options.examples),
            max_seconds=options.max_seconds,
        )
        runs = range(2 * options.runs)
    records = run_all(trial, runs, settings, options.out, options.jobs)
    for table in bars_tables(records) if options.job == "bars" else models_tables(records):
        Console().print(table)
    if len(records) < len(runs):
        sys.exit(INTERRUPTED)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--runs", type=int, help="1,000 for bars, 200 of each kind for models")
    parser.add_argument("--dims", nargs="+", type=int, help="dimensions of a token to draw from")
    parser.add_argument("--examples", nargs=2, type=int, default=list(misfits.EXAMPLES))
    parser.add_argument("--max-seconds", type=float, default=None, help="time limit of a run")
    parser.add_argument("--jobs", type=int, default=2, help="processes, each with one thread")
    parser.add_argument("--out", type=Path, help="file of JSON lines, one per run")
    options = parser.parse_args()
    options.runs = JOBS[options.job] if options.runs is None else options.runs
    return options


def bars_trial(run: int, dims: tuple[int, ...], max_seconds: float | None) -> Record:
    return attempt(families.problem(run, dims), run, max_seconds)


def models_trial(
    run: int, dims: tuple[int, ...], examples: tuple[int, int], max_seconds: float | None
) -> Record:
    """A misfit for even runs, a right model for odd runs."""
    draw = misfits.right if run % 2 else misfits.misfit
    return attempt(draw(run // 2, dims=dims, examples=examples), run, max_seconds)


# Statistics of records


def is_wrong(record: Record) -> bool:
    """Whether a run has converged although the error of a head far exceeds its bar."""
    if not record["converged"] or "attention_error" not in record:
        return False
    return any(
        np.any((error > BARS_TO_EXCEED * bar) & (error > ERROR_TO_EXCEED))
        for error, bar in (errors_and_bars([record], name) for name in ("attention", "projection"))
    )


def errors_and_bars(records: Iterable[Record], name: str) -> tuple[Any, Any]:
    """True errors and bars of all heads of all records, as two arrays."""
    compared = [r for r in records if f"{name}_error" in r]
    errors = [numbers(r[f"{name}_error"]) for r in compared]
    bars = [numbers(r[f"{name}_bar"]) for r in compared]
    return np.concatenate([[], *errors]), np.concatenate([[], *bars])


def coverage(records: Iterable[Record]) -> tuple[int, list[str], list[str]]:
    """Number of heads with finite bars, shares of heads within their bars, quantiles of bar/error.

    The shares are for attention, projection and both; the quantiles are 5, 50 and 95 %.
    """
    records = list(records)
    attention, attention_bar = errors_and_bars(records, "attention")
    projection, projection_bar = errors_and_bars(records, "projection")
    sure = np.isfinite(attention_bar) & np.isfinite(projection_bar)
    within = [(attention <= attention_bar)[sure], (projection <= projection_bar)[sure]]
    shares = [*within, within[0] & within[1]]
    error = np.concatenate([attention[sure], projection[sure]])
    bar = np.concatenate([attention_bar[sure], projection_bar[sure]])
    seen = (error > MEASURABLE) & np.isfinite(error)
    ratios = bar[seen] / error[seen]
    quantiles = np.quantile(ratios, [0.05, 0.5, 0.95]) if len(ratios) else []
    return int(sure.sum()), [percent(share) for share in shares], [f"{q:.3g}" for q in quantiles]


def percent(share: Any) -> str:
    return f"{100 * np.mean(share):.1f} %" if len(share) else "-"


def reasons(records: Iterable[Record]) -> str:
    """How often each reason occurs among runs that did not converge."""
    counts = Counter(r["reason"] for r in records if not r["converged"])
    return ", ".join(f"{count} {name.lower()}" for name, count in counts.most_common())


def seconds(records: Iterable[Record], of: Any = np.median) -> str:
    return f"{of([r['seconds'] for r in records]):.2g}"


def grouped(records: Iterable[Record], key: str) -> dict[str, list[Record]]:
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record[key], []).append(record)
    return groups


def count_converged(records: Iterable[Record]) -> int:
    return sum(r["converged"] for r in records)


# Tables


def table_of(title: str, *columns: str) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in LEFT else "right")
    return table


LEFT = ("runs of", "family", "kind", "departures", "reason", "reasons of refusals")


def bars_tables(records: list[Record]) -> list[Table]:
    return [
        outcome_table(records),
        coverage_table(records),
        family_table(records),
        wrong_table(records),
    ]


def outcome_table(records: list[Record]) -> Table:
    table = table_of(f"Outcomes of {len(records)} runs", "reason", "converged", "refused")
    for reason, group in sorted(grouped(records, "reason").items()):
        good = count_converged(group)
        table.add_row(reason.lower(), str(good), str(len(group) - good))
    good = count_converged(records)
    table.add_row("all", str(good), str(len(records) - good))
    return table


def coverage_table(records: list[Record]) -> Table:
    table = table_of(
        "Heads whose true error is at most its bar",
        *("runs of", "heads", "attention", "projection", "both"),
        *("bar/error, 5 %", "median", "95 %"),
    )
    sets = {
        "converged": [r for r in records if r["converged"]],
        "explained, finite bars": [r for r in records if r["reason"] in EXPLAINED],
    }
    for name, chosen in sets.items():
        heads, shares, quantiles = coverage(chosen)
        table.add_row(name, str(heads), *shares, *(quantiles or ["-"] * 3))
    return table


def family_table(records: list[Record]) -> Table:
    table = table_of(
        "By family: coverage of attention and projection in converged runs",
        *("family", "runs", "converged", "wrong", "coverage", "seconds", "reasons of refusals"),
    )
    for family, group in sorted(grouped(records, "family").items()):
        _, shares, _ = coverage(r for r in group if r["converged"])
        counts = [len(group), count_converged(group), sum(map(is_wrong, group))]
        table.add_row(family, *map(str, counts), shares[-1], seconds(group), reasons(group))
    return table


def wrong_table(records: list[Record]) -> Table:
    wrong = [r for r in records if is_wrong(r)]
    table = table_of(
        f"Converged and wrong: {len(wrong)}",
        *("run", "departures", "reason", "attention", "bar", "projection", "bar"),
    )
    names = ("attention_error", "attention_bar", "projection_error", "projection_bar")
    for r in wrong:
        cells = [" ".join(f"{value:.2g}" for value in numbers(r[name])) for name in names]
        what = families.departures(r) if "family" in r else r["kind"]
        table.add_row(str(r["run"]), what, r["reason"].lower(), *cells)
    return table


def models_tables(records: list[Record]) -> list[Table]:
    misfit = [r for r in records if not r["right"]]
    right = [r for r in records if r["right"]]
    return [misfit_table(misfit), right_table(right), wrong_table(right)]


def misfit_table(records: list[Record]) -> Table:
    table = table_of(
        f"Misfits: {count_converged(records)} of {len(records)} converged",
        *("kind", "runs", "converged", "cause named", "seconds", "most", "reasons of refusals"),
    )
    for kind, group in sorted(grouped(records, "kind").items()):
        counts = [str(len(group)), str(count_converged(group)), cause_named(kind, group)]
        table.add_row(kind, *counts, seconds(group), seconds(group, of=np.max), reasons(group))
    return table


def cause_named(kind: str, records: list[Record]) -> str:
    """Number of runs whose advice names the cause, or "-" if there is no cause to name."""
    words = misfits.KINDS[kind].words
    if not words:
        return "-"
    return str(sum(any(word in r["advice"].lower() for word in words) for r in records))


def right_table(records: list[Record]) -> Table:
    table = table_of(
        f"Right models with noise: {count_converged(records)} of {len(records)} converged",
        *("kind", "runs", "converged", "bars in reach", "coverage", "seconds", "most"),
        "reasons of refusals",
    )
    for kind, group in sorted(grouped(records, "kind").items()):
        counts = [len(group), count_converged(group), sum(map(in_reach, group))]
        _, shares, _ = coverage(r for r in group if r["converged"])
        times = [seconds(group), seconds(group, of=np.max)]
        table.add_row(kind, *map(str, counts), shares[-1], *times, reasons(group))
    return table


def in_reach(record: Record) -> bool:
    """Whether all bars are small enough for the run to converge."""
    if "attention_bar" not in record:
        return False
    bars = [*numbers(record["attention_bar"]), *numbers(record["projection_bar"])]
    return bool(np.max(bars) <= HEAD_TOL)


if __name__ == "__main__":
    main()
