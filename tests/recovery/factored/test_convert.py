import numpy as np
import pytest
from cases import random_mask, solved_case, whitened, with_outputs
from factorings import like_random, narrow, solved_problem
from fits import assert_close

from onelayer import AttentionLayer, inputs
from onelayer.array.backend import like, to_numpy
from onelayer.heads import dense, low_rank
from onelayer.recovery.factored import convert, gauss_newton, model
from onelayer.recovery.gauss_newton import varpro


@pytest.mark.parametrize(("rank", "expected"), [(None, None), (2, 2), (4, 4), (5, None), (6, None)])
def test_projections_begin_with_the_rank_of_the_attention_matrices(rank, expected):
    posed, _ = solved_problem(n=10, dim=6, out_dim=5, rank=None, value_rank=None)
    assert convert.value_rank(rank, posed) == expected


def given_examples(xp_array, rank, bias=False, masked=False, causal=False, far=0.0, flat=False):
    """Whitened examples of a layer with projections of the same rank, and the layer."""
    layer = AttentionLayer.random(heads=2, dim=5, rank=rank, bias=bias, seed=1)
    if rank is not None:
        layer = narrow(layer, rank)
    X = inputs.gaussian(120, 4, 5, seed=2) + far
    if flat:
        X[:, :, 4] = 1.0
    mask = random_mask(np.random.default_rng(3), 120, 4) if masked else None
    Y = solved_case(layer, X, mask, causal).Y
    posed = whitened(
        xp_array(X), xp_array(Y), None if mask is None else xp_array(mask), causal, bias
    )
    return posed, layer


VARIANTS = [
    {"rank": 2},
    {"rank": None},
    {"rank": 2, "bias": True, "masked": True},
    {"rank": None, "bias": True, "causal": True},
    {"rank": 2, "masked": True},
    {"rank": 2, "far": 3.0},  # tokens with an offset, as queries and features have it
    {"rank": None, "far": 3.0, "masked": True},
    {"rank": 2, "flat": True},  # a span without the origin
]


@pytest.mark.parametrize("variant", VARIANTS)
def test_heads_have_a_way_to_factors_and_back(xp_array, variant):
    posed, layer = given_examples(xp_array, **variant)
    rank = variant["rank"]
    theta = low_rank.nearest(posed.heads_of(layer), posed.dim, rank)
    found = convert.factors(posed, theta, rank)
    assert {to_numpy(one).dtype for _, one in found.arrays()} == {np.dtype(np.float32)}
    assert (found.key is None) == (found.value is None) == (rank is None)
    assert (found.key_bias is not None) == posed.constant
    back = convert.theta(found, posed)
    assert_close(back, to_numpy(theta), 1e-5)
    assert back.dtype == posed.X.dtype
    fit = varpro.fit(posed.batches(2), theta)
    assert fit.error < 1e-9
    weights = convert.weights(found, posed)
    assert tuple(weights.shape) == tuple(fit.weights.shape)
    assert weights.dtype == posed.X.dtype
    assert_close(weights, to_numpy(fit.weights), 2e-3)
    again = posed.layer(back, weights)
    X = inputs.gaussian(20, 4, 5, seed=9) + variant.get("far", 0.0)
    if variant.get("flat"):
        X[:, :, 4] = 1.0
    expected = to_numpy(layer(X))
    np.testing.assert_allclose(again(X), expected, atol=5e-3 * np.abs(expected).max())


@pytest.mark.parametrize("variant", VARIANTS)
def test_factors_of_the_true_heads_explain_the_outputs(xp_array, variant):
    posed, layer = given_examples(xp_array, **variant)
    theta = low_rank.nearest(posed.heads_of(layer), posed.dim, variant["rank"])
    found = convert.factors(posed, theta, variant["rank"])
    assert gauss_newton.loss(found, posed.parts(64), single=True) < 1e-5


def test_query_and_key_have_equal_size(xp_array):
    posed, layer = given_examples(xp_array, rank=2)
    found = convert.factors(posed, posed.heads_of(layer), 2)
    for head in range(2):
        part = slice(2 * head, 2 * head + 2)
        pairs = (found.query, found.key), (found.value, None)
        sizes = [np.linalg.norm(to_numpy(one)[:, part]) for one in pairs[0]]
        assert sizes[0] == pytest.approx(sizes[1], rel=1e-5)
        output = np.linalg.norm(to_numpy(found.output)[part])
        assert output == pytest.approx(np.linalg.norm(to_numpy(found.value)[:, part]), rel=1e-5)


def test_heads_of_a_higher_rank_become_the_nearest(xp_array):
    posed, layer = given_examples(xp_array, rank=None)
    theta = posed.heads_of(layer)
    found = convert.theta(convert.factors(posed, theta, 2), posed)
    expected = low_rank.nearest(theta, posed.dim, 2)
    assert_close(found, to_numpy(expected), 1e-5)
    ranks = np.linalg.matrix_rank(dense.by_head(to_numpy(found), posed.dim), tol=1e-4)
    assert list(ranks) == [2, 2]


