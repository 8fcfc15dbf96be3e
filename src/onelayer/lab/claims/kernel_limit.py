"""With many heads random-feature attention is a kernel method.

As heads are added, the Gram matrix of the features of RFA and BRFA converges to a kernel in closed
form, and ridge regression on the features to ridge regression with the kernel, at the rate M^{-1/2}
of averages over M independent heads.
"""

from itertools import product
from typing import Any

import numpy as np

from onelayer import inputs
from onelayer.features.estimators import AttentionFeatures, AttentionKernelRidge
from onelayer.features.kernels.functions import attention_kernel
from onelayer.lab import figures, rules
from onelayer.lab.claim import FIRST_PAPER, Check, Claim, Measured, Results, by_size
from onelayer.lab.learning_setup import BIASES, PAPER, make_model
from onelayer.lab.seeds import generator
from onelayer.theory import targets

RATE, TOLERANCE = -0.5, 0.1  # of the exponent in the number of heads
ALPHA = 0.01  # the same penalty for both
TEST_EXAMPLES = 500
DISTANCES = {"gram": "Gram matrix", "predictions": "predictions"}
SETTINGS = by_size(
    model=["rfa", "brfa"],
    heads=([16, 64, 256, 1024], [16, 64, 256, 1024, 4096], [16, 64, 256, 1024, 4096]),
    dim=(4, 8, 16),
    keys=(4, 8, 16),
    examples=(100, 200, 500),
    seeds=10,
)


def measure(model: str, heads: int, dim: int, keys: int, examples: int, seed: int) -> Measured:
    """Relative distances to the limit: of the Gram matrix, and of predictions on a test set."""
    X = inputs.sphere(examples + TEST_EXAMPLES, keys + 1, dim, generator(seed, "inputs"))
    train, test = X[:examples], X[examples:]
    chosen = [targets.average_power(1, dim), targets.correlation_weighted(1, dim)]
    Y = np.stack([target(train) / target.variance(keys) ** 0.5 for target in chosen], axis=1)
    bias = BIASES[model]
    finite = make_model(model, heads, dim, seed, ALPHA).fit(train, Y)
    limit = AttentionKernelRidge(bias, ALPHA, **PAPER).fit(train, Y)
    drawn = AttentionFeatures(heads, bias, standardize=False, random_state=generator(seed, "model"))
    features = drawn.fit_transform(train)
    return {
        "gram": _distance(features @ features.T, attention_kernel(train, bias=bias)),
        "predictions": _distance(finite.predict(test), limit.predict(test)),
    }


def _distance(found: np.ndarray[Any, Any], limit: np.ndarray[Any, Any]) -> float:
    return float(np.linalg.norm(found - limit) / np.linalg.norm(limit))


RULE = f"""The relative distance to the limit, of the Gram matrix (Frobenius norm) and of
predictions on a test set (root mean square), is fitted by a power of M through the medians over the
seeds. Its exponent is within {TOLERANCE} of {RATE}, for RFA and for BRFA."""


def judge(results: Results) -> list[Check]:
    rules.at_least_two(results, "heads")
    checks = []
    for (model, part), (name, title) in product(results.by("model"), DISTANCES.items()):
        found = part.medians(name, by="heads")
        rate = rules.exponent(list(found), list(found.values()))
        ends = ", ".join(f"{found[m]:.2g} at M = {m}" for m in (min(found), max(found)))
        statement = f"{title} of {model.upper()}: distance as M^{RATE}, ± {TOLERANCE}"
        checks.append(Check(statement, f"M^{rate:.2f}: {ends}", abs(rate - RATE) <= TOLERANCE))
    return checks


def draw(results: Results, figure: figures.Figure) -> None:
    shown = {title: (results, name) for name, title in DISTANCES.items()}
    ylabel = "relative distance to the limit"
    panels = figures.panels(figure, shown, "heads", "model", str.upper, ylabel, sharey=True)
    heads = results.of("heads")
    for axes, name in zip(panels, DISTANCES, strict=True):
        first = results.where(heads=heads[0]).median(name)
        line = [first * (count / heads[0]) ** RATE for count in heads]
        figures.predicted(axes, heads, line, "predicted: $M^{-1/2}$")


CLAIM = Claim(FIRST_PAPER, RULE, SETTINGS, measure, judge, draw)
