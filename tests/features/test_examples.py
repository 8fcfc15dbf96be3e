"""Fits, predictions and curves are the same wherever the examples are."""

import tracemalloc
import types

import numpy as np
import places
import pytest
from example_sets import random_mask
from sklearn.base import clone
from sklearn.metrics import r2_score

import onelayer as ol
from onelayer import inputs

N, TEST = 90, 50
SIZES = [10, 40, 41, 60, 90]  # there are 40 features
X, X_TEST = inputs.sphere(N, 4, 3), inputs.sphere(TEST, 4, 3, seed=1)


def targets_for(X):
    """Two targets, with some noise so that no penalty is the best of all."""
    noise = np.random.default_rng(len(X)).standard_normal((len(X), 2))
    return np.stack([X[:, 1:, 0].mean(axis=1), X[:, 0, 1] * X[:, 1, 2] + 3.0], axis=1) + 0.1 * noise


Y, Y_TEST = targets_for(X), targets_for(X_TEST)
WEIGHT = np.random.default_rng(2).uniform(0, 2, N)
WEIGHT[13:26] = 0.0  # a whole block
WEIGHT_TEST = np.random.default_rng(3).uniform(0, 2, TEST)
MASK, MASK_TEST = (random_mask(np.random.default_rng(4), n, 4) for n in (N, TEST))
LABELS = np.array(["low", "mid", "top"])[np.digitize(Y[:, 0], [-0.1, 0.1])]
LABELS[:13] = "low"  # in the first block one class alone


def attention(**options):
    return ol.RandomFeatureAttention(**{"heads": 10, "alpha": 0.1, "random_state": 0, **options})


def classifier(**options):
    options = {"heads": 10, "alpha": 0.1, "random_state": 0, **options}
    return ol.RandomFeatureAttentionClassifier(**options)


MODELS = {
    "attention": attention(),
    "chosen": attention(alpha="loo"),
    "many heads": attention(heads=50),
    "placed": attention(positions="onehot", depth=2),
    "network": ol.RandomFeatureMLP(features=40, alpha=0.1, random_state=0),
    "kernel": ol.AttentionKernelRidge(alpha=0.1),
}


def model_of(name):
    return clone(MODELS[name])


@pytest.fixture(params=places.KINDS)
def there(request):
    """A function that brings an array elsewhere."""
    return places.place(request.param, request)


def close(found, expected):
    np.testing.assert_allclose(places.brought(found), expected, rtol=0, atol=1e-10)


def changed(array, index, value):
    array = np.array(array, dtype=float)
    array[index] = value
    return array


# The same results


@pytest.mark.parametrize("name", MODELS)
def test_a_fit_is_the_same_anywhere(there, name):
    here = model_of(name).fit(X, Y)
    model = model_of(name).fit(there(X), there(Y))
    kept = "dual_coef_" if name == "kernel" else "coef_"
    assert isinstance(getattr(model, kept), np.ndarray)
    close(getattr(model, kept), getattr(here, kept))
    np.testing.assert_allclose(model.alpha_, here.alpha_, rtol=1e-10)
    assert model.n_features_in_ == 3
    close(model.predict(there(X_TEST)), here.predict(X_TEST))
    close(model.predict(X_TEST), here.predict(X_TEST))


@pytest.mark.parametrize("alpha", [0.1, "loo"])
def test_masks_and_weights_come_along(there, alpha):
    model = attention(alpha=alpha)
    expected = model.fit(X, Y[:, 0], sample_weight=WEIGHT, mask=MASK).predict(
        X_TEST, mask=MASK_TEST
    )
    model.fit(there(X), there(Y[:, 0]), sample_weight=there(WEIGHT), mask=there(MASK))
    close(model.predict(there(X_TEST), mask=there(MASK_TEST)), expected)
    model.fit(there(X), Y[:, 0], sample_weight=list(WEIGHT), mask=MASK.tolist())
    close(model.predict(there(X_TEST), mask=MASK_TEST), expected)


