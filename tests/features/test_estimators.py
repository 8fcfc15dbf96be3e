import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
import sklearn
from example_sets import ragged
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import PairwiseKernel
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, KFold, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.svm import SVR
from threadpoolctl import threadpool_info

import onelayer as ol
from onelayer import inputs
from onelayer.array.backend import namespace, to_numpy
from onelayer.features.solvers import ridge

X, X_TEST = inputs.sphere(40, 4, 3), inputs.sphere(15, 4, 3, seed=1)


def target(X):
    """A mean over the keys, and a little that depends on the query."""
    return X[:, 1:, 0].mean(axis=1) + 0.3 * X[:, 0, 1]


Y, Y_TEST = target(X), target(X_TEST)
PAPER = {"fit_intercept": False, "standardize": False}
LABELS = np.array(["low", "mid", "top"])[np.digitize(Y, [-0.1, 0.1])]


def attention(**options):
    return ol.RandomFeatureAttention(**{"heads": 10, "alpha": 0.1, "random_state": 0, **options})


def classifier(**options):
    options = {"heads": 10, "alpha": 0.1, "random_state": 0, **options}
    return ol.RandomFeatureAttentionClassifier(**options)


REGRESSORS = {
    "attention": attention(),
    "few heads": attention(heads=3),
    "biased": attention(bias=np.arange(16.0).reshape(4, 4) / 10),
    "deep": attention(positions="sinusoidal", depth=2),
    "one-hot": attention(positions="onehot"),
    "placed": attention(positions="learned-random"),
    "chosen": attention(alpha="loo"),
    "network": ol.RandomFeatureMLP(features=50, alpha=0.1, random_state=0),
    "kernel": ol.AttentionKernelRidge(alpha=0.1),
    "biased kernel": ol.AttentionKernelRidge(bias=1.0, alpha=0.1),
}


def fitted(name, X=X, y=Y, **arguments):
    return clone(REGRESSORS[name]).fit(X, y, **arguments)


