import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer import blocks
from onelayer.arrays import to_numpy


@given(n=st.integers(0, 200), each=st.integers(0, 50), block_bytes=st.integers(1, 1000))
def test_slices_take_every_example_once_in_order_within_the_bound(n, each, block_bytes):
    parts = list(blocks.slices(n, each, block_bytes))
    assert [i for part in parts for i in range(n)[part]] == list(range(n))
    assert all(part.stop - part.start >= 1 for part in parts)
    assert all(
        part.stop - part.start == 1 or (part.stop - part.start) * each <= block_bytes
        for part in parts
    )


def test_slices_are_no_smaller_than_they_need_to_be():
    assert list(blocks.slices(10, 10, block_bytes=100)) == [slice(0, 10)]
    assert list(blocks.slices(10, 101, block_bytes=100)) == [slice(i, i + 1) for i in range(10)]
    assert len(list(blocks.slices(3, blocks.BLOCK_BYTES))) == 3


def test_sum_over_blocks_is_the_sum_over_examples(xp_array):
    X = np.random.default_rng(0).standard_normal((11, 3))
    array = xp_array(X)
    parts = blocks.slices(11, 1, block_bytes=4)
    gram = blocks.sum_over(parts, lambda part: array[part, ...].T @ array[part, ...])
    np.testing.assert_allclose(to_numpy(gram), X.T @ X, rtol=1e-12)


def test_terms_are_added_in_the_order_of_the_blocks():
    assert blocks.sum_over([1e16, 1.0, -1e16, 1.0], lambda term: term) == 1.0


def test_sum_over_no_blocks_is_refused():
    with pytest.raises(TypeError, match="empty iterable"):
        blocks.sum_over([], lambda term: term)
