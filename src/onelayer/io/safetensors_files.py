"""Safetensors files of layers, read and written whole.

Files that travel are safetensors, never pickle: reading one cannot run code. A layer's file holds
the arrays `attention` and `projection`, and `key_bias` and `output_bias` if the layer has them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from onelayer.array import backend
from onelayer.array.backend import Array

REQUIRED = {"attention", "projection"}
OPTIONAL = {"key_bias", "output_bias"}


def save(named: dict[str, Array], path: str | os.PathLike[str]) -> None:
    """Write arrays to a safetensors file, in one move once all bytes are on disk."""
    tensors = {name: np.ascontiguousarray(backend.to_numpy(a)) for name, a in named.items()}
    data = safetensors.numpy.save(tensors, metadata={"format": "onelayer.AttentionLayer"})
    write_whole(Path(path), data)


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the target and rename: a full disk or Ctrl-C never leaves half a file."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The arrays of a layer file."""
    tensors = read_safetensors(path)
    if not REQUIRED <= tensors.keys() <= REQUIRED | OPTIONAL:
        raise ValueError(
            f"{os.fspath(path)} is not a onelayer file: it holds {sorted(tensors)}, expected "
            "'attention' and 'projection', and 'key_bias' and 'output_bias' at the most"
        )
    return tensors


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Array]:
    """All arrays of a safetensors file; a damaged file is refused with one ValueError."""
    data = Path(path).read_bytes()
    try:
        return dict(safetensors.numpy.load(data))
    except KeyError as error:  # the name of a dtype
        raise _foreign_dtype(path, str(error)) from error
    except (safetensors.SafetensorError, ValueError, TypeError) as error:
        raise _not_whole(path, error) from error


@contextmanager
def opened_safetensors(path: str | os.PathLike[str]) -> Iterator[Any]:
    """A safetensors file from which arrays are read one by one; a damaged one is refused."""
    Path(path).open("rb").close()  # a missing file raises the error of the system
    try:
        with safetensors.safe_open(path, framework="np") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise _not_whole(path, error) from error


def read_one(file: Any, name: str, path: str | os.PathLike[str]) -> Array:
    try:
        return file.get_tensor(name)
    except TypeError as error:
        raise _foreign_dtype(path, repr(file.get_slice(name).get_dtype())) from error


def _not_whole(path: str | os.PathLike[str], error: Exception) -> ValueError:
    return ValueError(
        f"{os.fspath(path)} is not a whole safetensors file (damaged, cut short or of another "
        f"format): {error}"
    )


def _foreign_dtype(path: str | os.PathLike[str], name: str) -> ValueError:
    return ValueError(
        f"{os.fspath(path)} holds arrays of dtype {name}, expected one that numpy has"
    )
