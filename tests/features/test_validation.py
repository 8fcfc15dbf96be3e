import re

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.exceptions import DataConversionWarning, NotFittedError

import onelayer as ol
from onelayer import inputs
from onelayer.array.backend import to_numpy
from onelayer.data.sets import SetRules, as_sets
from onelayer.features import examples, validation
from onelayer.features.examples import ChunkReader

X = inputs.sphere(12, 4, 3)
Y = X[:, 1:, 0].mean(axis=1)
LABELS = np.where(Y > 0, "warm", "cold")


def attention(**options):
    return ol.RandomFeatureAttention(**{"heads": 5, "random_state": 0, **options})


def changed(array, index, value):
    array = np.array(array, dtype=float)
    array[index] = value
    return array


def masked(*left):
    """A mask for X that leaves the first example these tokens."""
    mask = np.ones(X.shape[:2], dtype=bool)
    mask[0] = [token in left for token in range(X.shape[1])]
    return mask


ESTIMATORS = {
    "attention": attention(),
    "network": ol.RandomFeatureMLP(features=9, random_state=0),
    "kernel": ol.AttentionKernelRidge(),
    "classifier": ol.RandomFeatureAttentionClassifier(heads=5, random_state=0),
    "features": ol.AttentionFeatures(heads=5, random_state=0),
}


def model_of(name):
    return clone(ESTIMATORS[name])


def target_of(name):
    return LABELS if name == "classifier" else Y


def use(model, X, **arguments):
    """Predict or transform."""
    method = model.transform if hasattr(model, "transform") else model.predict
    return method(X, **arguments)


def refuses(error, message):
    return pytest.raises(error, match=re.escape(message))


# Examples

BAD_EXAMPLES = {
    "nan": (changed(X, (3, 1, 2), np.nan), ValueError, "X has 1 NaN or infinite entries, expected"),
    "infinite": (changed(X, 0, np.inf), ValueError, "X has 12 NaN or infinite entries, expected"),
    "nan in a list": (
        [*X[:2], changed(X[2], 0, np.nan)],
        ValueError,
        "X[2] has 3 NaN or infinite entries, expected finite numbers",
    ),
    "nan in rows": (changed(X[:, 0], (0, 0), np.nan), ValueError, "Input X contains NaN"),
    "four axes": (X[None], ValueError, "expected three axes (examples, tokens, dim)"),
    "one axis": (X[0, 0], ValueError, "Expected 2D array, got 1D array instead"),
    "nothing": (X[:0], ValueError, "X has shape (0, 4, 3), expected at least one example"),
    "complex": (X + 1j, TypeError, "X has dtype complex128, expected real numbers"),
    "text": (X.astype(str), TypeError, "expected real numbers"),
    "other dimension": (
        [*X[:2], X[2, :, :2]],
        ValueError,
        "X[2] has tokens of dimension 2, expected 3 as X[0] has",
    ),
    "a row among sets": (
        [*X[:2], X[2, 0]],
        ValueError,
        "X[2] has shape (3,), expected two axes (tokens, dim)",
    ),
}


@pytest.mark.parametrize("bad", BAD_EXAMPLES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_examples_that_are_none_are_refused_at_fit_and_later(name, bad):
    examples, error, message = BAD_EXAMPLES[bad]
    with refuses(error, message):
        model_of(name).fit(examples, target_of(name)[: len(examples)])
    model = model_of(name).fit(X, target_of(name))
    with refuses(error, message):
        use(model, examples)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_tokens_of_another_dimension_are_refused(name):
    model = model_of(name).fit(X, target_of(name))
    with refuses(ValueError, "X has tokens of dimension 2, expected 3 as at fit"):
        use(model, X[:, :, :2])
    with refuses(ValueError, "X has tokens of dimension 4, expected 3 as at fit"):
        use(model, [np.ones((2, 4))])
    with refuses(ValueError, f"X has 2 features, but {type(model).__name__} is expecting 3"):
        use(model, X[:, 0, :2])


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "network"])
def test_a_query_without_keys_is_refused(name):
    expected = "expected a query and at least one key"
    with refuses(ValueError, f"X has shape (12, 1, 3), {expected}"):
        model_of(name).fit(X[:, :1], target_of(name))
    with refuses(ValueError, f"X[11] has shape (1, 3), {expected}"):
        model_of(name).fit([*X[:11], X[11, :1]], target_of(name))
    message = "mask leaves example 0 without a key, expected at least one True after the query"
    with refuses(ValueError, message):
        model_of(name).fit(X, target_of(name), mask=masked(0))


