"""What `recover` finds does not depend on the coordinates in which examples are given."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs, recover

FEW = settings(max_examples=6)
SEEDS = st.integers(0, 50)


def examples(seed, bias=False, noise=0.0):
    layer = AttentionLayer.random(heads=2, dim=3, seed=seed, bias=bias)
    X = inputs.gaussian(100, 3, 3, seed=seed + 1)
    Y = layer(X)
    return layer, X, Y + noise * np.random.default_rng(seed).standard_normal(Y.shape)


def in_coordinates(layer, matrix, shift=None):
    """The layer of tokens x that does what another does with tokens (x - shift) @ matrix."""
    theta = matrix @ layer.attention @ matrix.T
    projection = matrix @ layer.projection
    if layer.key_bias is None:
        return AttentionLayer(theta, projection)
    shift = np.zeros(len(matrix)) if shift is None else shift
    key_bias = layer.key_bias @ matrix.T - shift @ theta
    output_bias = layer.output_bias - (shift @ projection).sum(axis=0)
    return AttentionLayer(theta, projection, key_bias, output_bias)


def assert_as_well(found, plain, expected, inputs):
    """Another recovery ends as the plain one does, at this layer on these inputs."""
    assert found.converged == plain.converged
    assert found.reason is plain.reason
    assert found.certificate.input_rank == plain.certificate.input_rank
    if plain.converged:
        match = found.layer.distance(expected, inputs=inputs)
        assert max(match.attention.max(), match.projection.max(), match.output_bias) < 1e-6


@pytest.mark.slow
@FEW
@given(seed=SEEDS, bias=st.booleans())
def test_turned_tokens(seed, bias):
    layer, X, Y = examples(seed, bias)
    turn = np.linalg.qr(np.random.default_rng(seed).standard_normal((3, 3)))[0]
    plain, found = (recover(x, Y, heads=2, bias=bias) for x in (X, X @ turn))
    assert_as_well(found, plain, in_coordinates(layer, turn.T), X @ turn)


@pytest.mark.slow
@FEW
@given(seed=SEEDS, sizes=st.lists(st.sampled_from([1e-3, 0.1, 1.0, 30.0]), min_size=3, max_size=3))
def test_stretched_tokens(seed, sizes):
    layer, X, Y = examples(seed)
    plain, found = (recover(x, Y, heads=2) for x in (X, X * sizes))
    assert_as_well(found, plain, in_coordinates(layer, np.diag(1 / np.array(sizes))), X * sizes)


@pytest.mark.slow
@FEW
@given(seed=SEEDS, size=st.sampled_from([1e-8, 1e-3, 1e5]))
def test_units_of_tokens(seed, size):
    layer, X, Y = examples(seed, bias=True)
    plain, found = (recover(x, Y, heads=2, bias=True) for x in (X, X * size))
    assert_as_well(found, plain, in_coordinates(layer, np.eye(3) / size), X * size)


@pytest.mark.slow
@FEW
@given(seed=SEEDS, length=st.sampled_from([0.5, 10.0, 1e4]))
def test_shifted_tokens(seed, length):
    layer, X, Y = examples(seed, bias=True)
    shift = length * np.random.default_rng(seed).standard_normal(3)
    plain, found = (recover(x, Y, heads=2, bias=True) for x in (X, X + shift))
    assert_as_well(found, plain, in_coordinates(layer, np.eye(3), shift), X + shift)


@pytest.mark.slow
@FEW
@given(seed=SEEDS, more=st.integers(1, 4), away=st.booleans())
def test_tokens_in_more_dimensions(seed, more, away):
    layer, X, Y = examples(seed, bias=True)
    rng = np.random.default_rng(seed)
    into = np.linalg.qr(rng.standard_normal((3 + more, 3)))[0].T
    shift = away * rng.standard_normal(3 + more)
    wide = X @ into + shift
    plain, found = (recover(x, Y, heads=2, bias=True) for x in (X, wide))
    assert_as_well(found, plain, in_coordinates(layer, into.T, shift), wide)


@pytest.mark.slow
@FEW
@given(seed=SEEDS, size=st.sampled_from([1e-9, 1e-3, 1e6]), noise=st.sampled_from([0.0, 1e-3]))
def test_units_of_outputs(seed, size, noise):
    _, X, Y = examples(seed, noise=noise)
    plain, found = (recover(X, y, heads=2) for y in (Y, Y * size))
    expected = AttentionLayer(plain.layer.attention, plain.layer.projection * size)
    assert_as_well(found, plain, expected, X)
    np.testing.assert_allclose(
        found.certificate.noise, plain.certificate.noise, rtol=1e-3, atol=1e-12
    )


@pytest.mark.slow
@pytest.mark.parametrize("noise", [1e-4, 1e-2])
def test_turned_tokens_with_noise(noise):
    _, X, Y = examples(3, noise=noise)
    turn = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))[0]
    plain, found = (recover(x, Y, heads=2) for x in (X, X @ turn))
    assert_as_well(found, plain, in_coordinates(plain.layer, turn.T), X @ turn)
    for name in ("attention_error", "projection_error"):
        mine, theirs = (np.sort(getattr(one.certificate, name)) for one in (found, plain))
        np.testing.assert_allclose(mine, theirs, rtol=0.9)  # other draws, of the same size
