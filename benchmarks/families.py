"""Layers and examples of many kinds: badly scaled, repeated, rounded, noisy.

Every problem is a deterministic function of its run number. Three of four runs depart from plain
inputs and exact outputs in one respect, every fourth in several.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from trials import Problem, Record

import onelayer as ol

Array = np.ndarray[Any, Any]

DIMS = (4, 6, 8, 12, 16)
LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Family:
    """Departures of a problem from plain inputs and exact outputs."""

    inputs: str = "gaussian"
    geometry: str = "plain"
    repetition: str = "none"
    scale: float = 1.0
    outputs: str = "float64"
    input_dtype: str = "float64"
    layer: str = "full rank"


DEPARTURES: dict[str, tuple[Any, ...]] = {
    "inputs": ("gaussian", "boolean", "sphere"),
    "geometry": (
        *("decay to 1e-1", "decay to 1e-2", "decay to 1e-4", "decay to 1e-6"),
        *("layer norm", "layer norm with gain", "mean 10", "rank-deficient"),
        *("correlated coordinates", "correlated tokens", "integers", "columns of 1e-2 to 1e2"),
    ),
    "repetition": ("repeated tokens", "small vocabulary", "examples copied", "inputs copied"),
    "scale": (1e-3, 1e-2, 0.1, 10.0, 100.0, 1e3),
    "outputs": (
        *("float32", "float16", "bfloat16", "three decimals"),
        *("noise 1e-6", "noise 1e-3", "noise 1e-2", "noise 1e-1"),
    ),
    "input_dtype": ("float32", "float16"),
    "layer": ("known rank", "bias", "bias and known rank", "fewer outputs"),
}
SINGLE = [(axis, value) for axis, values in DEPARTURES.items() for value in values]


def family_of(run: int, rng: np.random.Generator) -> tuple[str, Family]:
    """The family of a run and its name: one departure, or a combination of two to five."""
    if run % 4 < 3:
        axis, value = SINGLE[(run - run // 4) % len(SINGLE)]
        family = replace(Family(), **{axis: value})
        if axis != "inputs":
            family = replace(family, inputs=str(rng.choice(DEPARTURES["inputs"])))
        return f"{axis.replace('_', ' ')}: {value}", family
    axes = rng.choice(list(DEPARTURES), size=rng.integers(2, 6), replace=False)
    chosen = {axis: DEPARTURES[axis][rng.integers(len(DEPARTURES[axis]))] for axis in axes}
    return "combination", Family(**chosen)


def departures(labels: Record) -> str:
    """Departures of a recorded problem, as text."""
    usual = vars(Family())
    return ", ".join(
        f"{axis.replace('_', ' ')} {labels[axis]}" for axis in usual if labels[axis] != usual[axis]
    )


def problem(run: int, dims: tuple[int, ...] = DIMS) -> Problem:
    """The examples of a run, their layer, and the name of the family."""
    rng = np.random.default_rng(run)
    name, family = family_of(run, rng)
    d, k, m = int(rng.choice(dims)), int(rng.integers(3, 7)), int(rng.integers(1, 4))
    e = max(1, d // 2) if family.layer == "fewer outputs" else d
    rank = int(rng.integers(1, d // 2 + 1)) if "known rank" in family.layer else None
    bias = "bias" in family.layer
    equations = float(np.exp(rng.uniform(np.log(4), np.log(20))))
    n = examples_for(equations, d, k, m, e, bias)
    X, source = tokens(family, (n, k, d), rng)
    scale, standardised = float(rng.uniform(0.5, 5.0)), bool(rng.integers(2))
    layer = ol.AttentionLayer.random(m, d, scale=scale, rank=rank, out_dim=e, seed=rng, bias=bias)
    if standardised:
        layer = with_score_scale(layer, X.astype(float), scale)
    Y = rounded(layer(X.astype(float)), family.outputs, rng)
    if family.repetition == "examples copied":  # with their noise, as in a file with duplicates
        X, Y = X[source], Y[source]
    labels = {"family": name, **vars(family), "dim": d, "tokens": k, "heads": m, "out_dim": e}
    labels |= {"rank": rank, "bias": bias, "examples": n, "equations": round(equations, 2)}
    labels |= {"score_scale": round(scale, 3), "standardised": standardised}
    return Problem(labels, X, Y, layer, {"heads": m, "rank": rank, "bias": bias})


def examples_for(equations: float, d: int, k: int, m: int, e: int, bias: bool) -> int:
    """Number of examples for this many equations per unknown."""
    unknowns = m * (d * d + d * e + bias * d) + bias * e
    return max(2, round(equations * unknowns / (k * e)))


def tokens(
    family: Family, shape: tuple[int, int, int], rng: np.random.Generator
) -> tuple[Array, Array]:
    """Inputs of a family, and the index of the example that each one copies."""
    n, k, d = shape
    draw = getattr(ol.inputs, family.inputs)
    rank = max(2, d // 2) if family.geometry == "rank-deficient" else d
    X = placed(draw(n, k, rank, seed=rng), family.geometry, d, rng)
    source = np.arange(n) // rng.integers(2, 6)
    if family.repetition == "repeated tokens":
        X[:, 1:] = np.where(rng.random((n, k - 1, 1)) < 0.5, X[:, :1], X[:, 1:])
    elif family.repetition == "small vocabulary":
        table = X.reshape(-1, d)[: rng.integers(2, d)]
        X = table[rng.integers(len(table), size=(n, k))]
    elif family.repetition == "inputs copied":  # with independent noise in the outputs
        X = X[source]
    return (family.scale * X).astype(family.input_dtype), source


def placed(X: Array, geometry: str, d: int, rng: np.random.Generator) -> Array:
    """Transform independent coordinates to a geometry with random directions."""
    k = X.shape[1]
    if geometry.startswith("decay to"):
        rotation = np.linalg.qr(rng.standard_normal((d, d)))[0]
        return X * np.geomspace(1.0, float(geometry.split()[-1]), d) @ rotation
    if geometry.startswith("layer norm"):
        return layer_norm(X) * (rng.lognormal(0.0, 0.5, d) if "gain" in geometry else 1.0)
    if geometry == "mean 10":
        return X + 10.0
    if geometry == "integers":
        return np.rint(5.0 * X)
    if geometry.startswith("columns"):
        return X * 10.0 ** rng.uniform(-2.0, 2.0, d)
    if geometry == "rank-deficient":
        return X @ rng.standard_normal((X.shape[2], d)) / np.sqrt(X.shape[2])
    if geometry == "correlated coordinates":
        return X @ np.linalg.cholesky(autoregressive(d)).T
    if geometry == "correlated tokens":
        return np.linalg.cholesky(autoregressive(k)) @ X
    return X


def layer_norm(X: Array) -> Array:
    centred = X - X.mean(axis=-1, keepdims=True)
    return centred / np.sqrt(np.mean(centred**2, axis=-1, keepdims=True) + 1e-5)


def autoregressive(size: int, correlation: float = 0.95) -> Array:
    steps = np.arange(size)
    return correlation ** np.abs(steps[:, None] - steps)


def with_score_scale(layer: ol.AttentionLayer, X: Array, scale: float) -> ol.AttentionLayer:
    """The layer rescaled so that scores of every head have this standard deviation on X.

    Scores are centred in each row, because a constant does not change a softmax.
    """
    keys = X[:500].swapaxes(1, 2)
    scores = np.stack([X[:500] @ theta @ keys for theta in layer.attention])
    if layer.key_bias is not None:
        scores += layer.key_bias[:, None, None] @ keys
    deviation = (scores - scores.mean(axis=-1, keepdims=True)).std(axis=(1, 2, 3))
    factor = np.divide(scale, deviation, out=np.ones_like(deviation), where=deviation > 0)
    bias = None if layer.key_bias is None else factor[:, None] * layer.key_bias
    theta = factor[:, None, None] * layer.attention
    return ol.AttentionLayer(theta, layer.projection, bias, layer.output_bias)


def rounded(Y: Array, outputs: str, rng: np.random.Generator) -> Array:
    """Outputs with fewer digits or with noise.

    Outputs that would overflow in float16 are rounded to float32.
    """
    if outputs == "float64":
        return Y
    if outputs.startswith("noise"):
        return noisy(Y, float(outputs.split()[-1]), rng)
    if outputs == "three decimals":
        return np.round(Y, 3)
    if outputs == "float16" and np.abs(Y).max() < LARGEST_HALF:
        Y = Y.astype(np.float16)
    single = Y.astype(np.float32)
    if outputs == "bfloat16":  # the upper half of a float32, rounded to even
        bits = single.view(np.uint32)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        single = bits.astype(np.uint32).view(np.float32)
    return single


def noisy(Y: Array, noise: float, rng: np.random.Generator) -> Array:
    """Outputs with Gaussian noise, relative to their root mean square."""
    return Y + noise * np.sqrt(np.mean(Y**2)) * rng.standard_normal(Y.shape)
