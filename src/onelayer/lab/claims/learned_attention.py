"""Learned attention beside random features, on what an attention layer computes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from onelayer import inputs
from onelayer.lab import comparing, figures, gradient_descent, learning
from onelayer.lab.claim import CannotJudge, Check, Claim, Measured, Results, grid
from onelayer.lab.seeds import generator
from onelayer.layer import AttentionLayer
from onelayer.recovery.api import recover

if TYPE_CHECKING:
    from matplotlib.figure import Figure

METHODS = ("refine", "gradient descent", "random features")
FLAT, SHARP = 0.1, 2.0  # standard deviations of scores: almost a mean, and a choice among tokens
RATE = 0.03  # of gradient descent at its start

ENOUGH = 4.0  # equations per unknown
EXACT = 1e-12  # of the variance: what `refine` may leave with as many
FAR_OFF = 0.1  # what random features leave at least, with as many
SMALL = 0.01  # the error for which examples are counted
SUFFICIENT = 0.05  # what random features may leave of a flat layer with the most examples

Numbers = np.ndarray[Any, Any]


def measure(
    method: str,
    sharpness: float,
    examples: int,
    dim: int,
    tokens: int,
    heads: int,
    random_heads: int,
    steps: int,
    seed: int,
) -> Measured:
    """The error on new examples over the variance, all output rows of the layer together."""
    layer = AttentionLayer.random(heads, dim, scale=sharpness, seed=generator(seed, "layer"))
    X = _tokens(examples, tokens, dim, generator(seed, "inputs"))
    new = _tokens(learning.TEST_EXAMPLES, tokens, dim, generator(seed, "test inputs"))
    Y, expected = layer(X), layer(new)
    if method == "refine":
        drawn = generator(seed, "search")
        found = recover(X, Y, heads, method="refine", restarts=5, max_steps=500, seed=drawn)
        predicted = found.layer(new)
    elif method == "gradient descent":
        drawn = generator(seed, "start")
        predicted = gradient_descent.fit(X, Y, heads, steps, RATE, drawn)(new)
    else:
        model = learning.model("rfa", random_heads, dim, seed)
        model.fit(_queries(X), Y.reshape(-1, dim))
        predicted = model.predict(_queries(new)).reshape(expected.shape)
    spread = np.sum((expected - expected.mean(axis=(0, 1))) ** 2)
    return {"error": float(np.sum((predicted - expected) ** 2) / spread)}


def _tokens(count: int, tokens: int, dim: int, rng: np.random.Generator) -> Numbers:
    """Examples on the sphere of radius √d, where the scale of a layer is that of its scores."""
    return np.asarray(inputs.sphere(count, tokens, dim, rng)) * math.sqrt(dim)


def _queries(X: Numbers) -> Numbers:
    """Every token of an example as the query to all of its tokens, of unit norm."""
    _, tokens, dim = X.shape
    rows = np.concatenate([X.reshape(-1, 1, dim), np.repeat(X, tokens, axis=0)], axis=1)
    return rows / math.sqrt(dim)


def equations_per_unknown(results: Results, examples: int) -> float:
    """Numbers in the outputs of the examples, over numbers in the layer."""
    dim, tokens, heads = (results.of(name)[0] for name in ("dim", "tokens", "heads"))
    return float(examples * tokens * dim / (heads * 2 * dim**2))


def judge(results: Results) -> list[Check]:
    comparing.require(results, "method", METHODS)
    comparing.require(results, "sharpness", (FLAT, SHARP))
    sizes = comparing.at_least_two(results, "examples")
    enough = [n for n in sizes if equations_per_unknown(results, n) >= ENOUGH]
    if not enough:
        raise CannotJudge(f"no number of examples has {ENOUGH:g} equations per unknown")
    sharp, flat = results.where(sharpness=SHARP), results.where(sharpness=FLAT)
    refined = max(
        comparing.median(part.where(method="refine", examples=n), "error")
        for part in (sharp, flat)
        for n in enough
    )
    rough = comparing.median(sharp.where(method="random features", examples=enough[0]), "error")
    simple = comparing.median(flat.where(method="random features", examples=sizes[-1]), "error")
    needed = [_needed(sharp.where(method=method)) for method in METHODS]
    return [
        Check(
            f"refine is exact from {ENOUGH:g} equations per unknown on",
            f"{refined:.1g} of the variance at most, from {enough[0]} examples on",
            refined <= EXACT,
        ),
        Check(
            "with as many examples random features are far off on a sharp layer",
            f"{rough:.2g} of the variance with {enough[0]} examples",
            rough >= FAR_OFF,
        ),
        Check(
            "on a sharp layer gradient descent needs as many examples as refine or more, and fewer "
            "than random features",
            f"for an error of {SMALL:g}: "
            + ", ".join(f"{m} {_shown(n, sizes)}" for m, n in zip(METHODS, needed, strict=True)),
            needed[0] <= needed[1] < needed[2],
        ),
        Check(
            "on a flat layer, almost a mean of the tokens, random features come near",
            f"{simple:.2g} of the variance with {sizes[-1]} examples",
            simple <= SUFFICIENT,
        ),
    ]


def _needed(results: Results) -> float:
    """The fewest examples whose median error is small, infinite if there are none."""
    sizes = sorted(results.of("examples"))
    errors = [comparing.median(results.where(examples=n), "error") for n in sizes]
    return min(
        (n for n, error in zip(sizes, errors, strict=True) if error <= SMALL), default=math.inf
    )


def _shown(needed: float, sizes: list[int]) -> str:
    return f"{needed:g}" if math.isfinite(needed) else f"over {sizes[-1]}"


def draw(results: Results, figure: Figure) -> None:
    panels = figure.subplots(1, len(results.of("sharpness")), sharey=True, squeeze=False)[0]
    sizes = results.of("examples")
    enough = ENOUGH / equations_per_unknown(results, 1)
    for axes, (sharpness, part) in zip(panels, results.by("sharpness"), strict=True):
        for number, (method, cells) in enumerate(part.by("method")):
            figures.curve(axes, cells, "examples", "error", method, number)
        axes.set_yscale("log")
        figures.predicted(
            axes,
            [enough, enough, max(max(sizes), enough)],
            [1, EXACT, EXACT],
            "predicted bound on refine",
        )
        comparing.spaced(axes, sizes)
        axes.set(xlabel="examples $n$", title=f"scores of standard deviation {sharpness:g}")
    panels[0].set_ylabel("test error / variance")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)


CLAIM = Claim(
    name="learned-attention",
    title="Learned attention is exact where random features are still far off",
    source=learning.FIRST_PAPER,
    prediction=(
        "A conjecture on a question that the paper leaves open: what a softmax attention layer of "
        "few heads computes is learned by a layer whose attention is learned too: exactly from a "
        "few equations per unknown by Gauss-Newton steps (refine), to a small error from no fewer "
        "examples by gradient descent, where random features with trained values are far off. "
        "Where the layer's attention is almost flat, so that it computes a mean of its tokens, "
        "random features come near too."
    ),
    rule=(
        "Median errors on new examples, relative to the variance. From "
        f"{ENOUGH:g} equations per unknown on, refine leaves at most {EXACT:g}, and with the "
        f"fewest such examples random features leave at least {FAR_OFF} for scores of standard "
        f"deviation {SHARP:g}; for an error of {SMALL} there, gradient descent needs at least as "
        "many examples as refine, and fewer than random features; for scores of standard deviation "
        f"{FLAT}, random features leave at most {SUFFICIENT} with the most examples."
    ),
    sizes={
        "quick": {
            "method": list(METHODS),
            "sharpness": [FLAT, SHARP],
            "examples": [16, 32, 64, 128],
            "dim": 8,
            "tokens": 4,
            "heads": 2,
            "random_heads": 100,
            "steps": 1000,
            "seeds": 2,
        },
        "default": {
            "method": list(METHODS),
            "sharpness": [FLAT, SHARP],
            "examples": [32, 64, 128, 256, 512],
            "dim": 16,
            "tokens": 4,
            "heads": 4,
            "random_heads": 300,
            "steps": 2000,
            "seeds": 3,
        },
        "paper": {
            "method": list(METHODS),
            "sharpness": [FLAT, SHARP],
            "examples": [16, 32, 64, 128, 256, 512],
            "dim": 16,
            "tokens": 16,
            "heads": 8,
            "random_heads": 1000,
            "steps": 5000,
            "seeds": 5,
        },
    },
    cells=grid,
    measure=measure,
    judge=judge,
    draw=draw,
    kind="conjecture",
)
