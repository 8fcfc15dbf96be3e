import operator
import os
import re
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from onelayer.data import sources
from onelayer.data.chunks import Streamed
from onelayer.data.dask import OnCluster
from onelayer.data.sources import source

X = np.random.default_rng(0).standard_normal((20, 3, 2))


def total_of(found):
    return found.chunks.map(lambda chunk: chunk.arrays[0].sum(axis=0)).reduce(operator.add)


# Files


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The path of a file, large at more than six of its examples."""
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", 6 * X[0].nbytes)
    np.save(tmp_path / "X.npy", X)
    return tmp_path / "X.npy"


def test_files_are_cut_by_the_bytes_of_all_arrays_together(file):
    mapped = np.load(file, mmap_mode="r")
    assert source({"X": mapped}).starts.tolist() == [0, 6, 12, 18, 20]
    assert source({"X": mapped, "Y": X}).starts.tolist() == [0, 3, 6, 9, 12, 15, 18, 20]
    assert source({"X": mapped, "Y": np.ones((20, 10**6))}).starts.tolist() == list(range(21))


def test_chunks_of_a_file_are_copies(file):
    mapped = np.load(file, mmap_mode="r+")
    found = source({"X": mapped})
    (first, *_) = found.chunks.collect()
    mapped[0] = 99.0
    np.testing.assert_array_equal(first.arrays[0], X[:6])
    assert type(first.arrays[0]) is np.ndarray
    assert total_of(found).max() > 90  # the next pass reads anew


def resident(mapped):
    """The bytes of a mapping that are in memory."""
    address = mapped.__array_interface__["data"][0]
    inside = False
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                inside = int(found[1], 16) <= address < int(found[2], 16)
            elif inside and line.startswith("Rss:"):
                return 1024 * int(line.split()[1])
    raise AssertionError("the mapping is not there")


needs_smaps = pytest.mark.skipif(
    not os.path.exists("/proc/self/smaps"), reason="only Linux tells of the pages of a mapping"
)
LARGE = (2000, 16, 16)  # four megabytes


@pytest.fixture(params=["source", "mapped", "beside a function"])
def gone_through(request, monkeypatch):
    """A function that goes through all chunks of a file."""
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", 2**18)

    def work(chunk):
        return chunk.arrays[0][:, 0, 0]

    def go(mapped):
        if request.param == "source":
            return np.concatenate(source({"X": mapped}).chunks.map(work).collect())
        if request.param == "mapped":
            return sources.mapped(work, {"X": mapped}, (), float)
        beside = source({"X": mapped, "Y": lambda: np.split(np.ones(2000), 20)})
        return np.concatenate(beside.chunks.map(work).collect())

    return go


@needs_smaps
@pytest.mark.parametrize("mode", ["r", "r+", "w+"])
def test_pages_of_a_file_are_given_back(tmp_path, gone_through, mode):
    path = tmp_path / "X.npy"
    if mode != "w+":
        np.save(path, np.ones(LARGE))
    mapped = np.lib.format.open_memmap(path, mode=mode, dtype=np.float64, shape=LARGE)
    if mode != "r":
        mapped[:] = 3.0  # written, and perhaps not on disk yet
    assert gone_through(mapped).sum() == 2000 * (1 if mode == "r" else 3)
    assert resident(mapped) < 2**20
    assert mapped.sum() == mapped.size * (1 if mode == "r" else 3)
    assert resident(mapped) > 2**21  # read here, they are not


@needs_smaps
def test_what_was_written_into_a_private_mapping_stays(tmp_path, gone_through):
    np.save(tmp_path / "X.npy", np.ones(LARGE))
    mapped = np.load(tmp_path / "X.npy", mmap_mode="c")
    mapped[:, 0, 0] = 5.0
    assert gone_through(mapped).sum() == 10_000
    assert mapped[:, 0, 0].sum() == 10_000
    assert np.load(tmp_path / "X.npy").max() == 1.0


@needs_smaps
def test_a_pass_over_a_large_file_takes_little_memory(tmp_path):
    """64 MB in chunks of 1 MB: in a process of its own, whose largest size is told at the end."""
    program = """
        import operator, resource, sys
        import numpy as np
        from onelayer.data import chunks, sources
        mapped = np.lib.format.open_memmap(sys.argv[1], "w+", np.float64, (8192, 32, 32))
        mapped[:] = 1.0
        del mapped
        mapped = np.load(sys.argv[1], mmap_mode="r")
        chunks.CHUNK_BYTES = 2**20
        def most():
            with open("/proc/self/status") as lines:
                return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        before = most()
        found = sources.source({"X": mapped})
        total = found.chunks.map(lambda c: c.arrays[0].sum()).reduce(operator.add)
        print(int(total), most() - before)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "X.npy")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    total, kilobytes = map(int, result.stdout.split())
    assert total == 8192 * 32 * 32
    assert kilobytes < 8 * 1024


# Functions


def test_a_function_is_asked_anew_for_every_pass():
    passes = []

    def blocks():
        passes.append(1)
        return iter(np.split(X, 4))

    found = source({"X": blocks})
    before = len(passes)
    np.testing.assert_allclose(total_of(found), X.sum(axis=0))
    np.testing.assert_allclose(total_of(found), X.sum(axis=0))
    assert len(passes) == before + 2


