from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from factorings import VARIANTS, factored, flat, like_random, solved_problem
from fits import assert_close

from onelayer.array.backend import like, single, to_numpy
from onelayer.recovery.factored import metric, model
from onelayer.recovery.gauss_newton.batches import in_single

BY_HEAD = [  # with as many outputs as values of all heads
    {"out_dim": 4},
    {"out_dim": 5, "bias": True},
    {"out_dim": 5, "masked": True, "causal": True},
    {"out_dim": 6, "heads": 3},
    {"out_dim": 4, "output_bias": False},
    {"out_dim": 4, "rank": None},
]


def at(xp_array=np.asarray, by_head=False, repeated=1, **options):
    """A metric, factors and the block of examples that it is at."""
    _, block, factors = factored(xp_array, n=40, **options)
    block, factors = in_single(block), factors.map(single)
    if by_head:  # outputs that are decoupled: each is one value
        factors = replace(factors, output=like(identity(factors), factors.output))
    places = [(block, model.forward(factors, block))] * repeated
    found = metric.metric(factors, places, np.random.default_rng(0), by_head)
    return found, factors, block


def identity(factors):
    return np.eye(*factors.output.shape)


def formed(work, factors):
    """The matrix of a linear map of factors."""
    size = int(factors.flat().shape[0])
    images = [flat(work(factors.unflat(like(one, factors.query)))) for one in np.eye(size)]
    return np.stack(images, axis=1)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_metric_has_an_inverse_and_is_positive(xp_array, variant):
    found, factors, _ = at(xp_array, **variant)
    direction = like_random(factors, np.random.default_rng(3)).map(single)
    back = found.times(found.times(direction), inverse=True)
    assert_close(back.flat(), flat(direction), 5e-3)
    assert flat(direction) @ flat(found.times(direction)) > 0


@pytest.mark.parametrize("variant", BY_HEAD)
def test_by_head_all_but_own_outputs_have_an_inverse(xp_array, variant):
    found, factors, _ = at(xp_array, by_head=True, **variant)
    matrix, inverse = (formed(partial(found.times, inverse=one), factors) for one in (False, True))
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-5 * np.abs(matrix).max())
    free = np.diag(matrix) > 0
    named = {name: np.ones(one.shape, bool) for name, one in factors.arrays()}
    named["output"] = ~of_own_outputs(factors)
    np.testing.assert_array_equal(free, np.concatenate([one.ravel() for one in named.values()]))
    np.testing.assert_array_equal(np.diag(inverse) > 0, free)
    product = (matrix @ inverse)[np.ix_(free, free)]
    np.testing.assert_allclose(product, np.eye(free.sum()), atol=5e-2)
    assert not matrix[~free].any()
    assert np.linalg.eigvalsh(matrix[np.ix_(free, free)]).min() > 0


def of_own_outputs(factors):
    """Which entries of the output factor take values of a head to outputs of the same head."""
    inner, out_dim = factors.output.shape
    head = np.arange(inner) // (inner // factors.heads)
    rest = np.full(out_dim - inner, -1)
    return head[:, None] == np.concatenate([head, rest])[None, :]


@pytest.mark.parametrize("variant", BY_HEAD)
def test_by_head_values_and_outputs_have_their_gauss_newton_matrix(xp_array, variant):
    found, factors, block = at(xp_array, by_head=True, **variant)
    activations = model.forward(factors, block)
    still = factors.map(lambda one: 0.0 * one)
    linear = [name for name, _ in factors.arrays() if name in ("value", "output", "output_bias")]

    def only_linear(direction):
        kept = {name: getattr(direction, name) for name in linear}
        kept["output"] = kept["output"] * like(~of_own_outputs(factors), kept["output"])
        return replace(still, **kept)

    def gauss_newton(direction):
        rows = model.jvp(factors, block, activations, only_linear(direction))
        return only_linear(model.vjp(factors, block, activations, rows))

    expected = formed(gauss_newton, factors)
    matrix = formed(lambda one: only_linear(found.times(only_linear(one))), factors)
    np.testing.assert_allclose(matrix, expected, atol=1e-4 * np.abs(expected).max())


def test_a_metric_is_near_the_blocks_of_the_gauss_newton_matrix():
    # Of one head on independent tokens. That of outputs is exact, and so is that of a bias.
    posed, factors = solved_problem(n=4000, heads=1)
    factors = replace(factors, query=0.1 * factors.query, key=0.1 * factors.key).map(single)
    (block,) = posed.parts(10**6)
    block = in_single(block)
    activations = model.forward(factors, block)
    places = [(block, activations)] * 4  # of which every fourth is looked at
    matrix = metric.metric(factors, places, np.random.default_rng(0), by_head=False)
    still = factors.map(lambda one: 0.0 * one)
    for name, array in factors.arrays():

        def only(direction, name=name):
            return replace(still, **{name: getattr(direction, name)})

        def gauss_newton(direction, only=only):
            rows = model.jvp(factors, block, activations, only(direction))
            return only(model.vjp(factors, block, activations, rows))

        part = formed(only, factors).any(axis=0)
        assert part.sum() == to_numpy(array).size
        there = np.ix_(part, part)
        expected = 4 * formed(gauss_newton, factors)[there]
        found = formed(lambda one, only=only: only(matrix.times(only(one))), factors)[there]
        assert 0.5 < np.trace(expected) / np.trace(found) < 2.0, name
        if name != "key":  # attention sums to one, which makes those of the keys depend
            gap = np.linalg.norm(expected - found) / np.linalg.norm(found)
            assert gap < (0.01 if name in ("output", "output_bias") else 0.5), name


def test_queries_of_uneven_tokens_have_uneven_weights():
    # Tokens vary a hundred times as much along one direction as along another. Attention is even.
    _, block, factors = factored(n=400, heads=1, dim=3)
    factors = replace(factors, query=1e-3 * factors.query)
    block, factors = in_single(block), factors.map(single)
    uneven = np.float32([10, 1, 0.1])
    block = replace(block, keys=block.keys * uneven, queries=block.queries * uneven)
    place = block, model.forward(factors, block)
    found = metric.metric(factors, [place], np.random.default_rng(0), by_head=False)
    sizes = np.diag(to_numpy(found.tokens["query"].matrix)[0])
    assert sizes[0] > 20 * sizes[1] > 100 * sizes[2]  # the least is limited by a ridge
