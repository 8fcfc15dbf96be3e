"""Examples in files: large .npy files mapped into memory, and files as Dask arrays.

A file mapped into memory is read chunk by chunk if it is large (`LargeFiles`). `dask_arrays` opens
folders of .npy files, Zarr groups and HDF5 files as Dask arrays; only the names of the files are
sent to a cluster, and its machines must see them under the same path.
"""

from __future__ import annotations

import importlib
import math
import mmap
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array, NumpyArray
from onelayer.data import chunks
from onelayer.data.chunks import Chunk, Streamed
from onelayer.data.storage import Positions, Shape, Storage, Work, common_length

HDF5 = (".h5", ".hdf5")
ZARR = ".zarr"


class LargeFiles(Storage):
    """Files mapped into memory, too large to be read at once, and arrays of the same length."""

    @staticmethod
    def recognises(value: object) -> bool:
        return (
            isinstance(value, np.memmap) and value.ndim == 3 and value.nbytes > chunks.CHUNK_BYTES
        )

    def chunks(self) -> tuple[Streamed[Chunk], Positions]:
        starts = self._starts()
        return Streamed(partial(self._read, starts), tuple(range(len(starts) - 1))), starts

    def mapped(self, work: Work, row_shape: Shape, dtype: Any) -> np.ndarray[Any, Any]:
        starts = self._starts()
        outputs = np.empty((int(starts[-1]), *row_shape), dtype)
        for chunk in self._read(starts, range(len(starts) - 1)):
            outputs[chunk.start : chunk.start + len(chunk)] = backend.to_numpy(work(chunk))
        return outputs

    def _starts(self) -> Positions:
        n = common_length({name: int(array.shape[0]) for name, array in self.given.items()})
        per_example = max(1, sum(backend.to_numpy(one).nbytes for one in self.samples()))
        return np.append(np.arange(0, n, max(1, chunks.CHUNK_BYTES // per_example)), n)

    def _read(self, starts: Positions, positions: Sequence[int]) -> Iterator[Chunk]:
        for i in positions:
            part = slice(int(starts[i]), int(starts[i + 1]))
            yield Chunk(part.start, tuple(read_rows(array, part) for array in self.given.values()))


def read_rows(array: Array, part: slice) -> Array:
    """Some rows of an array; of a file, a copy, after which its pages are released.

    The pages would count as memory of this process until another process needs them. Pages of a
    private mapping (mode "c") hold what the process has written and are kept.
    """
    if not isinstance(array, np.memmap):
        return array[part, ...]
    copy = np.array(array[part, ...])
    pages: Any = getattr(array, "_mmap", None)
    if array.mode != "c" and hasattr(pages, "madvise"):
        pages.madvise(mmap.MADV_DONTNEED)
    return copy


def dask_arrays(path: str | Path) -> dict[str, Any]:
    """Open all arrays of a folder or file as Dask arrays.

    Arrays of the same length are cut alike along the first axis, into chunks that take 64 MB all
    together. Nothing is read before it is needed.

    Parameters
    ----------
    path : str or Path
        A folder of .npy files, a .zarr group, or an HDF5 file (.h5, .hdf5).

    Returns
    -------
    dict of str to dask.array.Array
        The arrays by their names: for .npy files, the file names without the suffix.

    Raises
    ------
    FileNotFoundError
        If there is nothing at the path.
    ImportError
        If dask, h5py or zarr is needed and not installed.
    ValueError
        If the path has none of these formats, or the file is damaged.

    Examples
    --------
    ::

        arrays = onelayer.files.dask_arrays("examples.h5")
        found = onelayer.recover(arrays["X"], arrays["Y"], heads=4)
    """
    da = _needed("dask.array", "'dask[array]'")
    path = Path(path).absolute()  # workers may be in another folder
    with _opened(path) as all_of_them:
        found = {name: array for name, array in all_of_them.items() if array.shape}
        return {
            name: da.from_array(
                _InFile(path, name, array.shape, array.dtype),
                chunks=(_rows(array, found), *array.shape[1:]),
                name=False,  # by default the name is a hash of all entries
            )
            for name, array in found.items()
        }


def open_npy(path: Path) -> NumpyArray:
    """A .npy file, mapped into memory."""
    try:
        return cast(NumpyArray, np.load(path, mmap_mode="r", allow_pickle=False))
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a whole .npy file of a plain array") from error


@dataclass(frozen=True)
class _InFile:
    """An array in a file that is opened for every read, so that it can be sent to workers."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        with _opened(self.path, self.name) as found:
            array = found.get(self.name)
            if array is None or tuple(array.shape) != tuple(self.shape):
                state = "is gone" if array is None else f"now has shape {tuple(array.shape)}"
                raise OSError(
                    f"{self.name} of {self.path} {state} on {platform.node()}, "
                    f"expected shape {tuple(self.shape)} as when it was opened"
                )
            return np.array(array[part])


@contextmanager
def _opened(path: Path, only: str = "*") -> Iterator[Mapping[str, Any]]:
    """The arrays of a file by their names; those of a folder may be restricted by a pattern."""
    if not path.exists():  # Zarr would read zeros
        raise FileNotFoundError(f"no such file or directory on {platform.node()}: {path}")
    if path.suffix in HDF5:
        h5py = _needed("h5py")
        try:
            opened = h5py.File(path)
        except OSError as error:
            raise ValueError(f"{path} is not a whole HDF5 file: {error}") from error
        with opened as file:
            yield {name: one for name, one in file.items() if isinstance(one, h5py.Dataset)}
    elif path.suffix == ZARR:
        zarr = _needed("zarr")
        try:
            arrays = dict(zarr.open_group(path, mode="r").arrays())
        except (OSError, ValueError, TypeError, KeyError) as error:  # the metadata may be damaged
            raise ValueError(f"{path} is not a Zarr group: {error}") from error
        yield arrays
    elif path.is_dir():
        yield {file.stem: open_npy(file) for file in sorted(path.glob(f"{only}.npy"))}
    else:
        raise ValueError(f"{path} is a file, expected a folder of .npy files, .zarr, .h5 or .hdf5")


def _needed(module: str, install: str | None = None) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package, _, _ = module.partition(".")
        raise ImportError(
            f"such files are read with {package}, which is not installed: "
            f"pip install {install or package}"
        ) from error


def _rows(array: Any, together: Mapping[str, Any]) -> int:
    """Rows of a chunk: whole stored chunks of the largest array, so that none is read twice."""
    alike = [one for one in together.values() if one.shape[0] == array.shape[0]]
    per_row = [math.prod(one.shape[1:]) * one.dtype.itemsize for one in alike]
    stored = getattr(alike[int(np.argmax(per_row))], "chunks", None) or (1,)
    return int(max(1, chunks.CHUNK_BYTES // max(1, sum(per_row)) // stored[0]) * stored[0])
