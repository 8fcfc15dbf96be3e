"""The same arrays in all the places where examples may live."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

KINDS = ["file", "function", "dask", "cluster"]
_ROWS = 13  # of a block: the last one of most arrays is shorter


def on_disk(array, folder):
    """A file mapped into memory, under a name of its own."""
    path = Path(folder) / f"{len(list(Path(folder).iterdir()))}.npy"
    np.save(path, array)
    return np.load(path, mmap_mode="r")


def by_function(array, rows=_ROWS):
    """A function that gives blocks."""
    return lambda: (array[start : start + rows] for start in range(0, len(array), rows))


def in_dask(array, rows=_ROWS):
    da = pytest.importorskip("dask.array")
    return da.from_array(array, chunks=(rows, *array.shape[1:]))


def place(kind, request):
    """A function that brings arrays to a place of a kind; a file is large at a few kilobytes."""
    if kind == "file":
        folder = request.getfixturevalue("tmp_path")
        patch = request.getfixturevalue("monkeypatch")
        patch.setattr("onelayer.data.chunks.CHUNK_BYTES", 13 * 4 * 3 * 8)
        return lambda array: on_disk(array, folder)
    if kind == "cluster":
        request.getfixturevalue("cluster")
    return by_function if kind == "function" else in_dask


def brought(answer):
    """What is computed lazily, computed."""
    if callable(answer):
        return np.concatenate([np.asarray(block) for block in answer()])
    return np.asarray(answer)


def dying_once(array, marker, loads, rows=_ROWS):
    """A Dask array whose worker is killed, as if by the machine, in the midst of so many loads.

    Every load of a block leaves a file beside the marker, which is there once a worker was killed.
    """
    blocks = in_dask(array, rows)
    return blocks.map_blocks(_loaded, marker=str(marker), loads=loads, dtype=array.dtype)


def _loaded(block, marker, loads):
    folder = Path(marker).parent
    (folder / f"load-{os.getpid()}-{len(list(folder.iterdir()))}").touch()
    if len(list(folder.glob("load-*"))) > loads and not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return block
