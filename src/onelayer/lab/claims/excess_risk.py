"""The excess risk falls and grows as its bound says.

With many heads the excess risk of random-feature attention is of order √(B(f)/n), up to logarithms:
it falls as n^{-1/2} or faster, and the examples needed for an error grow with B(f)/Var, from target
to target and with the dimension (a bound, without constants).
"""

from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import numpy as np

from onelayer.lab import figures, learning_setup, rules
from onelayer.lab.claim import FIRST_PAPER, Check, Claim, Measured, Results, Undecided, by_size
from onelayer.theory import bounds, targets

ERROR = 0.1  # to reach, relative to the variance; rates are measured from there on
RATE = -0.4  # largest exponent of the excess risk in n; theory has -1/2
POINTS = 3  # least number of sizes to fit a rate to
SLACK = 2.0  # factor on the growth with the dimension: bounds are up to logarithms
TARGETS = {
    "f_{1,1}": partial(targets.average_power, 1),
    "f_{1,2}": partial(targets.average_power, 2),
    "f_{2,1}": partial(targets.correlation_weighted, 1),
    "f_{1,3}": partial(targets.average_power, 3),
}
SETTINGS = by_size(
    dim=([4, 6], [4, 6, 8], [4, 8, 16]),
    noise=[0.0, 0.5],
    keys=(4, 8, 16),
    heads=(300, 600, 1000),
    examples=(1024, 2896, 8192),
    seeds=(3, 3, 5),
)


def measure(dim: int, noise: float, keys: int, heads: int, examples: int, seed: int) -> Measured:
    """The learning curve of every target, and the examples needed for it."""
    chosen = [target(dim) for target in TARGETS.values()]
    sizes = learning_setup.sizes_up_to(examples)
    model = learning_setup.make_model("rfa", heads, dim, seed)
    curve = learning_setup.learning_curve(model, chosen, keys, sizes, seed, noise=noise)
    needed = learning_setup.needed(curve, chosen, ERROR)
    return {
        "sizes": sizes,
        **learning_setup.errors_by_target(curve, chosen),
        **{f"needed {name}": n for name, n in needed.items()},
    }


RULE = f"""Learning curves of four targets in several dimensions, with and without noise in the
training outputs, medians over the seeds. From an error of {ERROR} on, at {POINTS} sizes or more,
the fitted exponent in n is at most {RATE}. Examples needed for {ERROR} grow from the least
dimension to each other by at most {SLACK:g} times the predicted factor. In every dimension the
targets rank as B(f)/Var does. Targets that never reach that error count only in the ranking, as
last."""


def judge(results: Results) -> list[Check]:
    rules.at_least_two(results, "dim")
    rates = {name: list(_rates(results, name)) for name in TARGETS}
    growths = {name: list(_growths(results, name)) for name in TARGETS}
    if not any(rates.values()) or not any(growths.values()):
        raise Undecided(f"the largest size is too small for an error of {ERROR}")
    worst = [max(found) for found in growths.values() if found]
    return [
        *(
            Check(
                f"from {ERROR} on the error on {t} falls as n^{RATE} or faster, predicted n^-0.5",
                f"n^{max(found):.2f}, the slowest of {len(found)}",
                max(found) <= RATE,
            )
            for t, found in rates.items()
            if found
        ),
        Check(
            f"examples needed grow with d no faster than predicted, up to {SLACK:g} times",
            "; ".join(text for _, text in worst),
            max(worst)[0] <= SLACK,
        ),
        _ranked(results),
    ]


def _rates(results: Results, name: str) -> Iterator[float]:
    """The exponent in n from ERROR on, of every learning curve (of medians) that gets there."""
    for _, _, part in _curves(results):
        errors = rules.curve_points(part).medians(name, by="examples")
        first = min((n for n, error in errors.items() if error <= ERROR), default=np.inf)
        tail = {n: error for n, error in errors.items() if n >= first}
        if len(tail) >= POINTS:
            yield rules.exponent(list(tail), list(tail.values()))


