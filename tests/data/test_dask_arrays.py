import operator
import os
import re
import signal

import numpy as np
import pytest

from onelayer.data import sources
from onelayer.data.chunks import Streamed
from onelayer.data.dask import OnCluster
from onelayer.data.sources import source

X = np.random.default_rng(0).standard_normal((20, 3, 2))


def total_of(found):
    return found.chunks.map(lambda chunk: chunk.arrays[0].sum(axis=0)).reduce(operator.add)


@pytest.fixture
def da():
    return pytest.importorskip("dask.array")


def test_dask_arrays_are_cut_as_the_first_of_them(da):
    other = da.from_array(X[:, 0], chunks=(3, 1))
    found = source({"w": np.arange(20), "X": da.from_array(X, chunks=(8, 2, 1)), "Y": other})
    assert found.starts.tolist() == [0, 8, 16, 20]
    chunk = found.chunks.collect()[1]
    for array, whole in zip(chunk.arrays, (np.arange(20), X, X[:, 0]), strict=True):
        np.testing.assert_array_equal(array, whole[8:16])


def test_empty_chunks_are_left_out(da):
    lengths = (0, 5, 0, 15, 0)
    found = source({"X": da.from_array(X, chunks=(lengths, 3, 2))})
    assert found.starts.tolist() == [0, 5, 20]
    np.testing.assert_array_equal(found.rows(np.array([4, 5]))[0], X[4:6])
    assert len(source({"X": da.ones((0, 3, 2))})) == 0
    assert len(source({"X": da.ones((4, 0, 2), chunks=2)})) == 4


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda da, x: {"X": x[x[:, 0, 0] > 0]},
            ValueError,
            "X has chunks of unknown size, expected known ones: X.compute_chunk_sizes() finds them",
        ),
        (
            lambda da, x: {"X": x, "Y": x[x[:, 0, 0] > 0]},
            ValueError,
            "Y has chunks of unknown size, expected known ones: Y.compute_chunk_sizes() finds them",
        ),
        (
            lambda da, x: {"X": x, "Y": lambda: [X]},
            TypeError,
            "Y is a function, expected a Dask array as others are",
        ),
        (
            lambda da, x: {"X": x, "Y": x.sum()},
            ValueError,
            "Y is a single value, expected an array of examples",
        ),
        (
            lambda da, x: {"X": x, "Y": x[1:]},
            ValueError,
            "Y has 19 rows, expected 20: one for each example of X",
        ),
    ],
)
def test_dask_arrays_that_cannot_be_cut_are_refused(da, make, error, message):
    given = make(da, da.from_array(X, chunks=6))
    for take in (source, sources.sample, lambda all_of: sources.mapped(len, all_of, (), float)):
        with pytest.raises(error, match=f"^{re.escape(message)}$"):
            take(given)


def test_sizes_that_were_found_will_do(da):
    positive = da.from_array(X, chunks=6)
    positive = positive[positive[:, 0, 0] > 0].compute_chunk_sizes()
    np.testing.assert_allclose(total_of(source({"X": positive})), X[X[:, 0, 0] > 0].sum(axis=0))


def test_without_a_cluster_one_chunk_is_computed_at_a_time(da):
    computed = []

    def load(block):
        computed.append(len(block))
        return block

    lazy = da.from_array(X, chunks=(4, 3, 2)).map_blocks(load, meta=X[:0])
    found = source({"X": lazy, "Y": lazy + 1})
    assert computed == []
    assert type(found.chunks) is Streamed
    seen = []
    each_one = found.chunks.map(lambda chunk: seen.append((chunk.start, len(computed))))
    each_one.collect()
    assert seen == [(0, 1), (4, 2), (8, 3), (12, 4), (16, 5)]  # X is shared by Y


def test_without_a_cluster_means_without_a_client_in_use(da, local_cluster):
    from distributed import Client

    lazy = da.from_array(X, chunks=6)
    with Client(local_cluster) as client:
        assert source({"X": lazy}).chunks.client is client
    assert type(source({"X": lazy}).chunks) is Streamed  # it is closed
    with Client(local_cluster, set_as_default=False) as client:
        assert type(source({"X": lazy}).chunks) is Streamed
        with client.as_current():
            assert type(source({"X": lazy}).chunks) is OnCluster


@pytest.mark.slow
def test_code_on_a_worker_goes_through_dask_arrays_too(da, cluster):
    def there():
        import dask.array

        return total_of(source({"X": dask.array.from_array(X, chunks=(6, 3, 2))}))

    np.testing.assert_allclose(cluster.submit(there).result(timeout=30), X.sum(axis=0))


def test_arrays_in_zarr_and_hdf5_are_read_chunk_by_chunk(da, tmp_path):
    zarr, h5py = pytest.importorskip("zarr"), pytest.importorskip("h5py")
    group = zarr.create_array(tmp_path / "X.zarr", shape=X.shape, chunks=(7, 3, 2), dtype="f8")
    group[:] = X
    with h5py.File(tmp_path / "X.h5", "w") as opened:
        opened.create_dataset("X", data=X, chunks=(7, 3, 2))
        for lazy in (da.from_zarr(tmp_path / "X.zarr"), da.from_array(opened["X"])):
            found = source({"X": lazy.rechunk((7, 3, 2)), "Y": X})
            assert found.starts.tolist() == [0, 7, 14, 20]
            np.testing.assert_allclose(total_of(found), X.sum(axis=0))
            np.testing.assert_array_equal(found.rows(np.array([6, 7]))[0], X[6:8])


@pytest.mark.slow
def test_zarr_is_read_by_the_workers(da, cluster, tmp_path):
    zarr = pytest.importorskip("zarr")
    group = zarr.create_array(tmp_path / "X.zarr", shape=X.shape, chunks=(7, 3, 2), dtype="f8")
    group[:] = X
    found = source({"X": da.from_zarr(tmp_path / "X.zarr")})
    assert type(found.chunks) is OnCluster
    np.testing.assert_allclose(total_of(found), X.sum(axis=0))


def killed_once(block, marker, block_info=None):
    """A block whose worker is killed, as if by the machine, when it is first read."""
    if block_info[None]["chunk-location"][0] == 2 and not os.path.exists(marker):
        open(marker, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    return block


@pytest.mark.slow
@pytest.mark.parametrize("holding", [False, True])
def test_a_worker_that_dies_while_it_reads_changes_nothing(da, cluster, tmp_path, holding):
    plain = da.from_array(X, chunks=(3, 3, 2))
    marker = tmp_path / "marker"
    deadly = plain.map_blocks(killed_once, str(marker), meta=X[:0])
    totals = []
    for lazy in (plain, deadly):
        found = source({"X": lazy, "Y": 2 * lazy})
        held = found.chunks.persist(size=1) if holding else found.chunks
        gram = held.map(lambda chunk: chunk.arrays[0][:, 0].T @ chunk.arrays[1][:, 1])
        totals.append(gram.reduce(operator.add))
    assert marker.exists()
    np.testing.assert_array_equal(*totals)
    cluster.wait_for_workers(2, timeout=30)
