"""What the claims of the second paper share: layers to recover, and how far what is found is off."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from onelayer import inputs
from onelayer.lab.seeds import generator
from onelayer.layer import AttentionLayer

SECOND_PAPER = "arXiv 2402.04084"
SCALE = 3.0  # standard deviation of the scores, in the middle of where the six phases work
NEAR = 0.05  # of the worst head: what the six phases are asked for without polishing
EXACT = 1e-9  # of the worst head: what Gauss-Newton steps are asked for
CLAIMED = 0.1  # what is said to have converged must be no worse than this

Array = np.ndarray[Any, Any]


def instance(
    heads: int, dim: int, tokens: int, examples: int, seed: int, kind: str = "boolean"
) -> tuple[AttentionLayer, Array, Array]:
    """A random layer, inputs of a kind, and its outputs for them."""
    scale = SCALE * token_size(kind, dim)
    layer = AttentionLayer.random(heads, dim, scale, seed=generator(seed, "layer"))
    X = getattr(inputs, kind)(examples, tokens, dim, generator(seed, "inputs"))
    return layer, X, layer(X)


def token_size(kind: str, dim: int) -> float:
    """What attention matrices are multiplied by to give scores of one size on inputs of any kind.

    Tokens of the unit sphere are shorter than others by a factor √d, scores smaller by d.
    """
    return float(dim) if kind == "sphere" else 1.0


def unknowns(heads: int, dim: int, out_dim: int) -> int:
    """Entries of all attention matrices and projections."""
    return heads * dim * (dim + out_dim)


def equations_per_unknown(examples: int, heads: int, dim: int, tokens: int, out_dim: int) -> float:
    """How often the entries of all outputs outnumber those of the layer.

    >>> equations_per_unknown(64, heads=2, dim=8, tokens=2, out_dim=8)  # 64 · 2 · 8 / (2 · 8 · 16)
    4.0
    """
    return examples * tokens * out_dim / unknowns(heads, dim, out_dim)


def growing(first: float, step: float, largest: float) -> Iterator[int]:
    """Whole numbers from `first` to `largest`, each so many times the one before.

    >>> list(growing(3, 2.0, 20))
    [3, 6, 12]
    """
    size = first
    while math.ceil(size) <= largest:
        yield math.ceil(size)
        size *= step


def worst_head(estimate: AttentionLayer, layer: AttentionLayer) -> float:
    """The relative error of the matrix, attention or projection, that is farthest off."""
    match = estimate.distance(layer)
    return float(max(match.attention.max(), match.projection.max()))