def test_a_network_needs_no_key():
    model = model_of("network").fit(X[:, :1], Y)
    assert model.predict(X[:, :1]).shape == (12,)


BAD_MASKS = {
    "no query": (
        X,
        masked(1, 2),
        "mask leaves example 0 without its query, expected True for token 0",
    ),
    "no token": (X, masked(), "mask leaves example 0 without a token, expected at least one True"),
    "shape": (X, np.ones((12, 3)), "mask has shape (12, 3), expected (12, 4): one entry per token"),
    "numbers": (X, np.full((12, 4), 2), "mask has entries other than 0 and 1, expected Booleans"),
    "list": (list(X), masked(0, 1), "mask was given with a list of arrays, expected an array"),
    "rows": (X[:, 0], masked(0, 1), "mask was given with two-dimensional X, expected X of three"),
}


@pytest.mark.parametrize("bad", BAD_MASKS)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_masks_that_do_not_fit_are_refused_at_fit_and_later(name, bad):
    examples, mask, message = BAD_MASKS[bad]
    with refuses(ValueError, message):
        model_of(name).fit(examples, target_of(name), mask=mask)
    model = model_of(name).fit(X, target_of(name))
    with refuses(ValueError, message):
        use(model, examples, mask=mask)


@pytest.mark.parametrize("bad", BAD_MASKS)
def test_masks_that_do_not_fit_are_refused_by_the_kernel(bad):
    examples, mask, message = BAD_MASKS[bad]
    with refuses(ValueError, message):
        ol.attention_kernel(examples, mask=mask)
    with refuses(ValueError, message):
        ol.attention_kernel(X, examples, Z_mask=mask)


def test_the_kernel_refuses_what_does_not_go_together():
    with refuses(ValueError, "Z has tokens of dimension 2, expected 3 as X has"):
        ol.attention_kernel(X, X[:, :, :2])
    with refuses(ValueError, "Z_mask was given without Z, expected examples Z"):
        ol.attention_kernel(X, Z_mask=masked(0, 1))
    with refuses(ValueError, "X has 1 NaN or infinite entries"):
        ol.attention_kernel(changed(X, (0, 0, 0), np.nan))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            ol.RandomFeatureMLP(features=9),
            "X has sets of 4 tokens, expected at most 3 as at fit: a network that reads tokens in",
        ),
        (
            attention(positions="onehot"),
            "X has sets of 4 tokens, expected at most 3: positions='onehot' has no code for",
        ),
    ],
)
def test_sets_longer_than_at_fit_are_refused_where_places_count(model, message):
    model.fit(X[:, :3], Y)
    with refuses(ValueError, message):
        model.predict(X)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_examples_of_another_backend_than_at_fit_are_refused(name):
    torch = pytest.importorskip("torch")
    model = model_of(name).fit(X, target_of(name))
    if name == "kernel":  # computed in numpy in any case
        np.testing.assert_array_equal(model.predict(torch.tensor(X)), model.predict(X))
        return
    method = "transform" if name == "features" else "predict"
    message = (
        f"Inputs passed to {type(model).__name__}.{method}() must use the same namespace and "
        "device as those passed to fit(): got torch on cpu, expected numpy on cpu"
    )
    with refuses(ValueError, message):
        use(model, torch.tensor(X))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_model_is_fitted_before_it_is_used(name):
    model = type(ESTIMATORS[name])()
    with pytest.raises(NotFittedError, match="is not fitted yet"):
        use(model, X)


# Targets and weights


