import subprocess
import sys

import numpy as np
import pytest

from onelayer import arrays


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def test_namespace_is_that_of_the_arrays_and_passes_over_none(xp_array):
    array = xp_array(numbers(2))
    xp = arrays.namespace(None, array, None)
    assert type(xp.zeros(1)) is type(array)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bool", "float64"), ("int8", "float64"), ("int64", "float64"), ("uint8", "float64"),
     ("float32", "float32"), ("float64", "float64")],
)  # fmt: skip
def test_real_numbers_keep_float32_and_become_float64_otherwise(xp_array, dtype, expected):
    values = np.array([[0, 1], [1, 0]]).astype(dtype)
    array = arrays.as_real(xp_array(values), "X")
    assert array.dtype == getattr(arrays.namespace(array), expected)
    np.testing.assert_array_equal(arrays.to_numpy(array), [[0.0, 1.0], [1.0, 0.0]])


def test_half_precision_becomes_float64():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float16, torch.bfloat16):
        assert arrays.as_real(torch.ones(2, dtype=dtype), "X").dtype == torch.float64


def test_numbers_that_fit_are_not_copied(xp_array):
    array = xp_array(numbers(2, 3))
    assert np.shares_memory(arrays.to_numpy(arrays.as_real(array, "X")), arrays.to_numpy(array))


def test_empty_and_single_numbers_are_real():
    assert arrays.as_real([], "X").shape == (0,)
    assert arrays.as_real(3, "X") == 3.0
    assert arrays.as_real(np.float64(3), "X") == 3.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entries_that_are_not_finite_are_counted(xp_array, bad, dtype):
    values = np.ones((2, 3), dtype=dtype)
    values[0, 1] = values[1, 2] = bad
    with pytest.raises(ValueError, match="Y has 2 NaN or infinite entries, expected finite number"):
        arrays.as_real(xp_array(values), "Y")


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.ones(2, dtype=complex), "complex128"),
        (["a", "b"], "<U1"),
        ([b"ab"], r"\|S2"),
        ([None, 1.0], "object"),
        (np.array(["2020-01-01"], dtype="datetime64[D]"), r"datetime64\[D\]"),
    ],
)
def test_what_is_no_number_is_refused(value, dtype):
    with pytest.raises(TypeError, match=f"X has dtype {dtype}, expected real numbers"):
        arrays.as_real(value, "X")
    with pytest.raises(TypeError, match=f"mask has dtype {dtype}, expected Booleans"):
        arrays.as_boolean(value, "mask")


def test_complex_arrays_are_refused_on_every_backend(xp_array):
    with pytest.raises(TypeError, match=r"X has dtype .*complex128, expected real numbers"):
        arrays.as_real(xp_array(np.ones(2, dtype=complex)), "X")


def test_ragged_lists_are_refused():
    with pytest.raises(ValueError, match="X is a ragged sequence, expected a rectangular array"):
        arrays.as_array([[1, 2], [3]], "X")


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32", "float64"])
def test_zeros_and_ones_are_booleans(xp_array, dtype):
    array = arrays.as_boolean(xp_array(np.array([0, 1, 1]).astype(dtype)), "mask")
    assert array.dtype == arrays.namespace(array).bool
    assert arrays.to_numpy(array).tolist() == [False, True, True]


@pytest.mark.parametrize("bad", [2.0, 0.5, np.nan])
def test_other_numbers_are_no_booleans(xp_array, bad):
    with pytest.raises(ValueError, match="mask has entries other than 0 and 1, expected Booleans"):
        arrays.as_boolean(xp_array(np.array([0.0, 1.0, bad])), "mask")


@pytest.mark.parametrize("device", [None, "cpu"])
def test_arrays_on_the_cpu_stay_as_they_are(xp_array, device):
    array = xp_array(numbers(2))
    assert arrays.place(array, device) is array


def test_numpy_arrays_become_tensors_where_torch_is_asked_for():
    torch = pytest.importorskip("torch")
    values = numbers(3)[::-1]
    values.flags.writeable = False
    tensor = arrays.place(values, "cpu:0")
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), values)


def test_known_devices_pass():
    pytest.importorskip("torch")
    assert arrays.check_device(None) is arrays.check_device("cpu") is None


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_gpu_that_is_not_there_is_refused(monkeypatch, device):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    message = f"device='{device}' was asked for, but torch sees no such GPU here"
    with pytest.raises(ValueError, match=message):
        arrays.check_device(device)
    with pytest.raises(ValueError, match=message):
        arrays.place(numbers(2), device)


def test_number_of_the_gpu_is_checked(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    arrays.check_device("cuda:1")
    with pytest.raises(ValueError, match="device='cuda:2' was asked for"):
        arrays.check_device("cuda:2")


@pytest.mark.parametrize("device", ["nonsense", "meta", "mps", 1.5])
def test_unknown_devices_are_refused(device):
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match=f"device={device!r} is unknown, expected 'cpu' or 'cuda'"):
        arrays.check_device(device)


def test_device_without_torch_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"device='cuda' needs torch.*pip install onelayer\[torch"):
        arrays.check_device("cuda")


def test_import_does_not_need_torch():
    code = "import sys, onelayer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tensors_that_want_gradients_become_numpy():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, requires_grad=True)
    assert arrays.to_numpy(tensor).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_new_arrays_are_like_their_reference(xp_array, dtype):
    reference = xp_array(np.ones(1, dtype=dtype))
    values = numbers(3, 2)[::-1]
    made = {
        "like": (arrays.like(values, reference), values.astype(dtype)),
        "zeros": (arrays.zeros((3, 2), reference), np.zeros((3, 2))),
        "ones": (arrays.ones((3, 2), reference), np.ones((3, 2))),
    }
    for array, expected in made.values():
        assert arrays.namespace(array) is arrays.namespace(reference)
        assert array.dtype == reference.dtype
        assert arrays.device(array) == arrays.device(reference)
        np.testing.assert_array_equal(arrays.to_numpy(array), expected)


def test_beside_moves_an_array_and_keeps_its_dtype(xp_array):
    reference = xp_array(numbers(1))
    values = np.array([True, False])[::-1]
    moved = arrays.beside(values, reference)
    assert arrays.namespace(moved) is arrays.namespace(reference)
    assert arrays.to_numpy(moved).dtype == bool
    assert arrays.to_numpy(moved).tolist() == [False, True]
    assert arrays.beside(moved, reference) is moved


def test_read_only_arrays_move_to_every_backend(xp_array):
    values = numbers(3)
    values.flags.writeable = False
    moved = arrays.beside(values, xp_array(numbers(1)))
    np.testing.assert_array_equal(arrays.to_numpy(moved), values)


def test_transpose_exchanges_the_last_two_axes(xp_array):
    values = numbers(2, 3, 4)
    transposed = arrays.to_numpy(arrays.transpose(xp_array(values)))
    np.testing.assert_array_equal(transposed, np.swapaxes(values, 1, 2))


def test_precisions(xp_array):
    array = xp_array(numbers(3))
    xp = arrays.namespace(array)
    low = arrays.single(array)
    assert low.dtype == xp.float32
    assert arrays.double(low).dtype == xp.float64
    assert arrays.epsilon(low) == np.finfo(np.float32).eps
    assert arrays.epsilon(array) == np.finfo(np.float64).eps


def test_squared_norm_is_the_sum_of_squares(xp_array):
    value = arrays.squared_norm(xp_array(np.array([[3.0, 4.0], [0.0, 12.0]])))
    assert isinstance(value, float)
    assert value == 169.0
