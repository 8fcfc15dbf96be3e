"""Array namespaces, devices and dtypes: the only file that knows that backends differ.

Everything else is written against the array API standard: the namespace `xp` comes from the
arrays themselves, so the same code runs on numpy arrays and on torch tensors, on a CPU or a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import Lock
from types import ModuleType
from typing import Any, TypeAlias

import array_api_compat
import numpy as np
import scipy.linalg
import scipy.special
from scipy.linalg import get_blas_funcs, get_lapack_funcs
from threadpoolctl import ThreadpoolController

Array: TypeAlias = Any  # an array of any backend that follows the array API standard

_WORTH_SHARING = 4e7  # floating point operations of one product


def namespace(*arrays: Array) -> ModuleType:
    """The array API namespace of the arrays; `None`s are passed over."""
    xp: ModuleType = array_api_compat.array_namespace(*[a for a in arrays if a is not None])
    return xp


def as_array(value: Any, name: str) -> Array:
    """`value` as an array of its own backend; lists and the like become numpy arrays."""
    refuse_masked(value, name)
    if array_api_compat.is_array_api_obj(value):
        return value
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} is a ragged sequence, expected a rectangular array") from error


def refuse_masked(value: Any, name: str) -> None:
    """Refuse arrays of numpy with entries that are missing: what they hide would count."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, expected a plain one")


def as_real(value: Any, name: str) -> Array:
    """`value` as an array of float64, or of float32 where it is already; refuses the rest.

    Integers and Booleans are taken as numbers; complex, text and object arrays are refused, and
    so are NaN and infinite entries.
    """
    array = as_array(value, name)
    check_real(array, name)
    array = floating(array)
    check_finite(array, name)
    return array


def is_array(value: Any) -> bool:
    """Whether the value is an array of a known backend."""
    return bool(array_api_compat.is_array_api_obj(value))


def is_foreign(value: Any) -> bool:
    """Whether the value is an array of a backend other than numpy."""
    return is_array(value) and not array_api_compat.is_numpy_array(value)


def check_real(array: Array, name: str) -> None:
    """Refuse complex, text and object arrays."""
    if not _is_numeric(array):
        raise TypeError(f"{name} has dtype {array.dtype}, expected real numbers")


def check_finite(array: Array, name: str) -> None:
    """Refuse NaN and infinite entries."""
    refuse_infinite(count_infinite(array), name)


def count_infinite(array: Array) -> int:
    """The number of NaN and infinite entries."""
    xp = namespace(array)
    may_be_infinite = xp.isdtype(array.dtype, "real floating") and array_api_compat.size(array)
    if not may_be_infinite or is_finite(array):
        return 0
    return int(xp.sum(xp.astype(~xp.isfinite(array), xp.int64)))


def refuse_infinite(count: int, name: str) -> None:
    """Refuse so many NaN and infinite entries, unless there are none."""
    if count:
        raise ValueError(f"{name} has {count} NaN or infinite entries, expected finite numbers")


def is_finite(array: Array) -> bool:
    """Whether all entries are: NaN and infinity show in the extremes, which take no memory."""
    xp = namespace(array)
    return bool(xp.isfinite(xp.min(array)) & xp.isfinite(xp.max(array)))


def floating(array: Array) -> Array:
    """The array in float64, or as it is where it is float32."""
    xp = namespace(array)
    return array if array.dtype == xp.float32 else xp.astype(array, xp.float64, copy=False)


def alike(values: list[Array]) -> list[Array]:
    """The arrays in the namespace and on the device of the first, in the widest of their dtypes."""
    xp = namespace(values[0])
    widest = xp.float32 if all(str(v.dtype).endswith("float32") for v in values) else xp.float64
    return [xp.astype(beside(value, values[0]), widest, copy=False) for value in values]


