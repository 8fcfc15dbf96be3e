from dataclasses import replace

import numpy as np
import pytest
from cases import missing_one, solved

from onelayer.array.backend import to_numpy
from onelayer.heads import dense
from onelayer.recovery.gauss_newton import levenberg_marquardt, stopping, varpro
from onelayer.recovery.gauss_newton.stopping import Ending
from onelayer.recovery.strategies import search
from onelayer.recovery.trace import Log

# Heads that are missing


def searching(**options):
    """A search among examples of a layer, a fit that misses one of its heads, and all of them."""
    posed, fit, true = missing_one(**options)
    log = Log(max_steps=1000, max_seconds=None)
    rng = np.random.default_rng(0)
    return search.Search(posed, posed, None, 1e-12, 1e-16, 0, rng, log), fit, true


def test_a_stage_is_repaired_and_goes_on_to_the_end(monkeypatch):
    setting, fit, true = searching()
    monkeypatch.setattr(search, "_LARGE", 0.0)
    stuck = iter([True])  # at once, and then never again
    monkeypatch.setattr(stopping, "_halted", lambda _: next(stuck, False))
    outcome = setting.repaired_stage("start", fit.theta)
    assert outcome.ending is Ending.REACHED
    stages = [row.stage for row in setting.log.rows]
    assert stages[0] == "start"
    assert stages[-1] == "start, a head replaced"
    left = dense.unpack(to_numpy(outcome.state.fit.theta), 8)
    for head in dense.unpack(true, 8):
        assert min(np.linalg.norm(head - one) for one in left) < 1e-9


# Few examples


def test_a_stage_that_fits_its_few_examples_alone_is_left(monkeypatch):
    monkeypatch.setattr(search, "_LARGE", 0.0)
    setting, fit, _ = searching()
    few = setting.problem.sample(30)
    outcome = setting.stage("few", fit.theta, problem=few, eager=True)
    assert outcome.ending is Ending.OVERFITTED
    error = outcome.state.fit.error
    assert varpro.held_out_error(outcome.state.fit, setting.held_out) > 3 * error > 3e-3
    assert setting.looked


def test_an_exact_fit_to_few_examples_is_the_end_of_a_large_search(monkeypatch):
    setting, _, true = searching()
    monkeypatch.setattr(search, "_LARGE", 0.0)
    near = true * (1 + 1e-3 * np.random.default_rng(1).standard_normal(true.shape))
    outcome = setting.run("start", near, 3, levenberg_marquardt.FAST)
    assert outcome.ending is Ending.REACHED
    assert outcome.state.fit.batches.examples < 200
    assert not outcome.state.fit.single
    assert {row.stage for row in setting.log.rows} == {"start, few examples"}


def test_when_time_is_spent_the_fit_to_few_examples_is_the_end(monkeypatch):
    monkeypatch.setattr(search, "_LARGE", 0.0)
    setting, fit, _ = searching()
    setting.log.max_seconds = 1e-9
    outcome = setting.run("start", fit.theta, 3, levenberg_marquardt.FAST)
    assert outcome.ending is Ending.BUDGET
    assert outcome.state.fit.batches.examples < setting.problem.examples
    assert {row.stage for row in setting.log.rows} == {"start, few examples"}


def test_an_exact_fit_to_few_examples_that_others_do_not_have_is_none(monkeypatch):
    setting, _, true = searching()
    monkeypatch.setattr(search, "_LARGE", 0.0)
    off = np.random.default_rng(0).standard_normal(setting.held_out.Y.shape)
    setting.held_out = replace(setting.held_out, Y=setting.held_out.Y + 1e-6 * off)
    outcome = setting.run("start", true, 3, levenberg_marquardt.FAST)
    assert outcome.state.fit.batches.examples == setting.problem.examples


# Errors


@pytest.mark.parametrize("masked", [False, True])
def test_held_out_error_is_relative_to_the_outputs(xp_array, masked):
    case = solved(masked=masked, bias=True)
    fit = case.fit(xp_array)
    assert varpro.held_out_error(fit, case.problem(xp_array)) < 1e-12
    case.Y[:] += np.random.default_rng(0).standard_normal(case.Y.shape)
    posed = case.problem(xp_array)
    expected = posed.layer(fit.theta, fit.weights)(
        xp_array(case.X), mask=None if case.mask is None else xp_array(case.mask)
    )
    gap = to_numpy(expected) - case.Y
    there = np.ones(gap.shape[:2], dtype=bool) if case.mask is None else case.mask
    size = np.sqrt(np.mean(case.Y[there] ** 2))
    found = varpro.held_out_error(fit, posed)
    assert found == pytest.approx(np.sqrt(np.mean(gap[there] ** 2)) / size, rel=0.01)
