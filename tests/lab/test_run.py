import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import lab_fakes
import pytest

from onelayer.lab.run import Plan, run
from onelayer.lab.store import Store

TESTS = Path(__file__).parents[1]


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "lab.sqlite")


@pytest.fixture
def threads(monkeypatch):
    monkeypatch.setattr("onelayer.lab.run.LocalPool", lab_fakes.Threads)


def values(store):
    return {r.parameters["number"]: r.measured.get("value") for r in store.results()}


def test_cells_are_measured_once_and_told(store, threads):
    told = []
    plan = Plan(lab_fakes.claim(lab_fakes.double), "quick")
    final = run([plan], store, workers=2, progress=told.append)
    assert values(store) == {0: 0, 1: 2, 2: 4, 3: 6}
    assert [progress.done for progress in told] == [0, 1, 2, 3, 4]
    assert (final.done, final.failed, final.total, final.claim) == (4, 0, 4, "double")
    before = store.results()
    assert run([plan], store, workers=2).done == 4
    assert store.results() == before
    assert store.last_runs() == {"double": ("quick", {})}


def test_changed_settings_are_other_cells(store, threads):
    fake = lab_fakes.claim(lab_fakes.double)
    run([Plan(fake, "quick", {"number": [1]})], store)
    run([Plan(fake, "quick", {"number": [1, 5], "seeds": 2})], store)
    assert sorted(r.measured["value"] for r in store.results()) == [2, 3, 10, 11]


def test_a_cell_that_two_plans_share_is_one(store, threads):
    fake = lab_fakes.claim(lab_fakes.double, number=[1, 1])
    plans = [Plan(fake, "quick"), Plan(fake, "default", {"number": [1, 2]})]
    assert run(plans, store).total == 2


def test_a_cell_that_raises_is_kept_with_its_error_and_does_not_stop_others(store, threads):
    plan = Plan(lab_fakes.claim(lab_fakes.falter), "quick")
    final = run([plan], store, workers=2)
    assert (final.done, final.failed) == (3, 1)
    (failed,) = [r for r in store.results() if r.status == "failed"]
    assert failed.parameters["number"] == 2
    assert "RuntimeError: two is too much" in failed.error
    assert "in falter" in failed.error
    assert failed.measured == {}
    assert run([plan], store).failed == 1
    assert [r.key for r in store.results()].count(failed.key) == 1
    again = run([plan], store, retry_failed=True)
    (retried,) = [r for r in store.results() if r.status == "failed"]
    assert again.failed == 1
    assert retried.finished >= failed.finished


def test_what_is_no_measurement_is_a_failure_that_says_so(store, threads):
    run([Plan(lab_fakes.claim(lab_fakes.immeasurable, number=[0, 1, 2]), "quick")], store)
    empty, infinite, named = (r.error for r in store.results())
    assert "TypeError: measured {}, expected a dictionary of values by name" in empty
    assert "ValueError: measured [1, inf] for value, expected finite numbers" in infinite
    assert "ValueError: measured {} for value, expected finite numbers" in named


def test_a_cell_that_leaves_or_cannot_be_spelled_is_a_failure(store, threads):
    assert run([Plan(lab_fakes.claim(lab_fakes.leave, number=[0, 1]), "quick")], store).failed == 2
    left, unspelled = (r.error for r in store.results())
    assert "SystemExit: 3" in left
    assert "RuntimeError: no character: \\udcff" in unspelled


class Broken(lab_fakes.Threads):
    """A pool of which a process has died since the last look: a cell cannot be submitted."""

    restarts = 0

    def submit(self, measure, parameters, code):
        if Broken.restarts == 0:
            raise BrokenProcessPool("a process died")
        return super().submit(measure, parameters, code)

    def restart(self):
        Broken.restarts += 1


def test_a_process_that_died_while_nobody_looked_costs_nothing(store, monkeypatch):
    monkeypatch.setattr("onelayer.lab.run.LocalPool", Broken)
    final = run([Plan(lab_fakes.claim(lab_fakes.double), "quick")], store, workers=2)
    assert (final.done, final.failed, Broken.restarts) == (4, 0, 1)