def as_boolean(value: Any, name: str) -> Array:
    """`value` as an array of Booleans; zeros and ones of other dtypes are taken, others refused."""
    array = as_array(value, name)
    if not _is_numeric(array):
        raise TypeError(f"{name} has dtype {array.dtype}, expected Booleans")
    xp = namespace(array)
    if array.dtype == xp.bool:
        return array
    if not bool(xp.all((array == 0) | (array == 1))):
        raise ValueError(f"{name} has entries other than 0 and 1, expected Booleans")
    return array != 0


def place(array: Array, device: str | None) -> Array:
    """The array on `device`: None leaves it where it is, "cpu" or "cuda" moves it.

    What is no torch tensor stays what it is on the CPU and becomes a torch tensor on a GPU.
    """
    is_tensor = array_api_compat.is_torch_array(array)
    if device is None or (device == "cpu" and not is_tensor):
        return array
    torch = _torch_for(device)
    return array.to(device) if is_tensor else torch.as_tensor(_plain(array), device=device)


def check_device(device: str | None) -> None:
    """Refuse a device that is not there, before any work is done."""
    if device is not None and device != "cpu":
        _torch_for(device)


def gpu_memory(reference: Array) -> int | None:
    """The bytes that are free on the GPU where the array lives; None where it lives on none."""
    if not array_api_compat.is_torch_array(reference) or reference.device.type != "cuda":
        return None
    torch = _torch_for(str(reference.device))
    free, _ = torch.cuda.mem_get_info(reference.device)
    held = torch.cuda.memory_reserved(reference.device)  # by torch, for arrays to come
    return int(free + held - torch.cuda.memory_allocated(reference.device))


def calm_threads(operations: float) -> AbstractContextManager[Any]:
    """One BLAS thread for as long as the context lasts if a product is too small to share.

    A second thread gains nothing on such products, and waits for its turn in a busy loop: on a
    machine with other work that made small recoveries ten times slower.
    """
    return nullcontext() if operations > _WORTH_SHARING else _one_thread()


