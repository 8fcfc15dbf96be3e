import json
import os
import pickle
import stat
import struct

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import example, given
from hypothesis import strategies as st
from stored_layers import assert_same, random_layer

from onelayer import AttentionLayer, inputs
from onelayer.array.backend import to_numpy

NOT_WHOLE = r"is not a whole safetensors file \(damaged, cut short or of another format\)"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "layer.safetensors"


@pytest.fixture(scope="session")
def scratch(tmp_path_factory):
    """One path for all examples of a hypothesis test."""
    return tmp_path_factory.mktemp("scratch") / "layer.safetensors"


def raw_file(header, data=b""):
    """The bytes of a safetensors file with this header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def saved_bytes(path, **options):
    random_layer(**options).save(path)
    return path.read_bytes()


# Files


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_saved_layer_comes_back_the_same(xp_array, path, bias, dtype):
    layer = random_layer(bias=bias).to(xp_array(np.ones(1, dtype=dtype)))
    layer.save(str(path))
    loaded = AttentionLayer.load(str(path))
    assert_same(loaded, layer)
    assert {array.dtype.name for array in loaded.arrays().values()} == {dtype}


def test_loaded_layer_works_on_every_backend(xp_array, path):
    layer = random_layer().to(np.ones(1, dtype=np.float32))
    layer.save(path)
    X = inputs.gaussian(2, 3, 3).astype(np.float32)
    result = AttentionLayer.load(path)(xp_array(X))
    np.testing.assert_allclose(to_numpy(result), layer(X), rtol=1e-5, atol=1e-6)


def test_views_are_saved_in_their_own_order(path):
    layer = random_layer(bias=False)
    turned = AttentionLayer(layer.attention.swapaxes(1, 2), layer.projection[:, ::-1])
    turned.save(path)
    assert_same(AttentionLayer.load(path), turned)


def test_saved_file_is_an_ordinary_one(path, tmp_path):
    random_layer().save(path)
    (tmp_path / "other").write_bytes(b"")
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE((tmp_path / "other").stat().st_mode)
    assert safetensors.numpy.load_file(path).keys() == random_layer().arrays().keys()


def test_saving_again_replaces_the_file(path):
    random_layer(seed=1).save(path)
    random_layer(seed=2).save(path)
    assert_same(AttentionLayer.load(path), random_layer(seed=2))
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize("step", ["fsync", "replace"])
@pytest.mark.parametrize("error", [OSError("no space left on device"), KeyboardInterrupt()])
def test_interrupted_write_leaves_the_old_file_whole(path, monkeypatch, step, error):
    before = saved_bytes(path, seed=1)

    def fail(*_):
        raise error

    monkeypatch.setattr(os, step, fail)
    with pytest.raises(type(error)):
        random_layer(seed=2).save(path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.slow
def test_file_cut_short_anywhere_is_refused(path):
    whole = saved_bytes(path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=NOT_WHOLE) as caught:
            AttentionLayer.load(path)
        assert type(caught.value) is ValueError
        assert str(path) in str(caught.value)


@given(data=st.binary(max_size=300))
@example(data=b"")
@example(data=b"\xff" * 64)
@example(data=struct.pack("<Q", 100_000) + b"[" * 100_000)
def test_random_bytes_are_refused(scratch, data):
    scratch.write_bytes(data)
    with pytest.raises(ValueError, match=NOT_WHOLE) as caught:
        AttentionLayer.load(scratch)
    assert type(caught.value) is ValueError


@given(data=st.data())
def test_damaged_file_is_refused_or_still_a_layer(scratch, data):
    damaged = bytearray(saved_bytes(scratch))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    scratch.write_bytes(damaged)
    try:
        layer = AttentionLayer.load(scratch)
    except ValueError as error:
        assert str(scratch) in str(error)  # noqa: PT017  either outcome is right
    else:
        assert all(np.all(np.isfinite(array)) for array in layer.arrays().values())


@pytest.mark.parametrize("shape", [[0, 2**63], [0, 2**62], [2**40, 2**40], [1] * 70])
def test_shapes_that_numpy_cannot_hold_are_refused(path, shape):
    size = 8 if len(shape) == 70 else 0
    entry = {"dtype": "F64", "shape": shape, "data_offsets": [0, size]}
    path.write_bytes(raw_file({"attention": entry}, bytes(size)))
    with pytest.raises(ValueError, match=NOT_WHOLE):
        AttentionLayer.load(path)


def test_dtype_that_numpy_lacks_is_named(path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({"attention": torch.ones(1, 2, 2, dtype=torch.bfloat16)}, path)
    with pytest.raises(ValueError, match="holds arrays of dtype 'BF16', expected one that numpy"):
        AttentionLayer.load(path)


@pytest.mark.parametrize(
    "names", [[], ["attention"], ["weight", "bias"], ["attention", "projection", "extra"]]
)
def test_foreign_safetensors_file_is_refused(path, names):
    safetensors.numpy.save_file({name: np.ones((1, 1, 1)) for name in names}, path)
    message = r"is not a onelayer file: it holds \[.*\], expected 'attention' and 'projection'"
    with pytest.raises(ValueError, match=message):
        AttentionLayer.load(path)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (np.ones((2, 2)), r"attention has shape \(2, 2\), expected \(heads, dim, dim\)"),
        (np.full((1, 2, 2), np.nan), "attention has 4 NaN or infinite entries, expected finite"),
        (np.ones((1, 2, 2), dtype=np.complex64), "attention has dtype complex64, expected real"),
    ],
)
def test_file_with_weights_that_make_no_layer_is_refused(path, attention, message):
    safetensors.numpy.save_file({"attention": attention, "projection": np.ones((1, 2, 2))}, path)
    with pytest.raises(ValueError, match="does not hold a valid layer: " + message) as caught:
        AttentionLayer.load(path)
    assert str(path) in str(caught.value)


class Intruder:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_pickle_is_refused_and_not_run(path, tmp_path):
    path.write_bytes(pickle.dumps(Intruder(tmp_path / "made")))
    with pytest.raises(ValueError, match=NOT_WHOLE):
        AttentionLayer.load(path)
    assert os.listdir(tmp_path) == [path.name]


def test_missing_file_or_folder_is_not_found(path):
    with pytest.raises(FileNotFoundError, match=path.name):
        AttentionLayer.load(path)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        random_layer().save(path.parent / "nowhere" / path.name)


# Modules
