"""Heads located by correlations of third order, against a tensor formed by loops."""

from dataclasses import replace

import numpy as np
import oracles
import pytest
from cases import flat, random_case, random_mask, read_anew, small_cases, whitened
from hypothesis import given, settings

from onelayer import AttentionLayer, Reason, inputs, recover
from onelayer.array.backend import like, to_numpy
from onelayer.array.blocks import sum_over
from onelayer.data import chunks
from onelayer.heads import dense
from onelayer.heads.subspace import Subspace
from onelayer.recovery.gauss_newton import jacobian
from onelayer.recovery.gauss_newton.batches import map_blocks
from onelayer.recovery.strategies import correlations

VARIANTS = [{}, {"bias": True}, {"causal": True}, {"masked": True}, {"out_dim": 1}, {"tokens": 2}]


def parts_of(case, xp_array=np.asarray):
    """The parts of a case's examples, with its outputs as rows."""
    batches = case.problem(xp_array).batches(1)
    rows = batches.chunks.map(lambda blocks: tuple(block.outputs for block in blocks))
    return flat(map_blocks(correlations._part, batches.chunks, rows))


def tensor(case):
    """T as a matrix (p·d, d·e) by loops, from the whitened examples of a case."""
    X, Y = case.whitened()
    T = oracles.third_order(X, Y, case.mask, case.causal, case.bias)
    return T.reshape(T.shape[0] * T.shape[1], -1)


@given(case=small_cases())
@settings(max_examples=20)
def test_products_are_those_of_the_tensor(xp_array, case):
    parts, T = parts_of(case, xp_array), tensor(case)
    dim, out_dim = case.X.shape[2], case.Y.shape[2]
    rng = np.random.default_rng(0)
    projections = rng.standard_normal((2 * dim, out_dim))
    given = like(projections, parts[0].rows)
    found = sum_over(parts, lambda part: correlations._heads_from(part, given))
    expected = projections.reshape(2, -1) @ T.T
    size = max(1e-3, abs(expected).max())
    flat_heads = to_numpy(dense.flatten(found, dim))
    np.testing.assert_allclose(flat_heads, expected, atol=1e-5 * size, rtol=0)
    heads = rng.standard_normal(found.shape)
    given = like(heads, parts[0].rows)
    back = sum_over(parts, lambda part: correlations._projections_from(part, given))
    expected = dense.flatten(heads, dim) @ T
    size = max(1e-3, abs(expected).max())
    found_back = to_numpy(back).reshape(2, -1)
    np.testing.assert_allclose(found_back, expected, atol=1e-5 * size, rtol=0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_span_has_the_strongest_directions_of_the_tensor(xp_array, variant):
    case = random_case(3, **{"n": 40, "dim": 4, "tokens": 3, "out_dim": 4, **variant})
    batches = case.problem(xp_array).batches(1)
    rows = batches.chunks.map(lambda blocks: tuple(block.outputs for block in blocks))
    found = correlations.span(batches, 2, np.random.default_rng(0), rows)
    left, strengths, _ = np.linalg.svd(tensor(case), full_matrices=False)
    np.testing.assert_allclose(found.strengths, strengths[:2], rtol=0.02)
    shares = np.linalg.norm(to_numpy(found.directions) @ left[:, :4], axis=1)
    assert shares.min() > 0.97  # iteration has not ended, and neighbours are near


def test_listeners_hear_how_far_it_is():
    heard = []
    batches = random_case(3).problem().batches(1)
    correlations.span(batches, 1, np.random.default_rng(0), progress=heard.append)
    assert heard == [0.0, 0.2, 0.4, 0.6, 0.8]


def test_the_span_is_the_same_chunk_by_chunk():
    case = random_case(5, n=12, dim=3, masked=True, bias=True)
    posed = case.problem()
    batches = posed.batches(1)
    parts = [posed.take(np.arange(i, i + 4)).blocks(1) for i in (0, 4, 8)]
    apart = replace(batches, chunks=read_anew(parts), memory_budget=0)
    whole, spread = (
        correlations.span(one, 2, np.random.default_rng(0)) for one in (batches, apart)
    )
    np.testing.assert_allclose(spread.strengths, whole.strengths, rtol=1e-4)


# What is not linear


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_linear_in_the_tokens_is_taken_out(xp_array, variant):
    case = random_case(1, **{"n": 60, "dim": 2, "tokens": 3, **variant})
    posed = case.problem(xp_array)
    batches = posed.batches(1)
    left = flat(correlations._not_linear(batches))
    blocks = flat(batches.chunks)
    features = np.concatenate([to_numpy(correlations._linear(block)) for block in blocks])
    rows = np.concatenate([to_numpy(row) for row in left])
    outputs = np.concatenate([to_numpy(block.outputs) for block in blocks])
    expected = outputs - features @ np.linalg.lstsq(features, outputs, rcond=None)[0]
    np.testing.assert_allclose(rows, expected, atol=1e-6)
    assert np.linalg.norm(rows) > 0.1


def test_padding_is_in_no_correlation():
    rng = np.random.default_rng(0)
    X, Y = rng.standard_normal((2, 30, 4, 3))
    mask = random_mask(rng, 30, 4)
    filled = np.where(mask[:, :, None], X, 1e3)
    cuts = [whitened(x, Y, mask, False, False).batches(1) for x in (X, filled)]
    spans = [correlations.span(one, 1, np.random.default_rng(1)) for one in cuts]
    np.testing.assert_allclose(spans[0].strengths, spans[1].strengths, rtol=1e-6)


# Heads in a span


def some_span(xp_array=np.asarray, count=2, dim=3):
    basis, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((dim * dim, count)))
    return correlations.HeadSpan(dim, xp_array(basis.T.copy()), np.ones(count))


