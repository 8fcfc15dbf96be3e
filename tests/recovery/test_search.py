from dataclasses import replace

import numpy as np
import oracles
import pytest
from cases import random_mask, solved_case

from onelayer import AttentionLayer, attention, inputs
from onelayer.arrays import to_numpy
from onelayer.recovery import endings, reduced, refine, search
from onelayer.recovery.endings import Ending
from onelayer.recovery.trace import Log


def solved(heads=3, masked=False, **options):
    """A layer's own outputs seen with its own attention matrices."""
    layer = AttentionLayer.random(heads=heads, dim=3, seed=1, **options)
    mask = random_mask(np.random.default_rng(3), 60, 3) if masked else None
    return solved_case(layer, inputs.gaussian(60, 3, 3, seed=2), mask)


def heads_kept(case, stacked):
    """Which of the case's heads are left, by their attention matrices."""
    left = attention.unstack(to_numpy(stacked), 3)
    full = attention.unstack(attention.stack(case.attention, case.key_bias), 3)
    return [next(i for i in range(len(full)) if np.array_equal(full[i], head)) for head in left]


# Pruning


def test_pruning_drops_the_head_without_projection(xp_array):
    case = solved(heads=2)
    rng = np.random.default_rng(0)
    extra = rng.standard_normal((1, 3, 3))
    beside = np.concatenate([case.attention[:1], extra, case.attention[1:]])
    case = replace(case, attention=beside)
    assert heads_kept(case, search.prune(case.fit(xp_array), 2)) == [0, 2]


def test_pruning_merges_heads_that_were_found_twice(xp_array):
    case = solved(heads=2)
    twice = np.concatenate([case.attention, case.attention[:1] * (1 + 1e-5)])
    case = replace(case, attention=twice)
    kept = heads_kept(case, search.prune(case.fit(xp_array), 2))
    assert 1 in kept
    assert len(kept) == 2


@pytest.mark.parametrize("options", [{}, {"bias": True, "masked": True}])
def test_pruning_drops_the_cheapest_head_at_each_turn(options):
    case = solved(heads=3, **options)
    kept = heads_kept(case, search.prune(case.fit(), 2))
    losses = []
    for dropped in range(3):
        rest = [i for i in range(3) if i != dropped]
        X, Y = case.whitened()
        bias = None if case.key_bias is None else case.key_bias[rest]
        losses.append(
            oracles.reduced_loss(X, Y, case.attention[rest], bias, case.mask, output_bias=case.bias)
        )
    assert kept == [i for i in range(3) if i != int(np.argmin(losses))]
    assert len(heads_kept(case, search.prune(case.fit(), 1))) == 1


def test_nothing_is_pruned_where_there_is_nothing_to_spare():
    fit = solved(heads=2).fit()
    assert search.prune(fit, 2) is fit.stacked


# Heads that are missing


def missing_one(xp_array=np.asarray, n=4000, **options):
    """A search whose heads are the true ones, but that a random one is in the place of one."""
    layer = AttentionLayer.random(heads=3, dim=8, scale=2.0, seed=1, **options)
    case = solved_case(layer, inputs.boolean(n, 4, 8, seed=2))
    posed = case.problem(xp_array)
    true = attention.stack(case.attention, case.key_bias)
    found = true.copy()
    found[:, 8:16] = np.random.default_rng(5).standard_normal(found[:, 8:16].shape) / 8
    log = Log(max_steps=1000, max_seconds=None)
    rank = options.get("rank")
    rng = np.random.default_rng(0)
    setting = search.Search(posed, posed, rank, 1e-12, 1e-16, 0, rng, log)
    fit = reduced.fit(posed.cut(3), xp_array(found))
    return setting, fit, true


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"rank": 2}])
def test_a_missing_head_takes_the_place_of_an_idle_one(xp_array, options):
    setting, fit, true = missing_one(xp_array, **options)
    repaired = to_numpy(setting.repaired(fit))
    assert repaired.shape == true.shape
    np.testing.assert_array_equal(repaired[:, :8], true[:, :8])
    np.testing.assert_array_equal(repaired[:, 8:16], true[:, 16:])
    new, lost = repaired[:, 16:], true[:, 8:16]
    cosine = np.sum(new * lost) / np.linalg.norm(new) / np.linalg.norm(lost)
    assert cosine > 0.8


