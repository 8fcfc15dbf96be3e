"""Where does each phase break? Layers that lose one condition after the other, step by step.

In each family one condition degrades and the others stay as good as they can: attention matrices
with singular values from 1 to 1/2 (times a number that makes the norm `--scale`), orthogonal to
each other; projections with a random difference, and a sum with singular values that are all equal.
The measured values are those of `ol.conditions`, medians over the seeds. Every layer is learned
three times, by the six phases without and with polishing, and by `refine` on a few of the examples:
for each the reasons, and the error of the worst head (attention or projection), median and worst.
`refused` is the first of the phases that could not go on.

A result that says `converged` is WRONG if a head is off by more than 10 % without polishing, or by
more than 1e-3 with it and for `refine` (10 % where there is noise in the outputs); a run that
raises is recorded as CRASHED. The exit status is 1 if there is any of these.

    python benchmarks/conditions.py                     # the whole table
    python benchmarks/conditions.py --families scale noise --seeds 1 --examples 20000
    python benchmarks/conditions.py --families distance --steps 90 30 --dim 7 --tokens 2
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.table import Table
from sculpt import counted, median_and_worst, tell, wide_console, worst_head

import onelayer as ol
from onelayer.recovery.reasons import Reason

Matrix = np.ndarray[Any, Any]
COARSE, FINE, NOISY = 0.1, 1e-3, 0.1  # errors beyond which a claim is wrong
# Reasons of `sculpt` that come after the six phases; the others are those of a phase.
VERDICTS = {
    Reason.APPROXIMATE,
    Reason.COARSE,
    Reason.HEADS_NOT_DETERMINED,
    Reason.NO_CANDIDATES,
}
WAYS = ("unpolished", "polished", "refine")


@dataclass(frozen=True)
class Shape:
    """What all families share."""

    heads: int
    dim: int
    scale: float


@dataclass(frozen=True)
class Family:
    """Layers of one kind, by the step; `conditions` are those that degrade."""

    build: Callable[[float, Shape, np.random.Generator], ol.AttentionLayer]
    meaning: str  # of a step
    steps: tuple[float, ...]
    conditions: tuple[str, ...] = ()
    heads: int = 2
    tokens: int | None = None  # instead of --tokens
    wider: int = 0  # than --dim
    noisy: bool = False  # the step is the noise in the outputs


@dataclass(frozen=True)
class Result:
    """How one run ended."""

    reason: str
    converged: bool
    error: float
    refused: str = "-"  # the phase
    crashed: bool = False


# Layers


def orthogonal(dim: int, rng: np.random.Generator) -> Matrix:
    return np.linalg.qr(rng.standard_normal((dim, dim)))[0]


def with_spectrum(values: Matrix, rng: np.random.Generator) -> Matrix:
    """A matrix of norm 1 with these singular values, up to a factor."""
    dim = len(values)
    matrix = orthogonal(dim, rng) * values @ orthogonal(dim, rng)
    return matrix / np.linalg.norm(matrix)


def alike(dim: int) -> Matrix:
    """Singular values apart from each other, but none much smaller than the others."""
    return np.linspace(1.0, 0.5, dim)


def orthonormal(matrices: list[Matrix]) -> Matrix:
    """The matrices made orthogonal to those before them, of norm 1: (m, d, d)."""
    made: list[Matrix] = []
    for matrix in matrices:
        rest = matrix - sum(np.vdot(other, matrix) * other for other in made)
        made.append(rest / np.linalg.norm(rest))
    return np.stack(made)


def good_heads(shape: Shape, rng: np.random.Generator) -> Matrix:
    """Attention matrices that meet every condition."""
    matrices = [with_spectrum(alike(shape.dim), rng) for _ in range(shape.heads)]
    return shape.scale * orthonormal(matrices)


def good_projections(
    shape: Shape, rng: np.random.Generator, sum_spectrum: Matrix | None = None
) -> Matrix:
    """Projections with random differences and a sum of given singular values, or of equal ones."""
    heads, dim = shape.heads, shape.dim
    values = np.ones(dim) if sum_spectrum is None else sum_spectrum
    total = with_spectrum(values, rng) * np.sqrt(heads * dim)
    parts = rng.standard_normal((heads, dim, dim)) / np.sqrt(dim)
    return parts - parts.mean(axis=0) + total / heads


def layer_of(heads: Matrix, shape: Shape, rng: np.random.Generator) -> ol.AttentionLayer:
    return ol.AttentionLayer(heads, good_projections(shape, rng))


def turned(degrees: float, matrices: Matrix) -> Matrix:
    """The last matrix at an angle to the first instead of at a right one; exact at 0 and 180."""
    along, across = np.cos(np.deg2rad(degrees)), np.sin(np.deg2rad(degrees % 180))
    return np.concatenate([matrices[:-1], along * matrices[:1] + across * matrices[-1:]])


def angle(step: float, shape: Shape, rng: np.random.Generator) -> ol.AttentionLayer:
    return layer_of(turned(step, good_heads(shape, rng)), shape, rng)


def norm_ratio(step: float, shape: Shape, rng: np.random.Generator) -> ol.AttentionLayer:
    norms = np.geomspace(step**0.5, step**-0.5, shape.heads)
    return layer_of(good_heads(shape, rng) * norms[:, None, None], shape, rng)


def effective_rank(step: float, shape: Shape, rng: np.random.Generator) -> ol.AttentionLayer:
    spectrum = step ** np.arange(shape.dim)
    heads = [shape.scale * with_spectrum(spectrum, rng) for _ in range(shape.heads)]
    return layer_of(np.stack(heads), shape, rng)


def scale(step: float, shape: Shape, rng: np.random.Generator) -> ol.AttentionLayer:
    return layer_of(good_heads(shape, rng) / shape.scale * step, shape, rng)


def sum_conditioning(step: float, shape: Shape, rng: np.random.Generator) -> ol.AttentionLayer:
    spectrum = step ** np.linspace(0.0, 1.0, shape.dim)
    return ol.AttentionLayer(good_heads(shape, rng), good_projections(shape, rng, spectrum))


def projection_angle(step: float, shape: Shape, rng: np.random.Generator) -> ol.AttentionLayer:
    """Two projections on either side of an orthogonal matrix; their sum is a multiple of it."""
    heads, half = good_heads(shape, rng), np.deg2rad(step) / 2
    drawn = orthogonal(shape.dim, rng), rng.standard_normal((shape.dim, shape.dim))
    middle, aside = orthonormal(list(drawn)) * np.sqrt(shape.dim)
    sides = np.array([1.0, -1.0])[:, None, None]
    return ol.AttentionLayer(heads, np.cos(half) * middle + np.sin(half) * sides * aside)


def towards_mean(step: float, shape: Shape, rng: np.random.Generator) -> ol.AttentionLayer:
    heads = good_heads(shape, rng)
    heads[-1] = (1 - step) * heads[-1] + step * heads[:-1].mean(axis=0)
    return layer_of(heads, shape, rng)


def block_diagonal(step: float, shape: Shape, rng: np.random.Generator) -> ol.AttentionLayer:
    blocks = int(step)
    block = np.arange(shape.dim) * blocks // shape.dim
    heads = rng.standard_normal((shape.heads, shape.dim, shape.dim))
    heads *= block[:, None] == block
    heads *= shape.scale / np.linalg.norm(heads, axis=(1, 2), keepdims=True)
    return layer_of(heads, shape, rng)


def diagonal(_: float, shape: Shape, rng: np.random.Generator) -> ol.AttentionLayer:
    return block_diagonal(shape.dim, shape, rng)


def low_rank(step: float, shape: Shape, rng: np.random.Generator) -> ol.AttentionLayer:
    rank = int(step)
    drawn = ol.AttentionLayer.random(shape.heads, shape.dim, shape.scale, rank=rank, seed=rng)
    return layer_of(drawn.attention, shape, rng)


def good(_: float, shape: Shape, rng: np.random.Generator) -> ol.AttentionLayer:
    return layer_of(good_heads(shape, rng), shape, rng)


FAMILIES = {
    "distance": Family(
        angle,
        "degrees between the attention matrices",
        (90, 60, 45, 30, 20, 10, 5, 1),
        ("distance", "incoherence"),
    ),
    "opposite": Family(
        angle,
        "degrees between the attention matrices",
        (120, 150, 165, 175, 180),
        ("hull distance", "incoherence"),
    ),
    "norm-ratio": Family(
        norm_ratio, "of the norms", (1, 1.5, 2, 3, 5, 10, 30), ("norm ratio", "scale")
    ),
    "effective-rank": Family(
        effective_rank,
        "decay of the singular values",
        (1, 0.8, 0.6, 0.4, 0.2, 0.1, 0),
        ("effective rank", "singular gap"),
    ),
    "scale": Family(
        scale,
        "norm of the attention matrices",
        (0.5, 1, 1.5, 2, 3, 6, 10, 30),
        ("scale", "largest scale"),
    ),
    "sum-conditioning": Family(
        sum_conditioning,
        "last singular value of the sum over the first",
        (1, 0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-9, 0),
        ("sum conditioning",),
    ),
    "projection-independence": Family(
        projection_angle,
        "degrees between the projections",
        (90, 60, 30, 10, 3, 1, 0),
        ("projection independence", "sum conditioning"),
    ),
    "opposite-projections": Family(
        projection_angle,
        "degrees between the projections",
        (120, 150, 165, 175, 180),
        ("projection independence", "sum size"),
    ),
    "attention-independence": Family(
        towards_mean,
        "the third attention matrix towards the mean of the others",
        (0, 0.25, 0.5, 0.75, 0.9, 1),
        ("attention independence", "distance"),
        heads=3,
        tokens=2,  # three heads agree on three tokens too seldom,
        wider=2,  # and in eight dimensions their scores are too few
    ),
    "block-diagonal": Family(
        block_diagonal, "blocks", (1, 2, 4), ("effective rank", "incoherence")
    ),
    "diagonal": Family(diagonal, "without meaning", (0,), ("effective rank", "incoherence")),
    "low-rank": Family(low_rank, "rank", (4, 2, 1), ("effective rank", "incoherence")),
    "noise": Family(good, "noise over signal in the outputs", (1e-4, 1e-3, 1e-2, 1e-1), noisy=True),
}


# Runs


def main() -> None:
    options = arguments()
    table = Table(title=f"Where each phase breaks: {options.examples:,} examples")
    columns = ("family", "step", "measured", "refused")
    for column in (*columns, *(part for way in WAYS for part in (way, "error")), "verdict"):
        table.add_column(column)
    wrong = False
    for name in options.families:
        family = FAMILIES[name]
        for step in options.steps or family.steps:
            cells = row(name, family, step, options)
            wrong = wrong or cells[-1] != "-"
            table.add_row(*cells)
        table.add_section()
    table.caption = "; ".join(f"{name}: {FAMILIES[name].meaning}" for name in options.families)
    wide_console(240).print(table)
    sys.exit(1 if wrong else 0)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--steps", nargs="+", type=float, help="instead of the families' own")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--refined", type=int, default=2000, help="examples of refine")
    parser.add_argument("--dim", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--scale", type=float, default=3.0)
    parser.add_argument("--seconds", type=float, default=60.0, help="the most of one run")
    return parser.parse_args()


def row(name: str, family: Family, step: float, options: argparse.Namespace) -> list[str]:
    """One line: all seeds of one step."""
    measured, runs = [], []
    for seed in range(options.seeds):
        layer, X, Y = instance(family, step, seed, options)
        conditions = ol.conditions(layer)
        measured.append([conditions[condition].measured for condition in family.conditions])
        runs.append(results(layer, X, Y, seed, options))
        ended = "; ".join(f"{way} {run.reason} {run.error:.2g}" for way, run in runs[-1].items())
        tell(f"{name} {step:g} seed {seed}: {ended}")
    values = np.median(measured, axis=0)
    return [
        name,
        f"{step:g}",
        ", ".join(f"{n} {v:.3g}" for n, v in zip(family.conditions, values, strict=True)) or "-",
        shares([run["unpolished"].refused for run in runs]),
        *(cell for way in WAYS for cell in summary([run[way] for run in runs])),
        verdict(runs, family.noisy),
    ]


def instance(
    family: Family, step: float, seed: int, options: argparse.Namespace
) -> tuple[ol.AttentionLayer, Matrix, Matrix]:
    """The layer of a step, with inputs and outputs; all steps of a seed start from one layer."""
    shape = Shape(family.heads, options.dim + family.wider, options.scale)
    layer = family.build(step, shape, np.random.default_rng(seed))
    tokens = family.tokens or options.tokens
    X = ol.inputs.boolean(options.examples, tokens, shape.dim, seed=100 + seed)
    Y = layer(X)
    if family.noisy:
        size = step * np.sqrt(np.mean(Y**2))
        Y = Y + size * np.random.default_rng(200 + seed).standard_normal(Y.shape)
    return layer, X, Y


def results(
    layer: ol.AttentionLayer, X: Matrix, Y: Matrix, seed: int, options: argparse.Namespace
) -> dict[str, Result]:
    few = slice(options.refined)
    common = {"heads": layer.heads, "seed": seed, "max_seconds": options.seconds}
    return {
        "unpolished": result(layer, X, Y, method="sculpt", polish=False, **common),
        "polished": result(layer, X, Y, method="sculpt", **common),
        "refine": result(layer, X[few], Y[few], method="refine", **common),
    }


def result(layer: ol.AttentionLayer, X: Matrix, Y: Matrix, **how: Any) -> Result:
    """One run, also where it raises: a table of what breaks must not break."""
    try:
        found = ol.recover(X, Y, **how)
    except Exception as error:
        return Result(f"{type(error).__name__}: {error}", False, np.inf, crashed=True)
    taken = [row.stage for row in found.trace if row.stage.startswith("phase")]
    refused = "-"
    if taken and found.reason not in VERDICTS:
        refused = taken[-1].removeprefix("phase ").split(":")[0]
    error = worst_head(found.layer, layer)
    return Result(found.reason.name.lower(), found.converged, error, refused)


# The parts of a row


def summary(runs: list[Result]) -> tuple[str, str]:
    return shares([run.reason for run in runs]), median_and_worst([run.error for run in runs])


def shares(names: list[str]) -> str:
    """3/3 approximate, or 2/3 approximate, 1/3 coarse."""
    parts = counted(names).split(", ")
    return ", ".join(part.replace(" ", f"/{len(names)} ", 1) for part in parts)


def verdict(runs: list[dict[str, Result]], noisy: bool) -> str:
    """WRONG for the ways that claimed a layer that is not the true one, CRASHED, or '-'."""
    limits = {"unpolished": COARSE, "polished": FINE, "refine": FINE}
    if noisy:
        limits |= {"polished": NOISY, "refine": NOISY}
    found = []
    for way in WAYS:
        ended = [run[way] for run in runs]
        wrong = sum(run.converged and run.error > limits[way] for run in ended)
        crashed = sum(run.crashed for run in ended)
        found += [f"WRONG {way} {wrong}/{len(runs)}"] if wrong else []
        found += [f"CRASHED {way} {crashed}/{len(runs)}"] if crashed else []
    return ", ".join(found) or "-"


if __name__ == "__main__":
    main()