def within(span):
    return Subspace(span.dim, span.directions, chunks.InMemory(()))


@pytest.mark.parametrize("variant", VARIANTS)
def test_products_within_the_span_are_those_of_whole_matrices(xp_array, variant):
    case = random_case(3, **{"n": 25, "dim": 4, "heads": 3, **variant})
    fit = case.fit(xp_array, per_block=7)
    span = correlations.span(fit.batches, 2, np.random.default_rng(0))
    allowed = span.subspace(fit.batches)
    products = jacobian.jacobian(fit)
    direction = allowed.project(
        like(np.random.default_rng(1).standard_normal(fit.theta.shape), fit.theta)
    )
    pairs = [
        (
            products.gauss_newton_product(direction, allowed),
            products.gauss_newton_product(direction),
        ),
        (jacobian.gradient(fit, products, allowed), jacobian.gradient(fit)),
    ]
    for found, whole in pairs:
        expected = to_numpy(allowed.project(whole))
        size = max(1e-3, abs(to_numpy(whole)).max())
        np.testing.assert_allclose(to_numpy(found), expected, rtol=0, atol=1e-5 * size)


def test_heads_are_drawn_within_the_span(xp_array):
    span = some_span(xp_array)
    heads = span.drawn(50, np.random.default_rng(2))
    assert heads.shape == (3, 150)
    np.testing.assert_allclose(to_numpy(within(span).project(heads)), to_numpy(heads), atol=1e-12)
    norms = np.linalg.norm(dense.flatten(to_numpy(heads), 3), axis=1)
    assert np.sqrt(np.mean(norms**2)) == pytest.approx(1.0, abs=0.2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("where", ["boolean", "gaussian"])
def test_the_heads_of_a_layer_are_in_the_span(bias, where):
    layer = AttentionLayer.random(heads=3, dim=12, rank=3, scale=2.0, seed=0, bias=bias)
    X = getattr(inputs, where)(4000, 4, 12, seed=1)
    posed = whitened(X, layer(X), None, False, bias)
    span = correlations.span(posed.batches(3), 3, np.random.default_rng(0))
    assert (np.diff(span.strengths) <= 0).all()
    heads = dense.flatten(posed.heads_of(layer), 12)
    inside = np.linalg.norm(heads @ span.directions.T, axis=1) / np.linalg.norm(heads, axis=1)
    assert inside.min() > 0.9
    blind = np.linalg.qr(np.random.default_rng(3).standard_normal((heads.shape[1], 3)))[0]
    outside = np.linalg.norm(heads @ blind, axis=1) / np.linalg.norm(heads, axis=1)
    assert outside.max() < 0.5


# The search


OPTIONS = [{}, {"bias": True}, {"rank": 3}, {"causal": True}]


@pytest.mark.slow
@pytest.mark.usefixtures("all_are_large")
@pytest.mark.parametrize("options", OPTIONS)
def test_large_problems_begin_where_correlations_say(xp_array, options):
    causal = options.get("causal", False)
    made = {name: value for name, value in options.items() if name != "causal"}
    layer = AttentionLayer.random(heads=3, dim=8, scale=2.0, seed=0, **made)
    X = inputs.boolean(2500, 4, 8, seed=1)
    Y = layer(X, causal=causal)
    found = recover(xp_array(X), xp_array(Y), heads=3, method="refine", **options)
    assert found.reason is Reason.EXACT
    assert found.layer.distance(layer).attention.max() < 1e-9
    stages = [row.stage for row in found.trace]
    assert stages[:4] == ["span of the inputs", "plan", "correlations", "within the span"]
    assert found.trace[2].note.startswith("singular values 1.00, ")
    last = [row.error for row in found.trace if row.stage == "within the span"][-1]
    assert last < 0.9 * found.trace[3].error
    assert "start, few examples" in stages


@pytest.mark.slow
@pytest.mark.usefixtures("all_are_large")
def test_stuck_heads_grow_where_residuals_say():
    layer = AttentionLayer.random(heads=2, dim=8, scale=2.0, seed=0)
    X = inputs.boolean(3000, 4, 8, seed=1)
    found = recover(X, layer(X), heads="auto", method="refine")
    assert found.reason is Reason.EXACT
    assert found.layer.heads == 2
    assert found.layer.distance(layer).attention.max() < 1e-9


@pytest.mark.slow
@pytest.mark.usefixtures("all_are_large")
def test_noise_is_told_on_large_problems_too():
    layer = AttentionLayer.random(heads=2, dim=6, scale=2.0, rank=1, seed=0)
    X = inputs.boolean(1500, 4, 6, seed=1)
    noise = 1e-5 * np.random.default_rng(5).standard_normal((1500, 4, 6))
    found = recover(X, layer(X) + noise, heads=2, rank=1, method="refine")
    assert found.reason is Reason.NOISE_FLOOR
    assert found.layer.distance(layer).attention.max() < 1e-4
    assert sum(row.products for row in found.trace) < 2000


@pytest.mark.usefixtures("all_are_large")
def test_the_same_seed_gives_the_same_bits():
    layer = AttentionLayer.random(heads=2, dim=6, seed=0)
    X = inputs.gaussian(800, 3, 6, seed=1)
    first, second = (recover(X, layer(X), heads=2, method="refine", seed=5) for _ in range(2))
    assert first.layer.attention.tobytes() == second.layer.attention.tobytes()


@pytest.mark.usefixtures("all_are_large")
def test_examples_may_be_read_chunk_by_chunk(monkeypatch):
    monkeypatch.setattr(chunks, "KEPT_BYTES", 1)
    layer = AttentionLayer.random(heads=2, dim=6, seed=0)
    X = inputs.gaussian(900, 3, 6, seed=1)
    pieces = lambda: (X[i : i + 300] for i in (0, 300, 600))  # noqa: E731
    found = recover(pieces, layer(pieces), heads=2, method="refine")
    assert found.reason is Reason.EXACT
    assert found.layer.distance(layer).attention.max() < 1e-9
