"""Layers to recover, and errors of results, for the claims of the second paper."""

from typing import Any, Literal

import numpy as np

from onelayer import inputs
from onelayer.lab.seeds import generator
from onelayer.layer import AttentionLayer
from onelayer.recovery.result import Recovery

SCALE = 3.0  # standard deviation of the scores, in the middle of where the six phases work
NEAR = 0.05  # largest error of the worst head for the six phases without polishing
EXACT = 1e-9  # largest error of the worst head for Gauss-Newton steps
CLAIMED = 0.1  # largest error of the worst head that may be called converged

Method = Literal["sculpt", "refine"]  # the six phases, Gauss-Newton steps
METHODS: tuple[Method, ...] = ("sculpt", "refine")

Array = np.ndarray[Any, Any]


def instance(
    heads: int, dim: int, tokens: int, examples: int, seed: int, kind: str = "boolean"
) -> tuple[AttentionLayer, Array, Array]:
    """A random layer, inputs of a kind, and its outputs for them."""
    scale = SCALE * score_factor(kind, dim)
    layer = AttentionLayer.random(heads, dim, scale, seed=generator(seed, "layer"))
    X = getattr(inputs, kind)(examples, tokens, dim, generator(seed, "inputs"))
    return layer, X, layer(X)


def score_factor(kind: str, dim: int) -> float:
    """The factor on the scale that makes scores as large on these inputs as on Boolean ones.

    Tokens on the unit sphere are shorter by a factor √d, so that scores are smaller by d.
    """
    return float(dim) if kind == "sphere" else 1.0


def fewest_examples(heads: int, dim: int, tokens: int, out_dim: int) -> float:
    """The number of examples with as many equations as a layer has unknowns.

    An example has k e outputs, which depend on at most k (k - 1) differences of scores for every
    head: n k e >= m d (d + e) and n k (k - 1) >= d².

    >>> fewest_examples(heads=8, dim=4, tokens=2, out_dim=4)  # by outputs: 8 · 4 · 8 / (2 · 4)
    32.0
    >>> fewest_examples(heads=1, dim=4, tokens=2, out_dim=4)  # by scores: 4² / 2
    8.0
    """
    by_outputs = heads * dim * (dim + out_dim) / (tokens * out_dim)
    return max(by_outputs, dim * dim / (tokens * (tokens - 1)))


def ended(found: Recovery, layer: AttentionLayer) -> dict[str, Any]:
    """The error of the worst head, and whether and why the recovery converged."""
    return {
        "error": worst_head(found.layer, layer),
        "converged": found.converged,
        "reason": found.reason.name.lower(),
    }


def worst_head(estimate: AttentionLayer, layer: AttentionLayer) -> float:
    """The relative error of the matrix, attention or projection, that is farthest off."""
    match = estimate.distance(layer)
    return float(max(match.attention.max(), match.projection.max()))
