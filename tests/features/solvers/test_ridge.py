import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ridge_problems import (
    check_all_sizes,
    design_for,
    duplicated,
    features_of,
    narrow_panels,
    solve,
    stages_of,
    targets_for,
    tokens,
)
from scipy.linalg import LinAlgWarning

from onelayer.array.backend import to_numpy
from onelayer.data.sets import as_sets
from onelayer.features import mlp_features
from onelayer.features.solvers import ridge
from onelayer.features.solvers.design import Panels

# All routes


@pytest.mark.slow
@given(data=st.data())
def test_every_size_solves_its_own_normal_equations(xp_array, data):
    features, n = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 20))
    smaller = data.draw(st.sets(st.integers(1, n), max_size=4))
    X = tokens(n, seed=data.draw(st.integers(0, 99)))
    alpha = data.draw(st.sampled_from([1e-2, 1.0, 30.0]))
    weights = 0.5 + np.arange(n) % 3 if data.draw(st.booleans()) else None
    design = design_for(X, features, xp_array, weights)
    targets = targets_for(X, count=data.draw(st.integers(1, 3)))
    check_all_sizes(design, targets, alpha, sorted({*smaller, n}), xp_array)


@pytest.mark.parametrize("features", [40, 14, 4])
def test_sizes_on_both_sides_of_the_number_of_features(xp_array, features):
    X, told = tokens(20), []
    design = design_for(X, features, xp_array)
    check_all_sizes(
        design, targets_for(X), 0.1, [3, 9, 14, 15, 20], xp_array, 1e-9, stages_of(told)
    )
    assert told == ["Gram matrix", "weights", "Gram matrix"][: 2 if features == 40 else 3]


def test_narrow_panels_give_the_same(xp_array, monkeypatch):
    narrow_panels(monkeypatch)
    X = tokens(20)
    design = design_for(X, 12, xp_array, weights=1.0 + np.arange(20) % 4)
    assert len(design.column_panels()) > 2
    assert len(design.row_panels()) > 2
    check_all_sizes(design, targets_for(X), 0.1, [5, 11, 17, 20], xp_array)


