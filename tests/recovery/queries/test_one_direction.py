import numpy as np
import pytest

from onelayer.recovery.queries import one_direction


def network(rng, heads, dim, out_dim, rows):
    """Scores and values of a sum of sigmoids, points, and its outputs there, term by term."""
    scores = 2 * rng.standard_normal((heads, dim)) / dim**0.5
    values = rng.standard_normal((heads, out_dim))
    points = rng.standard_normal((rows, dim))
    outputs = np.zeros((rows, out_dim))
    for row, point in enumerate(points):
        for score, value in zip(scores, values, strict=True):
            outputs[row] += value / (1 + np.exp(-point @ score)) - value / 2
    return scores, values, points, outputs


@pytest.mark.parametrize(("heads", "dim", "out_dim"), [(1, 4, 1), (3, 5, 4), (4, 3, 4), (6, 8, 8)])
def test_heads_along_a_direction_are_counted_and_found(heads, dim, out_dim):
    rng = np.random.default_rng(heads)
    rows = 3 * (heads + dim)
    scores, values, points, outputs = network(rng, heads, dim, out_dim, rows)
    assert one_direction.count(outputs, 1e-16) == heads
    found = one_direction.find(points, outputs, values.sum(axis=0), heads, 1e-16, rng)
    assert found.heads == heads
    order = np.linalg.norm(found.scores[:, None] - scores, axis=2).argmin(axis=0)
    np.testing.assert_allclose(found.scores[order], scores, atol=1e-8)
    np.testing.assert_allclose(found.values[order], values, atol=1e-8)


def test_noise_is_not_counted_as_heads():
    rng = np.random.default_rng(0)
    *_, outputs = network(rng, 3, 6, 6, 30)
    noisy = outputs + 1e-6 * rng.standard_normal(outputs.shape)
    assert one_direction.count(noisy, 1e-6) == 3
    assert one_direction.count(noisy, 1e-16) == 6


def test_values_that_do_not_add_up_are_refused():
    rng = np.random.default_rng(1)
    _, values, points, outputs = network(rng, 2, 4, 4, 24)
    wrong = 0.5 * values.sum(axis=0)
    assert one_direction.find(points, outputs, wrong, 2, 1e-16, rng) is None


def test_outputs_of_no_such_network_are_refused():
    rng = np.random.default_rng(2)
    points = rng.standard_normal((30, 4))
    outputs = np.sin(3 * points[:, :2])
    assert one_direction.find(points, outputs, np.ones(2), 2, 1e-16, rng, starts=5) is None
