import sys
import time

import pytest

from onelayer.data import dask as clusters

distributed = pytest.importorskip("distributed")


def in_use():
    try:
        return distributed.default_client()
    except ValueError:
        return None


def test_a_cluster_is_in_use_while_the_context_lasts(local_cluster):
    with clusters.connected(local_cluster.scheduler_address):
        assert in_use().submit(abs, -3).result() == 3
    assert in_use() is None


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_it_is_left_whatever_happens(local_cluster, error):
    with pytest.raises(error), clusters.connected(local_cluster.scheduler_address):
        raise error
    assert in_use() is None


def test_workers_that_die_again_and_again_are_told(local_cluster, monkeypatch):
    address = local_cluster.scheduler_address
    worker = type("Worker", (), {"address": "tcp://x:1"})
    with (
        pytest.raises(
            OSError, match=f"the Dask cluster at {address} gave up: Attempted to run task 'a' on 4"
        ),
        clusters.connected(address),
    ):
        raise distributed.KilledWorker("a", worker, 3)


def cancelled_work():
    future = in_use().submit(abs, -3)
    future.cancel()
    future.result()


def test_a_scheduler_that_goes_away_is_told():
    with distributed.LocalCluster(n_workers=1, processes=False, dashboard_address=":0") as own:
        address = own.scheduler_address
        with pytest.raises(OSError, match=f"at {address} gave up: "), clusters.connected(address):
            cancelled_work()


@pytest.mark.slow
def test_a_scheduler_that_does_not_answer_is_told(monkeypatch):
    monkeypatch.setattr(clusters, "_PATIENCE", 1)
    with pytest.raises(OSError, match=r"no Dask scheduler answers at tcp://127.0.0.1:1: "):
        clusters.connect("tcp://127.0.0.1:1")


@pytest.mark.parametrize("address", ["nonsense", "carrier-pigeon://here", ""])
def test_an_address_that_is_none_is_told(monkeypatch, address):
    monkeypatch.setattr(clusters, "_PATIENCE", 1)
    with pytest.raises(OSError, match=f"no Dask scheduler answers at {address}: "):
        clusters.connect(address)
    assert in_use() is None


def test_a_cluster_without_workers_is_told():
    with distributed.LocalCluster(n_workers=0, dashboard_address=":0") as deserted:
        address = deserted.scheduler_address
        with pytest.raises(
            OSError, match=f"the Dask cluster at {address} has no workers, expected at least one"
        ):
            clusters.connect(address)
        assert in_use() is None


def test_a_cluster_without_dask_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    message = (
        "a cluster needs dask and distributed, which are not installed: "
        r"pip install 'dask\[array\]' distributed"
    )
    with pytest.raises(ImportError, match=f"^{message}$"):
        clusters.connect("tcp://x:1")


@pytest.mark.parametrize("address", ["nonsense", ""])
def test_an_address_without_a_port_is_refused_at_once(address):
    started = time.monotonic()
    with pytest.raises(
        OSError, match=f"no Dask scheduler answers at {address}: missing port number"
    ):
        clusters.connect(address)
    assert time.monotonic() - started < 1
