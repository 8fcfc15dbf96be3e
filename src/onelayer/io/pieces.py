"""Examples that come in pieces of different lengths, joined in memory or in files.

Shorter examples are padded with zeros to the longest, and a mask says so.
"""

from __future__ import annotations

import os
import secrets
import shutil
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, TypeAlias

import numpy as np

from onelayer.array.backend import NumpyArray
from onelayer.data import files

Examples: TypeAlias = tuple[NumpyArray, NumpyArray, NumpyArray | None]  # X, Y and the mask

_HEADER = 256  # bytes of a .npy file before its entries, enough for any three axes
_MAGIC = np.lib.format.magic(1, 0)


class PiecesInMemory:
    """Pieces in a list."""

    def __init__(self) -> None:
        self.parts: list[Examples] = []
        self.examples = 0

    def append(self, X: NumpyArray, Y: NumpyArray, mask: NumpyArray | None) -> None:
        X, Y, there = _whole(X, Y, mask)
        self.parts.append((X, Y, there))
        self.examples += len(X)

    def joined(self) -> Examples:
        longest = max(X.shape[1] for X, _, _ in self.parts)
        arrays = zip(*self.parts, strict=True)
        padded = ([_padded(one, longest) for one in array] for array in arrays)
        X, Y, mask = (np.concatenate(arrays) for arrays in padded)
        return X, Y, None if mask.all() else mask


class InFolder:
    """Pieces in the files X.npy, Y.npy and mask.npy of a folder.

    They are written to a hidden folder beside it, which takes its name once all of them are on
    disk: after Ctrl-C or on a full disk there are all examples or none. Entries are written, not
    mapped into memory, so that a full disk raises an OSError.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        _check_folder(self.folder)
        self.examples = 0
        self.shapes: list[tuple[int, int]] = []  # examples and tokens of every piece
        self.padded = False
        self.files: dict[str, _Growing] = {}

    def __enter__(self) -> InFolder:
        self.temporary = self.folder.parent / f".{self.folder.name}.{secrets.token_hex(8)}"
        self.temporary.mkdir()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self.files.values():
            with suppress(OSError):  # what is left in the buffer may find the disk full, too
                file.close()
        shutil.rmtree(self.temporary, ignore_errors=True)  # gone already if all went well

    def append(self, X: NumpyArray, Y: NumpyArray, mask: NumpyArray | None) -> None:
        X, Y, there = _whole(X, Y, mask)
        for name, array in (("X", X), ("Y", Y), ("mask", there)):
            if name not in self.files:
                self.files[name] = _Growing(self.temporary / f"{name}.npy", array)
            self.files[name].append(array)
        self.shapes.append((X.shape[0], X.shape[1]))
        self.padded = self.padded or not there.all()
        self.examples += len(X)

    def joined(self) -> Examples:
        longest = max(tokens for _, tokens in self.shapes)
        ragged = any(tokens != longest for _, tokens in self.shapes)
        if not (ragged or self.padded):
            self.files.pop("mask").remove()
        for name, file in list(self.files.items()):
            if ragged:
                self.files[name] = file = file.rewritten(self.shapes, longest)
            file.finish(self.examples, longest)
        if self.folder.exists():
            self.folder.rmdir()  # it is empty
        os.rename(self.temporary, self.folder)
        X, Y = (files.open_npy(self.folder / f"{name}.npy") for name in "XY")
        mask = self.folder / "mask.npy"
        return X, Y, np.load(mask) if mask.exists() else None


class _Growing:
    """A .npy file to which rows are appended; its header is written last."""

    def __init__(self, path: Path, like: NumpyArray) -> None:
        self.path, self.dtype, self.rest = path, like.dtype, like.shape[2:]
        self.file: IO[bytes] = open(path, "x+b")  # noqa: SIM115 - closed by `close`
        self.file.write(bytes(_HEADER))

    def append(self, array: NumpyArray) -> None:
        self.file.write(np.ascontiguousarray(array, self.dtype).data)

    def rewritten(self, shapes: list[tuple[int, int]], longest: int) -> _Growing:
        """The same pieces padded to one length in a new file, in place of this one."""
        to = _Growing(self.path.with_suffix(".padded"), np.empty((0, 0, *self.rest), self.dtype))
        try:
            for piece in self._pieces(shapes):
                to.append(_padded(piece, longest))
        except BaseException:
            to.close()
            raise
        self.close()
        os.replace(to.path, self.path)
        return to

    def _pieces(self, shapes: list[tuple[int, int]]) -> Iterator[NumpyArray]:
        self.file.seek(_HEADER)
        for shape in shapes:
            whole = (*shape, *self.rest)
            data = self.file.read(int(np.prod(whole)) * self.dtype.itemsize)
            yield np.frombuffer(data, self.dtype).reshape(whole)

    def finish(self, examples: int, tokens: int) -> None:
        """Write the header, and wait until all bytes are on disk."""
        self.file.seek(0)
        self.file.write(_header(self.dtype, (examples, tokens, *self.rest)))
        self.file.flush()
        os.fsync(self.file.fileno())
        self.close()

    def remove(self) -> None:
        self.close()
        self.path.unlink()

    def close(self) -> None:
        self.file.close()


def _header(dtype: Any, shape: tuple[int, ...]) -> bytes:
    """The header of a .npy file, of a fixed size: the format allows any number of spaces."""
    described = {
        "descr": np.lib.format.dtype_to_descr(dtype),
        "fortran_order": False,
        "shape": shape,
    }
    size = _HEADER - len(_MAGIC) - 2
    text = repr(described).ljust(size - 1) + "\n"
    return _MAGIC + struct.pack("<H", size) + text.encode("ascii")


def _whole(
    X: NumpyArray, Y: NumpyArray, mask: NumpyArray | None
) -> tuple[NumpyArray, NumpyArray, NumpyArray]:
    """A piece with a mask, and zeros in place of padding, whose entries may be anything."""
    if Y.shape[:2] != X.shape[:2]:
        raise ValueError(
            f"the outputs have shape {Y.shape} where the inputs have {X.shape}, "
            "expected one output row per token"
        )
    if mask is None:
        return X, Y, np.ones(X.shape[:2], bool)
    there = mask[:, :, None]
    return np.where(there, X, X.dtype.type(0)), np.where(there, Y, Y.dtype.type(0)), mask


def _padded(array: NumpyArray, tokens: int) -> NumpyArray:
    """The array with zeros, or False, after the last token."""
    more = tokens - array.shape[1]
    if more == 0:
        return array
    return np.pad(array, [(0, 0), (0, more)] + [(0, 0)] * (array.ndim - 2))


def _check_folder(folder: Path) -> None:
    """Refuse a place at which the folder could not appear, before anything is computed."""
    if not folder.parent.is_dir():
        raise FileNotFoundError(f"{folder.parent} does not exist, expected an existing folder")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, expected a new or empty folder")
    if folder.is_dir() and (held := sorted(file.name for file in folder.iterdir())):
        raise ValueError(f"{folder} holds {held[0]!r}, expected a new or empty folder")
