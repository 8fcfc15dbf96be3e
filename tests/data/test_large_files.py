import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest

from onelayer.data import sources
from onelayer.data.sources import source

X = np.random.default_rng(0).standard_normal((20, 3, 2))


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The path of a file, large at more than six of its examples."""
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", 6 * X[0].nbytes)
    np.save(tmp_path / "X.npy", X)
    return tmp_path / "X.npy"


@pytest.mark.slow
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
    read_again = found.chunks.map(lambda chunk: chunk.arrays[0].max()).reduce(max)
    assert read_again > 90


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


@pytest.mark.slow
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
