import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

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


@pytest.mark.parametrize("threads", [1, 3])
def test_work_runs_once_over_every_block_with_one_blas_thread(xp_array, monkeypatch, threads):
    monkeypatch.setattr(blocks.arrays, "blas_threads", lambda reference: threads)
    seen = []

    def work(block):
        pools = threadpool_info()
        allowed = {pool["num_threads"] for pool in pools if pool["user_api"] == "blas"}
        seen.append((block, allowed))

    blocks.run_over([3, 1, 2], work, xp_array(np.zeros(1)))
    assert sorted(block for block, _ in seen) == [1, 2, 3]
    assert all(allowed <= {1} for _, allowed in seen)


def test_work_that_fails_says_so(monkeypatch):
    monkeypatch.setattr(blocks.arrays, "blas_threads", lambda reference: 2)

    def work(block):
        raise ValueError(f"no good: {block}")

    with pytest.raises(ValueError, match="no good: 1"):
        blocks.run_over([1, 2], work, np.zeros(1))
