from dataclasses import replace

import numpy as np
import pytest
from factorings import (
    VARIANTS,
    factored,
    factored_cases,
    flat,
    like_random,
    outputs_by_loops,
    solved_problem,
    there,
)
from fits import assert_close
from hypothesis import given

from onelayer import inputs
from onelayer.array import backend
from onelayer.array.backend import like, single, to_numpy
from onelayer.heads import dense
from onelayer.recovery.factored import model
from onelayer.recovery.gauss_newton.batches import in_single

# What a layer computes


def outputs(factors, block):
    """What the layer computes; the outputs of the examples at padding."""
    return to_numpy(block.outputs) - to_numpy(model.forward(factors, block).residuals)


def assert_computes(case, block, factors):
    """What the layer computes is what loops do, and padding has no residuals."""
    X, _ = case.whitened()
    counted = there(case)
    assert_close(outputs(factors, block)[counted], outputs_by_loops(case, factors, X)[counted])
    residuals = to_numpy(model.forward(factors, block).residuals)
    assert not residuals[~counted].any()


@pytest.mark.parametrize("variant", VARIANTS)
def test_outputs_are_those_of_the_loops(xp_array, variant):
    assert_computes(*factored(xp_array, **variant))


@given(options=factored_cases())
def test_outputs_are_those_of_the_loops_for_all_shapes(options):
    assert_computes(*factored(**options))


def test_examples_of_nothing_but_padding_are_left_out(xp_array):
    case, block, factors = factored(xp_array, masked=True, padded=2)
    assert_computes(case, block, factors)
    without = replace(case, X=case.X[2:], Y=case.Y[2:], mask=case.mask[2:])
    frame = case.problem(xp_array)
    posed = without.problem(xp_array)
    assert posed.output_scale == frame.output_scale
    at, rest = (model.forward(factors, one) for one in (block, *posed.parts(10**6)))
    gradient = model.vjp(factors, block, at, at.residuals)
    alone = model.vjp(factors, *posed.parts(10**6), rest, rest.residuals)
    assert_close(flat(gradient), flat(alone))


def test_large_scores_do_not_overflow(xp_array):
    _, block, factors = factored(xp_array, bias=True)
    steep = in_single(block), replace(factors, query=1e4 * factors.query).map(single)
    found = model.forward(steep[1], steep[0])
    for array in (found.attention, found.residuals):
        assert np.isfinite(to_numpy(array)).all()
    np.testing.assert_allclose(to_numpy(found.attention).sum(axis=-1), 1.0, rtol=1e-5)


def test_what_is_float32_stays_float32(xp_array):
    _, block, factors = factored(xp_array, bias=True, masked=True, causal=True)
    block, factors = in_single(block), factors.map(single)
    at = model.forward(factors, block)
    moved = model.jvp(factors, block, at, factors)
    back = model.vjp(factors, block, at, moved)
    arrays = [at.attention, at.residuals, moved, *(one for _, one in back.arrays())]
    assert {to_numpy(one).dtype for one in arrays} == {np.dtype(np.float32)}


# Derivatives


@pytest.mark.parametrize("variant", VARIANTS)
def test_jvp_matches_finite_differences(xp_array, variant):
    _, block, factors = factored(xp_array, **variant)
    change, step = like_random(factors, np.random.default_rng(5)), 1e-5
    ends = [
        outputs(factors.map(lambda a, b, by=by: a + by * b, change), block) for by in (step, -step)
    ]
    found = model.jvp(factors, block, model.forward(factors, block), change)
    assert_close(found, (ends[0] - ends[1]) / (2 * step), 1e-6)


@given(options=factored_cases())
def test_vjp_is_the_transpose_of_jvp(xp_array, options):
    case, block, factors = factored(xp_array, **options)
    rng = np.random.default_rng(1)
    change = like_random(factors, rng)
    at = model.forward(factors, block)
    rows = rng.standard_normal(tuple(at.residuals.shape)) * there(case)[:, None]
    forward = np.sum(rows * to_numpy(model.jvp(factors, block, at, change)))
    back = flat(model.vjp(factors, block, at, like(rows, block.keys)))
    scale = np.linalg.norm(back) * np.linalg.norm(flat(change))
    assert forward == pytest.approx(back @ flat(change), abs=1e-12 * max(scale, 1.0))


def test_changes_that_leave_heads_as_they_are_move_no_outputs(xp_array):
    _, block, factors = factored(xp_array, bias=True)
    turn = np.random.default_rng(0).standard_normal((factors.heads, 2, 2))
    turn = like(turn, factors.query)

    def turned(factor, by):
        return model.join_heads(model.split_heads(factor, factors.heads) @ by)

    still = factors.map(lambda one: 0.0 * one)
    transposed = backend.transpose(turn)
    change = replace(
        still, query=turned(factors.query, turn), key=turned(factors.key, -1.0 * transposed)
    )
    at = model.forward(factors, block)
    assert_close(model.jvp(factors, block, at, change), np.zeros(block.outputs.shape), 1e-9)
    half = replace(change, key=still.key)
    assert np.abs(to_numpy(model.jvp(factors, block, at, half))).max() > 1e-3


# Factors in other forms


