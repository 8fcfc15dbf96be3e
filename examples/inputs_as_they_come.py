"""Compare error bars of recovered layers with true errors, on inputs and outputs from practice.

The same layer is recovered from several kinds of examples: layer-normalized tokens, outputs in half
precision or with noise, tokens with little signal along some directions, and outputs of a causal
layer that is recovered without causal=True. The table shows the true error of the worst head, its
error bar, and the advice of `recover` where it does not converge.

    python examples/inputs_as_they_come.py
    python examples/inputs_as_they_come.py --dim 6 --examples 150
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dim", type=int, default=12)
    parser.add_argument("--examples", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    layer = ol.AttentionLayer.random(heads=2, dim=options.dim, seed=options.seed)
    table = Table(title="Worst head: relative error of its attention matrix, and its error bar")
    for column in ("examples", "converged", "input rank", "error", "error bar", "advice"):
        table.add_column(column)
    for name, X, Y in kinds(layer, options.examples, options.seed + 1):
        table.add_row(name, *row(layer, X, ol.recover(X, Y, heads=2)))
    Console(width=140).print(table)


def row(layer: ol.AttentionLayer, X: Any, found: ol.Recovery) -> list[str]:
    """Return the table row of one kind of examples."""
    proof = found.certificate
    error = found.layer.distance(layer, inputs=X).attention.max()
    bar = proof.attention_error.max()
    converged, rank = "yes" if found.converged else "no", f"{proof.input_rank} of {layer.dim}"
    return [converged, rank, f"{error:.1e}", f"{bar:.1e}", found.advice]


if __name__ == "__main__":
    main()
