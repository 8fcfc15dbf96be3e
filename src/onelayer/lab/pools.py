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
from dataclasses import dataclass
from importlib.metadata import version
from threading import Thread
from typing import Any, Protocol, Self

from onelayer.array import threads
from onelayer.data import cluster
from onelayer.lab.claim import Measured, Parameters
from onelayer.lab.store import Status
from onelayer.lab.version import code_version

Measure = Callable[..., Measured]

_PATIENCE = 2  # looks at a cluster without workers: some are started again
_WATCH = 0.5  # seconds between two looks at whether the parent is alive


@dataclass(frozen=True)
class Outcome:
    """What came of a cell."""

    status: Status
    measured: Measured
    error: str
    seconds: float
    machine: str


class Pool(Protocol):
    """A place for cells: a context, in which they are submitted."""

    places: int  # cells that it measures at the same time

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: Any) -> None: ...

    def submit(self, measure: Measure, parameters: Parameters, code: str) -> Future[Outcome]:
        """Measure a cell; the future raises only where the pool itself fails."""

    def restart(self) -> None:
        """Make the pool whole after a process of it has died."""

    def check(self) -> None:
        """Raise where nothing more is to be expected of the pool."""


class LocalPool:
    """Processes of this machine. They end with the context, whatever they are at."""

    def __init__(self, processes: int) -> None:
        self.places = processes
        self._executor: Any = None

    def __enter__(self) -> Self:
        self.restart()
        return self

    def __exit__(self, *raised: object) -> None:
        self._executor.shutdown(wait=True, kill_workers=True)

    def submit(self, measure: Measure, parameters: Parameters, code: str) -> Future[Outcome]:
        future: Future[Outcome] = self._executor.submit(measured, measure, parameters, code)
        return future

    def restart(self) -> None:
        from joblib.externals.loky import ProcessPoolExecutor

        if self._executor is not None:
            self._executor.shutdown(wait=True, kill_workers=True)
        self._executor = ProcessPoolExecutor(
            self.places, initializer=_prepare, initargs=(os.getpid(),)
        )

    def check(self) -> None:
        """Nothing: processes that die are told by the futures."""


class ClusterPool:
    """The workers of a Dask cluster, by the address of its scheduler."""

    def __init__(self, address: str) -> None:
        self._client = cluster.connect(address)
        self.places = sum(self._client.nthreads().values())
        self._deserted = 0  # looks in a row at which there was no worker
        self._executor: Executor = self._client.get_executor(pure=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._executor.shutdown(wait=False)  # cells at work are given up
        self._client.close()

    def submit(self, measure: Measure, parameters: Parameters, code: str) -> Future[Outcome]:
        return self._executor.submit(measured, measure, dict(parameters), code)

    def restart(self) -> None:
        """Nothing: the scheduler sees to its workers."""

    def check(self) -> None:
        """Raise if there have been no workers at this look and the two before it."""
        self._deserted = 0 if self._client.nthreads() else self._deserted + 1
        if self._deserted > _PATIENCE:
            raise OSError("the cluster has no workers left: what was finished so far is kept")


def measured(measure: Measure, parameters: Parameters, code: str) -> Outcome:
    """Measure a cell, here and now, on one thread: more would change the last bits of a product.

    A measurement that raises, or gives what is none, is an outcome too. Another version of the code
    than the caller's is not: its values would be kept under the wrong key.
    """
    installed = measure.__module__.startswith("onelayer.")  # other code travels with the cell
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
    return Outcome("failed" if error else "done", values, error, seconds, machine())


def machine() -> str:
    """This machine, for the record."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("onelayer", "numpy", "scipy"))
    python = f"Python {platform.python_version()}"
    return f"{platform.platform()}, {os.cpu_count()} cores, {python}, {libraries}"


def _checked(values: Any) -> dict[str, Any]:
    """What was measured as it will be read again from the store."""
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
    """Text that can be stored: names of files may hold what is no character."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _prepare(parent: int) -> None:
    """Leave Ctrl-C, which reaches all processes of a terminal, to the parent; and end with it.

    A parent that is killed outright cannot end its processes. Without this they would wait for
    cells for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_WATCH)
        os._exit(1)

    Thread(target=watch, daemon=True).start()
