"""Means and variances of all targets."""

import itertools
import math

import numpy as np
import pytest

from onelayer import inputs
from onelayer.theory import targets

# Sums over all inputs of a finite set that has the same moments as the sphere.


def circle(tokens, points=16):
    """All choices of `tokens` of the corners of a polygon: the moments of the circle below 16."""
    angles = 2 * np.pi * np.arange(points) / points
    corners = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    return corners[np.array(list(itertools.product(range(points), repeat=tokens)))]


def signs(tokens):
    """All inputs on the sphere of one dimension."""
    return np.array(list(itertools.product([-1.0, 1.0], repeat=tokens)))[:, :, None]


def in_dimension(dim, seed=0):
    """Targets of all kinds."""
    rng = np.random.default_rng(seed)
    beta = rng.normal(size=dim)
    tensors = {
        rs: rng.normal(size=(dim,) * sum(rs)) for rs in [(0, 0), (1, 0), (0, 2), (2, 1), (1, 3)]
    }
    return [
        *(targets.average_power(p, dim, beta) for p in (1, 2, 3, 4)),
        *(targets.correlation_weighted(q, dim, beta) for q in (0, 1, 2, 3)),
        *(targets.rotated_correlation(q, dim, beta=beta, seed=seed) for q in (1, 2)),
        *(targets.query_only(p, dim, beta) for p in (1, 2, 3)),
        targets.polynomial(tensors),
        targets.polynomial({(2, 2): rng.normal(size=(dim,) * 4), (4, 0): np.ones((dim,) * 4)}),
        targets.one_position(1, 2, dim, beta),
        targets.ordered_sum(dim, 1, beta=beta),
        targets.ordered_sum(dim, 2, "increasing", beta),
        targets.three_token(dim, beta),
    ]


def by_name(target):
    return target.name


@pytest.mark.parametrize("keys", [1, 2, 4])
@pytest.mark.parametrize("target", in_dimension(1), ids=by_name)
def test_moments_are_exact_on_the_line(target, keys):
    values = target(signs(keys + 1))
    assert target.mean(keys) == pytest.approx(np.mean(values), abs=1e-12)
    assert target.variance(keys) == pytest.approx(np.var(values), abs=1e-12)


@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("target", in_dimension(2), ids=by_name)
def test_moments_are_exact_on_the_circle(target, keys):
    values = target(circle(keys + 1))
    assert target.mean(keys) == pytest.approx(np.mean(values), abs=1e-12)
    assert target.variance(keys) == pytest.approx(np.var(values), abs=1e-12)


def test_two_hops_are_exact_on_the_circle_for_four_keys():
    """Of all four keys different, which fewer keys do not reach."""
    target = targets.three_token(2)
    corners = circle(1, points=6)[:, 0]  # each token comes to the fourth power at most
    choices = np.array(list(itertools.product(range(6), repeat=4)))
    squares = [
        np.mean(
            target(np.concatenate([np.tile(query, (len(choices), 1, 1)), corners[choices]], 1)) ** 2
        )
        for query in corners
    ]
    assert target.variance(4) == pytest.approx(np.mean(squares), rel=1e-12)


@pytest.mark.parametrize("target", in_dimension(5, seed=1), ids=by_name)
def test_moments_are_those_of_random_inputs(target):
    n, keys = 20_000, 4
    values = target(inputs.sphere(n, keys + 1, 5, seed=11))
    mean, variance = target.mean(keys), target.variance(keys)
    assert abs(np.mean(values) - mean) < 5 * math.sqrt(variance / n)
    squares = (values - mean) ** 2
    assert abs(np.mean(squares) - variance) < 5 * np.std(squares) / math.sqrt(n)


@pytest.mark.parametrize(
    ("target", "keys", "mean", "variance"),
    [
        (targets.average_power(1, 16), 4, 0.0, 1 / 64),
        (targets.average_power(2, 3), 1, 1 / 3, 1 / 5 - 1 / 9),
        (targets.average_power(2, 3, [2.0, 0.0, 0.0]), 2, 4 / 3, 16 * (1 / 5 - 1 / 9) / 2),
        (targets.query_only(2, 3), 7, 1 / 3, 1 / 5 - 1 / 9),
        (targets.correlation_weighted(2, 3), 5, 0.0, 1 / 5 / 3 / 5),
        (targets.correlation_weighted(1, 3), 2, 0.0, (1 / 9 - 1 / 27) / 2 + 1 / 27),
        (targets.one_position(2, 1, 4), 3, 0.0, 1 / 4),
        (targets.ordered_sum(4, 2), 3, 1 / 4 / 3, (3 / 24 - 1 / 16) / 3),
        (targets.ordered_sum(4, 1, "increasing"), 3, 0.0, 14 / 9 / 4),
        (targets.three_token(3), 1, 0.0, 1 / 9),
    ],
)
def test_moments_worked_out_by_hand(target, keys, mean, variance):
    assert target.mean(keys) == pytest.approx(mean, abs=1e-15)
    assert target.variance(keys) == pytest.approx(variance, rel=1e-12)
