import io

from rich.console import Console

from onelayer.cli.lab import live_progress
from onelayer.lab.run import Tally


def shown(terminal, *progress, total=40):
    text = io.StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, color_system=None)
    with live_progress(console, total) as listener:
        for step in progress:
            listener(step)
    return text.getvalue()


def test_a_log_has_a_line_for_every_tenth():
    steps = [Tally(n, 0, 40, "noise") for n in range(40)] + [Tally(39, 1, 40, "noise")]
    lines = shown(False, *steps).splitlines()
    assert len(lines) == 11
    assert lines[0] == "0 of 40 cells, 0 failed"
    assert lines[-1] == "40 of 40 cells, 1 failed"


def test_a_log_of_nothing_to_do_is_a_line():
    assert shown(False, Tally(0, 0, 0)) == "0 of 0 cells, 0 failed\n"


def test_a_terminal_shows_claim_cells_failures_and_time():
    text = shown(True, Tally(7, 0, 40), Tally(12, 3, 40, "six-phases"))
    assert "six-phases" in text
    assert "15/40 cells, 3 failed" in text
    assert "left:" in text
