"""Targets that depend on the order of the keys: out of reach for attention without positions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onelayer.lab import blindness, comparing, figures, learning
from onelayer.lab.blindness import ORDERED
from onelayer.lab.claim import Check, Claim, Measured, Results, grid

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ABOVE = 0.95  # of the floor: attention leaves no less, but for the spread of a test set
NEAR = 1.1  # of the floor: attention leaves no more with the most examples
LEARNED = 0.1  # of the variance: a network on all tokens leaves no more with the most examples


def measure(model: str, examples: int, dim: int, keys: int, heads: int, seed: int) -> Measured:
    """The test errors on all targets."""
    estimator = learning.model(model, heads, dim, seed)
    learned = [blindness.target(name, dim) for name in ORDERED]
    curve = learning.curve(estimator, learned, keys, [examples], seed, blindness.TEST_EXAMPLES)
    return learning.last_errors(curve, ORDERED)


def judge(results: Results) -> list[Check]:
    comparing.require(results, "model", ("rfa", "rfmlp"))
    rfa, rfmlp = results.where(model="rfa"), results.where(model="rfmlp")
    most = max(results.of("examples"))
    checks = []
    for target in ORDERED:
        floor = blindness.floor(target, results.of("dim")[0], results.of("keys")[0])
        least = min(comparing.median(part, target) for _, part in rfa.by("examples"))
        last = comparing.median(rfa.where(examples=most), target)
        learned = comparing.median(rfmlp.where(examples=most), target)
        checks += [
            Check(
                f"{target}: attention comes down to {floor:.3g}, and not below",
                f"{last:.3g} with {most} examples, never below {least:.3g}",
                least >= ABOVE * floor and last <= NEAR * floor,
            ),
            Check(
                f"{target}: a network on all tokens learns it",
                f"{learned:.2g} with {most} examples",
                learned <= LEARNED,
            ),
        ]
    return checks


def draw(results: Results, figure: Figure) -> None:
    panels = figure.subplots(1, len(ORDERED), sharex=True, sharey=True)
    sizes = results.of("examples")
    for axes, target in zip(panels, ORDERED, strict=True):
        for number, (model, part) in enumerate(results.by("model")):
            figures.curve(axes, part, "examples", target, model.upper(), number)
        floor = blindness.floor(target, results.of("dim")[0], results.of("keys")[0])
        figures.predicted(axes, sizes, [floor] * len(sizes), "blind to order, exact")
        comparing.spaced(axes, sizes)
        axes.set(yscale="log", xlabel="examples $n$", title=target)
    panels[0].set_ylabel("test error / variance")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


CLAIM = Claim(
    name="order",
    title="Attention without positions learns what does not depend on order, and no more",
    source=learning.FIRST_PAPER,
    prediction=(
        "Attention without positions is the same for all orders of the keys, so on a target "
        "Σ_i w_i <β, x_i> its error comes down to that of the mean over all orders and never below "
        "it: 1 - (Σ_i w_i)² / (N Σ_i w_i²) of the variance, which is 1 - 1/N for one position and "
        "1 for an alternating sum over an even number of keys. A random-feature network on all "
        "tokens side by side sees the order and learns all of it."
    ),
    rule=(
        "Median test errors on the key at position 1 and on the alternating and the increasing "
        f"sum: those of RFA are at no sample size below {ABOVE} of the exact floor, and with the "
        f"most examples at most {NEAR} of it; that of RFMLP, with as many trained parameters, is "
        f"then at most {LEARNED} of the variance."
    ),
    sizes={
        "quick": {
            "model": ["rfa", "rfmlp"],
            "examples": [64, 256, 1024],
            "dim": 8,
            "keys": 8,
            "heads": 100,
            "seeds": 3,
        },
        "default": {
            "model": ["rfa", "rfmlp"],
            "examples": [128, 256, 512, 1024, 2048],
            "dim": 8,
            "keys": 8,
            "heads": 300,
            "seeds": 5,
        },
        "paper": {
            "model": ["rfa", "rfmlp"],
            "examples": [128, 256, 512, 1024, 2048, 4096, 8192],
            "dim": 16,
            "keys": 16,
            "heads": 1000,
            "seeds": 5,
        },
    },
    cells=grid,
    measure=measure,
    judge=judge,
    draw=draw,
)
