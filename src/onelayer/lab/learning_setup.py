"""Models and learning curves that the claims of the first paper measure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import onelayer as ol  # whose estimators are imported when they are used
from onelayer import inputs
from onelayer.lab.seeds import generator
from onelayer.theory.targets import Target, average_power, one_position, ordered_sum

if TYPE_CHECKING:
    from onelayer.features.estimators import Regressor

TEST_EXAMPLES = 2000
ORDER_TEST_EXAMPLES = 8000  # an error is compared with an exact floor: its spread is about 1 %
BIASES = {"rfa": 0.0, "brfa": 1.0}  # times the identity
# The paper's model has no intercept and takes tokens as they are.
PAPER: dict[str, Any] = {"fit_intercept": False, "standardize": False}
# Targets of degree 1 that depend on the order of the keys, by the dimension.
ORDERED: dict[str, Callable[[int], Target]] = {
    "one position": lambda dim: one_position(1, p=1, dim=dim),
    "alternating sum": lambda dim: ordered_sum(dim, weights="alternating"),
    "increasing sum": lambda dim: ordered_sum(dim, weights="increasing"),
}


def make_model(
    name: str, heads: int, dim: int, seed: int, alpha: float | str = "loo", **options: Any
) -> Regressor:
    """The paper's RFA, BRFA or RFMLP; RFMLP has as many trained parameters as the others."""
    drawn = generator(seed, "model")
    if name == "rfmlp":
        return ol.RandomFeatureMLP(heads * (dim + 1), alpha=alpha, random_state=drawn, **PAPER)
    settings = {"bias": BIASES[name], "alpha": alpha, "random_state": drawn} | PAPER | options
    return ol.RandomFeatureAttention(heads, **settings)


def learning_curve(
    estimator: Regressor,
    targets: Sequence[Target],
    keys: int,
    sizes: Sequence[int],
    seed: int,
    test_examples: int = TEST_EXAMPLES,
    noise: float = 0.0,
) -> ol.LearningCurve:
    """Errors at all sizes and for all targets, on tokens uniform on the sphere.

    Training outputs have Gaussian noise of `noise` standard deviations of the target. Test outputs
    have none, so that the error is the excess risk.
    """
    n = max(sizes)
    X = inputs.sphere(n + test_examples, keys + 1, targets[0].dim, generator(seed, "inputs"))
    Y = np.stack([target(X) for target in targets], axis=1)
    spread = [noise * target.variance(keys) ** 0.5 for target in targets]
    noisy = Y[:n] + spread * generator(seed, "noise").standard_normal((n, len(targets)))
    return ol.learning_curve(estimator, X[:n], noisy, X[n:], Y[n:], sizes)


def sizes_up_to(largest: int, least: int = 16, per_octave: int = 2) -> list[int]:
    """Sample sizes from `least` on, `per_octave` an octave, and the largest itself.

    >>> sizes_up_to(70)
    [16, 23, 32, 45, 64, 70]
    """
    steps = range(per_octave * largest.bit_length())
    between = (round(least * 2 ** (i / per_octave)) for i in steps)
    return sorted({size for size in between if size < largest} | {largest})


def needed_for_powers(
    estimator: Regressor,
    powers: Sequence[int],
    dim: int,
    keys: int,
    largest: int,
    seed: int,
    error: float,
) -> dict[str, Any]:
    """The examples needed for each of the f_{1,p}; None where the largest size is too small."""
    averages = [average_power(power, dim) for power in powers]
    curve = learning_curve(estimator, averages, keys, sizes_up_to(largest, least=4), seed)
    return needed(curve, averages, error)


def errors_by_target(curve: ol.LearningCurve, targets: Sequence[Target]) -> dict[str, list[float]]:
    """By the name of the target, the errors at all sizes."""
    return {target.name: curve.test_error[:, i].tolist() for i, target in enumerate(targets)}


def errors_at(
    estimator: Regressor,
    targets: Mapping[str, Target],
    keys: int,
    examples: int,
    seed: int,
    **options: Any,
) -> dict[str, float]:
    """The error on every target after learning from `examples` examples."""
    curve = learning_curve(estimator, [*targets.values()], keys, [examples], seed, **options)
    return dict(zip(targets, map(float, curve.test_error[-1]), strict=True))


def needed(
    curve: ol.LearningCurve, targets: Sequence[Target], error: float
) -> dict[str, float | None]:
    """By the name of the target, the examples needed for an error; None where not reached."""
    sizes = [float(n) if np.isfinite(n) else None for n in curve.samples_needed(error)]
    return dict(zip([target.name for target in targets], sizes, strict=True))


def order_floor(name: str, dim: int, keys: int) -> float:
    """The least error, over the variance, of a function that is invariant to the order of keys.

    The best such estimate of Σ_i w_i <β, x_i> is its mean over all orders,
    (Σ_i w_i) · (1/N) Σ_i <β, x_i>.

    >>> order_floor("one position", dim=8, keys=4), order_floor("alternating sum", dim=8, keys=4)
    (0.75, 1.0)
    """
    total = {
        "one position": 1.0,
        "alternating sum": (keys % 2) / keys,
        "increasing sum": (keys + 1) / 2,
    }[name]
    known = total**2 * average_power(1, dim).variance(keys)
    return 1 - known / ORDERED[name](dim).variance(keys)
