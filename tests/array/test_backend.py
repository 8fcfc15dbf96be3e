import math
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from onelayer.array import backend, linalg, threads


def numbers(*shape):
    return np.random.default_rng(0).standard_normal(shape)


def positive_definite(size):
    """A symmetric matrix of eigenvalues above 1."""
    return numbers(size, size) @ numbers(size, size).T + np.eye(size)


def garbage_above(matrix):
    """The matrix with NaN above its diagonal, where nobody is to look."""
    return np.where(np.tri(len(matrix), dtype=bool), matrix, np.full((1, 1), np.nan, matrix.dtype))


def tolerance(dtype):
    return 1e-12 if dtype == "float64" else 1e-4


each_precision = pytest.mark.parametrize("dtype", ["float32", "float64"])


def test_namespace_is_that_of_the_arrays_and_passes_over_none(xp_array):
    array = xp_array(numbers(2))
    xp = backend.namespace(None, array, None)
    assert type(xp.zeros(1)) is type(array)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("bool", "float64"), ("int8", "float64"), ("int64", "float64"), ("uint8", "float64"),
     ("float32", "float32"), ("float64", "float64")],
)  # fmt: skip
def test_real_numbers_keep_float32_and_become_float64_otherwise(xp_array, dtype, expected):
    values = np.array([[0, 1], [1, 0]]).astype(dtype)
    array = backend.as_real(xp_array(values), "X")
    assert array.dtype == getattr(backend.namespace(array), expected)
    np.testing.assert_array_equal(backend.to_numpy(array), [[0.0, 1.0], [1.0, 0.0]])


def test_half_precision_becomes_float64():
    torch = pytest.importorskip("torch")
    for dtype in (torch.float16, torch.bfloat16):
        assert backend.as_real(torch.ones(2, dtype=dtype), "X").dtype == torch.float64


def test_numbers_that_fit_are_not_copied(xp_array):
    array = xp_array(numbers(2, 3))
    assert np.shares_memory(backend.to_numpy(backend.as_real(array, "X")), backend.to_numpy(array))


def test_empty_and_single_numbers_are_real():
    assert backend.as_real([], "X").shape == (0,)
    assert backend.as_real(3, "X") == 3.0
    assert backend.as_real(np.float64(3), "X") == 3.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_entries_that_are_not_finite_are_counted(xp_array, bad, dtype):
    values = np.ones((2, 3), dtype=dtype)
    values[0, 1] = values[1, 2] = bad
    with pytest.raises(ValueError, match="Y has 2 NaN or infinite entries, expected finite number"):
        backend.as_real(xp_array(values), "Y")


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
        backend.as_real(value, "X")
    with pytest.raises(TypeError, match=f"mask has dtype {dtype}, expected Booleans"):
        backend.as_boolean(value, "mask")


def test_complex_arrays_are_refused_on_every_backend(xp_array):
    with pytest.raises(TypeError, match=r"X has dtype .*complex128, expected real numbers"):
        backend.as_real(xp_array(np.ones(2, dtype=complex)), "X")


def test_ragged_lists_are_refused():
    with pytest.raises(ValueError, match="X is a ragged sequence, expected a rectangular array"):
        backend.as_array([[1, 2], [3]], "X")


@pytest.mark.parametrize("dtype", ["bool", "int64", "float32", "float64"])
def test_zeros_and_ones_are_booleans(xp_array, dtype):
    array = backend.as_boolean(xp_array(np.array([0, 1, 1]).astype(dtype)), "mask")
    assert array.dtype == backend.namespace(array).bool
    assert backend.to_numpy(array).tolist() == [False, True, True]


@pytest.mark.parametrize("bad", [2.0, 0.5, np.nan])
def test_other_numbers_are_no_booleans(xp_array, bad):
    with pytest.raises(ValueError, match="mask has entries other than 0 and 1, expected Booleans"):
        backend.as_boolean(xp_array(np.array([0.0, 1.0, bad])), "mask")


@pytest.mark.parametrize("device", [None, "cpu"])
def test_arrays_on_the_cpu_stay_as_they_are(xp_array, device):
    array = xp_array(numbers(2))
    assert backend.place(array, device) is array


def test_numpy_arrays_become_tensors_where_torch_is_asked_for():
    torch = pytest.importorskip("torch")
    values = numbers(3)[::-1]
    values.flags.writeable = False
    tensor = backend.place(values, "cpu:0")
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), values)