@pytest.mark.parametrize("name", ["attention", "network", "kernel"])
@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y[:-1], "y has 11 rows, expected 12: one for each example"),
        (changed(Y, 3, np.nan), "Input y contains NaN"),
        (changed(Y, 3, np.inf), "Input y contains infinity"),
        (None, "requires y to be passed, but the target y is None"),
        (["a"] * 12, "could not convert string to float"),
        (X, "Found array with dim 3, while dim <= 2 is required"),
    ],
)
def test_targets_are_one_row_of_numbers_for_each_example(name, y, message):
    with refuses(ValueError, message):
        model_of(name).fit(X, y)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (Y[:-1], "y has 11 rows, expected 12: one for each example"),
        (changed(Y, 3, np.nan), "y has 1 NaN or infinite entries, expected finite numbers"),
        (Y[:, None, None], "y has shape (12, 1, 1), expected (n,) or (n, targets)"),
    ],
)
def test_targets_in_tensors_are_checked_too(y, message):
    torch = pytest.importorskip("torch")
    with refuses(ValueError, message):
        attention().fit(X, torch.tensor(y))


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (LABELS[:-1], "y has 11 rows, expected 12: one for each example"),
        (None, "requires y to be passed, but the target y is None"),
        (changed(Y, 3, np.nan), "y has 1 NaN or infinite entries, expected finite numbers"),
        (np.full(12, np.inf), "y has 12 NaN or infinite entries, expected finite numbers"),
        (Y, "Unknown label type: continuous"),
        (["a"] * 12, "y has one class, 'a', expected a number of classes greater than one"),
        (np.ones(12), "y has one class, 1.0, expected a number of classes greater than one"),
        (np.ones((12, 2)), "y should be a 1d array, got an array of shape (12, 2) instead"),
    ],
)
def test_classes_are_one_label_for_each_example(y, message):
    with refuses(ValueError, message):
        model_of("classifier").fit(X, y)


def test_a_column_of_labels_is_taken_with_a_warning():
    with pytest.warns(DataConversionWarning, match="column-vector y was passed"):
        model = model_of("classifier").fit(X, LABELS[:, None])
    assert model.predict(X).shape == (12,)


@pytest.mark.parametrize("name", ["attention", "network", "kernel", "classifier"])
@pytest.mark.parametrize(
    ("weight", "error", "message"),
    [
        (-0.5, ValueError, "sample_weight has entries down to -0.5, expected none below 0"),
        (changed(Y**2, 3, -2), ValueError, "sample_weight has entries down to -2, expected none"),
        (np.zeros(12), ValueError, "sample_weight is zero throughout, expected a positive weight"),
        (np.ones(11), ValueError, "sample_weight has shape (11,), expected (12,)"),
        (np.ones((12, 1)), ValueError, "sample_weight has shape (12, 1), expected (12,)"),
        (np.nan, ValueError, "sample_weight has 12 NaN or infinite entries, expected finite"),
        (changed(Y**2, 3, np.inf), ValueError, "sample_weight has 1 NaN or infinite entries"),
        (["a"] * 12, TypeError, "sample_weight has dtype <U1, expected real numbers"),
    ],
)
def test_weights_are_not_negative(name, weight, error, message):
    with refuses(error, message):
        model_of(name).fit(X, target_of(name), sample_weight=weight)


# Parameters

WHOLE = "expected a whole number of at least 1"
PENALTY = "expected a finite number of at least 0, or 'loo'"

BAD_PARAMETERS = [
    ({"alpha": -1}, ValueError, f"alpha is -1, {PENALTY}"),
    ({"alpha": np.nan}, ValueError, f"alpha is nan, {PENALTY}"),
    ({"alpha": np.inf}, ValueError, f"alpha is inf, {PENALTY}"),
    ({"alpha": "best"}, ValueError, f"alpha is 'best', {PENALTY}"),
    ({"alpha": None}, TypeError, f"alpha is None, {PENALTY}"),
    ({"alpha": True}, TypeError, f"alpha is True, {PENALTY}"),
    ({"alpha": [0.1]}, TypeError, f"alpha is [0.1], {PENALTY}"),
    ({"heads": 0}, ValueError, f"heads is 0, {WHOLE}"),
    ({"heads": -3}, ValueError, f"heads is -3, {WHOLE}"),
    ({"heads": 2.0}, TypeError, f"heads is 2.0, {WHOLE}"),
    ({"heads": "many"}, TypeError, f"heads is 'many', {WHOLE}"),
    ({"heads": True}, TypeError, f"heads is True, {WHOLE}"),
    ({"features": 0}, ValueError, f"features is 0, {WHOLE}"),
    ({"features": 1.5}, TypeError, f"features is 1.5, {WHOLE}"),
    ({"depth": 0}, ValueError, f"depth is 0, {WHOLE}"),
    ({"depth": 1.0}, TypeError, f"depth is 1.0, {WHOLE}"),
    ({"positions": "rotary"}, ValueError, "positions is 'rotary', expected one of None, 'sinus"),
    ({"bias": np.nan}, ValueError, "bias is nan, expected a finite number or a matrix"),
    ({"bias": np.inf}, ValueError, "bias is inf, expected a finite number or a matrix"),
    (
        {"bias": np.zeros((4, 3))},
        ValueError,
        "bias has shape (4, 3), expected a number or a square",
    ),
    (
        {"bias": np.zeros(4)},
        ValueError,
        "bias has shape (4,), expected a number or a square matrix",
    ),
    (
        {"bias": np.eye(3)},
        ValueError,
        "bias has shape (3, 3), expected a number or a matrix of sha",
    ),
    (
        {"bias": np.full((4, 4), np.nan)},
        ValueError,
        "bias has 16 NaN or infinite entries, expected",
    ),
    ({"bias": "identity"}, TypeError, "bias is 'identity', expected a number or a square matrix"),
    ({"bias": None}, TypeError, "bias is None, expected a number or a square matrix"),
    (
        {"random_state": -1},
        ValueError,
        "random_state is -1, expected None, a whole number of at le",
    ),
    ({"random_state": "x"}, TypeError, "random_state is 'x', expected None, a whole number of at"),
]


