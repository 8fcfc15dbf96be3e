"""Families of layers in which one condition degrades step by step, and layers with structure.

The other conditions stay as good as possible: attention matrices are orthogonal to each other, with
singular values from 1 to 1/2, scaled to the norm of the shape; projections have random differences
and a sum with equal singular values. The first step of a family meets all conditions, the last is
the worst.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelayer import inputs
from onelayer.lab.seeds import generator
from onelayer.layer import AttentionLayer

Matrix = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a layer; `scale` is the norm of an attention matrix."""

    heads: int
    dim: int
    scale: float


@dataclass(frozen=True)
class LayerFamily:
    """Layers by a step that degrades some `conditions`."""

    build: Callable[[float, LayerShape, np.random.Generator], AttentionLayer]
    meaning: str  # of a step
    steps: tuple[float, ...]
    conditions: tuple[str, ...] = ()
    heads: int = 2
    fewer_tokens: int = 0  # than other families
    more_dimensions: int = 0
    noisy: bool = False  # the step is the noise in the outputs

    def thinned(self, count: int) -> tuple[float, ...]:
        """At most `count` of the steps, evenly spaced from the first to the last."""
        chosen = np.linspace(0, len(self.steps) - 1, min(count, len(self.steps)))
        return tuple(self.steps[i] for i in np.rint(chosen).astype(int))


def orthogonal(dim: int, rng: np.random.Generator) -> Matrix:
    return np.linalg.qr(rng.standard_normal((dim, dim)))[0]


def with_spectrum(values: Matrix, rng: np.random.Generator) -> Matrix:
    """A matrix of norm 1 with these singular values, up to a factor."""
    dim = len(values)
    matrix: Matrix = orthogonal(dim, rng) * values @ orthogonal(dim, rng)
    return matrix / float(np.linalg.norm(matrix))


def orthonormal(matrices: list[Matrix]) -> Matrix:
    """The matrices made orthogonal to those before them, of norm 1: (m, d, d)."""
    made: list[Matrix] = []
    for matrix in matrices:
        rest = matrix - sum(np.vdot(other, matrix) * other for other in made)
        made.append(rest / np.linalg.norm(rest))
    return np.stack(made)


def good_heads(shape: LayerShape, rng: np.random.Generator) -> Matrix:
    """Attention matrices that meet every condition."""
    # Singular values apart from each other, but none much smaller than the others.
    values = np.linspace(1.0, 0.5, shape.dim)
    matrices = [with_spectrum(values, rng) for _ in range(shape.heads)]
    return shape.scale * orthonormal(matrices)


def good_projections(
    shape: LayerShape, rng: np.random.Generator, sum_spectrum: Matrix | None = None
) -> Matrix:
    """Projections with random differences and a sum of given singular values, or of equal ones."""
    heads, dim = shape.heads, shape.dim
    values = np.ones(dim) if sum_spectrum is None else sum_spectrum
    total = with_spectrum(values, rng) * np.sqrt(heads * dim)
    parts = rng.standard_normal((heads, dim, dim)) / np.sqrt(dim)
    projections: Matrix = parts - parts.mean(axis=0) + total / heads
    return projections


def layer_of(heads: Matrix, shape: LayerShape, rng: np.random.Generator) -> AttentionLayer:
    return AttentionLayer(heads, good_projections(shape, rng))


def angle(step: float, shape: LayerShape, rng: np.random.Generator) -> AttentionLayer:
    """The last head at an angle to the first instead of at a right one; exact at 0 and 180."""
    heads = good_heads(shape, rng)
    along, across = np.cos(np.deg2rad(step)), np.sin(np.deg2rad(step % 180))
    turned = np.concatenate([heads[:-1], along * heads[:1] + across * heads[-1:]])
    return layer_of(turned, shape, rng)


def norm_ratio(step: float, shape: LayerShape, rng: np.random.Generator) -> AttentionLayer:
    norms = np.geomspace(step**0.5, step**-0.5, shape.heads)
    return layer_of(good_heads(shape, rng) * norms[:, None, None], shape, rng)


def effective_rank(step: float, shape: LayerShape, rng: np.random.Generator) -> AttentionLayer:
    spectrum = step ** np.arange(shape.dim)
    heads = [shape.scale * with_spectrum(spectrum, rng) for _ in range(shape.heads)]
    return layer_of(np.stack(heads), shape, rng)


def scale(step: float, shape: LayerShape, rng: np.random.Generator) -> AttentionLayer:
    return layer_of(good_heads(shape, rng) / shape.scale * step, shape, rng)


def sum_conditioning(step: float, shape: LayerShape, rng: np.random.Generator) -> AttentionLayer:
    spectrum = step ** np.linspace(0.0, 1.0, shape.dim)
    return AttentionLayer(good_heads(shape, rng), good_projections(shape, rng, spectrum))


