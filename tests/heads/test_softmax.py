import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer.array.backend import to_numpy
from onelayer.heads.softmax import allowed_pairs, softmax, softmax_jvp


@given(data=st.data(), n=st.integers(1, 3), tokens=st.integers(1, 4), causal=st.booleans())
def test_allowed_pairs_match_the_loops(xp_array, data, n, tokens, causal):
    rows = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    mask = data.draw(st.none() | st.lists(rows, min_size=n, max_size=n))
    X = xp_array(np.ones((n, tokens, 2)))
    array = None if mask is None else xp_array(np.array(mask))
    allowed = allowed_pairs(array, causal, X)
    if mask is None and not causal:
        assert allowed is None
        return
    allowed = np.broadcast_to(to_numpy(allowed), (n, tokens, tokens))
    for example in range(n):
        for row in range(tokens):
            keys = oracles.allowed_keys(row, tokens, mask and mask[example], causal)
            assert np.flatnonzero(allowed[example, row]).tolist() == keys


def test_rows_of_attention_sum_to_one_or_to_nothing(xp_array):
    scores = np.random.default_rng(0).standard_normal((1, 6, 3))  # three rows of two heads each
    allowed = np.array([[[True, True, False], [False, False, False], [False, False, True]]])
    attention = to_numpy(softmax(xp_array(scores), xp_array(allowed)))
    np.testing.assert_allclose(attention.sum(axis=-1), [[1, 1, 0, 0, 1, 1]], rtol=1e-14)
    assert (attention[0, ::2][~allowed[0]] == 0).all()


def test_large_scores_do_not_overflow(xp_array):
    attention = to_numpy(softmax(xp_array(np.array([[[1e4, -1e4]]])), None))
    np.testing.assert_array_equal(attention, [[[1.0, 0.0]]])


@pytest.mark.parametrize("tokens", [3, 16, 17])  # few keys are summed by a product
def test_derivative_matches_finite_differences_and_is_symmetric(xp_array, tokens):
    rng = np.random.default_rng(0)
    scores, change, other = rng.standard_normal((3, 2, 2 * tokens, tokens))
    attention = softmax(xp_array(scores), None)
    found = to_numpy(softmax_jvp(attention, xp_array(change)))
    step = 1e-6
    ahead, behind = (to_numpy(softmax(xp_array(scores + s * change), None)) for s in (step, -step))
    np.testing.assert_allclose(found, (ahead - behind) / (2 * step), rtol=0, atol=1e-8)
    back = to_numpy(softmax_jvp(attention, xp_array(other)))
    assert np.sum(found * other) == pytest.approx(np.sum(change * back))