def test_one_weight_serves_all(there):
    expected = attention().fit(X, Y, sample_weight=3).coef_
    close(attention().fit(there(X), Y, sample_weight=3).coef_, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_curve_is_the_same_anywhere(there, name):
    expected = ol.learning_curve(
        model_of(name), X, Y, X_TEST, Y_TEST, SIZES, mask=MASK, mask_test=MASK_TEST
    )
    curve = ol.learning_curve(
        model_of(name),
        there(X),
        there(Y),
        there(X_TEST),
        there(Y_TEST),
        SIZES,
        mask=there(MASK),
        mask_test=there(MASK_TEST),
    )
    close(curve.test_error, expected.test_error)
    np.testing.assert_allclose(curve.alpha, expected.alpha, rtol=1e-10)


def test_a_curve_takes_examples_of_different_places(there):
    expected = ol.learning_curve(attention(), X, Y, X_TEST, Y_TEST, SIZES).test_error
    close(ol.learning_curve(attention(), there(X), Y, X_TEST, Y_TEST, SIZES).test_error, expected)
    close(ol.learning_curve(attention(), X, Y, there(X_TEST), Y_TEST, SIZES).test_error, expected)


def test_scores_are_those_of_scikit_learn(there):
    model = attention().fit(X, Y)
    for weight in (None, WEIGHT_TEST):
        score = model.score(there(X_TEST), there(Y_TEST), sample_weight=weight)
        expected = r2_score(Y_TEST, model.predict(X_TEST), sample_weight=weight)
        assert isinstance(score, float)
        assert score == pytest.approx(expected, abs=1e-10)
    masked = model.score(X_TEST, Y_TEST, mask=MASK_TEST)
    assert model.score(there(X_TEST), Y_TEST, mask=MASK_TEST) == pytest.approx(masked, abs=1e-10)


@pytest.mark.slow
def test_classes_are_the_same_anywhere(there):
    for labels in (LABELS, LABELS == "low", np.searchsorted(["low", "mid", "top"], LABELS) + 5.0):
        here = classifier().fit(X, labels, sample_weight=WEIGHT)
        model = classifier().fit(there(X), there(labels), sample_weight=WEIGHT)
        np.testing.assert_array_equal(model.classes_, here.classes_)
        close(model.coef_, here.coef_)
        close(model.decision_function(there(X_TEST)), here.decision_function(X_TEST))
        predicted = here.predict(X_TEST)
        np.testing.assert_array_equal(places.brought(model.predict(there(X_TEST))), predicted)
        assert model.score(there(X), there(labels)) == pytest.approx(here.score(X, labels))
        weighted = here.score(X, labels, sample_weight=WEIGHT)
        assert model.score(there(X), labels, sample_weight=WEIGHT) == pytest.approx(weighted)


def test_features_are_the_same_anywhere(there):
    features = ol.AttentionFeatures(heads=3, random_state=0)
    expected = features.fit(X, mask=MASK).transform(X, mask=MASK)
    found = features.fit_transform(there(X), mask=there(MASK))
    close(found, expected)
    assert features.n_features_out_ == 12


@pytest.mark.parametrize("dtype", ["f4", "i8"])
def test_numbers_of_other_dtypes_stay_what_they_are(there, dtype):
    whole = (10 * X).astype(dtype)
    here = attention().fit(whole, Y)
    model = attention().fit(there(whole), Y)
    np.testing.assert_allclose(model.coef_, here.coef_, rtol=0, atol=1e-10)
    found = places.brought(model.predict(there(whole)))
    assert found.dtype == here.predict(whole).dtype == (np.float32 if dtype == "f4" else np.float64)
    np.testing.assert_allclose(found, here.predict(whole), rtol=0, atol=1e-4)


def test_targets_and_masks_elsewhere_come_to_examples_in_memory(there):
    expected = attention().fit(X, Y, sample_weight=WEIGHT, mask=MASK)
    model = attention().fit(X, there(Y), sample_weight=there(WEIGHT), mask=there(MASK))
    np.testing.assert_array_equal(model.coef_, expected.coef_)
    found = model.predict(X_TEST, mask=there(MASK_TEST))
    np.testing.assert_array_equal(found, expected.predict(X_TEST, mask=MASK_TEST))
    score = model.score(X_TEST, there(Y_TEST), sample_weight=there(WEIGHT_TEST))
    assert score == expected.score(X_TEST, Y_TEST, sample_weight=WEIGHT_TEST)
    labels = classifier().fit(X, there(LABELS)).predict(X)
    np.testing.assert_array_equal(labels, classifier().fit(X, LABELS).predict(X))


def test_the_same_fit_gives_the_same_bits(there):
    first, second = (attention(alpha="loo").fit(there(X), there(Y)).coef_ for _ in range(2))
    np.testing.assert_array_equal(first, second)


# What comes back


@pytest.mark.parametrize("kind", ["dask", "cluster"])
def test_dask_predicts_lazily_in_the_chunks_of_the_examples(request, kind):
    da = pytest.importorskip("dask.array")
    there = places.place(kind, request)
    cuts = (20, 0, 1, 29)
    test = da.from_array(X_TEST, chunks=(cuts, 2, 3))  # in pieces along the tokens too
    found = attention().fit(X, Y).predict(test)
    assert isinstance(found, da.Array)
    assert found.chunks == (cuts, (2,))
    close(found, attention().fit(X, Y).predict(X_TEST))
    one = attention().fit(X, Y[:, 0]).predict(there(X_TEST))
    assert one.shape == (TEST,)
    named = classifier().fit(X, LABELS).predict(test)
    assert named.dtype == LABELS.dtype
    features = ol.AttentionFeatures(heads=3, random_state=0).fit(X).transform(test)
    assert features.shape == (TEST, 12)


def test_dask_computes_no_prediction_before_it_is_asked():
    da = pytest.importorskip("dask.array")
    seen = []

    def load(block):
        seen.append(len(block))
        return block

    lazy = da.from_array(X_TEST, chunks=(25, 4, 3)).map_blocks(load, dtype=float, meta=X_TEST[:0])
    found = attention().fit(X, Y).predict(lazy)
    assert seen == []
    found[:10].compute()
    assert seen == [25]


def test_a_function_gives_a_function_that_serves_as_targets():
    model = attention().fit(X, Y)
    predict = model.predict(places.by_function(X))
    assert [len(block) for block in predict()] == [13] * 6 + [12]
    again = attention().fit(places.by_function(X), predict)
    close(again.coef_, attention().fit(X, model.predict(X)).coef_)


def test_a_file_gives_an_array(request):
    there = places.place("file", request)
    found = attention().fit(X, Y).predict(there(X_TEST))
    assert isinstance(found, np.ndarray)
    assert not isinstance(found, np.memmap)


def test_functions_may_give_tensors():
    torch = pytest.importorskip("torch")
    tensors, test = (places.by_function(torch.tensor(array)) for array in (X, X_TEST))
    here = attention().fit(X, Y)
    model = attention().fit(tensors, places.by_function(torch.tensor(Y)))
    assert isinstance(model.coef_, torch.Tensor)
    close(model.coef_, here.coef_)
    assert all(isinstance(block, torch.Tensor) for block in model.predict(test)())
    close(model.predict(test), here.predict(X_TEST))
    kernel = ol.AttentionKernelRidge().fit(tensors, Y)
    assert isinstance(next(kernel.predict(test)()), np.ndarray)


# Killed workers


@pytest.mark.slow
def test_a_worker_that_dies_in_a_fit_changes_nothing(cluster, tmp_path):
    """In the third pass, which chooses the penalty; the worker's return takes a second."""
    model = attention(alpha="loo")
    expected = model.fit(places.in_dask(X), Y).coef_
    folder = tmp_path / "loads"
    folder.mkdir()
    dying = places.dying_once(X, folder / "marker", loads=2 * 7 + 3)
    found = model.fit(dying, Y).coef_
    assert (folder / "marker").exists()
    np.testing.assert_array_equal(found, expected)


# Memory


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "function"])
def test_a_fit_holds_one_chunk_at_a_time(request, monkeypatch, tmp_path, kind):
    examples = inputs.sphere(2**14, 16, 8)
    y = examples[:, 1:, 0].mean(axis=1)
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", 2**18)
    if kind == "file":
        given = places.on_disk(examples, tmp_path)
    else:
        given = lambda: (examples[start : start + 256] for start in range(0, 2**14, 256))  # noqa: E731
    expected = attention().fit(examples, y).coef_
    tracemalloc.start()
    model = attention(alpha=0.1).fit(given, y)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    close(model.coef_, expected)
    assert peak < examples.nbytes / 4


