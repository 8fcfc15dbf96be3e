"""Learned attention is exact where random features are still far off.

An open question of the paper. Conjecture: the outputs of a softmax attention layer of few heads are
learned by a layer whose attention is learned too: exactly from a few equations per unknown by
Gauss-Newton steps (refine), and to a small error from no fewer examples by gradient descent, where
random features with trained values are far off. If the layer's attention is almost flat, so that it
computes a mean of its tokens, random features come near too.
"""

import math
from typing import Any

import numpy as np

from onelayer import inputs
from onelayer.lab import figures, rules
from onelayer.lab.claim import FIRST_PAPER, Check, Conjecture, Measured, Results, Undecided, by_size
from onelayer.lab.learning_setup import TEST_EXAMPLES, make_model
from onelayer.lab.seeds import generator
from onelayer.layer import AttentionLayer
from onelayer.recovery.api import recover

Numbers = np.ndarray[Any, Any]

METHODS = ["refine", "gradient descent", "random features"]
FLAT, SHARP = 0.1, 2.0  # standard deviations of scores: almost a mean, and a choice among tokens
RATE = 0.03  # of gradient descent at its start
_DECAY = (0.9, 0.999)  # of Adam's means of gradients and of their squares (arXiv 1412.6980)
_TINY = 1e-12  # so that a gradient of 0 makes a step of 0

ENOUGH = 4.0  # equations per unknown
EXACT = 1e-12  # largest error of `refine` with enough equations, relative to the variance
FAR_OFF = 0.1  # least error of random features with the same examples
SMALL = 0.01  # the error for which examples are counted
SUFFICIENT = 0.05  # largest error of random features on a flat layer, with the most examples

SETTINGS = by_size(
    method=METHODS,
    sharpness=[FLAT, SHARP],
    examples=([16, 32, 64, 128], [32, 64, 128, 256, 512], [16, 32, 64, 128, 256, 512]),
    dim=(8, 16, 16),
    tokens=(4, 4, 16),
    heads=(2, 4, 8),
    random_heads=(100, 300, 1000),
    steps=(1000, 2000, 5000),
    seeds=(2, 3, 5),
)


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
    new = _tokens(TEST_EXAMPLES, tokens, dim, generator(seed, "test inputs"))
    Y, expected = layer(X), layer(new)
    if method == "refine":
        drawn = generator(seed, "search")
        found = recover(X, Y, heads, method="refine", restarts=5, max_steps=500, seed=drawn)
        predicted = found.layer(new)
    elif method == "gradient descent":
        drawn = generator(seed, "start")
        predicted = descend(X, Y, heads, steps, drawn)(new)
    else:
        model = make_model("rfa", random_heads, dim, seed)
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


def descend(
    X: Numbers, Y: Numbers, heads: int, steps: int, rng: np.random.Generator
) -> AttentionLayer:
    """The layer after `steps` steps of Adam on all weights, its rate falling along half a cosine.

    X is (n, tokens, dim), tokens of about the norm √dim, and Y is (n, tokens, out_dim).
    """
    dim, out_dim = X.shape[2], Y.shape[2]
    weights = [
        rng.standard_normal((heads, dim, dim)) / (2 * dim),
        rng.standard_normal((heads, dim, out_dim)) / math.sqrt(heads * dim),
    ]
    means, squares = ([np.zeros_like(w) for w in weights] for _ in range(2))
    for step in range(1, steps + 1):
        _, gradients = loss(weights[0], weights[1], X, Y)
        now = RATE * (1 + math.cos(math.pi * step / steps)) / 2
        for weight, gradient, mean, square in zip(weights, gradients, means, squares, strict=True):
            mean += (1 - _DECAY[0]) * (gradient - mean)
            square += (1 - _DECAY[1]) * (gradient**2 - square)
            size = np.sqrt(square / (1 - _DECAY[1] ** step)) + _TINY
            weight -= now * (mean / (1 - _DECAY[0] ** step)) / size
    return AttentionLayer(weights[0], weights[1])


