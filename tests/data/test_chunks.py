import operator
import os
import signal
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from threadpoolctl import threadpool_info

from onelayer.data import chunks
from onelayer.data.chunks import Chunk, InMemory, Streamed
from onelayer.data.dask import OnCluster


def one_by_one(values, log=None):
    """The values as chunks that are read anew in every pass; `log` hears of what is read."""

    def read(positions):
        for position in positions:
            if log is not None:
                log.append(position)
            yield values[position]

    return Streamed(read, tuple(range(len(values))))


def on_cluster(values, client):
    dask = pytest.importorskip("dask")
    later = dask.delayed(lambda value: value, pure=False)
    return OnCluster(tuple(later(value) for value in values), client)


@pytest.fixture(params=["in memory", "one by one", "on a cluster"])
def spread(request):
    """A function that makes chunks of values."""
    if request.param == "in memory":
        return lambda values: InMemory(tuple(values))
    if request.param == "one by one":
        return one_by_one
    client = request.getfixturevalue("cluster")
    return lambda values: on_cluster(values, client)


# Everywhere alike


@pytest.mark.parametrize("count", [1, 2, 8, 9, 70])
def test_values_are_merged_and_gathered_in_their_order(spread, count):
    letters = [chr(ord("0") + i) for i in range(count)]
    doubled = spread(letters).map(operator.mul, 2)
    assert len(doubled) == count
    assert doubled.collect() == [2 * letter for letter in letters]
    assert doubled.reduce(operator.add) == "".join(2 * letter for letter in letters)


def test_arguments_are_one_value_of_chunks_or_the_same_for_all(spread):
    numbers = spread([1, 2, 3])
    squares = numbers.map(lambda x: x * x)
    shared = np.array([10.0, 100.0])
    found = squares.map(
        lambda a, b, c, d, e: (a, b, c, float(d[0]), e),
        InMemory(("x", "y", "z")),
        numbers,
        shared,
        None,
    )
    assert found.collect() == [(1, "x", 1, 10, None), (4, "y", 2, 10, None), (9, "z", 3, 10, None)]


def test_some_are_picked_with_all_that_belongs_to_them(spread):
    beside = InMemory(tuple("abcd"))
    found = spread([0, 1, 2, 3]).map(lambda i, letter: f"{i}{letter}", beside)
    some = found.pick([1, 3])
    assert some.collect() == ["1b", "3d"]
    again = some.map(str.__add__, InMemory(("!", "?"))).pick([1])
    assert again.collect() == ["3d?"]
    assert found.pick([2]).reduce(pytest.fail) == "2c"


@given(
    values=st.lists(st.integers(-100, 100), min_size=1, max_size=9),
    steps=st.lists(st.sampled_from(["memory", "map", "pick", "both"]), max_size=5),
    data=st.data(),
)
def test_mixtures_of_memory_and_one_by_one_are_loops(values, steps, data):
    expected, found = list(values), one_by_one(values)
    for step in steps:
        if step == "memory":
            beside = data.draw(st.lists(st.integers(), min_size=len(found), max_size=len(found)))
            found = InMemory(tuple(beside)).map(operator.sub, found)
            expected = [a - b for a, b in zip(beside, expected, strict=True)]
        elif step == "map":
            found, expected = found.map(operator.neg), [-value for value in expected]
        elif step == "both":
            found = found.map(lambda a, b, c: 2 * a + b - c, found.map(abs), 5)
            expected = [2 * a + abs(a) - 5 for a in expected]
        else:
            chosen = sorted(data.draw(st.sets(st.integers(0, len(found) - 1), min_size=1)))
            found, expected = found.pick(chosen), [expected[i] for i in chosen]
    assert found.collect() == expected
    assert found.reduce(operator.add) == sum(expected)


def test_no_chunks_have_no_merger_but_can_be_gathered(spread):
    none = spread([1, 2]).pick([])
    assert len(none) == 0
    assert none.collect() == []
    assert none.map(abs).collect() == []
    with pytest.raises(ValueError, match="got no chunks to merge, expected at least one"):
        none.reduce(operator.add)


def test_what_does_not_go_together_is_refused(spread):
    with pytest.raises(ValueError, match="got 2 and 3 chunks, expected equal numbers"):
        spread([1, 2, 3]).map(operator.add, InMemory((1, 2)))
    with pytest.raises(ValueError, match=r"got . and . chunks, expected equal numbers"):
        InMemory((1, 2, 3)).map(operator.add, spread([1, 2]))


def test_two_sources_are_not_read_in_one_pass(cluster):
    message = "got chunks of two sources, expected them to be read in one pass"
    first, second = one_by_one([1, 2]), one_by_one([3, 4])
    with pytest.raises(ValueError, match=message):
        first.map(operator.add, second)
    with pytest.raises(ValueError, match=message):
        first.pick([0]).map(operator.add, first.pick([1]))
    with pytest.raises(ValueError, match=message):
        first.map(operator.add, on_cluster([5, 6], cluster))