def test_nothing_is_repaired_where_nothing_is_missing():
    setting, _, true = missing_one()
    noise = np.random.default_rng(0).standard_normal(setting.problem.Y.shape)
    noisy = replace(setting.problem, Y=setting.problem.Y + 1e-3 * noise)
    setting.problem = noisy
    assert setting.repaired(reduced.fit(noisy.cut(3), true)) is None


def test_a_stage_is_repaired_and_goes_on_to_the_end(monkeypatch):
    setting, fit, true = missing_one()
    monkeypatch.setattr(search, "_LARGE", 0.0)
    stuck = iter([True])  # at once, and then never again
    monkeypatch.setattr(endings, "_halted", lambda _: next(stuck, False))
    outcome = setting.repaired_stage("start", fit.stacked)
    assert outcome.ending is Ending.REACHED
    stages = [row.stage for row in setting.log.rows]
    assert stages[0] == "start"
    assert stages[-1] == "start, a head replaced"
    left = attention.unstack(to_numpy(outcome.state.fit.stacked), 8)
    for head in attention.unstack(true, 8):
        assert min(np.linalg.norm(head - one) for one in left) < 1e-9


# Few examples


def test_a_stage_that_fits_its_few_examples_alone_is_left(monkeypatch):
    monkeypatch.setattr(search, "_LARGE", 0.0)
    setting, fit, _ = missing_one()
    few = setting.problem.sample(30)
    outcome = setting.stage("few", fit.stacked, problem=few, eager=True)
    assert outcome.ending is Ending.OVERFITTED
    error = outcome.state.fit.error
    assert reduced.held_out_error(outcome.state.fit, setting.held_out) > 3 * error > 3e-3
    assert setting.looked


def test_an_exact_fit_to_few_examples_is_the_end_of_a_large_search(monkeypatch):
    setting, _, true = missing_one()
    monkeypatch.setattr(search, "_LARGE", 0.0)
    near = true * (1 + 1e-3 * np.random.default_rng(1).standard_normal(true.shape))
    outcome = setting.run("start", near, 3, refine.BRISK)
    assert outcome.ending is Ending.REACHED
    assert outcome.state.fit.cut.examples < 200
    assert not outcome.state.fit.single
    assert {row.stage for row in setting.log.rows} == {"start, few examples"}


def test_when_time_is_spent_the_fit_to_few_examples_is_the_end(monkeypatch):
    monkeypatch.setattr(search, "_LARGE", 0.0)
    setting, fit, _ = missing_one()
    setting.log.max_seconds = 1e-9
    outcome = setting.run("start", fit.stacked, 3, refine.BRISK)
    assert outcome.ending is Ending.BUDGET
    assert outcome.state.fit.cut.examples < setting.problem.examples
    assert {row.stage for row in setting.log.rows} == {"start, few examples"}


def test_an_exact_fit_to_few_examples_that_others_do_not_have_is_none(monkeypatch):
    setting, _, true = missing_one()
    monkeypatch.setattr(search, "_LARGE", 0.0)
    off = np.random.default_rng(0).standard_normal(setting.held_out.Y.shape)
    setting.held_out = replace(setting.held_out, Y=setting.held_out.Y + 1e-6 * off)
    outcome = setting.run("start", true, 3, refine.BRISK)
    assert outcome.state.fit.cut.examples == setting.problem.examples


# Errors


@pytest.mark.parametrize("masked", [False, True])
def test_held_out_error_is_relative_to_the_outputs(xp_array, masked):
    case = solved(masked=masked, bias=True)
    fit = case.fit(xp_array)
    assert reduced.held_out_error(fit, case.problem(xp_array)) < 1e-12
    case.Y[:] += np.random.default_rng(0).standard_normal(case.Y.shape)
    posed = case.problem(xp_array)
    expected = posed.layer(fit.stacked, fit.weights)(
        xp_array(case.X), mask=None if case.mask is None else xp_array(case.mask)
    )
    gap = to_numpy(expected) - case.Y
    there = np.ones(gap.shape[:2], dtype=bool) if case.mask is None else case.mask
    size = np.sqrt(np.mean(case.Y[there] ** 2))
    found = reduced.held_out_error(fit, posed)
    assert found == pytest.approx(np.sqrt(np.mean(gap[there] ** 2)) / size, rel=0.01)
