import numpy as np
import oracles
import pytest
from example_sets import NO_MATTER, all_features, gaussian, ragged, random_mask, small_raggeds
from hypothesis import given
from hypothesis import strategies as st

from onelayer import inputs
from onelayer.array.backend import namespace, to_numpy
from onelayer.features import mlp_features


def draw(features=5, tokens=5, dim=3, seed=0):
    return mlp_features.draw(features, tokens, dim, np.random.default_rng(seed))


@pytest.mark.parametrize("more", [0, 2])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_features_match_the_loops(xp_array, more, masked, dtype):
    X = gaussian(3, 5, 2, dtype=dtype)
    mask = random_mask(np.random.default_rng(0), 3, 5) if masked else None
    neurons = draw(features=6, tokens=5 + more, dim=2)
    found = all_features(neurons, xp_array(X), mask)
    assert namespace(found) is namespace(xp_array(X))
    assert found.dtype == xp_array(X).dtype
    expected = oracles.mlp_features(X, mask, 5 + more, neurons.weights)
    tolerance = 1e-13 if dtype == "f8" else 1e-5
    np.testing.assert_allclose(to_numpy(found), expected, rtol=0, atol=tolerance)


@given(sizes=st.tuples(*[st.integers(1, 4)] * 4), seed=st.integers(0, 2**32 - 1))
def test_features_of_all_sizes_match_the_loops(xp_array, sizes, seed):
    n, keys, dim, features = sizes
    X = gaussian(n, keys + 1, dim, seed=seed)
    mask = random_mask(np.random.default_rng(seed), n, keys + 1)
    neurons = draw(features, keys + 1, dim, seed)
    found = to_numpy(all_features(neurons, xp_array(X), mask))
    expected = oracles.mlp_features(X, mask, keys + 1, neurons.weights)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_parts_are_columns_of_all_features(xp_array):
    X = xp_array(gaussian(4, 5, 3))
    neurons = draw(features=7).like(X)
    part = neurons.features(neurons.prepare(X, None), slice(2, 6))
    np.testing.assert_allclose(to_numpy(part), to_numpy(all_features(neurons, X))[:, 2:6])


def test_a_row_holds_all_tokens_and_a_one(xp_array):
    X, mask = gaussian(2, 3, 2), np.array([[True, False, True], [True, True, True]])
    rows = mlp_features.flattened(xp_array(X), xp_array(mask), 4)
    np.testing.assert_array_equal(to_numpy(rows), oracles.flattened(X, mask, 4))


@given(sets=small_raggeds())
def test_lists_padded_arrays_and_plain_arrays_agree(xp_array, sets):
    neurons = draw(4, sets.X.shape[1], sets.X.shape[2])
    padded = to_numpy(all_features(neurons, xp_array(sets.X), sets.mask))
    as_list = to_numpy(all_features(neurons, [xp_array(example) for example in sets.examples]))
    alone = [to_numpy(all_features(neurons, xp_array(x[None]))) for x in sets.examples]
    np.testing.assert_allclose(as_list, padded, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(alone), padded, rtol=0, atol=1e-12)


def test_what_padding_holds_does_not_matter(xp_array):
    sets = ragged([2, 5, 3], dim=3)
    assert sets.X[0, 4, 0] == NO_MATTER
    zeroed = np.where(sets.mask[:, :, None], sets.X, 0.0)
    found = [all_features(draw(), xp_array(X), sets.mask) for X in (sets.X, zeroed)]
    np.testing.assert_array_equal(*map(to_numpy, found))


def test_order_of_the_keys_matters():
    X = gaussian(4, 5, 3)
    assert np.abs(all_features(draw(), X) - all_features(draw(), X[:, [0, 2, 1, 3, 4]])).max() > 0.1


def test_more_neurons_begin_with_the_same_ones():
    np.testing.assert_array_equal(draw(9).weights[:, :4], draw(4).weights)


def test_sizes():
    neurons = draw(features=7, tokens=5, dim=3)
    assert (neurons.size, neurons.unit, neurons.tokens) == (7, 1, 5)
    assert neurons.weights.shape == (16, 7)


def test_preactivations_on_the_sphere_have_unit_variance():
    neurons = draw(features=20_000, tokens=4, dim=3)
    values = mlp_features.flattened(inputs.sphere(2, tokens=4, dim=3), None, 4) @ neurons.weights
    np.testing.assert_allclose(np.mean(values**2, axis=1), 1.0, rtol=0.05)
    np.testing.assert_allclose(np.mean(values, axis=1), 0.0, atol=0.03)


def test_longer_sets_than_at_fit_are_refused(xp_array):
    message = (
        "X has sets of 4 tokens, expected at most 3 as at fit: "
        "a network that reads tokens in a row has no place for more"
    )
    with pytest.raises(ValueError, match=message):
        all_features(draw(tokens=3, dim=2), xp_array(gaussian(1, 4, 2)))


def test_map_moves_to_the_kind_of_a_reference(xp_array):
    reference = xp_array(gaussian(1, dtype="f4"))
    moved = draw().like(reference)
    assert namespace(moved.weights) is namespace(reference)
    assert moved.weights.dtype == reference.dtype
    np.testing.assert_array_equal(to_numpy(moved.weights), draw().weights.astype("f4"))
