import numpy as np
import pytest
from gauges import layers
from hypothesis import given
from hypothesis import strategies as st

from onelayer import AttentionLayer, HeadFactors, inputs
from onelayer.array.backend import namespace, to_numpy


def multi_head(rng, heads=3, dim=8, size=2, out_dim=5):
    """Weights of query, key, value and output as an interpretability library has them."""
    shapes = (heads, dim, size), (heads, dim, size), (heads, dim, size), (heads, size, out_dim)
    return [rng.standard_normal(shape) for shape in shapes]


def heads_made_from(query, key, value, output):
    return AttentionLayer(query @ key.swapaxes(1, 2) / np.sqrt(query.shape[2]), value @ output)


@given(layer=layers(), dtype=st.sampled_from(["f4", "f8"]))
def test_products_of_the_factors_are_the_heads(xp_array, layer, dtype):
    there = layer.to(xp_array(np.ones(1, dtype)))
    found = there.factors()
    assert isinstance(found, HeadFactors)
    for array in vars(found).values():
        assert namespace(array) is namespace(there.attention)
        assert array.dtype == there.attention.dtype
    query, key, value, output = map(to_numpy, vars(found).values())
    assert query.shape == key.shape
    atol = 1e-12 if dtype == "f8" else 1e-5
    np.testing.assert_allclose(query @ key.swapaxes(1, 2), layer.attention, atol=atol)
    np.testing.assert_allclose(value @ output, layer.projection, atol=atol)


@given(layer=layers())
def test_norms_are_balanced_and_columns_orthogonal(layer):
    found = layer.factors()
    pairs = (found.query, found.key), (found.value, found.output.swapaxes(1, 2))
    for left, right in pairs:
        products = left.swapaxes(1, 2) @ left
        np.testing.assert_allclose(products, right.swapaxes(1, 2) @ right, atol=1e-12)
        sizes = np.diagonal(products, axis1=1, axis2=2)
        np.testing.assert_allclose(products, sizes[:, None] * np.eye(sizes.shape[1]), atol=1e-12)
        assert (np.diff(sizes, axis=1) <= 1e-12).all()


def test_factors_do_not_depend_on_those_that_the_layer_was_made_from():
    rng = np.random.default_rng(0)
    query, key, value, output = multi_head(rng)
    mix, other = rng.standard_normal((2, 3, 2, 2))
    same = heads_made_from(
        query @ mix,
        key @ np.linalg.inv(mix).swapaxes(1, 2),
        value @ other,
        np.linalg.inv(other) @ output,
    )
    found, expected = same.factors(), heads_made_from(query, key, value, output).factors()
    assert found.query.shape == (3, 8, 2)
    assert found.output.shape == (3, 2, 5)
    for name, array in vars(found).items():
        np.testing.assert_allclose(array, vars(expected)[name], atol=1e-12)


def test_scores_divided_by_the_root_of_the_rank_take_factors_times_its_fourth_root():
    """How interpretability libraries write a head: softmax(x W_Q (x W_K)ᵀ / √r) x W_V W_O."""
    layer = heads_made_from(*multi_head(np.random.default_rng(0)))
    found = layer.factors()
    r = found.query.shape[2]
    same = heads_made_from(found.query * r**0.25, found.key * r**0.25, found.value, found.output)
    X = inputs.gaussian(3, 4, 8)
    np.testing.assert_allclose(same(X), layer(X), atol=1e-12)


@pytest.mark.parametrize("rank", [1, 3, 6])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_rank_is_found(rank, dtype):
    layer = AttentionLayer.random(heads=4, dim=6, rank=rank, out_dim=2).to(np.ones(1, dtype))
    found = layer.factors()
    assert found.query.shape == found.key.shape == (4, 6, rank)
    assert (found.value.shape, found.output.shape) == ((4, 6, 2), (4, 2, 2))


def test_heads_of_smaller_rank_have_columns_of_zeros():
    one, two = (AttentionLayer.random(heads=1, dim=5, rank=rank) for rank in (1, 3))
    layer = AttentionLayer(
        np.concatenate([one.attention, two.attention]),
        np.concatenate([one.projection, 0 * two.projection]),
    )
    for found in (layer.factors(), layer.factors(rank=4)):
        there = found.query.any(axis=1).sum(axis=1), found.key.any(axis=1).sum(axis=1)
        assert [columns.tolist() for columns in there] == [[1, 3], [1, 3]]
        assert not found.value[1].any()
        assert not found.output[1].any()
    assert layer.factors().query.shape == (2, 5, 3)


def test_heads_of_zeros_have_rank_one():
    found = AttentionLayer(np.zeros((2, 3, 3)), np.zeros((2, 3, 1))).factors()
    assert [array.shape for array in vars(found).values()] == [(2, 3, 1)] * 3 + [(2, 1, 1)]
    assert not any(array.any() for array in vars(found).values())


def test_a_smaller_rank_gives_the_best_approximation():
    layer = AttentionLayer.random(heads=2, dim=6, out_dim=4)
    found = layer.factors(rank=2, value_rank=1)
    assert found.query.shape == (2, 6, 2)
    assert found.value.shape == (2, 6, 1)
    pairs = (
        (found.query @ found.key.swapaxes(1, 2), layer.attention, 2),
        (
            found.value @ found.output,
            layer.projection,
            1,
        ),
    )
    for product, matrices, rank in pairs:
        left_over = np.linalg.svd(matrices, compute_uv=False)[:, rank:]
        errors = np.linalg.norm(product - matrices, axis=(1, 2))
        np.testing.assert_allclose(errors, np.linalg.norm(left_over, axis=1), rtol=1e-12)


def test_signs_are_such_that_the_largest_entry_of_a_column_is_positive():
    found = AttentionLayer.random(heads=3, dim=6).factors()
    for factor in (found.query, found.value):
        largest = np.take_along_axis(factor, np.abs(factor).argmax(axis=1)[:, None], axis=1)
        assert (largest > 0).all()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank is 0, expected a whole number of at least 1"),
        ({"rank": 2.0}, TypeError, r"rank is 2\.0, expected a whole number of at least 1"),
        ({"rank": 5}, ValueError, "rank is 5, expected at most 4, the rank a head can have"),
        ({"value_rank": 3}, ValueError, "value_rank is 3, expected at most 2, the rank a head"),
    ],
)
def test_ranks_that_cannot_be_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        AttentionLayer.random(heads=1, dim=4, out_dim=2).factors(**options)