def projection_angle(step: float, shape: LayerShape, rng: np.random.Generator) -> AttentionLayer:
    """Two projections on either side of an orthogonal matrix; their sum is a multiple of it."""
    heads, half = good_heads(shape, rng), np.deg2rad(step) / 2
    drawn = orthogonal(shape.dim, rng), rng.standard_normal((shape.dim, shape.dim))
    middle, aside = orthonormal(list(drawn)) * np.sqrt(shape.dim)
    sides = np.array([1.0, -1.0])[:, None, None]
    return AttentionLayer(heads, np.cos(half) * middle + np.sin(half) * sides * aside)


def towards_mean(step: float, shape: LayerShape, rng: np.random.Generator) -> AttentionLayer:
    heads = good_heads(shape, rng)
    heads[-1] = (1 - step) * heads[-1] + step * heads[:-1].mean(axis=0)
    return layer_of(heads, shape, rng)


def good(_: float, shape: LayerShape, rng: np.random.Generator) -> AttentionLayer:
    return layer_of(good_heads(shape, rng), shape, rng)


def block_diagonal(step: float, shape: LayerShape, rng: np.random.Generator) -> AttentionLayer:
    """Attention of `step` blocks: 1 for full matrices, `dim` for diagonal ones."""
    block = np.arange(shape.dim) * int(step) // shape.dim
    heads = rng.standard_normal((shape.heads, shape.dim, shape.dim))
    heads *= block[:, None] == block
    heads *= shape.scale / np.linalg.norm(heads, axis=(1, 2), keepdims=True)
    return layer_of(heads, shape, rng)


def low_rank(step: float, shape: LayerShape, rng: np.random.Generator) -> AttentionLayer:
    drawn = AttentionLayer.random(shape.heads, shape.dim, shape.scale, rank=int(step), seed=rng)
    return layer_of(drawn.attention, shape, rng)


FAMILIES = {
    "distance": LayerFamily(
        angle, "degrees between heads", (90, 60, 45, 30, 20, 10, 5, 1), ("distance", "incoherence")
    ),
    "opposite": LayerFamily(
        angle,
        "degrees between heads",
        (90, 120, 150, 165, 175, 180),
        ("hull distance", "incoherence"),
    ),
    "norm-ratio": LayerFamily(
        norm_ratio, "ratio of norms", (1, 1.5, 2, 3, 5, 10, 30), ("norm ratio", "scale")
    ),
    "effective-rank": LayerFamily(
        effective_rank,
        "decay of singular values",
        (1, 0.8, 0.6, 0.4, 0.2, 0.1, 0),
        ("effective rank", "singular gap"),
    ),
    "small-scale": LayerFamily(scale, "norm of heads", (3, 2, 1.5, 1, 0.5), ("scale",)),
    "large-scale": LayerFamily(scale, "norm of heads", (3, 6, 10, 30), ("largest scale",)),
    "sum-conditioning": LayerFamily(
        sum_conditioning,
        "least singular value",
        (1, 0.1, 1e-2, 1e-3, 1e-4, 1e-6, 1e-9, 0),
        ("sum conditioning",),
    ),
    "projection-independence": LayerFamily(
        projection_angle,
        "degrees between projections",
        (90, 60, 30, 10, 3, 1, 0),
        ("projection independence",),
    ),
    "opposite-projections": LayerFamily(
        projection_angle,
        "degrees between projections",
        (90, 120, 150, 165, 175, 180),
        ("sum size", "projection independence"),
    ),
    "attention-independence": LayerFamily(
        towards_mean,
        "third head towards the mean",
        (0, 0.25, 0.5, 0.75, 0.9, 1),
        ("attention independence", "distance"),
        heads=3,
        fewer_tokens=1,  # three heads agree on three tokens too seldom,
        more_dimensions=2,  # and in eight dimensions their scores are too few
    ),
    "noise": LayerFamily(good, "noise over signal", (1e-4, 1e-3, 1e-2, 1e-1), noisy=True),
}


def instance(
    family: LayerFamily, step: float, dim: int, tokens: int, scale: float, examples: int, seed: int
) -> tuple[AttentionLayer, Matrix, Matrix]:
    """The layer of a step, with Boolean inputs and outputs; all steps of a seed start alike."""
    shape = LayerShape(family.heads, dim + family.more_dimensions, scale)
    layer = family.build(step, shape, generator(seed, "layer"))
    tokens -= family.fewer_tokens
    X = inputs.boolean(examples, tokens, shape.dim, generator(seed, "inputs"))
    Y = layer(X)
    if family.noisy:
        drawn = generator(seed, "noise").standard_normal(Y.shape)
        Y = Y + step * np.sqrt(np.mean(Y**2)) * drawn
    return layer, X, Y
