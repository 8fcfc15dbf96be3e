"""Where cells are measured: processes of this machine, or a Dask cluster."""

from __future__ import annotations

import math
import os
import platform
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future
from importlib.metadata import version
from threading import Thread
from typing import Any, Protocol, Self

from onelayer.array import threads
from onelayer.data import dask
from onelayer.lab.claim import Measured, Parameters, Result, Status
from onelayer.lab.version import code_version

Measure = Callable[..., Measured]

_EMPTY_CHECKS = 2  # checks in a row that may find no workers: a cluster may be restarting them
_PARENT_CHECK = 0.5  # seconds between two checks that the parent is alive


class Pool(Protocol):
    """A context in which cells are measured."""

    places: int  # number of cells at the same time

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: Any) -> None: ...

    def submit(self, measure: Measure, parameters: Parameters, code: str) -> Future[Result]:
        """Measure a cell. The future raises only if the pool itself fails."""

    def restart(self) -> None:
        """Replace the processes after one of them has died."""

    def check(self) -> None:
        """Raise if the pool cannot finish any more cells."""


class LocalPool:
    """Processes of this machine, which are killed at the end of the context."""

    def __init__(self, processes: int) -> None:
        self.places = processes
        self._executor: Any = None

    def __enter__(self) -> Self:
        self.restart()
        return self

    def __exit__(self, *raised: object) -> None:
        self._executor.shutdown(wait=True, kill_workers=True)

    def submit(self, measure: Measure, parameters: Parameters, code: str) -> Future[Result]:
        future: Future[Result] = self._executor.submit(measured, measure, parameters, code)
        return future

    def restart(self) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        if self._executor is not None:
            self._executor.shutdown(wait=True, kill_workers=True)
        self._executor = ProcessPoolExecutor(
            self.places, initializer=_prepare, initargs=(os.getpid(),)
        )

    def check(self) -> None:
        """Do nothing: the futures report processes that die."""


class ClusterPool:
    """The workers of a Dask cluster, by the address of its scheduler."""

    def __init__(self, address: str) -> None:
        self._client = dask.connect(address)
        self.places = sum(self._client.nthreads().values())
        self._empty = 0  # checks in a row that found no workers
        self._executor: Executor = self._client.get_executor(pure=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._executor.shutdown(wait=False)  # running cells are abandoned
        self._client.close()

    def submit(self, measure: Measure, parameters: Parameters, code: str) -> Future[Result]:
        return self._executor.submit(measured, measure, dict(parameters), code)

    def restart(self) -> None:
        """Do nothing: the scheduler restarts its workers."""

    def check(self) -> None:
        """Raise if this check and the two before it found no workers."""
        self._empty = 0 if self._client.nthreads() else self._empty + 1
        if self._empty > _EMPTY_CHECKS:
            raise OSError("the cluster has no workers left: what was finished so far is kept")


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
        values, error = {}, _encodable(traceback.format_exc())
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


def _encodable(text: str) -> str:
    """Escape lone surrogates, which file names may contain and UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


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
