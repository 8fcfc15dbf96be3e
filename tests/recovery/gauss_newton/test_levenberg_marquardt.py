from dataclasses import replace

import numpy as np
import pytest
from cases import random_case, random_mask, small_cases, solved_case
from hypothesis import given, settings
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.array.backend import like, to_numpy
from onelayer.heads import dense, low_rank
from onelayer.recovery.gauss_newton import levenberg_marquardt

VARIANTS = [
    {},
    {"bias": True},
    {"rank": 1},
    {"rank": 2, "bias": True},
    {"causal": True},
    {"masked": True},
    {"out_dim": 2},
    {"out_dim": 6},
]


def begin(case, xp_array=np.asarray, rank=None, preconditioned=False):
    posed = case.problem(xp_array)
    theta = like(dense.pack(case.attention, case.key_bias), posed.X)
    theta = low_rank.nearest(theta, posed.dim, rank)
    tangent = low_rank.tangent(theta, posed.dim, rank)
    batches = posed.batches(len(case.attention))
    return levenberg_marquardt.begin(batches, theta, tangent, preconditioned=preconditioned)


def near_a_solution(distance, masked=False, causal=False, **layer_options):
    """A case whose attention matrices are the true ones, but for a change of relative size."""
    options = {"heads": 2, "dim": 3, "seed": 1, **layer_options}
    layer = AttentionLayer.random(**options)
    X = inputs.gaussian(80, 4, 3, seed=2)
    mask = random_mask(np.random.default_rng(3), 80, 4) if masked else None
    case = solved_case(layer, X, mask, causal)
    theta = dense.pack(case.attention, case.key_bias)
    direction = np.random.default_rng(4).standard_normal(theta.shape)
    return case.moved(direction, distance * np.linalg.norm(theta) / np.linalg.norm(direction))


def errors_from(state, steps, enough=0.0):
    """The errors at the start and after each of so many steps, or until one is small enough."""
    rng = np.random.default_rng(0)
    errors = [state.fit.error]
    while len(errors) <= steps and errors[-1] > enough:
        state = levenberg_marquardt.step(state, rng)
        errors.append(state.fit.error)
    return errors, state


def test_a_state_begins_with_the_fit_of_all_examples(xp_array):
    case = random_case(0, n=12, masked=True)
    state = begin(case, xp_array)
    assert state.fit.loss == pytest.approx(case.loss(), rel=0.02)
    assert (state.products, state.exhausted) == (0, False)
    assert state.fit.heads == 2


@given(
    case=small_cases(),
    rank=st.sampled_from([None, 1]),
    single=st.booleans(),
    preconditioned=st.booleans(),
)
@settings(max_examples=30)
def test_the_loss_never_rises(case, rank, single, preconditioned):
    rank = None if case.X.shape[2] == 1 else rank
    state = replace(begin(case, rank=rank, preconditioned=preconditioned), single=single)
    rng = np.random.default_rng(0)
    for _ in range(4):
        following = levenberg_marquardt.step(state, rng)
        assert following.fit.loss <= state.fit.loss
        if following.exhausted or state.fit.loss == 0:
            assert following.fit is state.fit
            assert following.gain == 0
        else:
            assert following.fit.loss < state.fit.loss
            gain = 1 - following.fit.loss / state.fit.loss
            assert following.gain == pytest.approx(gain, abs=1e-12)
            assert following.products >= 1
        state = following


