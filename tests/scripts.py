"""Scripts outside of the package, run as a reader would run them."""

import importlib.util
import os
import subprocess
import sys


def output(script, *arguments):
    """What a script prints on a wide terminal, and what it tells meanwhile on stderr."""
    result = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def cells(printed):
    """The cells of the table in what a script printed, row by row."""
    lines = [line for line in printed.splitlines() if line.startswith(("┃", "│"))]
    return [
        [cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")] for line in lines
    ]


def module(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found
