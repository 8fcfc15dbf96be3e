"""Recovery degrades where a condition is violated, and says so.

An open question of the paper: how recovery degrades as each condition is violated. Conjecture:
where all conditions hold the six phases find the heads; as one of them gets worse the error grows
until a phase refuses with a named reason, and no wrong layer is called converged. (The values that
`conditions` needs were measured on such families with other seeds, so that the first part only
tests that they generalise.)
"""

import math
import textwrap
from collections.abc import Mapping
from typing import Any

import numpy as np

from onelayer.lab import claim, figures, layer_families
from onelayer.lab.claim import SECOND_PAPER, Check, Conjecture, Measured, Results, Undecided
from onelayer.lab.layer_families import FAMILIES
from onelayer.lab.recovery_setup import worst_head
from onelayer.lab.seeds import generator
from onelayer.layer import AttentionLayer
from onelayer.recovery.api import recover
from onelayer.recovery.conditions import conditions
from onelayer.recovery.reasons import Reason
from onelayer.recovery.result import Recovery

COARSE, FINE, NOISY = 0.1, 1e-3, 0.1  # errors beyond which a layer is wrong
SHARE = 0.9  # of the layers that meet all conditions, which have to be found
GROWTH = 2.0  # of the error from a family's first step to its worst: beyond that of seeds
RESTARTS = 2  # of Gauss-Newton steps from random starts
_ROUNDING = 1e-9  # a condition that fails by no more holds
_THROUGH = {Reason.APPROXIMATE, Reason.COARSE, Reason.HEADS_NOT_DETERMINED}
_LAST = 6  # of the phases
_NAMES = {
    "phases": "the six phases",
    "polished": "the six phases, polished",
    "refine": "Gauss-Newton steps alone",
}
_ALL = list(FAMILIES)
SETTINGS = claim.by_size(
    family=(["distance", "effective-rank", "projection-independence"], _ALL, _ALL),
    steps=(3, 4, 8),
    dim=8,
    tokens=3,
    scale=3.0,
    sculpt_examples=(20_000, 50_000, 100_000),
    refine_examples=2000,
    seeds=(1, 2, 3),
)


def cells(settings: Mapping[str, Any]) -> list[claim.Parameters]:
    """The given number of steps of every family, from the first to the worst."""
    count = settings["steps"]
    rest = {name: value for name, value in settings.items() if name not in ("family", "steps")}
    found: list[claim.Parameters] = []
    for family in settings["family"]:
        if family not in FAMILIES:
            raise ValueError(f"family is {family!r}, expected one of {', '.join(FAMILIES)}")
        steps = [float(step) for step in FAMILIES[family].thinned(count)]
        found += claim.grid({"family": family, "step": steps, **rest})
    return found


def measure(
    family: str,
    step: float,
    dim: int,
    tokens: int,
    scale: float,
    sculpt_examples: int,
    refine_examples: int,
    seed: int,
) -> Measured:
    """Which conditions fail, and how the six phases, polishing and Gauss-Newton steps end."""
    kind = FAMILIES[family]
    layer, X, Y = layer_families.instance(kind, step, dim, tokens, scale, sculpt_examples, seed)

    def recovered(examples: int, **how: Any) -> Recovery:
        drawn = generator(seed, "search")
        return recover(X[:examples], Y[:examples], layer.heads, seed=drawn, **how)

    phases = polished = recovered(sculpt_examples, method="sculpt", polish=False)
    stopped = None  # the phase that refused to go on
    if phases.reason not in _THROUGH:
        *_, stopped = (row.phase for row in phases.trace if row.phase is not None)
    if stopped is None or stopped == _LAST:  # what an earlier phase refuses is never polished
        polished = recovered(sculpt_examples, method="sculpt")
    ways = {
        "phases": phases,
        "polished": polished,
        "refine": recovered(refine_examples, method="refine", restarts=RESTARTS),
    }
    measured: dict[str, Any] = {"violated": _violated(layer), "stopped": stopped}
    for way, found in ways.items():
        error = worst_head(found.layer, layer)
        measured[f"{way} error"] = error if math.isfinite(error) else None
        measured[f"{way} converged"] = found.converged
        measured[f"{way} reason"] = found.reason.name.lower()
    return measured


def _violated(layer: AttentionLayer) -> list[str]:
    return [
        name
        for name, found in conditions(layer).items()
        if not (found.holds or math.isclose(found.measured, found.needed, rel_tol=_ROUNDING))
    ]


RULE = f"""Of the noiseless layers that meet all conditions at least {SHARE:.0%} are found, every
head within {COARSE:.0%} by the six phases and within {FINE:.1%} after polishing. No layer that is
called converged is off by more than {COARSE:.0%} without polishing, or by more than {FINE:.1%}
({NOISY:.0%} with noise in the outputs) with it and by Gauss-Newton steps alone. Every family's
worst step has at least {GROWTH:g} times the median error of its first, or is refused."""


