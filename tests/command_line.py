"""The command line in tests: run in this process, and read without its decoration."""

import os
import re
import signal
import subprocess
import sys

from typer.testing import CliRunner

from onelayer.cli import app


def run(*arguments):
    """The command in this process, its output on wide lines."""
    runner = CliRunner(env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    return runner.invoke(app, [str(a) for a in arguments])


def words(text):
    """The text without colours, boxes and line breaks."""
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    return " ".join(re.sub(r"[│┃╭╮╰╯─━┏┓└┘┌┐├┤┡┩╇┴┬┼]", " ", plain).split())


def command(*arguments):
    return [sys.executable, "-m", "onelayer.cli", *(str(a) for a in arguments)]


def run_alone(*arguments, **options):
    """The command in a process of its own."""
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=60, check=False, **options
    )


def assert_refused(result, *parts, code=2):
    """One line on standard error that holds the parts, and nothing else."""
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1
    line = words(lines[0])
    assert line.startswith("onelayer: ")
    for part in parts:
        assert part in line
    assert getattr(result, "exit_code", getattr(result, "returncode", None)) == code


def run_and_interrupt(sign, *arguments):
    """Status, standard output and the words on standard error of a command that gets Ctrl-C.

    It gets it once `sign` shows in its progress: the work is under way.
    """
    process = subprocess.Popen(
        command(*arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "TTY_COMPATIBLE": "1", "TERM": "xterm"},  # so that progress is shown
    )
    try:
        shown = b""
        while sign not in shown:
            part = process.stderr.read1(1024)
            assert part, "the process ended by itself"
            shown += part
        process.send_signal(signal.SIGINT)
        printed, rest = process.communicate(timeout=30)
    finally:
        process.kill()
        process.wait()
    return process.returncode, printed, words((shown + rest).decode())