def test_work_that_fails_says_so(spread):
    def fail_at_two(value):
        if value == 2:
            raise ValueError("no good: 2")
        return value

    with pytest.raises(ValueError, match="no good: 2"):
        spread(range(20)).map(fail_at_two).reduce(operator.add)
    with pytest.raises(ValueError, match="no good: 2"):
        spread(range(20)).map(fail_at_two).collect()


def test_mergers_that_fail_say_so(spread):
    def fail(first, second):
        raise ValueError(f"no good: {first} {second}")

    with pytest.raises(ValueError, match="no good: 0 1"):
        spread([0, 1]).reduce(fail)


@pytest.mark.parametrize(
    "take",
    [
        lambda *given: given[0].collect(given[1]),
        lambda *given: given[0].reduce(operator.add, given[1]),
    ],
)
def test_it_is_told_how_far_a_pass_is(spread, take):
    told = []
    take(spread(range(5)).map(operator.neg), told.append)
    assert told in ([], [0.2, 0.4, 0.6, 0.8, 1.0])
    assert bool(told) == (not isinstance(spread([1]), InMemory))


# One by one


def test_nothing_is_computed_before_it_is_asked_for():
    log = []
    found = one_by_one([1, 2], log)
    found = found.pick([1]).map(operator.neg)
    assert log == []
    assert found.collect() == [-2]
    assert log == [1]


def test_a_value_that_several_need_is_computed_once_a_chunk_and_pass():
    reads, calls = [], []

    def costly(value):
        calls.append(value)
        return value + 1

    base = one_by_one([1, 2, 3], reads).map(costly)
    left, right = base.map(operator.mul, 2), base.map(operator.add, 5)
    found = left.map(lambda *all_of_them: all_of_them, right, base, base)
    assert found.collect() == [(4, 7, 2, 2), (6, 8, 3, 3), (8, 9, 4, 4)]
    assert calls == [1, 2, 3]
    assert reads == [0, 1, 2]
    found.collect()
    assert calls == 2 * [1, 2, 3]


def test_no_chunk_is_held_when_the_next_one_is_read():
    earlier = []

    def read(positions):
        for _ in positions:
            assert all(reference() is None for reference in earlier)
            chunk = np.ones(5)
            earlier.append(weakref.ref(chunk))
            yield chunk
            del chunk

    total = Streamed(read, (0, 1, 2)).map(operator.add, 1).map(np.sum).reduce(operator.add)
    assert total == 30
    assert len(earlier) == 3


def test_what_has_room_is_kept_in_memory():
    reads = []
    found = one_by_one([1, 2], reads).map(operator.neg)
    held = found.persist(size=100, limit=100)
    assert held == InMemory((-1, -2))
    assert held.collect() == held.collect() == [-1, -2]
    assert reads == [0, 1]
    assert found.persist(size=101, limit=100) is found
    assert held.persist(size=1e99) is held


def test_there_is_room_for_a_quarter_of_a_gpu(monkeypatch):
    assert chunks.memory_budget(np.ones(1)) == chunks.KEPT_BYTES
    for free, expected in ((2**30, 2**28), (2**30 + 5, 2**28), (2**30 - 5, 2**27), (0, 1)):
        monkeypatch.setattr(chunks.backend, "gpu_memory", lambda reference, free=free: free)
        assert chunks.memory_budget(np.ones(1)) == expected


# On a cluster


def test_merging_is_done_in_a_tree_on_the_workers(cluster):
    workers = set(cluster.run(os.getpid).values())

    def merge(first, second):
        return f"({first[0]}{second[0]})", first[1] | second[1] | {os.getpid()}

    values = on_cluster(range(10), cluster).map(lambda i: (str(i), set()))
    text, where = values.reduce(merge)
    assert text == "((((((((01)2)3)4)5)6)7)(89))"
    assert where
    assert where <= workers


def test_work_is_done_on_the_workers_with_one_thread_for_blas(cluster):
    def look(_):
        pools = threadpool_info()
        return os.getpid(), {p["num_threads"] for p in pools if p["user_api"] == "blas"}

    with_numpy = on_cluster([np.ones((2, 2))] * 4, cluster).map(lambda a: np.ones((2, 2)) @ a)
    found = with_numpy.map(look).collect()
    assert {pid for pid, _ in found} <= set(cluster.run(os.getpid).values())
    assert all(threads <= {1} for _, threads in found)


class Counted:
    """Large, and tells a file how often it is read."""

    def __init__(self, path):
        self.path, self.packed = path, 0

    def __getstate__(self):
        self.packed += 1
        return {"path": self.path, "packed": 0, "load": bytes(1000)}

    def __setstate__(self, state):
        self.__dict__.update(state)
        with open(self.path, "a") as file:
            file.write("unpacked\n")


@pytest.mark.slow
def test_what_all_chunks_share_travels_once(cluster, tmp_path):
    shared = Counted(tmp_path / "log")
    found = on_cluster(range(20), cluster).map(lambda i, counted: (i, len(counted.load)), shared)
    assert found.collect() == [(i, 1000) for i in range(20)]
    assert shared.packed <= 2
    unpacked = len(shared.path.read_text().split())
    assert unpacked <= 4  # by the scheduler and by each of the workers


