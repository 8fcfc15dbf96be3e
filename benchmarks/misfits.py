"""Examples that no layer of the model explains, and noisy examples of a layer.

Every problem is a deterministic function of its run number. Each kind occurs alternately without
and with noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from families import examples_for, layer_norm, noisy
from scipy.special import erf, softmax
from trials import Problem

import onelayer as ol

Array = np.ndarray[Any, Any]

DIMS = (8, 16, 16)
EXAMPLES = (400, 1000)
MOST_EQUATIONS = 250  # per unknown, at the largest noise: enough for error bars of a few per cent
LARGEST_NOISE = 0.3


@dataclass(frozen=True, eq=False)
class Inputs:
    """Inputs of a target, the number of heads passed to `recover`, and a random generator."""

    X: Array
    heads: int
    rng: np.random.Generator

    def layer(self, extra_heads: int = 0, **options: Any) -> ol.AttentionLayer:
        """A random layer for these inputs."""
        scale = self.rng.uniform(1.0, 3.0)
        heads, dim = self.heads + extra_heads, self.X.shape[2]
        return ol.AttentionLayer.random(heads, dim, scale=scale, seed=self.rng, **options)


Target = Callable[[Inputs], tuple[Array, Array]]


def misfit(run: int, dims: tuple[int, ...] = DIMS, examples: tuple[int, int] = EXAMPLES) -> Problem:
    """Examples of a target that `recover` must refuse with the given options."""
    rng = np.random.default_rng([run, 0])
    kind = list(KINDS)[run % len(KINDS)]
    noise = log_uniform(rng, 0.01, LARGEST_NOISE) if run // len(KINDS) % 2 else 0.0
    d, k, m = int(rng.choice(dims)), int(rng.integers(4, 9)), int(rng.choice([1, 2, 2, 3]))
    n = int(rng.integers(examples[0], examples[1] + 1))
    name = "boolean" if "parity" in kind else str(rng.choice(["gaussian", "boolean"]))
    X, Y = KINDS[kind].target(Inputs(getattr(ol.inputs, name)(n, k, d, seed=rng), m, rng))
    labels = {"kind": kind, "right": False, "inputs": name, "noise": noise, "examples": n}
    labels |= {"dim": d, "tokens": k, "heads": m}
    return Problem(labels, X, noisy(Y, noise, rng), None, {"heads": m})


def right(run: int, dims: tuple[int, ...] = DIMS, **_: Any) -> Problem:
    """Noisy examples of a layer that `recover` should find with the given options."""
    rng = np.random.default_rng([run, 1])
    option = ("plain", "bias", "causal", "mask")[run % 4]
    noise = log_uniform(rng, 1e-6, LARGEST_NOISE)
    d, k, m = int(rng.choice(dims)), int(rng.integers(4, 9)), int(rng.integers(1, 3))
    equations = 8 + MOST_EQUATIONS * noise / LARGEST_NOISE
    n = examples_for(equations, d, k, m, d, option == "bias")
    options: dict[str, Any] = {"heads": m}
    if option == "mask":
        n = round(n * 2 * k / (k + 2))  # keeps the number of rows without padding
        options["mask"] = lengths_mask(n, k, rng, least=2)
    elif option != "plain":
        options[option] = True
    name = str(rng.choice(["gaussian", "boolean"]))
    given = Inputs(getattr(ol.inputs, name)(n, k, d, seed=rng), m, rng)
    layer = given.layer(bias=option == "bias")
    Y = noisy(layer(given.X, options.get("mask"), option == "causal"), noise, rng)
    labels = {"kind": f"right, {option}", "right": True, "inputs": name, "noise": noise}
    labels |= {"examples": n, "equations": equations, "dim": d, "tokens": k, "heads": m}
    return Problem(labels, given.X, Y, layer, options)


def log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def lengths_mask(n: int, k: int, rng: np.random.Generator, least: int = 1) -> Array:
    """A mask of tokens for sequences of random lengths, False on padding."""
    return np.arange(k) < rng.integers(least, k + 1, size=(n, 1))


# An option of `recover` is missing


def causal(given: Inputs) -> tuple[Array, Array]:
    return given.X, given.layer()(given.X, causal=True)


def mask(given: Inputs) -> tuple[Array, Array]:
    """The padding has the distribution of tokens."""
    present = lengths_mask(*given.X.shape[:2], given.rng)
    return given.X, given.layer()(given.X, mask=present)


def zero_padding(given: Inputs) -> tuple[Array, Array]:
    present = lengths_mask(*given.X.shape[:2], given.rng)
    X = given.X * present[:, :, None]
    return X, given.layer()(X, mask=present)


def bias(given: Inputs) -> tuple[Array, Array]:
    return given.X, given.layer(bias=True)(given.X)


def too_few_heads(given: Inputs) -> tuple[Array, Array]:
    return given.X, given.layer(extra_heads=1)(given.X)


def swapped_axes(given: Inputs) -> tuple[Array, Array]:
    """Tokens along the last axis."""
    return given.X.swapaxes(1, 2).copy(), given.layer()(given.X).swapaxes(1, 2).copy()


# Attention of another kind


def window(given: Inputs) -> tuple[Array, Array]:
    """Each row attends only to its neighbours, one or two on either side."""
    X, layer = given.X, given.layer()
    positions = np.arange(X.shape[1])
    near = np.abs(positions[:, None] - positions) <= given.rng.integers(1, 3)
    scores = [X @ theta @ X.swapaxes(1, 2) for theta in layer.attention]
    return X, attended(X, [np.where(near, s, -np.inf) for s in scores], layer.projection)


def rotary(given: Inputs) -> tuple[Array, Array]:
    """Queries and keys are rotated by angles proportional to their positions."""
    X, layer, rng = given.X, given.layer(), given.rng
    k, d = X.shape[1:]
    size = max(2, d // 4 * 2)
    scale = np.sqrt(rng.uniform(1.0, 3.0)) / (d * np.sqrt(size)) ** 0.5
    factors = scale * rng.standard_normal((layer.heads, 2, d, size))
    angles = np.arange(k)[:, None] * 10000.0 ** (-2.0 * np.arange(size // 2) / size)
    rotations = np.exp(1j * angles)

    def rotated(rows: Array) -> Array:
        pairs = (rows[..., 0::2] + 1j * rows[..., 1::2]) * rotations
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    scores = [rotated(X @ q) @ rotated(X @ key).swapaxes(1, 2) for q, key in factors]
    return X, attended(X, scores, layer.projection)


def attended(X: Array, scores: list[Array], projection: Array) -> Array:
    """Σ_i softmax(scores_i) X W_i."""
    return sum(softmax(s, axis=-1) @ X @ W for s, W in zip(scores, projection, strict=True))


# Another operation after the layer


def mlp_behind(given: Inputs) -> tuple[Array, Array]:
    """A perceptron with one hidden layer of GELU units."""
    d = given.X.shape[2]
    first, second = given.rng.standard_normal((2, d, 2 * d)) / np.sqrt(d)
    rows = given.layer()(given.X)
    hidden = rows / np.sqrt(np.mean(rows**2)) @ first
    return given.X, hidden * (1 + erf(hidden / np.sqrt(2))) / 2 @ second.T


def layer_norm_behind(given: Inputs) -> tuple[Array, Array]:
    return given.X, layer_norm(given.layer()(given.X))


# No attention


def tanh_network(given: Inputs) -> tuple[Array, Array]:
    """One hidden layer on the whole sequence."""
    n, k, d = given.X.shape
    first = given.rng.standard_normal((k * d, 4 * d)) / np.sqrt(k * d)
    second = given.rng.standard_normal((4 * d, k * d)) / np.sqrt(4 * d)
    hidden = np.tanh(2 * given.X.reshape(n, k * d) @ first)
    return given.X, (hidden @ second).reshape(n, k, d)


def parity(given: Inputs) -> tuple[Array, Array]:
    """Each output is the product of three coordinates of the row's own token."""
    d = given.X.shape[2]
    triples = np.stack([given.rng.choice(d, size=3, replace=False) for _ in range(d)])
    return given.X, given.X[:, :, triples].prod(axis=-1)


