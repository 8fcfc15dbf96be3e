import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer import AttentionLayer, hard_instance, inputs


def parities(X, parity):
    """The product of coordinates 2 to parity + 1 of every token, one number at a time."""
    result = np.ones(X.shape[:2])
    for example, row in np.ndindex(*X.shape[:2]):
        for coordinate in range(2, parity + 2):
            result[example, row] *= X[example, row, coordinate]
    return result


def both_signs(X):
    """Which examples have tokens with either sign of coordinate 0."""
    return np.array([{token[0] for token in example} == {-1.0, 1.0} for example in X])


@pytest.mark.parametrize("parity", [1, 3, 5])
def test_output_is_the_parity_of_every_token_there_is(parity):
    dim = parity + 2
    queries = np.array(list(itertools.product([1.0, -1.0], repeat=dim)))
    others = inputs.boolean(len(queries), 2, dim)
    others[:, :, 0] = [1.0, -1.0]
    X = np.concatenate([queries[:, None], others], axis=1)
    outputs = hard_instance(parity=parity, dim=dim)(X)
    np.testing.assert_allclose(outputs[..., 0], parities(X, parity), atol=1e-9)


@given(
    parity=st.sampled_from([1, 3, 5]),
    tokens=st.integers(1, 6),
    spare=st.integers(0, 3),
    seed=st.integers(0, 1000),
)
def test_output_on_random_inputs_is_the_parity_or_the_only_sign(parity, tokens, spare, seed):
    X = inputs.boolean(40, tokens, parity + 2 + spare, seed=seed)
    outputs = hard_instance(parity=parity, dim=X.shape[2])(X)
    assert outputs.shape == (40, tokens, 1)
    expected = np.where(both_signs(X)[:, None], parities(X, parity), X[:, :, 0])
    np.testing.assert_allclose(outputs[..., 0], expected, atol=1e-9)


@given(
    parity=st.sampled_from([1, 3, 5]),
    tokens=st.integers(2, 6),
    strength=st.floats(0.1, 30),
    seed=st.integers(0, 1000),
)
def test_error_at_any_strength_is_bounded(parity, tokens, strength, seed):
    X = inputs.boolean(40, tokens, parity + 2, seed=seed)
    X = X[both_signs(X)]
    outputs = hard_instance(parity, parity + 2, strength)(X)[..., 0] if len(X) else X[..., 0]
    error = np.abs(outputs - parities(X, parity))
    assert np.all(error <= 2 * parity * (tokens - 1) * np.exp(-2 * strength) + 1e-12)


def test_weights_are_those_of_the_formula():
    layer = hard_instance(parity=3, dim=6, strength=2.5)
    assert isinstance(layer, AttentionLayer)
    assert (layer.heads, layer.dim, layer.out_dim) == (3, 6, 1)
    for head, threshold in enumerate([-2, 0, 2]):
        theta = np.zeros((6, 6))
        theta[[2, 3, 4], 0] = 2.5
        theta[1, 0] = -2.5 * threshold
        np.testing.assert_array_equal(layer.attention[head], theta)
        projection = np.zeros((6, 1))
        projection[0, 0] = [1, -1, 1][head]
        np.testing.assert_array_equal(layer.projection[head], projection)
    assert layer.key_bias is None
    assert layer.output_bias is None


def test_defaults():
    layer = hard_instance()
    assert (layer.heads, layer.dim) == (3, 12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parity": 0}, "parity is 0, expected a whole number of at least 1"),
        ({"parity": -3}, "parity is -3, expected a whole number of at least 1"),
        ({"parity": 4}, "parity is 4, expected an odd number of coordinates"),
        ({"dim": 0}, "dim is 0, expected a whole number of at least 1"),
        (
            {"parity": 5, "dim": 6},
            "dim is 6, expected at least 7: the 5 coordinates of the parity and two more",
        ),
        ({"strength": 0.0}, "strength is 0.0, expected a finite number above 0"),
        ({"strength": -1}, "strength is -1, expected a finite number above 0"),
        ({"strength": np.inf}, "strength is inf, expected a finite number above 0"),
        ({"strength": np.nan}, "strength is nan, expected a finite number above 0"),
    ],
)
def test_values_that_cannot_be(options, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        hard_instance(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parity": 3.0}, "parity is 3.0, expected a whole number of at least 1"),
        ({"parity": True}, "parity is True, expected a whole number of at least 1"),
        ({"dim": "12"}, "dim is '12', expected a whole number of at least 1"),
        ({"strength": "20"}, "strength is '20', expected a finite number above 0"),
    ],
)
def test_types_that_cannot_be(options, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        hard_instance(**options)
