import re

import numpy as np
import pytest

from onelayer import AttentionLayer, recover
from onelayer.recovery import ragged

LENGTHS = [3, 1, 4, 2]


def lists(seed=0, n=4):
    rng = np.random.default_rng(seed)
    lengths = [LENGTHS[i % 4] for i in range(n)]
    return tuple([rng.standard_normal((k, size)) for k in lengths] for size in (5, 2))


def test_lists_are_padded_to_the_longest():
    X, Y = lists()
    padded_X, padded_Y, mask, observed = ragged.padded(X, Y, None, None)
    assert (padded_X.shape, padded_Y.shape, observed) == ((4, 4, 5), (4, 4, 2), None)
    for i, k in enumerate(LENGTHS):
        np.testing.assert_array_equal(padded_X[i, :k], X[i])
        np.testing.assert_array_equal(padded_Y[i, :k], Y[i])
        np.testing.assert_array_equal(mask[i], np.arange(4) < k)
        assert not padded_X[i, k:].any()
    some = [np.arange(k) == 0 for k in LENGTHS]
    found = ragged.padded(X, Y, None, some)[3]
    np.testing.assert_array_equal(found, [[True, False, False, False]] * 4)
    assert ragged.padded(X, Y, None, "last")[3] == "last"


def test_only_lists_of_arrays_of_different_lengths_are_ragged():
    X, _ = lists()
    assert ragged.is_ragged(X)
    assert not ragged.is_ragged([X[0], X[0]])
    assert not ragged.is_ragged(tuple(X))
    assert not ragged.is_ragged([one.tolist() for one in X])
    assert not ragged.is_ragged(X[0])


def test_lists_that_do_not_fit_are_refused():
    X, Y = lists()
    message = "mask was given with a list X of examples of different lengths, expected None"
    with pytest.raises(ValueError, match=message):
        ragged.padded(X, Y, np.ones((4, 4)), None)
    with pytest.raises(TypeError, match="Y is a ndarray, expected a list of arrays as X is"):
        ragged.padded(X, np.ones((4, 4, 2)), None, None)
    with pytest.raises(ValueError, match="Y has 3 examples, expected 4 as X has"):
        ragged.padded(X, Y[:3], None, None)
    message = "Y has shape (4, 2) at example 1, expected (1, 2)"
    with pytest.raises(ValueError, match=re.escape(message)):
        ragged.padded(X, [Y[0], Y[2], Y[2], Y[3]], None, None)
    message = "X has shape (2, 4) at example 3, expected (2, 5)"
    with pytest.raises(ValueError, match=re.escape(message)):
        ragged.padded([*X[:3], X[3][:, :4]], Y, None, None)


def test_a_layer_is_recovered_from_lists():
    layer = AttentionLayer.random(heads=1, dim=5, seed=0)
    X, _ = lists(n=200)
    Y = [layer(one[None])[0] for one in X]
    found = recover(X, Y, heads=1)
    assert found.converged
    assert found.layer.distance(layer).attention.max() < 1e-9
