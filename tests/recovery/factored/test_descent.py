import math
from dataclasses import replace

import numpy as np
import pytest
from factorings import flat, near, solved_problem
from hypothesis import given
from hypothesis import strategies as st

from onelayer.array import backend
from onelayer.array.backend import double, like, single, squared_norm, to_numpy
from onelayer.recovery.factored import descent, model
from onelayer.recovery.factored.descent import Descent, DescentSettings

# Orthogonalised matrices


def matrices_with(sizes, rng, count=2, rows=6):
    """Matrices (count, rows, len(sizes)) with these singular values."""
    left = np.linalg.qr(rng.standard_normal((count, rows, len(sizes))))[0]
    right = np.linalg.qr(rng.standard_normal((count, len(sizes), len(sizes))))[0]
    return (left * np.array(sizes)) @ right


def turn(size, rng):
    return np.linalg.qr(rng.standard_normal((size, size)))[0]


sizes = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=5)
lengths = st.floats(1e-6, 1e6)


@given(sizes=sizes, length=lengths, seed=st.integers(0, 99))
def test_singular_values_of_orthogonalised_matrices_are_near_one(xp_array, sizes, length, seed):
    given = length * matrices_with(sizes, np.random.default_rng(seed))
    found = to_numpy(descent.orthogonalised(xp_array(given)))
    assert found.shape == given.shape
    values = np.linalg.svd(found, compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3
    # Along the same directions as before.
    overlap = found.transpose(0, 2, 1) @ given
    np.testing.assert_allclose(overlap, overlap.transpose(0, 2, 1), atol=1e-9 * length)
    assert np.linalg.eigvalsh(overlap).min() > 0


@given(sizes=sizes, seed=st.integers(0, 99))
def test_orthogonalised_matrices_turn_with_what_they_are_of(xp_array, sizes, seed):
    rng = np.random.default_rng(seed)
    given = matrices_with(sizes, rng)
    left, right = turn(6, rng), turn(len(sizes), rng)
    plain = to_numpy(descent.orthogonalised(xp_array(given)))
    turned = to_numpy(descent.orthogonalised(xp_array(left @ given @ right)))
    np.testing.assert_allclose(turned, left @ plain @ right, atol=1e-9)


@pytest.mark.parametrize("length", [1e-36, 7.9e-24, 1e30])
def test_tiny_and_huge_matrices_of_single_precision_are_orthogonalised(xp_array, length):
    given = matrices_with([1.0, 0.5, 0.2], np.random.default_rng(0)) * length
    found = to_numpy(descent.orthogonalised(xp_array(given.astype(np.float32))))
    values = np.linalg.svd(found, compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_nothing_is_orthogonalised_to_nothing(xp_array):
    zeros = xp_array(np.zeros((2, 4, 3), dtype=np.float32))
    assert not to_numpy(descent.orthogonalised(zeros)).any()


# The schedule

QUICK = DescentSettings(warm_up=5, memory=0.5, first_check=40, rate=0.1, fewest=20)


def starting(xp_array=np.asarray, seed=0, numbers=descent.SETTINGS, **options):
    """Descent on the examples of a layer from random factors, and the factors of the layer."""
    posed, true = solved_problem(xp_array, **options)
    shape = true.heads, posed.dim, posed.out_dim
    ranks = (
        None if one is None else int(one.shape[1]) // true.heads for one in (true.key, true.value)
    )
    rng = np.random.default_rng(seed)
    drawn = model.random(shape, *ranks, true.key_bias is not None, rng, posed.X)
    return Descent("descent", drawn, posed, rng, numbers), true


def rates(monkeypatch, loss_after, numbers=QUICK, most=2000):
    """The rates of all steps of a descent whose loss after so many steps is given."""
    state, _ = starting(numbers=numbers, n=10)
    seen = []

    def noted(self, parts):
        seen.append(self.rate)
        return loss_after(len(seen)), self.factors

    monkeypatch.setattr(Descent, "_loss_and_gradient", noted)
    state.run(lambda _: None, lambda: len(seen) >= most)
    return np.array(seen), state


def test_the_rate_grows_and_falls_to_zero_once_the_loss_has_fallen(monkeypatch):
    found, state = rates(monkeypatch, lambda step: 1.0 if step < 30 else 0.05)
    np.testing.assert_allclose(found[:5], 0.1 * np.array([0.2, 0.4, 0.6, 0.8, 1.0]))
    start = state.falling_from
    assert 30 <= start <= 36
    np.testing.assert_allclose(found[5 : start + 1], 0.1)
    assert len(found) == 2 * start  # as many steps again
    np.testing.assert_allclose(found[start:], 0.1 * (1 - np.arange(start) / start))
    assert state.rate == 0


def test_the_rate_stays_for_the_fewest_steps(monkeypatch):
    _, state = rates(monkeypatch, lambda step: 0.05)
    assert state.falling_from == 20


def test_the_rate_falls_where_the_loss_stands_still(monkeypatch):
    found, state = rates(monkeypatch, lambda step: 0.5)
    assert state.falling_from == 40
    assert len(found) == 80


def test_later_checks_come_after_twice_as_many_steps(monkeypatch):
    _, state = rates(monkeypatch, lambda step: 0.9 if step < 30 else 0.5)
    assert state.falling_from == 80


def test_the_rate_stays_while_the_loss_falls(monkeypatch):
    found, state = rates(monkeypatch, lambda step: 0.2 + 0.8 * step**-0.3, most=600)
    assert state.falling_from == 0
    assert len(found) == 600
    assert found[-1] == pytest.approx(0.1)


def test_descent_ends_at_its_goal(monkeypatch):
    found, state = rates(monkeypatch, lambda step: 0.0, replace(QUICK, goal=0.01))
    assert len(found) == 7  # 2⁻⁷ is below the goal, and the rate would be zero after 8
    assert state.rate > 0


def test_a_short_descent_has_a_falling_rate_from_the_start(monkeypatch):
    whole, _ = starting(n=10)
    state = descent.short("short", whole.factors, whole.examples, whole.rng)
    assert state.rate == pytest.approx(descent.SETTINGS.short_rate)
    seen = []

    def noted(self, parts):
        seen.append(self.rate)
        return 0.01, self.factors

    monkeypatch.setattr(Descent, "_loss_and_gradient", noted)
    state.run(lambda _: None, lambda: False)
    assert len(seen) == descent.SETTINGS.short_steps
    assert (np.diff(seen) < 0).all()


def test_descent_ends_when_it_is_told_to_and_reports_now_and_then():
    state, _ = starting(n=20, numbers=replace(QUICK, goal=0.0))
    reports = []
    state.run(lambda one: reports.append(one.steps), lambda: state.steps >= 23)
    assert state.steps == 23
    assert reports == [5, 10, 15, 20]


@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_descent_ends_where_the_loss_is_no_number(monkeypatch, lost):
    found, state = rates(monkeypatch, lambda step: 0.5 if step < 8 else lost)
    assert len(found) == 8
    assert state.loss == math.inf
    assert np.isfinite(flat(state.factors)).all()


def test_examples_with_infinite_outputs_end_descent():
    state, _ = starting(pytest.importorskip("torch").asarray, n=20)
    state.examples.Y[3, 0, 0] = np.inf
    first = flat(state.factors)
    state.run(lambda _: None, lambda: False)
    assert state.loss == math.inf
    np.testing.assert_array_equal(flat(state.factors), first)


# Steps


def test_every_example_comes_once_before_any_comes_again():
    numbers = DescentSettings(rows=8, part_rows=4)  # two examples, each a part
    state, _ = starting(n=10, numbers=numbers)
    whole = to_numpy(state.examples.Y)
    rows = {one[0].astype(np.float32).tobytes(): i for i, one in enumerate(whole)}
    for _ in range(3):
        taken = []
        for _ in range(5):
            parts = state._batch()
            assert [tuple(part.keys.shape[:2]) for part in parts] == [(1, 4), (1, 4)]
            taken += [rows[to_numpy(part.outputs)[0].tobytes()] for part in parts]
        assert sorted(taken) == list(range(10))


def test_minibatches_are_no_larger_than_there_are_examples():
    state, _ = starting(n=10)
    for _ in range(2):
        (part,) = state._batch()
        assert part.keys.shape[0] == 10


@pytest.mark.parametrize("options", [{}, {"masked": True, "causal": True, "bias": True}])
def test_the_gradient_is_that_of_half_the_loss(xp_array, options):
    numbers = DescentSettings(rows=40, part_rows=12)
    state, _ = starting(xp_array, n=10, numbers=numbers, **options)
    parts = state._batch()
    loss, gradient = state._loss_and_gradient(parts)
    residuals = [to_numpy(model.forward(state.factors, part).residuals) for part in parts]
    counted = sum(int((np.abs(one) > 0).any(axis=1).sum()) for one in residuals)
    squares = sum(float((one**2).sum()) for one in residuals)
    assert loss == pytest.approx(squares / (counted * 5), rel=1e-5)  # without padding
    whole = state.examples.parts(10**6)[0]
    factors = state.factors.map(double)
    at = model.forward(factors, whole)
    expected = model.vjp(factors, whole, at, at.residuals)
    np.testing.assert_allclose(
        flat(gradient), flat(expected), atol=1e-4 * np.abs(flat(expected)).max()
    )


def test_steps_have_a_length_relative_to_random_factors(xp_array):
    state, _ = starting(xp_array, n=20, bias=True)
    before = state.factors
    state.falling_from = state.steps = 100  # past the warm-up, at the full rate
    state.step()
    sizes = model.deviations(5, 2, 4)
    for (name, old), (_, new) in zip(before.arrays(), state.factors.arrays(), strict=True):
        tall, _ = model.by_head(name, new - old, 2)
        lengths = np.linalg.norm(to_numpy(tall), axis=(1, 2)) / tall.shape[2] ** 0.5
        unit = descent.SETTINGS.rate * sizes[name] * max(tall.shape[1:]) ** 0.5
        assert (lengths > 0.6 * unit).all()
        assert (lengths < 1.3 * unit).all()


def test_a_step_is_the_same_for_all_factors_of_a_head():
    states = [starting(n=50)[0] for _ in range(2)]
    rng = np.random.default_rng(4)
    turns = np.stack([turn(2, rng) for _ in range(2)]).astype(np.float32)
    turned = states[1].factors
    halves = {
        name: model.join_heads(model.split_heads(getattr(turned, name), 2) @ turns)
        for name in ("query", "key")
    }
    states[1].factors = replace(turned, **halves)
    assert np.abs(flat(states[0].factors) - flat(states[1].factors)).max() > 0.1
    for _ in range(20):
        for state in states:
            state.step()
    plain, other = (to_numpy(state.factors.theta()) for state in states)
    np.testing.assert_allclose(plain, other, atol=1e-3 * np.abs(plain).max())


# Where descent leads


@pytest.mark.parametrize("options", [{}, {"masked": True, "bias": True}])
def test_the_same_seed_gives_the_same_bits(xp_array, options):
    found = []
    for seed in (0, 0, 1):
        state, _ = starting(xp_array, seed=seed, n=300, **options)
        state.run(lambda _: None, lambda state=state: state.steps >= 10)
        found.append(flat(state.factors))
    np.testing.assert_array_equal(found[0], found[1])
    assert np.abs(found[2] - found[0]).max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True},
        {"masked": True},
        {"causal": True},
        {"rank": None},
        {"value_rank": None},
        {"out_dim": 3},
    ],
)
def test_a_small_layer_is_descended_to_a_small_loss(options):
    state, _ = starting(n=2000, **options)
    first = squared_norm(model.forward(state.factors, state.examples.parts(10**6)[0]).residuals)
    found = state.run(lambda _: None, lambda: state.steps > 6000)
    last = model.forward(found, state.examples.parts(10**6)[0]).residuals
    assert first > 0.5 * squared_norm(state.examples.Y)
    assert squared_norm(last) < 1e-3 * squared_norm(state.examples.Y)


