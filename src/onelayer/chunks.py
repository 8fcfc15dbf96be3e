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
on nothing but their number, so that results repeat bit for bit.

A chunk is what is read at a time, tens of megabytes; whoever works on one cuts it into blocks that
suit a processor's cache (`blocks.py`), and on a cluster does so with one thread: as many chunks are
at work on a machine as its workers have threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeAlias

from onelayer import arrays

KEPT_BYTES = 2 * 2**30  # that are held in memory between two passes, on a machine without a GPU
_CLUSTER_SHARE = 0.4  # of the workers' memory may be held between two passes
_BRANCHES = 8  # of the tree in which a cluster merges

Told: TypeAlias = Callable[[float], None]


def untold(_share: float) -> None:
    """Nobody wants to know how far a pass is."""


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
        for index, origin in enumerate(self.read(self.positions)):
            yield _Visit(index, origin)


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

    index: int
    origin: Any
    known: dict[int, Any] = field(default_factory=dict)

    def value(self, of: Any) -> Any:
        """The value of an argument of `each` at this chunk."""
        if isinstance(of, InMemory):
            return of.values[self.index]
        if not isinstance(of, OneByOne):
            return of
        if id(of) not in self.known:
            self.known[id(of)] = of.compute(self)
        return self.known[id(of)]


def each(work: Callable[..., Any], *arguments: Any) -> Any:
    """`work(*arguments)` for every chunk: of arguments that are chunks it sees one value each.

    The other arguments are the same for all; on a cluster they are sent once.

    >>> merged(each(lambda a, b, c: a * b + c, InMemory((1, 2)), InMemory((3, 4)), 10), int.__add__)
    31
    """
    spread = [argument for argument in arguments if isinstance(argument, Chunks)]
    for kind in (OnCluster, OneByOne):
        leading = [argument for argument in spread if isinstance(argument, kind)]
        if leading:
            return _LATER[kind](leading[0], work, arguments)
    values = (
        work(*(one.values[i] if isinstance(one, InMemory) else one for one in arguments))
        for i in range(len(spread[0]))
    )
    return InMemory(tuple(values))


def merged(chunks: Chunks, merge: Callable[[Any, Any], Any], told: Told = untold) -> Any:
    """All values merged in the order of the chunks, brought here; `told` hears how far it is."""
    if isinstance(chunks, OnCluster):
        return _merged_there(chunks, merge, told)
    if isinstance(chunks, InMemory):
        return reduce(merge, chunks.values)
    total = None
    for visit in chunks.visits():
        value = visit.value(chunks)
        total = value if visit.index == 0 else merge(total, value)
        told((visit.index + 1) / len(chunks))
    return total


def gathered(chunks: Chunks, told: Told = untold) -> list[Any]:
    """The values of all chunks in their order, brought here."""
    return list(merged(each(_listed, chunks), list.__add__, told))


def kept(chunks: Chunks, size: float) -> Chunks:
    """The same values, held between passes if all together, of `size` bytes, have room."""
    if isinstance(chunks, OneByOne) and size <= KEPT_BYTES:
        return InMemory(tuple(gathered(chunks)))
    if isinstance(chunks, OnCluster) and size <= _CLUSTER_SHARE * _memory(chunks.client):
        return replace(chunks, values=tuple(chunks.client.persist(list(chunks.values))))
    return chunks


def pick(chunks: Chunks, positions: Sequence[int]) -> Any:
    """The chunks at some positions, in ascending order."""
    if isinstance(chunks, OneByOne):
        return replace(chunks, positions=tuple(chunks.positions[i] for i in positions))
    return replace(chunks, values=tuple(chunks.values[i] for i in positions))


def _listed(value: Any) -> list[Any]:
    return [value]


def _one_by_one(leading: OneByOne, work: Callable[..., Any], arguments: Sequence[Any]) -> OneByOne:
    def compute(visit: _Visit) -> Any:
        return work(*(visit.value(one) for one in arguments))

    return replace(leading, compute=compute)


# On a cluster


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
    return delayed(argument, pure=False, traverse=False)


def _calmly(work: Callable[..., Any], *arguments: Any) -> Any:
    """A worker has a chunk on each of its threads already: BLAS is to start no more of them."""
    with arrays.calm_threads(0):
        return work(*arguments)


def _merged_there(chunks: OnCluster, merge: Callable[[Any, Any], Any], told: Told) -> Any:
    client = chunks.client
    level = client.compute(list(chunks.values))
    _tell(level, told)
    while len(level) > 1:  # merged first, lest all values pile up before any is merged
        level = [
            client.submit(_merge_all, merge, level[i : i + _BRANCHES], priority=1, pure=False)
            for i in range(0, len(level), _BRANCHES)
        ]
    return level[0].result()


def _merge_all(merge: Callable[[Any, Any], Any], values: Sequence[Any]) -> Any:
    return reduce(merge, values)


def _tell(futures: Sequence[Any], told: Told) -> None:
    done = []

    def count(future: Any) -> None:
        done.append(future.key)
        told(len(done) / len(futures))

    for future in futures:
        future.add_done_callback(count)


def _memory(client: Any) -> float:
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    return float(sum(worker["memory_limit"] or 0 for worker in workers))


_LATER: dict[type, Callable[..., Any]] = {OneByOne: _one_by_one, OnCluster: _on_cluster}