@pytest.mark.parametrize("n", [10, 40])
def test_weighted_rows_weigh_their_squared_errors(xp_array, n):
    X = tokens(n)
    weights = np.random.default_rng(3).uniform(0, 2, n)
    weights[2] = 0.0
    design, targets = design_for(X, 15, xp_array, weights), targets_for(X)
    rows = targets * np.sqrt(weights)[:, None]
    ((found, *_),) = solve(design, xp_array(rows), 0.2, [n])
    expected = oracles.ridge_weights(features_of(design_for(X, 15)), targets, 0.2, weights)
    np.testing.assert_allclose(to_numpy(found), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("n", [10, 40])
def test_features_in_float32_are_solved_in_float64(xp_array, n):
    X = tokens(n, dtype="f4")
    design = design_for(X, 15, xp_array)
    assert design.by_rows(slice(0, 1)).dtype == xp_array(X).dtype
    sizes, targets = [n // 2, n], xp_array(targets_for(X))
    double = Panels(design._map, as_sets(xp_array(X.astype("f8"))))
    found, expected = (solve(phi, targets, 1e-2, sizes) for phi in (design, double))
    for (weights, *_), (exact, *_) in zip(found, expected, strict=True):
        assert weights.dtype == targets.dtype
        np.testing.assert_array_equal(to_numpy(weights), to_numpy(exact))
    check_all_sizes(double, targets_for(X), 1e-2, sizes, xp_array)


@pytest.mark.parametrize("n", [10, 40])
def test_a_target_of_zeros_gets_weights_of_zero(xp_array, n):
    X = tokens(n)
    ((weights, *_),) = solve(design_for(X, 15, xp_array), xp_array(np.zeros((n, 2))), 1.0, [n])
    np.testing.assert_array_equal(to_numpy(weights), np.zeros((15, 2)))


def test_small_problems_are_solved_in_float64_at_once():
    X, told = tokens(12), []
    check_all_sizes(design_for(X, 30), targets_for(X), 0.1, [12], track=stages_of(told))
    assert told == ["Gram matrix", "weights"]


# Singular problems


@pytest.mark.parametrize("first_in_float32", [False, True])
@pytest.mark.parametrize("n", [10, 30])
def test_of_many_solutions_the_smallest_is_taken(xp_array, monkeypatch, n, first_in_float32):
    if first_in_float32:
        monkeypatch.setattr(ridge, "_MIXED_FROM", 0)
    X = duplicated(n, distinct=5)
    design, targets = design_for(X, 15, xp_array), targets_for(X)
    remedy = "alpha=0 is singular to working precision.*a larger alpha, or alpha='loo'"
    with pytest.warns(LinAlgWarning, match=remedy) as caught:
        ((weights, *_),) = solve(design, xp_array(targets), 0.0, [n])
    assert len(caught) == 1
    expected = np.linalg.pinv(features_of(design), rcond=1e-10) @ targets
    np.testing.assert_allclose(to_numpy(weights), expected, rtol=0, atol=1e-8 * abs(expected).max())


@pytest.mark.parametrize("n", [10, 30])
def test_a_penalty_that_is_lost_in_rounding_counts_as_none(n):
    """Cholesky may then find a factor, but its last pivots are rounding errors."""
    X = duplicated(n, distinct=5)
    design, targets = design_for(X, 15), targets_for(X)
    phi = features_of(design)
    alpha = 2e-16 * np.linalg.norm(phi, ord=2) ** 2
    with pytest.warns(LinAlgWarning, match="is singular to working precision"):
        ((weights, *_),) = solve(design, targets, alpha, [n])
    expected = np.linalg.pinv(phi, rcond=1e-10) @ targets
    np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-8 * abs(expected).max())


def test_sizes_that_are_not_singular_are_solved_without_a_warning():
    X = tokens(12)
    X[8:] = X[:4]
    design, targets = design_for(X, 40), targets_for(X)
    phi = features_of(design)
    with pytest.warns(LinAlgWarning) as caught:
        found = solve(design, targets, 0.0, [4, 8, 12])
    assert len(caught) == 1
    for size, (weights, *_) in zip([4, 8, 12], found, strict=True):
        expected = np.linalg.pinv(phi[:size], rcond=1e-10) @ targets[:size]
        np.testing.assert_allclose(weights, expected, rtol=0, atol=1e-7 * abs(expected).max())


def test_features_that_are_all_zero_give_weights_of_zero():
    X = np.zeros((6, 3, 2))
    silent = mlp_features.MLPMap(-np.ones((7, 9)), 3)
    with pytest.warns(LinAlgWarning):
        ((weights, *_),) = solve(Panels(silent, as_sets(X)), targets_for(X), 0.0, [6])
    np.testing.assert_array_equal(weights, np.zeros((9, 2)))


# From a kernel matrix


@given(data=st.data())
def test_a_kernel_gives_dual_coefficients_for_every_size(xp_array, data):
    n = data.draw(st.integers(1, 12))
    sizes = sorted({*data.draw(st.sets(st.integers(1, n), max_size=4)), n})
    X = tokens(n, seed=data.draw(st.integers(0, 99)))
    phi, targets = features_of(design_for(X, 20)), targets_for(X)
    kernel = phi @ phi.T
    unread = np.where(np.tri(n, dtype=bool), kernel, 7.0)
    found = ridge.solve_kernel(xp_array(unread), xp_array(targets), 0.1, sizes)
    for size, (dual, alphas, _) in zip(sizes, found, strict=True):
        expected = oracles.kernel_dual(kernel[:size, :size], targets[:size], 0.1)
        assert dual.shape == expected.shape
        np.testing.assert_allclose(to_numpy(dual), expected, rtol=1e-8, atol=1e-9)
        np.testing.assert_array_equal(alphas, [0.1, 0.1])


def test_a_kernel_is_left_as_it_was(xp_array):
    kernel = xp_array(np.eye(3) + 1.0)
    ridge.solve_kernel(kernel, xp_array(np.ones((3, 1))), 0.5, [2, 3])
    np.testing.assert_array_equal(to_numpy(kernel), np.eye(3) + 1.0)


# With an intercept


@pytest.mark.slow
@given(data=st.data())
def test_an_intercept_is_a_constant_feature_without_a_penalty(xp_array, data):
    features, n = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 20))
    smaller = data.draw(st.sets(st.integers(1, n), max_size=4))
    X = tokens(n, seed=data.draw(st.integers(0, 99)))
    alpha = data.draw(st.sampled_from([1e-2, 1.0, 30.0]))
    weights = 0.5 + np.arange(n) % 3 if data.draw(st.booleans()) else None
    design = design_for(X, features, xp_array, weights)
    targets = targets_for(X, count=data.draw(st.integers(1, 3))) + 5.0
    sizes = sorted({*smaller, n})
    in_float32_first = data.draw(st.booleans())
    with pytest.MonkeyPatch.context() as patch:
        if in_float32_first:
            patch.setattr(ridge, "_MIXED_FROM", 0)
        check_all_sizes(design, targets, alpha, sizes, xp_array, 1e-8, fit_intercept=True)