# What they compute


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("n", [20, 40])  # fewer examples than the 30 features, and more
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": 1.0, "standardize": False},
        {"positions": "onehot", "query": "last"},
        {"positions": "sinusoidal", "depth": 3},
    ],
)
def test_attention_is_ridge_on_its_features(options, n, fit_intercept):
    features = ol.AttentionFeatures(heads=8, random_state=3, **options).fit(X[:n])
    plain = Ridge(alpha=0.1, fit_intercept=fit_intercept)
    plain.fit(features.transform(X[:n]), Y[:n] + 30.0)
    model = attention(heads=8, random_state=3, fit_intercept=fit_intercept, **options)
    model.fit(X[:n], Y[:n] + 30.0)
    scale = abs(plain.coef_).max()
    np.testing.assert_allclose(model.coef_, plain.coef_, rtol=1e-7, atol=1e-8 * scale)
    assert model.intercept_ == pytest.approx(plain.intercept_, rel=1e-9, abs=1e-9)
    expected = plain.predict(features.transform(X_TEST))
    np.testing.assert_allclose(model.predict(X_TEST), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("bias", [0.0, 1.0, np.arange(16.0).reshape(4, 4) / 10])
def test_many_heads_come_close_to_infinitely_many(bias):
    limit = ol.AttentionKernelRidge(bias=bias, alpha=0.1).fit(X, Y).predict(X_TEST)
    gaps = [
        np.linalg.norm(attention(heads=heads, bias=bias).fit(X, Y).predict(X_TEST) - limit)
        / np.linalg.norm(limit)
        for heads in (50, 8000)
    ]
    assert gaps[1] < min(0.03, gaps[0] / 4)


def test_products_of_features_come_close_to_the_kernel():
    features = ol.AttentionFeatures(20_000, bias=0.5, standardize=False, random_state=0).fit(X)
    products = features.transform(X[:10]) @ features.transform(X_TEST).T
    expected = ol.attention_kernel(X[:10], X_TEST, bias=0.5)
    np.testing.assert_allclose(products, expected, rtol=0, atol=0.05 * abs(expected).max())


@pytest.mark.parametrize("name", REGRESSORS)
def test_predictions_generalise_and_score_is_their_r2(name):
    model = fitted(name)
    predictions = model.predict(X_TEST)
    assert predictions.shape == (15,)
    assert model.score(X_TEST, Y_TEST) == pytest.approx(r2_score(Y_TEST, predictions), rel=1e-12)
    weight = np.arange(15.0)
    assert model.score(X_TEST, Y_TEST, sample_weight=weight) == pytest.approx(
        r2_score(Y_TEST, predictions, sample_weight=weight), rel=1e-12
    )
    assert model.score(X, Y) > 0.5


@pytest.mark.parametrize("name", REGRESSORS)
def test_many_targets_are_learned_as_one_by_one(name):
    both = np.stack([Y, X[:, 0, 2] + X[:, 1, 0]], axis=1)
    together = fitted(name, y=both)
    predictions = together.predict(X_TEST)
    for i in range(2):
        alone = fitted(name, y=both[:, i])
        np.testing.assert_allclose(predictions[:, i], alone.predict(X_TEST), rtol=0, atol=1e-9)
        assert np.broadcast_to(together.alpha_, 2)[i] == pytest.approx(alone.alpha_, rel=1e-9)
    assert fitted(name, y=both[:, :1]).predict(X_TEST).shape == (15, 1)


def test_coefficients_have_the_shapes_of_scikit_learn():
    both = np.stack([Y, Y], axis=1)
    assert attention().fit(X, Y).coef_.shape == (40,)
    assert attention().fit(X, both).coef_.shape == (2, 40)
    assert fitted("kernel").dual_coef_.shape == (40,)
    assert fitted("kernel", y=both).dual_coef_.shape == (40, 2)
    assert fitted("attention").alpha_ == 0.1
    assert fitted("attention").n_features_in_ == 3
    assert attention(alpha="loo").fit(X, both).alpha_.shape == (2,)


@pytest.mark.parametrize("name", [name for name in REGRESSORS if name != "chosen"])
def test_a_whole_weight_is_a_number_of_copies(name):
    copies = np.random.default_rng(0).integers(0, 4, 40)
    copies[0] = 1  # the longest set is there in both
    weighted = fitted(name, sample_weight=copies)
    repeated = fitted(name, np.repeat(X, copies, axis=0), np.repeat(Y, copies))
    expected = repeated.predict(X_TEST)
    np.testing.assert_allclose(weighted.predict(X_TEST), expected, rtol=0, atol=1e-9)
    assert not np.allclose(fitted(name).predict(X_TEST), expected, rtol=0, atol=1e-4)


def test_one_weight_for_all_examples_divides_the_penalty():
    weighted = attention(alpha=0.6).fit(X, Y, sample_weight=3)
    np.testing.assert_allclose(
        weighted.predict(X_TEST), attention(alpha=0.2).fit(X, Y).predict(X_TEST), atol=1e-10
    )


# Sets of other sizes, and other forms of the same sets


@pytest.mark.parametrize("name", ["attention", "deep", "placed", "kernel", "biased kernel"])
def test_sets_at_predict_may_be_longer_or_shorter_than_at_fit(name):
    model = fitted(name)
    assert np.isfinite(model.predict(inputs.sphere(5, 9, 3))).all()
    assert np.isfinite(model.predict(X[:, :2])).all()


def test_keys_in_another_order_or_twice_are_the_same_set():
    model = attention().fit(X, Y)
    expected = model.predict(X_TEST)
    turned = X_TEST[:, [0, 3, 1, 2]]
    twice = X_TEST[:, [0, 1, 2, 3, 1, 2, 3]]
    np.testing.assert_allclose(model.predict(turned), expected, rtol=0, atol=1e-12)
    np.testing.assert_allclose(model.predict(twice), expected, rtol=0, atol=1e-12)
    placed = fitted("placed")
    assert not np.allclose(placed.predict(turned), placed.predict(X_TEST), atol=1e-3)


def test_a_network_takes_shorter_sets_as_if_filled_up_with_zeros():
    """With standardization a zero is the mean of all tokens."""
    model = fitted("network")
    filled = X_TEST.copy()
    filled[:, 2:] = model.X_offset_
    np.testing.assert_allclose(model.predict(X_TEST[:, :2]), model.predict(filled), atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", REGRESSORS)
@given(lengths=st.lists(st.integers(2, 4), min_size=2, max_size=6), seed=st.integers(0, 2**32 - 1))
def test_a_list_and_an_array_with_a_mask_are_the_same(name, lengths, seed):
    sets = ragged([4, *lengths], dim=3, seed=seed)
    y = np.random.default_rng(seed).standard_normal(len(sets.examples))
    by_list = fitted(name, sets.examples, y)
    by_mask = fitted(name, sets.X, y, mask=sets.mask)
    expected = by_list.predict(sets.examples)
    for got in (
        by_list.predict(sets.X, mask=sets.mask),
        by_mask.predict(sets.examples),
        by_mask.predict(sets.X, mask=sets.mask),
    ):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12 * (1 + abs(y).max()) * 100)


@pytest.mark.parametrize("name", REGRESSORS)
def test_an_array_is_the_list_of_its_examples(name):
    expected = fitted(name).predict(X_TEST)
    for form in (list, tuple, lambda a: a.tolist(), lambda a: np.asfortranarray(a)):
        np.testing.assert_allclose(
            fitted(name, form(X)).predict(form(X_TEST)), expected, rtol=0, atol=1e-12
        )
    nothing_left_out = np.ones(X.shape[:2], dtype=bool)
    model = fitted(name, mask=nothing_left_out)
    np.testing.assert_allclose(model.predict(X_TEST), expected, rtol=0, atol=1e-12)


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(2, 8), dim=st.integers(2, 4))
@pytest.mark.parametrize("name", ["attention", "deep", "kernel", "network"])
def test_a_row_is_a_set_of_one_token(name, seed, n, dim):
    """A row is query and key of an attention layer, but a network reads it once."""
    rng = np.random.default_rng(seed)
    rows, y = rng.standard_normal((n, dim)), rng.standard_normal(n)
    sets = np.repeat(rows[:, None], 1 if name == "network" else 2, axis=1)
    expected = fitted(name, sets, y).predict(sets)
    np.testing.assert_allclose(fitted(name, rows, y).predict(rows), expected, rtol=0, atol=1e-10)


