"""Attention needs as many examples for many keys as for few.

The bound on random-feature attention (RFA) for averages of a function of one key does not depend on
the number N of keys. The bound on a random-feature network on all tokens side by side (RFMLP) grows
with it, as N + 2 for functions of degree 1.
"""

from itertools import pairwise

import numpy as np

from onelayer.lab import figures, learning_setup, rules
from onelayer.lab.claim import FIRST_PAPER, Check, Claim, Measured, Results, Undecided, by_size
from onelayer.lab.grids import grid_by_model
from onelayer.theory import bounds

ERROR = 0.1  # to reach, relative to the variance
SPREAD = 2.0  # largest ratio of the examples that attention needs at two numbers of keys
SHARE = 0.5  # least share of the predicted growth that the network shows
DEGREES = (1, 2)
TARGETS = {degree: f"f_{{1,{degree}}}" for degree in DEGREES}
LINEAR = TARGETS[1]
SETTINGS = by_size(
    model=["rfa", "rfmlp"],
    keys=([2, 8, 32], [2, 4, 8, 16, 32, 64], [2, 4, 8, 16, 32, 64]),
    dim=(6, 8, 16),
    heads=(600, 800, 1000),
    attention_examples=(512, 1024, 4096),
    network_examples=(1024, 2048, 8192),
    seeds=(3, 5, 5),
)


def measure(model: str, keys: int, dim: int, heads: int, examples: int, seed: int) -> Measured:
    """The examples needed for f_{1,1} and f_{1,2}, None where `examples` are too few."""
    estimator = learning_setup.make_model(model, heads, dim, seed)
    return learning_setup.needed_for_powers(estimator, DEGREES, dim, keys, examples, seed, ERROR)


RULE = f"""Examples needed for an error of {ERROR} of the variance (medians): those of RFA on
f_{{1,1}} and on f_{{1,2}} vary by a factor of at most {SPREAD:g} over the numbers of keys; those of
RFMLP on f_{{1,1}} grow with every step in the number of keys, and from the fewest to the most keys
by at least {SHARE:g} of the predicted factor."""


def judge(results: Results) -> list[Check]:
    rules.require(results, "model", ["rfa", "rfmlp"])
    rules.at_least_two(results, "keys")
    attention, network = results.where(model="rfa"), results.where(model="rfmlp")
    constant = {target: _needed(attention, target) for target in TARGETS.values()}
    sizes = _needed(network, LINEAR)
    fewest, most = min(sizes), max(sizes)
    predicted = bounds.sample_size_ratio(1, most) / bounds.sample_size_ratio(1, fewest)
    growth = min(sizes[most], network.of("examples")[0]) / sizes[fewest]
    more = "more than " * (sizes[most] == np.inf)
    return [
        *(
            Check(
                f"RFA needs as many examples for {target} at every number of keys, "
                f"up to {SPREAD:g} times",
                _listed(found),
                max(found.values()) <= SPREAD * min(found.values()),
            )
            for target, found in constant.items()
        ),
        Check(
            f"RFMLP needs more examples for {LINEAR} with every step in the number of keys",
            _listed(sizes),
            all(a < b or a == b == np.inf for a, b in pairwise(sizes.values())),
        ),
        Check(
            f"from {fewest} to {most} keys at least {SHARE:g} of the predicted growth",
            f"{more}{growth:.3g} times, {predicted:.3g} predicted",
            growth >= SHARE * predicted,
        ),
    ]


def _needed(results: Results, target: str) -> dict[int, float]:
    """The examples needed by the number of keys, ascending."""
    found = results.medians(target, by="keys")
    if min(found.values()) == np.inf:
        raise Undecided(f"{results.of('examples')[0]} examples are too few for {target}")
    return dict(sorted(found.items()))


def _listed(sizes: dict[int, float]) -> str:
    return ", ".join(
        f"N = {keys}: {f'{size:.0f}' if np.isfinite(size) else 'not reached'}"
        for keys, size in sizes.items()
    )


def draw(results: Results, figure: figures.Figure) -> None:
    panels = figure.subplots(1, len(DEGREES))
    for axes, (degree, target) in zip(panels, TARGETS.items(), strict=True):
        figures.examples_needed(axes, results, target)
        attention = results.where(model="rfa")
        keys, level = attention.of("keys"), attention.median(target)
        figures.level(axes, keys, level, "predicted: constant", number=0)
        line = [level * bounds.sample_size_ratio(degree, count) for count in keys]
        figures.predicted(axes, keys, line, f"$((N+2)/4)^{degree}$ times that", number=1)
        axes.set_title(f"${target}$ to {ERROR:g} of its variance")


CLAIM = Claim(FIRST_PAPER, RULE, SETTINGS, measure, judge, draw, grid_by_model)
