import numpy as np
import oracles
import pytest
from cases import random_case, random_mask, small_cases
from hypothesis import given
from hypothesis import strategies as st

from onelayer import AttentionLayer, attention, blocks
from onelayer.arrays import like, namespace, to_numpy
from onelayer.recovery import derivatives, problem, reduced


def pose(xp_array, X, Y, mask=None, causal=False, bias=False):
    mask = None if mask is None else xp_array(mask)
    return problem.pose(xp_array(X), xp_array(Y), mask, causal, bias)


# Coordinates


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_whitened_tokens_have_unit_second_moments(xp_array, dtype):
    case = random_case(0, n=40, dim=3)
    posed = pose(xp_array, case.X.astype(dtype), case.Y.astype(dtype))
    assert namespace(posed.X) is namespace(xp_array(case.X))
    assert to_numpy(posed.X).dtype == to_numpy(posed.Y).dtype == np.float64
    np.testing.assert_allclose(oracles.second_moments(to_numpy(posed.X)), np.eye(3), atol=1e-10)


def test_padding_does_not_count_in_the_second_moments(xp_array):
    case = random_case(1, n=40, dim=3, masked=True)
    case.X[~case.mask] = 7.0
    posed = case.problem(xp_array)
    moments = oracles.second_moments(to_numpy(posed.X), case.mask)
    np.testing.assert_allclose(moments, np.eye(3), atol=1e-10)


def test_whitening_is_the_symmetric_root_that_was_applied(xp_array):
    case = random_case(2, n=40, dim=3)
    posed = case.problem(xp_array)
    A = to_numpy(posed.whitening)
    np.testing.assert_allclose(A, A.T, atol=1e-12)
    np.testing.assert_allclose(case.X @ A, to_numpy(posed.X), atol=1e-12)
    np.testing.assert_allclose(A @ oracles.second_moments(case.X) @ A, np.eye(3), atol=1e-10)


@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_the_units_of_the_inputs_and_outputs_do_not_matter(size):
    case = random_case(3, n=10)
    plain, other = pose(np.asarray, case.X, case.Y), pose(np.asarray, case.X * size, case.Y / size)
    np.testing.assert_allclose(other.X, plain.X, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(other.Y, plain.Y, rtol=1e-9)


@pytest.mark.parametrize("missing", ["zero", "copy"])
def test_a_direction_that_does_not_occur_is_not_blown_up(xp_array, missing):
    case = random_case(4, n=40, dim=3)
    case.X[..., 2] = 0.0 if missing == "zero" else case.X[..., 1]
    posed = case.problem(xp_array)
    moments = oracles.second_moments(to_numpy(posed.X))
    np.testing.assert_allclose(np.linalg.eigvalsh(moments), [0.0, 1.0, 1.0], atol=1e-9)
    A = to_numpy(posed.whitening)
    assert np.linalg.cond(A) < 1e6
    np.testing.assert_allclose(to_numpy(posed.X) @ np.linalg.inv(A), case.X, atol=1e-9)


def test_tokens_that_are_all_zero_stay_zero(xp_array):
    posed = pose(xp_array, np.zeros((4, 2, 3)), np.ones((4, 2, 3)))
    assert abs(to_numpy(posed.X)).max() == 0
    np.testing.assert_array_equal(to_numpy(posed.whitening), np.eye(3))


@given(case=small_cases())
def test_outputs_have_unit_mean_square_over_the_rows_that_are_there(xp_array, case):
    posed = case.problem(xp_array)
    Y = to_numpy(posed.Y)
    there = np.ones(Y.shape[:2], dtype=bool) if case.mask is None else case.mask
    assert np.mean(Y[there] ** 2) == pytest.approx(1.0, rel=1e-12)
    assert abs(Y[~there]).max(initial=0.0) == 0
    np.testing.assert_allclose(Y[there] * posed.output_scale, case.Y[there], rtol=1e-12)


def test_outputs_that_are_all_zero_stay_zero(xp_array):
    posed = pose(xp_array, np.ones((4, 2, 3)), np.zeros((4, 2, 3)))
    assert posed.output_scale == 1.0
    assert abs(to_numpy(posed.Y)).max() == 0


@given(case=small_cases(), seed=st.integers(0, 99))
def test_layer_in_the_callers_coordinates_computes_what_the_features_do(xp_array, case, seed):
    posed = case.problem(xp_array)
    stacked = like(attention.stack(case.attention, case.key_bias), posed.X)
    features = np.concatenate(
        [
            to_numpy(reduced.attend(block, stacked, case.bias).features)
            for block in posed.blocks(case.heads)
        ]
    )
    shape = (features.shape[1], case.Y.shape[2])
    weights = np.random.default_rng(seed).standard_normal(shape)
    layer = posed.layer(stacked, like(weights, posed.X))
    sizes = (layer.heads, layer.dim, layer.out_dim)
    assert sizes == (case.heads, case.X.shape[2], case.Y.shape[2])
    assert (layer.key_bias is not None, layer.output_bias is not None) == (case.bias, case.bias)
    mask = None if case.mask is None else xp_array(case.mask)
    outputs = to_numpy(layer(xp_array(case.X), mask=mask, causal=case.causal))
    expected = (features @ weights * posed.output_scale).reshape(outputs.shape)
    there = np.ones(outputs.shape[:2], dtype=bool) if case.mask is None else case.mask
    scale = abs(expected).max()
    np.testing.assert_allclose(outputs[there], expected[there], rtol=0, atol=1e-7 * scale)


def test_a_layer_goes_there_and_back():
    layer = AttentionLayer.random(heads=2, dim=3, out_dim=4, bias=True)
    case = random_case(5, n=30, dim=3)
    Y = layer(case.X)
    posed = pose(np.asarray, case.X, Y, bias=True)
    root = np.linalg.inv(posed.whitening)
    stacked = attention.stack(root @ layer.attention @ root, layer.key_bias @ root)
    projection = (root @ layer.projection).reshape(6, 4)
    weights = np.concatenate([projection, layer.output_bias[None]]) / posed.output_scale
    back = posed.layer(stacked, weights)
    for name, array in layer.arrays().items():
        np.testing.assert_allclose(back.arrays()[name], array, atol=1e-10)
    (block,) = posed.blocks(2)
    features = reduced.attend(block, stacked, True).features
    np.testing.assert_allclose(features @ weights, posed.Y.reshape(-1, 4), atol=1e-9)


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
    posed = pose(np.asarray, np.ones((2, 2, 3)), np.ones((2, 2, 5)), bias=bias)
    assert posed.unknowns(2, rank) == expected
    assert (posed.examples, posed.tokens, posed.dim, posed.out_dim) == (2, 2, 3, 5)
    assert posed.query_dim == 3 + bias


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
    stacked = like(attention.stack(case.attention, case.key_bias), posed.X)
    fit = reduced.fit(posed.cut(2), stacked)
    single = like(np.ones(tuple(stacked.shape), dtype=np.float32), stacked)
    xp = namespace(single)
    product = derivatives.jacobian(fit, single=True).normal(xp.astype(single, xp.float32))
    return fit.loss, to_numpy(derivatives.gradient(fit)), to_numpy(product), posed.output_scale


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
    stacked = like(attention.stack(case.attention, case.key_bias), block.keys)
    features = to_numpy(reduced.attend(block, stacked, True).features)
    assert abs(features[~case.mask.ravel()]).max() == 0
    np.testing.assert_array_equal(features[:, -1], case.mask.ravel())
