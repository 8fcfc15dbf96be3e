from dataclasses import replace

import numpy as np
import pytest
from cases import flat, random_case, small_cases, solved, well_posed_cases
from fits import VARIANTS, assert_close, direction_for, jvp
from hypothesis import given, settings

from onelayer.array.backend import namespace, to_numpy
from onelayer.recovery.gauss_newton import jacobian, varpro

# The fit


@given(case=well_posed_cases())
@settings(max_examples=15)
def test_features_weights_and_loss_are_those_of_plain_least_squares(xp_array, case):
    fit = case.fit(xp_array)
    assert namespace(fit.weights) is namespace(xp_array(case.X))
    H = case.features()
    assert_close(np.concatenate([to_numpy(a.features) for a in flat(fit.attended)]), H)
    assert fit.loss == pytest.approx(case.loss(), rel=1e-10)
    assert fit.error == pytest.approx(case.loss() ** 0.5, rel=1e-10)
    assert fit.heads == case.heads
    _, Y = case.whitened()
    best, *_ = np.linalg.lstsq(H, Y.reshape(len(H), -1), rcond=None)
    assert_close(H @ to_numpy(fit.weights), H @ best, 1e-8)


@given(case=small_cases())
def test_loss_is_that_of_least_squares_even_where_weights_are_not_determined(case):
    assert case.fit().loss == pytest.approx(case.loss(), abs=1e-9)


@given(case=small_cases())
@settings(max_examples=10)
def test_residuals_are_outputs_less_what_the_weights_explain(xp_array, case):
    fit = case.fit(xp_array)
    total = 0.0
    parts = (flat(spread) for spread in (fit.batches.chunks, fit.attended, fit.residuals))
    for block, attended, residual in zip(*parts, strict=True):
        explained = to_numpy(attended.features) @ to_numpy(fit.weights)
        assert_close(residual, to_numpy(block.outputs) - explained, 1e-6)
        total += float(np.sum(to_numpy(residual) ** 2))
    assert fit.loss * case.equations == pytest.approx(total, rel=1e-12)


# The cost of dropping a head


@given(case=well_posed_cases())
@settings(max_examples=15)
def test_cost_of_dropping_is_what_refitting_without_the_head_costs(xp_array, case):
    costs = varpro.cost_of_dropping(case.fit(xp_array))
    equations = case.equations
    assert len(costs) == case.heads
    for head, cost in enumerate(costs):
        if case.heads == 1:
            H = np.ones((len(case.features()), 1)) * case.bias
            _, Y = case.whitened()
            flat = Y.reshape(len(H), -1)
            if case.mask is not None:
                H, flat = H[case.mask.ravel()], flat[case.mask.ravel()]
            mean = flat.mean(axis=0) * case.bias
            without = float(np.sum((flat - mean) ** 2)) / equations
        else:
            keep = np.arange(case.heads) != head
            bias = case.key_bias[keep] if case.bias else None
            without = replace(case, attention=case.attention[keep], key_bias=bias).loss()
        assert cost / equations == pytest.approx(without - case.loss(), abs=1e-8)


def test_dropping_one_of_two_equal_heads_costs_nothing(xp_array):
    case = random_case(7, n=20, heads=3)
    case.attention[2] = case.attention[0]
    costs = np.array(varpro.cost_of_dropping(case.fit(xp_array))) / case.equations
    assert max(abs(costs[[0, 2]])) < 1e-6 < 1e-3 < costs[1]


# Degenerate problems


def test_equal_heads_fit_as_well_as_one_of_them(xp_array):
    case = random_case(8, n=20)
    case.attention[1] = case.attention[0]
    one = replace(case, attention=case.attention[:1])
    fit = case.fit(xp_array)
    assert fit.loss == pytest.approx(one.loss(), abs=1e-9)
    assert np.isfinite(to_numpy(fit.weights)).all()
    _, array = direction_for(fit)
    assert np.isfinite(to_numpy(jacobian.jacobian(fit).gauss_newton_product(array))).all()


@pytest.mark.parametrize("bias", [False, True])
def test_tokens_that_are_all_zero_explain_nothing_but_a_bias(xp_array, bias):
    case = random_case(9, bias=bias)
    case.X[:] = 0.0
    fit = case.fit(xp_array)
    _, Y = case.whitened()
    left = Y - Y.mean(axis=(0, 1)) * bias
    assert fit.loss == pytest.approx(float(np.mean(left**2)), rel=1e-9)
    _, array = direction_for(fit)
    assert abs(to_numpy(jacobian.jacobian(fit).gauss_newton_product(array))).max() == 0
    assert abs(to_numpy(jacobian.gradient(fit))).max() == 0


def test_dropping_a_head_that_sees_only_zeros_costs_nothing(xp_array):
    case = random_case(9)
    case.X[:] = 0.0
    assert varpro.cost_of_dropping(case.fit(xp_array)) == [0.0, 0.0]


def test_one_token_attends_to_itself_whatever_the_attention(xp_array):
    case = random_case(10, tokens=1)
    fit = case.fit(xp_array)
    direction, array = direction_for(fit)
    size = abs(to_numpy(fit.weights)).max()
    assert abs(jvp(fit, array)).max() < 1e-14 * size
    moved = case.moved(direction, 1.0).fit(xp_array)
    assert moved.loss == pytest.approx(fit.loss, abs=1e-9)
    assert case.loss() == pytest.approx(fit.loss, abs=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fit_in_single_precision_is_close_to_one_in_double(xp_array, variant):
    case = random_case(3, **{"n": 40, **variant})
    fit, expected = (
        varpro.fit(case.fit(xp_array).batches, case.fit(xp_array).theta, single=single)
        for single in (True, False)
    )
    assert fit.single
    assert not expected.single
    assert fit.error == pytest.approx(expected.error, rel=1e-4)
    assert_close(fit.weights, to_numpy(expected.weights), 1e-3)
    products = jacobian.jacobian(fit)
    assert_close(jacobian.gradient(fit, products), to_numpy(jacobian.gradient(expected)), 1e-3)


@pytest.mark.parametrize("masked", [False, True])
def test_held_out_error_is_relative_to_the_outputs(xp_array, masked):
    case = solved(masked=masked, bias=True)
    fit = case.fit(xp_array)
    assert varpro.held_out_error(fit, case.problem(xp_array)) < 1e-12
    case.Y[:] += np.random.default_rng(0).standard_normal(case.Y.shape)
    posed = case.problem(xp_array)
    expected = posed.layer(fit.theta, fit.weights)(
        xp_array(case.X), mask=None if case.mask is None else xp_array(case.mask)
    )
    gap = to_numpy(expected) - case.Y
    there = np.ones(gap.shape[:2], dtype=bool) if case.mask is None else case.mask
    size = np.sqrt(np.mean(case.Y[there] ** 2))
    found = varpro.held_out_error(fit, posed)
    assert found == pytest.approx(np.sqrt(np.mean(gap[there] ** 2)) / size, rel=0.01)