def test_known_devices_pass():
    pytest.importorskip("torch")
    assert backend.check_device(None) is backend.check_device("cpu") is None


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_gpu_that_is_not_there_is_refused(monkeypatch, device):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    message = f"device='{device}' was asked for, but torch sees no such GPU here"
    with pytest.raises(ValueError, match=message):
        backend.check_device(device)
    with pytest.raises(ValueError, match=message):
        backend.place(numbers(2), device)


def test_number_of_the_gpu_is_checked(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    backend.check_device("cuda:1")
    with pytest.raises(ValueError, match="device='cuda:2' was asked for"):
        backend.check_device("cuda:2")


@pytest.mark.parametrize("device", ["nonsense", "meta", "mps", 1.5])
def test_unknown_devices_are_refused(device):
    pytest.importorskip("torch")
    with pytest.raises(ValueError, match=f"device={device!r} is unknown, expected 'cpu' or 'cuda'"):
        backend.check_device(device)


def test_device_without_torch_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"device='cuda' needs torch.*pip install torch$"):
        backend.check_device("cuda")


def test_import_does_not_need_torch():
    code = "import sys, onelayer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tensors_that_want_gradients_become_numpy():
    torch = pytest.importorskip("torch")
    tensor = torch.ones(2, requires_grad=True)
    assert backend.to_numpy(tensor).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_new_arrays_are_like_their_reference(xp_array, dtype):
    reference = xp_array(np.ones(1, dtype=dtype))
    values = numbers(3, 2)[::-1]
    made = {
        "like": (backend.like(values, reference), values.astype(dtype)),
        "zeros": (backend.zeros((3, 2), reference), np.zeros((3, 2))),
        "ones": (backend.ones((3, 2), reference), np.ones((3, 2))),
    }
    for array, expected in made.values():
        assert backend.namespace(array) is backend.namespace(reference)
        assert array.dtype == reference.dtype
        assert backend.device(array) == backend.device(reference)
        np.testing.assert_array_equal(backend.to_numpy(array), expected)


def test_beside_moves_an_array_and_keeps_its_dtype(xp_array):
    reference = xp_array(numbers(1))
    values = np.array([True, False])[::-1]
    moved = backend.as_device(values, reference)
    assert backend.namespace(moved) is backend.namespace(reference)
    assert backend.to_numpy(moved).dtype == bool
    assert backend.to_numpy(moved).tolist() == [False, True]
    assert backend.as_device(moved, reference) is moved


def test_read_only_arrays_move_to_every_backend(xp_array):
    values = numbers(3)
    values.flags.writeable = False
    moved = backend.as_device(values, xp_array(numbers(1)))
    np.testing.assert_array_equal(backend.to_numpy(moved), values)


def test_transpose_exchanges_the_last_two_axes(xp_array):
    values = numbers(2, 3, 4)
    transposed = backend.to_numpy(backend.transpose(xp_array(values)))
    np.testing.assert_array_equal(transposed, np.swapaxes(values, 1, 2))


def test_precisions(xp_array):
    array = xp_array(numbers(3))
    xp = backend.namespace(array)
    low = backend.single(array)
    assert low.dtype == xp.float32
    assert backend.double(low).dtype == xp.float64
    assert backend.epsilon(low) == np.finfo(np.float32).eps
    assert backend.epsilon(array) == np.finfo(np.float64).eps


def test_squared_norm_is_the_sum_of_squares(xp_array):
    value = backend.squared_norm(xp_array(np.array([[3.0, 4.0], [0.0, 12.0]])))
    assert isinstance(value, float)
    assert value == 169.0


def test_arrays_of_known_backends_are_told_from_other_things(xp_array):
    array = xp_array(numbers(2))
    assert backend.is_array(array)
    assert backend.is_foreign(array) is not isinstance(array, np.ndarray)
    for other in ([1.0, 2.0], 1.0, "text", None):
        assert not backend.is_array(other)
        assert not backend.is_foreign(other)


def test_checks_take_real_finite_numbers_as_they_are(xp_array):
    for dtype in ("bool", "int64", "float32", "float64"):
        array = xp_array(np.ones((2, 3), dtype=dtype))
        assert backend.check_real(array, "X") is backend.check_finite(array, "X") is None
    assert backend.check_finite(xp_array(np.ones((0, 3))), "X") is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@each_precision
def test_finiteness_is_checked_without_conversion(xp_array, bad, dtype):
    array = xp_array(np.array([1.0, bad, 2.0], dtype=dtype))
    with pytest.raises(ValueError, match="X has 1 NaN or infinite entries, expected finite number"):
        backend.check_finite(array, "X")
    assert backend.floating(array) is array


