"""How many examples does a model need? Attention beside a network that reads tokens in a row.

The first paper (arXiv 2307.11353) predicts that for averages of a function of one key the number
does not depend on the number N of keys for attention (RFA), and grows with it for a network
(RFMLP), by ((N+2)/4)^p between them at degree p; and that a bias (BRFA) helps where keys count by
their likeness to the query. Tokens are uniform on the sphere, alpha is chosen by leave-one-out,
errors are relative to the variance of the target, sizes are geometric means over the seeds.

    python benchmarks/sample_sizes.py                        # the tables of the README
    python benchmarks/sample_sizes.py --seeds 1 --largest 64 --heads 10 --keys 2 4 --dim 4
"""

from __future__ import annotations

import argparse

import numpy as np
from learning_curves import TEST_EXAMPLES, estimator
from rich.console import Console
from rich.table import Table

import onelayer as ol

LINEAR, QUADRATIC = 0.1, 0.3  # the errors to reach on f_{1,1} and on f_{1,2}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keys", nargs="+", type=int, default=[4, 16, 32])
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--heads", type=int, default=400)
    parser.add_argument("--largest", type=int, default=2048, help="the largest sample size")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    Console().print(needed(options))
    Console().print(correlation(options))


def needed(options: argparse.Namespace) -> Table:
    """Examples needed by RFA and RFMLP, for every number of keys."""
    table = Table(title="Examples needed")
    columns = ("keys", f"RFA, f_{{1,1}} to {LINEAR}", "RFMLP", "ratio", "(N+2)/4")
    for column in (*columns, f"RFA, f_{{1,2}} to {QUADRATIC}"):
        table.add_column(column, justify="right")
    targets = [ol.targets.average_power(p, options.dim) for p in (1, 2)]
    for keys in options.keys:
        attention = curves("rfa", keys, targets, options)
        linear, quadratic = (
            geometric_mean([curve.samples_needed(error)[i] for curve in attention])
            for i, error in enumerate((LINEAR, QUADRATIC))
        )
        network = [c.samples_needed(LINEAR)[0] for c in curves("rfmlp", keys, targets, options)]
        ratio = geometric_mean(network) / linear
        predicted = ol.theory.sample_size_ratio(1, keys)
        table.add_row(
            str(keys),
            f"{linear:,.0f}",
            f"{geometric_mean(network):,.0f}",
            f"{ratio:.2f}",
            f"{predicted:.2f}",
            f"{quadratic:,.0f}",
        )
    return table


def correlation(options: argparse.Namespace) -> Table:
    """The errors of RFA and BRFA at the largest size and the middle number of keys."""
    keys = options.keys[len(options.keys) // 2]
    table = Table(title=f"Error at {options.largest} examples, {keys} keys")
    for column in ("target", "RFA", "BRFA", "ratio"):
        table.add_column(column, justify="right")
    targets = [ol.targets.average_power(1, options.dim)]
    targets += [ol.targets.correlation_weighted(q, options.dim) for q in (1, 2, 3, 4)]
    plain, biased = (
        np.mean([c.test_error[-1] for c in curves(name, keys, targets, options)], axis=0)
        for name in ("rfa", "brfa")
    )
    for target, *errors in zip(targets, plain, biased, biased / plain, strict=True):
        table.add_row(target.name, *(f"{error:.3f}" for error in errors))
    return table


def curves(
    name: str, keys: int, targets: list[ol.targets.Target], options: argparse.Namespace
) -> list[ol.LearningCurve]:
    """One learning curve a seed, two sizes an octave."""
    n = options.largest
    steps = range(2 * n.bit_length())
    sizes = sorted({round(16 * 2 ** (i / 2)) for i in steps if 16 * 2 ** (i / 2) <= n} | {n})
    found = []
    for seed in range(options.seeds):
        X = ol.inputs.sphere(n + TEST_EXAMPLES, keys + 1, options.dim, seed=seed)
        Y = np.stack([target(X) for target in targets], axis=1)
        model = estimator(name, options.heads, options.dim, "loo", seed + 1000)
        found.append(ol.learning_curve(model, X[:n], Y[:n], X[n:], Y[n:], sizes))
        Console(stderr=True, highlight=False).print(f"{name}, {keys} keys, seed {seed} done")
    return found


def geometric_mean(sizes: list[float]) -> float:
    """Infinite where one of the sizes is."""
    return float(np.exp(np.mean(np.log(sizes))))


if __name__ == "__main__":
    main()