# The kernel, for estimators of scikit-learn


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_kernel_ridge_takes_the_kernel(bias):
    machine = KernelRidge(alpha=0.1, kernel="precomputed").fit(ol.attention_kernel(X, bias=bias), Y)
    predictions = machine.predict(ol.attention_kernel(X_TEST, X, bias=bias))
    own = ol.AttentionKernelRidge(bias=bias, alpha=0.1, **PAPER).fit(X, Y)
    np.testing.assert_allclose(own.predict(X_TEST), predictions, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(own.dual_coef_, machine.dual_coef_, rtol=1e-7, atol=1e-9)


def test_a_support_vector_machine_takes_the_kernel():
    machine = SVR(kernel="precomputed", epsilon=0.01, C=10).fit(ol.attention_kernel(X), Y)
    assert r2_score(Y_TEST, machine.predict(ol.attention_kernel(X_TEST, X))) > 0.9


def test_a_gaussian_process_takes_the_kernel():
    """Gaussian processes of scikit-learn want rows: here a row is a set, flattened."""

    def covariance(one, other, gamma):
        return ol.attention_kernel(one.reshape(1, 4, 3), other.reshape(1, 4, 3))[0, 0]

    process = GaussianProcessRegressor(PairwiseKernel(metric=covariance), alpha=0.1, optimizer=None)
    process.fit(X[:12].reshape(12, -1), Y[:12])
    mean, deviation = process.predict(X_TEST[:4].reshape(4, -1), return_std=True)
    own = ol.AttentionKernelRidge(alpha=0.1, **PAPER).fit(X[:12], Y[:12])
    np.testing.assert_allclose(mean, own.predict(X_TEST[:4]), rtol=1e-8, atol=1e-10)
    K, k = ol.attention_kernel(X[:12]), ol.attention_kernel(X_TEST[:4], X[:12])
    explained = np.sum(k * np.linalg.solve(K + 0.1 * np.eye(12), k.T).T, axis=1)
    variance = ol.attention_kernel(X_TEST[:4]).diagonal() - explained
    np.testing.assert_allclose(deviation**2, variance, rtol=1e-8)


def test_the_kernel_takes_every_form_of_sets(xp_array):
    expected = ol.attention_kernel(X[:5], X_TEST)
    for form in (xp_array, list, lambda a: [xp_array(example) for example in a]):
        got = ol.attention_kernel(form(X[:5]), form(X_TEST))
        np.testing.assert_allclose(to_numpy(got), expected, rtol=0, atol=1e-13)
    sets = ragged([2, 4, 3], dim=3)
    np.testing.assert_allclose(
        ol.attention_kernel(X[:5], sets.X, Z_mask=sets.mask),
        ol.attention_kernel(sets.examples, X[:5]).T,
        rtol=1e-12,
    )
    rows = X[:5, 0]
    np.testing.assert_allclose(
        ol.attention_kernel(rows), ol.attention_kernel(np.repeat(rows[:, None], 2, 1)), rtol=1e-12
    )


# Kinds of numbers


@pytest.mark.parametrize("name", [name for name in REGRESSORS if "kernel" not in name])
def test_predictions_are_of_the_kind_and_precision_of_the_examples(xp_array, name):
    expected = fitted(name).predict(X_TEST)
    for dtype, atol in (("f8", 1e-9), ("f4", 1e-3)):
        array, test = xp_array(X.astype(dtype)), xp_array(X_TEST.astype(dtype))
        predictions = fitted(name, array, xp_array(Y.astype(dtype))).predict(test)
        assert namespace(predictions) is namespace(test)
        assert predictions.dtype == test.dtype
        np.testing.assert_allclose(to_numpy(predictions), expected, rtol=0, atol=atol)


def test_a_kernel_regression_takes_tensors_and_predicts_in_numpy(xp_array):
    expected = fitted("kernel").predict(X_TEST)
    for form in (xp_array, lambda a: [xp_array(example) for example in a]):
        predictions = fitted("kernel", form(X), xp_array(Y)).predict(form(X_TEST))
        assert isinstance(predictions, np.ndarray)
        np.testing.assert_allclose(predictions, expected, rtol=0, atol=1e-12)


def test_weights_and_masks_follow_the_examples_to_their_backend(xp_array):
    sets = ragged([4, 2, 3, 4, 2, 3], dim=3)
    arguments = {"sample_weight": np.arange(1.0, 7.0), "mask": sets.mask}
    expected = attention().fit(sets.X, Y[:6], **arguments).predict(X_TEST)
    for kind in (np.asarray, xp_array):
        given_ones = {name: kind(array) for name, array in arguments.items()}
        model = attention().fit(xp_array(sets.X), kind(Y[:6]), **given_ones)
        got = to_numpy(model.predict(xp_array(X_TEST)))
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-11)


