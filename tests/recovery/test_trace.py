from cases import random_case

from onelayer.heads import dense
from onelayer.recovery.gauss_newton import levenberg_marquardt
from onelayer.recovery.trace import Log, Measured, TraceRow


def test_the_log_counts_tells_and_ends():
    heard = []
    log = Log(max_steps=2, max_seconds=None, listener=heard.append)
    case = random_case(0, n=60, heads=3)
    state = levenberg_marquardt.begin(
        case.problem().batches(len(case.attention)), dense.pack(case.attention), None
    )
    assert not log.spent
    log.add("one", state)
    assert not log.spent
    log.add("two", state, held_out_error=0.5)
    assert log.spent
    assert log.rows == heard
    assert [row.step for row in heard] == [0, 1]
    assert [row.stage for row in heard] == ["one", "two"]
    assert [row.held_out_error for row in heard] == [None, 0.5]
    assert {row.heads for row in heard} == {3}
    assert {row.examples for row in heard} == {60}


def test_a_log_is_spent_when_its_seconds_are():
    log = Log(max_steps=10, max_seconds=1e-9)
    assert log.seconds > 0
    assert log.spent
    assert not Log(max_steps=10, max_seconds=100.0).spent


def test_what_a_phase_measured_is_a_row_like_any_other():
    heard = []
    log = Log(max_steps=3, max_seconds=None, listener=heard.append)
    case = random_case(0, n=60, heads=3)
    log.add(
        "start",
        levenberg_marquardt.begin(
            case.problem().batches(len(case.attention)), dense.pack(case.attention), None
        ),
    )
    log.measured("phase 1", 0, Measured(examples=500, error=0.25, note="by correlation"))
    assert not log.spent
    log.measured("phase 5", 2, Measured(examples=7, error=float("inf"), note=""))
    assert log.spent
    assert log.rows == heard
    first, second = heard[1:]
    assert first == TraceRow(
        step=1,
        stage="phase 1",
        heads=0,
        examples=500,
        error=0.25,
        damping=0.0,
        products=0,
        seconds=first.seconds,
        held_out_error=None,
        note="by correlation",
    )
    assert (second.step, second.stage, second.heads, second.examples) == (2, "phase 5", 2, 7)
    assert second.error == float("inf")
    assert 0 < heard[0].seconds <= first.seconds <= second.seconds <= log.seconds


def test_steps_have_no_note():
    log = Log(max_steps=2, max_seconds=None)
    case = random_case(0, n=60)
    log.add(
        "start",
        levenberg_marquardt.begin(
            case.problem().batches(len(case.attention)), dense.pack(case.attention), None
        ),
    )
    assert log.rows[0].note == ""


def test_passes_are_told_with_the_stage_that_is_under_way():
    told = []
    log = Log(max_steps=2, max_seconds=None, working=lambda *said: told.append(said))
    log.stage = "phase 2"
    log.passing(0.5)
    assert told == [("phase 2", 0.5)]
    assert log.rows == []
    Log(max_steps=2, max_seconds=None).passing(0.5)