def judge(results: Results) -> list[Check]:
    for family, part in results.by("family"):
        if len(part.of("step")) < 2:
            raise Undecided(f"the family {family} has one step, which shows no change")
    met = Results(
        tuple(c for c in results if not c["violated"] and not FAMILIES[c["family"]].noisy)
    )
    if not len(met):
        raise Undecided("no layer meets all conditions, so that none has to be found")
    return [
        _found(met, "phases", COARSE, "the six phases find"),
        _found(met, "polished", FINE, "polishing then gives"),
        *(_none_wrong(results, way) for way in _NAMES),
        _degraded(results),
    ]


def _found(met: Results, way: str, limit: float, what: str) -> Check:
    """Whether layers that meet all conditions are found."""
    errors = met.numbers(f"{way} error")
    good = int(np.sum(errors <= limit))
    return Check(
        f"of the layers that meet all conditions, {what} {SHARE:.0%}, every head within {limit:g}",
        f"{good} of {len(errors)}, median error {np.median(errors):.2g}",
        good >= SHARE * len(errors),
    )


def _none_wrong(results: Results, way: str) -> Check:
    """Whether no layer that is called converged is wrong."""
    errors, count, wrong = results.numbers(f"{way} error"), 0, []
    for cell, error in zip(results, errors, strict=True):
        count += cell[f"{way} converged"]
        limit = COARSE if way == "phases" else NOISY if FAMILIES[cell["family"]].noisy else FINE
        if cell[f"{way} converged"] and error > limit:
            wrong.append(f"{cell['family']} {cell['step']:g}: {error:.2g}")
    return Check(
        f"{_NAMES[way]}: no layer that is called converged is wrong",
        ", ".join(wrong) or f"none of {count}; {len(results) - count} are not called so",
        not wrong,
    )


def _degraded(results: Results) -> Check:
    """Whether every family is clearly harder at its worst step than at its first."""
    ends: dict[str, list[str]] = {"refused": [], "worse": [], "no worse": []}
    for family, part in results.by("family"):
        first, *_, worst = (_error(cells) for _, cells in part.by("step"))
        end = "refused" if math.isinf(worst) else "worse" if worst >= GROWTH * first else "no worse"
        ends[end].append(family)
    count = f"refused in {len(ends['refused'])}, a larger error in {len(ends['worse'])}"
    return Check(
        f"every family's worst step has {GROWTH:g} times the error of its first, or is refused",
        f"{count}, not so in {', '.join(ends['no worse']) or 'none'}",
        not ends["no worse"],
    )


def _refused(results: Results) -> np.ndarray[Any, Any]:
    return results.numbers("stopped", missing=0.0) > 0


def _error(results: Results) -> float:
    """The median error of the six phases, infinite where they are refused."""
    return float(np.median(np.where(_refused(results), np.inf, results.numbers("phases error"))))


def draw(results: Results, figure: figures.Figure) -> None:
    families = results.of("family")
    columns = min(len(families), 4)
    rows = -(-len(families) // columns)
    figure.set_size_inches(7.0, 0.6 + 1.8 * rows)
    panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for axes, (family, part) in zip(panels.flat, results.by("family"), strict=False):
        _panel(axes, family, part)
    for axes in panels.flat[len(families) :]:
        axes.set_axis_off()
    for axes in panels[:, 0]:
        axes.set_ylabel("error of heads")


def _panel(axes: figures.Axes, family: str, results: Results) -> None:
    """Errors of the six phases by the step, refusals as crosses, violated steps shaded."""
    blue, red = figures.COLOURS[:2]
    for place, (_, cells) in enumerate(results.by("step")):
        refused = _refused(cells)
        errors = np.minimum(cells.numbers("phases error"), 1.0)
        axes.plot([place] * int(refused.sum()), [1.0] * int(refused.sum()), "x", color=red)
        axes.plot([place] * int((~refused).sum()), errors[~refused], "o", color=blue, ms=4)
        if all(cell["violated"] for cell in cells):
            axes.axvspan(place - 0.5, place + 0.5, color="0.9", linewidth=0)
    axes.plot([], [], "o", color=blue, ms=4, label="went through all phases")
    axes.plot([], [], "x", color=red, label="refused by a phase")
    axes.fill_between([], [], [], color="0.9", label="a condition is violated")
    steps, kind = results.of("step"), FAMILIES[family]
    axes.set(yscale="log", xlim=(-0.5, len(steps) - 0.5))
    axes.set_xticks(range(len(steps)), [f"{step:g}" for step in steps])
    axes.set_title(textwrap.fill(", ".join(kind.conditions) or family, 28), fontsize=7)
    axes.set_xlabel(textwrap.fill(kind.meaning, 24), fontsize=7)
    axes.tick_params(labelsize=7)


CLAIM = Conjecture(SECOND_PAPER, RULE, SETTINGS, measure, judge, draw, cells)
