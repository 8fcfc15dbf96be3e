from dataclasses import replace

import numpy as np
import pytest
from cases import flat, random_case, small_cases, solved, well_posed_cases
from hypothesis import given, settings
from hypothesis import strategies as st

from onelayer.array.backend import like, namespace, to_numpy
from onelayer.data.chunks import InMemory, Streamed
from onelayer.recovery.gauss_newton import jacobian, varpro

VARIANTS = [
    {},
    {"bias": True},
    {"causal": True},
    {"masked": True},
    {"masked": True, "causal": True, "bias": True},
    {"out_dim": 1, "dim": 3},
    {"out_dim": 5},
    {"heads": 1},
    {"tokens": 1},
]


def direction_for(fit, seed=0):
    """A random direction of the theta attention matrices, as numpy and in the fit's namespace."""
    direction = np.random.default_rng(seed).standard_normal(fit.theta.shape)
    return direction, like(direction, fit.theta)


def jvp(fit, direction, single=False):
    """J times a direction, all blocks below one another."""
    moved = jacobian.jacobian(fit, single=single).jvp(direction)
    return np.concatenate([to_numpy(part) for part in flat(moved)])


def split(fit, rows):
    """Rows for all examples, cut as the fit's blocks are, in one chunk."""
    cuts = np.cumsum([block.outputs.shape[0] for block in flat(fit.batches.chunks)])[:-1]
    return InMemory((tuple(like(part, fit.theta) for part in np.split(rows, cuts)),))


def assert_close(actual, expected, relative=1e-9):
    """Equal up to `relative` of the largest entry."""
    expected = np.asarray(expected)
    atol = relative * max(1e-3, abs(expected).max(initial=0.0))
    np.testing.assert_allclose(to_numpy(actual), expected, rtol=0, atol=atol)


# The fit


@given(case=well_posed_cases())
@settings(max_examples=15)
def test_features_weights_and_loss_are_those_of_plain_least_squares(xp_array, case):
    fit = case.fit(xp_array)
    assert namespace(fit.weights) is namespace(xp_array(case.X))
    H = case.features()
    assert_close(np.concatenate([to_numpy(a.features) for a in flat(fit.attended)]), H)
    assert fit.loss == pytest.approx(case.loss(), rel=1e-10)
    assert fit.error == pytest.approx(case.loss() ** 0.5, rel=1e-10)
    assert fit.heads == case.heads
    _, Y = case.whitened()
    best, *_ = np.linalg.lstsq(H, Y.reshape(len(H), -1), rcond=None)
    assert_close(H @ to_numpy(fit.weights), H @ best, 1e-8)


@given(case=small_cases())
def test_loss_is_that_of_least_squares_even_where_weights_are_not_determined(case):
    assert case.fit().loss == pytest.approx(case.loss(), abs=1e-9)


@given(case=small_cases())
@settings(max_examples=10)
def test_residuals_are_outputs_less_what_the_weights_explain(xp_array, case):
    fit = case.fit(xp_array)
    total = 0.0
    parts = (flat(spread) for spread in (fit.batches.chunks, fit.attended, fit.residuals))
    for block, attended, residual in zip(*parts, strict=True):
        explained = to_numpy(attended.features) @ to_numpy(fit.weights)
        assert_close(residual, to_numpy(block.outputs) - explained, 1e-6)
        total += float(np.sum(to_numpy(residual) ** 2))
    assert fit.loss * case.equations == pytest.approx(total, rel=1e-12)


# Products with J and S


@given(case=small_cases(), seed=st.integers(0, 99))
def test_push_matches_the_loops(xp_array, case, seed):
    fit = case.fit(xp_array)
    direction, array = direction_for(fit, seed)
    assert_close(jvp(fit, array), case.push(direction, fit.weights))


@pytest.mark.parametrize("variant", VARIANTS)
def test_push_matches_finite_differences_of_the_forward_pass(variant):
    case = random_case(1, **variant)
    fit = case.fit()
    direction, _ = direction_for(fit)
    step = 1e-5
    ahead, behind = (case.moved(direction, s).features() @ fit.weights for s in (step, -step))
    assert_close(jvp(fit, direction), (ahead - behind) / (2 * step), 1e-7)


