"""The six phases watched: what each of them estimated, beside the truth.

A trace of `recover` has the errors that the phases measure themselves. Here the phases are run once
more, the same in every bit, with the true layer at hand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelayer.inputs import Seed
from onelayer.lab.recovering import worst_head
from onelayer.layer import AttentionLayer
from onelayer.recovery import validation
from onelayer.recovery.phases import affine_hull, driver
from onelayer.recovery.strategies import methods
from onelayer.recovery.trace import Log


@dataclass(frozen=True, eq=False)
class Watched:
    """What one phase, or one round of it, did.

    `measured` is the error that the phase measured itself, `true` the relative error of what it
    estimated, infinite where it refused: of the sum of the projections after phases 1 and 3, the
    distance of the farthest head from the space of the body after 2, 4 and 5, and the error of the
    worst head after 6, whose `heads` are kept. `refusal` is the reason if the phases went no
    further.
    """

    name: str
    examples: int
    measured: float
    true: float
    refusal: str = ""
    heads: AttentionLayer | None = None


def watched(X: Any, Y: Any, layer: AttentionLayer, seed: Seed) -> list[Watched]:
    """The phases of `recover(X, Y, heads=layer.heads, method="sculpt", seed=seed)`, in order."""
    task = methods.Task(
        given=validation.examples(X, Y, None),
        heads=layer.heads,
        rank=None,
        bias=False,
        causal=False,
        tol=1e-12,
        device=None,
        restarts=0,
        polish=False,
    )
    log = Log(max_steps=100, max_seconds=None)
    seen: list[Watched] = []

    def watch(name: str, state: driver.State) -> None:
        name, row = name.removeprefix("phase ").replace(":", ""), log.rows[-1]
        seen.append(
            Watched(
                name=name,
                examples=row.examples,
                measured=row.error,
                true=_true_error(int(name[0]), state, layer),
                refusal="" if state.refusal is None else state.refusal.name.lower(),
                heads=_heads(state),
            )
        )

    state, _ = methods.begin(task, log, np.random.default_rng(seed))
    driver.run(state, log, watch)
    return seen


def _true_error(phase: int, state: driver.State, layer: AttentionLayer) -> float:
    """The relative error of what a phase estimated; infinite where it refused."""
    if state.refusal is not None:
        return math.inf
    if phase in (1, 3):
        return _sum_error(state, layer)
    if phase in (2, 4, 5):
        return _space_error(state, layer)
    heads = _heads(state)
    assert heads is not None
    return worst_head(heads, layer)


def _sum_error(state: driver.State, layer: AttentionLayer) -> float:
    """Of W = Σ W_i; the phases' tokens are X A and their outputs Y / s, so that W = A W' s."""
    assert state.sum is not None
    examples, total = state.examples, layer.projection.sum(axis=0)
    estimate = examples.whitening @ state.sum.projection_sum * examples.spread.output_scale
    return float(np.linalg.norm(estimate - total) / np.linalg.norm(total))


def _space_error(state: driver.State, layer: AttentionLayer) -> float:
    """The distance of the farthest head from the space, in the phases' units Θ' = A⁻¹ Θ A⁻¹."""
    assert state.sculpture is not None
    space = affine_hull.extract(state.sculpture, layer.heads)
    inverse = np.linalg.inv(state.examples.whitening)
    heads = (inverse @ layer.attention @ inverse).reshape(layer.heads, -1)
    apart = heads - space.centre
    apart -= (apart @ space.basis.T) @ space.basis
    return float(np.max(np.linalg.norm(apart, axis=1) / np.linalg.norm(heads, axis=1)))


def _heads(state: driver.State) -> AttentionLayer | None:
    """The layer of phase 6, or None before it."""
    if state.found is None:
        return None
    fit = state.found.fit
    return state.fitted.layer(fit.theta, fit.weights)
