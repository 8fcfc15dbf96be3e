"""Parities resist recovery where random layers of their shape do not.

In the worst case the cost of learning is exponential in the number of heads: a layer of m heads can
hold the parity of m of d bits, which takes of order d^m statistical queries. Gauss-Newton steps
should learn random layers of that shape from a constant times the examples that counting unknowns
asks for. On parities they should need more and more examples, or fail, as bits are added. The six
phases, which need outputs of many dimensions, should refuse. No wrong layer should be called
converged.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from onelayer import inputs
from onelayer.lab import figures, rules
from onelayer.lab.claim import SECOND_PAPER, Check, Claim, Measured, Results, Undecided, by_size
from onelayer.lab.recovery_setup import NEAR, SCALE, Array, fewest_examples, worst_head
from onelayer.lab.seeds import generator
from onelayer.layer import AttentionLayer
from onelayer.recovery.api import recover
from onelayer.recovery.hard import hard_instance

NAMES = {"random": "random layers", "parity": "parities"}
COUNTS = 4.0  # random layers take at most this many times the examples that counting asks for
HARDER = 4.0  # parities of the most bits take at least this many times those of random layers
FRESH = 2000  # examples to compare outputs on
TOLERANCE = 1e-3  # the error on the examples at which a search may end
SETTINGS = by_size(
    layer=list(NAMES),
    heads=([1, 5], [1, 3, 5], [1, 3, 5, 7]),
    dim=(8, 12, 16),
    tokens=([3], [3, 4], [2, 3, 4]),
    largest=(8, 16, 256),
    max_steps=(100, 100, 1000),
    seeds=(2, 3, 5),
)


def measure(
    layer: str, heads: int, dim: int, tokens: int, largest: int, max_steps: int, seed: int
) -> Measured:
    """How many examples Gauss-Newton steps take to learn the outputs: times the count, or None.

    The count is what `fewest_examples` asks for; it is doubled up to `largest` times. Outputs on
    fresh inputs decide, not heads: where softmax is a maximum, other heads have the same outputs.
    """
    truth = layer_of(layer, heads, dim, seed)
    fresh = inputs.boolean(FRESH, tokens, dim, generator(seed, "fresh inputs"))
    count = fewest_examples(heads, dim, tokens, out_dim=1)
    wrong_claims, times = 0, 1
    while True:
        X = inputs.boolean(math.ceil(times * count), tokens, dim, generator(seed, "inputs"))
        search: dict[str, Any] = {"max_steps": max_steps, "seed": generator(seed, "search")}
        found = recover(X, truth(X), heads, method="refine", tol=TOLERANCE, **search)
        error = output_error(found.layer, truth, fresh)
        wrong_claims += found.converged and error > NEAR
        if error <= NEAR or 2 * times > largest:
            break
        times *= 2
    sculpted = recover(X, truth(X), heads, method="sculpt", **search)
    wrong_claims += sculpted.converged and output_error(sculpted.layer, truth, fresh) > NEAR
    return {
        "times": times if error <= NEAR else None,
        "tried": times,
        "error": error,
        "head_error": worst_head(found.layer, truth),
        "reason": found.reason.name.lower(),
        "sculpt_reason": sculpted.reason.name.lower(),
        "sculpt_converged": sculpted.converged,
        "wrong_claims": wrong_claims,
    }


def layer_of(name: str, heads: int, dim: int, seed: int) -> AttentionLayer:
    """The parity of as many bits as heads, or a random layer; both have one output."""
    if name == "parity":
        return hard_instance(heads, dim)
    return AttentionLayer.random(heads, dim, SCALE, out_dim=1, seed=generator(seed, "layer"))


def output_error(estimate: AttentionLayer, truth: AttentionLayer, X: Array) -> float:
    """Relative, root mean square."""
    outputs = truth(X)
    return float(np.linalg.norm(estimate(X) - outputs) / np.linalg.norm(outputs))


RULE = f"""Examples are doubled until Gauss-Newton steps, with a limited number of steps, have
outputs within {NEAR:.0%} on fresh inputs. Medians over seeds, for every number of tokens, with
twice the most that was tried where that was not enough: random layers take at most {COUNTS:g} times
the count of unknowns; parities of the most bits at least {HARDER:g} times as many as random layers,
by a larger factor than for the fewest bits. The six phases refuse every parity, and no result that
is said to be right has outputs off by more than {NEAR:.0%}."""


def judge(results: Results) -> list[Check]:
    if len(results.of("heads")) < 2 or set(results.of("layer")) != set(NAMES):
        raise Undecided("parities of two numbers of bits are compared with random layers")
    random = {tokens: least_times(part, "random") for tokens, part in results.by("tokens")}
    factors = {tokens: factor_by_heads(part) for tokens, part in results.by("tokens")}
    ends = [(factor[min(factor)], factor[max(factor)]) for factor in factors.values()]
    hard = results.where(layer="parity")
    refused = sum(not cell["sculpt_converged"] for cell in hard)
    reasons = sorted({cell["sculpt_reason"] for cell in hard})
    listed = f"{refused} of {len(hard)}: {', '.join(reasons)}"
    wrong = sum(cell["wrong_claims"] for cell in results)
    heads = max((cell["head_error"] for cell in hard if cell["times"] is not None), default=0.0)
    return [
        Check(
            f"random layers are learned from at most {COUNTS:g} times the examples of counting",
            rules.by_tokens(random),
            all(max(times.values()) <= COUNTS for times in random.values()),
        ),
        Check(
            f"parities of the most bits take at least {HARDER:g} times as many, or are not learned",
            rules.by_tokens(factors),
            all(most >= HARDER for _, most in ends),
        ),
        Check(
            "that factor is larger for the most bits than for the fewest",
            "; ".join(f"{fewest:.2g} to {most:.2g}" for fewest, most in ends),
            all(most > fewest for fewest, most in ends),
        ),
        Check("the six phases refuse every parity", listed, refused == len(hard)),
        Check(
            f"no result that is said to be right has outputs off by more than {NEAR:.0%}",
            f"{wrong} (where outputs of parities are right, heads are off by up to {heads:.0%})",
            wrong == 0,
        ),
    ]


def factor_by_heads(results: Results) -> dict[int, float]:
    """How many times the examples of random layers parities take, at least, by number of heads."""
    (largest,) = results.of("largest")
    hard, easy = least_times(results, "parity"), least_times(results, "random")
    factors = {heads: hard[heads] / easy[heads] for heads in hard}
    most = max(factors)
    if hard[most] > largest and factors[most] < HARDER:
        raise Undecided(f"parities are not learned from {largest} times the count: try more")
    return factors


def least_times(results: Results, layer: str) -> dict[int, float]:
    """The median over seeds of the examples needed, at least, in units of the count."""
    return at_least(results.where(layer=layer)).medians("times", by="heads")


def at_least(results: Results) -> Results:
    """The same cells, where what was not learned takes twice the most that was tried."""
    known = [{"times": cell["times"] or 2 * cell["tried"]} for cell in results]
    return Results(tuple(replace(c, measured=m) for c, m in zip(results, known, strict=True)))


def draw(results: Results, figure: figures.Figure) -> None:
    panels = figure.subplots(1, len(results.of("tokens")), sharey=True, squeeze=False)[0]
    for axes, (tokens, part) in zip(panels, results.by("tokens"), strict=True):
        figures.curves(axes, at_least(part), "heads", "times", "layer", NAMES.__getitem__)
        (largest,), heads = part.of("largest"), part.of("heads")
        # Arrows up from medians that are bounds only, since most seeds were not learned.
        for number, layer in enumerate(part.of("layer")):
            arrow = {"arrowstyle": "->", "color": figures.COLOURS[number]}
            for count, times in least_times(part, layer).items():
                if times > largest:
                    axes.annotate("", (count, 1.5 * times), (count, times), arrowprops=arrow)
        axes.set_ylim(top=4 * largest)
        figures.level(axes, heads, COUNTS, "asked of random layers", 0)
        axes.plot([], [], "k", linestyle="", marker=r"$\uparrow$", label="at least: not learned")
        axes.set_yscale("log", base=2)
        axes.set(xlabel="heads $m$", title=f"{tokens} tokens", xticks=heads)
        axes.yaxis.set_major_formatter("{x:g}")
    panels[0].set_ylabel("examples needed / count")


CLAIM = Claim(SECOND_PAPER, RULE, SETTINGS, measure, judge, draw)
