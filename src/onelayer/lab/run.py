"""Runs: the cells of claims measured, wherever that is, and kept as they are finished."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import cached_property

from onelayer.lab.claim import Claim, Parameters, Settings, Size
from onelayer.lab.pools import ClusterPool, LocalPool, Outcome, Pool, machine
from onelayer.lab.store import Record, Store, key_of, now
from onelayer.lab.version import code_version

_HEARTBEAT = 10.0  # seconds between two signs of life: far less than the store's patience
_LOOK_AGAIN = 0.5  # seconds between two looks at cells that another run is at
_DIED = (
    "The process that measured this cell died: it was killed, crashed, or the machine ran out of "
    "memory."
)
_DEATH = Outcome("failed", {}, _DIED, 0.0, machine())


@dataclass(frozen=True)
class Cell:
    """One cell of a claim: what to measure, and the key that says so."""

    claim: Claim
    parameters: Parameters
    code: str
    key: str


@dataclass(frozen=True)
class Plan:
    """A claim at a size, with the settings that are changed."""

    claim: Claim
    size: Size
    changes: Settings = field(default_factory=dict)

    @cached_property
    def cells(self) -> list[Cell]:
        """Its cells, each once."""
        claim, code = self.claim, code_version(self.claim.measure)
        parameters = claim.cells(claim.settings(self.size, self.changes))
        found = [Cell(claim, p, code, key_of(claim.name, p, code)) for p in parameters]
        return list({cell.key: cell for cell in found}.values())


@dataclass(frozen=True)
class Progress:
    """How far a run is: cells that are done, that failed, of all; and the claim of the latest."""

    done: int
    failed: int
    total: int
    claim: str = ""


def run(
    plans: Sequence[Plan],
    store: Store,
    *,
    workers: int = 1,
    cluster: str | None = None,
    retry_failed: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Progress:
    """Measure the cells of the plans that are not in the store yet, and put them there.

    On `workers` processes of this machine, or on the Dask cluster whose scheduler is at the address
    `cluster`. A cell that raises is kept with its error and counts as finished; `retry_failed` has
    such cells measured again. Cells that another run on the same file is at are waited for. What
    was finished before an interruption is in the store, and is not measured again.
    """
    cells = list({cell.key: cell for plan in plans for cell in plan.cells}.values())
    for plan in plans:
        store.remember_run(plan.claim.name, plan.size, plan.changes)
    if retry_failed:
        store.forget_failed([cell.key for cell in cells])
    status = store.finished(cell.key for cell in cells)
    tally = _Tally(len(cells), progress)
    tally.add(*status.values())
    left = [cell for cell in cells if cell.key not in status]
    if left:
        try:
            with _pool(workers, cluster, len(left)) as pool:
                _Session(store, pool, tally, deque(left)).measure()
        finally:
            store.give_back()
    return tally.progress


def _pool(workers: int, cluster: str | None, cells: int) -> Pool:
    return LocalPool(min(workers, cells)) if cluster is None else ClusterPool(cluster)


class _Tally:
    """Counts cells, and tells whoever listens."""

    def __init__(self, total: int, tell: Callable[[Progress], None] | None) -> None:
        self.progress = Progress(0, 0, total)
        self._tell = tell

    def add(self, *finished: str, claim: str = "") -> None:
        failed = self.progress.failed + finished.count("failed")
        done = self.progress.done + finished.count("done")
        self.progress = Progress(done, failed, self.progress.total, claim)
        if self._tell is not None:
            self._tell(self.progress)


@dataclass
class _Session:
    """The cells that are left, those at work, and the pool that they are at work in.

    When a process of this machine dies, all cells at work are lost with it. They become suspects,
    measured one at a time, so that when a process dies again it is known which cell is to blame.
    """

    store: Store
    pool: Pool
    tally: _Tally
    left: deque[Cell]
    suspects: deque[Cell] = field(default_factory=deque)
    suspected: set[str] = field(default_factory=set)  # the keys of all that ever were
    running: dict[Future[Outcome], Cell] = field(default_factory=dict)

    def measure(self) -> None:
        """Keep the pool busy until no cell is left."""
        while self.left or self.suspects or self.running:
            if not self.suspects:
                self._fill()
            elif not self.running:
                self._submit(self.suspects.popleft())
            if self.running:
                self._collect()
            else:
                time.sleep(_LOOK_AGAIN)  # all that is left is taken by others

    def _fill(self) -> None:
        """Start cells for all places that are free; what others are at goes to the end."""
        for _ in range(len(self.left)):
            if len(self.running) >= self.pool.places:
                return
            cell = self.left.popleft()
            status = self.store.take(cell.key)
            if status == "ours":
                self._submit(cell)
            elif status == "theirs":
                self.left.append(cell)
            else:
                self.tally.add(status, claim=cell.claim.name)

    def _submit(self, cell: Cell) -> None:
        try:
            future = self.pool.submit(cell.claim.measure, cell.parameters, cell.code)
        except BrokenProcessPool:  # a process died since the last look; this cell never started
            self.left.appendleft(cell)
            self._survive()
        else:
            self.running[future] = cell

    def _collect(self) -> None:
        """Wait for a cell, or until it is time for a sign of life; keep what came of it."""
        finished, _ = wait(self.running, timeout=_HEARTBEAT, return_when=FIRST_COMPLETED)
        self.store.still_here()
        if not finished:
            self.pool.check()
        if any(future.cancelled() for future in finished):
            raise OSError("the cluster is gone: what was finished so far is kept")
        broken = {f for f in finished if isinstance(f.exception(), BrokenProcessPool)}
        for future in finished - broken:
            cell = self.running.pop(future)
            given_up = type(future.exception()).__name__ == "KilledWorker"  # by Dask, after tries
            self._keep(cell, _DEATH if given_up else future.result())
        if broken:
            self._survive()

    def _survive(self) -> None:
        """Go on after a process of this machine has died."""
        for cell in self.running.values():
            if cell.key in self.suspected:
                self._keep(cell, _DEATH)
            else:
                self.suspects.append(cell)
                self.suspected.add(cell.key)
        self.running.clear()
        self.pool.restart()

    def _keep(self, cell: Cell, outcome: Outcome) -> None:
        identity = (cell.key, cell.claim.name, cell.parameters, cell.code)
        found = (outcome.status, outcome.measured, outcome.error, outcome.seconds)
        self.store.record(Record(*identity, *found, now(), outcome.machine))
        self.tally.add(outcome.status, claim=cell.claim.name)
