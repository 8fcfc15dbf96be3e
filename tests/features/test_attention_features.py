from dataclasses import replace

import numpy as np
import oracles
import pytest
from example_sets import NO_MATTER, all_features, gaussian, ragged, random_mask, small_raggeds
from hypothesis import given
from hypothesis import strategies as st

from onelayer.array import blocks
from onelayer.array.backend import namespace, to_numpy
from onelayer.data.sets import single_tokens
from onelayer.features import attention_features
from onelayer.features.positions import PositionalEncoding
from onelayer.heads import dense


def draw(heads=4, bias=0.0, dim=3, depth=1, seed=0, kind=None, longest=5):
    positions = PositionalEncoding(kind, dim, longest, seed=3)
    return attention_features.draw(heads, bias, positions, depth, np.random.default_rng(seed))


def separate(matrices):
    """Heads (D, M·D) one by one, (M, D, D)."""
    return to_numpy(dense.by_head(matrices, matrices.shape[0]))


def by_loops(drawn, X, mask=None):
    tokens = to_numpy(drawn.positions(np.asarray(X, dtype="f8")))
    for layer in drawn.hidden:
        tokens = oracles.hidden_layer(tokens, mask, separate(layer.heads), layer.mix)
    return oracles.attention_features(tokens, mask, separate(drawn.weights))


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_features_match_the_loops(xp_array, depth, masked, dtype):
    X = gaussian(3, 5, 2, dtype=dtype)
    mask = random_mask(np.random.default_rng(0), 3, 5) if masked else None
    drawn = draw(heads=3, bias=-1.5, dim=2, depth=depth)
    found = all_features(drawn, xp_array(X), mask)
    assert namespace(found) is namespace(xp_array(X))
    assert found.dtype == xp_array(X).dtype
    tolerance = 1e-12 if dtype == "f8" else 1e-4
    np.testing.assert_allclose(
        to_numpy(found), by_loops(drawn, X, mask), rtol=tolerance, atol=tolerance
    )


