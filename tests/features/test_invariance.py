"""Predictions do not depend on the offset of targets, nor on the scale and offset of columns."""

import numpy as np
import places
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone

import onelayer as ol
from onelayer import inputs

X, X_TEST = inputs.gaussian(80, 4, 3), inputs.gaussian(60, 4, 3, seed=1)


def target(X):
    noise = np.random.default_rng(len(X)).standard_normal(len(X))
    return X[:, 1:, 0].mean(axis=1) + 0.05 * noise


Y, Y_TEST = target(X), target(X_TEST)
MODELS = {
    "attention": ol.RandomFeatureAttention(30, random_state=0),  # 120 features, 80 examples
    "few heads": ol.RandomFeatureAttention(6, random_state=0),
    "given penalty": ol.RandomFeatureAttention(30, alpha=0.1, random_state=0),
    "few heads, given": ol.RandomFeatureAttention(6, alpha=0.1, random_state=0),
    "no query": ol.RandomFeatureAttention(30, query="none", random_state=0),
    "network": ol.RandomFeatureMLP(100, random_state=0),
    "kernel": ol.AttentionKernelRidge(),
    "kernel, given": ol.AttentionKernelRidge(bias=1.0, alpha=0.1),
}
PLAIN = {name: clone(model).fit(X, Y) for name, model in MODELS.items()}
SOME = settings(max_examples=8)  # every one of them fits a model
sizes = st.floats(-6, 6).map(lambda power: 10.0**power)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@SOME
@given(offset=st.floats(-6, 6).map(lambda power: 10.0**power), sign=st.sampled_from([-1, 1]))
def test_an_offset_of_the_targets_is_an_offset_of_the_predictions(name, offset, sign):
    model = clone(MODELS[name]).fit(X, Y + sign * offset)
    found = model.predict(X_TEST) - sign * offset
    expected = PLAIN[name].predict(X_TEST)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7 * Y.std() + 1e-13 * offset)
    score = model.score(X_TEST, Y_TEST + sign * offset)
    assert score == pytest.approx(PLAIN[name].score(X_TEST, Y_TEST), abs=1e-6)


@pytest.mark.parametrize("name", MODELS)
@SOME
@given(data=st.data())
def test_scale_and_offset_of_the_columns_do_not_matter(name, data):
    scale = np.array(data.draw(st.lists(sizes, min_size=3, max_size=3)))
    shift = scale * np.array(data.draw(st.lists(st.floats(-1e6, 1e6), min_size=3, max_size=3)))
    model = clone(MODELS[name]).fit(scale * X + shift, Y)
    found = model.predict(scale * X_TEST + shift)
    np.testing.assert_allclose(found, PLAIN[name].predict(X_TEST), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", MODELS)
@SOME
@given(constant=st.floats(-1e6, 1e6), place=st.integers(0, 3))
def test_a_constant_column_changes_nothing(name, constant, place):
    def widened(X, value=constant):
        return np.insert(X, place, value, axis=2)

    model = clone(MODELS[name]).fit(widened(X), Y)
    expected = PLAIN[name].predict(X_TEST)
    np.testing.assert_allclose(model.predict(widened(X_TEST)), expected, rtol=0, atol=1e-7)
    np.testing.assert_array_equal(  # a column that tells nothing is not to tell anything later
        model.predict(widened(X_TEST, 7.0)), model.predict(widened(X_TEST))
    )


@pytest.mark.parametrize("options", [{"positions": "onehot"}, {"depth": 2, "query": "mean"}])
def test_a_constant_column_changes_nothing_for_other_heads(options):
    model = ol.RandomFeatureAttention(20, random_state=0, **options)
    expected = model.fit(X, Y).predict(X_TEST)
    model.fit(np.insert(X, 1, 1e6, axis=2), Y)
    found = model.predict(np.insert(X_TEST, 1, 1e6, axis=2))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("kind", ["function", "file"])
@pytest.mark.parametrize("name", ["attention", "few heads", "network", "kernel"])
def test_offsets_and_scales_do_not_matter_elsewhere(request, kind, name):
    there = places.place(kind, request)
    scale, shift = np.array([1e-6, 1.0, 1e6]), np.array([1.0, 1e6, -1e12])
    model = clone(MODELS[name]).fit(there(scale * X + shift), there(Y + 1e6))
    score = model.score(there(scale * X_TEST + shift), there(Y_TEST + 1e6))
    assert score == pytest.approx(PLAIN[name].score(X_TEST, Y_TEST), abs=1e-4)


@pytest.mark.parametrize("name", [name for name in MODELS if "kernel" not in name])
def test_float32_loses_little_of_it(name):
    scale, shift = np.array([1e-6, 1.0, 1e6]), np.array([1e-6, 1e3, 1e7])
    train, test = ((scale * Z + shift).astype("f4") for Z in (X, X_TEST))
    model = clone(MODELS[name]).fit(train, (Y + 1e4).astype("f4"))
    score = model.score(test, Y_TEST + 1e4)
    assert score == pytest.approx(PLAIN[name].score(X_TEST, Y_TEST), abs=0.01)


def test_classes_do_not_mind_either():
    plain = ol.RandomFeatureAttentionClassifier(20, random_state=0).fit(X, Y > 0)
    raw = ol.RandomFeatureAttentionClassifier(20, random_state=0).fit(1e6 * X + 1e9, Y > 0)
    expected = plain.decision_function(X_TEST)
    np.testing.assert_allclose(raw.decision_function(1e6 * X_TEST + 1e9), expected, atol=1e-7)


def test_uneven_classes_have_an_intercept():
    labels = np.quantile(Y, 0.95) < Y
    model = ol.RandomFeatureAttentionClassifier(20, alpha=1e9, random_state=0).fit(X, labels)
    assert model.intercept_ == pytest.approx(2 * labels.mean() - 1, abs=1e-6)
    several = np.digitize(Y, np.quantile(Y, [0.2, 0.5]))
    assert model.fit(X, several).intercept_.shape == (3,)


def test_intercepts_have_the_shapes_of_scikit_learn():
    both = np.stack([Y, Y + 5.0], axis=1)
    for name in ("attention", "network", "kernel"):
        assert isinstance(PLAIN[name].intercept_, float)
        together = clone(MODELS[name]).fit(X, both)
        assert together.intercept_.shape == (2,)
        np.testing.assert_allclose(np.diff(together.intercept_), 5.0, rtol=1e-9)
        without = clone(MODELS[name]).set_params(fit_intercept=False).fit(X, Y)
        assert without.intercept_ == 0.0