@pytest.mark.parametrize(
    ("name", "parameters", "error", "message"),
    [
        (name, *bad)
        for name, model in ESTIMATORS.items()
        for bad in BAD_PARAMETERS
        if set(bad[0]) <= set(model.get_params())
    ],
)
def test_parameters_are_refused_with_what_was_expected(name, parameters, error, message):
    with refuses(error, message):
        model_of(name).set_params(**parameters).fit(X, target_of(name))


def test_parameters_are_checked_at_fit_and_not_before():
    assert attention(heads=-1, alpha="?").get_params()["heads"] == -1


@pytest.mark.parametrize("alpha", [0.5, 1, np.float32(0.5), np.int64(1), 0])
def test_penalties_may_be_numbers_of_any_kind(alpha):
    assert validation.as_alpha(alpha) == alpha
    assert isinstance(validation.as_alpha(alpha), float)


def test_leaving_one_out_is_asked_for_by_name():
    assert validation.as_alpha("loo") is None


@pytest.mark.parametrize("bias", [1, np.float32(0.25), [[0.0, 1.0], [2.0, 3.0]]])
def test_biases_may_be_numbers_and_matrices_of_any_kind(xp_array, bias):
    for given in (bias, xp_array(np.array(bias))) if np.ndim(bias) else (bias,):
        np.testing.assert_array_equal(validation.as_bias(given), np.array(bias))


# What comes in


def test_targets_follow_the_examples_in_float64(xp_array):
    sets = as_sets(xp_array(X.astype("f4")))
    for y in (Y.astype("f4"), xp_array(Y.astype("f4")), list(Y), np.arange(12)):
        targets = validation.as_targets(y, sets)
        assert type(targets) is type(sets.tokens)
        assert to_numpy(targets).dtype == np.float64
        np.testing.assert_array_equal(to_numpy(targets), to_numpy(y) if hasattr(y, "shape") else y)


def rows_of(y, weight, xp_array=np.asarray, labels=False):
    """Sets, targets and the scale of rows of examples in memory, and the classes."""
    reader = ChunkReader(SetRules(), labels=labels)
    given = examples.in_memory(as_sets(xp_array(X)), y, weight, reader)
    seen = given.summarize()
    (chunk,) = given.rows(seen, None).chunks.collect()
    return chunk.arrays, seen.labels


def test_rows_are_scaled_by_the_root_of_their_weight(xp_array):
    weight = np.arange(12.0)
    (_, targets, scale), _ = rows_of(Y, weight, xp_array)
    np.testing.assert_allclose(to_numpy(scale), np.sqrt(weight), rtol=1e-15)
    np.testing.assert_allclose(to_numpy(targets)[:, 0], np.sqrt(weight) * Y, rtol=1e-15)
    (_, _, scale), _ = rows_of(Y, 4, xp_array)
    np.testing.assert_allclose(to_numpy(scale), np.full(12, 2.0))
    assert rows_of(Y, None, xp_array)[0][2] is None


def test_sizes_become_whole_numbers():
    for sizes in ([3, 12], (3, 12), np.array([3, 12]), range(3, 13, 9)):
        assert validation.as_sizes(sizes) == [3, 12]
        assert all(type(size) is int for size in validation.as_sizes(sizes))


def test_labels_become_signs():
    (_, targets, _), classes = rows_of(LABELS, None, labels=True)
    np.testing.assert_array_equal(classes, ["cold", "warm"])
    np.testing.assert_array_equal(targets, np.where(np.array(LABELS) == "warm", 1.0, -1.0)[:, None])
