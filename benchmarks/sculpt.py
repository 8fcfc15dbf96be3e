"""What does each phase of the provable learner cost, and how accurate is it?

The script prints three tables.

1. For every instance and each of the six phases of `recover(method="sculpt")`: the number of
   examples it uses, its seconds, its estimated error and the true error. Further rows show the
   polishing Gauss-Newton steps, and `refine` alone on a few of the examples. The true error is
   that of the sum of the projections (phases 1 and 3), the distance of the farthest true head from
   the affine space of the polytope (phases 2, 4 and 5), or the error of the worst head (all
   others), each relative. Phases 3 and 4 may take several rounds: seconds are summed, other values
   are of the last round, which is discarded if it did not improve the result.
2. Successes against the number of examples: every head within 5 % without polishing.
3. The number of examples needed against the number of heads, doubled until a seed succeeds, with
   the exponent q of log n ~ m^q. The paper's bound (dk)^O(m³) has q = 3.

Numbers are medians over the seeds that reached a phase, with the worst in brackets. `ended` counts
the runs that ended there, with their reasons.

    python benchmarks/sculpt.py                         # all three tables
    python benchmarks/sculpt.py --inputs sphere --sizes 2,8,3,400000 --factors 1 --heads
    python benchmarks/sculpt.py --quick
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np
from rich.console import Console
from rich.table import Table

import onelayer as ol
from onelayer.lab.claims.six_phases import phase_reports
from onelayer.lab.recovery_setup import CLAIMED, NEAR, score_factor, worst_head

Size = tuple[int, int, int, int]
SIZES: list[Size] = [
    (1, 8, 3, 100_000),
    (2, 8, 3, 400_000),
    (2, 16, 3, 400_000),
    (2, 8, 4, 400_000),
    (3, 12, 2, 1_000_000),
    (3, 12, 3, 1_000_000),
    (4, 16, 2, 2_000_000),
]
QUICK = {
    "sizes": [(1, 7, 2, 4000), (2, 6, 2, 2000)],
    "factors": [Fraction(1, 64), Fraction(1)],
    "heads": [1, 2],
    "shape": (7, 2),
    "first": 4000,
    "largest": 4000,
    "seeds": 1,
}


@dataclass(frozen=True)
class Stage:
    """Cost and errors of one run in one phase, over all its rounds."""

    name: str
    examples: int
    seconds: float
    measured: float
    true: float
    ended: str = ""  # the reason, if the run ended in this phase

    def after(self, earlier: Stage | None) -> Stage:
        """This round of a phase, with the seconds of earlier rounds added."""
        return self if earlier is None else replace(self, seconds=self.seconds + earlier.seconds)


@dataclass(frozen=True)
class Attempt:
    """Outcome of one call of `recover`, with the error of its worst head."""

    reason: str
    converged: bool
    error: float
    seconds: float

    @property
    def succeeded(self) -> bool:
        return self.error <= NEAR


def main() -> None:
    options = arguments()
    console = wide_console()
    console.print(costs(options))
    if options.factors:
        console.print(successes(options))
    if options.heads:
        console.print(*growth(options), sep="\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=SIZES, metavar="M,D,K,N")
    parser.add_argument("--scale", type=float, default=3.0, help="scale of the scores")
    parser.add_argument("--inputs", choices=["boolean", "gaussian", "sphere"], default="boolean")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--refined", type=int, default=2000, help="number of examples for refine")
    parser.add_argument(
        "--factors",
        nargs="*",
        type=Fraction,
        default=[Fraction(1, 64), Fraction(1, 16), Fraction(1, 4), Fraction(1)],
        help="fractions of the examples, for the table of successes",
    )
    parser.add_argument(
        "--heads",
        nargs="*",
        type=int,
        default=[1, 2, 3, 4],
        help="for the table of examples needed",
    )
    parser.add_argument(
        "--shape",
        type=parse_shape,
        default=(12, 2),
        metavar="D,K",
        help="for the table of examples needed",
    )
    parser.add_argument(
        "--first",
        type=int,
        default=250,
        help="first number of examples, doubled until a seed succeeds",
    )
    parser.add_argument("--largest", type=int, default=2_048_000, help="largest number of examples")
    parser.add_argument("--quick", action="store_true", help="use tiny sizes")
    options = parser.parse_args()
    return argparse.Namespace(**(vars(options) | (QUICK if options.quick else {})))


def parse_size(text: str) -> Size:
    m, d, k, n = text.split(",")
    return int(m), int(d), int(k), int(n)


def parse_shape(text: str) -> tuple[int, int]:
    d, k = text.split(",")
    return int(d), int(k)


def wide_console(width: int = 160) -> Console:
    """A console wide enough for one line per row, also if the output is a file."""
    console = Console(highlight=False)
    console.width = max(console.width, width)
    return console


def log(text: str) -> None:
    """Print one line of progress."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text)