def test_scores_of_tensors_are_numbers(xp_array):
    model = attention().fit(xp_array(X), xp_array(Y))
    score = model.score(xp_array(X_TEST), xp_array(Y_TEST))
    assert isinstance(score, float)
    assert score == pytest.approx(attention().fit(X, Y).score(X_TEST, Y_TEST), rel=1e-9)


def test_features_are_of_the_kind_and_precision_of_the_examples(xp_array):
    expected = ol.AttentionFeatures(heads=4, random_state=0).fit_transform(X)
    for dtype, atol in (("f8", 1e-12), ("f4", 1e-5)):
        array = xp_array(X.astype(dtype))
        features = ol.AttentionFeatures(heads=4, random_state=0).fit_transform(array)
        assert namespace(features) is namespace(array)
        assert features.dtype == array.dtype
        np.testing.assert_allclose(to_numpy(features), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.int64, np.float16])
def test_integers_and_booleans_are_taken_as_numbers(dtype):
    signs = inputs.boolean(20, 3, 4).clip(0).astype(dtype)
    model = attention().fit(signs, Y[:20])
    expected = attention().fit(signs.astype(float), Y[:20]).predict(signs.astype(float))
    np.testing.assert_array_equal(model.predict(signs), expected)


# Randomness


@pytest.mark.parametrize("name", REGRESSORS)
def test_the_same_seed_gives_the_same_bits(name):
    first, second = fitted(name), fitted(name)
    np.testing.assert_array_equal(first.predict(X_TEST), second.predict(X_TEST))
    first.fit(X, Y)
    np.testing.assert_array_equal(first.predict(X_TEST), second.predict(X_TEST))


@pytest.mark.parametrize("make", [attention, lambda **o: ol.RandomFeatureMLP(30, **o)])
def test_seeds_may_be_numbers_generators_or_nothing(make):
    def predictions(state):
        return make(random_state=state).fit(X, Y).predict(X_TEST)

    for state in (np.random.default_rng, np.random.RandomState):
        np.testing.assert_array_equal(predictions(state(7)), predictions(state(7)))
        assert not np.array_equal(predictions(state(7)), predictions(state(8)))
        going_on = state(7)
        assert not np.array_equal(predictions(going_on), predictions(going_on))
    np.testing.assert_array_equal(predictions(7), predictions(np.random.default_rng(7)))
    assert not np.array_equal(predictions(None), predictions(None))


