"""How fast is `recover`, compared with full-batch Adam and L-BFGS on the same examples?

The table shows the time to a relative error of 1e-5 on the worst head, over several seeds. The
peers (torch, float64) optimise attention matrices and projections, start from matrices of the same
size as `recover`, and use the same large products. Adam uses the best of three learning rates for
each seed. The time to measure the error is not counted for a peer; the time of `recover` includes
the certificate. A peer may take ten times as long as `recover`, at least 5 seconds and at most the
budget. If it needs longer, it has failed on that seed.

    python benchmarks/recovery.py                       # the table of the README
    python benchmarks/recovery.py --seeds 1 --sizes 8,4,2,1 --budget 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import onelayer as ol

TARGET = 1e-5
LEARNING_RATES = (0.03, 0.01, 0.003)
Size = tuple[int, int, int, float]


SIZES: list[Size] = [
    (8, 4, 2, 1),
    (8, 4, 4, 10),
    (16, 4, 4, 2),
    (16, 4, 8, 3),
    (32, 4, 8, 2),
    (64, 4, 8, 2),
]


def main() -> None:
    options = arguments()
    table = Table(title=f"Seconds to a head error of {TARGET:g}, median of successes (successes)")
    columns = ("d, k, m, scale", "examples", "recover", "Adam", "L-BFGS", "faster by")
    for column in columns:
        table.add_column(column, justify="right")
    progress = Console(stderr=True)
    for size in options.sizes:
        runs: dict[str, list[float]] = {"recover": [], "Adam": [], "L-BFGS": []}
        for seed in range(options.seeds):
            for name, seconds in race(size, options.equations, seed, options.budget).items():
                runs[name].append(seconds)
            last = ", ".join(f"{name} {times[-1]:.2f} s" for name, times in runs.items())
            progress.print(f"{size} seed {seed}: {last}", highlight=False)
        table.add_row(*row(size, options, runs))
    Console().print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", type=parse_size, default=SIZES)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--equations", type=float, default=16.0, help="equations per unknown")
    parser.add_argument("--budget", type=float, default=60.0, help="time limit of a peer, s")
    return parser.parse_args()


def parse_size(text: str) -> Size:
    d, k, m, scale = text.split(",")
    return int(d), int(k), int(m), float(scale)


def race(size: Size, equations: float, seed: int, budget: float) -> dict[str, float]:
    """Seconds of each method on one layer and its examples; infinite if it failed."""
    d, k, m, scale = size
    layer = ol.AttentionLayer.random(heads=m, dim=d, scale=scale, seed=seed)
    X = ol.inputs.boolean(examples_for(size, equations), k, d, seed=1000 + seed)
    Y = layer(X)
    start = time.perf_counter()
    found = ol.recover(X, Y, heads=m, seed=seed, tol=1e-7)
    ours = time.perf_counter() - start
    budget = time_limit(ours, budget)
    good = found.converged and found.layer.distance(layer).attention.max() <= TARGET
    adam = np.inf
    for rate in LEARNING_RATES:  # stop a rate that takes longer than the best so far
        steps = partial(adam_steps, rate=rate)
        adam = min(adam, descend(X, Y, layer, steps, seed, min(budget, adam)))
    lbfgs = descend(X, Y, layer, lbfgs_steps, seed, budget)
    return {"recover": ours if good else np.inf, "Adam": adam, "L-BFGS": lbfgs}


def time_limit(ours: float, budget: float) -> float:
    return min(budget, max(5.0, 10 * ours))


def examples_for(size: Size, equations: float) -> int:
    d, k, m, _ = size
    return round(equations * 2 * m * d / k)


def descend(
    X: Any,
    Y: Any,
    layer: ol.AttentionLayer,
    stepper: Callable[[Any], Any],
    seed: int,
    budget: float,
) -> float:
    """Seconds of gradient descent until every head is within the target error, or infinity."""
    heads, d, e = layer.projection.shape
    rng = np.random.default_rng(seed)
    theta = torch.tensor(rng.standard_normal((d, heads * d)) * 0.5 / d, requires_grad=True)
    weights = torch.tensor(rng.standard_normal((heads * d, e)) / d**0.5, requires_grad=True)
    tokens, targets = torch.as_tensor(X), torch.as_tensor(Y).reshape(-1, e)

    def loss() -> Any:
        return torch.mean((forward(tokens, theta, weights) - targets) ** 2)

    step, spent = stepper([theta, weights]), 0.0
    while spent < budget:
        started = time.perf_counter()
        step(loss)
        spent += time.perf_counter() - started
        attention = theta.detach().numpy().reshape(d, heads, d).transpose(1, 0, 2)
        projection = weights.detach().numpy().reshape(heads, d, e)
        if not np.isfinite(attention).all():
            return np.inf
        match = ol.AttentionLayer(attention, projection).distance(layer)
        if match.attention.max() <= TARGET:
            return spent
    return np.inf


def forward(X: Any, theta: Any, weights: Any) -> Any:
    """Outputs of the layer, computed with two large products and two batches of small ones."""
    n, k, d = X.shape
    scores = (X.reshape(n * k, d) @ theta).reshape(n, -1, d) @ X.transpose(1, 2)
    return (torch.softmax(scores, dim=-1) @ X).reshape(n * k, -1) @ weights


def adam_steps(parameters: list[Any], rate: float, steps: int = 10) -> Callable[[Any], None]:
    optimizer = torch.optim.Adam(parameters, lr=rate)

    def run(loss: Callable[[], Any]) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()

    return run


def lbfgs_steps(parameters: list[Any], steps: int = 10) -> Callable[[Any], None]:
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=steps,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )

    def run(loss: Callable[[], Any]) -> None:
        def closure() -> Any:
            optimizer.zero_grad()
            value = loss()
            value.backward()
            return value

        optimizer.step(closure)

    return run


def row(size: Size, options: argparse.Namespace, runs: dict[str, list[float]]) -> list[str]:
    """One row of the table. If no peer succeeds, the ratio uses the time limit of the peers."""
    medians = {name: median_of_successes(times) for name, times in runs.items()}
    peer = min(medians["Adam"], medians["L-BFGS"])
    ratio = min(peer, time_limit(medians["recover"], options.budget)) / medians["recover"]
    cells = [f"{medians[name]:.3g} ({successes(times)})" for name, times in runs.items()]
    sizes = ", ".join(f"{number:g}" for number in size)
    examples = str(examples_for(size, options.equations))
    return [sizes, examples, *cells, f"{'> ' if np.isinf(peer) else ''}{ratio:.1f}"]


def successes(times: list[float]) -> str:
    return f"{int(np.isfinite(times).sum())}/{len(times)}"


def median_of_successes(times: list[float]) -> float:
    good = [t for t in times if np.isfinite(t)]
    return float(np.median(good)) if good else np.inf


if __name__ == "__main__":
    main()
