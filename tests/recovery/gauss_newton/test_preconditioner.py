"""How strongly outputs respond to single heads, against loops over rows."""

from dataclasses import replace

import numpy as np
import oracles
import pytest
from cases import random_case

from onelayer.array.backend import like, to_numpy
from onelayer.heads import dense
from onelayer.recovery.gauss_newton import jacobian, preconditioner

VARIANTS = [
    {},
    {"bias": True},
    {"masked": True, "causal": True},
    {"out_dim": 1, "dim": 3},
    {"tokens": 1},
]


def assert_close(found, expected, relative):
    size = max(1e-3, abs(expected).max())
    np.testing.assert_allclose(to_numpy(found), expected, rtol=0, atol=relative * size)


def responses_by_loops(case, weights):
    """Σ_a V_a W_i W_iᵀ V_a over the number of rows, head by head."""
    X, _ = case.whitened()
    heads, dim, _ = case.attention.shape
    projections = to_numpy(weights)[: heads * dim].reshape(heads, dim, -1)
    total = np.zeros((heads, dim, dim))
    for head in range(heads):
        bias = None if case.key_bias is None else case.key_bias[head]
        for i, a in oracles.present_rows(*X.shape[:2], case.mask):
            present = None if case.mask is None else case.mask[i]
            keys = oracles.allowed_keys(a, X.shape[1], present, case.causal)
            row = oracles.attention_row(X[i], a, keys, case.attention[head], bias)
            tokens, p = X[i][keys], np.array(list(row.values()))
            V = tokens.T @ (np.diag(p) - np.outer(p, p)) @ tokens
            total[head] += V @ projections[head] @ projections[head].T @ V
    return total / (X.shape[0] * X.shape[1])


@pytest.mark.parametrize("variant", VARIANTS)
def test_responses_are_those_of_single_heads(xp_array, variant):
    case = random_case(2, **{"n": 30, "tokens": 3, **variant})
    fit = case.fit(xp_array, per_block=7)
    found = preconditioner.preconditioner(fit, jacobian.jacobian(fit))
    expected = responses_by_loops(case, fit.weights)
    rng = np.random.default_rng(0)
    direction = rng.standard_normal(fit.theta.shape)
    dim = case.X.shape[2]
    values, vectors = np.linalg.eigh(expected)
    mean = values.mean(axis=1, keepdims=True)
    if mean.max() == 0:  # one token: outputs respond to nothing
        assert found is None
        return
    values = np.maximum(values, 1e-3 * mean)
    matrices = (vectors * values[:, None, :]) @ vectors.transpose(0, 2, 1)
    there = dense.pack(dense.by_head(direction, dim) @ matrices)
    times = found.times(like(direction, fit.theta), 1.0)
    assert_close(times, there, 1e-4)
    assert_close(found.times(times, -1.0), direction, 1e-6)


def test_there_is_no_preconditioner_with_an_idle_head():
    case = random_case(2, n=40, tokens=3, heads=2)
    fit = case.fit()
    assert preconditioner.preconditioner(fit, jacobian.jacobian(fit)) is not None
    weights = fit.weights.copy()
    weights[case.X.shape[2] :] *= 1e-5
    idle = replace(fit, weights=weights)
    assert preconditioner.preconditioner(idle, jacobian.jacobian(idle)) is None
