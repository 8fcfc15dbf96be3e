import numpy as np
import oracles
import pytest
from gauges import layers, permuted
from hypothesis import given
from hypothesis import strategies as st

from onelayer import AttentionLayer, HeadMatch, inputs


def perturbed(layer, noise, seed=0):
    """The layer with Gaussian noise on all of its weights."""
    rng = np.random.default_rng(seed)
    return AttentionLayer(
        **{name: a + noise * rng.standard_normal(a.shape) for name, a in layer.arrays().items()}
    )


def heads_of(layer):
    """The layer's heads as the distance sees them: (attention with its key bias, projection)."""
    biases = np.zeros((layer.heads, layer.dim)) if layer.key_bias is None else layer.key_bias
    theta = np.concatenate([layer.attention, biases[:, None, :]], axis=1)
    return list(zip(theta, layer.projection, strict=True))


def test_distance_finds_the_permutation(xp_array):
    layer = AttentionLayer.random(heads=5, dim=3, bias=True)
    order = [3, 0, 4, 1, 2]
    match = permuted(layer, order).to(xp_array(np.ones(1))).distance(layer)
    assert isinstance(match, HeadMatch)
    assert [order[i] for i in match.permutation] == [0, 1, 2, 3, 4]
    assert match.attention.tolist() == match.projection.tolist() == [0.0] * 5
    assert match.output_bias == 0.0


@given(
    mine=st.integers(1, 4),
    theirs=st.integers(1, 4),
    bias=st.booleans(),
    noise=st.sampled_from([1e-6, 0.3]),
    seed=st.integers(0, 2**32 - 1),
)
def test_distance_matches_brute_force(mine, theirs, bias, noise, seed):
    true = AttentionLayer.random(heads=max(mine, theirs), dim=2, out_dim=3, bias=bias, seed=seed)
    order = np.random.default_rng(seed).permutation(true.heads)[:mine]
    found = perturbed(permuted(true, order), noise, seed)
    true = permuted(true, np.arange(theirs))
    match = found.distance(true)
    permutation, attention, projection = oracles.head_distance(heads_of(found), heads_of(true))
    np.testing.assert_array_equal(match.permutation, permutation)
    np.testing.assert_allclose(match.attention, attention, rtol=1e-12)
    np.testing.assert_allclose(match.projection, projection, rtol=1e-12)


def test_heads_without_a_partner_are_infinitely_far():
    true = AttentionLayer.random(heads=3, dim=4)
    match = permuted(true, [2, 0]).distance(true)
    assert match.permutation.tolist() == [1, -1, 0]
    assert match.attention.tolist() == match.projection.tolist() == [0.0, np.inf, 0.0]


def test_heads_too_many_are_left_out():
    found = AttentionLayer.random(heads=3, dim=4)
    match = found.distance(permuted(found, [1]))
    assert match.permutation.tolist() == [1]
    assert match.attention.tolist() == [0.0]


def test_distance_to_heads_of_norm_zero():
    zero = AttentionLayer(np.zeros((1, 2, 2)), np.zeros((1, 2, 2)))
    other = AttentionLayer.random(heads=1, dim=2, bias=True)
    same = zero.distance(zero)
    assert (same.attention[0], same.projection[0], same.output_bias) == (0.0, 0.0, 0.0)
    from_zero = zero.distance(other)
    assert (from_zero.attention[0], from_zero.output_bias) == (1.0, 1.0)
    to_zero = other.distance(zero)
    assert to_zero.projection[0] == to_zero.attention[0] == to_zero.output_bias == 1.0


def test_missing_biases_count_as_zeros():
    layer = AttentionLayer.random(heads=2, dim=3)
    with_zeros = AttentionLayer(
        layer.attention, layer.projection, np.zeros((2, 3)), np.zeros(layer.out_dim)
    )
    match = with_zeros.distance(layer)
    assert max(match.attention) == match.output_bias == 0.0


def test_distance_compares_across_precisions():
    layer = AttentionLayer.random(heads=3, dim=4)
    match = layer.to(np.ones(1, dtype=np.float32)).distance(layer)
    assert 0 < max(match.attention) < 1e-7
    assert match.permutation.tolist() == [0, 1, 2]


@given(layer=layers(), theirs=st.integers(1, 4), noise=st.sampled_from([1e-9, 0.3, 30.0]))
@pytest.mark.parametrize("on_inputs", [False, True])
def test_distance_is_symmetric(layer, theirs, noise, on_inputs):
    other = AttentionLayer.random(theirs, layer.dim, out_dim=layer.out_dim, seed=1)
    if theirs == layer.heads:
        other = perturbed(permuted(layer, np.arange(theirs)[::-1]), noise)
    X = inputs.gaussian(20, 3, layer.dim, seed=2) if on_inputs else None
    there, back = layer.distance(other, inputs=X), other.distance(layer, inputs=X)
    matched = np.flatnonzero(there.permutation >= 0)
    assert len(matched) == min(layer.heads, theirs)
    np.testing.assert_array_equal(back.permutation[there.permutation[matched]], matched)
    for name in ("attention", "projection"):
        errors = getattr(there, name)[matched], getattr(back, name)[there.permutation[matched]]
        np.testing.assert_allclose(*errors, rtol=1e-12)
        assert errors[0].max() <= 2.0
    assert there.output_bias == pytest.approx(back.output_bias, rel=1e-12)


@pytest.mark.parametrize("size", [1e-200, 1.0, 1e200])
def test_distance_of_opposite_heads_is_two_at_any_size(size):
    layer = AttentionLayer(np.full((1, 2, 2), size), np.full((1, 2, 1), size))
    match = layer.distance(AttentionLayer(-layer.attention, layer.projection / 2))
    assert (match.attention[0], match.projection[0]) == (2.0, 0.5)


@given(layer=layers(), seed=st.integers(0, 999))
def test_distance_is_zero_up_to_rounding_for_heads_made_from_other_factors(layer, seed):
    rng = np.random.default_rng(seed)
    turn = np.linalg.qr(rng.standard_normal((layer.dim, layer.dim)))[0]
    identity = np.eye(layer.dim)
    other = AttentionLayer(
        (layer.attention @ turn) @ (turn.T @ identity),
        (layer.projection.swapaxes(1, 2) @ turn @ turn.T).swapaxes(1, 2),
        layer.key_bias,
        layer.output_bias,
    )
    match = permuted(other, rng.permutation(layer.heads)).distance(layer)
    assert max(*match.attention, *match.projection, match.output_bias) < 1e-14


def test_distance_between_layers_of_different_dimensions_is_refused():
    layer = AttentionLayer.random(heads=2, dim=3)
    other = AttentionLayer.random(heads=2, dim=3, out_dim=5)
    with pytest.raises(ValueError, match="the other layer maps dimension 3 to 5, expected 3 to 3"):
        layer.distance(other)


def test_a_distance_from_something_else_is_refused():
    with pytest.raises(TypeError, match="other is a int, expected an AttentionLayer"):
        AttentionLayer.random(heads=1, dim=2).distance(3)
