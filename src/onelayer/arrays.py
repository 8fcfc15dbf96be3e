"""Array namespaces, devices and dtypes: the only file that knows that backends differ.

Everything else is written against the array API standard: the namespace `xp` comes from the
arrays themselves, so the same code runs on numpy arrays and on torch tensors, on a CPU or a GPU.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from types import ModuleType
from typing import Any, TypeAlias

import array_api_compat
import numpy as np
from threadpoolctl import ThreadpoolController

Array: TypeAlias = Any  # an array of any backend that follows the array API standard

_WORTH_SHARING = 4e7  # floating point operations of one product


def namespace(*arrays: Array) -> ModuleType:
    """The array API namespace of the arrays; `None`s are passed over."""
    xp: ModuleType = array_api_compat.array_namespace(*[a for a in arrays if a is not None])
    return xp


def as_array(value: Any, name: str) -> Array:
    """`value` as an array of its own backend; lists and the like become numpy arrays."""
    if array_api_compat.is_array_api_obj(value):
        return value
    try:
        return np.asarray(value)
    except ValueError as error:
        raise ValueError(f"{name} is a ragged sequence, expected a rectangular array") from error


def as_real(value: Any, name: str) -> Array:
    """`value` as an array of float64, or of float32 where it is already; refuses the rest.

    Integers and Booleans are taken as numbers; complex, text and object arrays are refused, and
    so are NaN and infinite entries.
    """
    array = as_array(value, name)
    if not _is_numeric(array):
        raise TypeError(f"{name} has dtype {array.dtype}, expected real numbers")
    xp = namespace(array)
    if array.dtype != xp.float32:
        array = xp.astype(array, xp.float64, copy=False)
    if array_api_compat.size(array) and not _is_finite(array):
        bad = int(xp.sum(xp.astype(~xp.isfinite(array), xp.int64)))
        raise ValueError(f"{name} has {bad} NaN or infinite entries, expected finite numbers")
    return array


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


def calm_threads(operations: float) -> AbstractContextManager[Any]:
    """One BLAS thread for as long as the context lasts if a product is too small to share.

    A second thread gains nothing on such products, and waits for its turn in a busy loop: on a
    machine with other work that made small recoveries ten times slower.
    """
    if operations > _WORTH_SHARING:
        return nullcontext()
    limits: AbstractContextManager[Any] = _thread_pools().limit(limits=1, user_api="blas")
    return limits


@cache
def _thread_pools() -> ThreadpoolController:
    """Finding the thread pools of a process takes milliseconds: done once."""
    return ThreadpoolController()


def detached(array: Array) -> Array:
    """The array without the graph of operations that torch may keep behind it."""
    return array.detach() if array_api_compat.is_torch_array(array) else array


def to_numpy(array: Array) -> np.ndarray[Any, Any]:
    """The array as a numpy array on the CPU."""
    if array_api_compat.is_torch_array(array):
        array = array.detach().cpu()
    return np.asarray(array)


def like(array: np.ndarray[Any, Any], reference: Array) -> Array:
    """A numpy array in the namespace, on the device and with the dtype of `reference`."""
    xp = namespace(reference)
    return xp.asarray(_plain(array), dtype=reference.dtype, device=device(reference))


def beside(array: Array, reference: Array) -> Array:
    """The array in the namespace and on the device of `reference`, its own dtype kept."""
    if namespace(array) is namespace(reference) and device(array) == device(reference):
        return array
    return namespace(reference).asarray(_plain(array), device=device(reference))


def device(array: Array) -> Any:
    """Where the array lives."""
    return array_api_compat.device(array)


def zeros(shape: tuple[int, ...], reference: Array) -> Array:
    """Zeros with the namespace, device and dtype of `reference`."""
    return namespace(reference).zeros(shape, dtype=reference.dtype, device=device(reference))


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


def squared_norm(array: Array) -> float:
    """The sum of the squares of all entries."""
    return float(namespace(array).sum(array * array))


def _is_numeric(array: Array) -> bool:
    return bool(namespace(array).isdtype(array.dtype, ("bool", "integral", "real floating")))


def _is_finite(array: Array) -> bool:
    """Whether all entries are: NaN and infinity show in the extremes, which take no memory."""
    xp = namespace(array)
    return bool(xp.isfinite(xp.min(array)) & xp.isfinite(xp.max(array)))


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
