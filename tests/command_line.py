"""The command line in tests: run in this process, and read without its decoration."""

import re

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
