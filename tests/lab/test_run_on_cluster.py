"""Runs on a Dask cluster: the same numbers as on this machine, and workers that die."""

import logging
import sys
from concurrent.futures import Future

import lab_fakes
import pytest

from onelayer.lab import pools
from onelayer.lab.claims import known
from onelayer.lab.run import Plan, run
from onelayer.lab.store import Store


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "lab.sqlite")


@pytest.fixture(scope="module")
def address():
    """A cluster whose workers measure two cells at a time."""
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=2, dashboard_address=":0", silence_logs=logging.ERROR
    ) as cluster:
        yield cluster.scheduler_address


@pytest.fixture(scope="module")
def plan():
    return Plan(known()["expressivity"], "quick", {"heads": [3, 40], "examples": 150, "seeds": 2})


def measurements(plan, path, **how):
    store = Store(path)
    run([plan], store, **how)
    return {r.key: r.measured for r in store.results()}


def test_this_process_two_others_and_a_cluster_give_the_same_bits(
    plan, address, tmp_path, monkeypatch
):
    two = measurements(plan, tmp_path / "two.sqlite", workers=2)
    dask = measurements(plan, tmp_path / "dask.sqlite", cluster=address)
    monkeypatch.setattr("onelayer.lab.run.LocalPool", lab_fakes.Threads)
    one = measurements(plan, tmp_path / "one.sqlite", workers=1)
    assert len(one) == 4
    assert one == two == dask


def test_failures_on_a_cluster_are_kept_too(address, store):
    final = run(
        [Plan(known()["expressivity"], "quick", {"heads": [0, 3], "examples": 50, "seeds": 1})],
        store,
        cluster=address,
    )
    assert (final.done, final.failed) == (1, 1)
    assert "heads" in next(r.error for r in store.results() if r.status == "failed")


def test_a_cluster_that_loses_all_workers_is_told(store, monkeypatch):
    """The client is the true one's double: it has futures that never end, and no workers."""

    class Deserted(lab_fakes.Threads):
        def submit(self, measure, parameters, code):
            return Future()

        def check(self):
            raise OSError("the cluster has no workers left: finished cells are kept")

    monkeypatch.setattr("onelayer.lab.run._HEARTBEAT", 0.01)
    monkeypatch.setattr("onelayer.lab.run.ClusterPool", lambda address: Deserted(1))
    with pytest.raises(OSError, match="the cluster has no workers left"):
        run([Plan(lab_fakes.claim(lab_fakes.double), "quick")], store, cluster="tcp://x:1")
    with store._reading() as file:
        assert file.execute("SELECT * FROM taken").fetchall() == []


def test_a_cluster_is_deserted_after_some_looks(address, monkeypatch):
    with pools.ClusterPool(address) as pool:
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


@pytest.mark.slow
def test_a_scheduler_that_does_not_answer_is_told(store, monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr("onelayer.data.dask._PATIENCE", 1)
    with pytest.raises(OSError, match=r"no Dask scheduler answers at tcp://127.0.0.1:1: "):
        run([Plan(lab_fakes.claim(lab_fakes.double), "quick")], store, cluster="tcp://127.0.0.1:1")


def test_a_cluster_without_dask_is_told(store, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ImportError, match=r"pip install 'dask\[array\]' distributed"):
        run([Plan(lab_fakes.claim(lab_fakes.double), "quick")], store, cluster="tcp://x:1")


def test_a_worker_with_other_code_is_refused(store, monkeypatch):
    monkeypatch.setattr(pools, "code_version", lambda measure: "another")
    with pytest.raises(
        OSError, match=r"has another version of onelayer\.lab\.claims\.expressivity"
    ):
        pools.measured(known()["expressivity"].measure, {}, "code")