def test_more_heads_begin_with_the_same_ones():
    few, many = (ol.AttentionFeatures(heads=m, random_state=0).fit_transform(X) for m in (2, 8))
    np.testing.assert_allclose(2 * many[:, :8], few, rtol=1e-12)  # the scale is heads^{-1/2}


# In the company of scikit-learn


@pytest.mark.parametrize("name", REGRESSORS)
def test_a_model_comes_back_from_a_pickle_to_the_bit(name):
    model = fitted(name)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(X_TEST), model.predict(X_TEST))


def test_a_clone_has_the_parameters_and_nothing_learned():
    model = attention(bias=1.0, positions="onehot", depth=2).fit(X, Y)
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    with pytest.raises(NotFittedError):
        copy.predict(X)


def test_features_serve_a_pipeline():
    features = ol.AttentionFeatures(heads=10, random_state=0)
    pipeline = make_pipeline(features, Ridge(alpha=0.1)).fit(X, Y)
    expected = attention().fit(X, Y).predict(X_TEST)
    np.testing.assert_allclose(pipeline.predict(X_TEST), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("form", [np.asarray, list])
def test_a_search_finds_parameters_for_sets(form):
    grid = {"heads": [2, 20], "bias": [0.0, 1.0], "alpha": [1e-2, 1e6]}
    search = GridSearchCV(attention(), grid, cv=3).fit(form(X), Y)
    assert search.best_params_["alpha"] == 1e-2
    assert search.best_params_["heads"] == 20
    by_hand = [
        attention(**search.best_params_).fit(X[train], Y[train]).score(X[test], Y[test])
        for train, test in KFold(3).split(X)
    ]
    assert search.best_score_ == pytest.approx(np.mean(by_hand), rel=1e-9)
    assert search.score(form(X_TEST), Y_TEST) > 0.8


def test_a_search_takes_sets_of_different_lengths():
    sets = ragged([2, 3, 4, 5] * 6, dim=3)
    y = np.array([tokens[1:, 0].mean() for tokens in sets.examples])
    search = GridSearchCV(attention(heads=30), {"alpha": [1e-2, 1e6]}, cv=3).fit(sets.examples, y)
    assert search.best_params_ == {"alpha": 1e-2}


def garbage_in_padding():
    sets = ragged([2, 3, 4] * 8, dim=3)
    sets.X[~sets.mask] = 30.0
    y = np.array([tokens[1:, 0].mean() for tokens in sets.examples])
    by_hand = [
        attention()
        .fit(sets.X[train], y[train], mask=sets.mask[train])
        .score(sets.X[test], y[test], mask=sets.mask[test])
        for train, test in KFold(3).split(sets.X)
    ]
    return sets, y, by_hand


def test_a_mask_is_routed_through_cross_validation():
    sets, y, by_hand = garbage_in_padding()
    with sklearn.config_context(enable_metadata_routing=True):
        model = attention().set_fit_request(mask=True).set_score_request(mask=True)
        scores = cross_validate(model, sets.X, y, cv=KFold(3), params={"mask": sets.mask})
    np.testing.assert_allclose(scores["test_score"], by_hand, rtol=1e-9)


def test_a_mask_is_routed_through_a_search():
    sets, y, by_hand = garbage_in_padding()
    with sklearn.config_context(enable_metadata_routing=True):
        model = attention().set_fit_request(mask=True).set_score_request(mask=True)
        search = GridSearchCV(model, {"alpha": [0.1]}, cv=KFold(3)).fit(sets.X, y, mask=sets.mask)
    assert search.best_score_ == pytest.approx(np.mean(by_hand), rel=1e-9)


def test_a_mask_is_routed_through_a_pipeline():
    sets, y, _ = garbage_in_padding()
    expected = attention().fit(sets.X, y, mask=sets.mask).predict(sets.X, mask=sets.mask)
    with sklearn.config_context(enable_metadata_routing=True):
        features = ol.AttentionFeatures(heads=10, random_state=0)
        features.set_fit_request(mask=True).set_transform_request(mask=True)
        pipeline = make_pipeline(features, Ridge(alpha=0.1))
        pipeline.fit(sets.X, y, mask=sets.mask)
        got = pipeline.predict(sets.X, mask=sets.mask)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-9)


