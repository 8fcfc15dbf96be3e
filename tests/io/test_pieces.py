import os
import re

import numpy as np
import pytest

from onelayer.data import chunks
from onelayer.io import pieces


def piece(examples, tokens, seed=0, padded=()):
    """Random examples, and a mask that leaves out some tokens or is None."""
    rng = np.random.default_rng(seed)
    X, Y = rng.standard_normal((examples, tokens, 3)), rng.standard_normal((examples, tokens, 2))
    mask = np.ones((examples, tokens), bool)
    for example, token in padded:
        mask[example, token] = False
    return X.astype("float32"), Y, mask if padded else None


KINDS = {
    "alike": [piece(2, 3), piece(4, 3, seed=1)],
    "padded": [piece(2, 3), piece(2, 3, seed=1, padded=[(0, 2), (1, 0)])],
    "shorter": [piece(2, 4), piece(1, 2, seed=1), piece(3, 3, seed=2, padded=[(1, 2)])],
    "longer": [piece(2, 2), piece(1, 4, seed=1)],
}
every_kind = pytest.mark.parametrize("parts", KINDS.values(), ids=KINDS)


def joined_by_loops(parts):
    """X, Y and the mask, row by row."""
    n, k = sum(len(X) for X, _, _ in parts), max(X.shape[1] for X, _, _ in parts)
    X, Y, mask = np.zeros((n, k, 3), "float32"), np.zeros((n, k, 2)), np.zeros((n, k), bool)
    row = 0
    for tokens, outputs, there in parts:
        for i in range(len(tokens)):
            for token in range(tokens.shape[1]):
                if there is None or there[i, token]:
                    X[row, token], Y[row, token] = tokens[i, token], outputs[i, token]
                    mask[row, token] = True
            row += 1
    return X, Y, mask


def written(folder, parts):
    with pieces.InFolder(folder) as files:
        for part in parts:
            files.append(*part)
        return files.joined()


def assert_joined(found, parts):
    X, Y, mask = joined_by_loops(parts)
    for got, expected in zip(found[:2], (X, Y), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got, expected)
    assert (found[2] is None) == bool(mask.all())
    if found[2] is not None:
        np.testing.assert_array_equal(found[2], mask)


@every_kind
def test_pieces_are_joined_in_memory(parts):
    memory = pieces.PiecesInMemory()
    for part in parts:
        memory.append(*part)
    assert memory.examples == sum(len(X) for X, _, _ in parts)
    assert_joined(memory.joined(), parts)


@every_kind
@pytest.mark.parametrize("exists", [False, True])
def test_pieces_are_joined_in_files(tmp_path, parts, exists):
    folder = tmp_path / "examples"
    if exists:
        folder.mkdir()
    found = written(folder, parts)
    assert_joined(found, parts)
    assert isinstance(found[0], np.memmap)
    names = ["X.npy", "Y.npy"] + ["mask.npy"] * (found[2] is not None)
    assert sorted(os.listdir(folder)) == names
    assert_joined([np.load(folder / f"{name}.npy") for name in "XY"] + [found[2]], parts)
    assert os.listdir(tmp_path) == ["examples"]


def test_entries_of_padding_become_zeros_even_if_they_are_no_numbers():
    X, Y, mask = piece(2, 3, padded=[(1, 2)])
    Y[1, 2] = np.nan
    memory = pieces.PiecesInMemory()
    memory.append(X, Y, mask)
    assert_joined(memory.joined(), [(X, Y, mask)])


def test_outputs_with_other_rows_are_refused():
    X, Y, _ = piece(2, 3)
    message = "the outputs have shape (2, 2, 2) where the inputs have (2, 3, 3), expected one"
    with pytest.raises(ValueError, match=re.escape(message)):
        pieces.PiecesInMemory().append(X, Y[:, :2], None)


@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "replace", "rename"])
def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch, step, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        written(tmp_path / "examples", KINDS["longer"])
    assert os.listdir(tmp_path) == []


def test_an_interruption_between_pieces_leaves_nothing(tmp_path):
    def parts():
        yield piece(2, 3)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        written(tmp_path / "examples", parts())
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_of_the_system(tmp_path, monkeypatch):
    def opened(*_):
        return open("/dev/full", "w+b")

    monkeypatch.setattr(pieces, "open", opened, raising=False)
    with pytest.raises(OSError, match="No space left on device"):
        written(tmp_path / "examples", [piece(20_000, 3)])
    assert os.listdir(tmp_path) == []


def test_places_at_which_no_folder_can_appear_are_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(ValueError, match="file is a file, expected a new or empty folder"):
        pieces.InFolder(file)
    with pytest.raises(ValueError, match="holds 'file', expected a new or empty folder"):
        pieces.InFolder(tmp_path)
    with pytest.raises(FileNotFoundError, match="missing does not exist, expected an existing"):
        pieces.InFolder(tmp_path / "missing" / "examples")


def test_large_files_are_read_in_chunks_afterwards(tmp_path, monkeypatch):
    from onelayer.data import sources

    X, Y, _ = written(tmp_path / "examples", [piece(50, 3)])
    assert not sources.is_streamed(X)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 100)
    assert sources.is_streamed(X)
    assert sources.is_streamed(Y)