def loss(
    attention: Numbers, projection: Numbers, X: Numbers, Y: Numbers
) -> tuple[float, tuple[Numbers, Numbers]]:
    """L = Σ |F(X) - Y|² / Σ |Y|², and its gradients by `attention` and `projection`.

    With P_i the attention of head i, the layer is F = Σ_i P_i X W_i. With R = 2 (F - Y) / Σ |Y|²,

        dL/dW_i = Σ (P_i X)ᵀ R,        dL/dΘ_i = Σ Xᵀ S_i X,

    sums over examples, where S_i = P_i * (D_i - row sums of P_i * D_i) and D_i = R W_iᵀ Xᵀ.
    """
    transposed = np.swapaxes(X, 1, 2)
    scores = X @ attention[:, None] @ transposed  # (heads, n, tokens, tokens)
    weights = np.exp(scores - scores.max(axis=3, keepdims=True))
    weights /= weights.sum(axis=3, keepdims=True)
    attended = weights @ X
    rest = np.sum(attended @ projection[:, None], axis=0) - Y
    scale = np.sum(Y**2)
    slope = 2 * rest / scale
    by_weight = slope @ np.swapaxes(projection, 1, 2)[:, None] @ transposed
    by_score = weights * (by_weight - np.sum(weights * by_weight, axis=3, keepdims=True))
    by_attention = np.sum(transposed @ by_score @ X, axis=1)
    by_projection = np.sum(np.swapaxes(attended, 2, 3) @ slope, axis=1)
    return float(np.sum(rest**2) / scale), (by_attention, by_projection)


def equations_per_unknown(results: Results, examples: int) -> float:
    """Numbers in the outputs of the examples, over numbers in the layer."""
    dim, tokens, heads = (results.of(name)[0] for name in ("dim", "tokens", "heads"))
    return float(examples * tokens * dim / (heads * 2 * dim**2))


RULE = f"""Median errors on new examples, relative to the variance. From {ENOUGH:g} equations per
unknown on, refine leaves at most {EXACT:g}, and with the fewest such examples random features leave
at least {FAR_OFF} for scores of standard deviation {SHARP:g}. For an error of {SMALL} there,
gradient descent needs at least as many examples as refine, and fewer than random features. For
scores of standard deviation {FLAT}, random features leave at most {SUFFICIENT} with the most
examples."""


def judge(results: Results) -> list[Check]:
    rules.require(results, "method", METHODS)
    rules.require(results, "sharpness", (FLAT, SHARP))
    sizes = rules.at_least_two(results, "examples")
    enough = [n for n in sizes if equations_per_unknown(results, n) >= ENOUGH]
    if not enough:
        raise Undecided(f"no number of examples has {ENOUGH:g} equations per unknown")
    sharp, flat = (
        {m: part.where(method=m).medians("error", by="examples") for m in METHODS}
        for part in (results.where(sharpness=SHARP), results.where(sharpness=FLAT))
    )
    refined = max(errors["refine"][n] for errors in (sharp, flat) for n in enough)
    rough = sharp["random features"][enough[0]]
    simple = flat["random features"][sizes[-1]]
    needed = {m: min((n for n in sizes if sharp[m][n] <= SMALL), default=math.inf) for m in METHODS}
    counts = (
        f"{method} {f'{n:g}' if math.isfinite(n) else f'over {sizes[-1]}'}"
        for method, n in needed.items()
    )
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
            f"for an error of {SMALL:g}: {', '.join(counts)}",
            needed["refine"] <= needed["gradient descent"] < needed["random features"],
        ),
        Check(
            "on a flat layer, almost a mean of the tokens, random features come near",
            f"{simple:.2g} of the variance with {sizes[-1]} examples",
            simple <= SUFFICIENT,
        ),
    ]


def draw(results: Results, figure: figures.Figure) -> None:
    shown = {
        f"scores of standard deviation {sharpness:g}": (part, "error")
        for sharpness, part in results.by("sharpness")
    }
    panels = figures.panels(figure, shown, "examples", by="method", sharey=True)
    enough = ENOUGH / equations_per_unknown(results, 1)
    corners = [enough, enough, max(*results.of("examples"), enough)]
    for axes in panels:
        figures.predicted(axes, corners, [1, EXACT, EXACT], "predicted bound on refine")


CLAIM = Conjecture(FIRST_PAPER, RULE, SETTINGS, measure, judge, draw)