class _OneThread:
    """Holds BLAS to one thread until the last of those who asked for it has left.

    The number of threads belongs to the process: of two Python threads that each set and restored
    it, the later one would restore what the earlier one had set.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._holders = 0
        self._limit: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._holders == 0:
                self._limit = _thread_pools().limit(limits=1, user_api="blas")
            self._holders += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._limit.restore_original_limits()


def blas_threads(reference: Array) -> int:
    """How many threads BLAS may use for products of arrays like this one; 1 outside of numpy."""
    if not array_api_compat.is_numpy_array(reference):
        return 1
    pools = _thread_pools().select(user_api="blas").info()
    return max((int(pool["num_threads"]) for pool in pools), default=1)


@cache
def _one_thread() -> _OneThread:
    """The one for this process."""
    return _OneThread()


@cache
def _thread_pools() -> ThreadpoolController:
    """Finding the thread pools of a process takes milliseconds: done once."""
    return ThreadpoolController()


@contextmanager
def rough_products(reference: Array) -> Iterator[None]:
    """Products of float32 on a GPU may keep three digits only while the context lasts (TF32).

    They are several times as fast. Elsewhere nothing changes.
    """
    if gpu_memory(reference) is None:
        yield
        return
    settings = namespace(reference).backends.cuda.matmul
    recent = hasattr(settings, "fp32_precision")  # torch 2.9 and later
    name = "fp32_precision" if recent else "allow_tf32"
    before = getattr(settings, name)
    setattr(settings, name, "tf32" if recent else True)
    try:
        yield
    finally:
        setattr(settings, name, before)


def detached(array: Array) -> Array:
    """The array without the graph of operations that torch may keep behind it."""
    return array.detach() if array_api_compat.is_torch_array(array) else array


def to_numpy(array: Array) -> np.ndarray[Any, Any]:
    """The array as a numpy array on the CPU."""
    if array_api_compat.is_torch_array(array):
        array = array.detach().cpu()
        if str(array.dtype) == "torch.bfloat16":  # which numpy does not have
            array = array.float()
    elif array_api_compat.is_cupy_array(array):
        array = array.get()
    elif is_array(array) and array_api_compat.is_array_api_strict_namespace(namespace(array)):
        array = array.to_device(namespace(array).Device("CPU_DEVICE"))
    return np.asarray(array)


def gpu_or_numpy(array: Array) -> Array:
    """The array as it is on a GPU, else in numpy: for long chains of cheap operations in place.

    On a CPU numpy is faster at them than torch, whose threads take turns at every one.
    """
    on_gpu = array_api_compat.is_torch_array(array) and array.device.type == "cuda"
    return array if on_gpu else to_numpy(array)


def like(array: Array, reference: Array) -> Array:
    """The array in the namespace, on the device and with the dtype of `reference`."""
    return namespace(reference).astype(beside(array, reference), reference.dtype, copy=False)


def beside(array: Array, reference: Array) -> Array:
    """The array in the namespace and on the device of `reference`, its own dtype kept."""
    if namespace(array) is namespace(reference) and device(array) == device(reference):
        return array
    return namespace(reference).asarray(_plain(array), device=device(reference))


def device(array: Array) -> Any:
    """Where the array lives."""
    return array_api_compat.device(array)


def rows(array: Array, index: np.ndarray[Any, Any]) -> Array:
    """The entries along the first axis at positions given in numpy."""
    xp = namespace(array)
    return xp.take(array, xp.asarray(index, device=device(array)), axis=0)


def zeros(shape: tuple[int, ...], reference: Array) -> Array:
    """Zeros with the namespace, device and dtype of `reference`."""
    return namespace(reference).zeros(shape, dtype=reference.dtype, device=device(reference))


def empty(shape: tuple[int, ...], reference: Array) -> Array:
    """An array with the namespace, device and dtype of `reference`, its entries yet to be set."""
    return namespace(reference).empty(shape, dtype=reference.dtype, device=device(reference))


def ones(shape: tuple[int, ...], reference: Array) -> Array:
    """Ones with the namespace, device and dtype of `reference`."""
    return namespace(reference).ones(shape, dtype=reference.dtype, device=device(reference))


def transpose(array: Array) -> Array:
    """The last two axes exchanged."""
    return namespace(array).matrix_transpose(array)


def single(array: Array) -> Array:
    """The array in float32."""
    xp = namespace(array)
    return xp.astype(array, xp.float32, copy=False)


def double(array: Array) -> Array:
    """The array in float64."""
    xp = namespace(array)
    return xp.astype(array, xp.float64, copy=False)


def epsilon(array: Array) -> float:
    """The relative spacing of numbers of the array's dtype."""
    return float(namespace(array).finfo(array.dtype).eps)


def itemsize(array: Array) -> int:
    """The bytes of one entry."""
    return int(namespace(array).finfo(array.dtype).bits) // 8


def squared_norm(array: Array) -> float:
    """The sum of the squares of all entries."""
    return float(namespace(array).sum(array * array))


def largest(array: Array) -> float:
    """The largest absolute value of an entry, without a copy of the array."""
    xp = namespace(array)
    if array.dtype == xp.bool:
        array = xp.astype(array, xp.int8)
    return max(float(xp.max(array)), -float(xp.min(array)))


def relu(array: Array) -> Array:
    """max(array, 0), in the array's own memory where the backend can."""
    if array_api_compat.is_numpy_array(array):
        return np.maximum(array, 0, out=array)
    if array_api_compat.is_torch_array(array):
        return array.clamp_(min=0)
    return namespace(array).maximum(array, zeros((), array))


def copied(array: Array) -> Array:
    """The same numbers in memory of their own."""
    return namespace(array).asarray(array, copy=True)


def contiguous(array: Array) -> Array:
    """The array with its last axis innermost in memory: itself where it is so already."""
    if array_api_compat.is_torch_array(array):
        return array.contiguous()
    return np.ascontiguousarray(array)