def test_half_precision_is_checked_and_becomes_float64():
    values = np.array([1.0, np.inf], dtype=np.float16)
    assert backend.floating(values).dtype == np.float64
    with pytest.raises(ValueError, match="X has 1 NaN or infinite entries"):
        backend.check_finite(values, "X")


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [("float32 float32", "float32"), ("float32 float64", "float64"), ("float64", "float64")],
)
def test_alike_arrays_have_the_widest_dtype_and_the_place_of_the_first(xp_array, dtypes, expected):
    values = [numbers(2).astype(dtype) for dtype in dtypes.split()]
    reference = xp_array(values[0])
    for array, original in zip(backend.alike([reference, *values[1:]]), values, strict=True):
        assert backend.namespace(array) is backend.namespace(reference)
        assert array.dtype == getattr(backend.namespace(reference), expected)
        np.testing.assert_array_equal(backend.to_numpy(array), original)


@each_precision
def test_cast_takes_over_namespace_and_dtype(xp_array, dtype):
    reference = xp_array(np.ones(1, dtype=dtype))
    array = backend.like(numbers(3), reference)
    assert backend.namespace(array) is backend.namespace(reference)
    assert array.dtype == reference.dtype
    np.testing.assert_array_equal(backend.to_numpy(array), numbers(3).astype(dtype))
    assert backend.like(array, reference) is array


def test_arrays_travel_between_devices():
    strict = pytest.importorskip("array_api_strict")
    home, away = strict.asarray(numbers(3)), strict.Device("device1")
    moved = backend.like(home, strict.ones(1, dtype=strict.float32, device=away))
    assert backend.device(moved) == away
    assert moved.dtype == strict.float32
    np.testing.assert_array_equal(backend.to_numpy(moved), numbers(3).astype("float32"))
    assert [backend.device(array) for array in backend.alike([moved, home])] == [away] * 2
    matrix = strict.asarray(np.eye(3), device=away)
    linalg.add_to_diagonal(matrix, 3.0)
    assert backend.device(linalg.cholesky(linalg.add_gram(matrix, matrix))) == away


@each_precision
def test_bytes_of_an_entry(xp_array, dtype):
    assert backend.itemsize(xp_array(np.ones(1, dtype=dtype))) == np.dtype(dtype).itemsize


@each_precision
def test_relu_cuts_off_what_is_negative(xp_array, dtype):
    values = numbers(3, 4).astype(dtype)
    array = backend.relu(xp_array(values.copy()))
    assert backend.to_numpy(array).dtype == dtype
    np.testing.assert_array_equal(backend.to_numpy(array), values * (values > 0))


def test_relu_keeps_what_is_not_a_number(xp_array):
    values = backend.to_numpy(backend.relu(xp_array(np.array([np.nan, np.inf, -np.inf]))))
    np.testing.assert_array_equal(values, [np.nan, np.inf, 0.0])


@pytest.mark.parametrize("order", ["C", "F", "strided"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (20, 4)])
@each_precision
def test_gram_matrices_add_up_below_the_diagonal(xp_array, order, shape, dtype):
    values = numbers(2 * shape[0], shape[1]).astype(dtype)
    rows = values[::2] if order == "strided" else np.array(values[::2], order=order)
    start = positive_definite(shape[0]).astype(dtype)
    total = linalg.add_gram(xp_array(garbage_above(start)), xp_array(rows))
    total = linalg.add_gram(total, xp_array(rows))
    assert backend.to_numpy(total).dtype == dtype
    expected = np.tril(start + 2 * rows @ rows.T)
    found = np.tril(np.nan_to_num(backend.to_numpy(total)))
    np.testing.assert_allclose(found, expected, rtol=tolerance(dtype), atol=tolerance(dtype))


def test_gram_matrices_are_added_in_place(xp_array):
    total = xp_array(np.zeros((3, 3)))
    found = linalg.add_gram(total, xp_array(numbers(3, 2)))
    assert np.shares_memory(backend.to_numpy(found), backend.to_numpy(total))
    np.testing.assert_array_equal(backend.to_numpy(total), backend.to_numpy(found))
    assert np.abs(backend.to_numpy(total)).max() > 0


@pytest.mark.parametrize(
    "total", [np.zeros((3, 3), order="F"), np.zeros((5, 5))[:3, :3], np.zeros((6, 3))[::2]]
)
def test_gram_matrices_are_added_to_totals_of_any_layout(total):
    found = linalg.add_gram(total, numbers(3, 2))
    np.testing.assert_allclose(np.tril(found), np.tril(numbers(3, 2) @ numbers(3, 2).T))