def test_features_of_one_call_leave_out_what_the_mask_does():
    sets = ragged([2, 3, 4], dim=3)
    features = ol.AttentionFeatures(heads=3, random_state=0)
    in_one_call = features.fit_transform(sets.X, mask=sets.mask)
    np.testing.assert_allclose(in_one_call, features.transform(sets.examples), rtol=0, atol=1e-12)


# Names of features


def test_columns_of_a_table_give_their_names():
    table = pd.DataFrame(X[:, 0], columns=["north", "east", "up"])
    features = ol.AttentionFeatures(heads=2, random_state=0).fit(table)
    assert list(features.feature_names_in_) == ["north", "east", "up"]
    names = list(features.get_feature_names_out())
    expected = ["north", "east", "up", "one"]
    assert names == [f"head{head}_{name}" for head in range(2) for name in expected]
    in_table = features.set_output(transform="pandas").transform(table)
    assert list(in_table.columns) == names
    np.testing.assert_array_equal(
        in_table, ol.AttentionFeatures(heads=2, random_state=0).fit_transform(X[:, 0])
    )


def test_columns_in_another_order_are_refused():
    table = pd.DataFrame(X[:, 0], columns=["north", "east", "up"])
    model = attention().fit(table, Y)
    with pytest.raises(ValueError, match="feature names should match"):
        model.predict(table[["up", "north", "east"]])


def test_positions_have_names_too():
    features = ol.AttentionFeatures(heads=2, positions="onehot", random_state=0).fit(X)
    names = features.get_feature_names_out()
    assert features.transform(X).shape == (40, len(names))
    own = ["x0", "x1", "x2", "position0", "position1", "position2", "position3", "one"]
    assert list(names) == [f"head{head}_{name}" for head in range(2) for name in own]


def test_names_can_be_given_for_the_tokens():
    features = ol.AttentionFeatures(heads=1, positions="sinusoidal").fit(X)
    names = features.get_feature_names_out(["a", "b", "c"])
    assert list(names) == ["head0_a", "head0_b", "head0_c", "head0_one"]
    with pytest.raises(ValueError, match="input_features should have length equal"):
        features.get_feature_names_out(["a", "b"])


def test_a_feature_is_what_its_name_says():
    """The feature of the constant is the mean of the scores, of a coordinate their mean with it."""
    features = ol.AttentionFeatures(heads=1, bias=np.diag([0.0, 0.0, 0.0, 1e9]), standardize=False)
    table = dict(zip(features.fit(X).get_feature_names_out(), features.transform(X).T, strict=True))
    np.testing.assert_allclose(table["head0_one"] / 1e9, 1.0, rtol=1e-6)
    np.testing.assert_allclose(table["head0_x2"] / 1e9, X[:, 1:, 2].mean(axis=1), atol=1e-6)


# Classes


def test_two_classes_have_one_score_with_the_sign_of_the_second():
    labels = np.where(Y > 0, "warm", "cold")
    model = classifier().fit(X, labels)
    scores = model.decision_function(X)
    assert list(model.classes_) == ["cold", "warm"]
    assert scores.shape == (40,)
    assert model.coef_.shape == (40,)
    np.testing.assert_array_equal(model.predict(X), np.where(scores > 0, "warm", "cold"))
    expected = attention().fit(X, np.where(labels == "warm", 1.0, -1.0)).predict(X)
    np.testing.assert_allclose(scores, expected, rtol=1e-9)
    assert model.score(X, labels) > 0.9


def test_many_classes_have_a_score_each_and_the_highest_wins():
    model = classifier().fit(X, LABELS)
    scores = model.decision_function(X)
    assert list(model.classes_) == ["low", "mid", "top"]
    assert scores.shape == (40, 3)
    assert model.coef_.shape == (3, 40)
    np.testing.assert_array_equal(model.predict(X), model.classes_[scores.argmax(axis=1)])
    for i, label in enumerate(model.classes_):
        expected = attention().fit(X, np.where(label == LABELS, 1.0, -1.0)).predict(X)
        np.testing.assert_allclose(scores[:, i], expected, rtol=1e-8, atol=1e-10)


def test_the_score_of_a_classifier_is_the_share_of_right_predictions():
    model = classifier().fit(X, LABELS)
    right = model.predict(X_TEST) == "mid"
    assert model.score(X_TEST, np.full(15, "mid")) == pytest.approx(right.mean())
    weight = np.arange(15.0)
    assert model.score(X_TEST, ["mid"] * 15, sample_weight=weight) == pytest.approx(
        np.average(right, weights=weight)
    )


