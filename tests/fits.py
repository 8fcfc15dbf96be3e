"""Variants of small problems, and products with the Jacobian at their fits."""

import numpy as np
from cases import flat

from onelayer.array.backend import like, to_numpy
from onelayer.data.chunks import InMemory
from onelayer.recovery.gauss_newton import jacobian

VARIANTS = [
    {},
    {"bias": True},
    {"causal": True},
    {"masked": True},
    {"masked": True, "causal": True, "bias": True},
    {"out_dim": 1, "dim": 3},
    {"out_dim": 5},
    {"heads": 1},
    {"tokens": 1},
]


def direction_for(fit, seed=0):
    """A random direction of the theta attention matrices, as numpy and in the fit's namespace."""
    direction = np.random.default_rng(seed).standard_normal(fit.theta.shape)
    return direction, like(direction, fit.theta)


def jvp(fit, direction, single=False):
    """J times a direction, all blocks below one another."""
    moved = jacobian.jacobian(fit, single=single).jvp(direction)
    return np.concatenate([to_numpy(part) for part in flat(moved)])


def split(fit, rows):
    """Rows for all examples, cut as the fit's blocks are, in one chunk."""
    cuts = np.cumsum([block.outputs.shape[0] for block in flat(fit.batches.chunks)])[:-1]
    return InMemory((tuple(like(part, fit.theta) for part in np.split(rows, cuts)),))


def assert_close(actual, expected, relative=1e-9):
    """Equal up to `relative` of the largest entry."""
    expected = np.asarray(expected)
    atol = relative * max(1e-3, abs(expected).max(initial=0.0))
    np.testing.assert_allclose(to_numpy(actual), expected, rtol=0, atol=atol)