@pytest.mark.parametrize("order", ["C", "F"])
def test_gram_matrices_take_no_copy_of_the_rows(order):
    total, rows = np.zeros((10, 10)), np.array(numbers(10, 2000), order=order)
    tracemalloc.start()
    linalg.add_gram(total, rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < rows.nbytes / 4


@pytest.mark.parametrize("order", ["C", "F"])
@each_precision
def test_diagonals_grow_in_place(xp_array, order, dtype):
    values = np.array(numbers(3, 3), dtype=dtype, order=order)
    matrix = xp_array(values.copy(order=order))
    linalg.add_to_diagonal(matrix, 2.0)
    assert backend.to_numpy(matrix).dtype == dtype
    np.testing.assert_allclose(backend.to_numpy(matrix), values + 2 * np.eye(3), rtol=1e-6)


def test_diagonals_of_leading_blocks_grow():
    matrix = np.zeros((4, 4))
    linalg.add_to_diagonal(matrix[:2, :2], 1.0)
    np.testing.assert_array_equal(matrix, np.diag([1.0, 1.0, 0.0, 0.0]))


@pytest.mark.parametrize("order", ["C", "F"])
@each_precision
def test_cholesky_factor_comes_from_the_lower_triangle(xp_array, order, dtype):
    values = positive_definite(5).astype(dtype)
    lower = linalg.cholesky(xp_array(np.array(garbage_above(values), order=order)))
    assert backend.to_numpy(lower).dtype == dtype
    triangle = np.tril(np.nan_to_num(backend.to_numpy(lower)))
    bound = tolerance(dtype)
    np.testing.assert_allclose(triangle @ triangle.T, values, rtol=bound, atol=bound)
    assert np.diag(triangle).min() > 0


@each_precision
def test_matrices_that_are_not_positive_definite_have_no_factor(xp_array, dtype):
    for values in (np.diag([1.0, -1.0, 1.0]), np.zeros((3, 3)), np.ones((3, 3)) - 2 * np.eye(3)):
        assert linalg.cholesky(xp_array(values.astype(dtype))) is None


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
@each_precision
def test_triangular_systems_are_solved_both_ways(xp_array, transposed, order, dtype):
    lower = (np.tril(numbers(4, 4)) + 4 * np.eye(4)).astype(dtype)
    right = np.array(numbers(4, 3), dtype=dtype, order=order)
    given = xp_array(right.copy(order=order))
    factor = xp_array(np.array(garbage_above(lower), order=order))
    found = linalg.solve_lower(factor, given, transposed=transposed)
    assert backend.to_numpy(found).dtype == dtype
    back = (lower.T if transposed else lower) @ backend.to_numpy(found)
    np.testing.assert_allclose(back, right, rtol=0, atol=tolerance(dtype))
    np.testing.assert_array_equal(backend.to_numpy(given), right)


@each_precision
def test_eigenvectors_come_from_the_lower_triangle(xp_array, dtype):
    values = positive_definite(5).astype(dtype)
    eigenvalues, vectors = linalg.eigh(xp_array(garbage_above(values)))
    eigenvalues, vectors = backend.to_numpy(eigenvalues), backend.to_numpy(vectors)
    assert eigenvalues.dtype == vectors.dtype == dtype
    assert (np.diff(eigenvalues) > 0).all()
    bound = 10 * tolerance(dtype)
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(5), rtol=0, atol=bound)
    np.testing.assert_allclose(vectors * eigenvalues @ vectors.T, values, rtol=0, atol=bound)


def test_mirrored_matrices_are_symmetric(xp_array):
    values = positive_definite(4)
    values = (values + values.T) / 2
    matrix = linalg.mirrored(xp_array(garbage_above(values)))
    np.testing.assert_array_equal(backend.to_numpy(matrix), values)


def test_an_outer_product_is_taken_away_in_place(xp_array):
    matrix, column, row = (np.random.default_rng(0).standard_normal(s) for s in ((4, 3), 4, 3))
    array = xp_array(matrix.copy())
    left = linalg.less_outer(array, xp_array(column), xp_array(row))
    np.testing.assert_allclose(backend.to_numpy(left), matrix - np.outer(column, row), atol=1e-15)
    np.testing.assert_array_equal(backend.to_numpy(array), backend.to_numpy(left))