def clip(array: Array, low: float | None, high: float | None, out: Array | None = None) -> Array:
    """The array between two bounds, in the memory of `out` where that is given."""
    if array_api_compat.is_torch_array(array):
        return namespace(array).clamp(array, low, high, out=out)
    return np.clip(array, low, high, out=out)


def add_scaled(total: Array, factor: float, array: Array, out: Array) -> None:
    """Put total + factor · array into `out`; if that is `total`, the array is overwritten too.

    One way through memory where the backend can: it is all that such an operation costs on a GPU.
    """
    if array_api_compat.is_torch_array(array):
        namespace(array).add(total, array, alpha=factor, out=out)
    else:
        scaled = np.multiply(array, factor, out=array if out is total else out)
        np.add(scaled, total, out=out)


def add_gram(total: Array, rows: Array) -> Array:
    """total + rows rowsᵀ, of which only the lower triangle is computed: (m, m) and (m, k).

    The result takes total's memory where it can. What is above the diagonal is not to be read.
    """
    if array_api_compat.is_numpy_array(total):
        (syrk,) = get_blas_funcs(("syrk",), (total,))
        # BLAS thinks in columns: the lower triangle of `total` is the upper one of its transpose.
        factor, transposed = (rows, 0) if rows.flags.f_contiguous else (rows.T, 1)
        return syrk(1.0, factor, beta=1.0, c=total.T, trans=transposed, lower=0, overwrite_c=1).T
    size = total.shape[0]
    for part in _strips(size):  # a strip ends at the diagonal: little more than half is computed
        total[part, : part.stop] += rows[part, :] @ transpose(rows[: part.stop, :])
    return total


def less_outer(matrix: Array, column: Array, row: Array) -> Array:
    """matrix - column rowᵀ, in the matrix's memory."""
    if array_api_compat.is_numpy_array(matrix) and matrix.size > 0:  # BLAS takes none that is empty
        (ger,) = get_blas_funcs(("ger",), (matrix,))
        return ger(-1.0, row, column, a=matrix.T, overwrite_a=1).T
    matrix -= column[:, None] * row[None, :]
    return matrix


def add_to_diagonal(matrix: Array, value: float) -> None:
    """matrix + value · identity, in place."""
    if array_api_compat.is_numpy_array(matrix):
        np.einsum("ii->i", matrix)[:] += value
    elif array_api_compat.is_torch_array(matrix):
        matrix.diagonal().add_(value)
    else:
        size, xp = matrix.shape[0], namespace(matrix)
        matrix += value * xp.eye(size, dtype=matrix.dtype, device=device(matrix))


def cholesky(matrix: Array) -> Array | None:
    """The lower factor of a symmetric matrix given by its lower triangle, in its memory for numpy.

    None if the matrix is not positive definite in its precision. What is above the diagonal is
    not to be read.
    """
    if array_api_compat.is_numpy_array(matrix):
        (potrf,) = get_lapack_funcs(("potrf",), (matrix,))
        upper, info = potrf(matrix.T, lower=0, overwrite_a=1, clean=0)
        return upper.T if info == 0 and np.isfinite(upper[-1, -1]) else None
    if array_api_compat.is_torch_array(matrix):
        torch = namespace(matrix)
        factor, info = torch.linalg.cholesky_ex(matrix)
        return factor if int(info) == 0 else None
    try:
        factor = namespace(matrix).linalg.cholesky(mirrored(matrix))
    except np.linalg.LinAlgError:
        return None
    return factor if math.isfinite(factor[-1, -1]) else None  # not every backend raises


def inverse(matrix: Array) -> Array:
    """The inverse of a symmetric matrix; for numpy in its memory and by its Cholesky factor."""
    if not array_api_compat.is_numpy_array(matrix):
        return symmetrised(namespace(matrix).linalg.inv(matrix))
    diagonal = matrix.diagonal().copy()
    factor = cholesky(matrix)
    if factor is None:  # what is above the diagonal is still there
        np.einsum("ii->i", matrix)[:] = diagonal
        return symmetrised(np.linalg.inv(np.triu(matrix) + np.triu(matrix, k=1).T))
    (potri,) = get_lapack_funcs(("potri",), (matrix,))
    upper, _ = potri(factor.T, lower=0, overwrite_c=1)
    inverted: Array = upper.T
    for strip in _strips(len(inverted)):  # what is above the diagonal is what is below it
        inverted[: strip.start, strip] = inverted[strip, : strip.start].T
        inverted[strip, strip] = mirrored(inverted[strip, strip])
    return inverted


