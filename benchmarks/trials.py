"""Run `recover` on many problems with known layers, record the results and resume."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import joblib
import numpy as np
from rich.console import Console
from threadpoolctl import threadpool_limits

import onelayer as ol

Record = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Problem:
    """Examples, options of `recover`, and the layer to find.

    `layer` is None if no layer of the model explains the outputs.
    """

    labels: Record
    X: np.ndarray[Any, Any]
    Y: np.ndarray[Any, Any]
    layer: ol.AttentionLayer | None
    options: Record = field(default_factory=dict)


def attempt(problem: Problem, run: int, max_seconds: float | None) -> Record:
    """Recover the layer of one problem on one thread, and record the errors."""
    start = time.perf_counter()
    try:
        with threadpool_limits(1):
            found = ol.recover(
                problem.X, problem.Y, seed=run, max_seconds=max_seconds, **problem.options
            )
        outcome: Record = {
            "converged": found.converged,
            "reason": found.reason.name,
            "advice": found.advice,
            "input_rank": int(found.certificate.input_rank),
        }
        seconds = time.perf_counter() - start
        errors = {} if problem.layer is None else compare(found, problem.layer, problem.X)
    except Exception as error:
        # Every problem is valid, so an exception is a result and must not stop the other runs.
        reason = f"raised {type(error).__name__}"
        outcome = {"converged": False, "reason": reason, "advice": str(error)}
        seconds, errors = time.perf_counter() - start, {}
    return {"run": run, **problem.labels, **outcome, "seconds": round(seconds, 3), **errors}


def compare(found: Any, layer: ol.AttentionLayer, X: np.ndarray[Any, Any]) -> Record:
    """True errors and bars of every head of the true layer, with None for infinity.

    A true head without a counterpart has a bar of zero: the found layer claims that it does not
    exist.
    """
    match = found.layer.distance(layer, inputs=X)
    missing = match.permutation < 0
    record = {}
    for name in ("attention", "projection"):
        bars = getattr(found.certificate, f"{name}_error")[match.permutation]
        record[f"{name}_error"] = finite_or_none(getattr(match, name))
        record[f"{name}_bar"] = finite_or_none(np.where(missing, 0.0, bars))
    return record


def finite_or_none(values: Any) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def numbers(values: list[float | None]) -> np.ndarray[Any, Any]:
    """The inverse of `finite_or_none`."""
    return np.array([np.inf if value is None else value for value in values], dtype=float)


def run_all(
    trial: Callable[[int], Record],
    runs: Sequence[int],
    settings: Record,
    out: Path | None,
    jobs: int,
) -> list[Record]:
    """The records of all runs, in order. Records in `out` with these settings are reused.

    Each record is appended to `out` as soon as its run ends. An interrupt keeps these records.
    """
    records = {r["run"]: r for r in read(out) if r.get("settings") == settings}
    records = {run: records[run] for run in runs if run in records}
    left = [run for run in runs if run not in records]
    progress = Console(stderr=True)
    if records:
        progress.print(f"{len(records)} of {len(runs)} runs are in {out}", highlight=False)
    workers = joblib.Parallel(n_jobs=jobs, backend="loky", return_as="generator_unordered")
    try:
        for record in workers(joblib.delayed(trial)(run) for run in left):
            record["settings"] = settings
            append(out, record)
            records[record["run"]] = record
            what = record.get("family") or record.get("kind")
            line = f"run {record['run']}, {what}: {record['reason']}, {record['seconds']:.2f} s"
            progress.print(f"{len(records)}/{len(runs)} {line}", highlight=False, markup=False)
    except KeyboardInterrupt:
        progress.print(f"interrupted after {len(records)} of {len(runs)} runs", highlight=False)
    return [records[run] for run in sorted(records)]


def read(path: Path | None) -> list[Record]:
    """The complete records of a file. An incomplete last line is removed from the file."""
    if path is None or not path.exists():
        return []
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if len(whole) < len(text):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return [json.loads(line) for line in whole.splitlines()]


def append(path: Path | None, record: Record) -> None:
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(record, allow_nan=False).encode() + b"\n")
