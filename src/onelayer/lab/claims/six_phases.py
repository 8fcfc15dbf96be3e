"""Six phases find every head to a few per cent, and polishing makes them exact.

Correlations give a rough sum of the projections (phase 1). The polytope sculpted with it (2) shows
rows with large margins, which give a far better sum (3) and with it a polytope (4) whose hull (5)
contains all heads, so that regression over candidates (6) finds them. Gauss-Newton steps from there
are exact. Boolean inputs, random layers.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelayer.inputs import Seed
from onelayer.lab import figures, recovery_setup
from onelayer.lab.claim import SECOND_PAPER, Check, Claim, Measured, Result, Results, by_size
from onelayer.lab.recovery_setup import EXACT, NEAR, worst_head
from onelayer.lab.seeds import generator
from onelayer.layer import AttentionLayer
from onelayer.recovery import validation
from onelayer.recovery.api import recover
from onelayer.recovery.options import Options
from onelayer.recovery.phases import affine_hull, driver
from onelayer.recovery.phases.state import Phase, PhaseState, Step
from onelayer.recovery.run import RecoveryRun
from onelayer.recovery.strategies import sculpt
from onelayer.recovery.trace import Log

GAIN = 10.0  # phase 3 must make the sum of the projections better by this factor
STRAYING = 3.0  # at most, of a true error over the one that the phase measured itself
ESTIMATED = {1: "sum", 2: "hull", 3: "sum", 4: "hull", 5: "hull", 6: "heads"}
SETTINGS = by_size(
    shape=(
        ["2x8x3x20000"],
        ["2x8x3x400000", "3x12x2x1000000"],
        ["2x8x3x400000", "3x12x2x1000000", "3x12x3x4000000", "4x16x2x8000000"],
    ),
    seeds=(2, 5, 10),
)


def measure(shape: str, seed: int) -> Measured:
    """The true error after every phase and the one that it measured itself; polished heads."""
    layer, X, Y = recovery_setup.instance(*sizes_of(shape), seed=seed)
    reports = phase_reports(X, Y, layer, generator(seed, "search"))
    phases = {r.number: r for r in reports if not r.refusal}  # of several rounds the last
    found = recover(X, Y, layer.heads, method="sculpt", seed=generator(seed, "search"))
    values = {"polished": worst_head(found.layer, layer), "reason": found.reason.name.lower()}
    for number in ESTIMATED:
        phase = phases.get(number)
        values[f"true_{number}"] = None if phase is None else phase.true
        values[f"measured_{number}"] = None if phase is None else phase.measured
    estimate = phases[6].heads if 6 in phases else None
    if seed == 0 and estimate is not None:  # for the figure
        values |= side_by_side(layer, estimate)
    return values


def sizes_of(shape: str) -> tuple[int, int, int, int]:
    """Heads, dimension, tokens and examples."""
    try:
        heads, dim, tokens, examples = map(int, shape.split("x"))
    except ValueError:
        expected = "HEADSxDIMxTOKENSxEXAMPLES, such as 2x8x3x400000"
        raise ValueError(f"shape is {shape!r}, expected {expected}") from None
    return heads, dim, tokens, examples


def side_by_side(layer: AttentionLayer, estimate: AttentionLayer) -> Measured:
    """The attention matrices of both layers, head by head, rounded for display."""
    matched = estimate.attention[estimate.distance(layer).permutation]
    pair = {"true_heads": layer.attention, "found_heads": matched}
    return {name: np.round(matrices, 4).tolist() for name, matrices in pair.items()}


@dataclass(frozen=True, eq=False)
class PhaseReport:
    """The result of one phase, or of one round of it.

    `measured` is the error that the phase measured itself. `true` is the relative error of what it
    estimated, infinite if it refused: of the sum of the projections after phases 1 and 3, the
    distance of the farthest head from the hull after 2, 4 and 5, and the error of the worst head
    after 6. `refusal` names the reason if the phase refused. `heads` are those of phase 6.
    """

    number: int
    name: str
    examples: int
    measured: float
    true: float
    refusal: str = ""
    heads: AttentionLayer | None = None


def phase_reports(X: Any, Y: Any, layer: AttentionLayer, seed: Seed) -> list[PhaseReport]:
    """The phases of `recover(X, Y, heads=layer.heads, method="sculpt", seed=seed)`, in order.

    They are run once more, with identical results, and compared with the true layer.
    """
    examples, options = validation.examples(X, Y, None), Options(layer.heads)
    log = Log(max_steps=100, max_seconds=None)
    reports: list[PhaseReport] = []

    def watch(phase: Phase, step: Step) -> None:
        state = step.state
        refusal = "" if state.refusal is None else state.refusal.name.lower()
        true, heads = math.inf, _heads(state)
        if state.refusal is None and phase.number in (1, 3):
            true = _sum_error(state, layer)
        elif state.refusal is None and phase.number <= 6:
            true = _hull_error(state, layer) if heads is None else worst_head(heads, layer)
        ended = step.examples, step.error, true, refusal, heads
        reports.append(PhaseReport(phase.number, phase.name, *ended))

    rng = np.random.default_rng(seed)
    state, _ = sculpt.begin(RecoveryRun(examples, options, log, rng))
    driver.run(state, log, watch)
    return reports


def _sum_error(state: PhaseState, layer: AttentionLayer) -> float:
    """Of W = Σ W_i; the phases' tokens are X A and their outputs Y / s, so that W = A W' s."""
    assert state.sum is not None
    examples, total = state.examples, layer.projection.sum(axis=0)
    estimate = examples.whitening @ state.sum.projection_sum * examples.output_scale
    return float(np.linalg.norm(estimate - total) / np.linalg.norm(total))


def _hull_error(state: PhaseState, layer: AttentionLayer) -> float:
    """The distance of the farthest head from the hull, in the phases' units Θ' = A⁻¹ Θ A⁻¹."""
    assert state.sculpture is not None
    hull = affine_hull.extract(state.sculpture, layer.heads)
    inverse = np.linalg.inv(state.examples.whitening)
    heads = (inverse @ layer.attention @ inverse).reshape(layer.heads, -1)
    apart = heads - hull.centre
    apart -= (apart @ hull.basis.T) @ hull.basis
    return float(np.max(np.linalg.norm(apart, axis=1) / np.linalg.norm(heads, axis=1)))


def _heads(state: PhaseState) -> AttentionLayer | None:
    """The layer of phase 6, or None before it."""
    if state.found is None:
        return None
    fit = state.found.fit
    return state.fitted.layer(fit.theta, fit.weights)


RULE = f"""Medians over seeds, for every shape: phase 3 makes the error of the sum of projections
smaller by a factor of at least {GAIN:g}, and heads are within {NEAR:.0%} of the hull after phase 5
and within {NEAR:.0%} after phase 6. On every seed: true errors after phases 3 and 5 are at most
{STRAYING:g} times what the phase measured itself, and polished heads are within {EXACT:g}."""


def judge(results: Results) -> list[Check]:
    rough, fine, hull, heads = (results.medians(f"true_{n}", by="shape") for n in (1, 3, 5, 6))
    straying = max(stray(results, 3), stray(results, 5))
    polished = float(results.numbers("polished").max())
    return [
        Check(
            f"phase 3 makes the sum of projections better by a factor of at least {GAIN:g}",
            "; ".join(f"{s}: {percent(rough[s])} to {percent(fine[s])}" for s in rough),
            all(fine[shape] <= rough[shape] / GAIN for shape in rough),
        ),
        near(f"after phase 5 every head is within {NEAR:.0%} of the hull", hull),
        near(f"after phase 6 every head is within {NEAR:.0%}", heads),
        Check(
            f"errors are at most {STRAYING:g} times what phases 3 and 5 measured themselves",
            f"at most {straying:.2g} times",
            straying <= STRAYING,
        ),
        Check(
            f"polished, every head is within {EXACT:g} on every seed",
            f"worst {polished:.1g}",
            polished <= EXACT,
        ),
    ]


def near(statement: str, errors: dict[str, float]) -> Check:
    """Check the error of every shape."""
    listed = "; ".join(f"{shape}: {percent(error)}" for shape, error in errors.items())
    return Check(statement, listed, max(errors.values()) <= NEAR)


def stray(results: Results, phase: int) -> float:
    """The largest true error in units of the measured one; infinite if the phase was missed."""
    true, measured = results.numbers(f"true_{phase}"), results.numbers(f"measured_{phase}", 1.0)
    return float(np.max(true / measured))


def percent(error: float) -> str:
    return f"{100 * error:.2g} %" if math.isfinite(error) else "not reached"


def draw(results: Results, figure: figures.Figure) -> None:
    figure.set_size_inches(7.0, 3.8)
    left, right = figure.subfigures(1, 2, squeeze=False, width_ratios=[1.15, 1])[0]
    draw_trace(results, left)
    draw_heads(results, right)


def draw_trace(results: Results, figure: figures.SubFigure) -> None:
    """Errors by phase, those that the phases measured themselves dotted."""
    axes = figure.subplots()
    phases = [  # a cell for every phase of every cell
        Result(
            {**cell.parameters, "phase": n},
            {"true": cell[f"true_{n}"], "own": cell[f"measured_{n}"]},
        )
        for cell in results
        for n in ESTIMATED
    ]
    for number, (shape, traced) in enumerate(Results(tuple(phases)).by("shape")):
        figures.curve(axes, traced, "phase", "true", label_of(shape), number)
        at = traced.medians("own", by="phase")
        own = {phase: error for phase, error in at.items() if math.isfinite(error)}
        colour, _ = figures.style(number)
        axes.plot(list(own), list(own.values()), ":", color=colour, linewidth=1)
    axes.plot([], [], ":", color="black", linewidth=1, label="measured by the phase")
    figures.predicted(axes, [5, 6], [NEAR, NEAR], "asked for")
    axes.set_xticks(list(ESTIMATED), [f"{number}\n{name}" for number, name in ESTIMATED.items()])
    polished = float(results.numbers("polished").max())
    axes.set(yscale="log", xlabel=f"phase (polished: {polished:.0e})", ylabel="relative error")
    figure.legend(loc="outside upper center")


def label_of(shape: str) -> str:
    heads, dim, tokens, examples = sizes_of(shape)
    return f"$m={heads}$, $d={dim}$, $k={tokens}$, $n={examples:,}$"


def draw_heads(results: Results, figure: figures.SubFigure) -> None:
    """True and recovered attention matrices of the first shape, if phase 6 was reached."""
    shown = [cell for cell in results if "true_heads" in cell.measured]
    if not shown:
        return
    true, found = shown[0]["true_heads"], shown[0]["found_heads"]
    figure.suptitle(label_of(shown[0]["shape"]), fontsize="medium")
    columns = [rf"$\Theta_{{{number + 1}}}$" for number in range(len(true))]
    figures.heat_maps(figure, [true, found], ["true", "phase 6"], columns)


CLAIM = Claim(SECOND_PAPER, RULE, SETTINGS, measure, judge, draw)
