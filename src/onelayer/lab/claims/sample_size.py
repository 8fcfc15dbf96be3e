"""A network on all tokens needs ((N+2)/4)^p times the examples of attention.

For an average of a function of degree p of one of N keys the bound on random-feature attention
(RFA) asks for an order of (4d)^p examples, that on a random-feature network on all tokens side by
side (RFMLP) for ((N+2)d)^p: ((N+2)/4)^p times as many.
"""

from typing import NamedTuple

import numpy as np

from onelayer.lab import figures, learning_setup, rules
from onelayer.lab.claim import FIRST_PAPER, Check, Claim, Measured, Results, Undecided, by_size
from onelayer.lab.grids import grid_by_model
from onelayer.theory import bounds

ERROR = 0.1  # to reach, relative to the variance
SLACK = 2.0  # factor per degree: bounds have no constants, so (N+2)/4 is known up to one
DEGREES = (1, 2, 3)
SETTINGS = by_size(
    model=["rfa", "rfmlp"],
    keys=([2, 6, 14], [2, 6, 14, 30], [4, 16, 32]),
    dim=(4, 4, 16),
    heads=(600, 1600, 1000),
    attention_examples=(512, 512, 8192),
    network_examples=(1024, 3072, 8192),
    seeds=(3, 3, 5),
)


def measure(model: str, keys: int, dim: int, heads: int, examples: int, seed: int) -> Measured:
    """The examples needed for f_{1,p}, None where `examples` are too few."""
    estimator = learning_setup.make_model(model, heads, dim, seed)
    return learning_setup.needed_for_powers(estimator, DEGREES, dim, keys, examples, seed, ERROR)


class Ratio(NamedTuple):
    """Examples of the network over those of attention; a lower bound where `bound` is set."""

    keys: int
    predicted: float
    measured: float
    bound: bool

    def __str__(self) -> str:
        least = "> " * self.bound
        return f"N = {self.keys}: {least}{self.measured:.3g}, predicted {self.predicted:.3g}"


RULE = f"""The ratio of the examples that RFMLP and RFA need for an error of {ERROR} of the variance
(medians) is for every number of keys at least the predicted one over {SLACK:g}^p and at most
{SLACK:g}^p times it, for p = 1, 2, 3. Where RFMLP does not reach the error, its largest size gives
a lower bound, which counts where it decides. Degrees that RFA does not reach are left out."""


def judge(results: Results) -> list[Check]:
    rules.require(results, "model", ["rfa", "rfmlp"])
    checks: list[Check] = []
    for degree in DEGREES:
        slack, ratios = SLACK**degree, _ratios(results, degree)
        # A lower bound supports "at least" if it is high enough, and refutes "at most" if too high.
        low = [r for r in ratios if not r.bound or r.measured >= r.predicted / slack]
        high = [r for r in ratios if not r.bound or r.measured > r.predicted * slack]
        target, power = f"f_{{1,{degree}}}", f"((N+2)/4)^{degree}"
        least = Check(
            f"on {target} RFMLP needs at least {power} / {slack:g} times the examples of RFA",
            "; ".join(map(str, low)),
            all(r.measured >= r.predicted / slack for r in low),
        )
        most = Check(
            f"on {target} RFMLP needs at most {power} x {slack:g} times the examples of RFA",
            "; ".join(map(str, high)),
            all(r.measured <= r.predicted * slack for r in high),
        )
        checks += [least] * bool(low) + [most] * bool(high)
    if not checks:
        raise Undecided(f"the largest sizes are too small for an error of {ERROR}")
    return checks


def _ratios(results: Results, degree: int) -> list[Ratio]:
    """One for every number of keys with which attention reaches the error."""
    ratios = []
    for keys, part in results.by("keys"):
        needed = part.medians(f"f_{{1,{degree}}}", by="model")
        few, many = needed["rfa"], needed["rfmlp"]
        if np.isfinite(few):
            known = min(many, part.where(model="rfmlp").of("examples")[0])
            predicted = bounds.sample_size_ratio(degree, keys)
            ratios.append(Ratio(keys, predicted, known / few, bound=not np.isfinite(many)))
    return ratios


def draw(results: Results, figure: figures.Figure) -> None:
    panels = figure.subplots(1, len(DEGREES), sharey=True)
    for axes, degree in zip(panels, DEGREES, strict=True):
        target = f"f_{{1,{degree}}}"
        figures.examples_needed(axes, results, target)
        needed = results.where(model="rfa").medians(target, by="keys")
        line = [n * bounds.sample_size_ratio(degree, keys) for keys, n in needed.items()]
        figures.predicted(axes, list(needed), line, r"RFA $\times\ ((N+2)/4)^p$")
        axes.set_title(f"${target}$ to {ERROR:g} of its variance")
        axes.label_outer()


CLAIM = Claim(FIRST_PAPER, RULE, SETTINGS, measure, judge, draw, grid_by_model)