def test_blas_threads_are_those_of_numpy_only(xp_array):
    reference = xp_array(np.zeros(1))
    with threadpool_limits(limits=1, user_api="blas"):
        assert threads.blas_threads(reference) == 1
    assert threads.blas_threads(reference) >= 1


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([1, -3, 2], "float64", 3.0),
        ([1, -3, 4], "float32", 4.0),
        ([-2, -1], "float64", 2.0),
        ([-127, -128], "int8", 128.0),
        ([3, 255], "uint8", 255.0),
        ([-(2**40), 1], "int64", 2.0**40),
        ([False, True], "bool", 1.0),
        ([False, False], "bool", 0.0),
        ([0, 0], "float64", 0.0),
    ],
)
def test_the_largest_entry_counts_without_its_sign(xp_array, values, dtype, expected):
    largest = backend.largest(xp_array(np.array([values], dtype=dtype)))
    assert largest == expected
    assert type(largest) is float


@pytest.mark.parametrize("dtype", ["float64", "int8"])
def test_the_largest_entry_is_found_without_a_copy(dtype):
    values = np.array(100 * numbers(1000, 100)).astype(dtype)
    backend.largest(values)  # what is imported on first use is no copy
    tracemalloc.start()
    largest = backend.largest(values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert largest == max(abs(float(value)) for value in values.ravel())
    assert peak < values.nbytes / 2


def test_rows_are_those_at_the_positions(xp_array):
    numbers = np.arange(24.0).reshape(4, 3, 2)
    found = backend.rows(xp_array(numbers), np.array([2, 0, 2]))
    assert backend.namespace(found) is backend.namespace(xp_array(numbers))
    np.testing.assert_array_equal(backend.to_numpy(found), numbers[[2, 0, 2]])


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_sums_and_bounds_use_the_memory_they_are_given(name):
    xp = pytest.importorskip(name)
    total, array = numbers(9), numbers(2, 9)[1]
    out = xp.zeros(9, dtype=xp.float64)
    backend.add_scaled(xp.asarray(total), -0.5, xp.asarray(array), out=out)
    np.testing.assert_allclose(out, total - 0.5 * array, rtol=0, atol=1e-15)
    backend.add_scaled(out, 2.0, xp.asarray(array.copy()), out=out)
    expected = total + 1.5 * array
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-15)
    assert backend.clip(out, -0.5, 0.5, out=out) is out
    np.testing.assert_allclose(out, np.clip(expected, -0.5, 0.5), rtol=0, atol=1e-15)
    above = backend.clip(out, 0.0, None)
    np.testing.assert_allclose(above, np.clip(expected, 0, 0.5), rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_contiguous_arrays_have_their_last_axis_innermost(name):
    turned = pytest.importorskip(name).asarray(numbers(3, 4)).T
    found = backend.contiguous(turned)
    np.testing.assert_array_equal(found, turned)
    assert backend.to_numpy(found).flags.c_contiguous
    assert backend.contiguous(found) is found


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_the_distribution_function_has_both_tails(name):
    x = np.array([-35.0, -10.0, -1.0, 0.0, 1e-9, 2.0, 40.0])
    expected = [math.erfc(-value / math.sqrt(2)) / 2 for value in x]
    found = backend.ndtr(pytest.importorskip(name).asarray(x))
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_what_is_on_no_gpu_is_computed_in_numpy(xp_array):
    assert isinstance(backend.gpu_or_numpy(xp_array(numbers(2))), np.ndarray)


# Rough products


def test_products_may_be_rough_while_a_context_lasts_on_a_gpu(monkeypatch):
    torch = pytest.importorskip("torch")
    settings = torch.backends.cuda.matmul
    name = "fp32_precision" if hasattr(settings, "fp32_precision") else "allow_tf32"
    before = getattr(settings, name)
    with threads.allow_tf32(torch.zeros(1)):
        assert getattr(settings, name) == before  # there is no GPU
    monkeypatch.setattr(backend, "gpu_memory", lambda _: 1)
    with threads.allow_tf32(torch.zeros(1)):
        assert getattr(settings, name) in ("tf32", True)
    assert getattr(settings, name) == before


# Inverses


@pytest.mark.parametrize("size", [1, 2, 7, 20])
@pytest.mark.parametrize("definite", [True, False])
def test_inverse_of_a_symmetric_matrix(xp_array, size, definite):
    rng = np.random.default_rng(size)
    root = rng.standard_normal((size, size + 3))
    matrix = root @ root.T
    if not definite:
        matrix -= 2 * np.trace(matrix) / size * np.eye(size)
    found = backend.to_numpy(linalg.inverse(xp_array(matrix.copy())))
    np.testing.assert_allclose(found @ matrix, np.eye(size), atol=1e-9)
    np.testing.assert_allclose(found, found.T, atol=1e-12 * abs(found).max())
