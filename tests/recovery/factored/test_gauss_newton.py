from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from cases import block_of
from factorings import VARIANTS, factored, flat, like_random, near, solved_problem, there
from fits import assert_close
from hypothesis import given
from hypothesis import strategies as st

from onelayer.array.backend import like, single, to_numpy
from onelayer.recovery.factored import gauss_newton, model
from onelayer.recovery.factored.gauss_newton import JointStep

KINDS = [
    {},
    {"bias": True},
    {"masked": True},
    {"causal": True},
    {"masked": True, "causal": True, "bias": True},
    {"rank": None},
    {"value_rank": None},
    {"out_dim": 3},
]


def never():
    return False


def cut(xp_array=np.asarray, parts=3, **options):
    """Random factors, and their examples in several blocks."""
    case, block, factors = factored(xp_array, n=9, **options)
    posed = case.problem(xp_array)
    edges = np.linspace(0, 9, parts + 1).astype(int)
    blocks = [block_of(posed, slice(a, b)) for a, b in pairwise(edges)]
    return case, block, factors, blocks


def products_at(factors, blocks):
    return gauss_newton._Products.at(factors, blocks, np.random.default_rng(0))


def formed(factors, block):
    """The Jacobian, a column for every number in the factors."""
    at, size = model.forward(factors, block), int(factors.flat().shape[0])
    columns = []
    for entry in np.eye(size):
        change = factors.unflat(like(entry, factors.query))
        columns.append(to_numpy(model.jvp(factors, block, at, change)).ravel())
    return np.stack(columns, axis=1)


