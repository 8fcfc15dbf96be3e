import operator
import os
import pickle
import re
import sys

import numpy as np
import pytest

from onelayer.data import files
from onelayer.data.dask import OnCluster
from onelayer.data.sources import source

pytest.importorskip("dask.array")
RNG = np.random.default_rng(0)
ARRAYS = {
    "X": RNG.standard_normal((20, 3, 2)),
    "Y": RNG.standard_normal((20, 3, 3)).astype("f4"),
    "mask": RNG.random((20, 3)) < 0.5,
}
PER_EXAMPLE = 3 * 2 * 8 + 3 * 3 * 4 + 3


def write(path, arrays, chunks=None):
    """Write arrays in the way of a path's ending."""
    if path.suffix == ".zarr":
        group = pytest.importorskip("zarr").open_group(path, mode="w")
        for name, array in arrays.items():
            rows = {} if chunks is None else {"chunks": (chunks[name], *array.shape[1:])}
            group.create_array(name, data=array, **rows)
    elif path.suffix:
        with pytest.importorskip("h5py").File(path, "w") as file:
            for name, array in arrays.items():
                rows = {} if chunks is None else {"chunks": (chunks[name], *array.shape[1:])}
                file.create_dataset(name, data=array, **rows)
    else:
        path.mkdir()
        for name, array in arrays.items():
            np.save(path / f"{name}.npy", array)


@pytest.fixture(params=["folder", "group.zarr", "file.h5", "file.hdf5"])
def path(request, tmp_path, monkeypatch):
    """The place of the arrays, of which a chunk has six examples and no chunks of its own."""
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", 6 * PER_EXAMPLE + 1)
    chunks = dict.fromkeys(ARRAYS, 1) if request.param == "group.zarr" else None
    write(tmp_path / request.param, ARRAYS, chunks)
    return tmp_path / request.param


def test_arrays_are_what_they_are_in_the_file_and_cut_alike(path):
    found = files.dask_arrays(path)
    assert found.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert found[name].chunks == ((6, 6, 6, 2), *((length,) for length in array.shape[1:]))
        np.testing.assert_array_equal(found[name].compute(), array)
        np.testing.assert_array_equal(found[name][5:7].compute(), array[5:7])


def test_only_names_travel(path):
    lazy = files.dask_arrays(str(path))["X"]
    assert len(pickle.dumps(dict(lazy.dask))) < 5000
    larger = path.with_name(f"larger{path.suffix}")
    write(larger, {"X": np.ones((50, 100, 100))})
    assert len(pickle.dumps(dict(files.dask_arrays(larger)["X"].dask))) < 50_000


@pytest.mark.slow
def test_chunks_are_read_by_the_workers(cluster, path, monkeypatch):
    monkeypatch.chdir(path.parent)  # where the workers are not
    lazy = files.dask_arrays(path.name)
    found = source({name: lazy[name] for name in ("X", "Y", "mask")})
    assert type(found.chunks) is OnCluster
    seen = found.chunks.map(lambda chunk: (chunk.arrays[0].sum(), {os.getpid()}))
    total, where = seen.reduce(lambda one, other: (one[0] + other[0], one[1] | other[1]))
    assert total == pytest.approx(ARRAYS["X"].sum())
    assert where <= set(cluster.run(os.getpid).values())


def test_a_worker_that_does_not_see_the_file_says_so(path):
    """Zarr takes chunks that are not there for zeros."""
    lazy = files.dask_arrays(path)["X"]
    path.rename(path.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError, match=f"no such file or directory on .*: {path}"):
        lazy.compute()
    with pytest.raises(FileNotFoundError, match=f"no such file or directory on .*: {path}"):
        files.dask_arrays(path)


@pytest.mark.parametrize("name", ["group.zarr", "file.h5"])
def test_no_chunk_of_the_largest_array_is_read_twice(tmp_path, monkeypatch, name):
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", 11 * PER_EXAMPLE)
    write(tmp_path / name, ARRAYS, {"X": 4, "Y": 20, "mask": 20})
    assert files.dask_arrays(tmp_path / name)["mask"].chunks[0] == (8, 8, 4)
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", 1)
    assert files.dask_arrays(tmp_path / name)["Y"].chunks[0] == (4, 4, 4, 4, 4)


