from dataclasses import replace

import numpy as np
import pytest
from cases import random_case
from factorings import solved_problem

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


def planned(posed, heads, examples, rank=None):
    return cost.plan(posed, heads, examples, rank, settings.DEFAULT)


def test_more_of_anything_takes_more(xp_array, monkeypatch):
    monkeypatch.setattr(cost, "_seconds_per_operation", lambda *_: 1e-9)
    posed = random_case(0, n=40, dim=4, heads=2).problem(xp_array)
    wide = random_case(0, n=40, dim=8, heads=2).problem(xp_array)
    least = planned(posed, 2, 20)
    for more in (planned(posed, 3, 20), planned(wide, 2, 20)):
        assert more.bytes > least.bytes
        assert more.seconds > least.seconds
    assert planned(posed, 2, 40).seconds > least.seconds
    low, higher = (planned(posed, 2, 20, rank) for rank in (1, 3))
    assert low.seconds < higher.seconds


def test_a_known_rank_takes_fewer_unknowns_where_projections_have_it():
    posed = random_case(0, n=40, dim=4, out_dim=3, heads=2).problem()
    # Matrices of rank r in d x e dimensions have r (d + e - r) free numbers.
    for rank, expected in ((1, 2 * (7 + 6)), (2, 2 * (12 + 10)), (None, 2 * (16 + 12))):
        assert cost.factored_unknowns(posed, 2, rank) == expected
    per_example = posed.equations / 40
    assert cost.factored_examples(posed, 10.0, 2, 1) == np.ceil(10 * 26 / per_example)


def test_a_row_multiplies_every_factor_once():
    _, factors = solved_problem(n=10, heads=3, dim=5, rank=2, value_rank=2, bias=True)
    multiplied = 5 * 6 + 5 * 6 + 5 * 3 + 5 * 6 + 6 * 5 + 5  # Q, K, c, V, O and b
    assert cost.row_operations(factors) == 2 * multiplied


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
    here, there = (planned(posed, 2, 20).bytes for posed in (case.problem(), spread))
    copies = 3 * 8 * 4000 * case.X.shape[1] * (4 + case.Y.shape[2])
    assert here - there == copies


def test_what_has_no_room_is_not_held(monkeypatch):
    posed = random_case(0, n=400, dim=4, heads=2).problem()
    held = planned(posed, 2, 20).bytes
    monkeypatch.setattr(cost.chunks, "KEPT_BYTES", 1)
    assert planned(posed, 2, 20).bytes < held


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