def instance(
    size: Size, seed: int, options: argparse.Namespace
) -> tuple[ol.AttentionLayer, np.ndarray, np.ndarray]:
    """A random layer, inputs and outputs."""
    m, d, k, n = size
    scale = options.scale * score_factor(options.inputs, d)
    layer = ol.AttentionLayer.random(heads=m, dim=d, scale=scale, seed=seed)
    X = getattr(ol.inputs, options.inputs)(n, k, d, seed=1000 + seed)
    return layer, X, layer(X)


# Cost and accuracy of each phase


def costs(options: argparse.Namespace) -> Table:
    """One row per phase and instance."""
    table = Table(title=f"Six phases, {options.inputs} inputs: medians (worst)")
    columns = ("m, d, k, n", "phase", "runs", "examples", "seconds", "measured error", "true error")
    for column in columns:
        table.add_column(column, justify="left" if column == "phase" else "right")
    table.add_column("ended")
    for size in options.sizes:
        runs = []
        for seed in range(options.seeds):
            runs.append(stages(size, seed, options))
            log(f"{format_size(size)} seed {seed}: {summary(runs[-1])}")
        for name in sorted({name for run in runs for name in run}):
            stage = [run[name] for run in runs if name in run]
            table.add_row(format_size(size), name, f"{len(stage)}/{len(runs)}", *cells(stage))
        table.add_section()
    return table


def cells(runs: list[Stage]) -> list[str]:
    return [
        f"{int(np.median([run.examples for run in runs])):,}",
        median_and_worst([run.seconds for run in runs]),
        median_and_worst([run.measured for run in runs]),
        median_and_worst([run.true for run in runs]),
        counted(run.ended for run in runs if run.ended),
    ]


def summary(run: dict[str, Stage]) -> str:
    return "; ".join(
        f"{stage.name}: {stage.seconds:.2g} s, {stage.true:.2g}"
        + (f", {stage.ended}" if stage.ended else "")
        for stage in run.values()
    )


def stages(size: Size, seed: int, options: argparse.Namespace) -> dict[str, Stage]:
    """One run: the six phases, polishing, and `refine` on a few of the examples."""
    layer, X, Y = instance(size, seed, options)
    found = ol.recover(X, Y, heads=layer.heads, method="sculpt", seed=seed)
    taken = [row for row in found.trace if row.phase is not None]
    run: dict[str, Stage] = {}
    before = 0.0
    for row, phase in zip(taken, phase_reports(X, Y, layer, seed), strict=True):
        seconds, before = row.seconds - before, row.seconds
        errors = phase.measured, phase.true
        name = f"{phase.number} {phase.name}"
        stage = Stage(name, phase.examples, seconds, *errors, phase.refusal)
        run[name] = stage.after(run.get(name))
    if found.trace[-1].stage == "polish":
        polishing = found.seconds - taken[-1].seconds
        run["7 polished"] = last_stage("7 polished", found, layer, polishing)
    few = slice(options.refined)
    found = ol.recover(X[few], Y[few], heads=layer.heads, method="refine", seed=seed)
    run["refine alone"] = last_stage("refine alone", found, layer, found.seconds)
    return run


def last_stage(name: str, found: ol.Recovery, layer: ol.AttentionLayer, seconds: float) -> Stage:
    count, ended = found.trace[-1].examples, found.reason.name.lower()
    return Stage(name, count, seconds, found.relative_error, worst_head(found.layer, layer), ended)