def test_classes_follow_the_examples_to_their_backend_if_they_are_numbers(xp_array):
    array = xp_array(X)
    numbers = np.searchsorted(["low", "mid", "top"], LABELS) + 5
    expected = classifier().fit(X, numbers).predict(X_TEST)
    for labels in (numbers, xp_array(numbers)):
        predictions = classifier().fit(array, labels).predict(xp_array(X_TEST))
        assert namespace(predictions) is namespace(array)
        np.testing.assert_array_equal(to_numpy(predictions), expected)
    named = classifier().fit(array, LABELS).predict(xp_array(X_TEST))
    np.testing.assert_array_equal(named, classifier().fit(X, LABELS).predict(X_TEST))


def test_a_classifier_takes_masks_and_weights():
    sets = ragged([2, 3, 4] * 8, dim=3)
    sets.X[~sets.mask] = 30.0
    labels = np.array(["a", "b"])[np.arange(24) % 2]
    copies = np.arange(24) % 3 + 1
    weighted = classifier().fit(sets.X, labels, sample_weight=copies, mask=sets.mask)
    examples = [x for x, count in zip(sets.examples, copies, strict=True) for _ in range(count)]
    repeated = classifier().fit(examples, np.repeat(labels, copies))
    np.testing.assert_allclose(
        weighted.decision_function(sets.X, mask=sets.mask),
        repeated.decision_function(sets.examples),
        rtol=0,
        atol=1e-9,
    )
    assert weighted.score(sets.X, labels, mask=sets.mask) == repeated.score(sets.examples, labels)


def test_a_classifier_comes_back_from_a_pickle_to_the_bit():
    model = classifier(alpha="loo").fit(X, LABELS)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.decision_function(X), model.decision_function(X))
    np.testing.assert_array_equal(again.predict(X), model.predict(X))


def test_a_column_of_a_data_frame_may_hold_the_sets():
    examples = ragged([2, 4, 3, 3, 2, 4], 3).examples
    y = np.arange(6.0)
    expected = attention().fit(examples, y).predict(examples)
    frame = pd.DataFrame({"sets": pd.Series(examples, dtype=object)})
    found = attention().fit(frame["sets"], y).predict(frame["sets"])
    np.testing.assert_array_equal(found, expected)


# What a hostile user does


@pytest.mark.parametrize("size", [1e3, 1e6])
def test_one_example_far_larger_than_the_others_does_not_spoil_the_fit(size):
    X = ol.inputs.sphere(300, 6, 6, seed=3)
    y = X[:, 1:, 0].mean(axis=1)
    X[0] *= size
    test = ol.inputs.sphere(100, 6, 6, seed=4)
    given = {"alpha": 1e-3, "standardize": False}
    for model in (
        ol.AttentionKernelRidge(**given),
        ol.RandomFeatureAttention(80, random_state=0, **given),
    ):
        assert model.fit(X, y).score(test, test[:, 1:, 0].mean(axis=1)) > 0.95