def sine_of_neighbours(given: Inputs) -> tuple[Array, Array]:
    """The sine of a map of the mean of three consecutive tokens, periodic in the sequence."""
    d = given.X.shape[2]
    mean = (np.roll(given.X, 1, axis=1) + given.X + np.roll(given.X, -1, axis=1)) / 3
    return given.X, np.sin(2 * mean @ given.rng.standard_normal((d, d)) / np.sqrt(d))


@dataclass(frozen=True)
class Kind:
    """A target, and words that name the cause in advice; () if there is no cause to name."""

    target: Target
    words: tuple[str, ...]


KINDS: dict[str, Kind] = {
    "causal forgotten": Kind(causal, ("causal",)),
    "mask forgotten": Kind(mask, ("mask", "padding")),
    "mask forgotten, zeros": Kind(zero_padding, ("mask", "padding")),
    "bias forgotten": Kind(bias, ("bias",)),
    "one head too few": Kind(too_few_heads, ("heads",)),
    "swapped axes": Kind(swapped_axes, ("axes", "axis", "transpose")),
    "sliding window": Kind(window, ("window", "local", "neighbo")),
    "rotary positions": Kind(rotary, ("position", "rotary")),
    "MLP behind": Kind(mlp_behind, ("mlp", "behind", "after the layer", "nonlinear")),
    "layer norm behind": Kind(layer_norm_behind, ("norm", "behind", "after the layer")),
    "tanh network": Kind(tanh_network, ()),
    "parity": Kind(parity, ()),
    "sine of neighbours": Kind(sine_of_neighbours, ()),
}
