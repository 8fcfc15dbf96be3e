import numpy as np
import pytest
from cases import random_mask
from gauges import layers, permuted, split
from hypothesis import given
from hypothesis import strategies as st
from test_span import degenerate, normal_to, normalised

from onelayer import AttentionLayer, inputs
from onelayer.array.backend import namespace, to_numpy

SEEDS = st.integers(0, 999)


def assert_same_arrays(one, other, atol=0.0):
    """The same arrays, entry by entry."""
    assert one.arrays().keys() == other.arrays().keys()
    for name, array in one.arrays().items():
        np.testing.assert_allclose(
            to_numpy(array), to_numpy(other.arrays()[name]), rtol=0, atol=atol, err_msg=name
        )


# Properties


@given(layer=layers(), seed=SEEDS, dtype=st.sampled_from(["f4", "f8"]), causal=st.booleans())
def test_canonical_form_has_the_same_outputs(xp_array, layer, seed, dtype, causal):
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((3, 4, layer.dim)).astype(dtype)
    options = {"mask": random_mask(rng, 3, 4), "causal": causal}
    there = split(layer, rng).to(xp_array(X))
    found = there.canonical()
    for name, array in found.arrays().items():
        assert namespace(array) is namespace(xp_array(X))
        assert array.dtype == there.arrays()[name].dtype
    atol = 1e-12 if dtype == "f8" else 1e-4
    np.testing.assert_allclose(found(X, **options), layer(X, **options), rtol=0, atol=atol)


@given(layer=layers(), seed=SEEDS, dtype=st.sampled_from(["f4", "f8"]))
def test_canonical_form_of_a_canonical_form_is_itself(layer, seed, dtype):
    redundant = split(layer, np.random.default_rng(seed)).to(np.ones(1, dtype))
    once = redundant.canonical()
    assert_same_arrays(once.canonical(), once)


@given(layer=layers(), seed=SEEDS)
def test_canonical_form_does_not_see_the_order_of_heads(layer, seed):
    order = np.random.default_rng(seed).permutation(layer.heads)
    assert_same_arrays(permuted(layer, order).canonical(), layer.canonical())


@given(layer=layers(), seed=SEEDS)
def test_canonical_form_does_not_see_splits_and_heads_that_do_nothing(layer, seed):
    found = split(layer, np.random.default_rng(seed)).canonical()
    assert found.heads == layer.heads or layer.dim == 1  # where heads may be equal by chance
    assert_same_arrays(found, layer.canonical(), atol=1e-14)


@given(layer=layers(), seed=SEEDS)
def test_canonical_form_does_not_see_rotations_inside_factors(layer, seed):
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.standard_normal((layer.dim, layer.dim)))[0]
    turned = split(layer, rng)
    turned = AttentionLayer(
        (turned.attention @ turn) @ turn.T,
        (turned.projection.swapaxes(1, 2) @ turn @ turn.T).swapaxes(1, 2),
        turned.key_bias,
        turned.output_bias,
    )
    assert_same_arrays(turned.canonical(), layer.canonical(), atol=1e-13)


# Merging and dropping


def test_equal_heads_become_one_with_the_sum_of_projections():
    layer = AttentionLayer.random(heads=2, dim=3, bias=True)
    both = permuted(layer, [0, 1, 0])
    both.projection[2] = 1.0
    found = both.canonical()
    expected = layer.projection + np.array([1.0, 0.0])[:, None, None]
    match = found.distance(AttentionLayer(layer.attention, expected, layer.key_bias))
    assert found.heads == 2
    assert max(*match.attention, *match.projection) == 0.0


def test_heads_with_other_key_biases_are_not_equal():
    theta = np.zeros((2, 3, 3))
    found = AttentionLayer(theta, np.ones((2, 3, 1)), [[0, 0, 0], [0, 0, 1]]).canonical()
    assert found.heads == 2
    assert AttentionLayer(theta, np.ones((2, 3, 1)), [[0, 0, 1]] * 2).canonical().heads == 1


def test_heads_with_uniform_attention_are_one():
    layer = AttentionLayer(np.zeros((3, 2, 2)), [[[1.0], [2.0]]] * 3).canonical()
    assert (layer.heads, layer.projection.tolist()) == (1, [[[3.0], [6.0]]])


@pytest.mark.parametrize(
    ("noise", "tol", "heads"), [(1e-15, None, 1), (1e-9, None, 2), (1e-9, 1e-6, 1), (0.0, 1e-30, 1)]
)
def test_heads_within_the_tolerance_are_equal(noise, tol, heads):
    rng = np.random.default_rng(0)
    theta = rng.standard_normal((1, 8, 8))
    near = np.concatenate([theta, theta + noise * rng.standard_normal(theta.shape)])
    found = AttentionLayer(near, np.stack([np.eye(8), 2 * np.eye(8)])).canonical(tol=tol)
    assert found.heads == heads
    if heads == 1:  # attends as the one with the larger projection does
        np.testing.assert_array_equal(found.attention[0], near[1])
        np.testing.assert_array_equal(found.projection[0], 3 * np.eye(8))


