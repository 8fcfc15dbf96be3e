import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info, threadpool_limits

from onelayer.array import blocks
from onelayer.array.backend import to_numpy


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
    monkeypatch.setattr(blocks.threads, "blas_threads", lambda reference: threads)
    seen = []

    def work(block):
        pools = threadpool_info()
        allowed = {pool["num_threads"] for pool in pools if pool["user_api"] == "blas"}
        seen.append((block, allowed))

    blocks.run_over([3, 1, 2], work, xp_array(np.zeros(1)))
    assert sorted(block for block, _ in seen) == [1, 2, 3]
    assert all(allowed <= {1} for _, allowed in seen)


def test_work_that_fails_says_so(monkeypatch):
    monkeypatch.setattr(blocks.threads, "blas_threads", lambda reference: 2)

    def work(block):
        raise ValueError(f"no good: {block}")

    with pytest.raises(ValueError, match="no good: 1"):
        blocks.run_over([1, 2], work, np.zeros(1))


# Folding


def on_threads(monkeypatch, threads):
    """Let numpy arrays be worked on by so many threads, whatever the machine has."""
    monkeypatch.setattr(blocks.threads, "blas_threads", lambda reference: threads)


@pytest.mark.parametrize("threads", [1, 3])
def test_results_are_merged_from_left_to_right(xp_array, monkeypatch, threads):
    on_threads(monkeypatch, threads)
    folded = blocks.fold_over(
        range(7), str, lambda first, second: f"({first}{second})", xp_array(np.zeros(1))
    )
    assert folded == "((((((01)2)3)4)5)6)"


@pytest.mark.parametrize("threads", [1, 3])
def test_one_block_is_not_merged(monkeypatch, threads):
    on_threads(monkeypatch, threads)
    merge = pytest.fail
    assert blocks.fold_over([4], lambda block: block + 1, merge, np.zeros(1)) == 5


@pytest.mark.parametrize("threads", [1, 3])
def test_folding_no_blocks_is_refused(monkeypatch, threads):
    on_threads(monkeypatch, threads)
    with pytest.raises(TypeError, match="empty iterable"):
        blocks.fold_over([], str, str.__add__, np.zeros(1))


def test_threads_that_finish_in_any_order_give_the_bits_of_one(monkeypatch):
    terms = np.random.default_rng(0).standard_normal(40)

    def slower_first(index):
        time.sleep(0.002 if index % 4 == 0 else 0.0)
        return terms[index]

    totals = []
    for threads in (1, 2, 5):
        on_threads(monkeypatch, threads)
        totals.append(blocks.fold_over(range(40), slower_first, lambda a, b: a + b, np.zeros(1)))
    assert totals[1] == totals[0]
    assert totals[2] == totals[0]
    assert totals[0] != sum(terms[::-1])  # the order does matter here


@pytest.mark.parametrize("threads", [2, 3])
def test_blocks_are_worked_on_by_several_threads_at_once(monkeypatch, threads):
    on_threads(monkeypatch, threads)
    meeting = threading.Barrier(threads)

    def meet(block):
        meeting.wait(timeout=10)
        return block

    assert blocks.fold_over(range(2 * threads), meet, lambda a, b: a + b, np.zeros(1)) > 0


def test_only_numpy_with_several_blas_threads_leaves_the_callers_thread(xp_array):
    reference = xp_array(np.zeros(1))
    is_numpy = type(reference) is np.ndarray
    with threadpool_limits(limits=1 if is_numpy else 3, user_api="blas"):
        threads = blocks.fold_over(
            range(5), lambda block: {threading.get_ident()}, set.union, reference
        )
    assert threads == {threading.get_ident()}


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_few_results_wait_to_be_merged(monkeypatch, threads):
    on_threads(monkeypatch, threads)
    drawn = merged = most_waiting = 0

    def source():
        nonlocal drawn, most_waiting
        for block in range(100):
            drawn += 1
            most_waiting = max(most_waiting, drawn - merged)
            yield block

    def merge(first, second):
        nonlocal merged
        merged += 1
        return first + second

    assert blocks.fold_over(source(), lambda block: block, merge, np.zeros(1)) == 4950
    # Two more than are pending: the result so far was never merged, and the next block is drawn.
    assert most_waiting <= (2 if threads == 1 else 2 * threads + 2)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("place", ["work", "merge", "blocks"])
def test_what_fails_while_folding_says_so_and_ends_it(monkeypatch, threads, place):
    on_threads(monkeypatch, threads)
    drawn = []

    def fail_at(here, block):
        if place == here and block == 5:
            raise ValueError(f"no good: {here} {block}")
        return block

    def source():
        for block in range(1000):
            drawn.append(block)
            yield fail_at("blocks", block)

    with pytest.raises(ValueError, match=f"no good: {place} 5"):
        blocks.fold_over(
            source(),
            lambda block: fail_at("work", block),
            lambda _, block: fail_at("merge", block),
            np.zeros(1),
        )
    assert len(drawn) < 20


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("fails", [False, True])
def test_folding_holds_blas_to_one_thread_until_it_ends(monkeypatch, threads, fails):
    on_threads(monkeypatch, threads)

    def allowed(block=None):
        if fails and block == 7:
            raise ValueError("no good")
        pools = threadpool_info()
        return {pool["num_threads"] for pool in pools if pool["user_api"] == "blas"}

    with threadpool_limits(limits=2, user_api="blas"):
        before = allowed()
        try:
            seen = blocks.fold_over(range(8), allowed, set.union, np.zeros(1))
        except ValueError:
            assert fails
        else:
            assert not fails
            assert seen <= {1}
        assert allowed() == before