# A head that is drawn again


def redrawn(posed, factors):
    return descent.redrawn(factors, posed.parts(64), np.random.default_rng(0))


def heads_that_stay(before, after):
    old, new = (to_numpy(model.split_heads(one.query, one.heads)) for one in (before, after))
    return [i for i in range(before.heads) if np.array_equal(old[i], new[i])]


@pytest.mark.parametrize("idle", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"bias": True, "rank": None, "value_rank": None}])
def test_a_head_that_does_nothing_is_drawn_again(xp_array, options, idle):
    posed, factors = solved_problem(xp_array, heads=3, **options)
    each = factors.output.shape[0] // 3
    quiet = np.ones((3 * each, 1))
    quiet[idle * each : (idle + 1) * each] = 1e-3
    factors = replace(factors, output=factors.output * like(quiet, factors.output)).map(single)
    found = redrawn(posed, factors)
    assert heads_that_stay(factors, found) == [i for i in range(3) if i != idle]
    rest = np.delete(np.arange(3 * each).reshape(3, each), idle, axis=0).ravel()
    np.testing.assert_array_equal(to_numpy(found.output)[rest], to_numpy(factors.output)[rest])
    own = to_numpy(found.output)[idle * each : (idle + 1) * each]
    alike = model.deviations(5, 2, 3 * each)["output"]
    assert 0.5 * alike < own.std() < 2 * alike  # as in a random layer with all of the heads


def test_one_of_two_heads_that_do_the_same_is_drawn_again(xp_array):
    posed, factors = solved_problem(xp_array, heads=3, masked=True)
    twice = {
        name: model.join_heads(
            backend.rows(model.split_heads(getattr(factors, name), 3), [0, 1, 0])
        )
        for name in ("query", "key", "value")
    }
    factors = near(replace(factors, **twice), 1e-3).map(single)
    assert heads_that_stay(factors, redrawn(posed, factors)) in ([0, 1], [1, 2])
