"""More heads express more: the error of random-feature attention falls as heads are added."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

from onelayer.lab import comparing, figures, learning, scaling
from onelayer.lab.claim import Check, Claim, Measured, Results, grid
from onelayer.theory import targets
from onelayer.theory.targets import Target

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHARE = 0.02  # of the target's variance, which may be left with the most heads
RATE = -0.9  # the exponent of the last step: at most this, where theory has at most -1
TARGETS: dict[str, Callable[[int], Target]] = {
    "f_{1,1}": lambda dim: targets.average_power(1, dim),
    "f_{1,2}": lambda dim: targets.average_power(2, dim),
    "f_{2,1}": lambda dim: targets.correlation_weighted(1, dim),
}


def measure(heads: int, dim: int, keys: int, examples: int, seed: int) -> Measured:
    """The test errors with so many examples that heads are what is missing."""
    chosen = [target(dim) for target in TARGETS.values()]
    model = learning.model("rfa", heads, dim, seed)
    curve = learning.curve(model, chosen, keys, [examples], seed)
    return learning.last_errors(curve, TARGETS)


def judge(results: Results) -> list[Check]:
    heads = comparing.at_least_two(results, "heads")
    errors = {
        target: [comparing.median(results.where(heads=count), target) for count in heads]
        for target in TARGETS
    }
    rates = {t: scaling.exponent(heads[-2:], error[-2:]) for t, error in errors.items()}
    left = {target: error[-1] for target, error in errors.items()}
    return [
        *(_falls(target, error) for target, error in errors.items()),
        Check(
            f"in the last step errors fall as M^{RATE} or faster, predicted M^-1",
            ", ".join(f"{target}: M^{rate:.2f}" for target, rate in rates.items()),
            max(rates.values()) <= RATE,
        ),
        Check(
            f"with the most heads at most {SHARE} of the variance is left",
            ", ".join(f"{target}: {error:.2g}" for target, error in left.items()),
            max(left.values()) <= SHARE,
        ),
    ]


def _falls(target: str, errors: list[float]) -> Check:
    return Check(
        f"the error on {target} falls with every step in the number of heads",
        ", ".join(f"{error:.2g}" for error in errors),
        all(after < before for before, after in pairwise(errors)),
    )


def draw(results: Results, figure: Figure) -> None:
    axes = figure.subplots()
    heads = sorted(results.of("heads"))
    for number, target in enumerate(TARGETS):
        figures.curve(axes, results, "heads", target, f"${target}$", number)
    most = results.where(heads=heads[-1])
    left = max(comparing.median(most, target) for target in TARGETS)
    line = [left * heads[-1] / count for count in heads]
    figures.predicted(axes, heads, line, "predicted: $1/M$ or faster")
    axes.axhline(SHARE, color="grey", linestyle=":", linewidth=1, label="most that may be left")
    axes.set(xscale="log", yscale="log", xlabel="heads $M$", ylabel="test error / variance")
    axes.legend()


CLAIM = Claim(
    name="expressivity",
    title="Enough random heads express averages of two-token functions",
    source=learning.FIRST_PAPER,
    prediction=(
        "A random-feature attention layer with sufficiently many heads M expresses every average "
        "of a function of the query and one key: its squared error is of order B(f)/M."
    ),
    rule=(
        "For every target the median test error falls with every step in the number of heads, in "
        f"the last step as M^{RATE} or faster, and with the most heads at most {SHARE} of the "
        "target's variance is left."
    ),
    sizes={
        "quick": {"heads": [2, 8, 32, 128], "dim": 4, "keys": 4, "examples": 2000, "seeds": 3},
        "default": {
            "heads": [2, 8, 32, 128, 512],
            "dim": 8,
            "keys": 8,
            "examples": 8000,
            "seeds": 3,
        },
        "paper": {
            "heads": [10, 30, 100, 300, 1000],
            "dim": 16,
            "keys": 16,
            "examples": 32000,
            "seeds": 3,
        },
    },
    cells=grid,
    measure=measure,
    judge=judge,
    draw=draw,
)
