"""Too many heads do no harm: the error peaks at as many parameters as examples.

An open question of the paper. Conjecture, from the theory of random features: with almost no
penalty the test error falls, rises to a peak where the M(d+1) parameters of M heads equal the n
examples, and falls again to below its earlier minimum. With a penalty chosen by leave-one-out there
is no peak, and more heads do no harm.
"""

import numpy as np

from onelayer.lab import figures, rules
from onelayer.lab.claim import FIRST_PAPER, Check, Conjecture, Measured, Results, Undecided, by_size
from onelayer.lab.learning_setup import errors_at, make_model
from onelayer.theory import targets

PENALTIES: dict[str, float | str] = {"almost none": 1e-9, "leave-one-out": "loo"}
NEAR = 1.5  # the largest ratio between the parameters at the peak and the examples
PEAK = 2.0  # the least ratio of the peak to the lowest errors on both of its sides
RISE = 1.1  # the largest ratio of an error, with a chosen penalty, to one with fewer heads
SETTINGS = by_size(
    penalty=list(PENALTIES),
    heads=(
        [4, 8, 16, 32, 64, 128, 256, 512],
        [6, 12, 25, 50, 71, 100, 141, 200, 400, 800, 1600],
        [16, 31, 62, 125, 177, 250, 354, 500, 1000, 2000, 4000],
    ),
    noise=0.3,
    examples=(320, 900, 4250),
    dim=(4, 8, 16),
    keys=(4, 8, 16),
    seeds=(3, 5, 5),
)


def measure(
    penalty: str, heads: int, noise: float, examples: int, dim: int, keys: int, seed: int
) -> Measured:
    """The error on test examples without noise, of a fit to f_{2,1} with noise.

    `noise` is its standard deviation relative to that of the target.
    """
    model = make_model("rfa", heads, dim, seed, alpha=PENALTIES[penalty])
    learned = {"error": targets.correlation_weighted(1, dim)}
    return errors_at(model, learned, keys, examples, seed, noise=noise)


RULE = f"""Median test errors on f_{{2,1}} learned with noise. With almost no penalty the largest is
where parameters and examples differ by a factor of at most {NEAR}; it is at least {PEAK:g} times
the lowest with fewer heads and {PEAK:g} times that with the most heads; that with the most heads is
no larger than the lowest with fewer heads than at the peak. With the penalty chosen by
leave-one-out no error is more than {RISE} times the least with fewer heads."""


def judge(results: Results) -> list[Check]:
    rules.require(results, "penalty", list(PENALTIES))
    heads = np.array(rules.at_least_two(results, "heads"))
    ratios = heads * (results.of("dim")[0] + 1) / results.of("examples")[0]
    if not ratios[0] < 1 < ratios[-1]:
        raise Undecided("the parameters of all heads are fewer or more than the examples")
    free, chosen = (
        [results.where(penalty=penalty, heads=m).median("error") for m in heads]
        for penalty in PENALTIES
    )
    at = int(np.argmax(free))
    before = min(free[: at + 1])
    rise = float(np.max(chosen / np.minimum.accumulate(chosen)))
    return [
        Check(
            "with almost no penalty the error peaks where parameters equal examples",
            f"at {ratios[at]:.2f} parameters an example ({heads[at]} heads)",
            1 / NEAR <= ratios[at] <= NEAR,
        ),
        Check(
            f"the peak is at least {PEAK:g} times the lowest error with fewer heads",
            f"{free[at]:.2g} against {before:.2g}",
            free[at] >= PEAK * before,
        ),
        Check(
            f"beyond it the error falls again, by at least {PEAK:g} times",
            f"to {free[-1]:.2g} with {heads[-1]} heads",
            free[at] >= PEAK * free[-1],
        ),
        Check(
            "with the most heads it is no larger than the lowest before the peak",
            f"{free[-1]:.2g} against {before:.2g}",
            free[-1] <= before,
        ),
        Check(
            "with a penalty chosen by leave-one-out there is no peak",
            f"never more than {rise:.2f} times the least error with fewer heads",
            rise <= RISE,
        ),
    ]


def draw(results: Results, figure: figures.Figure) -> None:
    axes = figure.subplots()
    figures.curves(axes, results, "heads", "error", by="penalty", label="penalty: {}".format)
    axes.set_yscale("log")
    threshold = results.of("examples")[0] / (results.of("dim")[0] + 1)
    figures.predicted(axes, [threshold] * 2, list(axes.get_ylim()), "$M(d+1) = n$")
    figures.log_ticks(axes, results.of("heads"), most=12)
    axes.set(xlabel="heads $M$", ylabel="test error / variance")


CLAIM = Conjecture(FIRST_PAPER, RULE, SETTINGS, measure, judge, draw)