# What is refused


BAD = {
    "nan": ({"X": changed(X, (57, 1, 2), np.nan)}, "X has 1 NaN or infinite entries, expected fin"),
    "no query": (
        {"mask": changed(MASK, (57, 0), False).astype(bool)},
        "mask leaves example 57 without its query, expected True for token 0",
    ),
    "no key": (
        {"mask": changed(MASK, (57, slice(1, 4)), False).astype(bool)},
        "mask leaves example 57 without a key, expected at least one True after the query",
    ),
    "no token": (
        {"mask": changed(MASK, 57, False).astype(bool)},
        "mask leaves example 57 without a token, expected at least one True in every row",
    ),
    "numbers in a mask": (
        {"mask": changed(MASK, (57, 0), 2)},
        "mask has entries other than 0 and 1, expected Booleans",
    ),
    "nan in y": ({"y": changed(Y, (57, 0), np.nan)}, "Input y contains NaN"),
    "weight below zero": (
        {"sample_weight": changed(WEIGHT, 57, -2)},
        "sample_weight has entries down to -2, expected none below 0",
    ),
    "no weight": (
        {"sample_weight": np.zeros(N)},
        "sample_weight is zero throughout, expected a positive weight",
    ),
    "shape of weights": (
        {"sample_weight": np.ones((N, 1))},
        "sample_weight has shape .*, expected",
    ),
    "axes": ({"X": X[:, 0]}, r"X has examples of shape \(3,\), expected two axes \(tokens, dim\)"),
    "no keys": (
        {"X": X[:, :1]},
        r"X has examples of shape \(1, 3\), expected a query and at least one key",
    ),
}


