"""How many examples are enough? Success of `recover` against equations per unknown.

With n examples of k tokens there are n k d equations (a few of them held out for the certificate)
for the 2 m d² unknowns of a layer with m heads. A run succeeds if every head is recovered to 1e-6.
The last column counts runs that converged and are wrong.

    python benchmarks/samples.py                        # the table of the README
    python benchmarks/samples.py --seeds 1 --sizes 8,4,2,1 --ratios 2 4
"""

from __future__ import annotations

import argparse

import numpy as np
from recovery import Size, examples_for, parse_size
from rich.console import Console
from rich.table import Table

import onelayer as ol

SIZES: list[Size] = [(8, 4, 4, 2), (16, 4, 8, 2), (32, 4, 8, 2)]
RATIOS = [1.2, 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=SIZES)
    parser.add_argument("--ratios", nargs="+", type=float, default=RATIOS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--restarts", type=int, default=20)
    options = parser.parse_args()
    table = Table(title=f"Successes of {options.seeds} seeds, by equations per unknown")
    table.add_column("d, k, m, scale", justify="right")
    for ratio in options.ratios:
        table.add_column(f"{ratio:g}", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("wrong claims", justify="right")
    for size in options.sizes:
        table.add_row(*measure(size, options.ratios, options.seeds, options.restarts))
    Console().print(table)


def measure(size: Size, ratios: list[float], seeds: int, restarts: int) -> list[str]:
    """One row: successes for every ratio, the median time of a run, wrong claims."""
    d, k, m, scale = size
    cells = [", ".join(f"{number:g}" for number in size)]
    seconds, wrong = [], 0
    for ratio in ratios:
        successes = 0
        for seed in range(seeds):
            layer = ol.AttentionLayer.random(heads=m, dim=d, scale=scale, seed=seed)
            X = ol.inputs.boolean(examples_for(size, ratio), k, d, seed=1000 + seed)
            found = ol.recover(X, layer(X), heads=m, seed=seed, restarts=restarts)
            good = found.layer.distance(layer).attention.max() <= 1e-6
            successes += good
            wrong += found.converged and not good
            seconds.append(found.seconds)
        cells.append(str(successes))
        Console(stderr=True).print(f"{size} at {ratio:g}: {successes} of {seeds}", highlight=False)
    return [*cells, f"{np.median(seconds):.2g}", str(wrong)]


if __name__ == "__main__":
    main()
