"""Where cells are measured: processes of this machine, or a Dask cluster."""

from __future__ import annotations

import math
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import version
from threading import Thread
from typing import Any

from onelayer.array import threads
from onelayer.data import dask
from onelayer.lab.claim import Measured, Parameters, Result, Status
from onelayer.lab.values import encodable
from onelayer.lab.version import code_version

Measure = Callable[..., Measured]

_EMPTY_CHECKS = 2  # checks in a row that may find no workers: a cluster may be restarting them
_PARENT_CHECK = 0.5  # seconds between two checks that the parent is alive


class Pool(AbstractContextManager["Pool"]):
    """A context in which cells are measured, `places` of them at a time."""

    places: int
    _executor: Any

    def submit(self, measure: Measure, parameters: Parameters, code: str) -> Future[Result]:
        """Measure a cell. The future raises only if the pool itself fails."""
        cell: Future[Result] = self._executor.submit(measured, measure, dict(parameters), code)
        return cell

    def restart(self) -> None:
        """Replace the processes after one of them has died, unless that happens by itself."""

    def check(self) -> None:
        """Raise if the pool cannot finish any more cells, unless the futures say so."""


class LocalPool(Pool):
    """Processes of this machine, which are killed at the end of the context."""

    def __init__(self, processes: int) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        self.places = processes
        parent = (os.getpid(),)
        self._start = partial(ProcessPoolExecutor, processes, initializer=_prepare, initargs=parent)
        self._executor = self._start()

    def __exit__(self, *raised: object) -> None:
        self._executor.shutdown(wait=True, kill_workers=True)

    def restart(self) -> None:
        self.__exit__()
        self._executor = self._start()


class ClusterPool(Pool):
    """The workers of a Dask cluster, by the address of its scheduler, which restarts them."""

    def __init__(self, address: str) -> None:
        self._client = dask.connect(address)
        self.places: int = sum(self._client.nthreads().values())
        self._executor = self._client.get_executor(pure=False)
        self._empty = 0  # checks in a row that found no workers

    def __exit__(self, *raised: object) -> None:
        self._executor.shutdown(wait=False)  # running cells are abandoned
        self._client.close()

    def check(self) -> None:
        """Raise if this check and the two before it found no workers."""
        self._empty = 0 if self._client.nthreads() else self._empty + 1
        if self._empty > _EMPTY_CHECKS:
            raise OSError("the cluster has no workers left: finished cells are kept")


def measured(measure: Measure, parameters: Parameters, code: str) -> Result:
    """Measure a cell in this process, on one thread: more would change the last bits of a product.

    A measurement that raises, or returns something else than values, gives a failed result. If the
    code here differs from the caller's, this raises, since values would get the wrong key.
    """
    installed = measure.__module__.startswith("onelayer.")  # other code is sent with the cell
    if installed and code_version(measure) != code:
        raise OSError(
            f"{platform.node()} has another version of {measure.__module__} than the machine that "
            "planned the run: install the same onelayer and the same Python on both"
        )
    started = time.perf_counter()
    try:
        with threads.single_threaded_blas(0):
            values, error = _checked(measure(**parameters)), ""
    except (Exception, SystemExit):
        values, error = {}, encodable(traceback.format_exc())
    seconds = time.perf_counter() - started
    status: Status = "failed" if error else "done"
    return Result(parameters, values, seconds, status, error, machine=machine())


def machine() -> str:
    """Describe this machine and its libraries."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("onelayer", "numpy", "scipy"))
    python = f"Python {platform.python_version()}"
    return f"{platform.platform()}, {os.cpu_count()} cores, {python}, {libraries}"


def _checked(values: Any) -> dict[str, Any]:
    """Refuse values that the store could not return unchanged."""
    if not isinstance(values, Mapping) or not values:
        raise TypeError(f"measured {values!r}, expected a dictionary of values by name")
    for name, value in values.items():
        if not _is_plain(value):
            expected = "expected finite numbers, text, None or lists of them"
            raise ValueError(f"measured {value!r} for {name}, {expected}")
    return dict(values)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, bool | int | str)


def _prepare(parent: int) -> None:
    """Leave Ctrl-C, which reaches all processes of a terminal, to the parent, and exit with it.

    A parent that is killed cannot end its processes. Without this they would wait forever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK)
        os._exit(1)

    Thread(target=watch, daemon=True).start()
