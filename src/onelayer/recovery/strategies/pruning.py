"""Dropping the heads of a fit that explain least."""

from __future__ import annotations

import numpy as np

from onelayer.array.backend import Array
from onelayer.heads import dense
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.gauss_newton.varpro import Fit


def prune(fit: Fit, heads: int) -> Array:
    """The attention matrices of `heads` heads, after dropping the others, the cheapest first."""
    while fit.heads > heads + 1:
        fit = varpro.fit(fit.batches, without_cheapest(fit)[0])
    return without_cheapest(fit)[0] if fit.heads > heads else fit.theta


def without_cheapest(fit: Fit) -> tuple[Array, int]:
    """The attention matrices without the head that costs least to drop, and which one that is."""
    drop = int(np.argmin(varpro.cost_of_dropping(fit)))
    return dense.drop(fit.theta, drop, fit.batches.dim), drop
