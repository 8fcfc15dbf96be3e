"""Array namespaces, devices and dtypes: where backends are told apart.

Everything else is written against the array API standard: the namespace `xp` comes from the
arrays themselves, so the same code runs on numpy arrays and on torch tensors, on a CPU or a GPU.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any, TypeAlias

import array_api_compat
import numpy as np
import scipy.special

from onelayer.spelling import did_you_mean

Array: TypeAlias = Any  # an array of any backend that follows the array API standard
NumpyArray: TypeAlias = np.ndarray[Any, Any]


def namespace(*arrays: Array) -> ModuleType:
    """The array API namespace of the arrays; `None`s are ignored."""
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


def refuse_masked(value: Any, name: str, hint: str = "") -> None:
    """Refuse numpy masked arrays: their hidden entries would be used."""
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, expected a plain one{hint}")


def as_real(value: Any, name: str) -> Array:
    """`value` as an array of float64, or of float32 if it is that already.

    Complex, text and object arrays, NaN and infinite entries are refused.
    """
    array = as_array(value, name)
    check_real(array, name)
    array = floating(array)
    check_finite(array, name)
    return array


def is_array(value: Any) -> bool:
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
    """Refuse a positive number of NaN and infinite entries."""
    if count:
        raise ValueError(f"{name} has {count} NaN or infinite entries, expected finite numbers")


def is_finite(array: Array) -> bool:
    """Whether all entries are finite, from the extremes, which need no copy."""
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
    return [xp.astype(as_device(value, values[0]), widest, copy=False) for value in values]


def as_boolean(value: Any, name: str) -> Array:
    """`value` as an array of Booleans; zeros and ones of other dtypes are accepted."""
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

    Arrays of other backends become torch tensors on a GPU and are unchanged on the CPU.
    """
    is_tensor = array_api_compat.is_torch_array(array)
    if device is None or (device == "cpu" and not is_tensor):
        return array
    torch = _torch_for(device)
    return array.to(device) if is_tensor else torch.as_tensor(_plain(array), device=device)


def check_device(device: str | None) -> None:
    """Refuse a device that does not exist, before any work is done."""
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


def detached(array: Array) -> Array:
    """The array without the graph of operations that torch may keep behind it."""
    return array.detach() if array_api_compat.is_torch_array(array) else array


def to_numpy(array: Array) -> np.ndarray[Any, Any]:
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
    """The array on a GPU, else in numpy: faster than torch for cheap operations in place."""
    on_gpu = array_api_compat.is_torch_array(array) and array.device.type == "cuda"
    return array if on_gpu else to_numpy(array)


def like(array: Array, reference: Array) -> Array:
    """The array in the namespace, on the device and with the dtype of `reference`."""
    return namespace(reference).astype(as_device(array, reference), reference.dtype, copy=False)


def as_device(array: Array, reference: Array) -> Array:
    """The array in the namespace and on the device of `reference`, its own dtype kept."""
    if namespace(array) is namespace(reference) and device(array) == device(reference):
        return array
    return namespace(reference).asarray(_plain(array), device=device(reference))


def device(array: Array) -> Any:
    return array_api_compat.device(array)


def rows(array: Array, index: NumpyArray) -> Array:
    """The entries along the first axis at positions given in numpy."""
    xp = namespace(array)
    return xp.take(array, xp.asarray(index, device=device(array)), axis=0)


def zeros(shape: tuple[int, ...], reference: Array) -> Array:
    return namespace(reference).zeros(shape, dtype=reference.dtype, device=device(reference))


def empty(shape: tuple[int, ...], reference: Array) -> Array:
    return namespace(reference).empty(shape, dtype=reference.dtype, device=device(reference))


def ones(shape: tuple[int, ...], reference: Array) -> Array:
    return namespace(reference).ones(shape, dtype=reference.dtype, device=device(reference))


def transpose(array: Array) -> Array:
    return namespace(array).matrix_transpose(array)


def single(array: Array) -> Array:
    xp = namespace(array)
    return xp.astype(array, xp.float32, copy=False)


def double(array: Array) -> Array:
    xp = namespace(array)
    return xp.astype(array, xp.float64, copy=False)


def epsilon(array: Array) -> float:
    """The relative spacing of numbers of the array's dtype."""
    return float(namespace(array).finfo(array.dtype).eps)


def itemsize(array: Array) -> int:
    """The bytes of one entry."""
    return int(namespace(array).finfo(array.dtype).bits) // 8


def squared_norm(array: Array) -> float:
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
    return namespace(array).asarray(array, copy=True)


def contiguous(array: Array) -> Array:
    """The array with its last axis innermost in memory, copied only if necessary."""
    is_tensor = array_api_compat.is_torch_array(array)
    return array.contiguous() if is_tensor else np.ascontiguousarray(array)


def clip(array: Array, low: float | None, high: float | None, out: Array | None = None) -> Array:
    """The array between two bounds, in the memory of `out` where that is given."""
    if array_api_compat.is_torch_array(array):
        return namespace(array).clamp(array, low, high, out=out)
    return np.clip(array, low, high, out=out)


def add_scaled(total: Array, factor: float, array: Array, out: Array) -> None:
    """Put total + factor · array into `out`; if that is `total`, the array is overwritten too.

    Torch does it in a single pass through memory, which on a GPU is the whole cost.
    """
    if array_api_compat.is_torch_array(array):
        namespace(array).add(total, array, alpha=factor, out=out)
    else:
        scaled = np.multiply(array, factor, out=array if out is total else out)
        np.add(scaled, total, out=out)


def ndtr(x: Array) -> Array:
    """Φ(x), the distribution function of a standard Gaussian, accurate in its lower tail."""
    if array_api_compat.is_torch_array(x):  # torch's own ndtr has no tail: (1 + erf) / 2
        return 0.5 * namespace(x).special.erfc(-math.sqrt(0.5) * x)
    return scipy.special.ndtr(x)


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
            f"device={device!r} needs torch, which is not installed: pip install torch"
        ) from error
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError):
        wanted = None
    if wanted is None or wanted.type not in ("cpu", "cuda"):
        hint = did_you_mean(device, ["cpu", "cuda"])
        raise ValueError(f"device={device!r} is unknown, expected 'cpu' or 'cuda'{hint}")
    if wanted.type == "cuda" and (wanted.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={device!r} was asked for, but torch sees no such GPU here")
    return torch
