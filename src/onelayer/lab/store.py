"""The store: one SQLite file with every measured cell, safe to kill and safe to share.

A cell is one row, written in one transaction when it is finished, under a key that says what it
computes: claim, parameters with the seed, version of the code. Its first record stays. Whoever
measures a cell takes it first, so that two runs on one file share the work. What was taken by
a process that has died, or has not been heard of for a while, may be taken again.

The file is opened for each transaction and closed again: there is nothing to lose between two.
SQLite's own journal makes each of them whole or nothing, also under kill -9. (Its locks need a file
system that has them: several machines on one network drive may not.)
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sqlite3
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from onelayer.lab.claim import Measured, Parameters, Settings, Size

SILENCE = 120.0  # seconds after which a process that says nothing has lost what it took
_WAIT = 600.0  # seconds that a transaction waits for others
_GLANCE = 0.1  # of these at a time in SQLite itself, which is deaf to Ctrl-C
_APPLICATION = 0x6F6E656C  # "onel": what SQLite keeps to tell one program's files from another's
_SCHEMA = 1
_TABLES = """
CREATE TABLE cells (
    key TEXT PRIMARY KEY,
    claim TEXT NOT NULL,
    parameters TEXT NOT NULL,
    code TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('done', 'failed')),
    measured TEXT NOT NULL,
    error TEXT NOT NULL,
    seconds REAL NOT NULL,
    finished TEXT NOT NULL,
    machine TEXT NOT NULL
);
CREATE TABLE taken (key TEXT PRIMARY KEY, owner TEXT NOT NULL, heard REAL NOT NULL);
CREATE TABLE runs (
    number INTEGER PRIMARY KEY, claim TEXT NOT NULL, size TEXT NOT NULL, changes TEXT NOT NULL
);
"""

Status = Literal["done", "failed"]


@dataclass(frozen=True)
class Record:
    """One finished cell as it is in the file."""

    key: str
    claim: str
    parameters: Parameters
    code: str
    status: Status
    measured: Measured  # empty where it failed
    error: str  # empty where it is done
    seconds: float
    finished: str  # in UTC
    machine: str


def key_of(claim: str, parameters: Parameters, code: str) -> str:
    """The key of a cell: a digest of what it computes.

    >>> key_of("noise", {"dim": 8, "seed": 0}, "1") == key_of("noise", {"seed": 0, "dim": 8}, "1")
    True
    """
    content = json.dumps([claim, dict(parameters), code], sort_keys=True, allow_nan=False)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def now() -> str:
    """The time as it is written into records."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Store:
    """The file at `path`; one that does not exist is made by the first transaction."""

    path: Path

    def finished(self, keys: Iterable[str]) -> dict[str, Status]:
        """Those of the keys that are finished, and how."""
        wanted = set(keys)
        with self._reading() as file:
            rows = file.execute("SELECT key, status FROM cells").fetchall()
        return {key: status for key, status in rows if key in wanted}

    def take(self, key: str) -> Status | Literal["ours", "theirs"]:
        """Take a cell to measure it, unless it is finished or another process is at it."""
        with self._writing() as file:
            row = file.execute("SELECT status FROM cells WHERE key = ?", [key]).fetchone()
            if row is not None:
                finished: Status = row[0]
                return finished
            row = file.execute("SELECT owner, heard FROM taken WHERE key = ?", [key]).fetchone()
            if row is not None and row[0] != _owner() and _alive(*row):
                return "theirs"
            entry = [key, _owner(), time.time()]
            file.execute("INSERT OR REPLACE INTO taken VALUES (?, ?, ?)", entry)
            return "ours"

    def still_here(self) -> None:
        """Say that this process is still at what it took."""
        with self._writing() as file:
            file.execute("UPDATE taken SET heard = ? WHERE owner = ?", [time.time(), _owner()])

    def give_back(self) -> None:
        """Let others measure what this process took and did not finish."""
        with self._writing() as file:
            file.execute("DELETE FROM taken WHERE owner = ?", [_owner()])

    def record(self, record: Record) -> None:
        """Keep a finished cell, unless there is one under its key already."""
        row = asdict(record)
        for name in ("parameters", "measured"):
            row[name] = json.dumps(row[name], allow_nan=False)
        columns = ", ".join(row)
        places = ", ".join(f":{name}" for name in row)
        with self._writing() as file:
            file.execute(f"INSERT OR IGNORE INTO cells ({columns}) VALUES ({places})", row)
            file.execute("DELETE FROM taken WHERE key = ?", [record.key])

    def forget_failed(self, keys: Iterable[str]) -> None:
        """Forget those of the cells that failed, so that they are measured again."""
        with self._writing() as file:
            for key in keys:
                file.execute("DELETE FROM cells WHERE key = ? AND status = 'failed'", [key])

    def records(self) -> list[Record]:
        """All finished cells, in the order in which they were finished."""
        with self._reading() as file:
            rows = file.execute("SELECT * FROM cells ORDER BY rowid").fetchall()
        return [_record(row) for row in rows]

    def remember_run(self, claim: str, size: Size, changes: Settings) -> None:
        """Keep what was asked for last, which is what a report shows."""
        with self._writing() as file:
            entry = [claim, size, json.dumps(dict(changes), sort_keys=True)]
            file.execute("DELETE FROM runs WHERE claim = ?", [claim])
            file.execute("INSERT INTO runs (claim, size, changes) VALUES (?, ?, ?)", entry)

    def last_runs(self) -> dict[str, tuple[Size, dict[str, Any]]]:
        """For every claim that was run, the size and the changed settings of the last run."""
        with self._reading() as file:
            rows = file.execute("SELECT claim, size, changes FROM runs").fetchall()
        return {claim: (size, json.loads(changes)) for claim, size, changes in rows}

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """One transaction."""
        with self._open(f"{self.path.resolve().as_uri()}?mode=rwc") as file:
            _patiently(file, "BEGIN IMMEDIATE")
            _check(file, self.path, create=True)
            yield file
            _patiently(file, "COMMIT")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        if not self.path.exists():
            raise FileNotFoundError(f"there is no file {self.path}: onelayer claims run makes one")
        with self._open(f"{self.path.resolve().as_uri()}?mode=rw") as file:
            file.execute("BEGIN")
            _patiently(file, "SELECT count(*) FROM sqlite_master")  # from here on nobody writes
            _check(file, self.path, create=False)
            yield file

    @contextmanager
    def _open(self, address: str) -> Iterator[sqlite3.Connection]:
        try:
            file = sqlite3.connect(address, timeout=_GLANCE, isolation_level=None, uri=True)
        except sqlite3.OperationalError as error:
            raise OSError(f"{self.path} cannot be opened: {error}") from error
        try:
            yield file
        except sqlite3.DatabaseError as error:
            raise OSError(f"{self.path}: {error}") from error
        finally:
            file.close()  # an unfinished transaction is rolled back


