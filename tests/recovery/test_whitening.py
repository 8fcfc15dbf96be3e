import numpy as np
import oracles
import pytest
from cases import flat, random_case, random_mask, small_cases, whitened
from hypothesis import given
from hypothesis import strategies as st

from onelayer import AttentionLayer
from onelayer.array import blocks
from onelayer.array.backend import like, namespace, to_numpy
from onelayer.data.chunks import InMemory
from onelayer.heads import dense
from onelayer.recovery.gauss_newton import jacobian, varpro


def pose(xp_array, X, Y, mask=None, causal=False, bias=False):
    mask = None if mask is None else xp_array(mask)
    return whitened(xp_array(X), xp_array(Y), mask, causal, bias)


# Coordinates

MIXED = np.array([[2.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.0, 0.3]])
KINDS = ["plain", "far away", "constant", "copied", "zero", "normalised", "one word"]


def tokens_like(X, kind):
    """Tokens of which the affine span is of some kind."""
    X = X.copy()
    if kind == "far away":
        X += 10.0
    elif kind == "constant":
        X[..., -1] = 0.7
    elif kind == "copied":
        X[..., -1] = X[..., 0]
    elif kind == "zero":
        X[..., -1] = 0.0
    elif kind == "normalised":
        X = X - X.mean(axis=2, keepdims=True) + 0.3
    elif kind == "one word":
        X[:] = np.where(X[0, 0] > 0, 1.0, -0.5)  # so that their mean is exact
    return X