def test_weights_without_a_constant_have_no_row_for_it(xp_array):
    posed, factors = solved_problem(xp_array, n=20)
    assert not posed.constant
    assert convert.weights(factors, posed).shape[0] == 2 * posed.dim
    with_bias, factors = solved_problem(xp_array, n=20, bias=True)
    found = to_numpy(convert.weights(factors, with_bias))
    assert found.shape[0] == 2 * posed.dim + 1
    np.testing.assert_array_equal(found[-1], to_numpy(like(factors.output_bias, with_bias.X)))


# Tokens and outputs between those given and whitened ones


def uneven_examples(xp_array=np.asarray, bias=True, far=0.0, causal=False):
    """Whitened examples whose tokens and outputs vary more along some directions than others."""
    layer = AttentionLayer.random(heads=2, dim=4, rank=2, bias=bias, seed=1)
    layer = replace_projection(layer, layer.projection * np.array([5.0, 1.0, 0.2, 1.0]))
    turn = np.linalg.qr(np.random.default_rng(6).standard_normal((4, 4)))[0]
    X = inputs.gaussian(300, 3, 4, seed=2) * np.array([9.0, 4.0, 1.0, 0.25]) @ turn + far
    mask = random_mask(np.random.default_rng(3), 300, 3)
    Y = solved_case(layer, X, mask, causal).Y
    posed = whitened(xp_array(X), xp_array(Y), xp_array(mask), causal, bias)
    return posed, X[mask]


def replace_projection(layer, projection):
    return AttentionLayer(layer.attention, projection, layer.key_bias, layer.output_bias)


def covariance(tokens):
    return np.cov(tokens.T, bias=True)


@pytest.mark.parametrize("bias", [True, False])
def test_deviations_of_half_whitened_tokens_are_roots(xp_array, bias):
    posed, given = uneven_examples(xp_array, bias)
    between = convert.HalfWhitened.of(posed)
    there = to_numpy(posed.mask)
    found = to_numpy(between.examples(posed).X)[there]
    values = np.linalg.eigvalsh(covariance(found))
    deviations = np.linalg.eigvalsh(covariance(given)) ** 0.5
    np.testing.assert_allclose(values, deviations / deviations.mean(), rtol=0.02)
    assert np.linalg.cond(covariance(to_numpy(posed.X)[there])) < 1.1


def test_deviations_of_half_whitened_outputs_are_roots(xp_array):
    posed, _ = uneven_examples(xp_array)
    there = to_numpy(posed.mask)  # rows of padding do not count
    found, given = (
        to_numpy(one.Y)[there] for one in (convert.HalfWhitened.of(posed).examples(posed), posed)
    )
    values, before = (np.linalg.eigvalsh(rows.T @ rows / len(rows)) for rows in (found, given))
    np.testing.assert_allclose(
        values / values.mean(), before**0.5 / np.mean(before**0.5), rtol=1e-9
    )
    assert values.mean() == pytest.approx(1.0)


def test_outputs_that_never_move_stay_finite():
    posed, _ = uneven_examples()
    posed = with_outputs(posed, posed.Y * np.array([1.0, 1.0, 0.0, 1.0]))
    between = convert.HalfWhitened.of(posed)
    found = between.examples(posed)
    assert np.isfinite(found.Y).all()
    assert np.abs(found.Y).max() < 50
    assert np.linalg.cond(between.outputs) < 2e3


@pytest.mark.parametrize(
    "posed",
    [
        given_examples(np.asarray, rank=2, bias=True)[0],  # which vary alike
        uneven_examples(bias=False, far=30.0)[0],  # with an offset
    ],
)
def test_tokens_that_need_no_half_whitening_stay_as_they_are(posed):
    between = convert.HalfWhitened.of(posed)
    np.testing.assert_array_equal(between.tokens, np.eye(posed.dim))
    np.testing.assert_array_equal(between.examples(posed).X, posed.X)


RANKS = [(2, 2), (None, None), (2, None), (None, 2)]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("bias", [True, False])
def test_factors_in_both_coordinates_compute_the_same(xp_array, ranks, bias):
    posed, _ = uneven_examples(xp_array, bias, causal=True)
    between = convert.HalfWhitened.of(posed)
    rng = np.random.default_rng(0)
    drawn = like_random(model.random((2, 4, 4), *ranks, posed.constant, rng, posed.X), rng)
    (whole,), (half,) = (one.parts(10**6) for one in (posed, between.examples(posed)))
    found = between.leave(drawn)
    residuals = model.forward(found, whole).residuals @ between.outputs
    assert_close(model.forward(drawn, half).residuals, to_numpy(residuals))
    back = between.enter(found)
    for (name, array), (other, expected) in zip(back.arrays(), drawn.arrays(), strict=True):
        assert name == other
        assert_close(array, to_numpy(expected))


def test_a_change_of_coordinates_keeps_the_precision():
    posed, _ = uneven_examples()
    drawn = model.random((2, 4, 4), 2, 2, True, np.random.default_rng(0), posed.X)
    found = convert.HalfWhitened.of(posed).leave(drawn)
    assert {one.dtype for _, one in found.arrays()} == {np.dtype(np.float32)}