def test_no_more_processes_than_cells(store, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "onelayer.lab.run.LocalPool", lambda n: asked.append(n) or lab_fakes.Threads(n)
    )
    run([Plan(lab_fakes.claim(lab_fakes.double), "quick")], store, workers=1000)
    assert asked == [4]


@pytest.mark.slow
def test_a_process_that_dies_costs_its_own_cell_only(store):
    final = run([Plan(lab_fakes.claim(lab_fakes.die), "quick")], store, workers=2)
    assert (final.done, final.failed) == (3, 1)
    (failed,) = [r for r in store.results() if r.status == "failed"]
    assert failed.parameters["number"] == 2
    assert "The process that measured this cell died" in failed.error


# Killed, interrupted, side by side


@pytest.fixture
def program():
    """Starts runs as programs of their own, each with its processes in a group that can be killed.

    What still runs when the test is over is killed.
    """
    children = []

    def start(measure, store, log, *numbers):
        arguments = [measure, str(store.path), str(log), *map(str, numbers)]
        child = subprocess.Popen(
            [sys.executable, str(TESTS / "lab_fakes.py"), *arguments],
            start_new_session=True,
            stderr=subprocess.PIPE,
        )
        children.append(child)
        return child

    yield start
    for child in children:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        child.stderr.close()


def measured(log):
    return list(map(int, log.read_text().split())) if log.exists() else []


def finished(store):
    return {r.parameters["number"] for r in store.results()} if store.path.exists() else set()


def intact(store):
    with sqlite3.connect(store.path) as file:
        verdict = file.execute("PRAGMA integrity_check").fetchone()
    file.close()
    return verdict == ("ok",)


@pytest.mark.slow
def test_killed_again_and_again_nothing_is_lost_repeated_or_corrupt(program, store, tmp_path):
    log, count, kills = tmp_path / "log", 18, 2
    ends = []
    while not ends or ends[-1] != 0:
        before, lines = finished(store), len(measured(log))
        child = program("deadly", store, log, count, kills, 2)
        child.communicate(timeout=120)
        ends.append(child.returncode)
        assert intact(store)
        assert before <= finished(store)
        assert not before & set(measured(log)[lines:]), "a finished cell was measured again"
    assert ends == [-signal.SIGKILL] * (len(ends) - 1) + [0]
    assert len(ends) > kills / 2  # one kill may hit when another is on its way
    assert finished(store) == set(range(count))
    assert taken(store) == []


@pytest.mark.slow
def test_two_runs_on_one_file_share_the_work(program, store, tmp_path):
    log = tmp_path / "log"
    children = [program("logged", store, log, 16, 0.05, 2) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0, 0]
    assert sorted(measured(log)) == list(range(16))
    assert finished(store) == set(range(16))


@pytest.mark.slow
def test_a_run_waits_for_what_another_is_at_and_takes_over_when_it_dies(program, store, tmp_path):
    log = tmp_path / "log"
    slow = program("logged", store, log, 1, 60, 1)
    while not store.path.exists() or not taken(store):
        time.sleep(0.05)
    second = program("logged", store, log, 1, 60, 1)
    time.sleep(1.5)
    assert second.poll() is None
    assert len(taken(store)) == 1
    os.killpg(slow.pid, signal.SIGKILL)
    slow.communicate()
    owner = f" {slow.pid} "
    deadline = time.monotonic() + 30
    while owner in taken(store)[0] and time.monotonic() < deadline:
        time.sleep(0.05)
    assert f" {second.pid} " in taken(store)[0]


def gone(group, within):
    """Whether all processes of a group end within so many seconds."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def taken(store):
    with store._reading() as file:
        return [owner for (owner,) in file.execute("SELECT owner FROM taken")]


@pytest.mark.slow
def test_an_interrupted_run_leaves_what_is_finished_and_nothing_running(program, store, tmp_path):
    log = tmp_path / "log"
    child = program("logged", store, log, 80, 0.05, 2)
    while len(finished(store)) < 3:
        time.sleep(0.01)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does: to all processes of the run
    _, told = child.communicate(timeout=30)
    assert b"KeyboardInterrupt" in told
    assert gone(child.pid, within=10)
    assert intact(store)
    assert taken(store) == []
    assert 3 <= len(finished(store)) < 80
