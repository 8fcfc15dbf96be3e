import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer.array.backend import namespace, to_numpy
from onelayer.heads import dense
from onelayer.heads.base import Tokens


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("bias", [False, True])
def test_pack_puts_heads_side_by_side_and_unpack_undoes_it(xp_array, bias):
    attention, key_bias = gaussian(3, 4, 4), gaussian(3, 4)
    theta = dense.pack(xp_array(attention), xp_array(key_bias) if bias else None)
    assert theta.shape == (5 if bias else 4, 12)
    for head in range(3):
        columns = to_numpy(theta)[:, 4 * head : 4 * head + 4]
        np.testing.assert_array_equal(columns[:4], attention[head])
        np.testing.assert_array_equal(columns[4:], key_bias[[head]][: len(columns) - 4])
    matrices, biases = dense.unpack(theta, dim=4)
    np.testing.assert_array_equal(to_numpy(matrices), attention)
    if bias:
        np.testing.assert_array_equal(to_numpy(biases), key_bias)
    else:
        assert biases is None
    flat = dense.flatten(theta, dim=4)
    assert flat.shape == (3, 20 if bias else 16)
    np.testing.assert_array_equal(to_numpy(flat)[:, :16], attention.reshape(3, 16))
    np.testing.assert_array_equal(to_numpy(dense.unflatten(flat, dim=4)), to_numpy(theta))


def test_heads_are_counted_dropped_and_joined(xp_array):
    attention = gaussian(3, 2, 2)
    theta = dense.pack(xp_array(attention))
    assert dense.count(theta, dim=2) == 3
    for head in range(3):
        rest = dense.drop(theta, head, dim=2)
        expected = np.delete(attention, head, axis=0)
        np.testing.assert_array_equal(to_numpy(dense.unpack(rest, dim=2)[0]), expected)
    both = dense.concat([theta, dense.pack(xp_array(attention[:1]))])
    np.testing.assert_array_equal(to_numpy(dense.unpack(both, dim=2)[0]), attention[[0, 1, 2, 0]])
    index = dense.head_index(theta, dim=2)
    assert index.tolist() == [[0, 0, 1, 1, 2, 2]] * 2
    assert dense.random(3, 2, True, np.random.default_rng(0)).shape == (3, 6)


def test_constant_is_the_last_coordinate_of_every_token(xp_array):
    X = gaussian(2, 3, 4)
    extended = to_numpy(dense.with_constant(xp_array(X)))
    np.testing.assert_array_equal(extended, np.concatenate([X, np.ones((2, 3, 1))], axis=2))


@given(
    sizes=st.tuples(*[st.integers(1, 4)] * 4),
    dtype=st.sampled_from(["f4", "f8"]),
    masked=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_weights_and_features_match_the_loops(xp_array, sizes, dtype, masked, seed):
    n, tokens, heads, dim = sizes
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, tokens, dim)).astype(dtype)
    attention = rng.standard_normal((heads, dim, dim)).astype(dtype)
    allowed = rng.random((n, tokens, tokens)) < 0.6
    keys, theta = xp_array(X), dense.pack(xp_array(attention))
    weights = dense.attention(Tokens(keys, keys), theta, xp_array(allowed) if masked else None)
    features = dense.features(weights, keys)
    assert namespace(features) is namespace(keys)
    assert features.dtype == keys.dtype
    weights = to_numpy(weights).reshape(n, tokens, heads, tokens)
    features = to_numpy(features).reshape(n, tokens, heads, dim)
    expected = np.zeros((n, tokens, heads, tokens))
    for example, row, head in np.ndindex(n, tokens, heads):
        may = np.flatnonzero(allowed[example, row]) if masked else range(tokens)
        for key, weight in oracles.attention_row(X[example], row, may, attention[head]).items():
            expected[example, row, head, key] = weight
    tolerance = 1e-12 if dtype == "f8" else 2e-5
    np.testing.assert_allclose(weights, expected, rtol=0, atol=tolerance)
    for example, row, head in np.ndindex(n, tokens, heads):
        attended = oracles.row_times(expected[example, row, head], X[example])
        np.testing.assert_allclose(features[example, row, head], attended, rtol=0, atol=tolerance)


def test_scores_vjp_is_the_transpose_of_scores(xp_array):
    tokens = Tokens(xp_array(gaussian(4, 3, 3)), xp_array(gaussian(4, 3, 2, seed=1)))
    theta, change = gaussian(3, 4, seed=2), gaussian(4, 6, 3, seed=3)  # two heads with a key bias
    there = np.sum(to_numpy(dense.scores(tokens, xp_array(theta))) * change)
    back = np.sum(theta * to_numpy(dense.scores_vjp(tokens, xp_array(change))))
    assert back == pytest.approx(there)