@given(options=factored_cases())
def test_a_row_of_all_numbers_has_a_way_back(xp_array, options):
    _, _, factors = factored(xp_array, **options)
    row = factors.flat()
    assert row.shape[0] == sum(to_numpy(one).size for _, one in factors.arrays())
    back = factors.map(lambda one: 0.0 * one).unflat(row)
    assert back.heads == factors.heads
    pairs = list(zip(factors.arrays(), back.arrays(), strict=True))
    assert pairs
    for (name, array), (other, found) in pairs:
        assert name == other
        np.testing.assert_array_equal(to_numpy(found), to_numpy(array))


@pytest.mark.parametrize("variant", [{"rank": 2}, {"rank": None}, {"bias": True}])
def test_theta_and_projections_are_those_of_the_heads(xp_array, variant):
    case, _, factors = factored(xp_array, **variant)
    query, key = (
        None if one is None else np.split(to_numpy(one), factors.heads, axis=1)
        for one in (factors.query, factors.key)
    )
    attention, bias = dense.unpack(to_numpy(factors.theta()), 3)
    for head in range(factors.heads):
        expected = query[head] if key is None else query[head] @ key[head].T
        np.testing.assert_allclose(attention[head], expected, atol=1e-12)
    assert (bias is not None) == case.bias
    if case.bias:
        np.testing.assert_array_equal(bias, to_numpy(factors.key_bias).T)
    value = np.split(to_numpy(factors.value), factors.heads, axis=1)
    output = np.split(to_numpy(factors.output), factors.heads, axis=0)
    expected = np.stack([v @ o for v, o in zip(value, output, strict=True)])
    np.testing.assert_allclose(to_numpy(factors.projections()), expected, atol=1e-12)


@given(options=factored_cases())
def test_wider_projections_compute_the_same(xp_array, options):
    _, block, factors = factored(xp_array, **options)
    wide = model.widened(factors)
    assert wide.value is None
    assert tuple(wide.output.shape) == (factors.heads * options["dim"], options["out_dim"])
    assert_close(outputs(wide, block), outputs(factors, block))


@pytest.mark.parametrize("head", [0, 1, 2])
@pytest.mark.parametrize("variant", [{}, {"rank": None, "value_rank": None}, {"bias": True}])
def test_one_head_is_replaced_and_the_others_stay(xp_array, variant, head):
    _, block, factors = factored(xp_array, heads=3, **variant)
    _, _, other = factored(xp_array, heads=1, seed=7, **variant)
    found = model.with_head(factors, head, other)
    attention = [to_numpy(dense.by_head(one.theta(), 3)) for one in (found, factors, other)]
    projections = [to_numpy(one.projections()) for one in (found, factors, other)]
    for new, old, single_head in (attention, projections):
        np.testing.assert_array_equal(new[head], single_head[0])
        rest = [i for i in range(3) if i != head]
        np.testing.assert_array_equal(new[rest], old[rest])
    np.testing.assert_array_equal(to_numpy(found.output_bias), to_numpy(factors.output_bias))
    assert np.isfinite(outputs(found, block)).all()


@given(options=factored_cases())
def test_matrices_of_heads_are_tall_and_have_a_way_back(xp_array, options):
    _, _, factors = factored(xp_array, **options)
    for name, array in factors.arrays():
        tall, undo = model.by_head(name, array, factors.heads)
        assert tall.shape[1] >= tall.shape[2]
        assert tall.shape[0] == (1 if name == "output_bias" else factors.heads)
        np.testing.assert_array_equal(to_numpy(undo(tall)), to_numpy(array))


def test_matrices_of_heads_are_those_of_one_head_each(xp_array):
    _, _, factors = factored(xp_array, heads=2)
    for name, axis in (("query", 1), ("output", 0)):
        array = getattr(factors, name)
        tall, _ = model.by_head(name, array, 2)
        first = np.split(to_numpy(array), 2, axis=axis)[0]
        first = first.T if first.shape[0] < first.shape[1] else first
        np.testing.assert_array_equal(to_numpy(tall)[0], first)


# Random heads


@pytest.mark.parametrize("rank", [None, 2, 8])
@pytest.mark.parametrize("value_rank", [None, 2])
def test_random_heads_have_scores_and_outputs_of_unit_size(xp_array, rank, value_rank):
    reference = xp_array(np.zeros(1))
    rng = np.random.default_rng(0)
    found = model.random((20, 16, 12), rank, value_rank, True, rng, reference)
    assert {to_numpy(one).dtype for _, one in found.arrays()} == {np.dtype(np.float32)}
    assert not to_numpy(found.key_bias).any()
    assert not to_numpy(found.output_bias).any()
    attention = to_numpy(dense.by_head(found.theta()[:16, :], 16))
    X = inputs.gaussian(200, 2, 16, seed=1)
    scores = np.einsum("na,mab,nb->nm", X[:, 0], attention, X[:, 1])
    assert 0.8 < scores.std() < 1.25
    values = np.einsum("na,mab->nb", X[:, 0], to_numpy(found.projections()))
    assert 0.8 < values.std() < 1.25


def test_a_layer_as_factors_has_no_residuals(xp_array):
    posed, factors = solved_problem(xp_array, n=20, masked=True, causal=True, bias=True)
    (block,) = posed.parts(10**6)
    assert_close(model.forward(factors, block).residuals, np.zeros(block.outputs.shape), 1e-9)