def refused(there, message, model=None, error=ValueError, **given):
    """A fit of arrays that are brought elsewhere is refused."""
    arguments = {"X": X, "y": Y} | given
    with pytest.raises(error, match=message):
        (model or attention()).fit(**{name: there(array) for name, array in arguments.items()})


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("kind", ["function", "dask"])
def test_what_is_wrong_in_a_later_chunk_is_refused_in_the_same_words(request, kind, bad):
    given, message = BAD[bad]
    refused(places.place(kind, request), message, **given)


@pytest.mark.parametrize("kind", ["file", "cluster"])
def test_of_two_mistakes_the_first_is_told(request, kind):
    there = places.place(kind, request)
    bad = changed(changed(MASK, (57, 0), False), (80, 0), False)
    message = "mask leaves example 57 without its query"
    refused(there, message, X=changed(X, 85, np.nan), mask=bad.astype(bool))


@pytest.mark.parametrize("kind", ["file", "function", "dask"])
def test_targets_are_as_many_as_the_examples(request, kind):
    message = r"y has (11|89) rows, expected (12|90): one for each example"
    refused(places.place(kind, request), message, y=Y[:-1])


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y[:, 0], "Unknown label type: continuous"),
        (np.full(N, "one"), "y has one class, 'one', expected a number of classes greater than"),
        (changed(Y[:, 0] > 0, 57, np.nan), "y has 1 NaN or infinite entries, expected finite"),
        (np.ones((N, 2)), r"y should be a 1d array, got an array of shape \(13, 2\) instead"),
    ],
)
def test_labels_are_checked(y, message):
    refused(places.by_function, message, classifier(), y=y)


@pytest.mark.parametrize(("model", "y"), [(attention(), Y), (classifier(), LABELS)])
def test_targets_are_asked_for(model, y):
    message = "requires y to be passed, but the target y is None"
    with pytest.raises(ValueError, match=message):
        model.fit(places.by_function(X), None)
    with pytest.raises(ValueError, match=message):
        model.fit(X, y).score(places.by_function(X), None)


def test_complex_numbers_are_refused():
    message = "X has dtype complex128, expected real numbers"
    refused(places.by_function, message, error=TypeError, X=X + 1j)


def test_no_examples_are_refused():
    da = pytest.importorskip("dask.array")
    with pytest.raises(ValueError, match="X has no examples, expected at least one"):
        attention().fit(da.from_array(X[:0], chunks=(1, 4, 3)), da.from_array(Y[:0]))
    with pytest.raises(ValueError, match="X gives no examples, expected at least one"):
        attention().fit(lambda: iter(()), Y[:0])


def test_a_generator_is_refused_with_what_would_do():
    blocks = (X[start : start + 30] for start in (0, 30, 60))
    message = (
        "X is a generator, which can be read only once, expected a function that returns a new"
    )
    with pytest.raises(TypeError, match=message):
        attention().fit(blocks, Y)


