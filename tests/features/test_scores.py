import operator
from functools import reduce

import numpy as np
import places
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.exceptions import UndefinedMetricWarning
from sklearn.metrics import accuracy_score, r2_score

from onelayer.data.sets import SetRules
from onelayer.features import examples, scores
from onelayer.features.examples import ChunkReader

X = np.random.default_rng(0).standard_normal((40, 3, 2))


def first_coordinates(sets):
    """What a model might predict: two numbers of the query."""
    return sets.block(slice(0, None))[0][:, 0, :]


def opened(y, weight=None, labels=False):
    reader = ChunkReader(SetRules(), labels=labels)
    there = places.by_function
    weight = None if weight is None else there(weight)
    return examples.streamed(there(X), None, there(y), weight, reader, None)


@given(data=st.data())
def test_parts_spread_as_the_whole(data):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    values = [rng.standard_normal((n, 2)) + 5.0 for n in lengths]
    weights = [rng.uniform(0, 2, n) * data.draw(st.sampled_from([0, 1])) for n in lengths]
    weights[-1] = weights[-1] + 0.1
    found = reduce(operator.add, map(scores.spread, values, weights))
    every, weight = np.concatenate(values), np.concatenate(weights)
    mean = np.average(every, axis=0, weights=weight)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-12)
    variance = np.average((every - mean) ** 2, axis=0, weights=weight)
    np.testing.assert_allclose(found.squares / found.weight, variance, rtol=1e-9, atol=1e-13)
    np.testing.assert_array_equal(found.least, every.min(axis=0))
    np.testing.assert_array_equal(found.most, every.max(axis=0))


def test_one_part_spreads_to_the_bit_as_in_numpy():
    values = np.random.default_rng(1).standard_normal((1000, 3)) + 7.0
    found = scores.spread(values, np.ones(1000))
    np.testing.assert_array_equal(found.mean, values.mean(axis=0))
    np.testing.assert_array_equal(found.squares / found.weight, values.var(axis=0))


@pytest.mark.parametrize("weight", [None, np.arange(40.0)])
def test_r_squared_is_that_of_scikit_learn(weight):
    y = X[:, 0, :] + np.random.default_rng(1).standard_normal((40, 2)) + 3.0
    found = scores.r_squared(opened(y, weight), first_coordinates, None)
    expected = r2_score(y, X[:, 0, :], sample_weight=weight)
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_constant_target_is_explained_all_or_not_at_all():
    y = np.stack([np.zeros(40), X[:, 0, 1]], axis=1)
    assert scores.r_squared(opened(y), first_coordinates, None) == r2_score(y, X[:, 0, :]) == 0.5
    found = scores.r_squared(
        opened(y), lambda sets: first_coordinates(sets) * np.array([0, 1]), None
    )
    assert found == 1.0


@pytest.mark.parametrize("weight", [None, np.arange(40.0)])
def test_accuracy_is_that_of_scikit_learn(weight):
    labels = np.where(X[:, 0, 0] + X[:, 1, 1] > 0, "up", "down")
    found = scores.accuracy(
        opened(labels, weight, labels=True),
        lambda sets: np.where(first_coordinates(sets)[:, 0] > 0, "up", "down"),
        None,
    )
    expected = np.where(X[:, 0, 0] > 0, "up", "down")
    assert found == pytest.approx(accuracy_score(labels, expected, sample_weight=weight), rel=1e-12)


def test_one_example_has_no_r_squared():
    one = examples.streamed(
        lambda: [X[:1]], None, lambda: [X[:1, 0]], None, ChunkReader(SetRules()), None
    )
    with pytest.warns(UndefinedMetricWarning, match="less than two samples"):
        assert np.isnan(scores.r_squared(one, first_coordinates, None))
