"""Error bars on inputs as they come
=================================

Compare error bars of recovered layers with true errors, on inputs and outputs from practice.

The same layer is recovered from several kinds of examples: layer-normalized tokens, outputs in half
precision or with noise, tokens with little signal along some directions, and outputs of a causal
layer that is recovered without causal=True. The table shows the true error of the worst head, its
error bar, and the advice of `recover` where it does not converge.

::

    python examples/inputs_as_they_come.py
    python examples/inputs_as_they_come.py --dim 6 --examples 150
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from rich.console import Console
from rich.table import Table

import onelayer as ol

Examples = tuple[str, Any, Any]


def kinds(layer: ol.AttentionLayer, examples: int, seed: int) -> Iterator[Examples]:
    """Yield the name, inputs and outputs of each kind of examples."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((examples, 5, layer.dim))
    normed = (X - X.mean(axis=-1, keepdims=True)) / X.std(axis=-1, keepdims=True)
    faint = X * np.geomspace(1.0, 1e-5, layer.dim)
    Y = layer(X)
    yield "Gaussian tokens", X, Y
    yield "layer-normalized tokens", normed, layer(normed)
    yield "outputs in float16", X, Y.astype(np.float16)
    yield "outputs with noise of 1 %", X, Y + 0.01 * Y.std() * rng.standard_normal(Y.shape)
    yield "signal decays to 1e-5, float32", faint, layer(faint).astype(np.float32)
    yield "causal, without causal=True", X, layer(X, causal=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dim", type=int, default=12)
    parser.add_argument("--examples", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    layer = ol.AttentionLayer.random(heads=2, dim=options.dim, seed=options.seed)
    table = Table(title="Worst head: relative error of its attention matrix, and its error bar")
    for column in ("examples", "converged", "input rank", "error", "error bar", "advice"):
        table.add_column(column)
    worst = {}
    for name, X, Y in kinds(layer, options.examples, options.seed + 1):
        found = ol.recover(X, Y, heads=2)
        worst[name] = error, bar = worst_head(layer, X, found)
        converged = "yes" if found.converged else "no"
        rank = f"{found.certificate.input_rank} of {layer.dim}"
        table.add_row(name, converged, rank, f"{error:.1e}", f"{bar:.1e}", found.advice)
    Console(width=140).print(table)
    draw(worst)


def worst_head(layer: ol.AttentionLayer, X: Any, found: ol.Recovery) -> tuple[float, float]:
    """Return the largest error of a head on the span of the inputs, and the largest error bar."""
    error = found.layer.distance(layer, inputs=X).attention.max()
    return float(error), float(found.certificate.attention_error.max())


def draw(worst: dict[str, tuple[float, float]]) -> None:
    """Draw error and error bar of every kind of examples."""
    errors, bars = zip(*worst.values(), strict=True)
    _, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    axes.plot(errors, range(len(worst)), "o", label="error")
    axes.plot(bars, range(len(worst)), "|", ms=14, mew=2, label="error bar")
    axes.set(xscale="log", xlabel="relative error of the worst head")
    axes.set_yticks(range(len(worst)), worst)
    axes.invert_yaxis()
    axes.grid(alpha=0.25)
    axes.legend()
    plt.show()


if __name__ == "__main__":
    main()
