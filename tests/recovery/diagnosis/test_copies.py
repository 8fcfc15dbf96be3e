import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer import AttentionLayer, Reason, inputs, recover
from onelayer.data.chunks import Chunk
from onelayer.recovery.diagnosis import copies


def split(X, Y, mask=None, held_out=5, seed=0):
    return copies.split(Chunk(0, (X, Y, mask)), held_out, np.random.default_rng(seed))


def drawn(seed, n, inputs_of, outputs_of):
    """Examples with so many different inputs and, for each of these, outputs."""
    rng = np.random.default_rng(seed)
    which, other = rng.integers(0, inputs_of, n), rng.integers(0, outputs_of, n)
    X = rng.standard_normal((inputs_of, 2, 3))[which]
    return X, X + other[:, None, None]


@given(
    seed=st.integers(0, 999),
    n=st.integers(2, 40),
    inputs_of=st.integers(1, 30),
    outputs_of=st.integers(1, 3),
    held_out=st.integers(1, 10),
)
def test_groups_are_on_one_side_and_exact_copies_count_once(
    seed, n, inputs_of, outputs_of, held_out
):
    X, Y = drawn(seed, n, inputs_of, outputs_of)
    fitted, out = split(X, Y, held_out=held_out, seed=seed)
    seen, unseen = ({X[i].tobytes() for i in part} for part in (fitted, out))
    both = [X[i].tobytes() + Y[i].tobytes() for i in (*fitted, *out)]
    everything = {x.tobytes() + y.tobytes() for x, y in zip(X, Y, strict=True)}
    assert set(both) == everything
    assert len(fitted) >= 1
    assert len(out) >= 1
    if len({x.tobytes() for x in X}) > 1:
        assert not seen & unseen
        assert len(both) == len(everything)


def test_examples_that_all_differ_are_split_as_asked_for(xp_array):
    X = np.random.default_rng(0).standard_normal((50, 2, 3))
    fitted, out = split(xp_array(X), xp_array(X), held_out=7)
    assert (len(fitted), len(out)) == (43, 7)
    assert sorted([*fitted, *out]) == list(range(50))
    assert list(fitted) != sorted(fitted)
    assert list(out) != sorted(out)


def test_the_first_of_exact_copies_is_taken():
    X = np.random.default_rng(0).standard_normal((10, 2, 3))
    X = np.concatenate([X, X, X])
    fitted, out = split(X, 2 * X, held_out=3)
    assert sorted([*fitted, *out]) == list(range(10))


def test_the_same_seed_gives_the_same_split():
    X, Y = drawn(0, 40, 20, 2)
    first, again, other = (split(X, Y, seed=seed) for seed in (1, 1, 2))
    for mine, theirs in zip(first, again, strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(first[0], other[0])


def test_the_same_tokens_with_another_mask_are_another_example():
    X = np.ones((2, 2, 3))
    mask = np.array([[True, True], [True, False]])
    fitted, out = split(X, X, mask, held_out=1)
    assert (len(fitted), len(out)) == (1, 1)


def test_inputs_that_are_all_the_same_are_on_both_sides():
    X = np.ones((6, 2, 3))
    Y = np.arange(6.0)[:, None, None] + X
    fitted, out = split(X, Y)
    np.testing.assert_array_equal(fitted, out)
    assert len(fitted) == 6


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 5])
def test_copies_change_nothing_in_a_recovery(times):
    layer = AttentionLayer.random(heads=2, dim=4)
    X = inputs.gaussian(120, 3, 4, seed=1)
    Y = layer(X) + 1e-3 * np.random.default_rng(2).standard_normal(X.shape)
    once, often = (
        recover(np.tile(X, (k, 1, 1)), np.tile(Y, (k, 1, 1)), heads=2, method="refine")
        for k in (1, times)
    )
    assert once.reason is often.reason is Reason.NOISE_FLOOR
    for name in ("attention_error", "projection_error"):
        ratio = getattr(often.certificate, name) / getattr(once.certificate, name)
        assert ratio.min() > 0.4  # copies of noise are no further evidence
    assert often.certificate.examples <= 120


@pytest.mark.slow
def test_examples_known_by_a_copy_alone_do_not_prove_anything():
    X = np.repeat(inputs.gaussian(8, 3, 4, seed=1), 30, axis=0)
    Y = np.repeat(np.random.default_rng(2).standard_normal((8, 3, 4)), 30, axis=0)
    assert not recover(X, Y, heads=2, restarts=1).converged


# Rows that are equal

small = st.integers(-1, 1)


@given(st.lists(st.tuples(small, small, small), min_size=1, max_size=12))
def test_rows_are_equal_if_they_are_in_all_arrays(rows):
    pairs, last = np.array(rows)[:, :2], np.array(rows)[:, 2]
    expected = [rows.index(row) for row in rows]
    assert copies.first_equal(pairs, last).tolist() == expected
    assert copies.distinct(pairs, last).tolist() == sorted(set(expected))


def test_zero_has_no_sign_and_rounding_is_as_asked():
    values = np.array([[0.0, 1.0], [-0.0, 1.0], [1e-12, 1.0], [-1e-12, 1.0]])
    assert copies.first_equal(values).tolist() == [0, 0, 2, 3]
    assert len(set(copies.row_keys(values, decimals=9))) == 1


def test_rows_need_not_lie_together_in_memory():
    values = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    assert copies.first_equal(np.asfortranarray(values)).tolist() == [0, 1, 0]
