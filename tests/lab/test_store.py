import os
import socket
import sqlite3
import threading
import time
from dataclasses import replace

import pytest

from onelayer.lab import store as store_module
from onelayer.lab.claim import Result
from onelayer.lab.store import Store, key_of, now


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "lab.sqlite")


def record(key="a", **changes):
    made = Result({"dim": 8, "seed": 0}, {"error": 0.1}, 1.5, "done", "", now(), "here",
                  "noise", "c0de", key)  # fmt: skip
    return replace(made, **changes)


def test_what_is_recorded_comes_back(store):
    kept = [record("a", measured={"x": [1, None, [0.1, "ü"]]}), record("b", status="failed")]
    for one in kept:
        store.record(one)
    assert store.results() == kept
    assert store.finished(["a", "b", "c"]) == {"a": "done", "b": "failed"}


def test_the_first_record_stays(store):
    store.record(record(seconds=1.0))
    store.record(record(seconds=2.0))
    assert [r.seconds for r in store.results()] == [1.0]


def test_a_key_says_what_is_computed():
    cell = {"dim": 8, "seed": 0}
    keys = {
        key_of("noise", cell, "1"),
        key_of("heads", cell, "1"),
        key_of("noise", cell | {"seed": 1}, "1"),
        key_of("noise", cell | {"dim": 8.5}, "1"),
        key_of("noise", cell, "2"),
    }
    assert len(keys) == 5


def test_a_measurement_that_is_no_number_is_refused_whole(store):
    with pytest.raises(ValueError, match="Out of range float"):
        store.record(record(measured={"x": float("nan")}))
    assert not store.path.exists()


def test_a_cell_is_taken_once_until_it_is_given_back(store, monkeypatch):
    assert store.take("a") == "ours"
    assert store.take("a") == "ours"
    monkeypatch.setattr(store_module, "_owner", lambda: _other_process(os.getppid()))
    assert store.take("a") == "theirs"
    monkeypatch.undo()
    store.release()
    monkeypatch.setattr(store_module, "_owner", lambda: _other_process(os.getppid()))
    assert store.take("a") == "ours"


def test_a_finished_cell_is_not_taken(store):
    store.record(record("a"))
    store.record(record("b", status="failed"))
    assert [store.take(key) for key in "ab"] == ["done", "failed"]


def test_what_a_dead_process_took_is_free(store, monkeypatch):
    monkeypatch.setattr(store_module, "_owner", lambda: f"{socket.gethostname()} 999999999 1")
    assert store.take("a") == "ours"
    monkeypatch.undo()
    assert store.take("a") == "ours"


def test_what_an_earlier_process_with_our_number_took_is_free(store, monkeypatch):
    earlier = f"{socket.gethostname()} {os.getpid()} 1"
    monkeypatch.setattr(store_module, "_owner", lambda: earlier)
    assert store.take("a") == "ours"
    monkeypatch.undo()
    assert store.take("a") == "ours"


def test_another_machine_is_believed_until_it_falls_silent(store, monkeypatch):
    monkeypatch.setattr(store_module, "_owner", lambda: "elsewhere 1 1")
    store.take("a")
    monkeypatch.undo()
    assert store.take("a") == "theirs"
    later = time.time() + store_module.SILENCE + 1
    monkeypatch.setattr(time, "time", lambda: later)
    assert store.take("a") == "ours"


def test_a_sign_of_life_keeps_what_was_taken(store, monkeypatch):
    start = time.time()
    other = _other_process(os.getppid())
    monkeypatch.setattr(store_module, "_owner", lambda: other)
    store.take("a")
    monkeypatch.setattr(time, "time", lambda: start + store_module.SILENCE)
    store.heartbeat()
    monkeypatch.setattr(store_module, "_owner", lambda: "another 1 1")
    monkeypatch.setattr(time, "time", lambda: start + 1.5 * store_module.SILENCE)
    assert store.take("a") == "theirs"


