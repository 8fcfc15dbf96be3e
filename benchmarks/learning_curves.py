"""How fast is a learning curve, compared with scikit-learn's Ridge and the machine's limit?

The paper's sizes (arXiv 2307.11353): d = N = 16, 1,000 heads or 17,000 neurons, sample sizes 16 to
8,192, the targets f_{1,1..4} and f_{2,1..4}. `learning_curve` computes all sizes and targets in one
call; the peer fits `Ridge` at every size to all targets, on the same features, in float64.

The limit is the time of the necessary operations at the speed of one large matrix product measured
in the same run: features once in float64, one triangle of Φ Φᵀ and its Cholesky factor in float32.
Both totals include features and predictions for 2,000 test examples, and the errors of both must
agree.

    python benchmarks/learning_curves.py                     # the table of the README
    python benchmarks/learning_curves.py --models rfa
    python benchmarks/learning_curves.py --heads 20 --largest 64 --dim 4 --keys 4 --product 256
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import scipy.linalg
from rich.console import Console
from rich.table import Table
from sklearn.linear_model import Ridge

import onelayer as ol
from onelayer.array import backend, linalg
from onelayer.features.estimators import Regressor
from onelayer.features.solvers.design import Panels

MODELS = ol.theory.MODELS
TEST_EXAMPLES = 2000
PAPER = {"fit_intercept": False, "standardize": False}  # the paper's model


@dataclass(frozen=True)
class Speed:
    """Operations per second of one large product, by precision."""

    single: float
    double: float


def main() -> None:
    options = arguments()
    if options.memory:
        print_peak_memory(options)
        return
    log = Console(stderr=True, highlight=False).print
    speed = Speed(*(measured_speed(dtype, options.product) for dtype in (np.float32, np.float64)))
    log(f"one large product: {speed.single:.3g} FLOP/s, {speed.double:.3g} FLOP/s in float64")
    table = Table(title=f"{options.largest} examples, {options.keys} keys, dimension {options.dim}")
    for column in ("model", "stage", "seconds", "of the limit", "Ridge by size", "ratio", "peak"):
        table.add_column(column, justify="left" if column in ("model", "stage") else "right")
    for name in options.models:
        log(f"{name} ...")
        for row in rows(name, options, speed):
            table.add_row(*row)
    Console().print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--largest", type=int, default=8192, help="the largest sample size")
    parser.add_argument("--heads", type=int, default=1000)
    parser.add_argument("--dim", type=int, default=16)
    parser.add_argument("--keys", type=int, default=16)
    parser.add_argument("--alpha", type=float, default=1e-3)
    parser.add_argument("--product", type=int, default=4096, help="the size of the large product")
    parser.add_argument("--memory", choices=MODELS, help=argparse.SUPPRESS)
    return parser.parse_args()


def rows(name: str, options: argparse.Namespace, speed: Speed) -> Iterator[list[str]]:
    """One row per stage, and one for the whole curve."""
    X, Y = data(options)
    sizes = sizes_up_to(options.largest)
    model = estimator(name, options.heads, options.dim, options.alpha)
    seconds, curve = timed(lambda: ol.learning_curve(model, *split(X, Y, options), sizes))
    peer, peer_curve = timed(lambda: per_size(model, *split(X, Y, options), sizes))
    gap = np.abs(curve.test_error / peer_curve - 1).max()
    if gap > 1e-8:
        raise SystemExit(f"{name}: errors differ from those of Ridge by {gap:.1e}")
    total = 0.0
    ours = stages(model, X[: options.largest], options, speed)
    theirs = peer_stages(model, X[: options.largest], Y[: options.largest], sizes)
    for (stage, took, needed), peer_took in zip(ours, theirs, strict=True):
        total += needed
        yield [name, stage, *figures(took, needed, peer_took), ""]
    peak = f"{peak_memory(name, options):.2f} GB"
    yield [name, "total", *figures(seconds, total, peer), peak]


def figures(took: float, needed: float, peer: float) -> list[str]:
    """Seconds, the fraction of the limit, the peer's seconds and the ratio."""
    return [f"{took:.2f}", f"{needed / took:.0%}", f"{peer:.2f}", f"{peer / took:.2f}"]


def stages(
    model: Regressor, X: np.ndarray[Any, Any], options: argparse.Namespace, speed: Speed
) -> Iterator[tuple[str, float, float]]:
    """Name, seconds and seconds at the limit of features, Gram matrix and factor."""
    design = design_of(model, X)
    n, p = design.rows, design.columns
    took, _ = timed(lambda: [design.by_columns(part) for part in design.column_panels()])
    yield "features", took, n * feature_operations(model, options) / speed.double
    single = design.single()
    total = backend.zeros((n, n), single.sample)
    took = 0.0
    for part in single.column_panels():
        panel = single.by_columns(part)
        took += timed(lambda panel=panel: linalg.add_gram(total, panel))[0]
    yield "Gram matrix", took, n * n * p / speed.single
    linalg.add_to_diagonal(total, options.alpha)
    took, _ = timed(lambda: linalg.cholesky(total))
    yield "factor", took, n**3 / 3 / speed.single


