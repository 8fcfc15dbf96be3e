"""The store: one SQLite file with every measured cell, which several runs may share.

A cell is one row, written in one transaction when the cell is finished. The first record of a key
stays. A run takes a cell before it measures it, so that two runs on one file share the work. Cells
of a process that has died, or that has been silent for a while, are free again. The file is opened
for each transaction. SQLite's journal makes a transaction atomic, even under kill -9. Its locks
need a file system that supports them, which some network drives do not.
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
from typing import Any, Literal, cast

from onelayer.lab.claim import Parameters, Result, Settings, Size, Status

SILENCE = 120.0  # seconds without a heartbeat after which the cells of a process are free again
_WAIT = 600.0  # seconds that a transaction waits for others
_SQLITE_WAIT = 0.1  # seconds of a single wait within SQLite, which ignores Ctrl-C
_APPLICATION = 0x6F6E656C  # "onel": the application id of the file, as SQLite calls it
_SCHEMA = 1
_JSON = ("parameters", "measured")  # columns of cells
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


def key_of(claim: str, parameters: Parameters, code: str) -> str:
    """Return the key of a cell, a digest of its claim, parameters and version of the code.

    >>> key_of("noise", {"dim": 8, "seed": 0}, "1") == key_of("noise", {"seed": 0, "dim": 8}, "1")
    True
    """
    content = json.dumps([claim, dict(parameters), code], sort_keys=True, allow_nan=False)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def now() -> str:
    """Return the time in UTC, as ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Store:
    """The store at `path`. The first transaction creates the file if it does not exist."""

    path: Path

    def __init__(self, path: str | os.PathLike[str]) -> None:
        object.__setattr__(self, "path", Path(path))

    def finished(self, keys: Iterable[str]) -> dict[str, Status]:
        """Return the status of those keys that are finished."""
        wanted = set(keys)
        with self._reading() as file:
            rows = file.execute("SELECT key, status FROM cells").fetchall()
        return {key: status for key, status in rows if key in wanted}

    def take(self, key: str) -> Status | Literal["ours", "theirs"]:
        """Take a cell to measure it, unless it is finished or another process has taken it."""
        with self._writing() as file:
            row = file.execute("SELECT status FROM cells WHERE key = ?", [key]).fetchone()
            if row is not None:
                return cast(Status, row[0])
            row = file.execute("SELECT owner, heard FROM taken WHERE key = ?", [key]).fetchone()
            if row is not None and row[0] != _owner() and _alive(*row):
                return "theirs"
            entry = [key, _owner(), time.time()]
            file.execute("INSERT OR REPLACE INTO taken VALUES (?, ?, ?)", entry)
            return "ours"

    def heartbeat(self) -> None:
        """Confirm that this process still works on the cells it has taken."""
        with self._writing() as file:
            file.execute("UPDATE taken SET heard = ? WHERE owner = ?", [time.time(), _owner()])

    def release(self) -> None:
        """Free the cells that this process has taken and not finished."""
        with self._writing() as file:
            file.execute("DELETE FROM taken WHERE owner = ?", [_owner()])

    def record(self, result: Result) -> None:
        """Keep a finished cell, unless its key has a record already."""
        row = asdict(result)
        row |= {name: json.dumps(row[name], allow_nan=False) for name in _JSON}
        columns, places = ", ".join(row), ", ".join(f":{name}" for name in row)
        with self._writing() as file:
            file.execute(f"INSERT OR IGNORE INTO cells ({columns}) VALUES ({places})", row)
            file.execute("DELETE FROM taken WHERE key = ?", [result.key])

    def forget_failed(self, keys: Iterable[str]) -> None:
        """Delete those of the cells that failed, so that they are measured again."""
        with self._writing() as file:
            for key in keys:
                file.execute("DELETE FROM cells WHERE key = ? AND status = 'failed'", [key])

    def results(self) -> list[Result]:
        """Return all finished cells, in the order in which they finished."""
        with self._reading() as file:
            file.row_factory = sqlite3.Row
            rows = [dict(row) for row in file.execute("SELECT * FROM cells ORDER BY rowid")]
        for row in rows:
            row |= {name: json.loads(row[name]) for name in _JSON}
        return [Result(**row) for row in rows]

    def remember_run(self, claim: str, size: Size, changes: Settings) -> None:
        """Store what was run last of a claim, which is what a report shows."""
        with self._writing() as file:
            entry = [claim, size, json.dumps(dict(changes), sort_keys=True)]
            file.execute("DELETE FROM runs WHERE claim = ?", [claim])
            file.execute("INSERT INTO runs (claim, size, changes) VALUES (?, ?, ?)", entry)

    def last_runs(self) -> dict[str, tuple[Size, dict[str, Any]]]:
        """Return the size and the changed settings of the last run of each claim."""
        with self._reading() as file:
            rows = file.execute("SELECT claim, size, changes FROM runs").fetchall()
        return {claim: (size, json.loads(changes)) for claim, size, changes in rows}

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Run one transaction."""
        with self._open(f"{self.path.resolve().as_uri()}?mode=rwc") as file:
            _execute_when_free(file, "BEGIN IMMEDIATE")
            _check(file, self.path, create=True)
            yield file
            _execute_when_free(file, "COMMIT")

    @contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        if not self.path.exists():
            raise FileNotFoundError(f"no file {self.path}: onelayer claims run creates one")
        with self._open(f"{self.path.resolve().as_uri()}?mode=rw") as file:
            file.execute("BEGIN")
            _execute_when_free(file, "SELECT count(*) FROM sqlite_master")  # takes the read lock
            _check(file, self.path, create=False)
            yield file

    @contextmanager
    def _open(self, address: str) -> Iterator[sqlite3.Connection]:
        try:
            file = sqlite3.connect(address, timeout=_SQLITE_WAIT, isolation_level=None, uri=True)
        except sqlite3.OperationalError as error:
            raise OSError(f"{self.path} cannot be opened: {error}") from error
        try:
            yield file
        except sqlite3.DatabaseError as error:
            raise OSError(f"{self.path}: {error}") from error
        finally:
            file.close()  # an unfinished transaction is rolled back


def _execute_when_free(file: sqlite3.Connection, statement: str) -> None:
    """Execute a statement once no other process holds the file."""
    deadline = time.monotonic() + _WAIT
    while True:
        try:
            file.execute(statement)
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise


def _check(file: sqlite3.Connection, path: Path, create: bool) -> None:
    """Create the tables of a new file; refuse a file of another program or another version.

    A reader of a file that is still empty gets empty temporary tables, which only it sees.
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
        raise ValueError(f"{path} is not a file of measured claims, expected one of onelayer")
    elif schema != _SCHEMA:
        raise ValueError(f"{path} has tables of version {schema}, expected version {_SCHEMA}")


def _owner() -> str:
    """A name of this process that no other one has."""
    return f"{socket.gethostname()} {os.getpid()} {_started(os.getpid())}"


def _alive(owner: str, heard: float) -> bool:
    """Whether a process may still be running; for another machine only its heartbeat is known."""
    host, process, started = owner.rsplit(" ", 2)
    if time.time() - heard > SILENCE:
        return False
    return host != socket.gethostname() or _started(int(process)) == started


def _started(process: int) -> str:
    """Start time of a process of this machine, empty if there is no such process.

    Process ids are reused; the start time distinguishes two processes of one id.
    """
    try:
        if Path("/proc/self/stat").exists():
            state, *fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
            return "" if state == "Z" else fields[18]
        os.kill(process, 0)
    except PermissionError:  # it exists and belongs to another user
        return "?"
    except OSError:
        return ""
    return "?"
