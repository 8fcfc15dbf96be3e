from dataclasses import replace

import numpy as np
import pytest
from cases import random_case

from onelayer import AttentionLayer, inputs, recover
from onelayer.data import sources
from onelayer.recovery.examples import whiten
from onelayer.recovery.strategies import cost, settings
from onelayer.recovery.validation import ValidatedExamples


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.2, "1 s"), (42.3, "42 s"), (95.0, "1.6 min"), (1500.0, "25 min"), (9000.0, "2.5 h")],
)
def test_a_plan_is_described_in_words(seconds, words):
    text = str(cost.CostEstimate(2679, 3.14e9, seconds))
    assert text == f"steps on 2,679 examples, up to 3.1 GB, about {words}"


def test_more_of_anything_takes_more(xp_array, monkeypatch):
    monkeypatch.setattr(cost, "_seconds_per_operation", lambda *_: 1e-9)
    posed = random_case(0, n=40, dim=4, heads=2).problem(xp_array)
    wide = random_case(0, n=40, dim=8, heads=2).problem(xp_array)
    least = cost.plan(posed, 2, 20)
    for more in (cost.plan(posed, 3, 20), cost.plan(wide, 2, 20)):
        assert more.bytes > least.bytes
        assert more.seconds > least.seconds
    assert cost.plan(posed, 2, 40).seconds > least.seconds


def test_seconds_follow_a_trial(monkeypatch):
    posed = random_case(0, n=40, dim=4, heads=2).problem()
    ticks = iter(np.cumsum([1.0] * 8))
    monkeypatch.setattr(cost.time, "perf_counter", lambda: next(ticks))
    assert cost._seconds_per_operation(posed.whitening, 8) == pytest.approx(1 / (4096 * 4 * 8))


def test_examples_that_stay_elsewhere_take_no_memory_here():
    case = random_case(0, n=4000, dim=4, heads=2)
    source = sources.in_memory(case.X, case.Y, None).in_pieces()
    positions = np.arange(4000)
    spread = whiten(ValidatedExamples.of(source), order=positions)
    here, there = (cost.plan(posed, 2, 20).bytes for posed in (case.problem(), spread))
    copies = 3 * 8 * 4000 * case.X.shape[1] * (4 + case.Y.shape[2])
    assert here - there == copies


def test_what_has_no_room_is_not_held(monkeypatch):
    posed = random_case(0, n=400, dim=4, heads=2).problem()
    held = cost.plan(posed, 2, 20).bytes
    monkeypatch.setattr(cost.chunks, "KEPT_BYTES", 1)
    assert cost.plan(posed, 2, 20).bytes < held


def test_large_problems_say_what_they_will_take(request):
    layer = AttentionLayer.random(heads=2, dim=6, seed=0)
    X = inputs.boolean(1500, 4, 6, seed=1)
    small = recover(X, layer(X), heads=2, method="refine")
    assert "plan" not in {row.stage for row in small.trace}
    request.getfixturevalue("all_are_large")
    large = recover(X, layer(X), heads=2, method="refine")
    row = large.trace[1]
    assert row.stage == "plan"
    assert row.note.startswith(f"steps on {row.examples:,} examples, up to ")


def test_a_problem_is_large_by_the_operations_of_a_product():
    posed = random_case(0, n=400, dim=4, tokens=3, heads=2).problem()
    examples = cost.examples_for(posed, settings.DEFAULT.small.first_equations, 2, None)
    operations = cost.product_operations(posed, examples, 2)
    for factor, large in ((0.99, True), (1.01, False)):
        lowered = replace(settings.DEFAULT.large, operations=factor * operations)
        numbers = replace(settings.DEFAULT, large=lowered)
        assert cost.is_large(posed, 2, None, numbers) is large
    assert not cost.is_large(posed, 2, None, settings.DEFAULT)