@given(case=small_cases(), seed=st.integers(0, 99))
def test_pull_is_the_transpose_of_push(xp_array, case, seed):
    fit = case.fit(xp_array, per_block=3)
    direction, array = direction_for(fit, seed)
    outputs = np.random.default_rng(seed).standard_normal(
        (case.X.shape[0] * case.X.shape[1], case.Y.shape[2])
    )
    vjp = jacobian.jacobian(fit).vjp(split(fit, outputs))
    assert tuple(vjp.shape) == direction.shape
    there = np.sum(jvp(fit, array) * outputs)
    back = np.sum(direction * to_numpy(vjp))
    size = np.linalg.norm(jvp(fit, array)) * np.linalg.norm(outputs)
    assert back == pytest.approx(there, abs=1e-12 + 1e-11 * size)


@pytest.mark.parametrize("variant", VARIANTS)
def test_normal_product_is_the_dense_one(xp_array, variant):
    case = random_case(2, n=12, **variant)
    fit = case.fit(xp_array)
    J = case.reduced_jacobian(fit.weights)
    direction, array = direction_for(fit)
    expected = (J.T @ (J @ direction.ravel())).reshape(direction.shape)
    # Looser where features coincide (one token): then the weights themselves are large.
    relative = 1e-9 if case.X.shape[1] > 1 else 1e-3
    assert_close(jacobian.jacobian(fit).gauss_newton_product(array), expected, relative)
    assert case.X.shape[1] == 1 or abs(expected).max() > 1e-2


