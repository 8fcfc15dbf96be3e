"""Chunks of examples, wherever they live: in memory, on disk, made by a function, on a cluster.

Everything here is a sum over examples, so that a job is written once, over chunks of them:

    each(work, chunks, ..)   something computed from every chunk, where the chunk is
    merged(chunks, merge)    all of it merged into one, and brought here
    kept(chunks, size)       held where it is for the next pass, if there is room for it

There are three ways to go through them, and `sources.py` says which is taken when. `InMemory`
computes at once and holds what it has. `OneByOne` computes nothing before it is asked to merge, and
then goes from chunk to chunk with never more than one in memory. `OnCluster` does the same on the
workers of a Dask cluster, and merges in a tree; a worker that dies is made up for by Dask, which
knows how everything it holds was computed. Chunks are merged in their order, by a tree that depends
on nothing but their number, so that results repeat bit for bit; so does `work`, which therefore
must not change what it is given.

A chunk is what is read at a time, tens of megabytes; whoever works on one cuts it into blocks that
suit a processor's cache (`blocks.py`), and on a cluster does so with one thread: as many chunks are
at work on a machine as its workers have threads.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial, reduce
from typing import Any, TypeAlias

import numpy as np

from onelayer import arrays
from onelayer.arrays import Array

KEPT_BYTES = 2 * 2**30  # that are held in memory between two passes
_CLUSTER_SHARE = 0.4  # of the workers' memory may be held between two passes
_BRANCHES = 8  # of the tree in which a cluster merges

Told: TypeAlias = Callable[[float], None]


def untold(_share: float) -> None:
    """Nobody wants to know how far a pass is."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive examples, the first of them at position `start`: arrays that belong together."""

    start: int
    arrays: tuple[Array, ...]  # None where there is none

    def __len__(self) -> int:
        return next(int(array.shape[0]) for array in self.arrays if array is not None)

    def between(self, start: int, stop: int) -> Chunk:
        """Those of the examples whose positions are in a range."""
        part = slice(max(0, start - self.start), max(0, stop - self.start))
        cut = (None if array is None else array[part, ...] for array in self.arrays)
        return Chunk(max(start, self.start), tuple(cut))

    def rows(self, positions: np.ndarray[Any, Any]) -> tuple[Array | None, ...]:
        """The examples at those of the ascending positions that are here."""
        first, last = np.searchsorted(positions, [self.start, self.start + len(self)])
        here = positions[first:last] - self.start
        return tuple(None if one is None else arrays.rows(one, here) for one in self.arrays)


@dataclass(frozen=True)
class InMemory:
    """The values of all chunks, held in memory."""

    values: tuple[Any, ...]

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True, eq=False)
class OneByOne:
    """Values that are computed anew in every pass, one after the other.

    `read` gives what was read of the chunks at these positions, and `compute` the value from that.
    Values that rest on one another come from the same `read`, and in a pass each of them is
    computed once for every chunk.
    """

    read: Callable[[Sequence[int]], Iterator[Any]]
    positions: tuple[int, ...]
    compute: Callable[[_Visit], Any] = field(default=lambda visit: visit.origin)

    def __len__(self) -> int:
        return len(self.positions)

    def visits(self) -> Iterator[_Visit]:
        """All chunks, of which none is held when the next one is read."""
        return map(_Visit, self.positions, self.read(self.positions))


@dataclass(frozen=True, eq=False)
class OnCluster:
    """Values on a Dask cluster, or yet to be computed there: one `Delayed` each."""

    values: tuple[Any, ...]
    client: Any

    def __len__(self) -> int:
        return len(self.values)


Chunks: TypeAlias = InMemory | OneByOne | OnCluster


@dataclass(frozen=True)
class _Visit:
    """A chunk on its way through a pass, with what has been computed from it so far."""

    position: int
    origin: Any
    known: dict[int, Any] = field(default_factory=dict)

    def value(self, of: OneByOne) -> Any:
        if id(of) not in self.known:
            self.known[id(of)] = of.compute(self)
        return self.known[id(of)]


def each(work: Callable[..., Any], *arguments: Any) -> Any:
    """`work(*arguments)` for every chunk: of arguments that are chunks it sees one value each.

    The other arguments are the same for all; on a cluster they are sent once.

    >>> merged(each(lambda a, b, c: a * b + c, InMemory((1, 2)), InMemory((3, 4)), 10), int.__add__)
    31
    """
    leading = _leading([argument for argument in arguments if isinstance(argument, Chunks)])
    if isinstance(leading, OnCluster):
        return _on_cluster(leading, work, arguments)
    if isinstance(leading, OneByOne):
        return _one_by_one(leading, work, arguments)
    values = (
        work(*(one.values[i] if isinstance(one, InMemory) else one for one in arguments))
        for i in range(len(leading))
    )
    return InMemory(tuple(values))


def _leading(spread: Sequence[Chunks]) -> Chunks:
    """The one that says where the work is done; refuses others that do not go along with it."""
    order = (OnCluster, OneByOne, InMemory)
    leading = min(spread, key=lambda one: order.index(type(one)))
    for one in spread:
        if len(one) != len(leading):
            raise ValueError(f"got {len(one)} chunks beside {len(leading)}, expected as many")
        if not (isinstance(one, InMemory) or _go_together(one, leading)):
            raise ValueError("got chunks of two sources, expected them to be read in one pass")
    return leading


def _go_together(one: Chunks, leading: Chunks) -> bool:
    if isinstance(one, OneByOne) and isinstance(leading, OneByOne):
        return one.read is leading.read and one.positions == leading.positions
    return type(one) is type(leading)


