"""Threads of BLAS and the precision of products on a GPU, set for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from threading import Lock
from typing import Any

import array_api_compat
from threadpoolctl import ThreadpoolController

from onelayer.array import backend
from onelayer.array.backend import Array

_WORTH_SHARING = 4e7  # floating point operations of one product


def single_threaded_blas(operations: float) -> AbstractContextManager[Any]:
    """A context with one BLAS thread if a product is too small to be worth sharing.

    A second thread gains nothing on such products and spins while it waits. On a busy machine that
    made small recoveries ten times slower.
    """
    return nullcontext() if operations > _WORTH_SHARING else _ONE_THREAD


class _OneThread:
    """Holds BLAS to one thread until the last holder has left.

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


_ONE_THREAD = _OneThread()  # shared by all Python threads


def blas_threads(reference: Array) -> int:
    """How many threads BLAS may use for products of arrays like this one; 1 outside of numpy."""
    if not array_api_compat.is_numpy_array(reference):
        return 1
    pools = _thread_pools().select(user_api="blas").info()
    return max((int(pool["num_threads"]) for pool in pools), default=1)


@cache
def _thread_pools() -> ThreadpoolController:
    """Finding the thread pools of a process takes milliseconds: done once."""
    return ThreadpoolController()


@contextmanager
def allow_tf32(reference: Array) -> Iterator[None]:
    """Allow float32 products on a GPU with three digits, several times as fast, in a context."""
    if backend.gpu_memory(reference) is None:
        yield
        return
    settings = backend.namespace(reference).backends.cuda.matmul
    recent = hasattr(settings, "fp32_precision")  # torch 2.9 and later
    name = "fp32_precision" if recent else "allow_tf32"
    before = getattr(settings, name)
    setattr(settings, name, "tf32" if recent else True)
    try:
        yield
    finally:
        setattr(settings, name, before)
