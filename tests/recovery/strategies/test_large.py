import math
from functools import partial

import numpy as np
import pytest
from cases import missing_one, random_mask, solved_case, with_outputs
from factorings import narrow, near, solved_problem
from fits import assert_close

from onelayer import AttentionLayer, inputs, recover
from onelayer.array.backend import single, to_numpy
from onelayer.data import sources
from onelayer.heads import low_rank
from onelayer.recovery import error_bars
from onelayer.recovery.examples import whiten
from onelayer.recovery.factored import descent, gauss_newton, model
from onelayer.recovery.factored.convert import HalfWhitened
from onelayer.recovery.gauss_newton.levenberg_marquardt import FAST
from onelayer.recovery.gauss_newton.stopping import Ending
from onelayer.recovery.reasons import Reason
from onelayer.recovery.strategies import settings
from onelayer.recovery.strategies.large import Large
from onelayer.recovery.strategies.search import Search
from onelayer.recovery.trace import Log
from onelayer.recovery.validation import ValidatedExamples

NUMBERS = settings.DEFAULT.large


def examples(rank=None, value_rank=None, n=2000, dim=6, masked=False, causal=False, **options):
    """A layer, tokens, their outputs and a mask."""
    layer = AttentionLayer.random(heads=3, dim=dim, rank=rank, seed=0, **options)
    if value_rank is not None:
        layer = narrow(layer, value_rank)
    X = inputs.boolean(n, 4, dim, seed=1)
    mask = random_mask(np.random.default_rng(3), n, 4) if masked else None
    return layer, X, solved_case(layer, X, mask, causal).Y, mask


def stages(trace):
    """The names of all stages, in their order."""
    return list(dict.fromkeys(row.stage for row in trace))


def strategy_for(posed, rank=None, max_steps=1000, **options):
    """The strategy on these examples."""
    log = Log(max_steps=max_steps, max_seconds=None)
    rng = np.random.default_rng(0)
    return Large(Search(posed, posed, rank, 1e-12, 1e-16, rng, log, **options))


# Whole searches


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"causal": True}, {"masked": True, "bias": True}]
)
def test_heads_of_known_rank_are_found(all_are_large, options):
    layer, X, Y, mask = examples(rank=2, value_rank=2, **options)
    given = {"bias": options.get("bias", False), "causal": options.get("causal", False)}
    found = recover(X, Y, heads=3, rank=2, mask=mask, method="refine", **given)
    assert found.reason is Reason.EXACT
    assert found.layer.distance(layer).attention.max() < 1e-9
    names = stages(found.trace)
    assert names[1:4] == ["plan", "descent", "all factors"]
    assert "wider projections" not in names
    last = [row.error for row in found.trace if row.stage == "all factors"][-1]
    assert last < 1e-10  # nothing is left to the fit with eliminated projections


@pytest.mark.slow
def test_heads_with_projections_of_full_rank_are_found(all_are_large):
    layer, X, Y, _ = examples(rank=1, dim=8)
    found = recover(X, Y, heads=3, rank=1, method="refine")
    assert found.reason is Reason.EXACT
    assert found.layer.distance(layer).attention.max() < 1e-9
    assert set(np.linalg.matrix_rank(found.layer.attention, tol=1e-8)) == {1}
    names = stages(found.trace)
    assert names.index("wider projections") > names.index("descent")
    assert "all factors" not in names  # which are for projections of low rank
    ends = {row.stage: row.error for row in found.trace}
    assert ends["wider projections"] < 0.3 * ends["descent"]


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True])
def test_heads_of_unknown_rank_are_found(all_are_large, bias):
    layer, X, Y, _ = examples(bias=bias)
    found = recover(X, Y, heads=3, bias=bias, method="refine")
    assert found.reason is Reason.EXACT
    assert found.layer.distance(layer).attention.max() < 1e-9
    names = stages(found.trace)
    assert names[2] == "descent"
    assert not {"all factors", "wider projections"} & set(names)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [2, None])