def test_heads_are_equal_through_others_between_them():
    theta = np.eye(4)[None] * (1 + 1e-4 * np.arange(5))[:, None, None]
    layer = AttentionLayer(theta, np.ones((5, 4, 1)))
    assert layer.canonical(tol=1.5e-4).heads == 1
    assert layer.canonical(tol=0.5e-4).heads == 5


def test_rounding_in_single_precision_does_not_keep_heads_apart():
    theta = np.random.default_rng(0).standard_normal((1, 16, 16))
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((16, 16)))[0].astype("f4")
    near = np.concatenate([theta.astype("f4"), theta.astype("f4") @ turn @ turn.T])
    assert near[0].tolist() != near[1].tolist()
    found = AttentionLayer(near, np.ones((2, 16, 2), "f4")).canonical()
    assert (found.heads, found.attention.dtype) == (1, np.float32)


def test_projections_that_cancel_are_none():
    rng = np.random.default_rng(0)
    theta, projection = rng.standard_normal((1, 4, 4)), rng.standard_normal((3, 4, 4))
    layer = AttentionLayer(
        np.concatenate([theta, theta, theta, rng.standard_normal((1, 4, 4))]),
        np.stack([0.1 * projection[0], 0.2 * projection[0], -0.3 * projection[0], projection[1]]),
    )
    assert np.sum(layer.projection[:3], axis=0).any()  # by rounding
    found = layer.canonical()
    assert found.heads == 1
    np.testing.assert_array_equal(found.attention, layer.attention[3:])


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_without_effect_keeps_one_head_of_zeros(bias):
    layer = AttentionLayer.random(heads=3, dim=4, out_dim=2, bias=bias)
    layer = AttentionLayer(layer.attention, 0 * layer.projection, layer.key_bias, layer.output_bias)
    found = layer.canonical()
    assert (found.heads, found.dim, found.out_dim) == (1, 4, 2)
    assert found.arrays().keys() <= {"attention", "projection", "output_bias"}
    assert not found.attention.any()
    assert not found.projection.any()
    X = inputs.gaussian(3, 2, 4)
    np.testing.assert_array_equal(found(X), layer(X))
    assert_same_arrays(found.canonical(), found)


def test_biases_that_are_zero_are_left_out():
    layer = AttentionLayer.random(heads=2, dim=3)
    same = AttentionLayer(layer.attention, layer.projection, np.zeros((2, 3)), np.zeros(3))
    assert_same_arrays(same.canonical(), layer.canonical())


# The order


def test_heads_are_sorted_by_their_norms_the_largest_first():
    rng = np.random.default_rng(0)
    sizes = np.array([1.0, 3.0, 2.0, 3.0])[:, None, None], np.array([9.0, 1.0, 5.0, 2.0])
    theta = rng.standard_normal((4, 5, 5))
    theta *= sizes[0] / np.linalg.norm(theta, axis=(1, 2), keepdims=True)  # two equal, to rounding
    projection = np.ones((4, 5, 1)) * sizes[1][:, None, None]
    found = AttentionLayer(theta, projection).canonical()
    assert found.projection[:, 0, 0].tolist() == [2.0, 1.0, 5.0, 9.0]


def test_rounding_does_not_change_the_order():
    layer = AttentionLayer.random(heads=6, dim=4, seed=1)  # all attention of norm 2, to rounding
    layer.projection[:] = 1.0  # and all projections equal: entries of attention decide
    layer.attention[:, 0, 0] = 1.0
    expected = layer.canonical()
    assert (np.diff(expected.attention[:, 0, 1]) < 0).all() or (
        np.diff(np.linalg.norm(expected.attention, axis=(1, 2))) < 0
    ).all()
    rng = np.random.default_rng(0)
    for _ in range(20):
        noise = 1e-14 * rng.standard_normal((6, 4, 4))
        order = rng.permutation(6)
        near = AttentionLayer(layer.attention + noise, layer.projection)
        assert_same_arrays(permuted(near, order).canonical(), expected, atol=1e-12)


def test_heads_of_equal_norms_are_sorted_by_their_entries():
    theta = np.zeros((3, 2, 2))
    theta[0, 1, 1] = theta[1, 0, 1] = theta[2, 0, 0] = 1.0
    found = AttentionLayer(theta, np.ones((3, 2, 1))).canonical()
    np.testing.assert_array_equal(found.attention, theta[::-1])


