"""Structured attention is learned like any other, and from less if the structure is known.

An open question of the paper: diagonal, block-diagonal and low-rank attention. Conjecture: it is no
special case. Neither the six phases nor Gauss-Newton steps need clearly more examples than for full
matrices; with a known rank, Gauss-Newton steps need fewer, in proportion to the unknowns.
"""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from onelayer.inputs import boolean, gaussian
from onelayer.lab import claim, figures, layer_families
from onelayer.lab.claim import SECOND_PAPER, Check, Conjecture, Measured, Results, Undecided
from onelayer.lab.layer_families import LayerShape
from onelayer.lab.recovery_setup import worst_head
from onelayer.lab.seeds import generator
from onelayer.layer import AttentionLayer
from onelayer.recovery.api import recover

FOUND = {"sculpt": 0.05, "refine": 1e-6, "refine with rank": 1e-6}  # error of the worst head
WRONG = {"sculpt": 0.1, "refine": 1e-3, "refine with rank": 1e-3}  # if it is called converged
FACTOR = {"sculpt": 2.0, "refine": 2**0.25, "refine with rank": 2**0.25}  # from one try to the next
# At most, of the examples of structured over those of full matrices, where structure is not known.
COST = {"sculpt": 4.0, "refine": 2**0.5}
INPUTS = {"boolean": boolean, "gaussian": gaussian}
# The same for all searches: where examples are few, the search and not they may be the limit.
SEARCH = {"restarts": 3, "max_steps": 400}
LEAST = 10  # examples that are worth a try
HEADS = 2
SETTINGS = claim.by_size(
    structure=(
        ["full", "diagonal", "rank 1"],
        ["full", "4 blocks", "diagonal", "rank 2", "rank 1"],
        ["full", "2 blocks", "4 blocks", "diagonal", "rank 4", "rank 2", "rank 1"],
    ),
    inputs=(["boolean"], list(INPUTS), list(INPUTS)),
    tokens=3,
    scale=3.0,
    sculpt_dim=8,
    sculpt_examples=(10_000, 40_000, 256_000),
    refine_dim=(8, 12, 16),
    refine_examples=(64, 96, 128),
    seeds=(1, 3, 5),
)


def cells(settings: Mapping[str, Any]) -> list[claim.Parameters]:
    """The six phases on all inputs, Gauss-Newton steps on Boolean ones, also with a known rank."""
    own = {
        method: {name: settings[f"{method}_{name}"] for name in ("dim", "examples")}
        for method in ("sculpt", "refine")
    }
    found: list[claim.Parameters] = []
    for structure in settings["structure"]:
        cell = {"structure": structure, "tokens": settings["tokens"], "scale": settings["scale"]}
        ranked = ["refine with rank"] * (_rank(structure) is not None)
        for method, inputs in (("sculpt", settings["inputs"]), ("refine", "boolean")):
            methods = [method, *ranked] if method == "refine" else [method]
            cell |= {"method": methods, "inputs": inputs, **own[method]}
            found += claim.grid(cell | {"seeds": settings["seeds"]})
    return found


def measure(
    structure: str,
    method: str,
    inputs: str,
    dim: int,
    tokens: int,
    scale: float,
    examples: int,
    seed: int,
) -> Measured:
    """The examples needed: the fewest, going down from all of them, before a search fails."""
    layer = _layer(structure, LayerShape(HEADS, dim, scale), generator(seed, "layer"))
    X = INPUTS[inputs](examples, tokens, dim, generator(seed, "inputs"))
    Y = layer(X)
    how: dict[str, Any] = {"method": "refine", **SEARCH}
    if method == "sculpt":
        how = {"method": "sculpt", "polish": False}
    elif method == "refine with rank":
        how["rank"] = _rank(structure)
    measured: dict[str, Any] = {"needed": None, "error": None, "wrong": 0}
    size = float(examples)
    while size >= LEAST:
        count = round(size)
        found = recover(X[:count], Y[:count], HEADS, seed=generator(seed, "search"), **how)
        error = worst_head(found.layer, layer)
        measured["wrong"] += int(found.converged and error > WRONG[method])
        if error > FOUND[method]:
            return measured | {"failed": count, "reason": found.reason.name.lower()}
        measured |= {"needed": count, "error": error}
        size /= FACTOR[method]
    return measured | {"failed": None, "reason": None}


def _layer(structure: str, shape: LayerShape, drawn: np.random.Generator) -> AttentionLayer:
    rank = _rank(structure)
    if rank is not None:
        return layer_families.low_rank(rank, shape, drawn)
    blocks = {"full": 1, "diagonal": shape.dim}.get(structure)
    return layer_families.block_diagonal(blocks or int(structure.split()[0]), shape, drawn)


def _rank(structure: str) -> int | None:
    """The rank that the structure names."""
    if not re.fullmatch(r"full|diagonal|[1-9]\d* blocks|rank [1-9]\d*", structure):
        raise ValueError(
            f"structure is {structure!r}, expected full, diagonal, 'N blocks' or 'rank N'"
        )
    return int(structure.split()[1]) if structure.startswith("rank") else None