def test_heads_are_found_where_tokens_vary_unevenly(all_are_large, tmp_path, rank):
    layer, X, _, _ = examples(rank=rank, value_rank=rank, bias=True)
    sizes = np.array([3.0, 2.0, 1.0, 0.5, 0.25, 0.1])
    X, layer = (
        X * sizes,
        AttentionLayer(
            layer.attention / sizes / sizes[:, None],
            layer.projection / sizes[:, None],
            layer.key_bias / sizes,
            layer.output_bias,
        ),
    )
    path, errors = tmp_path / "best.safetensors", []

    def interrupting(row):
        errors.append(row.error)
        if len(errors) == 5:
            raise KeyboardInterrupt

    options = {"heads": 3, "rank": rank, "bias": True, "method": "refine", "checkpoint": path}
    with pytest.raises(KeyboardInterrupt):
        recover(X, layer(X), progress=interrupting, **options)
    Y = layer(X)
    off = np.linalg.norm(AttentionLayer.load(path)(X) - Y) / np.linalg.norm(Y - Y.mean(axis=(0, 1)))
    assert off < 1.5 * min(errors)
    found = recover(X, Y, resume=True, **options)
    assert found.reason is Reason.EXACT
    assert found.layer.distance(layer).attention.max() < 1e-8


@pytest.mark.slow
def test_an_unknown_number_of_heads_is_found(all_are_large):
    layer, X, Y, _ = examples(rank=2, value_rank=2)
    found = recover(X, Y, heads="auto", rank=2, method="refine")
    assert found.reason is Reason.EXACT
    assert found.layer.heads == 3
    assert found.layer.distance(layer).attention.max() < 1e-9


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bits(all_are_large):
    _, X, Y, _ = examples(rank=2, value_rank=2, n=600)
    found = [
        recover(X, Y, heads=3, rank=2, method="refine", seed=seed, max_steps=7).layer.attention
        for seed in (0, 0, 1)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[2] - found[0]).max() > 1e-3


@pytest.mark.slow
def test_two_examples_are_too_few(all_are_large):
    layer = AttentionLayer.random(heads=3, dim=8, rank=2, bias=True, seed=0)
    X = np.random.default_rng(3).standard_normal((2, 4, 8))
    found = recover(X, layer(X), heads=3, rank=2, bias=True, method="refine")
    assert found.reason is Reason.TOO_FEW_EXAMPLES


@pytest.mark.slow
@pytest.mark.parametrize("large", [True, False])
def test_error_bars_of_large_problems_take_no_draws(large, request, monkeypatch):
    if large:
        request.getfixturevalue("all_are_large")
    drawn, draws = [], error_bars._by_draws

    def noted(*given):
        drawn.append(given)
        return draws(*given)

    monkeypatch.setattr(error_bars, "_by_draws", noted)
    layer, X, Y, _ = examples(rank=2, value_rank=2)
    rounded = Y.astype(np.float32)
    found = recover(X.astype(np.float32), rounded, heads=3, rank=2, method="refine")
    assert found.converged
    bars = found.certificate.attention_error
    assert 1e-9 < bars.max() <= NUMBERS.sharp_bars
    assert (found.layer.distance(layer).attention <= bars).all()
    assert bool(drawn) is not large


def test_descent_ends_with_the_budget(all_are_large):
    _, X, Y, _ = examples(rank=2, value_rank=2, n=400)
    found = recover(X, Y, heads=3, rank=2, method="refine", max_steps=4)
    assert not found.converged
    assert {"all factors", "a head redrawn"}.isdisjoint(stages(found.trace))
    assert sum(row.stage == "descent" for row in found.trace) == 2


@pytest.mark.slow
def test_what_an_interrupted_descent_came_to_is_kept(all_are_large, tmp_path):
    _, X, Y, _ = examples(rank=2, value_rank=2, bias=True)
    path, errors = tmp_path / "best.safetensors", []

    def interrupting(row):
        errors.append(row.error)
        if row.stage == "all factors":
            raise KeyboardInterrupt

    options = {"heads": 3, "rank": 2, "bias": True, "method": "refine"}
    with pytest.raises(KeyboardInterrupt):
        recover(X, Y, checkpoint=path, progress=interrupting, **options)
    kept = AttentionLayer.load(path)
    size = np.linalg.norm(Y - Y.mean(axis=(0, 1)))
    assert np.linalg.norm(kept(X) - Y) / size < 1.5 * errors[-2] < 0.1
    found = recover(X, Y, checkpoint=path, resume=True, **options)
    assert found.reason is Reason.EXACT


