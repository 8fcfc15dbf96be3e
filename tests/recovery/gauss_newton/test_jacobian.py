import numpy as np
import pytest
from cases import (
    flat,
    random_case,
    random_mask,
    small_cases,
    solved_case,
    well_posed_cases,
    whitened,
)
from fits import VARIANTS, assert_close, direction_for, jvp, split
from hypothesis import given, settings
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.array.backend import like, namespace, to_numpy
from onelayer.data.chunks import InMemory, Streamed
from onelayer.heads import low_rank
from onelayer.recovery.gauss_newton import jacobian, varpro

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


# Attention matrices of low rank


def low_rank_case(bias, masked):
    """A fit somewhere else than at the solution, with heads of rank 2 in 9 dimensions."""
    layer = AttentionLayer.random(heads=3, dim=9, rank=2, bias=bias, seed=1)
    mask = random_mask(np.random.default_rng(3), 40, 3) if masked else None
    return solved_case(layer, inputs.gaussian(40, 3, 9, seed=2), mask)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_products_of_low_rank_are_those_of_whole_matrices(xp_array, bias, masked):
    fit = low_rank_case(bias, masked).fit(xp_array)
    tangent = low_rank.tangent(fit.theta, 9, 2)
    anywhere = xp_array(np.random.default_rng(0).standard_normal(fit.theta.shape))
    direction = tangent.project(anywhere)
    products = jacobian.jacobian(fit)
    expected = to_numpy(tangent.project(products.gauss_newton_product(direction)))
    found = to_numpy(products.gauss_newton_product(direction, tangent))
    assert abs(expected).max() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * abs(expected).max())
    gradient = to_numpy(jacobian.gradient(fit, products, tangent))
    expected = to_numpy(tangent.project(jacobian.gradient(fit)))
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-12 * abs(expected).max())


def test_products_of_low_rank_where_queries_are_not_keys(xp_array):
    layer = AttentionLayer.random(heads=3, dim=9, rank=2, seed=1)
    X = inputs.gaussian(40, 3, 9, seed=2) + 3.0
    posed = whitened(xp_array(X), xp_array(layer(X) + X), None, False, False)
    assert posed.offset is not None
    fit = varpro.fit(posed.batches(3), posed.heads_of(layer))
    tangent = low_rank.tangent(fit.theta, 9, 2)
    anywhere = xp_array(np.random.default_rng(0).standard_normal(fit.theta.shape))
    direction = tangent.project(anywhere)
    products = jacobian.jacobian(fit)
    expected = to_numpy(tangent.project(products.gauss_newton_product(direction)))
    found = to_numpy(products.gauss_newton_product(direction, tangent))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-11 * abs(expected).max())
    gradient = to_numpy(jacobian.gradient(fit, products, tangent))
    expected = to_numpy(tangent.project(jacobian.gradient(fit)))
    assert abs(expected).max() > 1e-3
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-11 * abs(expected).max())


def test_factors_multiply_to_the_direction():
    rng = np.random.default_rng(0)
    fit = low_rank_case(bias=True, masked=False).fit()
    tangent = low_rank.tangent(fit.theta, 9, 2)
    direction = tangent.project(rng.standard_normal(fit.theta.shape))
    heads = direction.reshape(10, 3, 9).transpose(1, 0, 2)
    left, right = low_rank._factors(direction, tangent.left, tangent.right)
    assert left.shape == (10, 15)
    assert right.shape == (9, 15)
    for i, head in enumerate(heads):
        part = slice(5 * i, 5 * i + 5)
        np.testing.assert_allclose(left[:, part] @ right[:, part].T, head, atol=1e-12)


def test_a_rank_that_is_not_low_goes_the_plain_way(monkeypatch):
    layer = AttentionLayer.random(heads=2, dim=4, rank=2, seed=1)
    fit = solved_case(layer, inputs.gaussian(30, 3, 4, seed=2), None).fit()
    tangent = low_rank.tangent(fit.theta, 4, 2)
    monkeypatch.setattr(low_rank, "_scores", None)
    monkeypatch.setattr(low_rank, "_scores_vjp", None)
    direction = tangent.project(np.ones(fit.theta.shape))
    products = jacobian.jacobian(fit)
    expected = tangent.project(products.gauss_newton_product(direction))
    np.testing.assert_array_equal(products.gauss_newton_product(direction, tangent), expected)
