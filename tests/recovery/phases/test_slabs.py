from functools import cache

import numpy as np
import oracles
import pytest
from cases import as_they_are, in_blocks_of
from hypothesis import given
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.recovery.phases.slabs import WIDTH, Slabs, find_slabs

COUNTS = (16 * 9, 4 * 9)  # of slabs that are chosen in three dimensions


def examples_of(layer, X, xp_array=np.asarray, held_out=()):
    """Examples in the coordinates in which they are given, so that the layer's weights hold."""
    parts = (xp_array(array) for array in (X, layer(X)))
    return as_they_are(*parts, held_out)


def found_in(layer, X, error, xp_array=np.asarray, held_out=()):
    """The two kinds of slabs with the exact sum of projections."""
    projection_sum = xp_array(layer.projection.sum(axis=0))
    return find_slabs(examples_of(layer, X, xp_array, held_out), projection_sum, error)


def few_tokens(n, tokens, dim, seed):
    """Examples made of six tokens, none twice in an example: their slabs repeat."""
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal((6, dim))
    return np.array([pool[rng.choice(6, tokens, replace=False)] for _ in range(n)])


@cache
def small_problem(draw, error):
    """A layer, examples, and all their slabs and the best by loops, two-sided and one-sided."""
    layer = AttentionLayer.random(heads=2, dim=3, scale=10.0, out_dim=4, seed=1)
    X = draw(200, 3, 3, seed=1)
    everything = oracles.agreement_slabs(
        X, layer(X), layer.projection.sum(axis=0), error, least_error=0.03, width=WIDTH
    )
    best = [oracles.best_slabs(slabs, n) for slabs, n in zip(everything, COUNTS, strict=True)]
    return layer, X, everything, best


def assert_same(slabs, expected):
    """The same slabs in any order."""
    assert len(slabs.key) == len(expected)
    order = np.lexsort((slabs.value, slabs.key))
    expected = sorted(expected, key=lambda slab: (slab[0], slab[2]))
    for actual, column in (
        (slabs.key, 0),
        (slabs.normals(), 1),
        (slabs.value, 2),
        (slabs.error, 3),
    ):
        wanted = np.array([slab[column] for slab in expected])
        np.testing.assert_allclose(actual[order], wanted, rtol=1e-5, atol=1e-6)


# The best slabs of all


@pytest.mark.parametrize("error", [0.003, 0.02])
def test_slabs_are_the_best_of_a_loop_over_all_rows_and_tokens(xp_array, error):
    layer, X, everything, best = small_problem(inputs.gaussian, error)
    for slabs, expected in zip(found_in(layer, X, error, xp_array), best, strict=True):
        assert_same(slabs, expected)
    assert [len(expected) for expected in best] == list(COUNTS)
    assert all(len(slabs) > 2 * n for slabs, n in zip(everything, COUNTS, strict=True))


@pytest.mark.parametrize("per_block", [1, 7, 100, 199, 1000])
def test_blocks_do_not_matter(monkeypatch, per_block):
    layer, X, _, best = small_problem(inputs.gaussian, 0.003)
    in_blocks_of(monkeypatch, per_block, examples_of(layer, X))
    for slabs, expected in zip(found_in(layer, X, 0.003), best, strict=True):
        assert_same(slabs, expected)


@pytest.mark.slow
@pytest.mark.parametrize("per_block", [1, 7, 20, 100, 1000])
def test_slabs_that_occur_again_count_once(monkeypatch, per_block):
    layer, X, everything, best = small_problem(few_tokens, 0.01)
    in_blocks_of(monkeypatch, per_block, examples_of(layer, X))
    for slabs, all_of, expected in zip(found_in(layer, X, 0.01), everything, best, strict=True):
        assert len(all_of) > 2 * len(expected) > 10
        assert_same(slabs, expected)


def test_held_out_examples_give_no_slabs():
    layer = AttentionLayer.random(heads=1, dim=2, scale=1.0, seed=2)
    X = inputs.gaussian(60, 2, 2, seed=2)
    held_out = np.arange(0, 60, 2)
    seen, _ = found_in(layer, X, 0.003, held_out=held_out)
    alone, _ = found_in(layer, X[1::2], 0.003)
    np.testing.assert_array_equal(np.sort(seen.key), np.sort(alone.key))
    assert len(alone.key) > 20


def test_slabs_say_which_row_they_are_from(xp_array):
    layer = AttentionLayer.random(heads=2, dim=3, scale=2.0, out_dim=4, seed=3)
    X = inputs.gaussian(50, 3, 3, seed=3)
    for slabs in found_in(layer, X, 0.01, xp_array):
        outputs = layer(slabs.tokens)
        np.testing.assert_allclose(outputs[np.arange(len(slabs.row)), slabs.row], slabs.output)
        for i in range(len(slabs.row)):
            images = slabs.tokens[i] @ layer.projection.sum(axis=0)
            p, residual = oracles.agreed_row(images, slabs.output[i])
            assert slabs.c[i] == np.argmax(p) != slabs.b[i]
            size = np.sqrt(np.mean(np.sum(images**2, axis=1)) / 4) * min(1.0, np.sqrt(p @ p))
            assert slabs.tolerance[i] == pytest.approx(residual + 0.01 * size, rel=1e-6)


