import io

import pytest
from rich.console import Console

from onelayer.recovery import display
from onelayer.recovery.trace import TraceRow


def row(**changes):
    return TraceRow(
        **{
            "step": 7,
            "stage": "grow 3",
            "heads": 5,
            "examples": 123,
            "error": 0.0123,
            "damping": 0.1,
            "products": 4,
            "seconds": 2.5,
            **changes,
        }
    )


@pytest.fixture
def screen():
    """A terminal that only exists in memory."""
    return Console(file=io.StringIO(), force_terminal=True, width=200)


def test_the_latest_step_is_shown(screen):
    with display.live(screen) as listener:
        listener(row())
        listener(row(step=8, error=3e-7))
    text = screen.file.getvalue()
    for part in ("grow 3", "step", "8", "5 heads", "123 examples", "3.0e-07"):
        assert part in text


def test_the_clock_goes_on_between_two_steps(screen, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(display, "monotonic", lambda: now[0])
    with display.live(screen) as listener:
        listener(row(seconds=2.5))
        now[0] += 40
        before = len(screen.file.getvalue())
        listener.view.refresh()
        assert "42.5 s" in screen.file.getvalue()[before:]


def test_what_is_expected_stays_in_sight(screen):
    with display.live(screen) as listener:
        listener(row(stage="plan", note="about 25 min"))
        before = len(screen.file.getvalue())
        listener(row(step=8))
        listener.view.refresh()
        text = screen.file.getvalue()[before:]
    assert "about 25 min" in text
    assert "grow 3" in text


def test_nothing_is_left_when_it_is_over(screen):
    with display.live(screen) as listener:
        listener(row())
    assert screen.file.getvalue().rstrip().endswith("\x1b[2K")


def test_nothing_is_shown_where_there_is_no_terminal():
    console = Console(file=io.StringIO(), force_terminal=False)
    with display.live(console) as listener:
        listener(row())
    assert console.file.getvalue().strip() == ""


def test_the_display_goes_away_when_the_work_fails(screen):
    with pytest.raises(AttributeError), display.live(screen) as listener:
        listener(None)
    assert "\x1b[?25h" in screen.file.getvalue()  # the cursor is back


def test_progress_goes_to_standard_error(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    with display.live() as listener:
        listener(row())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "grow 3" in captured.err
