import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ridge_problems import (
    check_all_sizes,
    design_for,
    features_of,
    narrow_panels,
    solve,
    stages_of,
    targets_for,
    tokens,
)

from onelayer.array.backend import to_numpy
from onelayer.data.sets import as_sets
from onelayer.features import mlp_features
from onelayer.features.solvers import mixed_precision, ridge
from onelayer.features.solvers.design import Panels


@pytest.fixture
def in_float32_first(monkeypatch):
    """Even the smallest problems are solved in float32 first."""
    monkeypatch.setattr(ridge, "_MIXED_FROM", 0)


@pytest.mark.slow
@given(data=st.data())
def test_corrections_reach_the_accuracy_of_float64(xp_array, data):
    n = data.draw(st.integers(1, 12))
    sizes = sorted({*data.draw(st.sets(st.integers(1, n), max_size=4)), n})
    X, told = tokens(n, seed=data.draw(st.integers(0, 99))), []
    targets = targets_for(X, count=data.draw(st.integers(1, 3)))
    targets[:, 0] *= data.draw(st.sampled_from([0.0, 1.0]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ridge, "_MIXED_FROM", 0)
        track = stages_of(told)
        check_all_sizes(design_for(X, 30, xp_array), targets, 0.1, sizes, xp_array, 1e-9, track)
    assert told[0] == "Gram matrix"
    assert set(told[1:]) == {"correction"}


def test_corrections_go_on_for_the_sizes_that_need_more(in_float32_first):
    """A small problem settles at once: later rounds have only the columns of the large one."""
    X, told = tokens(40), []
    check_all_sizes(design_for(X, 60), targets_for(X), 1e-4, [1, 40], track=stages_of(told))
    assert told.count("correction") > 2
    assert "weights" not in told


def test_corrections_with_narrow_panels_and_weights(xp_array, in_float32_first, monkeypatch):
    narrow_panels(monkeypatch)
    X = tokens(12)
    design = design_for(X, 30, xp_array, weights=1.0 + np.arange(12) % 4)
    check_all_sizes(design, targets_for(X), 0.1, [4, 12], xp_array)


def test_what_does_not_settle_is_solved_in_float64(in_float32_first):
    """Two examples differ by 1e-4: in float32 their difference is lost, in float64 it is not."""
    X, told = tokens(12), []
    X[7] = X[3] + 1e-4 * X[8]
    design, targets = design_for(X, 30), targets_for(X)
    targets[7] = targets[3] + 5.0
    ((weights, *_),) = solve(design, targets, 1e-12, [12], stages_of(told))
    assert told[-2:] == ["Gram matrix", "weights"]
    phi = features_of(design)
    expected = phi @ oracles.ridge_weights(phi, targets, 1e-12)
    np.testing.assert_allclose(phi @ weights, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(expected[7] - expected[3], 5.0, rtol=0.1)


def test_too_few_rounds_are_made_up_for_in_float64(in_float32_first, monkeypatch):
    monkeypatch.setattr(mixed_precision, "_ROUNDS", 1)
    X, told = tokens(12), []
    check_all_sizes(design_for(X, 30), targets_for(X), 0.1, [5, 12], track=stages_of(told))
    assert told == ["Gram matrix", "correction", "Gram matrix", "weights"]


def test_rounds_that_gain_too_little_are_given_up_for_float64(in_float32_first, monkeypatch):
    monkeypatch.setattr(mixed_precision, "_SETTLED", 0.0)  # rounding errors never get there
    X, told = tokens(12), []
    check_all_sizes(design_for(X, 30), targets_for(X), 0.1, [5, 12], track=stages_of(told))
    assert 2 < told.count("correction") < mixed_precision._ROUNDS
    assert told[-2:] == ["Gram matrix", "weights"]


def test_features_with_a_large_mean_settle(in_float32_first):
    """Their kernel has one eigenvalue far above the others: it is not to hide them in float32."""
    neurons = np.random.default_rng(5).standard_normal((7, 30))
    neurons[-1] = 1e3  # the weights of the constant: all fire for all examples
    design, told = Panels(mlp_features.MLPMap(neurons, 3), as_sets(tokens(6))), []
    values = np.linalg.eigvalsh(features_of(design) @ features_of(design).T)
    assert values[-1] > 1e5 * values[-2]
    targets = targets_for(tokens(6))
    check_all_sizes(design, targets, 0.1, [3, 6], rtol=1e-7, track=stages_of(told))
    assert "weights" not in told


def test_features_that_are_all_zero_give_weights_of_zero(xp_array, in_float32_first):
    X, told = np.zeros((6, 3, 2)), []
    silent = mlp_features.MLPMap(-np.ones((7, 9)), 3)
    ((weights, *_),) = solve(
        Panels(silent, as_sets(xp_array(X))), xp_array(targets_for(X)), 0.5, [6], stages_of(told)
    )
    np.testing.assert_array_equal(to_numpy(weights), np.zeros((9, 2)))
    assert set(told[1:]) == {"correction"}