def _one_by_one(leading: OneByOne, work: Callable[..., Any], arguments: Sequence[Any]) -> OneByOne:
    index = {position: i for i, position in enumerate(leading.positions)}

    def compute(visit: _Visit) -> Any:
        def seen(argument: Any) -> Any:
            if isinstance(argument, InMemory):  # which stays whole if some of the result is picked
                return argument.values[index[visit.position]]
            return visit.value(argument) if isinstance(argument, OneByOne) else argument

        return work(*map(seen, arguments))

    return replace(leading, compute=compute)


def merged(chunks: Chunks, merge: Callable[[Any, Any], Any], told: Told = untold) -> Any:
    """All values merged in the order of the chunks, brought here; `told` hears how far it is."""
    if len(chunks) == 0:
        raise ValueError("got no chunks to merge, expected at least one")
    if isinstance(chunks, OnCluster):
        return _merged_there(chunks, merge, told)
    return reduce(merge, _values(chunks, told))


def gathered(chunks: Chunks, told: Told = untold) -> list[Any]:
    """The values of all chunks in their order, brought here."""
    if isinstance(chunks, OnCluster):
        return _gathered_there(chunks, told)
    return list(_values(chunks, told))


def _values(chunks: InMemory | OneByOne, told: Told) -> Iterator[Any]:
    if isinstance(chunks, InMemory):
        yield from chunks.values
        return
    values = map(partial(_Visit.value, of=chunks), chunks.visits())
    for done, value in enumerate(values, start=1):
        yield value
        told(done / len(chunks))


def room(reference: Array) -> int:
    """The bytes of arrays like this one that may be held in memory between two passes.

    On a GPU it is a quarter of what is free there, or half as much: a power of two, as for blocks.
    """
    free = arrays.gpu_memory(reference)
    return KEPT_BYTES if free is None else 1 << max(1, free // 4).bit_length() - 1


def kept(chunks: Any, size: float, most: float = KEPT_BYTES) -> Any:
    """The same values, held between passes if all together, of `size` bytes, have room.

    In this process that is `most`, on a cluster a share of the memory of its workers.
    """
    if isinstance(chunks, OneByOne) and size <= most:
        return InMemory(tuple(gathered(chunks)))
    if isinstance(chunks, OnCluster) and size <= _CLUSTER_SHARE * _memory(chunks.client):
        return replace(chunks, values=tuple(chunks.client.persist(list(chunks.values))))
    return chunks


def pick(chunks: Chunks, positions: Sequence[int]) -> Any:
    """The chunks at some positions, in ascending order."""
    if isinstance(chunks, OneByOne):
        return replace(chunks, positions=tuple(chunks.positions[i] for i in positions))
    return replace(chunks, values=tuple(chunks.values[i] for i in positions))


# On a cluster


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


def _on_cluster(
    leading: OnCluster, work: Callable[..., Any], arguments: Sequence[Any]
) -> OnCluster:
    from dask import delayed

    calm = delayed(_calmly, pure=False, traverse=False)
    shared = [_sent(one) for one in (work, *arguments)]
    values = [
        calm(*(one.values[i] if isinstance(one, OnCluster | InMemory) else one for one in shared))
        for i in range(len(leading))
    ]
    return replace(leading, values=tuple(values))


def _sent(argument: Any) -> Any:
    """An argument of all tasks as a task of its own: it goes to the cluster once, not with each."""
    from dask import delayed

    if isinstance(argument, Chunks | int | float | str | bool | None):
        return argument
    return delayed(_Held(argument), pure=False, traverse=False)


def _calmly(*work_and_arguments: Any) -> _Held:
    """A worker has a chunk on each of its threads already: BLAS is to start no more of them."""
    work, *arguments = map(_released, work_and_arguments)
    with arrays.calm_threads(0):
        return _Held(work(*arguments))


def _merged_there(chunks: OnCluster, merge: Callable[[Any, Any], Any], told: Told) -> Any:
    """The whole tree is planned at once: Dask then computes values in the order of their merging.

    Nobody may hold on to them here, lest they pile up before any is merged.
    """
    from dask import delayed

    merge_all = delayed(_merge_all, pure=False, traverse=False)
    level, shared = list(chunks.values), _sent(merge)
    while len(level) > 1:
        parts = [level[i : i + _BRANCHES] for i in range(0, len(level), _BRANCHES)]
        level = [merge_all(shared, part) for part in parts]
    total, *values = chunks.client.compute([*level, *chunks.values])
    finished = _finished(values)
    with _letting_go([total, *values]):
        del values
        _tell(finished, len(chunks), told)
        return _released(total.result())


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


def _gathered_there(chunks: OnCluster, told: Told) -> list[Any]:
    futures = chunks.client.compute(list(chunks.values))
    with _letting_go(futures):
        _tell(_finished(futures), len(chunks), told)
        return list(map(_released, chunks.client.gather(futures)))


def _finished(futures: Sequence[Any]) -> Iterator[Any]:
    """Futures as they finish; once seen they are not held, and the cluster lets go of values."""
    from distributed import as_completed

    return iter(as_completed(futures))


def _tell(finished: Iterator[Any], count: int, told: Told) -> None:
    """Wait until all have finished or one has failed, which whoever asks for it will hear."""
    for done, future in enumerate(finished, start=1):
        if future.status in ("error", "cancelled"):
            return
        told(done / count)


def _memory(client: Any) -> float:
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    return float(sum(worker["memory_limit"] or 0 for worker in workers))
