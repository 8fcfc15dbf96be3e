"""Dask: arrays as examples, values of chunks on a cluster, and connections to a cluster.

Everything that knows how Dask holds, sends and releases values is in this file.
"""

from __future__ import annotations

import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, reduce
from itertools import count
from typing import Any, cast

import numpy as np

from onelayer.array import backend, threads
from onelayer.array.backend import Array
from onelayer.data.chunks import (
    KEPT_BYTES,
    Chunk,
    Chunks,
    InMemory,
    Part,
    R,
    Streamed,
    T,
    Visit,
    fold_parts,
    value_at,
)
from onelayer.data.progress import Progress, no_progress
from onelayer.data.storage import Positions, Shape, Storage, Work, common_length

_CLUSTER_SHARE = 0.4  # of the workers' memory may be held between two passes
_BRANCHES = 8  # of the tree in which a cluster merges
_PATIENCE = 10  # seconds in which a scheduler has to answer


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
        with _released_at_end(futures):
            _report(_finished(futures), len(self), progress)
            return list(map(_released, self.client.gather(futures)))

    def persist(self, size: float, limit: float = KEPT_BYTES) -> OnCluster[T]:
        workers = self.client.scheduler_info(n_workers=-1)["workers"].values()
        if size > _CLUSTER_SHARE * float(sum(worker["memory_limit"] or 0 for worker in workers)):
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
        # The whole tree is planned at once, so that Dask computes values in the order of merging.
        # No future of a value is held here: values would pile up before any is merged.
        from dask import delayed

        merge_all = delayed(_merge_all, pure=False, traverse=False)
        level, shared = list(self.values), _sent(merge)
        while len(level) > 1:
            parts = [level[i : i + _BRANCHES] for i in range(0, len(level), _BRANCHES)]
            level = [merge_all(shared, part) for part in parts]
        total, *values = self.client.compute([*level, *self.values])
        finished = _finished(values)
        with _released_at_end([total, *values]):
            del values
            _report(finished, len(self), progress)
            return cast(T, _released(total.result()))

    def fold(
        self,
        parts: Callable[[T], Sequence[Part]],
        work: Callable[[T, Part], R],
        merge: Callable[[R, R], R],
        reference: Array,
        progress: Progress = no_progress,
    ) -> R:
        progress(0.0)
        folded: OnCluster[R] = self._map(fold_parts, (self, parts, work, merge, reference))
        return folded.reduce(merge, progress)

    def _same_pass(self, other: Chunks[Any]) -> bool:
        return other.remote

    def _value_at(self, position: int, visit: Visit | None) -> object:
        return self.values[position]


@dataclass(frozen=True)
class _Held:
    """A value on a worker, with its size in bytes: Dask moves small values only.

    Dask assumes that a dataclass takes a few bytes, even if it has large arrays.

    The value is sent in one piece. Arrays that are sent one by one become views of a message, which
    may be unaligned. numpy multiplies unaligned arrays in another way: the last bits of results
    would depend on which values were sent.
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
    if isinstance(value, np.ndarray):  # computed by Dask itself
        return np.require(value, requirements=["ALIGNED"])
    return value.value if isinstance(value, _Held) else value


def _sent(argument: Any) -> Any:
    """An argument of all tasks as a task of its own, so that it is sent once."""
    from dask import delayed

    if isinstance(argument, Chunks | int | float | str | bool | None):
        return argument
    return delayed(_Held(argument), pure=False, traverse=False)


def _single_threaded(*work_and_arguments: Any) -> _Held:
    """`work(*arguments)` on one thread: a worker has a chunk on each of its threads already."""
    work, *arguments = map(_released, work_and_arguments)
    with threads.single_threaded_blas(0):
        return _Held(work(*arguments))


@contextmanager
def _released_at_end(futures: Sequence[Any]) -> Iterator[None]:
    """Release the futures that are still held at the end, also after an error.

    The traceback of an error would hold them. The cluster would then repeat the error without
    trying again, and after an interruption continue to compute.
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
    """Futures as they finish, each held until the next one is requested."""
    from distributed import as_completed

    return iter(as_completed(futures))


def _report(finished: Iterator[Any], count: int, progress: Progress) -> None:
    """Report progress until all futures have finished or one has failed; errors are left alone."""
    for done, future in enumerate(finished, start=1):
        if future.status in ("error", "cancelled"):
            return
        progress(done / count)


def is_dask(value: object) -> bool:
    """Whether the value is a Dask array; nothing is imported to find out."""
    array = sys.modules.get("dask.array")
    return array is not None and isinstance(value, array.Array)


