import numpy as np
import pytest
from cases import missing_one, with_outputs

from onelayer.array.backend import to_numpy
from onelayer.heads import dense
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.gauss_newton.levenberg_marquardt import FAST
from onelayer.recovery.gauss_newton.stopping import Ending, StoppingRule
from onelayer.recovery.strategies.large import Large
from onelayer.recovery.strategies.search import Search
from onelayer.recovery.trace import Log

# Heads that are missing


def searching(**options):
    """A search among examples of a layer, a fit that misses one of its heads, and all of them."""
    posed, fit, true = missing_one(**options)
    log = Log(max_steps=1000, max_seconds=None)
    rng = np.random.default_rng(0)
    return Large(Search(posed, posed, None, 1e-12, 1e-16, rng, log)), fit, true


@pytest.mark.slow
def test_a_stage_is_repaired_and_goes_on_to_the_end(monkeypatch):
    strategy, fit, true = searching()
    stuck = iter([True])  # at once, and then never again
    monkeypatch.setattr(StoppingRule, "_halted", lambda *_: next(stuck, False))
    outcome = strategy.repaired_stage("start", fit.theta)
    assert outcome.ending is Ending.REACHED
    stages = [row.stage for row in strategy.search.log.rows]
    assert stages[0] == "start"
    assert stages[-1] == "start, a head replaced"
    left = dense.by_head(to_numpy(outcome.fit.theta), 8)
    for head in dense.by_head(true, 8):
        assert min(np.linalg.norm(head - one) for one in left) < 1e-9


# Few examples


def test_a_stage_that_fits_its_few_examples_alone_is_left():
    strategy, fit, _ = searching()
    few = strategy.search.problem.sample(30)
    outcome = strategy.stage("few", fit.theta, problem=few, eager=True)
    assert outcome.ending is Ending.OVERFITTED
    error = outcome.fit.error
    assert varpro.held_out_error(outcome.fit, strategy.search.held_out) > 3 * error > 3e-3
    assert strategy.search.used_validation


def test_an_exact_fit_to_few_examples_is_the_end_of_a_large_search():
    strategy, _, true = searching()
    near = true * (1 + 1e-3 * np.random.default_rng(1).standard_normal(true.shape))
    outcome = strategy.fit("start", near, 3, FAST)
    assert outcome.ending is Ending.REACHED
    assert outcome.fit.batches.examples < 200
    assert not outcome.fit.single
    assert {row.stage for row in strategy.search.log.rows} == {"start, few examples"}


def test_when_time_is_spent_the_fit_to_few_examples_is_the_end():
    strategy, fit, _ = searching()
    strategy.search.log.max_seconds = 1e-9
    outcome = strategy.fit("start", fit.theta, 3, FAST)
    assert outcome.ending is Ending.BUDGET
    assert outcome.fit.batches.examples < strategy.search.problem.examples
    assert {row.stage for row in strategy.search.log.rows} == {"start, few examples"}


def test_an_exact_fit_to_few_examples_that_others_do_not_have_is_none():
    strategy, _, true = searching()
    off = np.random.default_rng(0).standard_normal(strategy.search.held_out.Y.shape)
    held_out = strategy.search.held_out
    strategy.search.held_out = with_outputs(held_out, held_out.Y + 1e-6 * off)
    outcome = strategy.fit("start", true, 3, FAST)
    assert outcome.fit.batches.examples == strategy.search.problem.examples
