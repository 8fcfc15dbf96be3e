"""`onelayer recover` on files that are read block by block, and on a cluster."""

import sys

import numpy as np
import pytest
from command_line import assert_refused, run, run_alone, run_and_interrupt, words

from onelayer import AttentionLayer, inputs

distributed = pytest.importorskip("distributed")
LAYER = AttentionLayer.random(heads=2, dim=4)


def in_folder(path, arrays):
    path.mkdir()
    for name, array in arrays.items():
        np.save(path / f"{name}.npy", array)


def in_zarr(path, arrays):
    group = pytest.importorskip("zarr").open_group(path, mode="w")
    for name, array in arrays.items():
        group.create_array(name, data=array, chunks=(25, *array.shape[1:]))


def in_hdf5(path, arrays):
    with pytest.importorskip("h5py").File(path, "w") as file:
        for name, array in arrays.items():
            file[name] = array


WRITERS = {"folder": in_folder, "group.zarr": in_zarr, "file.h5": in_hdf5, "file.hdf5": in_hdf5}


@pytest.fixture
def examples():
    X = inputs.boolean(150, 3, 4, seed=1)
    mask = np.ones((150, 3), dtype=bool)
    mask[::3, 1] = False
    return {"X": X, "Y": LAYER(X, mask=mask), "mask": mask}


@pytest.fixture(params=WRITERS)
def file(request, tmp_path, examples, monkeypatch):
    """Examples in several chunks."""
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", 2**13)
    WRITERS[request.param](tmp_path / request.param, examples)
    return tmp_path / request.param


@pytest.fixture
def output(tmp_path):
    return tmp_path / "layer.safetensors"


@pytest.fixture
def address(local_cluster):
    return local_cluster.scheduler_address


def nobody_is_connected():
    with pytest.raises(ValueError, match="No clients found"):
        distributed.default_client()
    return True


@pytest.mark.slow
def test_examples_are_read_block_by_block(file, output):
    result = run("recover", file, "-o", output, "--heads", 2)
    assert result.exit_code == 0, result.output
    assert AttentionLayer.load(output).distance(LAYER).attention.max() < 1e-9


def test_examples_are_read_by_the_workers_of_a_cluster(file, output, address):
    result = run("recover", file, "-o", output, "--heads", 2, "--cluster", address)
    assert result.exit_code == 0, result.output
    assert "exact" in words(result.stdout)
    assert AttentionLayer.load(output).distance(LAYER).attention.max() < 1e-9
    assert nobody_is_connected()


@pytest.mark.slow
def test_in_a_process_of_its_own(tmp_path, examples, output, address):
    """Without a word on standard error, whatever Dask logs there when a client leaves."""
    in_folder(tmp_path / "folder", examples)
    arguments = ("recover", tmp_path / "folder", "-o", output, "--heads", 2, "--cluster", address)
    result = run_alone(*arguments)
    assert result.stderr == ""
    assert result.returncode == 0
    assert AttentionLayer.load(output).distance(LAYER).attention.max() < 1e-9


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_files_that_workers_cannot_read_in_parts_are_refused(tmp_path, output, address, suffix):
    file = tmp_path / f"examples.{suffix}"
    file.touch()
    assert_refused(
        run("recover", file, "-o", output, "--cluster", address),
        f"{file} cannot be read by the workers of a cluster",
        "expected .zarr, .h5, .hdf5 or a folder",
    )
    assert nobody_is_connected()


def test_without_the_arrays(tmp_path, examples, output, address):
    del examples["Y"]
    for name, write in WRITERS.items():
        write(tmp_path / name, examples)
        for options in ((), ("--cluster", address)):
            assert_refused(
                run("recover", tmp_path / name, "-o", output, *options),
                "holds ['X', 'mask'], expected arrays X and Y",
            )


def test_arrays_that_do_not_fit(tmp_path, examples, output, address):
    in_folder(tmp_path / "folder", {**examples, "Y": examples["Y"][1:]})
    result = run("recover", tmp_path / "folder", "-o", output, "--cluster", address)
    assert_refused(result, "Y has 149", "150")
    examples["X"][77, 0, 0] = np.nan
    in_folder(tmp_path / "other", examples)
    result = run("recover", tmp_path / "other", "-o", output, "--cluster", address)
    assert_refused(result, "X has 1 NaN or infinite entries, expected finite numbers")
    assert nobody_is_connected()


@pytest.mark.parametrize("name", ["group.zarr", "file.h5"])
def test_files_that_are_not_there_or_damaged(tmp_path, output, name):
    path = tmp_path / name
    assert_refused(run("recover", path, "-o", output), "no such file or directory", str(path))
    path.touch()
    kind = "Zarr group" if name == "group.zarr" else "whole HDF5 file"
    assert_refused(run("recover", path, "-o", output), f"{path} is not a {kind}")


@pytest.mark.parametrize(
    ("name", "missing", "install"),
    [
        ("group.zarr", "zarr", "pip install zarr"),
        ("file.h5", "h5py", "pip install h5py"),
        ("file.h5", "dask.array", "dask, which is not installed: pip install 'dask[array]'"),
    ],
)
def test_packages_that_are_missing(tmp_path, output, monkeypatch, name, missing, install):
    (tmp_path / name).touch()
    monkeypatch.setitem(sys.modules, missing, None)
    assert_refused(run("recover", tmp_path / name, "-o", output), install)


def test_a_cluster_without_dask(tmp_path, output, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    assert_refused(
        run("recover", tmp_path, "-o", output, "--cluster", "tcp://x:1"),
        "a cluster needs dask and distributed, which are not installed: "
        "pip install 'dask[array]' distributed",
    )


@pytest.mark.slow
def test_a_scheduler_that_does_not_answer(tmp_path, output, monkeypatch):
    monkeypatch.setattr("onelayer.data.dask._PATIENCE", 1)
    result = run("recover", tmp_path, "-o", output, "--cluster", "tcp://127.0.0.1:1")
    assert_refused(result, "no Dask scheduler answers at tcp://127.0.0.1:1")


def test_a_cluster_without_workers(tmp_path, output):
    with distributed.LocalCluster(n_workers=0, dashboard_address=":0") as deserted:
        result = run("recover", tmp_path, "-o", output, "--cluster", deserted.scheduler_address)
    assert_refused(result, "has no workers, expected at least one")


def test_an_interruption_leaves_the_cluster_to_others(tmp_path, output, cluster):
    X = inputs.gaussian(2000, 4, 8)
    Y = np.random.default_rng(1).standard_normal(X.shape)
    in_folder(tmp_path / "noise", {"X": X, "Y": Y})
    address = cluster.scheduler.address
    options = ("--heads", 4, "--restarts", 10_000, "--cluster", address)
    arguments = ("recover", tmp_path / "noise", "-o", output, *options)
    status, printed, text = run_and_interrupt(b"error", *arguments)
    assert status == 130
    assert printed == b""
    assert "Traceback" not in text
    assert text.endswith("onelayer: interrupted; nothing was written")
    assert not output.exists()
    assert cluster.submit(abs, -3).result(timeout=20) == 3


def test_help_shows_the_cluster():
    text = words(run("recover", "--help").stdout)
    assert "onelayer recover examples.zarr --cluster tcp://scheduler:8786" in text
    assert "--cluster ADDRESS Scheduler of a Dask cluster" in text
