"""Heads that are dropped, and a missing one in the place of the head that explains least.

Where a search for many heads is stuck, a weak head is missing, hidden by stronger ones. What a fit
leaves over of the outputs has no strong heads in it any more, and its correlations with products of
three tokens show the missing one.
"""

from __future__ import annotations

import numpy as np

from onelayer.array.backend import Array
from onelayer.data.chunks import Progress, no_progress
from onelayer.heads import dense, low_rank
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.strategies import correlations
from onelayer.recovery.whitening import AnyExamples

_SCORE = 2.0  # standard deviation of the scores of a head that was missing, as a first try


def prune(fit: Fit, heads: int) -> Array:
    """The attention matrices of the `heads` heads that are left when the cheapest are dropped."""
    while fit.heads > heads + 1:
        fit = varpro.fit(fit.batches, without_cheapest(fit)[0])
    return without_cheapest(fit)[0] if fit.heads > heads else fit.theta


def without_cheapest(fit: Fit) -> tuple[Array, int]:
    """The attention matrices without the head that costs least to drop, and which one that is."""
    drop = int(np.argmin(varpro.cost_of_dropping(fit)))
    return dense.drop(fit.theta, drop, fit.batches.dim), drop


def missing(
    fit: Fit,
    problem: AnyExamples,
    rank: int | None,
    rng: np.random.Generator,
    told: Progress = no_progress,
) -> Array:
    """The head (p, d) that correlations show in what the fit leaves over of all examples.

    `problem` has them all, the fit may be one to few of them. `told` hears how far it is.
    """
    whole = fit
    if fit.batches.examples < problem.examples:
        whole = varpro.fit(problem.batches(fit.heads), fit.theta, single=True)
    found = correlations.span(whole.batches, 1, rng, whole.residuals, told)
    return low_rank.nearest(found.theta, problem.dim, rank)


def repaired(fit: Fit, head: Array) -> Array | None:
    """The heads of a fit with the one that explains least replaced by another one.

    None if the new one explains less than any. To first order a head and its negative with a
    negative projection are the same: the better of the two is taken.
    """
    tries = [
        varpro.fit(fit.batches, dense.concat([fit.theta, score * head]), single=True)
        for score in (_SCORE, -_SCORE)
    ]
    theta, dropped = without_cheapest(min(tries, key=lambda one: one.loss))
    return None if dropped == fit.heads else theta
