"""Runs: the cells of claims are measured in a pool and stored as they finish."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from functools import cached_property

from onelayer.lab.claim import Claim, Parameters, Result, Settings, Size, Status
from onelayer.lab.pools import ClusterPool, LocalPool, Pool, machine
from onelayer.lab.store import Store, key_of, now
from onelayer.lab.version import code_version

_HEARTBEAT = 10.0  # seconds between two heartbeats: far less than the store's SILENCE
_RECHECK = 0.5  # seconds between two looks at cells that another run has taken


@dataclass(frozen=True)
class Cell:
    """One cell to measure. The key identifies claim, parameters and version of the code."""

    claim: Claim
    parameters: Parameters
    code: str
    key: str

    def dead(self) -> Result:
        """The result if the process dies."""
        error = "The process that measured this cell died: it was killed, crashed, or the machine "
        error += "ran out of memory."
        return Result(self.parameters, status="failed", error=error, machine=machine())


@dataclass(frozen=True)
class Plan:
    """A claim at a size, with the settings that are changed."""

    claim: Claim
    size: Size
    changes: Settings = field(default_factory=dict)

    @cached_property
    def cells(self) -> list[Cell]:
        """The cells of the claim, each once."""
        claim, code = self.claim, code_version(self.claim.measure)
        parameters = claim.cells(claim.settings(self.size, self.changes))
        found = [Cell(claim, p, code, key_of(claim.name, p, code)) for p in parameters]
        return list({cell.key: cell for cell in found}.values())


@dataclass(frozen=True)
class Tally:
    """Numbers of cells done, failed and in all, and the claim of the latest cell."""

    done: int
    failed: int
    total: int
    claim: str = ""

    def add(self, *status: str, claim: str = "") -> Tally:
        """Count cells that finished with these status."""
        done, failed = self.done + status.count("done"), self.failed + status.count("failed")
        return Tally(done, failed, self.total, claim)


def run(
    plans: Sequence[Plan],
    store: Store,
    *,
    workers: int = 1,
    cluster: str | None = None,
    retry_failed: bool = False,
    progress: Callable[[Tally], None] = lambda _: None,
) -> Tally:
    """Measure the cells of the plans that the store does not have, and store them.

    The cells are measured by `workers` processes of this machine, or by the Dask cluster whose
    scheduler has the address `cluster`. A cell that raises is stored with its error and counts as
    finished, unless `retry_failed` asks for it again. Cells that another run on the same store has
    taken are waited for. After an interruption the same call continues.
    """
    cells = list({cell.key: cell for plan in plans for cell in plan.cells}.values())
    for plan in plans:
        store.remember_run(plan.claim.name, plan.size, plan.changes)
    if retry_failed:
        store.forget_failed([cell.key for cell in cells])
    status = store.finished(cell.key for cell in cells)
    tally = Tally(0, 0, len(cells)).add(*status.values())
    progress(tally)
    left = deque(cell for cell in cells if cell.key not in status)
    if not left:
        return tally
    pool: Pool = LocalPool(min(workers, len(left))) if cluster is None else ClusterPool(cluster)
    try:
        with pool:
            return _Session(store, pool, progress, tally, left).measure()
    finally:
        store.release()


@dataclass
class _Session:
    """The cells that are left, the cells that are running, and their pool.

    When a process of this machine dies, all running cells are lost. They become suspects, which
    are measured one at a time, so that a second death has one possible cause.
    """

    store: Store
    pool: Pool
    progress: Callable[[Tally], None]
    tally: Tally
    left: deque[Cell]
    suspects: deque[Cell] = field(default_factory=deque)
    suspected: set[str] = field(default_factory=set)  # keys of all present and former suspects
    running: dict[Future[Result], Cell] = field(default_factory=dict)

    def measure(self) -> Tally:
        """Keep the pool busy until no cell is left."""
        while self.left or self.suspects or self.running:
            if not self.suspects:
                self._fill()
            elif not self.running:
                self._submit(self.suspects.popleft())
            if self.running:
                self._collect()
            else:
                time.sleep(_RECHECK)  # other runs have taken all that is left
        return self.tally

    def _fill(self) -> None:
        """Start cells until the pool is full; those that another run has taken come last."""
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
                self._count(status, cell)

    def _submit(self, cell: Cell) -> None:
        try:
            future = self.pool.submit(cell.claim.measure, cell.parameters, cell.code)
        except BrokenProcessPool:  # a process died in the meantime; this cell never started
            self.left.appendleft(cell)
            self._restart()
        else:
            self.running[future] = cell

    def _collect(self) -> None:
        """Wait for a cell or for the next heartbeat, and store what is finished."""
        finished, _ = wait(self.running, timeout=_HEARTBEAT, return_when=FIRST_COMPLETED)
        self.store.heartbeat()
        if not finished:
            self.pool.check()
        if any(future.cancelled() for future in finished):
            raise OSError("the cluster is gone: finished cells are kept")
        broken = {f for f in finished if isinstance(f.exception(), BrokenProcessPool)}
        for future in finished - broken:
            cell = self.running.pop(future)
            # Dask gives up on a cell after it has killed several workers.
            killed = type(future.exception()).__name__ == "KilledWorker"
            self._store(cell, cell.dead() if killed else future.result())
        if broken:
            self._restart()

    def _restart(self) -> None:
        """Continue after a process of this machine has died."""
        for cell in self.running.values():
            if cell.key in self.suspected:
                self._store(cell, cell.dead())
            else:
                self.suspects.append(cell)
                self.suspected.add(cell.key)
        self.running.clear()
        self.pool.restart()

    def _store(self, cell: Cell, result: Result) -> None:
        name, code, key = cell.claim.name, cell.code, cell.key
        self.store.record(replace(result, claim=name, code=code, key=key, finished=now()))
        self._count(result.status, cell)

    def _count(self, status: Status, cell: Cell) -> None:
        self.tally = self.tally.add(status, claim=cell.claim.name)
        self.progress(self.tally)