# Heads to go on from


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "far"), [({}, 0.0), ({"bias": True}, 0.0), ({}, 3.0)], ids=["plain", "bias", "far"]
)
def test_resumed_heads_are_polished(all_are_large, tmp_path, options, far):
    layer, X, _, _ = examples(rank=2, value_rank=2, **options)
    X = inputs.gaussian(1500, 4, 6, seed=5) + far
    path, rng = tmp_path / "best.safetensors", np.random.default_rng(0)
    off = AttentionLayer(
        layer.attention * (1 + 1e-3 * rng.standard_normal(layer.attention.shape)),
        layer.projection,
        layer.key_bias,
        layer.output_bias,
    )
    off.save(path)
    given = {"heads": 3, "rank": 2, "method": "refine", "bias": options.get("bias", False)}
    found = recover(X, layer(X), checkpoint=path, resume=True, **given)
    assert found.reason is Reason.EXACT
    assert found.layer.distance(layer).attention.max() < 1e-9
    names = stages(found.trace)
    assert names[1:3] == ["plan", "descent"]
    assert names[-2:] == ["all factors", "resumed, few examples"]
    first = next(row.error for row in found.trace if row.stage == "descent")
    fresh = recover(X, layer(X), max_steps=5, **given)
    assert first < 0.7 * next(row.error for row in fresh.trace if row.stage == "descent")


def test_a_search_goes_on_from_the_heads_given(monkeypatch):
    posed, true = solved_problem(n=300, heads=3)
    theta, seen = to_numpy(true.theta()), []
    strategy = strategy_for(posed, rank=2)

    def noted(self, factors, **_):
        seen.append(factors)
        return theta

    monkeypatch.setattr(Large, "_found", noted)
    outcome = strategy.run(3, theta)
    assert outcome.ending is Ending.REACHED
    (given,) = seen
    assert_close(given.theta(), theta, 1e-5)
    assert_close(given.projections(), to_numpy(true.projections()), 1e-3)


# Stages


@pytest.mark.parametrize("options", [{}, {"masked": True, "bias": True}, {"causal": True}])
def test_steps_on_all_factors_reach_an_exact_fit(options):
    posed, true = solved_problem(n=300, **options)
    strategy = strategy_for(posed, rank=2)
    found = strategy._stepped(near(true, 0.03).map(single))
    assert gauss_newton.loss(found, posed.parts(10**6)) ** 0.5 <= 1e-11
    rows = strategy.search.log.rows
    assert {row.stage for row in rows} == {"all factors"}
    assert rows[0].products == 0
    assert strategy.search.products == sum(row.products for row in rows) > 0
    assert strategy.search.effort > 0


def test_a_start_has_heads_of_the_rank_asked_for(monkeypatch):
    posed, _ = solved_problem(n=100, bias=True)
    monkeypatch.setattr(
        Large, "_descended", lambda self, _, state: (state.factors, NUMBERS.basin_loss)
    )
    monkeypatch.setattr(Large, "_stepped", lambda self, factors: factors)
    strategy = strategy_for(posed, rank=2)
    theta = strategy.start(3, FAST)
    assert theta.shape == (6, 15)
    np.testing.assert_allclose(theta, low_rank.nearest(theta, 5, 2), atol=1e-9)
    fit = strategy.stage("one step", theta[:, :10], FAST, target=1.0).fit
    assert strategy.search.heads_in(strategy.grow(fit, 2)) == 4


def descents(monkeypatch, *losses):
    """Let descents end with these losses, one by one, and with factors as they are given."""
    left, seen = iter(losses), []

    def descended(self, between, state):
        seen.append(state)
        return state.factors, next(left)

    monkeypatch.setattr(Large, "_descended", descended)
    monkeypatch.setattr(Large, "_stepped", lambda self, factors: factors)
    return seen


@pytest.mark.parametrize(
    ("losses", "names"),
    [
        ((0.9e-4,), ["descent"]),
        ((0.1, 1e-4), ["descent", "a head redrawn"]),
        ((0.1, 0.05, 1e-4), ["descent", "a head redrawn", "a head redrawn"]),
        ((0.1, 0.09), ["descent", "a head redrawn"]),  # it does not help
        ((0.5, 1e-4), ["descent", "wider projections"]),
        ((math.inf, 0.5), ["descent", "wider projections"]),
    ],
)
def test_what_follows_descent_depends_on_its_loss(monkeypatch, losses, names):
    posed, _ = solved_problem(n=100)
    seen = descents(monkeypatch, *losses)
    strategy_for(posed, rank=2).start(3, FAST)
    assert [state.name for state in seen] == names


def test_projections_of_full_rank_are_not_widened(monkeypatch):
    posed, _ = solved_problem(n=100)
    seen = descents(monkeypatch, 0.5)
    strategy_for(posed).start(3, FAST)
    assert [state.name for state in seen] == ["descent"]