@given(case=small_cases(), seed=st.integers(0, 99))
def test_normal_product_is_symmetric_and_not_negative(case, seed):
    fit = case.fit()
    products = jacobian.jacobian(fit)
    first, second = (direction_for(fit, s)[0] for s in (seed, seed + 1))
    images = products.gauss_newton_product(first), products.gauss_newton_product(second)
    scale = 1e-12 + np.linalg.norm(jvp(fit, first)) * np.linalg.norm(jvp(fit, second))
    assert np.sum(images[0] * second) == pytest.approx(np.sum(images[1] * first), abs=1e-5 * scale)
    assert np.sum(images[0] * first) >= -1e-5 * (1e-12 + np.linalg.norm(jvp(fit, first)) ** 2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradient_matches_finite_differences_of_the_reduced_loss(variant):
    case = random_case(3, n=12, **variant)
    fit = case.fit()
    gradient = jacobian.gradient(fit)
    equations = case.equations
    step = 1e-4
    for seed in range(3):
        direction, _ = direction_for(fit, seed)
        ahead, behind = (case.moved(direction, s).loss() * equations for s in (step, -step))
        slope = (ahead - behind) / (2 * step)
        assert -2 * np.sum(gradient * direction) == pytest.approx(slope, rel=1e-5, abs=1e-6)


@given(case=well_posed_cases())
@settings(max_examples=10)
def test_gradient_is_the_same_on_every_backend(xp_array, case):
    assert_close(jacobian.gradient(case.fit(xp_array)), jacobian.gradient(case.fit()))


@pytest.mark.parametrize("variant", VARIANTS[:-1])
@pytest.mark.parametrize("per_block", [1, 5])
def test_size_of_the_blocks_does_not_matter(xp_array, variant, per_block):
    case = random_case(4, n=12, **variant)
    whole, parts = case.fit(xp_array), case.fit(xp_array, per_block)
    assert [len(flat(fit.batches.chunks)) for fit in (whole, parts)] == [1, -(-12 // per_block)]
    _, array = direction_for(whole)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert_close(parts.weights, to_numpy(whole.weights))
    assert_close(jacobian.gradient(parts), to_numpy(jacobian.gradient(whole)))
    assert_close(jvp(parts, array), jvp(whole, array))
    products = [jacobian.jacobian(fit).gauss_newton_product(array) for fit in (whole, parts)]
    assert_close(products[1], to_numpy(products[0]))
    assert abs(to_numpy(products[0])).max() > 0


def same_with_less_room(xp_array, room, single):
    """Two fits of the same examples, of which the second holds so many bytes, compared."""
    case = random_case(4, n=12, masked=True, bias=True)
    kept, again = (
        case.fit(xp_array, per_block=5),
        case.fit(xp_array, per_block=5, memory_budget=room),
    )
    direction = like(direction_for(kept)[0], kept.theta)
    if single:
        direction = namespace(direction).astype(direction, namespace(direction).float32)
    products = [jacobian.jacobian(fit, single=single) for fit in (kept, again)]
    first, second = (product.gauss_newton_product(direction) for product in products)
    assert second.dtype == direction.dtype
    within = 1e-5 if single else 1e-12
    assert_close(second, to_numpy(first), within)
    assert abs(to_numpy(first)).max() > 0.1
    sizes = [varpro.squared_size(product.jvp(direction)) for product in products]
    assert sizes[1] == pytest.approx(sizes[0], rel=within)
    assert again.loss == kept.loss
    np.testing.assert_array_equal(to_numpy(again.weights), to_numpy(kept.weights))
    np.testing.assert_array_equal(
        to_numpy(jacobian.gradient(again)), to_numpy(jacobian.gradient(kept))
    )
    return again, products[1]


@pytest.mark.parametrize("single", [False, True])
def test_what_is_not_kept_in_memory_is_computed_again(xp_array, single):
    again, products = same_with_less_room(xp_array, 0, single)
    for spread in (again.attended, again.residuals, products.attended, products.blocks):
        assert isinstance(spread, Streamed)
        assert len(spread) == 3


@pytest.mark.parametrize("single", [False, True])
def test_what_there_is_room_for_is_kept_beside_chunks_that_are_read_again(xp_array, single):
    again, products = same_with_less_room(xp_array, 2**20, single)
    assert isinstance(again.batches.chunks, Streamed)
    for spread in (again.attended, again.residuals, products.attended):
        assert isinstance(spread, InMemory)
        assert len(spread) == 3


def test_some_is_kept_where_there_is_room_for_that_alone(xp_array):
    outputs = 8 * 12 * 3 * 2  # bytes: an output is narrower than the tokens of two heads
    again, _ = same_with_less_room(xp_array, outputs, single=False)
    assert isinstance(again.residuals, InMemory)
    assert isinstance(again.attended, Streamed)
    again, _ = same_with_less_room(xp_array, outputs - 1, single=False)
    assert isinstance(again.residuals, Streamed)


def test_squared_size_is_that_of_the_push(xp_array):
    fit = random_case(4, n=12).fit(xp_array, per_block=5)
    _, array = direction_for(fit)
    size = varpro.squared_size(jacobian.jacobian(fit).jvp(array))
    assert size == pytest.approx(np.sum(jvp(fit, array) ** 2), rel=1e-10)


@pytest.mark.parametrize(("out_dim", "narrow"), [(5, False), (40, True)])
def test_in_float32_nothing_is_held_that_has_no_room(out_dim, narrow):
    case = random_case(4, n=40, dim=3, heads=4, out_dim=out_dim)
    blocks = 40 * 3 * (2 * 3 + 1 + out_dim) * 4  # bytes of all blocks, of three tokens each
    computed = 40 * 3 * 4 * (3 + 3 + out_dim) * 4  # of attention, features and projected tokens
    assert blocks < computed
    whole = case.fit()
    expected = to_numpy(jacobian.gradient(whole))
    for room, *held in [(blocks, narrow, False), (computed, True, True)]:
        batches = case.fit(per_block=10, memory_budget=room).batches
        fit = varpro.fit(batches, whole.theta, single=True)
        products = jacobian.jacobian(fit)
        assert [isinstance(one, InMemory) for one in (fit.attended, products.images)] == held
        assert fit.loss == pytest.approx(whole.loss, rel=1e-4)
        assert_close(jacobian.gradient(fit, products), expected, 1e-3)


@pytest.mark.parametrize("bias", [False, True])
def test_mixtures_of_the_outputs_give_the_same_products_on_average(xp_array, bias):
    fit = random_case(4, n=12, dim=3, out_dim=5, bias=bias).fit(xp_array, per_block=5)
    _, array = direction_for(fit)
    products, rng = jacobian.jacobian(fit), np.random.default_rng(0)
    expected = to_numpy(products.gauss_newton_product(array))
    assert_close(
        products.sketched(5, rng).gauss_newton_product(array), expected
    )  # mixed, and none left out
    few = [to_numpy(products.sketched(2, rng).gauss_newton_product(array)) for _ in range(400)]
    assert products.sketched(2, rng).weights.shape[1] == 2
    spread = np.std(few, axis=0) / 20
    assert abs(np.mean(few, axis=0) - expected).max() < 4.5 * spread.max()
    assert spread.max() > 1e-3 * abs(expected).max()


@pytest.mark.parametrize("tokens", [15, 16, 17, 20])
def test_many_tokens_are_no_other_case(tokens):
    case = random_case(5, n=3, tokens=tokens, heads=1, causal=True)
    fit = case.fit()
    direction, _ = direction_for(fit)
    assert_close(jvp(fit, direction), case.push(direction, fit.weights))


@pytest.mark.parametrize("variant", VARIANTS[:-1])
def test_single_precision_is_close_to_double(xp_array, variant):
    case = random_case(6, n=12, **variant)
    fit = case.fit(xp_array)
    _, array = direction_for(fit)
    xp = namespace(array)
    single = xp.astype(array, xp.float32)
    assert jvp(fit, single, single=True).dtype == np.float32
    assert_close(jvp(fit, single, single=True), jvp(fit, array), 1e-5)
    product = jacobian.jacobian(fit, single=True).gauss_newton_product(single)
    assert product.dtype == xp.float32
    assert_close(product, to_numpy(jacobian.jacobian(fit).gauss_newton_product(array)), 1e-4)


# The cost of dropping a head


@given(case=well_posed_cases())
@settings(max_examples=15)
def test_cost_of_dropping_is_what_refitting_without_the_head_costs(xp_array, case):
    costs = varpro.cost_of_dropping(case.fit(xp_array))
    equations = case.equations
    assert len(costs) == case.heads
    for head, cost in enumerate(costs):
        if case.heads == 1:
            H = np.ones((len(case.features()), 1)) * case.bias
            _, Y = case.whitened()
            flat = Y.reshape(len(H), -1)
            if case.mask is not None:
                H, flat = H[case.mask.ravel()], flat[case.mask.ravel()]
            mean = flat.mean(axis=0) * case.bias
            without = float(np.sum((flat - mean) ** 2)) / equations
        else:
            keep = np.arange(case.heads) != head
            bias = case.key_bias[keep] if case.bias else None
            without = replace(case, attention=case.attention[keep], key_bias=bias).loss()
        assert cost / equations == pytest.approx(without - case.loss(), abs=1e-8)


def test_dropping_one_of_two_equal_heads_costs_nothing(xp_array):
    case = random_case(7, n=20, heads=3)
    case.attention[2] = case.attention[0]
    costs = np.array(varpro.cost_of_dropping(case.fit(xp_array))) / case.equations
    assert max(abs(costs[[0, 2]])) < 1e-6 < 1e-3 < costs[1]


# Degenerate problems


def test_equal_heads_fit_as_well_as_one_of_them(xp_array):
    case = random_case(8, n=20)
    case.attention[1] = case.attention[0]
    one = replace(case, attention=case.attention[:1])
    fit = case.fit(xp_array)
    assert fit.loss == pytest.approx(one.loss(), abs=1e-9)
    assert np.isfinite(to_numpy(fit.weights)).all()
    _, array = direction_for(fit)
    assert np.isfinite(to_numpy(jacobian.jacobian(fit).gauss_newton_product(array))).all()


@pytest.mark.parametrize("bias", [False, True])
def test_tokens_that_are_all_zero_explain_nothing_but_a_bias(xp_array, bias):
    case = random_case(9, bias=bias)
    case.X[:] = 0.0
    fit = case.fit(xp_array)
    _, Y = case.whitened()
    left = Y - Y.mean(axis=(0, 1)) * bias
    assert fit.loss == pytest.approx(float(np.mean(left**2)), rel=1e-9)
    _, array = direction_for(fit)
    assert abs(to_numpy(jacobian.jacobian(fit).gauss_newton_product(array))).max() == 0
    assert abs(to_numpy(jacobian.gradient(fit))).max() == 0


def test_dropping_a_head_that_sees_only_zeros_costs_nothing(xp_array):
    case = random_case(9)
    case.X[:] = 0.0
    assert varpro.cost_of_dropping(case.fit(xp_array)) == [0.0, 0.0]


def test_one_token_attends_to_itself_whatever_the_attention(xp_array):
    case = random_case(10, tokens=1)
    fit = case.fit(xp_array)
    direction, array = direction_for(fit)
    size = abs(to_numpy(fit.weights)).max()
    assert abs(jvp(fit, array)).max() < 1e-14 * size
    moved = case.moved(direction, 1.0).fit(xp_array)
    assert moved.loss == pytest.approx(fit.loss, abs=1e-9)
    assert case.loss() == pytest.approx(fit.loss, abs=1e-9)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_fit_in_single_precision_is_close_to_one_in_double(xp_array, variant):
    case = random_case(3, **{"n": 40, **variant})
    fit, expected = (
        varpro.fit(case.fit(xp_array).batches, case.fit(xp_array).theta, single=single)
        for single in (True, False)
    )
    assert fit.single
    assert not expected.single
    assert fit.error == pytest.approx(expected.error, rel=1e-4)
    assert_close(fit.weights, to_numpy(expected.weights), 1e-3)
    products = jacobian.jacobian(fit)
    assert_close(jacobian.gradient(fit, products), to_numpy(jacobian.gradient(expected)), 1e-3)


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
