"""How many output entries does it take to find a layer from chosen inputs?

For every size, `query` asks random layers of full rank and scale 2. The columns are the unknowns of
the layer; the scalar queries that papers need (d² + d for one head with scalar outputs, arXiv
2601.16873; 4 H d² - 2 H + 1 for H heads, arXiv 2608.03294); the output entries from which the layer
was found; all entries that came back, those of unused rows and of the check among them; the inputs;
the largest relative error of a head; and seconds. With `--unchecked` only the closed form is
computed, without random inputs and refinement. A size is "dim,heads" or "dim,heads,out_dim".
Figures are medians over the seeds that succeeded, and errors the largest.

    python benchmarks/queries.py
    python benchmarks/queries.py --sizes 64,12 --unchecked
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from statistics import median

import numpy as np
from rich.console import Console
from rich.table import Table

import onelayer as ol
from onelayer.recovery.queries.closed_form import ClosedForm, NotApplicableError
from onelayer.recovery.queries.oracle import Oracle

COLUMNS = (
    "d, H, e",
    "unknowns",
    "papers",
    "used",
    "returned",
    "inputs",
    "error",
    "seconds",
    "found",
)


@dataclass(frozen=True)
class Outcome:
    """What one layer took; the error is infinite if it was not found."""

    used: int
    returned: int
    inputs: int
    error: float
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    sizes = ["8,1", "8,1,1", "8,6", "16,1", "16,6", "16,12"]
    parser.add_argument("--sizes", nargs="+", default=sizes)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--unchecked", action="store_true", help="the closed form alone")
    parser.add_argument("--max-seconds", type=float, default=120.0)
    options = parser.parse_args()
    table = Table(title=f"Output entries, {options.seeds} seeds")
    for column in COLUMNS:
        table.add_column(column, justify="right")
    for size in options.sizes:
        dim, heads, *rest = map(int, size.split(","))
        out_dim = rest[0] if rest else dim
        outcomes = [measured(dim, heads, out_dim, seed, options) for seed in range(options.seeds)]
        table.add_row(*row(dim, heads, out_dim, outcomes))
    Console(width=120).print(table)  # figures are not cut off in narrow terminals


def measured(dim: int, heads: int, out_dim: int, seed: int, options: argparse.Namespace) -> Outcome:
    """What `query`, or the closed form alone, finds of a random layer."""
    shape = {"heads": heads, "dim": dim, "out_dim": out_dim}
    layer = ol.AttentionLayer.random(**shape, scale=2.0, seed=seed)
    started = time.perf_counter()
    if options.unchecked:
        oracle = Oracle(layer)
        found = closed_form(oracle, dim, seed)
        counts = oracle.scalars, oracle.returned, oracle.queries
    else:
        recovery = ol.query(layer, dim, seed=seed, max_seconds=options.max_seconds)
        found = recovery.layer if recovery.converged else None
        counts = recovery.scalars, recovery.scalars_returned, recovery.queries
    seconds = time.perf_counter() - started
    error = np.inf
    if found is not None and found.heads == heads:
        match = found.distance(layer)
        error = float(max(match.attention.max(), match.projection.max()))
    print(f"{dim}, {heads}, {out_dim}, seed {seed}: {error:.1e}", file=sys.stderr)
    return Outcome(*counts, error, seconds)


def closed_form(oracle: Oracle, dim: int, seed: int) -> ol.AttentionLayer | None:
    form = ClosedForm(oracle, dim, None, False, np.random.default_rng(seed))
    try:
        form.measure()
        return form.layer()
    except NotApplicableError:
        return None


def row(dim: int, heads: int, out_dim: int, outcomes: list[Outcome]) -> list[str]:
    """The cells of a size."""
    papers = 4 * heads * dim**2 - 2 * heads + 1
    if heads == out_dim == 1:
        papers = dim**2 + dim
    cells = [f"{dim}, {heads}, {out_dim}", f"{heads * dim * (dim + out_dim):,}", f"{papers:,}"]
    good = [one for one in outcomes if np.isfinite(one.error)]
    share = f"{len(good)}/{len(outcomes)}"
    if not good:
        return [*cells, "-", "-", "-", "-", "-", share]
    medians = [
        median(getattr(one, name) for one in good) for name in ("used", "returned", "inputs")
    ]
    worst, seconds = max(one.error for one in good), median(one.seconds for one in good)
    return [*cells, *(f"{one:,.0f}" for one in medians), f"{worst:.0e}", f"{seconds:.2g}", share]


if __name__ == "__main__":
    main()
