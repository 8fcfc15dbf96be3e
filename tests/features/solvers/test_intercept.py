import numpy as np
import pytest

from onelayer.array.backend import to_numpy
from onelayer.array.linalg import add_gram, symmetric_product
from onelayer.features.solvers import intercept
from onelayer.features.solvers.intercept import Reflection

RNG = np.random.default_rng(0)
SCALES = {
    "alike": np.ones(7),
    "weighted": np.sqrt(RNG.uniform(0, 2, 7)),
    "first without weight": np.array([0.0, 1.0, 2.0, 0.0, 1.0, 3.0, 1.0]),
}
PHI, TARGETS = RNG.standard_normal((7, 9)) + 3.0, RNG.standard_normal((7, 2)) + 100.0


def problem(kind):
    ones = SCALES[kind]
    return ones[:, None] * PHI, ones[:, None] * TARGETS, ones


def exact(phi, targets, ones, alpha):
    """c and b of the bordered system."""
    system = np.block([[phi @ phi.T + alpha * np.eye(7), ones[:, None]], [ones[None, :], 0.0]])
    solved = np.linalg.solve(system, np.concatenate([targets, np.zeros((1, 2))]))
    return solved[:-1], solved[-1]


def lower(matrix):
    return np.where(np.tri(len(matrix), dtype=bool), matrix, 7.0)


@pytest.mark.parametrize("n", [1, 5, 8, 30])
def test_products_read_only_the_lower_triangle(xp_array, n):
    matrix, vector = RNG.standard_normal((n, n)), RNG.standard_normal(n)
    symmetric = matrix + matrix.T
    found = symmetric_product(xp_array(lower(symmetric)), xp_array(vector))
    np.testing.assert_allclose(to_numpy(found), symmetric @ vector, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", SCALES)
def test_one_more_right_side_solves_the_bordered_system(xp_array, kind):
    phi, targets, ones = problem(kind)
    bordered = intercept.BorderedTargets.of(xp_array(targets), xp_array(ones))
    right = to_numpy(bordered.right)
    assert abs(ones @ right[:, :2]).max() < 1e-9  # targets are centred
    dual = xp_array(np.linalg.solve(phi @ phi.T + 0.1 * np.eye(7), right))
    found, _, constant = bordered.solution(dual, dual, 0.1)
    expected, intercepts = exact(phi, targets, ones, 0.1)
    np.testing.assert_allclose(to_numpy(found), expected, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(to_numpy(constant), intercepts, rtol=1e-9)


@pytest.mark.parametrize("kind", SCALES)
def test_a_reflection_solves_the_bordered_system(xp_array, kind):
    phi, targets, ones = problem(kind)
    kernel = xp_array(lower(phi @ phi.T))
    reflection = Reflection.of(kernel, xp_array(ones))
    basis = to_numpy(reflection.expand(xp_array(np.eye(6))))
    np.testing.assert_allclose(basis.T @ basis, np.eye(6), atol=1e-12)
    np.testing.assert_allclose(ones @ basis, 0.0, atol=1e-12)
    projected = to_numpy(reflection.project(xp_array(targets)))
    np.testing.assert_allclose(projected, basis.T @ targets, atol=1e-10)
    reduced = np.tril(to_numpy(reflection.reduced(kernel)))
    np.testing.assert_allclose(reduced, np.tril(basis.T @ phi @ phi.T @ basis), atol=1e-9)
    mean = ones @ phi @ phi.T @ ones / (ones @ ones)
    assert reflection.mean == pytest.approx(mean, rel=1e-10)
    expected, intercepts = exact(phi, targets, ones, 0.1)
    constant = reflection.intercept(xp_array(targets), xp_array(expected))
    np.testing.assert_allclose(to_numpy(constant), intercepts, rtol=1e-9)
    np.testing.assert_array_equal(to_numpy(kernel), lower(phi @ phi.T))  # left as it was


@pytest.mark.parametrize("cut", [0, 1, 4, 7])
@pytest.mark.parametrize("kind", SCALES)
def test_means_and_products_about_them_merge(xp_array, kind, cut):
    phi, targets, ones = problem(kind)
    sums, centres = [], []
    for part in (slice(cut), slice(cut, None)):
        rows, right, own = (xp_array(array[part].copy()) for array in (phi, targets, ones))
        centre = intercept.centre_of(rows, right, own)
        rows, right = (to_numpy(array) for array in centre.centred(rows, right, own))
        sums.append((rows.T @ rows, rows.T @ right))
        centres.append(centre)
    both, gap, target_gap = centres[0].merged(centres[1])
    gap, target_gap = to_numpy(gap), to_numpy(target_gap)
    mean, target_mean = (ones @ array / (ones @ ones) for array in (phi, targets))
    np.testing.assert_allclose(to_numpy(both.features), mean, rtol=1e-10)
    np.testing.assert_allclose(to_numpy(both.targets), target_mean, rtol=1e-10)
    centred = phi - ones[:, None] * mean
    gram = add_gram(sums[0][0] + sums[1][0], gap[:, None])
    np.testing.assert_allclose(np.tril(gram), np.tril(centred.T @ centred), atol=1e-9)
    moments = sums[0][1] + sums[1][1] + gap[:, None] * target_gap
    np.testing.assert_allclose(moments, centred.T @ targets, atol=1e-8)
    assert both.size == pytest.approx((ones @ ones) * (mean @ mean), rel=1e-10)
