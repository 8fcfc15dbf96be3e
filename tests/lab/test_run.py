import logging
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import lab_fakes
import pytest

from onelayer.lab import pools
from onelayer.lab.claims import known
from onelayer.lab.run import Plan, run
from onelayer.lab.store import Store

TESTS = Path(__file__).parents[1]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "lab.sqlite")


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setattr("onelayer.lab.run.LocalPool", lab_fakes.Threads)


def values(store):
    return {r.parameters["number"]: r.measured.get("value") for r in store.results()}


def test_cells_are_measured_once_and_told(store, threads):
    told = []
    plan = Plan(lab_fakes.claim(lab_fakes.double), "quick")
    final = run([plan], store, workers=2, progress=told.append)
    assert values(store) == {0: 0, 1: 2, 2: 4, 3: 6}
    assert [progress.done for progress in told] == [0, 1, 2, 3, 4]
    assert (final.done, final.failed, final.total, final.claim) == (4, 0, 4, "double")
    before = store.results()
    assert run([plan], store, workers=2).done == 4
    assert store.results() == before
    assert store.last_runs() == {"double": ("quick", {})}


def test_changed_settings_are_other_cells(store, threads):
    fake = lab_fakes.claim(lab_fakes.double)
    run([Plan(fake, "quick", {"number": [1]})], store)
    run([Plan(fake, "quick", {"number": [1, 5], "seeds": 2})], store)
    assert sorted(r.measured["value"] for r in store.results()) == [2, 3, 10, 11]


def test_a_cell_that_two_plans_share_is_one(store, threads):
    fake = lab_fakes.claim(lab_fakes.double, number=[1, 1])
    plans = [Plan(fake, "quick"), Plan(fake, "default", {"number": [1, 2]})]
    assert run(plans, store).total == 2


def test_a_cell_that_raises_is_kept_with_its_error_and_does_not_stop_others(store, threads):
    plan = Plan(lab_fakes.claim(lab_fakes.falter), "quick")
    final = run([plan], store, workers=2)
    assert (final.done, final.failed) == (3, 1)
    (failed,) = [r for r in store.results() if r.status == "failed"]
    assert failed.parameters["number"] == 2
    assert "RuntimeError: two is too much" in failed.error
    assert "in falter" in failed.error
    assert failed.measured == {}
    assert run([plan], store).failed == 1
    assert [r.key for r in store.results()].count(failed.key) == 1
    again = run([plan], store, retry_failed=True)
    (retried,) = [r for r in store.results() if r.status == "failed"]
    assert again.failed == 1
    assert retried.finished >= failed.finished


def test_what_is_no_measurement_is_a_failure_that_says_so(store, threads):
    run([Plan(lab_fakes.claim(lab_fakes.immeasurable, number=[0, 1, 2]), "quick")], store)
    empty, infinite, named = (r.error for r in store.results())
    assert "TypeError: measured {}, expected a dictionary of values by name" in empty
    assert "ValueError: measured [1, inf] for value, expected finite numbers" in infinite
    assert "ValueError: measured {} for value, expected finite numbers" in named


def test_a_cell_that_leaves_or_cannot_be_spelled_is_a_failure(store, threads):
    assert run([Plan(lab_fakes.claim(lab_fakes.leave, number=[0, 1]), "quick")], store).failed == 2
    left, unspelled = (r.error for r in store.results())
    assert "SystemExit: 3" in left
    assert "RuntimeError: no character: \\udcff" in unspelled


class Broken(lab_fakes.Threads):
    """A pool of which a process has died since the last look: a cell cannot be submitted."""

    restarts = 0

    def submit(self, measure, parameters, code):
        if Broken.restarts == 0:
            raise BrokenProcessPool("a process died")
        return super().submit(measure, parameters, code)

    def restart(self):
        Broken.restarts += 1


def test_a_process_that_died_while_nobody_looked_costs_nothing(store, monkeypatch):
    monkeypatch.setattr("onelayer.lab.run.LocalPool", Broken)
    final = run([Plan(lab_fakes.claim(lab_fakes.double), "quick")], store, workers=2)
    assert (final.done, final.failed, Broken.restarts) == (4, 0, 1)


