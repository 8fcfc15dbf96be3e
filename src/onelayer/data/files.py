"""Arrays in files as Dask arrays, whose chunks are read by whoever works on them.

Only names of files travel to a cluster. Its machines must see the files under the same path.
"""

from __future__ import annotations

import importlib
import math
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onelayer.data import sources

HDF5 = (".h5", ".hdf5")
ZARR = ".zarr"


def dask_arrays(path: str | Path) -> dict[str, Any]:
    """All arrays by their names: of a folder of .npy files, a .zarr group or an HDF5 file.

    Arrays of the same length are cut alike along the first axis, into chunks that have
    `sources.CHUNK_BYTES` all together.

        arrays = onelayer.files.dask_arrays("examples.h5")
        found = onelayer.recover(arrays["X"], arrays["Y"], heads=4)
    """
    da = _needed("dask.array", "'onelayer[cluster]'")
    path = Path(path).absolute()  # workers may be in another folder
    with _opened(path) as all_of_them:
        found = {name: array for name, array in all_of_them.items() if array.shape}
        return {
            name: da.from_array(
                _InFile(path, name, array.shape, array.dtype),
                chunks=(_rows(array, found), *array.shape[1:]),
                name=False,  # not one made from all that is in the array
            )
            for name, array in found.items()
        }


def open_npy(path: Path) -> np.ndarray[Any, Any]:
    """An array that stays on disk."""
    try:
        found: np.ndarray[Any, Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a whole .npy file of a plain array") from error
    return found


@dataclass(frozen=True)
class _InFile:
    """An array in a file that is opened anew for every part that is read, so that it can travel."""

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
    """The arrays of a file by their names; of a folder those that are asked for."""
    if not path.exists():  # Zarr would read zeros
        raise FileNotFoundError(f"no such file or directory on {platform.node()}: {path}")
    if path.suffix in HDF5:
        h5py = _needed("h5py")
        with _hdf5_file(h5py, path) as file:
            yield {name: one for name, one in file.items() if isinstance(one, h5py.Dataset)}
    elif path.suffix == ZARR:
        yield _zarr_arrays(path)
    elif path.is_dir():
        yield {file.stem: open_npy(file) for file in sorted(path.glob(f"{only}.npy"))}
    else:
        raise ValueError(f"{path} is a file, expected a folder of .npy files, .zarr, .h5 or .hdf5")


def _hdf5_file(h5py: Any, path: Path) -> Any:
    try:
        return h5py.File(path)
    except OSError as error:
        raise ValueError(f"{path} is not a whole HDF5 file: {error}") from error


def _zarr_arrays(path: Path) -> dict[str, Any]:
    try:
        return dict(_needed("zarr").open_group(path, mode="r").arrays())
    except (OSError, ValueError, TypeError, KeyError) as error:  # as the metadata may be damaged
        raise ValueError(f"{path} is not a Zarr group: {error}") from error


def _needed(module: str, install: str | None = None) -> Any:
    """A module that is not required to be there."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package, _, _ = module.partition(".")
        raise ImportError(
            f"such files are read with {package}, which is not installed: "
            f"pip install {install or package}"
        ) from error


def _rows(array: Any, together: Mapping[str, Any]) -> int:
    """Rows of a chunk: of the largest array, whole chunks of the file, lest they be read twice."""
    alike = [one for one in together.values() if one.shape[0] == array.shape[0]]
    per_row = [math.prod(one.shape[1:]) * one.dtype.itemsize for one in alike]
    stored = getattr(alike[int(np.argmax(per_row))], "chunks", None) or (1,)
    return int(max(1, sources.CHUNK_BYTES // max(1, sum(per_row)) // stored[0]) * stored[0])