# Products


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_are_those_of_the_formed_jacobian(xp_array, variant):
    _, block, factors, blocks = cut(xp_array, **variant)
    J = formed(factors, block)
    direction = np.random.default_rng(3).standard_normal(J.shape[1])
    products = products_at(factors, blocks)
    found = products.damped(like(direction, products.reference), 0.0)
    assert to_numpy(found).dtype == np.float32
    assert_close(found, J.T @ (J @ direction), 1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_gradient_is_that_of_the_formed_jacobian(xp_array, variant):
    _, block, factors, blocks = cut(xp_array, **variant)
    residuals = to_numpy(model.forward(factors, block).residuals).ravel()
    expected = formed(factors, block).T @ residuals
    products = products_at(factors, blocks)
    lost, found = products.loss_and_gradient(factors, blocks)
    assert_close(found, expected)
    assert lost == pytest.approx(residuals @ residuals)
    assert products.loss(factors, blocks) == pytest.approx(residuals @ residuals)


@pytest.mark.parametrize("options", [{}, {"bias": True}, {"masked": True, "causal": True}])
def test_products_on_decoupled_outputs_are_in_the_norms_of_rows(xp_array, options):
    posed, factors = solved_problem(xp_array, n=12, **options)
    factors, blocks = near(factors, 0.1), posed.parts(16)
    products = gauss_newton._Products.at(factors, blocks, np.random.default_rng(0), by_head=True)
    J = np.concatenate([formed(factors, block) for block in blocks])
    rows = [model.forward(factors, block).residuals for block in blocks]

    def measured(rows):
        found = []
        for row, block, norms in zip(rows, blocks, products.norms, strict=True):
            found.append(to_numpy(gauss_newton._measured(like(row, factors.query), block, norms)))
        return np.concatenate(found).ravel()

    def cut_up(column):
        shapes = [tuple(one.shape) for one in rows]
        ends = np.cumsum([0, *(a * b for a, b in shapes)])
        return [column[a:b].reshape(s) for (a, b), s in zip(pairwise(ends), shapes, strict=True)]

    BJ = np.stack([measured(cut_up(column)) for column in J.T], axis=1)
    direction = np.random.default_rng(3).standard_normal(J.shape[1])
    found = products.damped(like(direction, products.reference), 0.0)
    assert_close(found, BJ.T @ (J @ direction), 1e-3)
    residuals = np.concatenate([to_numpy(one).ravel() for one in rows])
    lost, gradient = products.loss_and_gradient(factors, blocks)
    assert_close(gradient, J.T @ measured(rows), 1e-6)
    assert lost == pytest.approx(residuals @ measured(rows))
    assert lost != pytest.approx(residuals @ residuals, rel=1e-3)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("variant", [{}, {"masked": True, "padded": 2, "causal": True}])
def test_the_loss_is_the_mean_over_what_is_no_padding(xp_array, variant, rounded):
    case, block, factors, blocks = cut(xp_array, **variant)
    residuals = to_numpy(model.forward(factors, block).residuals)
    expected = np.mean(residuals[there(case)] ** 2)
    found = gauss_newton.loss(factors, blocks, rounded)
    assert found == pytest.approx(expected, rel=1e-5 if rounded else 1e-12)
    assert model.equations(blocks) == there(case).sum() * 3


# Damping


@pytest.mark.parametrize("damping", [1e-3, 10.0])
def test_damping_is_in_the_metric(xp_array, damping):
    _, _, factors, blocks = cut(xp_array, bias=True, masked=True)
    products = products_at(factors, blocks)
    direction = like_random(products.factors, np.random.default_rng(3)).map(single)
    plain, damped = (to_numpy(products.damped(direction.flat(), by)) for by in (0.0, damping))
    image = flat(products.metric.times(direction))
    assert_close(damped, plain + damping * image, 1e-5)


# Steps


def begin(factors, blocks, damping=gauss_newton.SETTINGS.first_damping):
    return JointStep(factors, gauss_newton.loss(factors, blocks), damping, 0)


@pytest.mark.parametrize("options", KINDS)
def test_a_step_solves_the_damped_equations(xp_array, options, monkeypatch):
    exact = replace(
        gauss_newton.SETTINGS, inexactness=1e-9, least_inexactness=0.0, most_products=500
    )
    monkeypatch.setattr(gauss_newton, "SETTINGS", exact)
    posed, factors = solved_problem(xp_array, n=40, **options)
    factors, (block,) = near(factors, 1e-2), posed.parts(10**6)
    found = gauss_newton.step(
        begin(factors, [block], 1.0), [block], np.random.default_rng(0), never
    )
    moved = flat(found.factors) - flat(factors)
    products, J = products_at(factors, [block]), formed(factors, block)
    metric = np.stack(
        [
            flat(products.metric.times(products.factors.unflat(like(one, products.reference))))
            for one in np.eye(J.shape[1])
        ]
    )
    right = J.T @ to_numpy(model.forward(factors, block).residuals).ravel()
    expected = np.linalg.solve(J.T @ J + metric, right)
    np.testing.assert_allclose(moved, expected, atol=2e-3 * np.abs(expected).max())


@given(seed=st.integers(0, 2**32 - 1), distance=st.floats(1e-3, 1.0))
def test_a_step_lowers_the_loss_or_is_none(seed, distance):
    posed, factors = solved_problem(n=20, masked=bool(seed % 2), bias=True)
    blocks = posed.parts(32)
    state = begin(near(factors, distance, seed), blocks)
    found = gauss_newton.step(state, blocks, np.random.default_rng(seed), never)
    assert found is not None
    assert found.loss < state.loss
    exact = gauss_newton.loss(found.factors, blocks)
    assert found.loss == pytest.approx(exact, rel=1e-3)  # float32, far from a fit
    assert found.products >= 1


def test_no_step_helps_at_the_least_loss(xp_array):
    case, _, factors, blocks = cut(xp_array)
    still = replace(
        factors.map(lambda one: 0.0 * one),
        output_bias=like(np.mean(case.whitened()[1], axis=(0, 1)), factors.query),
    )
    state = begin(still, blocks)
    found = gauss_newton.step(state, blocks, np.random.default_rng(0), never)
    assert found is None or found.loss > 0.999 * state.loss


# Runs


def ran(posed, factors, target=1e-11, exact=0.0, stop=never, rows=128, seed=0):
    """Factors after steps, and all states reported."""
    states = []
    rng = np.random.default_rng(seed)
    found = gauss_newton.run(factors, posed.parts(rows), target, rng, states.append, stop, exact)
    return found, states


@pytest.mark.parametrize("options", KINDS)
def test_from_nearby_an_exact_fit_is_reached(options):
    posed, factors = solved_problem(**options)
    found, states = ran(posed, near(factors, 0.05))
    losses = [state.loss for state in states]
    assert losses[0] > 1e-4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] ** 0.5 <= 1e-11
    assert len(states) < 15
    assert gauss_newton.loss(found, posed.parts(10**6)) == pytest.approx(losses[-1], rel=1e-6)
    for layer, true in (
        (found.theta(), factors.theta()),
        (found.projections(), factors.projections()),
    ):
        assert_close(layer, to_numpy(true), 1e-8)