def _curves(results: Results) -> Iterator[tuple[int, float, Results]]:
    """All dimensions and all strengths of noise, with their cells."""
    for dim, of_dim in results.by("dim"):
        for noise, part in of_dim.by("noise"):
            yield dim, noise, part


def _growths(results: Results, name: str) -> Iterator[tuple[float, str]]:
    """The growth of the examples needed over the predicted one, and both in words.

    From the least to every larger dimension, where something is known about it.
    """
    for _, part in results.by("noise"):
        needed, largest = part.medians(f"needed {name}", by="dim"), part.of("examples")[0]
        least, *larger = sorted(needed)
        for dim in larger if np.isfinite(needed[least]) else []:
            growth = min(needed[dim], largest) / needed[least]
            predicted = _order(name, dim) / _order(name, least)
            bound = "> " * (needed[dim] == np.inf)
            if not bound or growth / predicted > SLACK:  # else a lower bound decides nothing
                text = f"{name}: {bound}{growth:.3g} times from d = {least} to {dim}"
                yield growth / predicted, f"{text}, predicted {predicted:.3g}"


def _order(name: str, dim: int) -> float:
    """The order of the examples needed that the bound predicts."""
    return bounds.sample_size("rfa", TARGETS[name](dim), error=ERROR)


def _ranked(results: Results) -> Check:
    wrong, curves = [], list(_curves(results))
    for dim, noise, part in curves:
        order = sorted(TARGETS, key=lambda name: _order(name, dim))
        sizes = [part.median(f"needed {name}") for name in order]
        if any(harder < easier for easier, harder in pairwise(sizes)):
            listed = ", ".join(f"{name}: {n:.0f}" for name, n in zip(order, sizes, strict=True))
            wrong.append(f"; not with d = {dim}, noise {noise:g} ({listed})")
    return Check(
        "targets with a larger B(f)/Var need more examples",
        f"{len(curves) - len(wrong)} of {len(curves)} learning curves{''.join(wrong)}",
        not wrong,
    )


def draw(results: Results, figure: figures.Figure) -> None:
    curves, sizes = figure.subplots(1, 2)
    dim, noises = max(results.of("dim")), results.of("noise")
    _draw_curves(curves, results.where(dim=dim, noise=max(noises)))
    curves.set_title(f"$d = {dim}$, noise {max(noises):g}")
    _draw_sizes(sizes, results.where(noise=min(noises)))
    dims = ", ".join(str(dim) for dim in sorted(results.of("dim")))
    sizes.set_title(f"$d = {dims}$, noise {min(noises):g}")


def _draw_curves(axes: figures.Axes, results: Results) -> None:
    points = rules.curve_points(results)
    for number, name in enumerate(TARGETS):
        figures.curve(axes, points, "examples", name, f"${name}$", number)
    end, label = max(points.of("examples")), "predicted: $n^{-1/2}$ or faster"
    for number, name in enumerate(TARGETS):
        start = results.median(f"needed {name}")
        if start < end:
            line = [ERROR, ERROR * (end / start) ** -0.5]
            figures.predicted(axes, [start, end], line, label, number)
            label = ""
    axes.set(xscale="log", yscale="log", xlabel="examples $n$", ylabel="excess risk / variance")


def _draw_sizes(axes: figures.Axes, results: Results) -> None:
    """Examples needed against their predicted order: for every target a line through the dims."""
    label = "predicted growth"
    for number, name in enumerate(TARGETS):
        needed = sorted(results.medians(f"needed {name}", by="dim").items())
        orders, found = [_order(name, dim) for dim, _ in needed], [n for _, n in needed]
        colour, marker = figures.style(number)
        axes.plot(orders, found, color=colour, marker=marker, markersize=4)
        line = [found[0] * order / orders[0] for order in orders]
        figures.predicted(axes, orders, line, label, number)
        label = ""
    xlabel = f"predicted order, $B(f) / \\mathrm{{Var}} / {ERROR}^2$"
    axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=f"examples needed for {ERROR}")


CLAIM = Claim(FIRST_PAPER, RULE, SETTINGS, measure, judge, draw)