def _patiently(file: sqlite3.Connection, statement: str) -> None:
    """Execute a statement as soon as others leave the file free."""
    deadline = time.monotonic() + _WAIT
    while True:
        try:
            file.execute(statement)
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise


def _check(file: sqlite3.Connection, path: Path, create: bool) -> None:
    """Make the tables of a new file; refuse one that another program, or another version, made.

    To a reader a new file, which a run is about to fill, has tables of its own with nothing in
    them, that nobody else sees.
    """
    (application,), (schema,) = (
        file.execute(f"PRAGMA {name}").fetchone() for name in ("application_id", "user_version")
    )
    empty = file.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    if empty and application in (0, _APPLICATION):
        tables = _TABLES if create else _TABLES.replace("CREATE", "CREATE TEMPORARY")
        for statement in tables.split(";"):
            file.execute(statement)
        if not create:
            return
        file.execute(f"PRAGMA application_id = {_APPLICATION}")
        file.execute(f"PRAGMA user_version = {_SCHEMA}")
    elif application != _APPLICATION:
        raise ValueError(f"{path} is no file of measured claims, expected one that onelayer made")
    elif schema != _SCHEMA:
        raise ValueError(f"{path} has tables of version {schema}, expected version {_SCHEMA}")


def _record(row: tuple[Any, ...]) -> Record:
    key, claim, parameters, code, status, measured, *rest = row
    return Record(key, claim, json.loads(parameters), code, status, json.loads(measured), *rest)


def _owner() -> str:
    """This process, by names that no other one has."""
    return f"{socket.gethostname()} {os.getpid()} {_started(os.getpid())}"


def _alive(owner: str, heard: float) -> bool:
    """Whether a process may still be at work; of another machine it is only known when it spoke."""
    host, process, started = owner.rsplit(" ", 2)
    if time.time() - heard > SILENCE:
        return False
    return host != socket.gethostname() or _started(int(process)) == started


def _started(process: int) -> str:
    """When a process of this machine was started; empty if it is not there.

    Numbers of processes are used again: with its start it is told from an earlier one.
    """
    try:
        if Path("/proc/self/stat").exists():
            state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
            return "" if state == "Z" else fields[18]
        os.kill(process, 0)
    except PermissionError:  # it is there, and somebody else's
        return "?"
    except OSError:
        return ""
    return "?"
