import operator
import pickle
from functools import reduce

import numpy as np
import places
import pytest
from example_sets import ragged
from hypothesis import given
from hypothesis import strategies as st

import onelayer as ol
from onelayer import inputs
from onelayer.array.backend import namespace, to_numpy
from onelayer.data import standardization
from onelayer.data.sets import as_sets, single_tokens
from onelayer.data.standardization import Standardization

EPSILON = np.finfo(float).eps
X = inputs.gaussian(60, 4, 3)
Y = X[:, 1:, 0].mean(axis=1)


def learned(tokens, weights=None, epsilon=EPSILON):
    return Standardization.learned(standardization.moments(tokens, weights), epsilon)


# What is learned


@given(data=st.data())
def test_parts_have_the_moments_of_the_whole(data):
    lengths = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    offset = data.draw(st.sampled_from([0.0, 5.0, 1e6]))
    size = data.draw(st.sampled_from([1e-200, 1e-6, 1.0, 1e6, 1e200]))
    values = [size * (rng.standard_normal((n, 2)) + offset) for n in lengths]
    weights = [rng.uniform(0, 2, n) * data.draw(st.sampled_from([0, 1])) for n in lengths]
    weights[-1] = weights[-1] + 0.1
    found = reduce(operator.add, map(standardization.moments, values, weights))
    every, weight = np.concatenate(values) / size, np.concatenate(weights)
    mean = np.average(every, axis=0, weights=weight)
    np.testing.assert_allclose(found.mean / size, mean, rtol=1e-12)
    deviation = np.sqrt(np.average((every - mean) ** 2, axis=0, weights=weight))
    got = found.root / size / np.sqrt(found.weight)
    np.testing.assert_allclose(got, deviation, rtol=1e-9, atol=1e-15 * (1 + offset))
    counted = every[weight > 0]
    np.testing.assert_allclose(found.largest / size, abs(counted).max(axis=0), rtol=1e-12)


def test_tokens_get_mean_zero_and_about_unit_norm():
    tokens = inputs.gaussian(500, 1, 5)[:, 0] * 10.0 ** np.arange(-4, 6, 2) + 1e5
    found = learned(tokens)(tokens)
    np.testing.assert_allclose(found.mean(axis=0), 0.0, atol=1e-7)
    np.testing.assert_allclose(np.mean(np.sum(found**2, axis=1)), 1.0, rtol=1e-9)


