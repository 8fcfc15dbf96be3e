"""Enough random heads express averages of two-token functions.

A random-feature attention layer with sufficiently many heads M expresses every average of a
function of the query and one key: its squared error is of order B(f)/M.
"""

from functools import partial
from itertools import pairwise

from onelayer.lab import figures, rules
from onelayer.lab.claim import FIRST_PAPER, Check, Claim, Measured, Results, by_size
from onelayer.lab.learning_setup import errors_at, make_model
from onelayer.theory import targets

SHARE = 0.02  # largest error with the most heads, relative to the variance
RATE = -0.9  # largest exponent of the last step; theory has -1
TARGETS = {
    "f_{1,1}": partial(targets.average_power, 1),
    "f_{1,2}": partial(targets.average_power, 2),
    "f_{2,1}": partial(targets.correlation_weighted, 1),
}
SETTINGS = by_size(
    heads=([2, 8, 32, 128], [2, 8, 32, 128, 512], [10, 30, 100, 300, 1000]),
    dim=(4, 8, 16),
    keys=(4, 8, 16),
    examples=(2000, 8000, 32000),  # enough that the number of heads limits the error
    seeds=3,
)


def measure(heads: int, dim: int, keys: int, examples: int, seed: int) -> Measured:
    """The test errors on all targets."""
    learned = {name: target(dim) for name, target in TARGETS.items()}
    return errors_at(make_model("rfa", heads, dim, seed), learned, keys, examples, seed)


RULE = f"""For every target the median test error falls with every step in the number of heads, in
the last step as M^{RATE} or faster, and with the most heads at most {SHARE} of the target's
variance is left."""


def judge(results: Results) -> list[Check]:
    heads = rules.at_least_two(results, "heads")
    errors = {
        target: [results.where(heads=count).median(target) for count in heads] for target in TARGETS
    }
    rates = {t: rules.exponent(heads[-2:], error[-2:]) for t, error in errors.items()}
    left = {target: error[-1] for target, error in errors.items()}
    return [
        *(
            Check(
                f"the error on {target} falls with every step in the number of heads",
                ", ".join(f"{error:.2g}" for error in found),
                all(after < before for before, after in pairwise(found)),
            )
            for target, found in errors.items()
        ),
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


def draw(results: Results, figure: figures.Figure) -> None:
    axes = figure.subplots()
    heads = sorted(results.of("heads"))
    for number, target in enumerate(TARGETS):
        figures.curve(axes, results, "heads", target, f"${target}$", number)
    left = max(results.where(heads=heads[-1]).median(target) for target in TARGETS)
    line = [left * heads[-1] / count for count in heads]
    figures.predicted(axes, heads, line, "predicted: $1/M$ or faster")
    axes.axhline(SHARE, color="grey", linestyle=":", linewidth=1, label="most that may be left")
    axes.set(xscale="log", yscale="log", xlabel="heads $M$", ylabel="test error / variance")


CLAIM = Claim(FIRST_PAPER, RULE, SETTINGS, measure, judge, draw)