def test_heads_that_differ_by_less_than_a_tie_are_sorted_all_the_same():
    theta = np.eye(3)[None] * (1 + 1e-11 * np.arange(4))[:, None, None]  # apart, yet all tied
    layer = AttentionLayer(theta, np.ones((4, 3, 1)))
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        found = permuted(layer, order).canonical()
        np.testing.assert_array_equal(found.attention, theta[::-1])


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_the_size_of_weights_does_not_matter(size):
    layer = AttentionLayer.random(heads=3, dim=4)
    huge = AttentionLayer(layer.attention * size, layer.projection * size)
    twice = permuted(huge, [0, 1, 2, 1])
    expected = layer.canonical()
    assert twice.canonical().heads == 3
    np.testing.assert_allclose(huge.canonical().attention, expected.attention * size, rtol=1e-14)


# On the span of inputs


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["gaussian", "normalised", "shifted", "constant", "one-hot"])
def test_canonical_form_on_inputs_has_the_same_outputs_there(xp_array, kind, bias):
    layer = AttentionLayer.random(heads=2, dim=5, bias=bias, seed=1)
    X = degenerate(kind)
    found = layer.to(xp_array(X)).canonical(inputs=xp_array(X))
    assert namespace(found.attention) is namespace(xp_array(X))
    np.testing.assert_allclose(found(X), layer(X), atol=1e-12)
    assert found.distance(layer, inputs=X).attention.max() < 1e-12
    assert np.linalg.norm(to_numpy(found.attention)) <= np.linalg.norm(layer.attention) + 1e-12
    assert np.linalg.norm(to_numpy(found.projection)) <= np.linalg.norm(layer.projection) + 1e-12


def test_layers_that_agree_on_inputs_have_one_canonical_form_there():
    rng = np.random.default_rng(0)
    layer = AttentionLayer.random(heads=3, dim=5, bias=True, seed=1)
    X = degenerate("shifted")
    n, v = normal_to(X), rng.standard_normal((3, 3, 5))
    other = AttentionLayer(
        layer.attention + v[0][:, :, None] * n + n[:, None] * v[1][:, None],
        layer.projection + n[:, None] * v[2][:, None],
        layer.key_bias - v[1],
        layer.output_bias - v[2].sum(axis=0),
    )
    np.testing.assert_allclose(other(X), layer(X), atol=1e-9)
    found, expected = other.canonical(inputs=X), layer.canonical(inputs=X)
    assert_same_arrays(found, expected, atol=1e-12)
    assert_same_arrays(found.canonical(inputs=X), found, atol=1e-14)
    for array in (*found.attention, *found.attention.swapaxes(1, 2), found.key_bias):
        np.testing.assert_allclose(array @ n, 0.0, atol=1e-12)


def test_no_biases_are_needed_where_the_span_has_the_origin():
    layer = AttentionLayer.random(heads=2, dim=5)
    found = layer.canonical(inputs=degenerate("normalised"))
    assert found.arrays().keys() == {"attention", "projection"}
    assert not np.allclose(found.attention, layer.canonical().attention)


def test_heads_that_differ_only_where_inputs_are_constant_are_equal_there():
    X = normalised(inputs.gaussian(50, 3, 4))
    theta = AttentionLayer.random(heads=1, dim=4).attention
    layer = AttentionLayer(np.concatenate([theta, theta + 1.0]), np.ones((2, 4, 2)))
    assert layer.canonical().heads == 2
    assert layer.canonical(inputs=X, tol=1e-9).heads == 1


def test_padding_does_not_count_as_inputs():
    X = degenerate("constant")
    mask = random_mask(np.random.default_rng(0), *X.shape[:2])
    layer = AttentionLayer.random(heads=2, dim=5)
    expected = layer.canonical(inputs=X)
    X[~mask] = inputs.gaussian(*X.shape, seed=3)[~mask]
    assert_same_arrays(layer.canonical(inputs=X), layer.canonical())
    found = layer.canonical(inputs=X, mask=mask)
    np.testing.assert_allclose(found.projection, expected.projection, atol=1e-12)


def test_inputs_that_are_all_the_same_leave_a_constant():
    layer = AttentionLayer.random(heads=2, dim=3)
    X = np.ones((5, 2, 3))
    found = layer.canonical(inputs=X)
    assert found.heads == 1
    assert not found.projection.any()
    np.testing.assert_allclose(found(X), layer(X), atol=1e-14)


# Refusals


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"tol": 0}, ValueError, "tol is 0, expected a finite number above 0"),
        ({"tol": "1"}, TypeError, "tol is '1', expected a finite number above 0"),
        (
            {"inputs": np.ones((2, 2, 4))},
            ValueError,
            "inputs has tokens of dimension 4, expected 3",
        ),
        (
            {"inputs": np.ones((2, 2, 3)), "mask": np.ones((2, 3))},
            ValueError,
            r"mask has shape \(2, 3\), expected \(2, 2\)",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        AttentionLayer.random(heads=2, dim=3).canonical(**options)
