"""Noise in the outputs: how far heads are off, and what the results say about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from onelayer.lab import comparing, figures, recovering, scaling
from onelayer.lab.claim import CannotJudge, Check, Claim, Measured, Results
from onelayer.lab.recovering import CLAIMED, NEAR, Method
from onelayer.lab.seeds import generator
from onelayer.recovery.api import recover
from onelayer.recovery.reasons import Reason

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

IN_NOISE, IN_EXAMPLES = 1.0, -0.5  # predicted exponents of the error
TOLERANCE = 0.1  # of an exponent
# Of searches that end there. Four tests look for more than noise in the residuals of a fit, and
# each is wrong about 1 % of the right fits.
AT_THE_FLOOR = 0.9
SURVIVED = 0.01  # the noise up to which the six phases find heads
MAX_STEPS = 500  # a search that recognises noise takes about 200


def measure(
    method: Method, noise: float, heads: int, dim: int, tokens: int, examples: int, seed: int
) -> Measured:
    """The error of the worst head; the noise is relative to the outputs' root mean square."""
    layer, X, Y = recovering.instance(heads, dim, tokens, examples, seed)
    spread = noise * float(np.sqrt(np.mean(Y**2)))
    noisy = Y + spread * generator(seed, "noise").standard_normal(Y.shape)
    search = generator(seed, "search")
    found = recover(X, noisy, heads, method=method, seed=search, max_steps=MAX_STEPS, polish=False)
    return recovering.ended(found, layer)


def judge(results: Results) -> list[Check]:
    refine, sculpt = results.where(method="refine"), results.where(method="sculpt")
    if len(refine.of("noise")) < 2 or len(refine.of("examples")) < 2:
        raise CannotJudge("exponents take two levels of noise and two numbers of examples at least")
    in_noise = [exponent(part, "noise") for _, part in refine.by("examples")]
    in_examples = [exponent(part, "examples") for _, part in refine.by("noise")]
    floor = Reason.NOISE_FLOOR.name.lower()
    known = sum(cell["reason"] == floor for cell in refine)
    by_noise = sculpt.by("noise")
    low = {noise: comparing.median(part, "error") for noise, part in by_noise if noise <= SURVIVED}
    if not low:
        raise CannotJudge(f"the six phases were not tried with noise of {SURVIVED:g} or less")
    return [
        exponent_check("the noise", IN_NOISE, in_noise),
        exponent_check("the examples", IN_EXAMPLES, in_examples),
        Check(
            f"at least {AT_THE_FLOOR:.0%} of Gauss-Newton searches end with {floor}",
            f"{known} of {len(refine)}",
            known >= AT_THE_FLOOR * len(refine),
        ),
        Check(
            f"the six phases find heads within {NEAR:.0%} up to noise of {SURVIVED:.0%}",
            ", ".join(f"{noise:g}: {error:.2%}" for noise, error in low.items()),
            max(low.values()) <= NEAR,
        ),
        recovering.no_wrong_claims(results),
    ]


def exponent(results: Results, x: str) -> float:
    """Of the median error as a power of x."""
    errors = [comparing.median(part, "error") for _, part in results.by(x)]
    return scaling.exponent(results.of(x), errors)


def exponent_check(name: str, predicted: float, measured: list[float]) -> Check:
    return Check(
        f"errors of Gauss-Newton steps are as {name} to the {predicted:g} ± {TOLERANCE:g}",
        f"{min(measured):.3g} to {max(measured):.3g}",
        all(abs(one - predicted) <= TOLERANCE for one in measured),
    )


def draw(results: Results, figure: Figure) -> None:
    by_noise, by_examples = figure.subplots(1, 2, sharey=True)
    refine = results.where(method="refine")
    for number, (examples, part) in enumerate(refine.by("examples")):
        label = f"$n={examples:,}$"
        figures.curve(by_noise, part, "noise", "error", label, number)
    for number, (examples, part) in enumerate(results.where(method="sculpt").by("examples")):
        label = f"six phases, $n={examples:,}$"
        figures.curve(by_noise, part, "noise", "error", label, number + len(refine.of("examples")))
    draw_power(by_noise, refine.where(examples=refine.of("examples")[-1]), "noise", IN_NOISE)
    for number, (noise, part) in enumerate(refine.by("noise")):
        figures.curve(by_examples, part, "examples", "error", f"noise {noise:g}", number)
    draw_power(by_examples, refine.where(noise=refine.of("noise")[0]), "examples", IN_EXAMPLES)
    by_noise.set(
        xscale="log", yscale="log", xlabel="noise / outputs", title="Gauss-Newton steps, six phases"
    )
    by_noise.set_ylabel("error of the worst head")
    by_examples.set(xscale="log", xlabel="examples $n$", title="Gauss-Newton steps")
    recovering.tick_examples(by_examples, refine.of("examples"))
    by_noise.set_ylim(top=100 * results.numbers("error").max())  # room for the legend
    by_noise.legend(loc="upper left", ncols=2)
    by_examples.legend(loc="upper center", ncols=2)


def draw_power(axes: Axes, results: Results, x: str, power: float) -> None:
    """The predicted power, through the first point of a curve."""
    at = np.array(results.of(x), dtype=float)
    first = comparing.median(results.where(**{x: results.of(x)[0]}), "error")
    figures.predicted(axes, list(at), list(first * (at / at[0]) ** power))


CLAIM = Claim(
    name="noise",
    title="Heads are off in proportion to the noise, and less with more examples",
    source=recovering.SECOND_PAPER,
    prediction=(
        "Without noise recovery is exact. With independent noise in the outputs Gauss-Newton steps "
        "are least squares: the error of heads is proportional to the noise and to 1/√n, and the "
        "result says that it ends at a noise floor. The six phases, whose theorem has no noise, "
        "survive noise of about 1 % (a conjecture)."
    ),
    rule=(
        "Median errors of the worst head by Gauss-Newton steps are as the noise to a power of "
        f"{IN_NOISE:g} ± {TOLERANCE:g} for every number of examples, and as the number of examples "
        f"to a power of {IN_EXAMPLES:g} ± {TOLERANCE:g} for every noise, and at least "
        f"{AT_THE_FLOOR:.0%} of searches say that they ended at the noise floor; the six phases, "
        f"not polished, are within {NEAR:.0%} up to noise of {SURVIVED:.0%}; and no result that is "
        f"said to be right is off by more than {CLAIMED:.0%}."
    ),
    sizes={
        "quick": {
            "noise": [1e-5, 1e-2],
            "heads": 2,
            "dim": 8,
            "tokens": 3,
            "refine_examples": [500, 4_000],
            "sculpt_examples": [25_000],
            "seeds": 2,
        },
        "default": {
            "noise": [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1],
            "heads": 2,
            "dim": 8,
            "tokens": 3,
            "refine_examples": [500, 2_000, 8_000],
            "sculpt_examples": [100_000],
            "seeds": 3,
        },
        "paper": {
            "noise": [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1],
            "heads": 3,
            "dim": 12,
            "tokens": 2,
            "refine_examples": [2_000, 8_000, 32_000],
            "sculpt_examples": [4_000_000],
            "seeds": 10,
        },
    },
    cells=recovering.grid_by_method,
    measure=measure,
    judge=judge,
    draw=draw,
    kind="conjecture",
)
