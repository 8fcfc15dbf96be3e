"""Dropping heads, and replacing the head that explains least by a missing one.

Where a search for many heads is stuck a weak head is missing, hidden by stronger ones. The
residuals contain no strong heads any more, so their correlations with products of three tokens show
the missing one.
"""

from __future__ import annotations

import numpy as np

from onelayer.array.backend import Array
from onelayer.data.progress import Progress, no_progress
from onelayer.heads import dense, low_rank
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.strategies import correlations

_SCORE = 2.0  # first guess of the standard deviation of the scores of a missing head


def prune(fit: Fit, heads: int) -> Array:
    """The attention matrices of `heads` heads, after dropping the others, the cheapest first."""
    while fit.heads > heads + 1:
        fit = varpro.fit(fit.batches, without_cheapest(fit)[0])
    return without_cheapest(fit)[0] if fit.heads > heads else fit.theta


def without_cheapest(fit: Fit) -> tuple[Array, int]:
    """The attention matrices without the head that costs least to drop, and which one that is."""
    drop = int(np.argmin(varpro.cost_of_dropping(fit)))
    return dense.drop(fit.theta, drop, fit.batches.dim), drop


def missing(
    fit: Fit,
    problem: WhitenedExamples,
    rank: int | None,
    rng: np.random.Generator,
    progress: Progress = no_progress,
) -> Array:
    """The head (p, d) that correlations show in the residuals of all examples of a problem."""
    whole = fit
    if fit.batches.examples < problem.examples:  # a fit to a subset
        whole = varpro.fit(problem.batches(fit.heads), fit.theta, single=True)
    found = correlations.span(whole.batches, 1, rng, whole.residuals, progress)
    return low_rank.nearest(found.theta, problem.dim, rank)


def repaired(fit: Fit, head: Array) -> Array | None:
    """The heads of a fit with the one that explains least replaced by `head`.

    None if `head` explains least. To first order a head and its negative with a negative projection
    are the same: the better of the two is taken.
    """
    tries = [
        varpro.fit(fit.batches, dense.concat([fit.theta, score * head]), single=True)
        for score in (_SCORE, -_SCORE)
    ]
    theta, dropped = without_cheapest(min(tries, key=lambda one: one.loss))
    return None if dropped == fit.heads else theta