class DaskArrays(Storage):
    """Dask arrays: on the cluster in use, or computed in this process without one."""

    @staticmethod
    def recognises(value: object) -> bool:
        return is_dask(value)

    def samples(self) -> tuple[Array, ...]:
        self._check()
        return tuple(
            np.zeros((1, *one.shape[1:]), one.dtype) if is_dask(one) else backend.to_numpy(one)[:1]
            for one in self.given.values()
        )

    def chunks(self) -> tuple[Chunks[Chunk], Positions]:
        together = self._cut_alike()
        starts = np.append(0, np.cumsum(together[0].chunks[0], dtype=int))
        whole = np.flatnonzero(together[0].chunks[0])
        begins = starts[whole].tolist()
        # Optimised one by one, an array from which another is computed would be read twice.
        delayed = [array.to_delayed(optimize_graph=False).ravel()[whole] for array in together]
        client = _current_client()
        if client is None:
            read = partial(_computed, begins, delayed)
            chunks: Chunks[Chunk] = Streamed(read, tuple(range(len(whole))))
        else:
            parts: list[OnCluster[Any]] = [OnCluster(tuple(values), client) for values in delayed]
            chunks = InMemory(tuple(begins)).map(_chunk, *parts)
        return chunks, np.array([*begins, starts[-1]])

    def mapped(self, work: Work, row_shape: Shape, dtype: Any) -> Any:
        """A Dask array with one task per chunk; `work`, which may be large, is sent once."""
        import dask.array as da
        from dask import delayed

        together = self._cut_alike()
        n, cuts = together[0].shape[0], together[0].chunks[0]
        axes = count(1)  # only the first axis, 0, is shared
        operands = [
            (array, (0, *(next(axes) for _ in array.shape[1:])))
            for array in (da.arange(n, chunks=(cuts,)), *together)
        ]
        rows = dict(zip(axes, row_shape, strict=False))
        return da.blockwise(
            partial(_on_block, row_shape, dtype),
            (0, *rows),
            *(one for operand in operands for one in operand),
            work=delayed(work, pure=False, traverse=False),
            new_axes=rows,
            concatenate=True,
            dtype=dtype,
            meta=np.empty((0,) * (1 + len(row_shape)), dtype),
        )

    def _check(self) -> None:
        for name, value in self.given.items():
            if not hasattr(value, "ndim"):
                raise TypeError(f"{name} is a function, expected a Dask array as others are")
            if value.ndim == 0:
                raise ValueError(f"{name} is a single value, expected an array of examples")
            if np.isnan(value.shape[0]):
                raise ValueError(
                    f"{name} has chunks of unknown size, expected known ones: "
                    f"{name}.compute_chunk_sizes() finds them"
                )
        common_length({name: int(array.shape[0]) for name, array in self.given.items()})

    def _cut_alike(self) -> list[Any]:
        """All arrays as Dask arrays, with the chunks of the first one that was a Dask array."""
        import dask.array as da

        self._check()
        cuts = next(value.chunks[0] for value in self.given.values() if is_dask(value))
        return [
            array.rechunk((cuts, *array.shape[1:]))
            if is_dask(array)
            else da.from_array(backend.to_numpy(array), (cuts, *array.shape[1:]), name=False)
            for array in self.given.values()
        ]


def _chunk(start: int, *parts: Any) -> Chunk:
    return Chunk(start, parts)


def _computed(begins: list[int], delayed: list[Any], positions: Sequence[int]) -> Iterator[Chunk]:
    import dask

    for i in positions:
        yield Chunk(begins[i], dask.compute(*(parts[i] for parts in delayed)))


def _on_block(
    row_shape: Shape, dtype: Any, positions: Positions, *parts: Any, work: Work
) -> np.ndarray[Any, Any]:
    """`work` of a chunk; other threads work on other chunks, so BLAS starts none."""
    if len(positions) == 0:
        return np.empty((0, *row_shape), dtype)
    with threads.single_threaded_blas(0):
        return backend.to_numpy(work(Chunk(int(positions[0]), parts)))


def _current_client() -> Any:
    """The client of the cluster in use, or None."""
    distributed = sys.modules.get("distributed")
    try:
        return None if distributed is None else distributed.default_client()
    except ValueError:
        return None


def connect(address: str) -> Any:
    """A client of the cluster at an address such as tcp://scheduler:8786.

    Raises OSError if no scheduler answers or the cluster has no workers.
    """
    try:
        from distributed import Client
        from distributed.comm.addressing import parse_address, parse_host_port
    except ImportError as error:
        raise ImportError(
            "a cluster needs dask and distributed, which are not installed: "
            "pip install 'dask[array]' distributed"
        ) from error
    try:
        protocol, location = parse_address(address)
        if protocol in ("tcp", "tls"):  # a client without a port could hardly be closed
            parse_host_port(location)
        # A default client would remain the default after a failure, and everything would fail.
        client = Client(address, timeout=_PATIENCE, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise OSError(f"no Dask scheduler answers at {address}: {error}") from error
    if not client.nthreads():
        client.close()
        raise OSError(f"the Dask cluster at {address} has no workers, expected at least one")
    return client


@contextmanager
def connected(address: str) -> Iterator[None]:
    """Work on Dask arrays is done by this cluster in the context; OSError if it fails."""
    client = connect(address)
    from distributed import KilledWorker

    try:
        with client.as_current():
            yield
    except (KilledWorker, CancelledError) as error:
        raise OSError(f"the Dask cluster at {address} gave up: {error}") from error
    finally:
        client.close()
