"""Values of chunks on a Dask cluster, and the workarounds that it takes to keep them there.

Everything that knows how Dask holds, sends and forgets values is in this file.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from onelayer.array import threads
from onelayer.data.chunks import (
    KEPT_BYTES,
    Chunks,
    Progress,
    R,
    T,
    Visit,
    no_progress,
    value_at,
)

_CLUSTER_SHARE = 0.4  # of the workers' memory may be held between two passes
_BRANCHES = 8  # of the tree in which a cluster merges


@dataclass(frozen=True, eq=False)
class OnCluster(Chunks[T]):
    """Values on a Dask cluster, or yet to be computed there: one `Delayed` each."""

    values: tuple[Any, ...]
    client: Any
    _precedence = 2
    remote = True

    def __len__(self) -> int:
        return len(self.values)

    def collect(self, progress: Progress = no_progress) -> list[T]:
        futures = self.client.compute(list(self.values))
        with _letting_go(futures):
            _report(_finished(futures), len(self), progress)
            return list(map(_released, self.client.gather(futures)))

    def persist(self, size: float, limit: float = KEPT_BYTES) -> OnCluster[T]:
        if size > _CLUSTER_SHARE * _memory(self.client):
            return self
        return replace(self, values=tuple(self.client.persist(list(self.values))))

    def pick(self, positions: Sequence[int]) -> OnCluster[T]:
        return replace(self, values=tuple(self.values[i] for i in positions))

    def _map(self, work: Callable[..., R], arguments: Sequence[object]) -> OnCluster[R]:
        from dask import delayed

        task = delayed(_single_threaded, pure=False, traverse=False)
        shared = [_sent(one) for one in (work, *arguments)]
        values = [task(*(value_at(one, i) for one in shared)) for i in range(len(self))]
        return OnCluster(tuple(values), self.client)

    def _reduce(self, merge: Callable[[T, T], T], progress: Progress) -> T:
        """The whole tree is planned at once: Dask then computes values in the order of merging.

        Nobody may hold on to them here, lest they pile up before any is merged.
        """
        from dask import delayed

        merge_all = delayed(_merge_all, pure=False, traverse=False)
        level, shared = list(self.values), _sent(merge)
        while len(level) > 1:
            parts = [level[i : i + _BRANCHES] for i in range(0, len(level), _BRANCHES)]
            level = [merge_all(shared, part) for part in parts]
        total, *values = self.client.compute([*level, *self.values])
        finished = _finished(values)
        with _letting_go([total, *values]):
            del values
            _report(finished, len(self), progress)
            result: T = _released(total.result())
            return result

    def _same_pass(self, other: Chunks[Any]) -> bool:
        return other.remote

    def _value_at(self, position: int, visit: Visit | None) -> object:
        return self.values[position]


@dataclass(frozen=True)
class _Held:
    """A value on a worker that tells its size: Dask leaves large ones where they are.

    By itself it would take a dataclass for a few bytes, whatever arrays there are in it.

    It travels in one piece. Of arrays that travel by themselves Dask makes views of a message, at
    any address, and through products of arrays that are not aligned numpy takes another way: last
    bits would depend on which values have travelled.
    """

    value: Any

    def __sizeof__(self) -> int:
        return object.__sizeof__(self) + _size(self.value)

    def __reduce__(self) -> tuple[Any, ...]:
        from distributed.protocol.pickle import dumps

        return _unpacked, (dumps(self.value),)


def _unpacked(packed: bytes) -> _Held:
    return _Held(pickle.loads(packed))


def _size(value: Any) -> int:
    """The bytes of all arrays in a value."""
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    if is_dataclass(value) and not isinstance(value, type):
        return sum(_size(getattr(value, one.name)) for one in fields(value))
    return int(getattr(value, "nbytes", 0))


def _released(value: Any) -> Any:
    if isinstance(value, np.ndarray):  # of somebody else's making
        return np.require(value, requirements=["ALIGNED"])
    return value.value if isinstance(value, _Held) else value


def _sent(argument: Any) -> Any:
    """An argument of all tasks as a task of its own: it goes to the cluster once, not with each."""
    from dask import delayed

    if isinstance(argument, Chunks | int | float | str | bool | None):
        return argument
    return delayed(_Held(argument), pure=False, traverse=False)


def _single_threaded(*work_and_arguments: Any) -> _Held:
    """A worker has a chunk on each of its threads already: BLAS is to start no more of them."""
    work, *arguments = map(_released, work_and_arguments)
    with threads.single_threaded_blas(0):
        return _Held(work(*arguments))


@contextmanager
def _letting_go(futures: Sequence[Any]) -> Iterator[None]:
    """Those of the futures that are still held are released at the end, whatever it is.

    Else an error would keep them, by its traceback: asked again, the cluster would give the same
    error without a look, and after an interruption it would go on computing for nobody.
    """
    watched = [weakref.ref(future) for future in futures]
    del futures
    try:
        yield
    finally:
        for future in filter(None, (reference() for reference in watched)):
            future.release()


def _merge_all(merge: _Held, values: Sequence[Any]) -> _Held:
    return _Held(reduce(_released(merge), map(_released, values)))


def _finished(futures: Sequence[Any]) -> Iterator[Any]:
    """Futures as they finish; once seen they are not held, and the cluster lets go of values."""
    from distributed import as_completed

    return iter(as_completed(futures))


def _report(finished: Iterator[Any], count: int, progress: Progress) -> None:
    """Wait until all have finished or one has failed, which whoever asks for it will hear."""
    for done, future in enumerate(finished, start=1):
        if future.status in ("error", "cancelled"):
            return
        progress(done / count)


def _memory(client: Any) -> float:
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    return float(sum(worker["memory_limit"] or 0 for worker in workers))