@pytest.mark.parametrize("method", ["predict", "transform"])
def test_examples_to_predict_are_checked_when_they_are_computed(there, method):
    fitted = attention().fit(X, Y)
    if method == "transform":
        fitted = ol.AttentionFeatures(heads=3).fit(X)
    with pytest.raises(ValueError, match="X has 1 NaN or infinite entries, expected finite"):
        places.brought(getattr(fitted, method)(there(changed(X, (57, 1, 2), np.nan))))
    with pytest.raises(ValueError, match="X has tokens of dimension 2, expected 3 as at fit"):
        getattr(fitted, method)(there(X[:, :, :2]))
    mask = changed(MASK, (57, 0), False).astype(bool)
    with pytest.raises(ValueError, match="mask leaves example 57 without its query"):
        places.brought(getattr(fitted, method)(there(X), mask=mask))


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value", "ignore:ridge regression")
def test_tokens_that_overflow_are_refused(there):
    message = (
        r"overflow in float64: X has entries up to .*e\+1.*, expected tokens of about unit norm"
    )
    with pytest.raises(ValueError, match="features " + message):
        attention(standardize=False).fit(there(1e120 * X), Y)
    with pytest.raises(ValueError, match="predictions " + message):
        places.brought(attention().fit(X, Y).predict(there(1e120 * X)))


def test_examples_of_another_backend_than_at_fit_are_refused():
    torch = pytest.importorskip("torch")
    model = attention().fit(torch.tensor(X), torch.tensor(Y))
    message = "must use the same namespace and device as those passed to fit.*: got numpy on cpu"
    for use in (model.predict, lambda X: model.score(X, Y)):
        with pytest.raises(ValueError, match=message):
            use(places.by_function(X))


def test_scores_are_for_as_many_targets_as_were_fitted():
    model = attention().fit(X, Y)
    with pytest.raises(ValueError, match="y has 1 targets, expected 2 as at fit"):
        model.score(places.by_function(X), Y[:, 0])


def test_curves_check_their_test_set_elsewhere():
    X_there, test = places.by_function(X), places.by_function(X_TEST)

    def curve(y_test):
        return ol.learning_curve(attention(), X_there, Y, test, y_test, [10])

    with pytest.raises(ValueError, match="y_test has 1 targets, expected 2 as y has"):
        curve(Y_TEST[:, 0])
    with pytest.raises(ValueError, match="y_test is constant in target 1, expected targets that"):
        curve(changed(Y_TEST, (slice(None), 1), 0.1))
    with pytest.raises(ValueError, match="requires y_test to be passed"):
        curve(None)
    with pytest.raises(ValueError, match="Input y_test contains NaN"):
        curve(changed(Y_TEST, 40, np.nan))


# Progress


@pytest.mark.parametrize("kind", ["function", "cluster"])
def test_chunks_are_told_of(request, kind):
    there, told = places.place(kind, request), []
    callback = types.SimpleNamespace(
        setup=lambda estimator, context: None,
        on_fit_task_begin=lambda estimator, context: None,
        on_fit_task_end=lambda estimator, context: told.append(context.task_name),
        teardown=lambda estimator, context: None,
    )
    model = attention(alpha="loo").set_callbacks(callback)
    ol.learning_curve(model, there(X), Y, X_TEST, Y_TEST, [50, 90])
    blocks = {50: 4, 90: 7}  # and the chunk with the 51st example counts for both
    assert told.count("part") == 2 * blocks[50] + (1 + 3) + blocks[90]
    stages = [name for name in told if name != "part"]
    assert stages == ["left out", "Gram matrix", "left out", "learning curve"]


def halved(array):
    """A Dask array that is wrong about the number of its rows, as after a filter."""
    da = pytest.importorskip("dask.array")
    meta = np.empty((0,) * array.ndim)
    return da.map_blocks(lambda block: block[::2], places.in_dask(array), dtype=float, meta=meta)


def test_chunks_that_are_not_as_long_as_they_say_are_refused():
    message = "X has a chunk of 7 rows at example 0, expected 13 as it says itself"
    with pytest.raises(ValueError, match=message):
        attention().fit(halved(X), halved(Y))
    with pytest.raises(ValueError, match="y has a chunk of 7 rows at example 0, expected 13"):
        attention().fit(places.in_dask(X), halved(Y))
    with pytest.raises(ValueError, match="X_test has a chunk of 7 rows at example 0, expected 13"):
        ol.learning_curve(attention(), X, Y, halved(X), halved(Y), [50])


@pytest.mark.parametrize("by", [places.by_function, places.in_dask])
def test_scores_without_any_weight_are_refused(by):
    model = attention().fit(X, Y)
    with pytest.raises(ValueError, match="sample_weight is zero throughout, expected a positive w"):
        model.score(by(X), by(Y), sample_weight=np.zeros(len(X)))


def test_targets_that_are_masked_are_refused():
    masked = np.ma.array(Y, mask=Y > 0)
    with pytest.raises(TypeError, match="y is a masked array, expected a plain one"):
        attention().fit(X, masked)