def test_wider_projections_are_left_where_they_do_not_help(monkeypatch):
    posed, _ = solved_problem(n=100)
    for wide_loss, is_wide in ((0.6, False), (0.4, True)):
        seen, kept = descents(monkeypatch, 0.5, wide_loss), []

        def stepped(self, factors, kept=kept):
            kept.append(factors)
            return factors

        monkeypatch.setattr(Large, "_stepped", stepped)
        strategy_for(posed, rank=2).start(3, FAST)
        assert len(seen) == 2
        assert (not kept) is is_wide  # steps on all factors are for narrow projections


def test_a_spent_search_starts_no_further_stage(monkeypatch):
    posed, _ = solved_problem(n=100)
    seen = descents(monkeypatch, 0.5)
    strategy_for(posed, rank=2, max_steps=0).start(3, FAST)
    assert [state.name for state in seen] == ["descent"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"masked": True}])
def test_a_missing_head_is_found(options):
    posed, true = solved_problem(n=2000, heads=5, dim=8, **options)
    shape = 1, 8, 8
    other = model.random(shape, 2, 2, posed.constant, np.random.default_rng(5), posed.X)
    factors = model.with_head(true.map(single), 1, other.map(lambda one: 0.3 * one))
    parts = posed.parts(1024)
    first = gauss_newton.loss(factors, parts, single=True)
    assert NUMBERS.basin_loss < first <= NUMBERS.narrow_loss
    strategy = strategy_for(posed, rank=2)
    between = HalfWhitened.of(posed)
    half = between.examples(posed)
    descended = partial(strategy._descended, between)
    found, loss = strategy._with_missing_heads(between.enter(factors), first, half, descended)
    assert {row.stage for row in strategy.search.log.rows} == {"a head redrawn"}
    assert loss < NUMBERS.basin_loss
    assert gauss_newton.loss(between.leave(found), parts, single=True) < NUMBERS.basin_loss
    same, loss = strategy._with_missing_heads(found, 1e-4, half, descended)  # nothing is missing
    assert same is found
    assert loss == 1e-4


def test_descent_counts_its_operations():
    posed, true = solved_problem(n=100)
    strategy = strategy_for(posed, rank=2)
    rng = np.random.default_rng(0)
    state = descent.Descent("descent", near(true, 0.3).map(single), posed, rng)
    found, loss = strategy._descended(HalfWhitened.of(posed), state)
    assert found is state.factors
    assert loss == state.loss
    assert strategy.search.products == state.steps
    rows = strategy.search.log.rows
    assert len(rows) == state.steps // descent.SETTINGS.warm_up
    assert rows[0].note.startswith("step 50, rate 4.0e-02")
    assert rows[-1].error > 0


# Samples of the examples


def test_descent_and_steps_see_no_more_examples_than_they_need():
    posed, _ = solved_problem(n=600)
    strategy = strategy_for(posed, rank=2)
    assert strategy._sample(1e6, 2) is posed
    few = strategy._sample(10.0, 2)
    unknowns = 2 * (2 * (10 - 2) + 2 * (10 - 2))  # of matrices of rank 2 in 5 dimensions
    assert few.examples == math.ceil(10.0 * unknowns / (4 * 5))
    assert strategy._sample(20.0, 2).examples == pytest.approx(2 * few.examples, abs=1)


def test_examples_elsewhere_are_sampled_to_memory():
    _, X, Y, _ = examples(n=300)
    source = sources.in_memory(X, Y, None).in_pieces()
    spread = whiten(ValidatedExamples.of(source), order=np.arange(300))
    strategy = strategy_for(spread, rank=2)
    whole = strategy._sample(1e6, 2)
    assert not spread.in_memory
    assert whole.in_memory
    assert whole.examples == 300
    assert strategy._sample(5.0, 2).examples < 100


# Fits to few examples


def searching(**options):
    """A search among examples of a layer, a fit that misses one of its heads, and all of them."""
    posed, fit, true = missing_one(**options)
    return strategy_for(posed), fit, true


def test_an_exact_fit_to_few_examples_is_the_end_of_a_large_search():
    strategy, _, true = searching()
    near_them = true * (1 + 1e-3 * np.random.default_rng(1).standard_normal(true.shape))
    outcome = strategy.fit("start", near_them, 3, FAST)
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


def test_spare_heads_are_pruned():
    strategy, _, true = searching()
    rng = np.random.default_rng(2)
    spare = np.concatenate([true, rng.standard_normal((8, 8)) / 8], axis=1)
    outcome = strategy.fit("start", spare, 3, FAST)
    assert outcome.ending is Ending.REACHED
    assert outcome.fit.heads == 3
    assert_close(outcome.fit.theta, true, 1e-9)