@pytest.mark.parametrize("dtype", ["f8", "f4"])
def test_a_mean_far_larger_than_the_deviation_costs_little(dtype):
    rng = np.random.default_rng(0)
    tokens = (1e6 + rng.standard_normal((2000, 2))).astype(dtype)
    standard = learned(tokens, epsilon=float(np.finfo(dtype).eps))
    assert (standard.factor > 0).all()
    np.testing.assert_allclose(standard.scale, np.sqrt(2) * tokens.astype(float).std(axis=0))
    assert standard(tokens).dtype == dtype
    np.testing.assert_allclose(standard(tokens).astype(float).std(axis=0), 0.5**0.5, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f8", "f4"])
@pytest.mark.parametrize("constant", [0.0, 0.1, -1e-30, 1e30, 1e-308])
def test_what_does_not_vary_becomes_zero_and_stays_zero(dtype, constant):
    tokens = np.random.default_rng(0).standard_normal((50, 3)).astype(dtype)
    tokens[:, 1] = constant
    standard = learned(tokens, epsilon=float(np.finfo(dtype).eps))
    assert standard.scale[1] == 1.0
    np.testing.assert_array_equal(standard(tokens)[:, 1], 0.0)
    np.testing.assert_array_equal(standard(tokens + 5.0)[:, 1], 0.0)
    without = learned(tokens[:, [0, 2]])(tokens[:, [0, 2]])
    np.testing.assert_allclose(standard(tokens)[:, [0, 2]], without, rtol=1e-5)


def test_rounding_errors_are_no_variation():
    tokens = np.random.default_rng(0).standard_normal((50, 2))
    tokens[:, 1] = np.where(tokens[:, 0] > 0, 0.1 + 0.2, 0.3)
    assert tokens[:, 1].std() > 0
    assert learned(tokens).factor[1] == 0.0


def test_entries_whose_mean_overflows_are_refused():
    message = r"X has entries up to 1.7e\+308, of which the mean or the standard deviation overf"
    with (
        np.errstate(over="ignore", invalid="ignore"),
        pytest.raises(ValueError, match=message),
    ):
        learned(np.array([[1.7e308], [-1.7e308], [1.7e308]]))


# Of sets in all their forms


def test_only_tokens_that_are_there_count(xp_array):
    sets = ragged([2, 4, 3, 2], dim=3)
    expected = np.concatenate(sets.examples)
    weights = np.array([1.0, 0.0, 2.0, 3.0])
    for form in (as_sets(xp_array(sets.X), xp_array(sets.mask)), as_sets(sets.examples)):
        found = form.moments()
        assert found.weight == 11
        np.testing.assert_allclose(found.mean, expected.mean(axis=0), rtol=1e-12)
        weighted = form.moments(weights)
        assert weighted.weight == 1 * 2 + 2 * 3 + 3 * 2
        copies = np.concatenate([sets.examples[i] for i in (0, 2, 2, 3, 3, 3)])
        np.testing.assert_allclose(weighted.mean, copies.mean(axis=0), rtol=1e-12)
        np.testing.assert_allclose(
            weighted.root / np.sqrt(weighted.weight), copies.std(axis=0), rtol=1e-12
        )


def test_rows_count_once_or_twice_alike():
    once, twice = (single_tokens(X[:, 0], tokens).moments() for tokens in (1, 2))
    np.testing.assert_allclose(once.mean, twice.mean, rtol=1e-12)
    np.testing.assert_allclose(once.root, twice.root / np.sqrt(2), rtol=1e-12)


def test_a_block_is_standardized_and_padding_stays_zero(xp_array):
    sets = ragged([2, 4, 3], dim=3)
    standard = learned(np.concatenate(sets.examples))
    checked = as_sets(xp_array(sets.X), xp_array(sets.mask))
    tokens, mask = type(checked)(**{**vars(checked), "standard": standard}).block(slice(0, 3))
    assert namespace(tokens) is namespace(xp_array(sets.X))
    for i, example in enumerate(sets.examples):
        got = to_numpy(tokens)[i]
        np.testing.assert_allclose(got[: len(example)], standard(example), rtol=1e-12)
        np.testing.assert_array_equal(got[len(example) :], 0.0)
    np.testing.assert_array_equal(to_numpy(mask), sets.mask)


# Of estimators


@pytest.mark.parametrize("kind", places.KINDS)
def test_the_same_is_learned_anywhere(request, kind):
    there = places.place(kind, request)
    raw = X * np.array([1e4, 1.0, 1e-3]) + np.array([1e6, 0.0, 5.0])
    weight = np.arange(60.0)
    here = ol.RandomFeatureAttention(5, random_state=0).fit(raw, Y, sample_weight=weight)
    model = ol.RandomFeatureAttention(5, random_state=0)
    model.fit(there(raw), there(Y), sample_weight=there(weight))
    np.testing.assert_allclose(model.X_offset_, here.X_offset_, rtol=1e-12)
    np.testing.assert_allclose(model.X_scale_, here.X_scale_, rtol=1e-9)
    np.testing.assert_allclose(
        places.brought(model.predict(there(raw))), here.predict(raw), atol=1e-7
    )


def test_attributes_are_what_tokens_lose_and_are_divided_by(xp_array):
    for model in (
        ol.RandomFeatureAttention(5),
        ol.RandomFeatureMLP(20),
        ol.AttentionFeatures(5),
        ol.RandomFeatureAttentionClassifier(5),
    ):
        y = Y > 0 if isinstance(model, ol.RandomFeatureAttentionClassifier) else Y
        model.fit(xp_array(3.0 * X + 1.0), xp_array(y))
        assert namespace(model.X_offset_) is namespace(xp_array(X))
        expected = 3.0 * X.mean(axis=(0, 1)) + 1.0
        np.testing.assert_allclose(to_numpy(model.X_offset_), expected, rtol=1e-10)
        deviation = 3.0 * X.std(axis=(0, 1)) * np.sqrt(3)
        np.testing.assert_allclose(to_numpy(model.X_scale_), deviation, rtol=1e-10)
        plain = model.set_params(standardize=False).fit(xp_array(X), xp_array(y))
        assert not hasattr(plain, "X_offset_")
        assert not hasattr(plain, "X_scale_")


def test_standardization_comes_back_from_a_pickle():
    raw = 1e4 * X + 3e5
    for model in (ol.RandomFeatureAttention(5), ol.AttentionKernelRidge(), ol.RandomFeatureMLP(9)):
        again = pickle.loads(pickle.dumps(model.fit(raw, Y)))
        np.testing.assert_array_equal(again.predict(raw), model.predict(raw))
        np.testing.assert_array_equal(again.X_scale_, model.X_scale_)


def test_standardized_tokens_are_those_of_a_model_without_it():
    standard = Standardization.learned(as_sets(X).moments(), EPSILON)
    for make in (
        lambda **o: ol.RandomFeatureAttention(5, random_state=0, **o),
        lambda **o: ol.RandomFeatureMLP(20, random_state=0, **o),
        lambda **o: ol.AttentionKernelRidge(bias=1.0, **o),
    ):
        plain = make(standardize=False).fit(standard(X), Y).predict(standard(X))
        np.testing.assert_allclose(make().fit(X, Y).predict(X), plain, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["standardize", "fit_intercept"])
@pytest.mark.parametrize("value", ["yes", None, 1])
def test_flags_are_true_or_false(name, value):
    with pytest.raises(TypeError, match=f"{name} is {value!r}, expected True or False"):
        ol.RandomFeatureAttention(5, **{name: value}).fit(X, Y)