def test_intermediate_values_are_computed_once_on_a_cluster_too(cluster, tmp_path):
    log = tmp_path / "log"

    def costly(value):
        with open(log, "a") as file:
            file.write(f"{value}\n")
        return value + 1

    base = on_cluster(range(6), cluster).map(costly)
    found = base.map(operator.neg).map(operator.add, base.map(operator.mul, 2))
    assert found.collect() == [1, 2, 3, 4, 5, 6]
    assert sorted(log.read_text().split()) == [str(i) for i in range(6)]
    held = base.persist(size=1)
    assert held.reduce(operator.add) == held.map(abs).reduce(operator.add) == 21
    assert len(log.read_text().split()) == 12  # once more, to be held
    assert base.persist(size=1e99) is base


def test_work_goes_to_where_large_values_are(cluster):
    """Dask weighs a value before it moves it, and knows nothing of what is in a dataclass."""
    from distributed import wait

    def made(i):
        return Chunk(i, (np.full((400_000,), os.getpid(), dtype=float), None))

    held = on_cluster(range(10), cluster).map(made).persist(size=1)
    wait(cluster.futures_of(list(held.values)))
    weights = cluster.run_on_scheduler(
        lambda dask_scheduler: [task.nbytes for task in dask_scheduler.tasks.values()]
    )
    assert sum(weight >= 3_200_000 for weight in weights) == 10
    found = held.map(lambda chunk: (chunk.arrays[0][0], os.getpid())).collect()
    assert all(made_at == worked_at for made_at, worked_at in found)


@pytest.mark.slow
def test_values_do_not_pile_up_until_the_last_is_there(cluster):
    held = []

    def look(share):
        if round(100 * share) % 20 == 0:
            states = cluster.run_on_scheduler(
                lambda dask_scheduler: [task.state for task in dask_scheduler.tasks.values()]
            )
            held.append(states.count("memory"))

    def slowly(value):
        time.sleep(0.01)
        return -value

    values = on_cluster(range(100), cluster)
    assert values.map(slowly).reduce(operator.add, look) == -4950
    assert len(held) == 5
    assert max(held) < 40


def die_once(value, marker, when):
    """The process is killed, as if by the machine, when the value is met for the first time."""
    if value == when and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return np.float64(value) / 7


@pytest.mark.slow
@pytest.mark.parametrize("holding", [False, True])
def test_a_worker_that_dies_changes_nothing(cluster, tmp_path, holding):
    values = [float(i) for i in range(30)]
    base = on_cluster(values, cluster).map(lambda value: np.sqrt(value))
    base = base.persist(size=1) if holding else base
    expected = base.map(die_once, Path("/"), None).reduce(operator.add)
    marker = tmp_path / "marker"
    found = base.map(die_once, marker, np.sqrt(17.0)).reduce(operator.add)
    assert marker.exists()
    assert found == expected
    cluster.wait_for_workers(2, timeout=30)


def test_a_cluster_without_limits_of_memory_keeps_nothing(cluster, monkeypatch):
    held = on_cluster([1, 2], cluster)
    workers = {"a": {"memory_limit": 1000}, "b": {"memory_limit": None}}
    monkeypatch.setattr(cluster, "scheduler_info", lambda n_workers: {"workers": workers})
    assert held.persist(size=401) is held
    assert held.persist(size=400) is not held


# Nothing is held for nobody


def failing_once(value, marker):
    if not Path(marker).exists():
        Path(marker).touch()
        raise RuntimeError("once")
    return value


@pytest.mark.slow
@pytest.mark.parametrize("take", [lambda one: one.collect(), lambda one: one.reduce(operator.add)])
def test_what_has_failed_is_computed_again_when_it_is_asked_for_again(cluster, tmp_path, take):
    from dask import delayed

    once = delayed(failing_once, pure=True)
    values = tuple(once(i, str(tmp_path / f"tried-{i}")) for i in range(4))
    for i in range(1, 4):
        (tmp_path / f"tried-{i}").touch()
    there = OnCluster(values, cluster)
    with pytest.raises(RuntimeError, match="once") as raised:
        take(there)
    assert happens(lambda: not cluster.futures)  # though somebody has the error
    assert take(there) in ([0, 1, 2, 3], 6)
    assert raised.type is RuntimeError


def happens(what, within=10):
    """Whether something comes true in so many seconds."""
    deadline = time.time() + within
    while not what() and time.time() < deadline:
        time.sleep(0.05)
    return what()


@pytest.mark.slow
def test_an_interruption_leaves_nothing_to_do(cluster):
    from dask import delayed

    def interrupted(_share):
        raise KeyboardInterrupt

    slow = delayed(time.sleep, pure=False)
    there = OnCluster((delayed(abs)(-1), *(slow(0.3) for _ in range(40))), cluster)
    with pytest.raises(KeyboardInterrupt):
        there.reduce(operator.add, interrupted)
    assert happens(lambda: not any(cluster.processing().values()))