def test_no_slab_is_more_exact_than_the_least_error():
    layer = AttentionLayer.random(heads=1, dim=3, scale=1.0, seed=4)
    two_sided, _ = found_in(layer, inputs.gaussian(200, 3, 3, seed=4), 1e-6)
    assert two_sided.error.min() == 0.03
    expected = two_sided.normals() @ layer.attention.ravel()
    np.testing.assert_allclose(two_sided.value, expected, rtol=1e-5)


def test_examples_with_equal_tokens_give_no_slab_about_them():
    layer = AttentionLayer.random(heads=2, dim=3, scale=2.0, seed=5)
    X = inputs.gaussian(100, 3, 3, seed=5)
    X[:, 1] = X[:, 0]
    two_sided, one_sided = found_in(layer, X, 0.001)
    assert len(two_sided.key) == len(one_sided.key) == 0
    X[:, 1] = -X[:, 0]
    assert len(found_in(layer, X, 0.001)[0].key) > 20


# What the slabs say of the heads


@pytest.mark.parametrize("kind", ["boolean", "gaussian"])
@pytest.mark.parametrize("seed", range(3))
def test_slabs_contain_the_heads_with_the_exact_sum(kind, seed):
    layer = AttentionLayer.random(heads=2, dim=8, scale=3.0, seed=seed)
    heads = layer.attention.reshape(2, 64)
    X = getattr(inputs, kind)(20_000, 3, 8, seed=seed)
    two_sided, one_sided = found_in(layer, X, 0.001)
    assert (len(two_sided.key), len(one_sided.key)) == (16 * 64, 4 * 64)
    away = abs(two_sided.normals() @ heads.T - two_sided.value[:, None]).max(axis=1)
    assert np.mean(away <= WIDTH * two_sided.error) > 0.96
    assert np.median(away / two_sided.error) < 2
    # Of the surest one-sided ones none is wrong about any head.
    assert (one_sided.normals() @ heads.T <= one_sided.value[:, None]).all()
    assert (one_sided.value < 0).all()
    assert (one_sided.error == 0).all()


# Choosing


def slabs_with(key, fingerprint):
    """Slabs of which nothing but the key and the fingerprint is real; `value` is the position."""
    count = len(key)
    nothing = np.zeros(count, dtype=int)
    tokens, output = np.zeros((count, 2, 3)), np.zeros((count, 4))
    place, fingerprint = np.arange(count), np.array(fingerprint, dtype=float)
    rest = (place, nothing, nothing, nothing, fingerprint)
    return Slabs(np.array(key, dtype=float), tokens, output, nothing, nothing, nothing, *rest)


@given(
    pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=12),
    count=st.integers(0, 12),
)
def test_smallest_takes_the_smallest_keys_and_of_equal_slabs_the_first(pairs, count):
    keys, fingerprints = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    chosen = []
    for place in sorted(range(len(pairs)), key=lambda i: keys[i]):
        if fingerprints[place] not in [fingerprints[other] for other in chosen]:
            chosen.append(place)
    found = slabs_with(keys, fingerprints).smallest(count)
    np.testing.assert_array_equal(found.value, chosen[:count])
    np.testing.assert_array_equal(found.key, [keys[place] for place in chosen[:count]])


def test_concat_puts_all_fields_of_both_in_order():
    layer = AttentionLayer.random(heads=2, dim=3, scale=2.0, seed=6)
    slabs, _ = found_in(layer, inputs.gaussian(50, 3, 3, seed=6), 0.01)
    first, second = np.array([3, 1]), np.array([0])
    joined, expected = slabs.take(first).concat(slabs.take(second)), slabs.take([3, 1, 0])
    for actual, wanted in zip(joined, expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def test_normals_are_products_of_query_and_gap():
    layer = AttentionLayer.random(heads=2, dim=3, scale=2.0, seed=7)
    slabs, _ = found_in(layer, inputs.gaussian(50, 3, 3, seed=7), 0.01)
    theta = np.random.default_rng(0).standard_normal((3, 3))
    for i, normal in enumerate(slabs.normals()):
        tokens = slabs.tokens[i]
        query, b, c = tokens[slabs.row[i]], tokens[slabs.b[i]], tokens[slabs.c[i]]
        expected = oracles.score(query, b, theta) - oracles.score(query, c, theta)
        assert normal @ theta.ravel() == pytest.approx(expected)