def test_no_more_processes_than_cells(store, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "onelayer.lab.run.LocalPool", lambda n: asked.append(n) or lab_fakes.Threads(n)
    )
    run([Plan(lab_fakes.claim(lab_fakes.double), "quick")], store, workers=1000)
    assert asked == [4]


def test_a_process_that_dies_costs_its_own_cell_only(store):
    final = run([Plan(lab_fakes.claim(lab_fakes.die), "quick")], store, workers=2)
    assert (final.done, final.failed) == (3, 1)
    (failed,) = [r for r in store.results() if r.status == "failed"]
    assert failed.parameters["number"] == 2
    assert "The process that measured this cell died" in failed.error


# Killed, interrupted, side by side


@pytest.fixture
def program():
    """Starts runs as programs of their own, each with its processes in a group that can be killed.

    What still runs when the test is over is killed.
    """
    children = []

    def start(measure, store, log, *numbers):
        arguments = [measure, str(store.path), str(log), *map(str, numbers)]
        child = subprocess.Popen(
            [sys.executable, str(TESTS / "lab_fakes.py"), *arguments],
            start_new_session=True,
            stderr=subprocess.PIPE,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stderr.close()


def measured(log):
    return list(map(int, log.read_text().split())) if log.exists() else []


def finished(store):
    return {r.parameters["number"] for r in store.results()} if store.path.exists() else set()


def intact(store):
    with sqlite3.connect(store.path) as file:
        verdict = file.execute("PRAGMA integrity_check").fetchone()
    file.close()
    return verdict == ("ok",)


def test_killed_again_and_again_nothing_is_lost_repeated_or_corrupt(program, store, tmp_path):
    log, count, kills = tmp_path / "log", 24, 3
    ends = []
    while not ends or ends[-1] != 0:
        before, lines = finished(store), len(measured(log))
        child = program("deadly", store, log, count, kills, 2)
        child.communicate(timeout=120)
        ends.append(child.returncode)
        assert intact(store)
        assert before <= finished(store)
        assert not before & set(measured(log)[lines:]), "a finished cell was measured again"
    assert ends == [-signal.SIGKILL] * (len(ends) - 1) + [0]
    assert len(ends) > kills / 2  # one kill may hit when another is on its way
    assert finished(store) == set(range(count))
    assert taken(store) == []


def test_two_runs_on_one_file_share_the_work(program, store, tmp_path):
    log = tmp_path / "log"
    children = [program("logged", store, log, 30, 0.05, 2) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    assert sorted(measured(log)) == list(range(30))
    assert finished(store) == set(range(30))


def test_a_run_waits_for_what_another_is_at_and_takes_over_when_it_dies(program, store, tmp_path):
    log = tmp_path / "log"
    slow = program("logged", store, log, 1, 60, 1)
    while not store.path.exists() or not taken(store):
        time.sleep(0.05)
    second = program("logged", store, log, 1, 60, 1)
    time.sleep(1.5)
    assert second.poll() is None
    assert len(taken(store)) == 1
    os.killpg(slow.pid, signal.SIGKILL)
    slow.communicate()
    owner = f" {slow.pid} "
    deadline = time.monotonic() + 30
    while owner in taken(store)[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert f" {second.pid} " in taken(store)[0]


def gone(group, within):
    """Whether all processes of a group end within so many seconds."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def taken(store):
    with store._reading() as file:
        return [owner for (owner,) in file.execute("SELECT owner FROM taken")]


def test_an_interrupted_run_leaves_what_is_finished_and_nothing_running(program, store, tmp_path):
    log = tmp_path / "log"
    child = program("logged", store, log, 80, 0.05, 2)
    while len(finished(store)) < 3:
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to all processes of the run
    _, told = child.communicate(timeout=30)
    assert b"KeyboardInterrupt" in told
    assert gone(child.pid, within=10)
    assert intact(store)
    assert taken(store) == []
    assert 3 <= len(finished(store)) < 80


# The same numbers everywhere


@pytest.fixture(scope="module")
def cluster():
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=2, dashboard_address=":0", silence_logs=logging.ERROR
    ) as found:
        yield found


@pytest.fixture(scope="module")
def plan():
    return Plan(known()["expressivity"], "quick", {"heads": [3, 40], "examples": 150, "seeds": 2})


def measurements(plan, path, **how):
    store = Store(path)
    run([plan], store, **how)
    return {r.key: r.measured for r in store.results()}


def test_this_process_two_others_and_a_cluster_give_the_same_bits(
    plan, cluster, tmp_path, monkeypatch
):
    two = measurements(plan, tmp_path / "two.sqlite", workers=2)
    dask = measurements(plan, tmp_path / "dask.sqlite", cluster=cluster.scheduler_address)
    monkeypatch.setattr("onelayer.lab.run.LocalPool", lab_fakes.Threads)
    one = measurements(plan, tmp_path / "one.sqlite", workers=1)
    assert len(one) == 4
    assert one == two == dask


def test_failures_on_a_cluster_are_kept_too(cluster, store):
    final = run(
        [Plan(known()["expressivity"], "quick", {"heads": [0, 3], "examples": 50, "seeds": 1})],
        store,
        cluster=cluster.scheduler_address,
    )
    assert (final.done, final.failed) == (1, 1)
    assert "heads" in next(r.error for r in store.results() if r.status == "failed")


def test_a_cluster_that_loses_all_workers_is_told(store, monkeypatch):
    """The client is the true one's double: it has futures that never end, and no workers."""

    class Deserted(lab_fakes.Threads):
        def submit(self, measure, parameters, code):
            return Future()

        def check(self):
            raise OSError("the cluster has no workers left: what was finished so far is kept")

    monkeypatch.setattr("onelayer.lab.run._HEARTBEAT", 0.01)
    monkeypatch.setattr("onelayer.lab.run.ClusterPool", lambda address: Deserted(1))
    with pytest.raises(OSError, match="the cluster has no workers left"):
        run([Plan(lab_fakes.claim(lab_fakes.double), "quick")], store, cluster="tcp://x:1")
    assert taken(store) == []


def test_a_cluster_is_deserted_after_some_looks(cluster, monkeypatch):
    with pools.ClusterPool(cluster.scheduler_address) as pool:
        pool.check()
        monkeypatch.setattr(pool._client, "nthreads", dict)
        for _ in range(2):
            pool.check()
        with pytest.raises(OSError, match="the cluster has no workers left"):
            pool.check()


def test_a_cell_that_kills_workers_of_a_cluster_is_a_failure_of_its_own(store, monkeypatch):
    class KilledWorker(Exception):
        pass

    class Deadly(lab_fakes.Threads):
        def submit(self, measure, parameters, code):
            if parameters["number"] != 2:
                return super().submit(measure, parameters, code)
            future = Future()
            future.set_exception(KilledWorker())
            return future

    monkeypatch.setattr("onelayer.lab.run.ClusterPool", lambda address: Deadly(2))
    final = run([Plan(lab_fakes.claim(lab_fakes.double), "quick")], store, cluster="tcp://x:1")
    assert (final.done, final.failed) == (3, 1)


def test_a_scheduler_that_does_not_answer_is_told(store, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr("onelayer.data.dask._PATIENCE", 1)
    with pytest.raises(OSError, match=r"no Dask scheduler answers at tcp://127.0.0.1:1: "):
        run([Plan(lab_fakes.claim(lab_fakes.double), "quick")], store, cluster="tcp://127.0.0.1:1")


def test_a_cluster_without_dask_is_told(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r"pip install 'onelayer\[cluster\]'"):
        run([Plan(lab_fakes.claim(lab_fakes.double), "quick")], store, cluster="tcp://x:1")


def test_a_worker_with_other_code_is_refused(store, monkeypatch):
    monkeypatch.setattr(pools, "code_version", lambda measure: "another")
    with pytest.raises(
        OSError, match=r"has another version of onelayer\.lab\.claims\.expressivity"
    ):
        pools.measured(known()["expressivity"].measure, {}, "code")