def mean_and_covariance(tokens):
    rows = to_numpy(tokens).reshape(-1, tokens.shape[2])
    return rows.mean(axis=0), np.cov(rows.T, bias=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_whitened_tokens_have_unit_second_moments(xp_array, dtype):
    case = random_case(0, n=40, dim=3)
    posed = pose(xp_array, (case.X @ MIXED).astype(dtype), case.Y.astype(dtype))
    assert namespace(posed.X) is namespace(xp_array(case.X))
    assert to_numpy(posed.X).dtype == to_numpy(posed.Y).dtype == np.float64
    np.testing.assert_allclose(oracles.second_moments(to_numpy(posed.X)), np.eye(3), atol=1e-10)


def test_with_biases_whitened_tokens_have_mean_zero_and_unit_covariance(xp_array):
    case = random_case(0, n=40, dim=3)
    posed = pose(xp_array, case.X @ MIXED + 1.0, case.Y, bias=True)
    mean, covariance = mean_and_covariance(posed.X)
    np.testing.assert_allclose(mean, 0.0, atol=1e-10)
    np.testing.assert_allclose(covariance, np.eye(3), atol=1e-10)
    assert posed.offset is None
    assert posed.query_dim == 4


def test_a_mean_that_is_large_is_subtracted_from_keys_and_evened_out_in_queries(xp_array):
    case = random_case(0, n=40, dim=3)
    posed = pose(xp_array, case.X @ MIXED + 10.0, case.Y)
    mean, covariance = mean_and_covariance(posed.X)
    np.testing.assert_allclose(mean, 0.0, atol=1e-9)
    np.testing.assert_allclose(covariance, np.eye(3), atol=1e-9)
    (block,) = posed.blocks(1)
    assert not posed.constant
    assert np.linalg.norm(to_numpy(posed.offset)) > 1
    moments = oracles.second_moments(to_numpy(block.queries))
    np.testing.assert_allclose(moments, np.eye(3), atol=1e-9)


def test_padding_does_not_count_in_the_second_moments(xp_array):
    case = random_case(1, n=40, dim=3, masked=True)
    X = case.X @ MIXED
    X[~case.mask] = 7.0
    posed = pose(xp_array, X, case.Y, case.mask)
    moments = oracles.second_moments(to_numpy(posed.X), case.mask)
    np.testing.assert_allclose(moments, np.eye(3), atol=1e-10)


def test_whitening_is_the_symmetric_root_that_was_applied(xp_array):
    case = random_case(2, n=40, dim=3)
    X = case.X @ MIXED
    posed = pose(xp_array, X, case.Y)
    A = to_numpy(posed.whitening)
    np.testing.assert_allclose(A, A.T, atol=1e-12)
    np.testing.assert_allclose(X @ A, to_numpy(posed.X), atol=1e-12)
    np.testing.assert_allclose(A @ oracles.second_moments(X) @ A, np.eye(3), atol=1e-10)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_the_units_of_the_inputs_and_outputs_do_not_matter(size):
    case = random_case(3, n=10)
    plain, other = pose(np.asarray, case.X, case.Y), pose(np.asarray, case.X * size, case.Y / size)
    np.testing.assert_allclose(other.X, plain.X, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(other.Y, plain.Y, rtol=1e-9)


@pytest.mark.parametrize("missing", ["zero", "copied"])
def test_a_direction_that_does_not_occur_is_left_out(xp_array, missing):
    case = random_case(4, n=40, dim=3)
    X = tokens_like(case.X, missing)
    posed = pose(xp_array, X, case.Y)
    assert posed.dim == posed.span.rank == posed.X.shape[2] == 2
    assert not posed.constant
    np.testing.assert_allclose(oracles.second_moments(to_numpy(posed.X)), np.eye(2), atol=1e-9)
    back = np.linalg.pinv(to_numpy(posed.whitening))
    np.testing.assert_allclose(to_numpy(posed.X) @ back, X, atol=1e-9)


@pytest.mark.parametrize(
    ("kind", "rank", "constant"),
    [
        ("plain", 3, False),
        ("far away", 3, False),
        ("constant", 2, True),
        ("copied", 2, False),
        ("zero", 2, False),
        ("normalised", 2, True),
        ("one word", 0, True),
    ],
)
def test_there_is_a_constant_where_the_span_does_not_contain_the_origin(kind, rank, constant):
    case = random_case(4, n=40, dim=3)
    posed = pose(np.asarray, tokens_like(case.X, kind), case.Y)
    assert (posed.span.rank, posed.constant) == (rank, constant)
    assert posed.dim == max(rank, 1)
    assert bool(posed.span.outside.any()) == constant
    assert pose(np.asarray, tokens_like(case.X, kind), case.Y, bias=True).constant


def test_tokens_that_are_all_zero_stay_zero(xp_array):
    posed = pose(xp_array, np.zeros((4, 2, 3)), np.ones((4, 2, 3)))
    assert abs(to_numpy(posed.X)).max() == 0
    np.testing.assert_array_equal(to_numpy(posed.whitening), np.eye(3, 1))


@given(case=small_cases())
def test_outputs_have_unit_mean_square_over_the_rows_that_are_there(xp_array, case):
    posed = pose(xp_array, case.X, case.Y, case.mask, case.causal, case.bias)
    Y, mean = to_numpy(posed.Y), to_numpy(posed.output_mean)
    there = np.ones(Y.shape[:2], dtype=bool) if case.mask is None else case.mask
    expected = case.Y[there].mean(axis=0) if posed.constant else np.zeros_like(mean)
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-12)
    varies = abs(case.Y[there] - expected).max() > 1e-9
    assert np.mean(Y[there] ** 2) == pytest.approx(float(varies), rel=1e-12, abs=1e-12)
    assert abs(Y[~there]).max(initial=0.0) == 0
    back = Y[there] * posed.output_scale + mean
    np.testing.assert_allclose(back, case.Y[there], rtol=0, atol=1e-12)


def test_outputs_that_are_all_zero_stay_zero(xp_array):
    posed = pose(xp_array, np.ones((4, 2, 3)), np.zeros((4, 2, 3)))
    assert posed.output_scale == 1.0
    assert abs(to_numpy(posed.Y)).max() == 0


# Layers in the caller's coordinates


def random_heads(posed, heads, seed):
    """Heads (p, m·dim) and weights (F, e) in the coordinates of a problem."""
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal((posed.query_dim, heads * posed.dim))
    weights = rng.standard_normal((heads * posed.dim + int(posed.constant), posed.out_dim))
    return like(theta, posed.X), like(weights, posed.X)


def features_of(posed, theta, heads):
    """The features of all rows as the fits see them."""
    parts = [varpro.attend(one, theta, posed.constant) for one in posed.blocks(heads)]
    return np.concatenate([to_numpy(part.features) for part in parts])


@given(case=small_cases(), kind=st.sampled_from(KINDS), seed=st.integers(0, 99))
def test_layer_in_the_callers_coordinates_computes_what_the_features_do(xp_array, case, kind, seed):
    X = tokens_like(case.X, kind)
    posed = pose(xp_array, X, case.Y, case.mask, case.causal, case.bias)
    theta, weights = random_heads(posed, case.heads, seed)
    layer = posed.layer(theta, weights)
    sizes = (layer.heads, layer.dim, layer.out_dim)
    assert sizes == (case.heads, case.X.shape[2], case.Y.shape[2])
    assert (layer.key_bias is not None, layer.output_bias is not None) == (case.bias, case.bias)
    mask = None if case.mask is None else xp_array(case.mask)
    outputs = to_numpy(layer(xp_array(X), mask=mask, causal=case.causal))
    values = features_of(posed, theta, case.heads) @ to_numpy(weights)
    values = values.reshape(outputs.shape)
    expected = values * posed.output_scale + to_numpy(posed.output_mean)
    there = np.ones(outputs.shape[:2], dtype=bool) if case.mask is None else case.mask
    scale = abs(expected[there]).max() + abs(values).max() * posed.output_scale
    np.testing.assert_allclose(outputs[there], expected[there], rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS[:-1])
def test_the_way_back_from_a_layer_is_that_to_it(xp_array, kind, bias):
    case = random_case(5, n=30, dim=3)
    posed = pose(xp_array, tokens_like(case.X @ MIXED, kind), case.Y, bias=bias)
    theta, weights = random_heads(posed, 2, seed=1)
    back = posed.heads_of(posed.layer(theta, weights))
    np.testing.assert_allclose(to_numpy(back), to_numpy(theta), rtol=0, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_no_layer_that_does_the_same_on_the_span_is_smaller(kind):
    case = random_case(5, n=30, dim=3)
    X = tokens_like(case.X @ MIXED, kind)
    posed = pose(np.asarray, X, case.Y)
    layer = posed.layer(*random_heads(posed, 2, seed=1))
    # Directions that tokens are orthogonal to, and one n with n x = 1 if there is any.
    orthogonal = np.linalg.svd(X.reshape(-1, 3))[2][np.linalg.matrix_rank(X.reshape(-1, 3)) :]
    outside = posed.span.outside
    rng = np.random.default_rng(0)
    attention, projection = layer.attention.copy(), layer.projection.copy()
    for normal in orthogonal:
        attention = (
            attention + rng.standard_normal((2, 3, 1)) * normal + normal[:, None] * rng.random(3)
        )
        projection = projection + normal[:, None] * rng.standard_normal((2, 1, 2))
    if outside.any():
        attention = attention + rng.standard_normal((2, 3, 1)) * outside
        apart = rng.standard_normal(2)
        projection = projection + outside[:, None] * np.stack([apart, -apart])[:, None, :]
    other = AttentionLayer(attention, projection)
    np.testing.assert_allclose(other(X), layer(X), atol=1e-9)
    assert np.linalg.norm(other.attention) >= np.linalg.norm(layer.attention)
    assert np.linalg.norm(other.projection) >= np.linalg.norm(layer.projection)


@pytest.mark.parametrize("kind", ["plain", "far away"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_goes_there_and_back(bias, kind):
    layer = AttentionLayer.random(heads=2, dim=3, out_dim=4, bias=bias)
    X = tokens_like(random_case(5, n=30, dim=3).X, kind)
    posed = pose(np.asarray, X, layer(X), bias=bias)
    fit = varpro.fit(posed.batches(2), posed.heads_of(layer))
    assert fit.error < 1e-10
    back = posed.layer(fit.theta, fit.weights)
    for name, array in layer.arrays().items():
        np.testing.assert_allclose(back.arrays()[name], array, atol=1e-8)


# A mean that is subtracted


def far_away(masked=False, causal=False, seed=6, **options):
    """A problem with an offset, heads, and their weights at a fit to noise."""
    case = random_case(seed, n=12, masked=masked, causal=causal, **options)
    X = case.X + np.linspace(8, 12, case.X.shape[2])
    posed = pose(np.asarray, X, case.Y, case.mask, causal)
    assert posed.offset is not None
    return posed, random_heads(posed, case.heads, seed)[0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_features_with_an_offset_are_those_of_the_loops(masked, causal):
    posed, theta = far_away(masked, causal)
    tokens = posed.X + posed.offset  # x A
    heads = posed._evened() @ dense.by_head(theta, posed.dim)
    expected = oracles.attended_tokens(tokens, heads, mask=posed.mask, causal=causal)
    np.testing.assert_allclose(features_of(posed, theta, 2), expected, rtol=0, atol=1e-10)


def outputs_of(posed, theta, weights):
    return features_of(posed, theta, 2) @ weights


@pytest.mark.parametrize("masked", [False, True])
def test_products_with_an_offset_are_those_of_finite_differences(masked):
    posed, theta = far_away(masked, causal=True)
    fit = varpro.fit(posed.batches(2), theta)
    products = jacobian.jacobian(fit)
    rng = np.random.default_rng(0)
    direction, rows = rng.standard_normal(theta.shape), rng.standard_normal((36, 2))
    step = 1e-6
    ahead, behind = (
        outputs_of(posed, theta + sign * step * direction, fit.weights) for sign in (1, -1)
    )
    (moved,) = flat(products.jvp(direction))
    np.testing.assert_allclose(moved, (ahead - behind) / (2 * step), rtol=0, atol=1e-7)
    if posed.mask is not None:
        rows = rows * posed.mask.reshape(-1, 1)
    vjp = products.vjp(InMemory(((rows,),)))
    assert np.sum(vjp * direction) == pytest.approx(np.sum(rows * moved), rel=1e-9)


def test_the_gradient_with_an_offset_is_that_of_finite_differences():
    posed, theta = far_away()
    fit = varpro.fit(posed.batches(2), theta)
    direction, step = np.random.default_rng(0).standard_normal(theta.shape), 1e-6
    losses = [varpro.fit(posed.batches(2), theta + s * step * direction).loss for s in (1, -1)]
    slope = -2 * np.sum(jacobian.gradient(fit) * direction) / posed.equations
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=1e-5)


# Examples


@given(case=small_cases(most_examples=60))
def test_equations_are_the_numbers_observed(case):
    posed = case.problem()
    assert posed.equations == case.equations
    if case.mask is None:
        assert posed.equations == case.Y.size


@pytest.mark.parametrize("examples", [49, 98, 103])
def test_equations_do_not_fall_to_rounding(examples):
    mask = np.zeros((examples, 2), dtype=bool)
    mask[:, 0] = True
    for extra in range(examples):
        mask[extra, 1] = True
        posed = pose(np.asarray, np.ones((examples, 2, 1)), np.ones((examples, 2, 1)), mask)
        assert posed.equations == examples + extra + 1


@pytest.mark.parametrize(
    ("bias", "rank", "expected"),
    [
        (False, None, 2 * (3 * 3 + 3 * 5)),
        (True, None, 2 * (3 * 3 + 3 * 5 + 3) + 5),
        (False, 1, 2 * (5 + 3 * 5)),
        (True, 2, 2 * (8 + 3 * 5 + 3) + 5),
        (False, 3, 2 * (3 * 3 + 3 * 5)),
    ],
)
def test_unknowns_are_the_free_numbers_of_a_layer(bias, rank, expected):
    X = random_case(0, n=20, tokens=2, dim=3).X
    posed = pose(np.asarray, X, np.ones((20, 2, 5)), bias=bias)
    assert posed.unknowns(2, rank) == expected
    assert (posed.examples, posed.tokens, posed.dim, posed.out_dim) == (20, 2, 3, 5)
    assert posed.query_dim == 3 + bias


@pytest.mark.parametrize(("kind", "constant"), [("zero", False), ("constant", True)])
def test_unknowns_are_counted_on_the_span(kind, constant):
    X = tokens_like(random_case(0, n=20, tokens=2, dim=3).X, kind)
    posed = pose(np.asarray, X, np.ones((20, 2, 5)))
    assert posed.unknowns(2, None) == 2 * (2 * 2 + 2 * 5) + constant * (2 * 2 + 5)
    assert [posed.rank(rank) for rank in (None, 1, 2, 3)] == [None, 1, None, None]


@pytest.mark.parametrize("masked", [False, True])
def test_take_gives_the_examples_asked_for_in_the_same_coordinates(xp_array, masked):
    case = random_case(6, n=9, masked=masked, causal=True, bias=True)
    posed = case.problem(xp_array)
    index = np.array([7, 2, 2])
    taken = posed.take(index)
    np.testing.assert_array_equal(to_numpy(taken.X), to_numpy(posed.X)[index])
    np.testing.assert_array_equal(to_numpy(taken.Y), to_numpy(posed.Y)[index])
    np.testing.assert_array_equal(to_numpy(taken.whitening), to_numpy(posed.whitening))
    assert (taken.causal, taken.bias, taken.examples) == (True, True, 3)
    assert taken.output_scale == posed.output_scale
    if masked:
        np.testing.assert_array_equal(to_numpy(taken.mask), case.mask[index])
        assert taken.equations == case.mask[index].sum() * case.Y.shape[2]


def test_blocks_hold_all_examples_in_their_order(xp_array, monkeypatch):
    case = random_case(7, n=7, bias=True)
    posed = case.problem(xp_array)
    cuts = [slice(0, 3), slice(3, 6), slice(6, 7)]
    monkeypatch.setattr(blocks, "slices", lambda n, *_: cuts)
    parts = posed.blocks(2)
    assert [part.keys.shape[0] for part in parts] == [3, 3, 1]
    keys = np.concatenate([to_numpy(part.keys) for part in parts])
    queries = np.concatenate([to_numpy(part.queries) for part in parts])
    outputs = np.concatenate([to_numpy(part.outputs) for part in parts])
    np.testing.assert_array_equal(keys, to_numpy(posed.X))
    np.testing.assert_array_equal(queries[..., :-1], keys)
    assert set(queries[..., -1].ravel()) == {1.0}
    np.testing.assert_array_equal(outputs, to_numpy(posed.Y).reshape(outputs.shape))


# Padding


def fit_with_padding(xp_array, tokens, outputs, causal=False):
    """The loss, gradient and a product with these numbers in the padding."""
    case = random_case(8, n=12, bias=True)
    mask = random_mask(np.random.default_rng(8), 12, 3)
    assert not mask.all()
    X = np.where(mask[..., None], case.X, tokens)
    Y = np.where(mask[..., None], case.Y, outputs)
    posed = pose(xp_array, X, Y, mask, causal, bias=True)
    theta = like(dense.pack(case.attention, case.key_bias), posed.X)
    fit = varpro.fit(posed.batches(2), theta)
    single = like(np.ones(tuple(theta.shape), dtype=np.float32), theta)
    xp = namespace(single)
    product = jacobian.jacobian(fit, single=True).gauss_newton_product(
        xp.astype(single, xp.float32)
    )
    return fit.loss, to_numpy(jacobian.gradient(fit)), to_numpy(product), posed.output_scale


@pytest.mark.parametrize("causal", [False, True])
def test_outputs_of_padding_drop_out(xp_array, causal):
    plain = fit_with_padding(xp_array, 0.0, 0.0, causal)
    garbage = fit_with_padding(xp_array, 0.0, 1e9, causal)
    for left, right in zip(plain, garbage, strict=True):
        np.testing.assert_array_equal(left, right)
    assert 0 < plain[0] < 1


@pytest.mark.parametrize("size", [3.0, 1e30])
def test_tokens_of_padding_drop_out(xp_array, size):
    plain = fit_with_padding(xp_array, 0.0, 0.0)
    garbage = fit_with_padding(xp_array, size, 0.0)
    for left, right in zip(plain, garbage, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-5)


def test_rows_of_padding_do_not_count_for_the_output_bias(xp_array):
    case = random_case(9, n=6, masked=True, bias=True)
    (block,) = case.problem(xp_array).blocks(2)
    np.testing.assert_array_equal(to_numpy(block.counted)[:, 0], case.mask.ravel())
    theta = like(dense.pack(case.attention, case.key_bias), block.keys)
    features = to_numpy(varpro.attend(block, theta, True).features)
    assert abs(features[~case.mask.ravel()]).max() == 0
    np.testing.assert_array_equal(features[:, -1], case.mask.ravel())