def test_an_exact_fit_is_reached_on_every_backend(xp_array):
    options = {"masked": True, "causal": True, "bias": True}
    posed, factors = solved_problem(xp_array, **options)
    found, states = ran(posed, near(factors, 0.02).map(single))
    assert states[0].loss > 1e-5
    assert states[-1].loss ** 0.5 <= 1e-11
    for _, array in found.arrays():
        assert type(array) is type(posed.X)
        assert array.dtype == posed.X.dtype


def test_the_same_seed_gives_the_same_bits(xp_array):
    posed, factors = solved_problem(xp_array, n=50, bias=True)
    start = near(factors, 0.1)
    first, again = (flat(ran(posed, start, 1e-3, rows=32)[0]) for _ in range(2))
    np.testing.assert_array_equal(first, again)


def test_steps_end_at_the_target():
    posed, factors = solved_problem()
    _, states = ran(posed, near(factors, 0.05), target=1e-4)
    assert states[-1].loss ** 0.5 <= 1e-4 < states[-2].loss ** 0.5
    _, states = ran(posed, factors, target=1e-4)
    assert [state.products for state in states] == [0]


def test_the_last_solve_is_no_finer_than_the_target_asks_for():
    posed, factors = solved_problem()
    state = begin(near(factors, 1e-4), posed.parts(128))
    rng = np.random.default_rng(0)
    fine, coarse = (
        gauss_newton.step(state, posed.parts(128), rng, never, share) for share in (0.0, 0.05)
    )
    assert coarse.products < fine.products
    assert fine.loss < coarse.loss < 0.05 * state.loss


def test_steps_end_at_the_rounding_of_the_outputs():
    posed, factors = solved_problem(rounded=np.float32)
    start = near(factors, 0.05)
    _, known = ran(posed, start, target=1e-12, exact=1e-6)
    _, unknown = ran(posed, start, target=1e-12)
    assert 1e-9 < known[-1].loss ** 0.5 < 1e-7
    assert known[-1].loss < 1.05 * unknown[-1].loss  # the least is that in other norms
    assert len(known) < len(unknown) <= len(known) + 4
    shares = [b.loss / a.loss for a, b in pairwise(known)]
    assert max(shares[:-1]) < gauss_newton.SETTINGS.rounding_left
    assert sum(state.products for state in known) < sum(state.products for state in unknown)


def test_slow_steps_end_a_run(monkeypatch):
    posed, factors = solved_problem(n=10)
    taken = []

    def slow(state, *_):
        taken.append(state)
        share = 0.95 if len(taken) != 2 else 0.5  # the second is not slow: the count starts again
        return state._replace(loss=share * state.loss)

    monkeypatch.setattr(gauss_newton, "_improved", slow)
    _, states = ran(posed, near(factors, 0.1))
    assert len(taken) == 2 + gauss_newton.SETTINGS.slow_steps
    assert len(states) == 1 + len(taken)


def test_a_run_ends_where_no_step_helps(monkeypatch):
    posed, factors = solved_problem(n=10)
    monkeypatch.setattr(gauss_newton, "step", lambda *_, **__: None)
    start = near(factors, 0.1)
    found, states = ran(posed, start)
    assert len(states) == 1
    np.testing.assert_array_equal(flat(found), flat(start))


def test_a_run_ends_when_it_is_told_to():
    posed, factors = solved_problem()
    start = near(factors, 0.3)
    found, states = ran(posed, start, stop=lambda: True)
    assert len(states) == 1
    np.testing.assert_array_equal(flat(found), flat(start))
    whole = ran(posed, start)[1]
    calls, most = [], 10

    def soon():
        calls.append(None)
        return len(calls) > most

    found, states = ran(posed, start, stop=soon)
    assert sum(state.products for state in states) <= most  # also within a solve
    assert 1 < len(states) < len(whole)
    assert gauss_newton.loss(found, posed.parts(10**6)) == pytest.approx(states[-1].loss, rel=1e-3)