# Number of examples needed


def successes(options: argparse.Namespace) -> Table:
    """Successes of every instance with fractions of its examples."""
    title = f"Heads within {NEAR:.0%} without polishing, of {options.seeds} seeds, by fraction of n"
    table = Table(title=title)
    table.add_column("m, d, k, n", justify="right")
    for factor in options.factors:
        table.add_column(str(factor), justify="right")
    table.add_column("wrong claims", justify="right")
    table.add_column("reasons of failures")
    for size in options.sizes:
        row, runs = [], []
        for factor in options.factors:
            n = int(size[3] * factor)
            tried = [attempt((*size[:3], n), seed, options) for seed in range(options.seeds)]
            row.append(str(sum(run.succeeded for run in tried)))
            runs += tried
        wrong = sum(run.converged and run.error > CLAIMED for run in runs)
        reasons = counted(run.reason for run in runs if not run.succeeded)
        table.add_row(format_size(size), *row, str(wrong), reasons)
    return table


def attempt(size: Size, seed: int, options: argparse.Namespace) -> Attempt:
    """One unpolished run."""
    layer, X, Y = instance(size, seed, options)
    found = ol.recover(X, Y, heads=layer.heads, method="sculpt", polish=False, seed=seed)
    error = worst_head(found.layer, layer)
    run = Attempt(found.reason.name.lower(), found.converged, error, found.seconds)
    log(f"{format_size(size)} seed {seed}: {run.seconds:.2g} s, {error:.2g}, {run.reason}")
    return run


def growth(options: argparse.Namespace) -> tuple[Table, str]:
    """The examples needed for every number of heads, and the fitted exponent."""
    d, k = options.shape
    table = Table(title=f"Examples needed, d = {d}, k = {k}")
    for column in ("heads", "successes", "examples", "log n / log dk", "growth factor"):
        table.add_column(column, justify="right")
    needed: dict[int, float] = {}
    before = math.nan
    for m in options.heads:
        sizes = [examples_needed(m, seed, options) for seed in range(options.seeds)]
        found = int(np.isfinite(sizes).sum())
        n = float(np.median(sizes))
        exponent, times = math.log(n) / math.log(d * k), n / before
        counts = f"{found}/{len(sizes)}", f"{n:,.0f}", f"{exponent:.2f}"
        table.add_row(str(m), *counts, f"{times:.1f}" if np.isfinite(times) else "-")
        before = n
        if np.isfinite(n):
            needed[m] = n
    return table, fitted_growth(needed, d * k)


def examples_needed(m: int, seed: int, options: argparse.Namespace) -> float:
    """The first of the doubled numbers of examples that is enough, or infinity."""
    n = options.first
    while n <= options.largest:
        if attempt((m, *options.shape, n), seed, options).succeeded:
            return n
        n *= 2
    return math.inf


def fitted_growth(needed: dict[int, float], dk: int) -> str:
    """Fit log n = C m^q log(dk) to the logarithms of both sides."""
    if len(needed) < 2:
        return "Too few numbers of heads succeeded to fit an exponent."
    heads, sizes = np.array(list(needed)), np.array(list(needed.values()))
    q, intercept = np.polyfit(np.log(heads), np.log(np.log(sizes) / math.log(dk)), 1)
    factor = math.exp(np.polyfit(heads, np.log(sizes), 1)[0])
    return (
        f"Fitted: n = (dk)^({math.exp(intercept):.2f} m^{q:.2f}), or {factor:.1f} times as many "
        f"examples with each head; the paper's bound is (dk)^O(m^3), dk = {dk}."
    )


# Cells of a row


def format_size(size: Size) -> str:
    return ", ".join(f"{number:,}" if number > 9999 else str(number) for number in size)


def median_and_worst(values: list[float]) -> str:
    return f"{np.median(values):.2g} ({np.max(values):.2g})"


def counted(names: Iterable[str]) -> str:
    """Names with their counts, the most frequent first."""
    return ", ".join(f"{count} {name}" for name, count in Counter(names).most_common())


if __name__ == "__main__":
    main()