@pytest.mark.parametrize("features", [40, 14, 4])
def test_an_intercept_with_narrow_panels(xp_array, monkeypatch, features):
    narrow_panels(monkeypatch)
    X = tokens(20)
    design = design_for(X, features, xp_array, weights=(np.arange(20) % 4).astype(float))
    assert len(design.row_panels()) > 1
    sizes = [5, 11, 17, 20]
    check_all_sizes(design, targets_for(X), 0.1, sizes, xp_array, fit_intercept=True)


@pytest.mark.parametrize("offset", [1e3, 1e6, 1e9])
@pytest.mark.parametrize("alpha", [0.1, None])
@pytest.mark.parametrize("n", [10, 40])
def test_an_offset_of_the_targets_is_in_the_intercept_alone(n, alpha, offset):
    X = tokens(n)
    design, targets = design_for(X, 15), targets_for(X)
    sizes = [n - 3, n]
    plain = solve(design, targets, alpha, sizes, fit_intercept=True)
    moved = solve(design, targets + offset, alpha, sizes, fit_intercept=True)
    for (weights, alphas, intercept), (others, other_alphas, shifted) in zip(
        plain, moved, strict=True
    ):
        np.testing.assert_allclose(other_alphas, alphas, rtol=1e-9)
        scale = abs(weights).max(axis=0)
        np.testing.assert_allclose(others / scale, weights / scale, rtol=0, atol=1e-14 * offset)
        np.testing.assert_allclose(shifted - offset, intercept, rtol=0, atol=1e-13 * offset)


@pytest.mark.parametrize("n", [10, 30])
def test_of_many_solutions_with_an_intercept_the_smallest_is_taken(xp_array, n):
    X = duplicated(n, distinct=5)
    design, targets = design_for(X, 15, xp_array), targets_for(X) + 7.0
    with pytest.warns(LinAlgWarning, match="alpha=0 is singular to working precision") as caught:
        ((weights, _, intercept),) = solve(design, xp_array(targets), 0.0, [n], fit_intercept=True)
    assert len(caught) == 1
    phi = features_of(design)
    centred = phi - phi.mean(axis=0)
    expected = np.linalg.pinv(centred, rcond=1e-10) @ (targets - targets.mean(axis=0))
    np.testing.assert_allclose(to_numpy(weights), expected, rtol=0, atol=1e-8 * abs(expected).max())
    constant = targets.mean(axis=0) - phi.mean(axis=0) @ expected
    np.testing.assert_allclose(to_numpy(intercept), constant, rtol=1e-7)


@pytest.mark.filterwarnings("ignore:ridge regression with alpha=0 is singular")
@pytest.mark.parametrize("alpha", [0.0, 0.1, None])
@pytest.mark.parametrize("n", [1, 2, 10, 30])
def test_features_that_do_not_vary_leave_the_mean(n, alpha):
    X = np.repeat(tokens(1), n, axis=0)
    design, targets = design_for(X, 15), targets_for(tokens(n)) + 3.0
    ((weights, alphas, intercept),) = solve(design, targets, alpha, [n], fit_intercept=True)
    assert abs(weights).max() < 1e-7 * abs(targets).max()
    np.testing.assert_allclose(intercept, targets.mean(axis=0), rtol=1e-6)
    assert np.isfinite(alphas).all()


@given(data=st.data())
def test_a_kernel_gives_dual_coefficients_with_an_intercept(xp_array, data):
    n = data.draw(st.integers(1, 12))
    sizes = sorted({*data.draw(st.sets(st.integers(1, n), max_size=4)), n})
    X = tokens(n, seed=data.draw(st.integers(0, 99)))
    weights = 0.5 + np.arange(n) % 3
    phi, targets = features_of(design_for(X, 20)), targets_for(X) + 5.0
    rows, right = np.sqrt(weights)[:, None] * phi, np.sqrt(weights)[:, None] * targets
    unread = np.where(np.tri(n, dtype=bool), rows @ rows.T, 7.0)
    ones = xp_array(np.sqrt(weights))
    found = ridge.solve_kernel(xp_array(unread), xp_array(right), 0.1, sizes, ones)
    for size, (dual, _, intercept) in zip(sizes, found, strict=True):
        columns = np.concatenate([phi[:size], np.ones((size, 1))], axis=1)
        penalties = [*[0.1] * 20, 0.0]
        *expected, constant = oracles.ridge_weights(
            columns, targets[:size], penalties, weights[:size]
        )
        got = rows[:size].T @ to_numpy(dual)
        np.testing.assert_allclose(got, np.array(expected), rtol=1e-7, atol=1e-8)
        np.testing.assert_allclose(to_numpy(intercept), constant, rtol=1e-7, atol=1e-8)