def test_failed_cells_can_be_forgotten_but_not_others(store):
    store.record(record("a"))
    store.record(record("b", status="failed"))
    store.forget_failed(["a", "b"])
    assert store.finished(["a", "b"]) == {"a": "done"}


def test_the_last_run_of_a_claim_is_remembered(store):
    store.remember_run("noise", "quick", {})
    store.remember_run("heads", "default", {"dim": [8, 12]})
    store.remember_run("noise", "paper", {"seeds": 2})
    assert store.last_runs() == {
        "heads": ("default", {"dim": [8, 12]}),
        "noise": ("paper", {"seeds": 2}),
    }


# Files that are not as they should be


def test_a_file_that_is_not_there_is_not_made_by_reading(store):
    with pytest.raises(FileNotFoundError, match=r"no file .*: onelayer claims run creates"):
        store.results()
    assert not store.path.exists()


def test_a_file_that_a_run_is_about_to_fill_has_nothing_in_it(store):
    store.path.touch()
    assert (store.results(), store.last_runs(), store.finished(["a"])) == ([], {}, {})
    assert store.path.read_bytes() == b""
    store.record(record("a"))
    assert store.finished(["a"]) == {"a": "done"}


def test_another_file_is_refused(store):
    store.path.write_text("not a database, " * 100)
    for call in (store.results, store.last_runs, lambda: store.take("a")):
        with pytest.raises(OSError, match="file is not a database"):
            call()


def test_a_database_of_another_program_is_left_alone(store):
    with sqlite3.connect(store.path) as file:
        file.execute("CREATE TABLE mine (x)")
    file.close()
    for call in (store.results, lambda: store.record(record())):
        with pytest.raises(ValueError, match="is not a file of measured claims"):
            call()


def test_a_file_of_another_version_is_refused(store):
    store.record(record())
    with sqlite3.connect(store.path) as file:
        file.execute("PRAGMA user_version = 7")
    file.close()
    with pytest.raises(ValueError, match="has tables of version 7, expected version 1"):
        store.results()


def test_a_folder_that_is_not_there_is_told(tmp_path):
    with pytest.raises(OSError, match="cannot be opened: unable to open database file"):
        Store(tmp_path / "missing" / "lab.sqlite").record(record())


@pytest.mark.slow
def test_a_file_cut_short_is_told_and_never_half_read(store):
    for i in range(200):
        store.record(record(str(i)))
    store.path.write_bytes(store.path.read_bytes()[:20000])
    with pytest.raises(OSError, match="malformed"):
        store.results()


def test_a_transaction_that_breaks_leaves_nothing(store):
    store.record(record("a"))

    def break_off():
        with store._writing() as file:
            file.execute("DELETE FROM cells")
            file.execute("and then")

    with pytest.raises(OSError, match="syntax error"):
        break_off()
    assert [r.key for r in store.results()] == ["a"]


@pytest.mark.slow
def test_a_file_that_another_program_holds_is_waited_for(store):
    store.record(record("a"))
    holder = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN EXCLUSIVE")
    release = threading.Timer(0.5, holder.execute, ["COMMIT"])
    release.start()
    store.record(record("b"))
    assert [r.key for r in store.results()] == ["a", "b"]
    release.join()
    holder.close()


@pytest.mark.slow
def test_a_file_that_is_held_for_too_long_is_told(store, monkeypatch):
    monkeypatch.setattr(store_module, "_WAIT", 0.2)
    store.record(record("a"))
    holder = sqlite3.connect(store.path, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    for call in (store.results, lambda: store.record(record("b"))):
        with pytest.raises(OSError, match="database is locked"):
            call()
    holder.execute("COMMIT")
    holder.close()


def _other_process(number):
    return f"{socket.gethostname()} {number} {store_module._started(number)}"


def test_a_path_may_be_text(tmp_path):
    store = Store(str(tmp_path / "lab.sqlite"))
    assert store == Store(tmp_path / "lab.sqlite")
    store.record(record())
    assert len(store.results()) == 1
    with pytest.raises(TypeError):
        Store(7)
