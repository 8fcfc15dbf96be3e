import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import lab_fakes
import pytest
from command_line import run, words

from onelayer.lab import claims
from onelayer.lab.store import Store


@pytest.fixture(autouse=True)
def fakes(monkeypatch, tmp_path):
    """Two quick claims in the place of the true ones, threads in the place of processes."""
    made = [
        lab_fakes.claim(lab_fakes.double, name="double", number=[0, 1], kind=["a_{1,2}"]),
        lab_fakes.claim(lab_fakes.falter, name="falter"),
    ]
    known = {claim.name: claim for claim in made}
    monkeypatch.setattr(claims, "known", lambda: known)
    monkeypatch.setattr("onelayer.lab.run.LocalPool", lab_fakes.Threads)
    monkeypatch.chdir(tmp_path)


def records(store="onelayer-lab.sqlite"):
    return Store(Path(store)).results()


def test_claims_are_listed_with_their_cells():
    result = run("claims", "list")
    assert result.exit_code == 0
    told = words(result.stdout)
    assert "double A claim that can double 2 2 2" in told
    assert "falter A claim that can falter 4 4 4" in told
    assert "arXiv 2307.11353" in told


def test_a_claim_is_shown_before_and_after_it_is_run():
    told = words(run("claims", "show", "double").stdout)
    assert "Predicted: values are small" in told
    assert "Rule: all values are below 100" in told
    assert "number 0, 1 0, 1 0, 1" in told
    assert "Measured" not in told
    run("claims", "run", "double", "--quick")
    told = words(run("claims", "show", "double").stdout)
    assert "Measured at size quick: holds" in told
    assert "all values are below 100 yes yes" in told


def test_a_run_prints_verdicts_and_is_not_repeated():
    result = run("claims", "run", "double")
    assert result.exit_code == 0
    assert "double default holds 1/1 all values are below 100: yes" in words(result.stdout)
    before = records()
    assert run("claims", "run", "double").exit_code == 0
    assert records() == before


def test_failed_cells_are_told_and_can_be_retried():
    result = run("claims", "run", "falter", "--quick")
    assert result.exit_code == 1
    assert "falter quick undecided of 4 cells 1 failed" in words(result.stdout)
    assert "1 of 4 cells failed" in words(result.stderr)
    told = words(run("claims", "show", "falter").stdout)
    assert "RuntimeError: two is too much" in told
    assert "'number': 2" in told
    first = records()
    assert run("claims", "run", "falter", "--quick", "--retry-failed").exit_code == 1
    assert len(records()) == len(first)


