"""How fast is `recover`, compared with Adam and L-BFGS on the same examples?

The table shows seconds until the relative error of the worst head is below 1e-2, 1e-5 and 1e-10,
over several seeds. `recover` has one time for all three, that of a run to its end (`tol=1e-12`,
certificate included), because it has no heads to show before. It counts if every head is below
1e-10. The column "certified" is the time of another run with `tol=1e-7`, which is enough for 1e-5.

The peers are in peers.py: minibatch Adam in float32, and full-batch Adam and L-BFGS in float64,
because float32 cannot reach 1e-10. A peer may take ten times as long as `recover`, at least 5
seconds and at most the budget, not counting runs with less time or other learning rates. If it
needs longer, it has failed on that seed.

    python benchmarks/recovery.py                       # the table of the README
    python benchmarks/recovery.py --large               # and 128 dimensions
    python benchmarks/recovery.py --seeds 1 --sizes 8,4,2,1 --budget 5
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import peers
from rich.console import Console
from rich.table import Table

import onelayer as ol

Size = tuple[int, int, int, float]
Runs = dict[str, list[peers.Times]]

SIZES: list[Size] = [
    (8, 4, 2, 1),
    (8, 4, 4, 10),
    (16, 4, 4, 2),
    (16, 4, 8, 3),
    (32, 4, 8, 2),
    (64, 4, 8, 2),
]
LARGE: Size = (128, 4, 8, 2)
CERTIFIED = 1e-5  # the error that a run with tol=1e-7 has to reach
COLUMNS = ("d, k, m, scale", "examples", "certified", "head error", "recover", *peers.METHODS)


def main() -> None:
    options = arguments()
    table = Table(title="Seconds to a head error, median of successes (successes)")
    for column in (*COLUMNS, "faster by"):
        table.add_column(column, justify="right")
    progress = Console(stderr=True, soft_wrap=True, highlight=False)
    for size in options.sizes + [LARGE] * options.large:
        runs: Runs = {name: [] for name in ("certified", "recover", *peers.METHODS)}
        for seed in range(options.seeds):
            for name, times in race(size, options, seed).items():
                runs[name].append(times)
            last = ", ".join(f"{name} {shown(times[-1])}" for name, times in runs.items())
            progress.print(f"{size} seed {seed}: {last}")
        for row in rows(size, options, runs):
            table.add_row(*row)
        table.add_section()
    Console().print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=SIZES)
    parser.add_argument("--large", action="store_true", help="add 128 dimensions: 8,192 examples")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--equations", type=float, default=16.0, help="equations per unknown")
    parser.add_argument("--budget", type=float, default=60.0, help="time limit of a peer's run, s")
    parser.add_argument("--batch", type=int, default=256, help="examples of a minibatch")
    return parser.parse_args()


def parse_size(text: str) -> Size:
    d, k, m, scale = text.split(",")
    return int(d), int(k), int(m), float(scale)


def race(size: Size, options: argparse.Namespace, seed: int) -> dict[str, peers.Times]:
    """Seconds of each method to each error, on one layer and its examples."""
    d, k, m, scale = size
    layer = ol.AttentionLayer.random(heads=m, dim=d, scale=scale, seed=seed)
    X = ol.inputs.boolean(examples_for(size, options.equations), k, d, seed=1000 + seed)
    problem = peers.Problem(X, layer(X), layer, seed=seed, batch=options.batch)
    times = {"certified": recovered(problem, 1e-7), "recover": recovered(problem, 1e-12)}
    budget = time_limit(times["recover"][peers.TARGETS[0]], options.budget)
    return times | {name: peers.race(name, problem, budget) for name in peers.METHODS}


def recovered(problem: peers.Problem, tol: float) -> peers.Times:
    """Seconds of `recover` to its end, for every error that it reached."""
    start = time.perf_counter()
    found = ol.recover(problem.X, problem.Y, heads=problem.truth.heads, seed=problem.seed, tol=tol)
    seconds = time.perf_counter() - start
    return peers.seconds_after(seconds, problem.error(found.layer) if found.converged else np.inf)


def time_limit(ours: float, budget: float) -> float:
    return min(budget, max(5.0, 10 * ours))


def examples_for(size: Size, equations: float) -> int:
    d, k, m, _ = size
    return round(equations * 2 * m * d / k)


def rows(size: Size, options: argparse.Namespace, runs: Runs) -> list[list[str]]:
    """The rows of a size, one for each error."""
    sizes = ", ".join(f"{number:g}" for number in size)
    examples = f"{examples_for(size, options.equations):,}"
    certified = cell(at(runs["certified"], CERTIFIED))
    first = [sizes, examples, certified]
    found = []
    for target in peers.TARGETS:
        found.append([*first, f"{target:g}", *cells(runs, target, options.budget)])
        first = [""] * len(first)
    return found


def cells(runs: Runs, target: float, budget: float) -> list[str]:
    """Times to an error, and how much faster `recover` is than the best peer.

    If no peer succeeds, the ratio uses the time limit of the peers.
    """
    # All of recover's errors have to be small, as its times are those of a run to the end.
    ours = at(runs["recover"], peers.TARGETS[-1])
    theirs = [at(runs[name], target) for name in peers.METHODS]
    mine, peer = median(ours), min(map(median, theirs))
    ratio = min(peer, time_limit(mine, budget)) / mine
    return [*map(cell, [ours, *theirs]), f"{'> ' if np.isinf(peer) else ''}{ratio:.1f}"]


def at(times: list[peers.Times], target: float) -> list[float]:
    return [run[target] for run in times]


def cell(seconds: list[float]) -> str:
    """The median of the successes, and their number."""
    good = int(np.isfinite(seconds).sum())
    return f"{f'{median(seconds):.3g}' if good else '-'} ({good}/{len(seconds)})"


def median(seconds: list[float]) -> float:
    good = [one for one in seconds if np.isfinite(one)]
    return float(np.median(good)) if good else np.inf


def shown(times: peers.Times) -> str:
    return " / ".join("-" if np.isinf(one) else f"{one:.2f}" for one in times.values()) + " s"


if __name__ == "__main__":
    main()