@given(sizes=st.tuples(*[st.integers(1, 4)] * 4), seed=st.integers(0, 2**32 - 1))
def test_features_of_all_sizes_match_the_loops(xp_array, sizes, seed):
    n, keys, dim, heads = sizes
    X = gaussian(n, keys + 1, dim, seed=seed)
    mask = random_mask(np.random.default_rng(seed), n, keys + 1)
    drawn = draw(heads, dim=dim, seed=seed)
    found = to_numpy(all_features(drawn, xp_array(X), mask))
    np.testing.assert_allclose(found, by_loops(drawn, X, mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned-random", "onehot"])
@pytest.mark.parametrize("depth", [1, 2])
def test_features_with_positions_match_the_loops(xp_array, kind, depth):
    X = gaussian(2, 4, 3)
    drawn = draw(heads=2, kind=kind, depth=depth)
    found = to_numpy(all_features(drawn, xp_array(X)))
    np.testing.assert_allclose(found, by_loops(drawn, X), rtol=0, atol=1e-12)


def test_parts_are_columns_of_all_features(xp_array):
    X = xp_array(gaussian(4, 5, 3))
    drawn = draw(heads=6, depth=2).like(X)
    assert (drawn.unit, drawn.size) == (4, 24)
    part = to_numpy(drawn.features(drawn.prepare(X, None), slice(8, 20)))
    np.testing.assert_allclose(part, to_numpy(all_features(drawn, X))[:, 8:20], atol=1e-14)


@pytest.mark.parametrize("depth", [1, 2])
@given(sets=small_raggeds())
def test_lists_padded_arrays_and_plain_arrays_agree(xp_array, sets, depth):
    drawn = draw(dim=sets.X.shape[2], depth=depth)
    padded = to_numpy(all_features(drawn, xp_array(sets.X), sets.mask))
    as_list = to_numpy(all_features(drawn, [xp_array(example) for example in sets.examples]))
    alone = [to_numpy(all_features(drawn, xp_array(x[None]))) for x in sets.examples]
    np.testing.assert_allclose(as_list, padded, rtol=0, atol=1e-12)
    np.testing.assert_allclose(np.concatenate(alone), padded, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned-random", "onehot"])
def test_padding_leaves_the_positions_of_the_others_alone(kind):
    sets = ragged([5, 2, 4], dim=3)
    padded = all_features(draw(kind=kind, depth=2), sets.X, sets.mask)
    alone = [all_features(draw(kind=kind, depth=2), x[None]) for x in sets.examples]
    np.testing.assert_allclose(np.concatenate(alone), padded, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("masked", [False, True])
@given(order=st.permutations(range(1, 5)), seed=st.integers(0, 2**32 - 1))
def test_order_of_the_keys_does_not_matter(xp_array, order, depth, masked, seed):
    X = gaussian(3, 5, 3, seed=seed)
    mask = random_mask(np.random.default_rng(seed), 3, 5) if masked else None
    drawn, moved = draw(depth=depth, bias=1.0), [0, *order]
    found = to_numpy(all_features(drawn, xp_array(X), mask))
    permuted_mask = None if mask is None else mask[:, moved]
    permuted = to_numpy(all_features(drawn, xp_array(X[:, moved]), permuted_mask))
    np.testing.assert_allclose(permuted, found, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["sinusoidal", "learned-random", "onehot"])
def test_positions_make_the_order_of_the_keys_matter(kind):
    X, drawn = gaussian(3, 5, 3), draw(kind=kind)
    permuted = all_features(drawn, X[:, [0, 2, 1, 3, 4]])
    assert np.abs(permuted - all_features(drawn, X)).max() > 0.01


@pytest.mark.parametrize("depth", [1, 2])
def test_the_query_is_no_key(depth):
    X, drawn = gaussian(3, 5, 3), draw(depth=depth)
    swapped = all_features(drawn, X[:, [1, 0, 2, 3, 4]])
    assert np.abs(swapped - all_features(drawn, X)).max() > 0.01


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_what_padding_holds_does_not_matter(xp_array, depth, dtype):
    sets = ragged([2, 5, 3], dim=3, dtype=dtype)
    assert sets.X[0, 4, 0] == np.asarray(NO_MATTER, dtype=dtype)
    zeroed = np.where(sets.mask[:, :, None], sets.X, np.zeros(1, dtype=dtype))
    drawn = draw(depth=depth)
    found = [all_features(drawn, xp_array(X), sets.mask) for X in (sets.X, zeroed)]
    np.testing.assert_array_equal(*map(to_numpy, found))


def test_a_single_token_is_query_and_key(xp_array):
    X = gaussian(3, 4)
    sets = single_tokens(xp_array(X))
    drawn = draw(dim=4).like(sets.sample)
    found = drawn.features(drawn.prepare(*sets.block(slice(0, 3))), slice(0, drawn.size))
    expected = by_loops(drawn.like(np.ones(1)), np.stack([X, X], axis=1))
    np.testing.assert_allclose(to_numpy(found), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_more_heads_begin_with_the_same_heads(depth):
    few, many = draw(heads=2, depth=depth), draw(heads=5, depth=depth)
    np.testing.assert_array_equal(separate(many.weights)[:2], separate(few.weights))
    for short, long in zip(few.hidden, many.hidden, strict=True):
        np.testing.assert_array_equal(separate(long.heads)[:2], separate(short.heads))


def test_more_depth_keeps_the_last_layer_and_adds_others():
    flat, deep = draw(), draw(depth=3)
    assert (len(flat.hidden), len(deep.hidden)) == (0, 2)
    np.testing.assert_array_equal(flat.weights, deep.weights)
    first, second = deep.hidden
    assert np.abs(first.heads - second.heads).max() > 0.1
    assert np.abs(first.heads - deep.weights).max() > 0.1
    assert first.mix.shape == (16, 3)


def test_entries_have_mean_zero_and_variance_one_quarter():
    drawn = draw(heads=4000, depth=2)
    for matrices in (drawn.weights, drawn.hidden[0].heads):
        np.testing.assert_allclose(separate(matrices).mean(axis=0), 0.0, atol=0.04)
        np.testing.assert_allclose(separate(matrices).var(axis=0), 0.25, rtol=0.1)


@pytest.mark.parametrize("depth", [1, 2])
def test_bias_is_the_centre_of_every_head(depth):
    centre = gaussian(4, 4, seed=5)
    plain, biased = draw(depth=depth), draw(bias=centre, depth=depth)
    pairs = [(plain.weights, biased.weights)]
    pairs += [(a.heads, b.heads) for a, b in zip(plain.hidden, biased.hidden, strict=True)]
    for matrices, moved in pairs:
        gaps = separate(moved) - separate(matrices)
        np.testing.assert_allclose(gaps, np.stack([centre] * 4), rtol=0, atol=1e-14)


def test_a_number_is_a_bias_on_the_coordinates_of_the_token():
    expected = np.diag([2.0, 2.0, 2.0, 0.0])
    np.testing.assert_array_equal(
        attention_features.bias_matrix(2.0, PositionalEncoding(None, 3, 5)), expected
    )
    np.testing.assert_array_equal(draw(bias=2.0).weights, draw(bias=expected).weights)


def test_a_number_leaves_the_coordinates_of_positions_alone():
    matrix = attention_features.bias_matrix(2.0, PositionalEncoding("onehot", 2, 3))
    np.testing.assert_array_equal(matrix, np.diag([2.0, 2.0, 0.0, 0.0, 0.0, 0.0]))


def test_bias_may_be_a_matrix_of_any_backend(xp_array):
    matrix = attention_features.bias_matrix(
        xp_array(gaussian(4, 4)), PositionalEncoding(None, 3, 5)
    )
    assert isinstance(matrix, np.ndarray)
    np.testing.assert_array_equal(matrix, gaussian(4, 4))


@pytest.mark.parametrize(
    ("shape", "kind", "size"), [((3, 3), None, 4), ((4,), None, 4), ((4, 4), "onehot", 9)]
)
def test_bias_of_another_shape_is_refused(shape, kind, size):
    message = (
        rf"bias has shape \({', '.join(map(str, shape))},?\), expected a number or a matrix of "
        rf"shape \({size}, {size}\): tokens of dimension {size - 1} and a constant 1"
    )
    with pytest.raises(ValueError, match=message):
        draw(bias=np.ones(shape), kind=kind)


def test_silent_heads_add_nothing_to_a_token(xp_array):
    X = xp_array(gaussian(2, 4, 3))
    drawn = draw(depth=2)
    silent = attention_features.HiddenLayer(0.0 * drawn.hidden[0].heads, drawn.hidden[0].mix)
    found = all_features(replace(drawn, hidden=(silent,)), X)
    expected = all_features(draw(), X / 2**0.5)
    np.testing.assert_allclose(to_numpy(found), to_numpy(expected), rtol=0, atol=1e-14)


def test_frozen_layers_may_be_summed_head_by_head(monkeypatch, xp_array):
    X, drawn = xp_array(gaussian(3, 5, 3)), draw(heads=7, depth=2)
    together = to_numpy(all_features(drawn, X))
    cut, taken = blocks.slices, []

    def one_by_one(n, each):
        taken.append(n)
        return cut(n, each, block_bytes=1)

    monkeypatch.setattr(blocks, "slices", one_by_one)
    np.testing.assert_allclose(to_numpy(all_features(drawn, X)), together, rtol=0, atol=1e-13)
    assert 7 in taken


def test_map_moves_to_the_kind_of_a_reference(xp_array):
    reference = xp_array(gaussian(1, dtype="f4"))
    drawn = draw(depth=2)
    moved = drawn.like(reference)
    pairs = [
        (moved.weights, drawn.weights),
        (moved.hidden[0].heads, drawn.hidden[0].heads),
        (moved.hidden[0].mix, drawn.hidden[0].mix),
    ]
    for array, original in pairs:
        assert namespace(array) is namespace(reference)
        assert array.dtype == reference.dtype
        np.testing.assert_array_equal(to_numpy(array), original.astype("f4"))
