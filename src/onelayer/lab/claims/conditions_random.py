"""Random layers are not degenerate.

An open question of the paper: whether random layers are degenerate. Conjecture: layers with random
attention and projection matrices meet its conditions with high probability, for the values that
`conditions` needs. (The paper has orders of magnitude. The heads drawn here have one norm, so that
the two scales and the norm ratio hold by construction, and singular gaps of any size suffice.)
"""

import re

import numpy as np

from onelayer.lab import condition_margins, figures
from onelayer.lab.claim import SECOND_PAPER, Check, Conjecture, Measured, Results, by_size
from onelayer.lab.seeds import generator
from onelayer.recovery.conditions import survey_conditions

SHARE = 0.95  # of the layers of every shape have to meet a condition
ORTHOGONAL = 0.9  # of 1/√m, the distance of 0 from the hull of orthogonal heads
SMALL = ["2x8", "3x12", "4x16"]
LARGE = [*SMALL, "8x64", "8x64x8", "12x384x32"]
SETTINGS = by_size(
    shape=([*SMALL, "8x64x8"], LARGE, [*LARGE, "12x768x64"]),
    scale=3.0,
    samples=(50, 50, 100),
    seeds=(2, 4, 10),
)


def measure(shape: str, scale: float, samples: int, seed: int) -> Measured:
    """Least, median and largest value of every condition, and the share of layers that meet it."""
    heads, dim, *rank = _numbers(shape)
    drawn = generator(seed, "layer")
    survey = survey_conditions(heads, dim, rank[0] if rank else None, samples, drawn, scale=scale)
    measured: dict[str, float | list[float]] = {}
    for name, found in survey.items():
        measured[name] = [found.quantile(q) for q in (0.0, 0.5, 1.0)]
        measured[f"{name} holds"] = found.share
    return measured


def _numbers(shape: str) -> list[int]:
    if not re.fullmatch(r"\d+x\d+(x\d+)?", shape) or _heads(shape) < 2:
        raise ValueError(
            f"shape is {shape!r}, expected HEADSxDIM or HEADSxDIMxRANK with two heads or more"
        )
    return [int(number) for number in shape.split("x")]


def _heads(shape: str) -> int:
    return int(shape.split("x")[0])


RULE = f"""At least {SHARE:.0%} of random layers of every shape meet each condition, with the values
that `conditions` needs. The median distance of 0 from the hull of m heads is at least {ORTHOGONAL}
of that of orthogonal ones, 1/√m."""


def judge(results: Results) -> list[Check]:
    relative = {
        shape: min(cell["hull distance"][1] for cell in part) * _heads(shape) ** 0.5
        for shape, part in results.by("shape")
    }
    worst = min(relative, key=lambda shape: relative[shape])
    return [
        *(_met(results, group) for group in condition_margins.GROUPS),
        Check(
            f"0 is at least {ORTHOGONAL}/√m away from the hull of m heads of equal norm",
            f"median of {worst}: {relative[worst]:.3f}/√m",
            relative[worst] >= ORTHOGONAL,
        ),
    ]


def _met(results: Results, group: str) -> Check:
    """Whether enough layers of every shape meet the conditions of a group."""
    names = condition_margins.GROUPS[group]
    shares = {
        f"{name}: {{:.0%}} of {shape}": condition_margins.held(part, name)
        for name in names
        for shape, part in results.by("shape")
    }
    missed = [text.format(share) for text, share in shares.items() if share < SHARE]
    return Check(
        f"{group}: {SHARE:.0%} of the layers of every shape meet {', '.join(names)}",
        ", ".join(missed) or f"at least {min(shares.values()):.0%}",
        not missed,
    )


def draw(results: Results, figure: figures.Figure) -> None:
    figure.set_size_inches(7.0, 4.2)
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    condition_margins.draw(left, dict(results.by("shape")))
    for number, (shape, part) in enumerate(results.by("shape")):
        low, middle, high = np.array([cell["hull distance"] for cell in part]).T
        median = np.median(middle)
        spread = [[median - low.min()], [high.max() - median]]
        colour, marker = figures.style(number)
        right.errorbar(
            [_heads(shape)], [median], spread, color=colour, fmt=marker, ms=4, label=shape
        )
    counts = sorted({_heads(shape) for shape in results.of("shape")})
    heads = np.linspace(counts[0], counts[-1], 50)
    figures.predicted(right, list(heads), list(heads**-0.5), "orthogonal: $1/\\sqrt{m}$")
    asked = condition_margins.ASKED["hull distance"].needed
    right.axhline(asked, color="black", linestyle=":", linewidth=1, label="needed")
    right.set_xticks(counts)
    right.set(xlabel="heads $m$", ylabel="distance of 0 from the hull / norm")
    figure.suptitle("layers: heads x dim (x rank)", fontsize="medium")


CLAIM = Conjecture(SECOND_PAPER, RULE, SETTINGS, measure, judge, draw)
