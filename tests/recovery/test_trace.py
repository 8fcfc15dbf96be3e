from cases import random_case

from onelayer import attention
from onelayer.recovery import refine
from onelayer.recovery.trace import Log


def test_the_log_counts_tells_and_ends():
    heard = []
    log = Log(max_steps=2, max_seconds=None, listener=heard.append)
    case = random_case(0, n=60, heads=3)
    state = refine.begin(case.problem(), attention.stack(case.attention), None)
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
