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
    assert_close(gauss_newton._gradient(factors, blocks).flat(), expected)


@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("variant", [{}, {"masked": True, "padded": 2, "causal": True}])
def test_the_loss_is_the_mean_over_what_is_no_padding(xp_array, variant, rounded):
    case, block, factors, blocks = cut(xp_array, **variant)
    residuals = to_numpy(model.forward(factors, block).residuals)
    expected = np.mean(residuals[there(case)] ** 2)
    found = gauss_newton.loss(factors, blocks, rounded)
    assert found == pytest.approx(expected, rel=1e-5 if rounded else 1e-12)
    assert model.equations(blocks) == there(case).sum() * 3


# The metric


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_metric_has_an_inverse_and_is_positive(xp_array, variant):
    _, _, factors, blocks = cut(xp_array, **variant)
    products = products_at(factors, blocks)
    direction = like_random(products.factors, np.random.default_rng(3)).map(single)
    back = products.metric.times(products.metric.times(direction), inverse=True)
    assert_close(back.flat(), flat(direction), 2e-3)
    size = products.size(direction.flat())
    image = flat(products.metric.times(direction))
    assert size == pytest.approx(flat(direction) @ image, rel=1e-5)
    assert size > 0


@pytest.mark.parametrize("damping", [1e-3, 10.0])
def test_damping_is_in_the_metric(xp_array, damping):
    _, _, factors, blocks = cut(xp_array, bias=True, masked=True)
    products = products_at(factors, blocks)
    direction = like_random(products.factors, np.random.default_rng(3)).map(single)
    plain, damped = (to_numpy(products.damped(direction.flat(), by)) for by in (0.0, damping))
    image = flat(products.metric.times(direction))
    assert_close(damped, plain + damping * image, 1e-5)


def test_the_metric_is_near_the_blocks_of_the_gauss_newton_matrix():
    # Of one head on independent tokens. That of outputs is exact, and so is that of a bias.
    posed, factors = solved_problem(n=4000, heads=1)
    factors = replace(factors, query=0.1 * factors.query, key=0.1 * factors.key)
    parts = posed.parts(10**6)
    metric = products_at(factors, parts * 4).metric  # of every fourth block
    J = formed(factors, parts[0])
    sizes = np.cumsum([0] + [to_numpy(one).size for _, one in factors.arrays()])
    for (name, array), (start, stop) in zip(factors.arrays(), pairwise(sizes), strict=True):
        block = 4 * J[:, start:stop].T @ J[:, start:stop]
        found = to_numpy(metric.matrices[name])
        if name == "output_bias":
            expected = np.diag(found)
        elif name == "output":
            expected = np.kron(found, np.eye(array.shape[1]))
        else:
            expected = np.kron(np.eye(array.shape[0]), found[0])
        gap = np.linalg.norm(block - expected) / np.linalg.norm(expected)
        assert 0.5 < np.trace(block) / np.trace(expected) < 2.0, name
        if name != "key":  # attention sums to one, which makes those of the keys depend
            assert gap < (0.01 if name in ("output", "output_bias") else 0.5), name


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


def test_steps_end_at_the_rounding_of_the_outputs():
    posed, factors = solved_problem(rounded=np.float32)
    start = near(factors, 0.05)
    _, known = ran(posed, start, target=1e-12, exact=1e-6)
    _, unknown = ran(posed, start, target=1e-12)
    assert 1e-9 < known[-1].loss ** 0.5 < 1e-7
    assert known[-1].loss < 1.01 * unknown[-1].loss
    assert len(known) < len(unknown) <= len(known) + 4
    shares = [b.loss / a.loss for a, b in pairwise(known)]
    assert shares[-1] > gauss_newton.SETTINGS.rounding_left
    assert max(shares[:-1]) < gauss_newton.SETTINGS.rounding_left


def test_slow_steps_end_a_run(monkeypatch):
    posed, factors = solved_problem(n=10)
    taken = []

    def slow(state, *_):
        taken.append(state)
        share = 0.95 if len(taken) != 2 else 0.5  # the second is not slow: the count starts again
        return state._replace(loss=share * state.loss)

    monkeypatch.setattr(gauss_newton, "step", slow)
    _, states = ran(posed, near(factors, 0.1))
    assert len(taken) == 2 + gauss_newton.SETTINGS.slow_steps
    assert len(states) == 1 + len(taken)


def test_a_run_ends_where_no_step_helps(monkeypatch):
    posed, factors = solved_problem(n=10)
    monkeypatch.setattr(gauss_newton, "step", lambda *_: None)
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
