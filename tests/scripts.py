"""Run scripts outside of the package and read the tables they print."""

import importlib.util
import io
import os
import runpy
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout

import pytest
from matplotlib import pyplot

from onelayer.data import chunks


def output(script, *arguments):
    """Standard output and error of a script that runs as `__main__` in this process.

    A script imports its siblings and may change the size of chunks; both are undone afterwards.
    Figures are drawn and not shown.
    """
    printed, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(printed),
        redirect_stderr(errors),
    ):
        patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
        patch.setattr(sys, "path", [str(script.parent), *sys.path])
        patch.setattr(chunks, "CHUNK_BYTES", chunks.CHUNK_BYTES)
        patch.setattr(pyplot, "show", lambda: None)
        status = 0
        try:
            runpy.run_path(str(script), run_name="__main__")
        except SystemExit as end:
            status = end.code
        finally:
            pyplot.close("all")
    assert not status, f"{script} exited with {status}: {errors.getvalue()}"
    return printed.getvalue(), errors.getvalue()


def output_of_process(script, *arguments):
    """Standard output and error of a script that runs in a new process, which shows no figures."""
    result = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "200", "MPLBACKEND": "template"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def cells(printed):
    """The cells of a printed table, row by row."""
    lines = [line for line in printed.splitlines() if line.startswith(("┃", "│"))]
    return [
        [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")] for line in lines
    ]


def module(path):
    """A script, imported as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