RULE = f"""In medians over seeds: the six phases find every structure (heads within
{FOUND["sculpt"]:.0%}) from at most {COST["sculpt"]:g} times the examples that full matrices take,
on each kind of inputs; Gauss-Newton steps (heads within {FOUND["refine"]:g}, {SEARCH["restarts"]}
restarts, {SEARCH["max_steps"]} steps) from at most {COST["refine"]:.2f} times; with a known rank
the ratio of examples is at most the square root of that of the unknowns; and no layer that is
called converged is off by more than {WRONG["sculpt"]:.0%} (the six phases) or {WRONG["refine"]:.1%}
(Gauss-Newton steps)."""


def judge(results: Results) -> list[Check]:
    if "full" not in results.of("structure") or len(results.of("structure")) < 2:
        raise Undecided("structured attention is compared with full, and one of them is missing")
    refined, ranked = (results.where(method=m) for m in ("refine", "refine with rank"))
    wrong = [
        f"{cell['structure']}, {cell['method']}, {cell['inputs']}"
        for cell in results
        if cell["wrong"]
    ]
    return [
        *(
            _at_most(part, f"the six phases on {inputs} inputs", COST["sculpt"])
            for inputs, part in results.where(method="sculpt").by("inputs")
        ),
        _at_most(refined, "Gauss-Newton steps", COST["refine"]),
        *([_rank_saves(ranked, refined)] if len(ranked) else []),
        Check(
            "no layer that is called converged is wrong",
            ", ".join(wrong) or f"none in {len(results)} cells",
            not wrong,
        ),
    ]


def _at_most(results: Results, who: str, cost: float) -> Check:
    """Whether every structure needs at most `cost` times the examples of full matrices."""
    needed = results.medians("needed", by="structure")
    full = needed.pop("full")
    if not np.isfinite(full):
        raise Undecided(f"{who} do not find full matrices, with which to compare")
    worst = max(needed, key=lambda structure: needed[structure])
    missed = [name for name, count in needed.items() if not count <= cost * full]
    said = [f"{name} {_counted(needed[name])}" for name in missed or [worst]]
    return Check(
        f"{who} find every structure from at most {cost:.3g} times the examples of full matrices",
        f"full {_counted(full)}, {'' if missed else 'at most '}{', '.join(said)}",
        not missed,
    )


def _rank_saves(ranked: Results, refined: Results) -> Check:
    """Whether a known rank saves at least half, in logarithms, of the unknowns it saves."""
    without, dim = refined.medians("needed", by="structure"), ranked.of("dim")[0]
    ratios, asked = {}, {}
    for structure, needed in ranked.medians("needed", by="structure").items():
        if not np.isfinite(without[structure]):
            raise Undecided(f"{structure} is not found without its rank, to compare with")
        ratios[structure] = needed / without[structure]
        asked[structure] = _unknowns(structure, dim) ** 0.5
    return Check(
        "a rank that is known saves Gauss-Newton steps examples as it saves unknowns",
        ", ".join(f"{s}: ratio {r:.2f}, asked {asked[s]:.2f}" for s, r in ratios.items()),
        all(ratio <= asked[structure] for structure, ratio in ratios.items()),
    )


def _unknowns(structure: str, dim: int) -> float:
    """The unknowns of a head of known rank over those of a full one: attention and projection."""
    rank = _rank(structure) or dim
    return (2 * dim * rank - rank**2 + dim**2) / (2 * dim**2)


def _counted(examples: float) -> str:
    return f"{examples:,.0f}" if np.isfinite(examples) else "not found"


def draw(results: Results, figure: figures.Figure) -> None:
    figure.set_size_inches(7.0, 3.8)
    left, right = figure.subplots(1, 2)
    structures = results.of("structure")
    sculpted, refined = results.where(method="sculpt"), results.where(method="refine")
    for number, (inputs, part) in enumerate(sculpted.by("inputs")):
        _points(left, part, structures, f"six phases, {inputs}", number)
    tried = max(sculpted.of("examples"))
    left.axhline(tried, color="black", linestyle=":", linewidth=1, label="not found, if above")
    ticks = sorted({tried, *(cell["needed"] for cell in sculpted if cell["needed"] is not None)})
    left.set(title="the six phases", ylabel="examples needed", yscale="log")
    left.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    left.minorticks_off()
    _points(right, refined, structures, "structure unknown", 2)
    ranked = results.where(method="refine with rank")
    if len(ranked):
        _points(right, ranked, structures, "rank known", 3)
    label = "rank known, predicted"
    for structure, part in ranked.by("structure"):
        place, share = structures.index(structure), _unknowns(structure, part.of("dim")[0])
        needed = refined.where(structure=structure).median("needed")
        figures.level(right, [place - 0.3, place + 0.3], share * needed, label)
        label = ""
    right.set(title="Gauss-Newton steps", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(range(len(structures)), structures, rotation=30, ha="right")


def _points(
    axes: figures.Axes, results: Results, structures: list[str], label: str, number: int
) -> None:
    """The median of every structure with a line over all seeds; what was not found is on top."""
    top = 2.0 * max(results.of("examples"))
    places, rows = [], []
    for structure, part in results.by("structure"):
        values = part.numbers("needed", missing=top)
        places.append(structures.index(structure) + 0.15 * (number % 2 - 0.5))
        rows.append((np.median(values), values.min(), values.max()))
    middle, low, high = np.array(rows).T
    colour, marker = figures.style(number)
    spread = [middle - low, high - middle]
    axes.errorbar(places, middle, spread, color=colour, fmt=marker, markersize=4, label=label)


CLAIM = Conjecture(SECOND_PAPER, RULE, SETTINGS, measure, judge, draw, cells)