@pytest.mark.parametrize("preconditioned", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_exact_fit_is_reached_from_nearby(variant, preconditioned):
    case = near_a_solution(0.05, **variant)
    state = begin(case, rank=variant.get("rank"), preconditioned=preconditioned)
    errors, state = errors_from(state, steps=12, enough=1e-12)
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-12
    exact = near_a_solution(0.0, **variant)
    true = dense.pack(exact.attention, exact.key_bias)
    gap = np.linalg.norm(state.fit.theta - true) / np.linalg.norm(true)
    assert gap < 1e-10


def test_an_exact_fit_is_reached_on_every_backend(xp_array):
    case = near_a_solution(0.05, bias=True)
    errors, state = errors_from(begin(case, xp_array), steps=12, enough=1e-12)
    assert errors[0] > 1e-3
    assert errors[-1] < 1e-12
    assert type(state.fit.theta) is type(xp_array(case.X))


def test_convergence_is_faster_than_linear_at_the_end():
    errors, _ = errors_from(begin(near_a_solution(0.05)), steps=12, enough=1e-12)
    factors = np.array(errors[1:]) / np.array(errors[:-1])
    assert len(factors) >= 4
    assert (np.diff(factors[-4:-1]) < 0).all()  # the last step may meet rounding errors
    assert min(factors) < 1e-2


@pytest.mark.parametrize("rank", [None, 1, 2])
def test_further_steps_at_the_rounding_floor_do_no_harm(rank):
    state = begin(near_a_solution(0.01, rank=rank), rank=rank)
    errors, _ = errors_from(state, steps=15)
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-13


@pytest.mark.parametrize("rank", [1, 2])
def test_heads_keep_their_rank_and_a_free_key_bias(rank):
    case = random_case(1, n=20, dim=3, bias=True)
    state = begin(case, rank=rank)
    start = to_numpy(state.fit.theta)
    _, state = errors_from(state, steps=3)
    attention = dense.by_head(to_numpy(state.fit.theta), 3)
    assert set(np.linalg.matrix_rank(attention[:, :3], tol=1e-10)) == {rank}
    assert np.abs(state.fit.theta[3] - start[3]).max() > 1e-3


def test_a_step_that_is_given_the_same_generator_is_the_same_step(xp_array):
    case = random_case(2, n=12)
    first, again = (
        levenberg_marquardt.step(begin(case, xp_array), np.random.default_rng(5)).fit.theta
        for _ in range(2)
    )
    np.testing.assert_array_equal(to_numpy(first), to_numpy(again))


@pytest.mark.parametrize("tokens", [np.zeros((5, 2, 2)), np.ones((5, 1, 2))])
def test_where_no_step_can_help_the_state_is_exhausted(xp_array, tokens):
    case = random_case(3, n=5, tokens=tokens.shape[1])
    case.X[:] = tokens
    state = begin(case, xp_array)
    following = levenberg_marquardt.step(state, np.random.default_rng(0))
    assert following.exhausted
    assert following.fit is state.fit


def test_a_perfect_fit_stays_perfect(xp_array):
    case = random_case(4, n=5)
    case.Y[:] = 0.0
    state = begin(case, xp_array)
    assert state.fit.loss == 0
    assert levenberg_marquardt.step(state, np.random.default_rng(0)).fit.loss == 0


# Heads of different strengths


def products_to_solve(preconditioned):
    """How many products it takes to an exact fit where one head is hardly heard."""
    layer = AttentionLayer.random(heads=2, dim=6, scale=1.0, seed=1)
    projection = layer.projection * np.array([1.0, 1e-2])[:, None, None]
    uneven = AttentionLayer(layer.attention, projection)
    case = solved_case(uneven, inputs.gaussian(400, 4, 6, seed=2))
    theta = dense.pack(case.attention)
    direction = np.random.default_rng(4).standard_normal(theta.shape)
    case = case.moved(direction, 0.05 * np.linalg.norm(theta) / np.linalg.norm(direction))
    state, rng, products = begin(case, preconditioned=preconditioned), np.random.default_rng(0), 0
    while state.fit.error > 1e-12:
        state = levenberg_marquardt.step(state, rng)
        products += state.products
    return products


@pytest.mark.slow
def test_weights_make_up_for_heads_that_are_hardly_heard():
    assert products_to_solve(preconditioned=True) < 0.5 * products_to_solve(preconditioned=False)


def test_solves_become_finer():
    state = replace(begin(random_case(0, n=12)), rough=True)
    once = levenberg_marquardt._finer(state)
    twice = levenberg_marquardt._finer(once)
    found = [(one.rough, one.single) for one in (state, once, twice)]
    assert found == [(True, True), (False, True), (False, False)]


def test_a_rough_solve_stops_early(monkeypatch):
    case = near_a_solution(1e-5)
    asked = []
    solve = levenberg_marquardt.solve

    def noted(*arguments):
        asked.append(arguments[-2])
        return solve(*arguments)

    monkeypatch.setattr(levenberg_marquardt, "solve", noted)
    for rough in (True, False):
        levenberg_marquardt.step(replace(begin(case), rough=rough), np.random.default_rng(0))
    assert asked[0] == levenberg_marquardt.SETTINGS.rough_tolerance
    assert asked[-1] < 0.5 * levenberg_marquardt.SETTINGS.rough_tolerance


def test_at_the_limit_of_rounding_no_step_is_sought_for_long(monkeypatch):
    _, state = errors_from(begin(near_a_solution(0.1)), 12)
    state = replace(state, damping=1e-3, single=True)
    solves, solve = [], levenberg_marquardt.solve

    def noted(products, *arguments):
        solves.append(products.weights.dtype.itemsize)
        return solve(products, *arguments)

    monkeypatch.setattr(levenberg_marquardt, "solve", noted)
    monkeypatch.setattr(
        levenberg_marquardt, "_fitted", lambda *args, **kw: replace(state.fit)
    )  # no better
    assert state.fit.error < 1e-12
    left = levenberg_marquardt.step(state, np.random.default_rng(0), exact=1e-10)
    assert solves == [4, 8]  # once in float32, once in float64
    assert (left.gain, left.fit, left.exhausted) == (0.0, state.fit, False)
    assert levenberg_marquardt.step(state, np.random.default_rng(0)).exhausted
    assert len(solves) > 10


@pytest.mark.parametrize("single", [True, False])
def test_where_float32_fails_a_fit_in_float64_follows(monkeypatch, single):
    case = near_a_solution(0.5)
    batches = case.problem().batches(2)
    theta = dense.pack(case.attention)
    state = replace(
        levenberg_marquardt.begin(batches, theta, coarse=True), single=single, damping=1e6
    )
    assert state.fit.single
    monkeypatch.setattr(
        levenberg_marquardt, "_fitted", lambda *args, coarse: replace(state.fit, loss=np.inf)
    )
    left = levenberg_marquardt.step(state, np.random.default_rng(0))
    assert left.exhausted
    assert left.fit.single is not single


def test_a_step_ends_when_it_is_too_late():
    state = begin(near_a_solution(0.3))
    ticks = iter([False, False, False, True])
    moved = levenberg_marquardt.step(state, np.random.default_rng(0), lambda: next(ticks, True))
    assert moved.products <= 3
    still = levenberg_marquardt.step(state, np.random.default_rng(0), lambda: True)
    assert still.fit is state.fit
    assert (still.products, still.gain) == (0, 0.0)