def test_no_more_blocks_are_asked_for_than_are_wanted():
    asked = []

    def blocks():
        for i in range(10):
            asked.append(i)
            yield X[2 * i : 2 * i + 2]

    found = source({"X": blocks})
    asked.clear()
    np.testing.assert_array_equal(found.rows(np.array([1, 5]))[0], X[[1, 5]])
    assert asked == [0, 1, 2]


def test_empty_blocks_are_passed_over():
    found = source({"X": lambda: [X[:0], X[:5], X[5:5], X[5:], X[:0]]})
    assert found.starts.tolist() == [0, 5, 20]
    assert found.samples[0].shape == (1, 3, 2)
    np.testing.assert_array_equal(found.rows(np.array([4, 5, 19]))[0], X[[4, 5, 19]])


def test_functions_give_blocks_side_by_side_with_arrays_and_one_another():
    lists = [part.tolist() for part in np.split(X[:, 0, 0], 5)]
    found = source({"X": lambda: np.split(X, 5), "y": lambda: lists, "w": np.arange(20)})
    chunk = found.chunks.collect()[2]
    np.testing.assert_array_equal(chunk.arrays[0], X[8:12])
    np.testing.assert_array_equal(chunk.arrays[1], X[8:12, 0, 0])
    np.testing.assert_array_equal(chunk.arrays[2], np.arange(8, 12))


def test_blocks_of_tensors_stay_tensors():
    torch = pytest.importorskip("torch")
    weights = torch.ones(2, requires_grad=True)
    found = source({"X": lambda: (torch.tensor(part) * weights for part in np.split(X, 4))})
    (rows,) = found.rows(np.array([3, 17]))
    assert isinstance(rows, torch.Tensor)
    assert not rows.requires_grad
    np.testing.assert_array_equal(rows.numpy(), X[[3, 17]])
    assert isinstance(found.samples[0], torch.Tensor)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"X": lambda: iter([])}, ValueError, "X gives no examples, expected at least one"),
        ({"X": lambda: [X[:0]]}, ValueError, "X gives no examples, expected at least one"),
        (
            {"X": lambda: 3},
            TypeError,
            "X is a function that returns int, expected an iterator over blocks of examples",
        ),
        (
            {"X": lambda: [X, X[:, :2]]},
            ValueError,
            "block 1 of X has examples of shape (2, 2), expected (3, 2) as block 0 has",
        ),
        (
            {"X": lambda: [X, 4.0]},
            ValueError,
            "block 1 of X is a single value, expected an array of examples",
        ),
        (
            {"X": lambda: [[[1, 2], [3]]]},
            ValueError,
            "block 0 of X is a ragged sequence, expected a rectangular array",
        ),
        (
            {"X": lambda: [X, X], "Y": lambda: [X, X[1:]]},
            ValueError,
            "block 1 of Y has 19 rows, expected 20: one for each example of block 1 of X",
        ),
        (
            {"X": lambda: [X, X], "Y": lambda: [X]},
            ValueError,
            "block 1 of Y has 0 rows, expected 20: one for each example of block 1 of X",
        ),
        (
            {"y": np.ones(5), "X": lambda: [X]},
            ValueError,
            "y has 5 rows, expected 20: one for each example of X",
        ),
    ],
)
def test_blocks_that_cannot_be_are_refused(given, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        source(given)


@pytest.mark.parametrize("later", [[X[:10]], [X[:9], X[9:]], [X, X], []])
def test_other_blocks_than_in_the_first_pass_are_refused(later):
    passes = [[X[:10], X[10:]], [X[:10], X[10:]], later]  # the first is only looked into

    def changing():
        return passes.pop(0)

    found = source({"X": changing})
    message = "X gave other blocks than in the first pass, expected the same in every pass"
    with pytest.raises(ValueError, match=f"^{message}$"):
        found.chunks.collect()


def test_what_a_function_raises_is_raised():
    def broken():
        yield X
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        source({"X": broken})


# Dask


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


def test_a_function_may_fill_one_buffer_again_and_again():
    buffer = np.empty((2, 3))

    def refilled():
        for i in range(3):
            buffer[:] = i
            yield buffer

    found = sources.source({"X": refilled})
    parts = found.chunks.collect()
    assert [float(part.arrays[0][0, 0]) for part in parts] == [0.0, 1.0, 2.0]


def test_what_has_a_length_may_be_gone_through_block_by_block():
    data = pytest.importorskip("torch.utils.data")
    torch = pytest.importorskip("torch")
    loader = data.DataLoader(torch.arange(12.0).reshape(6, 2), batch_size=4)
    found = sources.source({"X": loader})
    assert len(found) == 6
    np.testing.assert_array_equal(found.rows(np.array([5]))[0], [[10.0, 11.0]])


def test_a_function_that_returns_an_array_is_refused():
    message = "X is a function that returns ndarray, expected an iterator over blocks of examples"
    with pytest.raises(TypeError, match=message):
        sources.source({"X": lambda: np.eye(3)})


def test_blocks_of_a_function_are_in_memory():
    da = pytest.importorskip("dask.array")
    with pytest.raises(TypeError, match="block 0 of X is a Dask array, expected an array in mem"):
        sources.source({"X": lambda: [da.ones((4, 2))]})