def test_a_fit_that_fails_leaves_nothing_fitted(monkeypatch):
    X = ol.inputs.sphere(40, 5, 4, seed=1)
    y = X[:, 1:, 0].mean(axis=1)
    models = (
        ol.RandomFeatureAttention(heads=5).fit(X, y),
        ol.AttentionKernelRidge().fit(X, y),
        ol.RandomFeatureAttentionClassifier(heads=5).fit(X, y > 0),
        ol.AttentionFeatures(heads=5).fit(X),
    )
    for model in models:
        with pytest.raises(ValueError, match="NaN"):
            model.fit(np.nan * X, y > 0)
        with pytest.raises(NotFittedError):
            getattr(model, "predict", getattr(model, "transform", None))(X)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    model = models[0].fit(X, y)
    monkeypatch.setattr(ridge, "solve_features", interrupted)
    with pytest.raises(KeyboardInterrupt):
        model.fit(X, y)
    with pytest.raises(NotFittedError):
        model.predict(X)


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:ridge regression")
@pytest.mark.parametrize("alpha", [1e-3, "loo"])
def test_tokens_that_overflow_are_refused(alpha):
    X = ol.inputs.sphere(40, 5, 4, seed=1)
    y = X[:, 1:, 0].mean(axis=1)
    message = r"overflow in float64: X has entries up to .*, expected tokens of about unit norm"
    for model in (
        ol.RandomFeatureAttention(5, alpha=alpha, standardize=False, random_state=0),
        ol.AttentionKernelRidge(alpha=alpha, standardize=False),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(X * 1e120, y)
        with pytest.raises(ValueError, match="predictions " + message):
            model.fit(X, y).predict(X * 1e120)
    with pytest.raises(ValueError, match="kernels " + message):
        ol.attention_kernel(X * 1e120)
    with pytest.raises(ValueError, match=r"kernels overflow in float64: .*e\+199"):
        ol.mlp_kernel(X * 1e200)
    with pytest.raises(ValueError, match="features " + message):
        ol.AttentionFeatures(5).fit(X).transform(X * 1e120)


def test_padding_may_hold_any_number():
    X = ol.inputs.sphere(30, 5, 4, seed=1)
    y = X[:, 1:4, 0].mean(axis=1)
    mask = np.ones((30, 5), dtype=bool)
    mask[:, 4] = False
    padded = X.copy()
    padded[:, 4] = 1e200
    for model in (
        ol.AttentionKernelRidge(bias=1.0),
        ol.RandomFeatureAttention(5, depth=2, random_state=0),
        ol.RandomFeatureMLP(20, random_state=0),
    ):
        expected = model.fit(X[:, :4], y).predict(X[:, :4])
        if not isinstance(model, ol.RandomFeatureMLP):  # which reads one place more
            found = model.fit(padded, y, mask=mask).predict(padded, mask=mask)
            np.testing.assert_allclose(found, expected, atol=1e-12)
        assert np.isfinite(model.fit(padded, y, mask=mask).predict(padded, mask=mask)).all()
    target = ol.targets.average_power(2, 4)
    np.testing.assert_allclose(target(padded, mask=mask), target(X[:, :4]), atol=1e-15)


def test_gradients_do_not_leak_into_a_model():
    torch = pytest.importorskip("torch")
    X = torch.tensor(ol.inputs.sphere(30, 5, 4, seed=1), requires_grad=True)
    y = torch.ones(30, dtype=torch.float64).cumsum(0).requires_grad_()
    weight = torch.ones(30, dtype=torch.float64, requires_grad=True)
    model = ol.RandomFeatureAttention(5, random_state=0).fit(X, y, sample_weight=weight)
    assert not model.coef_.requires_grad
    assert not model.predict(X).requires_grad
    assert model.score(X, y) <= 1
    assert ol.AttentionKernelRidge().fit(X, y).score(X, y) <= 1


def test_masked_arrays_are_refused():
    X = np.ma.array(ol.inputs.sphere(30, 5, 4, seed=1))
    for examples in (X, X[:, 0]):
        with pytest.raises(TypeError, match="X is a masked array, expected a plain one, with mask"):
            ol.RandomFeatureAttention(5).fit(examples, np.ones(30))


def test_fits_side_by_side_leave_blas_its_threads():
    X = ol.inputs.sphere(300, 5, 4, seed=1)
    y = X[:, 1:, 0].mean(axis=1)
    expected = ol.RandomFeatureAttention(20, random_state=0).fit(X, y).predict(X)
    before = [pool["num_threads"] for pool in threadpool_info()]

    def fitted(_):
        return ol.RandomFeatureAttention(20, random_state=0).fit(X, y).predict(X)

    with ThreadPoolExecutor(3) as pool:
        for found in pool.map(fitted, range(12)):
            np.testing.assert_allclose(found, expected, atol=1e-9)
    assert [pool["num_threads"] for pool in threadpool_info()] == before


@pytest.mark.parametrize("size", [1e-170, 1e160])
def test_leave_one_out_does_not_mind_the_size_of_targets(size):
    X = ol.inputs.sphere(40, 5, 4, seed=1)
    y = X[:, 1:, 0].mean(axis=1)
    for heads in (3, 20):
        model = ol.RandomFeatureAttention(heads, alpha="loo", random_state=0)
        assert model.fit(X, size * y).alpha_ == pytest.approx(model.fit(X, y).alpha_)


def test_of_equally_good_penalties_the_largest_is_chosen():
    X = ol.inputs.sphere(20, 5, 4, seed=1)
    model = ol.RandomFeatureAttention(20, random_state=0, **PAPER)
    largest = [model.fit(X, np.zeros(20)).alpha_, model.fit(X, np.ones(20)).alpha_]
    assert largest[0] > 1 > largest[1]