def peer_stages(
    model: Regressor, X: np.ndarray[Any, Any], Y: np.ndarray[Any, Any], sizes: list[int]
) -> list[float]:
    """Seconds of features, Gram matrices and factors of all sizes, as Ridge computes them."""
    took, features = timed(lambda: design_of(model, X).by_rows(slice(0, len(X))))
    gram = factor = 0.0
    for size in sizes:
        seconds, kernel = timed(lambda part=features[:size]: part @ part.T)
        gram += seconds
        kernel.flat[:: size + 1] += model.alpha
        solve = partial(scipy.linalg.solve, kernel, Y[:size], assume_a="pos")
        factor += timed(solve)[0]
    return [took, gram, factor]


def feature_operations(model: Regressor, options: argparse.Namespace) -> int:
    """Multiplications and additions for the features of one example."""
    size, keys = options.dim + 1, options.keys
    if isinstance(model, ol.RandomFeatureMLP):
        return 2 * model.features * ((keys + 1) * options.dim + 1)
    return options.heads * (2 * size * size + 4 * keys * size)


def per_size(
    model: Regressor,
    X: np.ndarray[Any, Any],
    Y: np.ndarray[Any, Any],
    X_test: np.ndarray[Any, Any],
    Y_test: np.ndarray[Any, Any],
    sizes: list[int],
) -> np.ndarray[Any, Any]:
    """Errors of scikit-learn's Ridge on the same features, with one fit per size."""
    features, test_features = (
        design_of(model, examples).by_rows(slice(0, len(examples))) for examples in (X, X_test)
    )
    errors = []
    for size in sizes:
        ridge = Ridge(alpha=model.alpha, fit_intercept=False).fit(features[:size], Y[:size])
        errors.append(np.mean((ridge.predict(test_features) - Y_test) ** 2, axis=0))
    return np.stack(errors) / Y_test.var(axis=0)


def design_of(model: Regressor, X: np.ndarray[Any, Any]) -> Panels:
    """The features that the model draws to fit X."""
    sets = model._given(X, None, reset=True).form
    return Panels(model._draw(sets).features, sets)


def estimator(name: str, heads: int, dim: int, alpha: float | str, seed: int = 0) -> Regressor:
    if name == "rfmlp":
        features = heads * (dim + 1)  # as many trained parameters
        return ol.RandomFeatureMLP(features, alpha=alpha, random_state=seed, **PAPER)
    bias = 1.0 if name == "brfa" else 0.0
    return ol.RandomFeatureAttention(heads, bias, alpha=alpha, random_state=seed, **PAPER)


def data(options: argparse.Namespace) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Training examples followed by test examples, with the eight targets of the paper."""
    X = ol.inputs.sphere(options.largest + TEST_EXAMPLES, options.keys + 1, options.dim, seed=1)
    families = (ol.targets.average_power, ol.targets.correlation_weighted)
    targets = [family(power, options.dim) for family in families for power in (1, 2, 3, 4)]
    return X, np.stack([target(X) for target in targets], axis=1)


def split(
    X: np.ndarray[Any, Any], Y: np.ndarray[Any, Any], options: argparse.Namespace
) -> tuple[np.ndarray[Any, Any], ...]:
    n = options.largest
    return X[:n], Y[:n], X[n:], Y[n:]


def sizes_up_to(largest: int) -> list[int]:
    """16, 32, .. doubling."""
    return [16 * 2**i for i in range(largest.bit_length()) if 16 * 2**i <= largest]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def measured_speed(dtype: type[np.floating[Any]], size: int) -> float:
    """Operations per second of one large product: the best of three."""
    matrix = np.random.default_rng(0).standard_normal((size, size)).astype(dtype)
    other = matrix.T.copy()  # BLAS computes only half of a matrix times its transpose
    return 2 * size**3 / min(timed(lambda: matrix @ other)[0] for _ in range(3))


def peak_memory(name: str, options: argparse.Namespace) -> float:
    """Peak memory in GB of a new process that fits the model to the largest sample."""
    numbers = ("largest", "heads", "dim", "keys", "alpha")
    command_line = [f"--{number}={getattr(options, number)}" for number in numbers]
    command = [sys.executable, __file__, "--memory", name, *command_line]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def print_peak_memory(options: argparse.Namespace) -> None:
    X, Y = data(options)
    model = estimator(options.memory, options.heads, options.dim, options.alpha)
    model.fit(X[: options.largest], Y[: options.largest])
    status = Path("/proc/self/status").read_text("utf-8")  # getrusage includes the parent
    print(int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) / 1e6)


if __name__ == "__main__":
    main()