def test_other_arrays_do_not_change_how_these_are_cut(path):
    more = path.with_name(f"more{path.suffix}")
    write(more, {**ARRAYS, "large": np.ones((2, 10_000)), "number": np.array(3.0)})
    found = files.dask_arrays(more)
    assert found.keys() == {*ARRAYS, "large"}
    if path.suffix != ".zarr":  # which has cut them in its own way
        assert found["X"].chunks[0] == (6, 6, 6, 2)


def test_groups_within_an_hdf5_file_are_passed_over(tmp_path):
    with pytest.importorskip("h5py").File(tmp_path / "file.h5", "w") as file:
        file.create_group("more")["Z"] = np.ones(3)
        file["X"] = np.ones(3)
        file["nothing"] = pytest.importorskip("h5py").Empty("f8")
    assert list(files.dask_arrays(tmp_path / "file.h5")) == ["X"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file.h5", "is not a whole HDF5 file: "),
        ("group.zarr", "is not a Zarr group: "),
        ("folder", "X.npy is not a whole .npy file of a plain array"),
    ],
)
def test_damaged_files_are_refused(tmp_path, name, message):
    path = tmp_path / name
    write(path, ARRAYS)
    if path.is_dir():
        for file in (path / "zarr.json", path / "X.npy"):
            file.write_bytes(b"{")
    else:
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=re.escape(message)):
        files.dask_arrays(path)


def test_a_single_zarr_array_is_refused(tmp_path):
    zarr = pytest.importorskip("zarr")
    zarr.create_array(tmp_path / "X.zarr", shape=(3,), dtype="f8")
    with pytest.raises(ValueError, match=r"X.zarr is not a Zarr group: "):
        files.dask_arrays(tmp_path / "X.zarr")


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        ("file.h5", "h5py", "h5py, which is not installed: pip install h5py"),
        ("group.zarr", "zarr", "zarr, which is not installed: pip install zarr"),
        (
            "folder",
            "dask.array",
            r"dask, which is not installed: pip install 'dask\[array\]'",
        ),
    ],
)
def test_packages_that_are_missing_are_told(tmp_path, monkeypatch, name, missing, message):
    write(tmp_path / name, ARRAYS)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=f"^such files are read with {message}$"):
        files.dask_arrays(tmp_path / name)


def test_arrays_of_a_file_are_a_source(path):
    lazy = files.dask_arrays(path)
    found = source({"X": lazy["X"], "mask": lazy["mask"]})
    total = found.chunks.map(lambda chunk: chunk.arrays[1].sum(axis=0)).reduce(operator.add)
    np.testing.assert_array_equal(total, ARRAYS["mask"].sum(axis=0))


def test_what_changes_after_it_was_opened_is_told(tmp_path):
    folder = tmp_path / "folder"
    write(folder, {"X": np.ones((6, 2)), "Y": np.ones((6, 2))})
    found = files.dask_arrays(folder)
    np.save(folder / "Y.npy", np.ones((4, 2)))
    with pytest.raises(OSError, match=r"Y of .*folder now has shape \(4, 2\) on .*, expected sha"):
        found["Y"].compute()
    (folder / "Y.npy").unlink()
    with pytest.raises(OSError, match=r"Y of .* is gone on .*, expected shape \(6, 2\) as when it"):
        found["Y"].compute()
    np.testing.assert_array_equal(found["X"].compute(), np.ones((6, 2)))


def test_a_file_that_is_no_group_of_arrays_is_refused(tmp_path):
    np.save(tmp_path / "X.npy", np.ones(3))
    with pytest.raises(
        ValueError, match=r"X.npy is a file, expected a folder of .npy files, .zarr"
    ):
        files.dask_arrays(tmp_path / "X.npy")