def symmetrised(matrix: Array) -> Array:
    """The mean of a matrix and its transpose."""
    return (matrix + transpose(matrix)) / 2


def solve_lower(lower: Array, right: Array, transposed: bool = False) -> Array:
    """lower⁻¹ right, or lower⁻ᵀ right; only the triangle on and below the diagonal is read."""
    xp = namespace(lower)
    if array_api_compat.is_numpy_array(lower):
        (trsm,) = get_blas_funcs(("trsm",), (lower,))
        return trsm(1.0, lower.T, right, lower=0, trans_a=0 if transposed else 1)
    if array_api_compat.is_torch_array(lower):
        factor = lower.mT if transposed else lower
        return xp.linalg.solve_triangular(factor, right, upper=transposed)
    triangle = xp.tril(lower)
    return xp.linalg.solve(transpose(triangle) if transposed else triangle, right)


def eigh(matrix: Array) -> tuple[Array, Array]:
    """Eigenvalues, ascending, and eigenvectors of a matrix given by its lower triangle.

    NaN throughout where the matrix has overflowed, as products of such a matrix would be.
    """
    xp = namespace(matrix)
    if not bool(xp.all(xp.isfinite(xp.linalg.diagonal(matrix)))):
        return xp.nan * xp.linalg.diagonal(matrix), xp.nan * matrix
    if array_api_compat.is_numpy_array(matrix):
        values, vectors = scipy.linalg.eigh(matrix, lower=True, driver="evd", check_finite=False)
        return values, vectors
    values, vectors = xp.linalg.eigh(mirrored(matrix))
    return values, vectors


def mirrored(matrix: Array) -> Array:
    """The symmetric matrix whose lower triangle is given."""
    xp = namespace(matrix)
    return xp.tril(matrix) + transpose(xp.tril(matrix, k=-1))


def symmetric_product(matrix: Array, vector: Array) -> Array:
    """matrix @ vector, (n,), for a symmetric matrix (n, n) given by its lower triangle."""
    product = zeros(vector.shape, vector)
    for part in _strips(matrix.shape[0]):
        left, diagonal = matrix[part, : part.start], mirrored(matrix[part, part])
        product[part] += left @ vector[: part.start] + diagonal @ vector[part]
        product[: part.start] += transpose(left) @ vector[part]
    return product


def ndtr(x: Array) -> Array:
    """Φ(x), the distribution function of a standard Gaussian, with its tail below right as well."""
    if array_api_compat.is_torch_array(x):  # torch's own ndtr has no tail: (1 + erf) / 2
        return 0.5 * namespace(x).special.erfc(-math.sqrt(0.5) * x)
    return scipy.special.ndtr(x)


def _strips(size: int) -> list[slice]:
    """A range in eight parts or fewer."""
    step = -(-size // 8)
    return [slice(start, min(size, start + step)) for start in range(0, size, step)]


def _is_numeric(array: Array) -> bool:
    return bool(namespace(array).isdtype(array.dtype, ("bool", "integral", "real floating")))


def _plain(array: Array) -> np.ndarray[Any, Any]:
    """A numpy array that torch can share: writable, with no negative strides."""
    return np.require(to_numpy(array), requirements=["C", "W"])


def _torch_for(device: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise ValueError(
            f"device={device!r} needs torch, which is not installed: pip install onelayer[torch]"
        ) from error
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        wanted = None
    if wanted is None or wanted.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device!r} is unknown, expected 'cpu' or 'cuda'")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={device!r} was asked for, but torch sees no such GPU here")
    return torch
