from dataclasses import replace

import pytest

from onelayer.recovery.trace import Log, TraceRow


def test_rows_are_numbered_passed_on_and_limited():
    heard = []
    log = Log(max_steps=2, max_seconds=None, listener=heard.append)
    assert not log.spent
    log.write("one", 3, 60, 0.5, damping=0.1, products=7)
    assert not log.spent
    log.write("two", 3, 60, 0.5, held_out_error=0.25)
    assert log.spent
    assert log.rows == heard
    first, second = heard
    assert first == TraceRow(0, "one", 3, 60, 0.5, 0.1, 7, first.seconds)
    assert second == replace(
        first,
        step=1,
        stage="two",
        damping=0.0,
        products=0,
        seconds=second.seconds,
        held_out_error=0.25,
    )
    assert 0 < first.seconds <= second.seconds <= log.seconds


def test_a_row_of_a_phase_has_its_number_and_a_note():
    log = Log(max_steps=3, max_seconds=None)
    log.write("start", 2, 60, 0.5)
    log.write("phase 1", 0, 500, float("inf"), note="by correlation", phase=1)
    assert [row.phase for row in log.rows] == [None, 1]
    assert [row.note for row in log.rows] == ["", "by correlation"]
    assert log.rows[1].error == float("inf")


@pytest.mark.parametrize(("limit", "spent"), [(1e-9, True), (100.0, False)])
def test_time_is_limited(limit, spent):
    log = Log(max_steps=10, max_seconds=limit)
    assert log.seconds > 0
    assert log.spent is log.late() is spent


def test_progress_is_reported_with_the_current_stage():
    heard = []
    log = Log(max_steps=2, max_seconds=None, report=lambda *said: heard.append(said))
    log.stage = "phase 2"
    log.progress(0.5)
    assert heard == [("phase 2", 0.5)]
    assert log.rows == []
    Log(max_steps=2, max_seconds=None).progress(0.5)