def test_settings_are_changed_with_the_types_of_the_claim():
    changes = ["--set", "number=5,60", "--set", "seeds=2", "--set", "kind=b_{1,2},c"]
    assert run("claims", "run", "double", *changes).exit_code == 0
    found = {
        (r.parameters["number"], r.parameters["kind"], r.parameters["seed"]) for r in records()
    }
    assert found == {(n, k, s) for n in (5, 60) for k in ("b_{1,2}", "c") for s in (0, 1)}
    result = run("claims", "show", "double")
    assert "Measured at size default: fails" in words(result.stdout)
    assert "all values are below 100 yes no" in words(result.stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["claims", "run", "nonsense"], "there is no claim 'nonsense', expected one of double"),
        (["claims", "show", "nonsense"], "there is no claim 'nonsense', expected one of double"),
        (["claims", "run", "--quick", "--paper"], "got --quick and --paper, expected one"),
        (["claims", "run", "--set", "number"], "got --set number, expected NAME=VALUE"),
        (["claims", "run", "--set", "x=1"], "double has no setting 'x', expected one of number"),
        (["claims", "run", "--set", "number=x"], "double: number is 'x', expected a value like 0"),
        (["claims", "run", "--set", "seeds=1,2"], "double: seeds is [1, 2], expected one value"),
        (
            ["claims", "run", "--set", "seeds=0"],
            "seeds is 0, expected a whole number from 1 to 10000",
        ),
        (["claims", "run", "--cluster", ""], "no Dask scheduler answers at"),
        (
            ["report", "-o", "missing/x.html"],
            "missing is not a folder, expected one to write",
        ),
        (["export", "-o", "missing/x.csv"], "missing is not a folder, expected one to write x.csv"),
        (["claims", "run", "--workers", "2", "--cluster", "tcp://x:1"], "expected one of the two"),
        (
            ["claims", "run", "--store", "missing/lab.sqlite"],
            "missing is not a folder, expected one to write lab.sqlite to",
        ),
        (["report"], "no file onelayer-lab.sqlite: onelayer claims run creates one"),
        (["report", "-o", "x.pdf"], "x.pdf ends in '.pdf', expected one of .html, .md, .txt"),
        (["export", "-o", "x.csv"], "no file onelayer-lab.sqlite"),
    ],
)
def test_what_the_caller_got_wrong_is_one_line(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in words(result.stderr)
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_report_shows_each_claim_as_it_was_run_last(tmp_path):
    run("claims", "run", "double", "--quick")
    run("claims", "run", "double", "--set", "number=7")
    result = run("report", "--figures", "drawn")
    assert result.exit_code == 0
    assert "Wrote onelayer-report.html." in result.stdout
    page = (tmp_path / "onelayer-report.html").read_text("utf-8")
    assert "A claim that can double" in page
    assert "A claim that can falter" not in page
    assert "onelayer claims run double --set number=7" in page
    assert sorted(p.name for p in (tmp_path / "drawn").iterdir()) == ["double.pdf", "double.svg"]
    quick = run("report", "--quick", "-o", "table.md")
    assert "falter quick undecided of 4 cells 4 not run" in words(quick.stdout)
    assert "| undecided |" in (tmp_path / "table.md").read_text("utf-8")


def test_settings_that_a_claim_no_longer_has_cost_its_own_verdict_only(tmp_path):
    run("claims", "run", "double")
    store = Store(tmp_path / "onelayer-lab.sqlite")
    store.remember_run("falter", "quick", {"gone": 3})
    result = run("report")
    assert result.exit_code == 0
    told = words(result.stdout)
    assert "falter quick undecided its last run had other settings: falter has no setting" in told
    assert "double default holds" in told


def test_long_errors_are_cut(monkeypatch):
    monkeypatch.setattr("onelayer.cli.lab._LONG", 20)
    run("claims", "run", "falter")
    assert "... or: two is too much" in words(run("claims", "show", "falter").stdout)


@pytest.mark.slow
def test_a_figure_that_breaks_costs_no_other(tmp_path):
    run("claims", "run", "double")
    known = claims.known()

    def break_off(results, figure):
        raise KeyError("odd")

    known["broken"] = replace(known["double"], name="broken", draw=break_off)
    assert run("claims", "run", "broken").exit_code == 0
    result = run("report", "--figures", "drawn")
    assert result.exit_code == 0
    assert "no figure of broken: KeyError: 'odd'" in words(result.stderr)
    assert sorted(p.name for p in (tmp_path / "drawn").iterdir()) == ["double.pdf", "double.svg"]


def test_text_files_are_written_as_text(tmp_path):
    run("claims", "run", "double")
    assert "Wrote table.txt." in run("report", "-o", "table.txt").stdout
    assert (tmp_path / "table.txt").read_text("utf-8").startswith("| Claim | Prediction |")
    assert "Wrote 2 cells to cells.txt." in words(run("export", "-o", "cells.txt").stdout)
    assert (tmp_path / "cells.txt").read_text("utf-8").startswith("claim,seed,status,")


def test_a_misspelt_claim_says_what_may_have_been_meant():
    result = run("claims", "run", "duoble")
    assert result.exit_code == 2
    assert "expected one of double, falter; did you mean 'double'?" in words(result.stderr)


def test_a_report_of_nothing_is_refused(tmp_path):
    Store(tmp_path / "onelayer-lab.sqlite").release()
    result = run("report")
    assert result.exit_code == 2
    assert "holds no claims: onelayer claims run measures some" in words(result.stderr)


def test_a_report_without_matplotlib_says_what_is_missing(monkeypatch, tmp_path):
    run("claims", "run", "double")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run("report").exit_code == 0
    assert "pip install matplotlib" in (tmp_path / "onelayer-report.html").read_text("utf-8")
    result = run("report", "--figures", "drawn")
    assert result.exit_code == 2
    assert "pip install matplotlib" in words(result.stderr)


def test_cells_are_exported(tmp_path):
    run("claims", "run", "--quick")
    result = run("export", "-o", "all.csv")
    assert "Wrote 6 cells to all.csv." in result.stdout
    assert len((tmp_path / "all.csv").read_text("utf-8").splitlines()) > 6
    assert (
        "Wrote 2 cells to double.parquet." in run("export", "double", "-o", "double.parquet").stdout
    )


@pytest.mark.slow
def test_an_interruption_is_told_and_leaves_a_file_to_go_on_with(tmp_path):
    """The true command, with a claim that takes its time, interrupted as a terminal does it."""
    command = [sys.executable, "-m", "onelayer.cli", "claims", "run", "expressivity", "--set",
               "heads=2,3,2000", "--set", "examples=8000"]  # fmt: skip
    child = subprocess.Popen(
        command, cwd=tmp_path, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    file = tmp_path / "onelayer-lab.sqlite"
    deadline = time.monotonic() + 100
    while (not file.exists() or not records(file)) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.killpg(child.pid, signal.SIGINT)
    _, told = child.communicate(timeout=30)
    assert child.returncode == 130
    assert "interrupted; what is finished is in onelayer-lab.sqlite" in words(told)
    assert "Traceback" not in told
    assert len(records(file)) >= 1
