import numpy as np
import pytest
from cases import random_mask, solved_case, whitened

from onelayer import AttentionLayer, inputs
from onelayer.array.backend import to_numpy
from onelayer.heads import low_rank
from onelayer.recovery.gauss_newton import jacobian, varpro


def low_rank_case(bias, masked):
    """A fit somewhere else than at the solution, with heads of rank 2 in 9 dimensions."""
    layer = AttentionLayer.random(heads=3, dim=9, rank=2, bias=bias, seed=1)
    mask = random_mask(np.random.default_rng(3), 40, 3) if masked else None
    return solved_case(layer, inputs.gaussian(40, 3, 9, seed=2), mask)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_low_rank_are_those_of_whole_matrices(xp_array, bias, masked):
    fit = low_rank_case(bias, masked).fit(xp_array)
    tangent = low_rank.tangent(fit.theta, 9, 2)
    anywhere = xp_array(np.random.default_rng(0).standard_normal(fit.theta.shape))
    direction = tangent.project(anywhere)
    products = jacobian.jacobian(fit)
    expected = to_numpy(tangent.project(products.gauss_newton_product(direction)))
    found = to_numpy(products.gauss_newton_product(direction, tangent))
    assert abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * abs(expected).max())
    gradient = to_numpy(jacobian.gradient(fit, products, tangent))
    expected = to_numpy(tangent.project(jacobian.gradient(fit)))
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-12 * abs(expected).max())


def test_products_of_low_rank_where_queries_are_not_keys(xp_array):
    layer = AttentionLayer.random(heads=3, dim=9, rank=2, seed=1)
    X = inputs.gaussian(40, 3, 9, seed=2) + 3.0
    posed = whitened(xp_array(X), xp_array(layer(X) + X), None, False, False)
    assert posed.offset is not None
    fit = varpro.fit(posed.batches(3), posed.heads_of(layer))
    tangent = low_rank.tangent(fit.theta, 9, 2)
    anywhere = xp_array(np.random.default_rng(0).standard_normal(fit.theta.shape))
    direction = tangent.project(anywhere)
    products = jacobian.jacobian(fit)
    expected = to_numpy(tangent.project(products.gauss_newton_product(direction)))
    found = to_numpy(products.gauss_newton_product(direction, tangent))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * abs(expected).max())
    gradient = to_numpy(jacobian.gradient(fit, products, tangent))
    expected = to_numpy(tangent.project(jacobian.gradient(fit)))
    assert abs(expected).max() > 1e-3
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-11 * abs(expected).max())


def test_factors_multiply_to_the_direction():
    rng = np.random.default_rng(0)
    fit = low_rank_case(bias=True, masked=False).fit()
    tangent = low_rank.tangent(fit.theta, 9, 2)
    direction = tangent.project(rng.standard_normal(fit.theta.shape))
    heads = direction.reshape(10, 3, 9).transpose(1, 0, 2)
    left, right = low_rank._factors(direction, tangent.left, tangent.right)
    assert left.shape == (10, 15)
    assert right.shape == (9, 15)
    for i, head in enumerate(heads):
        part = slice(5 * i, 5 * i + 5)
        np.testing.assert_allclose(left[:, part] @ right[:, part].T, head, atol=1e-12)


def test_a_rank_that_is_not_low_goes_the_plain_way(monkeypatch):
    layer = AttentionLayer.random(heads=2, dim=4, rank=2, seed=1)
    fit = solved_case(layer, inputs.gaussian(30, 3, 4, seed=2), None).fit()
    tangent = low_rank.tangent(fit.theta, 4, 2)
    monkeypatch.setattr(low_rank, "_scores", None)
    monkeypatch.setattr(low_rank, "_scores_vjp", None)
    direction = tangent.project(np.ones(fit.theta.shape))
    products = jacobian.jacobian(fit)
    expected = tangent.project(products.gauss_newton_product(direction))
    np.testing.assert_array_equal(products.gauss_newton_product(direction, tangent), expected)
