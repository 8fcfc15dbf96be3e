import numpy as np
import oracles
import pytest
from example_sets import ragged
from matplotlib.figure import Figure
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import Ridge
from sklearn.utils.validation import check_is_fitted

import onelayer as ol
from onelayer import inputs
from onelayer.array.backend import to_numpy
from onelayer.features.learning_curves import LearningCurve
from onelayer.features.solvers import ridge

SIZES = [4, 15, 16, 25, 40]
X, X_TEST = inputs.sphere(45, 4, 3), inputs.sphere(20, 4, 3, seed=1)


def targets_for(X):
    """Two targets, with some noise so that no penalty is the best of all."""
    noise = np.random.default_rng(len(X)).standard_normal((len(X), 2))
    return np.stack([X[:, 1:, 0].mean(axis=1), X[:, 0, 1] * X[:, 1, 2] + 3.0], axis=1) + 0.1 * noise


Y, Y_TEST = targets_for(X), targets_for(X_TEST)

# Tokens as they are: standardization is learned once for all sizes, and not for each.
GIVEN = {"alpha": 1e-3, "standardize": False}
DRAWN = {**GIVEN, "random_state": 0}
MODELS = {
    "few heads": ol.RandomFeatureAttention(heads=4, **DRAWN),  # 16 features
    "many heads": ol.RandomFeatureAttention(heads=30, bias=1.0, **DRAWN),
    "deep": ol.RandomFeatureAttention(heads=6, positions="onehot", depth=2, **DRAWN),
    "network": ol.RandomFeatureMLP(features=20, **DRAWN),
    "kernel": ol.AttentionKernelRidge(bias=0.5, **GIVEN),
}


def refitted(model, sizes=SIZES, examples=X, targets=Y, test=X_TEST, test_targets=Y_TEST):
    """The errors and penalties (sizes, targets) of one fit for every size."""
    errors, alphas = [], []
    for size in sizes:
        fitted = clone(model).fit(examples[:size], targets[:size])
        errors.append(oracles.curve_error(fitted.predict(test), test_targets))
        alphas.append(np.broadcast_to(fitted.alpha_, targets.shape[1]))
    return np.array(errors), np.array(alphas)


def check_curve(curve, errors, alphas, rtol=1e-8):
    np.testing.assert_allclose(curve.test_error, errors, rtol=rtol)
    np.testing.assert_allclose(curve.alpha, alphas, rtol=1e-9)


# What a curve is


@pytest.mark.parametrize("fit_intercept", [False, True])
@pytest.mark.parametrize("alpha", [1e-3, 1.0, "loo"])
@pytest.mark.parametrize("name", MODELS)
def test_a_curve_is_a_fit_at_every_size(name, alpha, fit_intercept):
    model = clone(MODELS[name]).set_params(alpha=alpha, fit_intercept=fit_intercept)
    curve = ol.learning_curve(model, X, Y, X_TEST, Y_TEST, SIZES)
    np.testing.assert_array_equal(curve.sizes, SIZES)
    assert curve.test_error.shape == curve.alpha.shape == (len(SIZES), 2)
    check_curve(curve, *refitted(model))


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_standardized_once_for_all_sizes(name):
    """By the first examples up to the largest size, and by none beyond it."""
    model = clone(MODELS[name]).set_params(alpha=0.1, standardize=True)
    examples = 1e3 * X + np.array([1e4, 0.0, -7.0])
    test = 1e3 * X_TEST + np.array([1e4, 0.0, -7.0])
    curve = ol.learning_curve(model, examples, Y, test, Y_TEST, [10, 30])
    cut = ol.learning_curve(model, examples[:30], Y[:30], test, Y_TEST, [10, 30])
    np.testing.assert_array_equal(curve.test_error, cut.test_error)
    errors, _ = refitted(model, [30], examples, Y, test)
    np.testing.assert_allclose(curve.test_error[1:], errors, rtol=1e-8)


@pytest.mark.parametrize("name", ["few heads", "many heads", "network"])
def test_a_curve_in_float32_with_corrections_is_a_fit_at_every_size(monkeypatch, name):
    expected = refitted(MODELS[name])
    monkeypatch.setattr(ridge, "_MIXED_FROM", 0)
    check_curve(ol.learning_curve(MODELS[name], X, Y, X_TEST, Y_TEST, SIZES), *expected)


def test_a_curve_is_that_of_ridge_on_the_same_features():
    model = ol.RandomFeatureAttention(heads=8, alpha=0.1, standardize=False, random_state=0)
    features = ol.AttentionFeatures(heads=8, standardize=False, random_state=0).fit(X)
    plain = Ridge(alpha=0.1)
    curve = ol.learning_curve(model, X, Y, X_TEST, Y_TEST, [20, 40])
    for size, errors in zip([20, 40], curve.test_error, strict=True):
        plain.fit(features.transform(X[:size]), Y[:size])
        predictions = plain.predict(features.transform(X_TEST))
        np.testing.assert_allclose(errors, oracles.curve_error(predictions, Y_TEST), rtol=1e-8)


def test_errors_are_relative_to_the_variance_on_the_test_set():
    """With a huge penalty the predictions are zero: the mean of the target counts as error too."""
    model = ol.RandomFeatureAttention(heads=5, alpha=1e15, fit_intercept=False, random_state=0)
    curve = ol.learning_curve(model, X, Y, X_TEST, Y_TEST, [10])
    expected = np.mean(Y_TEST**2, axis=0) / np.var(Y_TEST, axis=0)
    np.testing.assert_allclose(curve.test_error[0], expected, rtol=1e-9)
    assert expected[1] > 10


def test_one_axis_of_targets_is_one_column(xp_array):
    model = MODELS["few heads"]
    curve = ol.learning_curve(
        model, xp_array(X), xp_array(Y[:, 0]), xp_array(X_TEST), xp_array(Y_TEST[:, 0]), SIZES
    )
    expected = ol.learning_curve(model, X, Y, X_TEST, Y_TEST, SIZES)
    assert isinstance(curve.test_error, np.ndarray)
    assert curve.test_error.shape == (len(SIZES), 1)
    check_curve(curve, expected.test_error[:, :1], expected.alpha[:, :1])


def test_many_targets_are_learned_as_one_by_one():
    model = clone(MODELS["many heads"]).set_params(alpha="loo")
    together = ol.learning_curve(model, X, Y, X_TEST, Y_TEST, SIZES)
    for i in range(2):
        alone = ol.learning_curve(model, X, Y[:, i], X_TEST, Y_TEST[:, i], SIZES)
        check_curve(alone, together.test_error[:, i : i + 1], together.alpha[:, i : i + 1])


@pytest.mark.parametrize("name", MODELS)
def test_ragged_and_masked_examples_give_the_same_curve(name):
    lengths = np.random.default_rng(0).integers(2, 5, 30)
    lengths[:2] = 4  # what reads tokens in a row must know the longest set from the start
    sets = ragged(list(lengths), dim=3)
    sets.X[~sets.mask] = 7.0
    y = np.array([tokens[1:, 0].mean() for tokens in sets.examples])[:, None]
    as_list = ol.learning_curve(
        MODELS[name], sets.examples[:20], y[:20], sets.examples[20:], y[20:], [8, 20]
    )
    padded = ol.learning_curve(
        MODELS[name],
        sets.X[:20],
        y[:20],
        sets.X[20:],
        y[20:],
        [8, 20],
        mask=sets.mask[:20],
        mask_test=sets.mask[20:],
    )
    check_curve(padded, as_list.test_error, as_list.alpha, rtol=1e-7)
    examples, test = sets.examples[:20], sets.examples[20:]
    check_curve(as_list, *refitted(MODELS[name], [8, 20], examples, y[:20], test, y[20:]))


@pytest.mark.parametrize("sizes", [(5, 10), range(5, 15, 5), np.array([5, 10])])
def test_sizes_may_be_any_sequence(sizes):
    curve = ol.learning_curve(MODELS["few heads"], X, Y, X_TEST, Y_TEST, sizes)
    np.testing.assert_array_equal(curve.sizes, [5, 10])
    expected = ol.learning_curve(MODELS["few heads"], X, Y, X_TEST, Y_TEST, [5, 10])
    np.testing.assert_array_equal(curve.test_error, expected.test_error)


def test_examples_beyond_the_last_size_are_not_used():
    longer = ol.learning_curve(MODELS["few heads"], X, Y, X_TEST, Y_TEST, [5, 10])
    exact = ol.learning_curve(MODELS["few heads"], X[:10], Y[:10], X_TEST, Y_TEST, [5, 10])
    np.testing.assert_array_equal(longer.test_error, exact.test_error)


def test_the_estimator_is_not_changed():
    state = np.random.default_rng(3)
    before = state.bit_generator.state
    model = ol.RandomFeatureAttention(heads=5, random_state=state)
    known = dict(vars(model))
    ol.learning_curve(model, X, Y, X_TEST, Y_TEST, SIZES)
    assert vars(model) == known
    assert state.bit_generator.state == before
    with pytest.raises(NotFittedError):
        check_is_fitted(model)


def test_float32_tensors_are_taken():
    torch = pytest.importorskip("torch")
    X32, Y32, test = (torch.tensor(array, dtype=torch.float32) for array in (X, Y, X_TEST))
    curve = ol.learning_curve(MODELS["few heads"], X32, Y32, test, Y_TEST, SIZES)
    expected = ol.learning_curve(
        MODELS["few heads"], to_numpy(X32), to_numpy(Y32), to_numpy(test), Y_TEST, SIZES
    )
    np.testing.assert_allclose(curve.test_error, expected.test_error, rtol=1e-3)


# How many examples are needed


def curve_of(*errors):
    """A curve at 10, 100 and 1,000 examples."""
    table = np.array(errors).T
    return LearningCurve(np.array([10, 100, 1000]), table, np.ones_like(table))


def test_between_two_sizes_the_error_is_a_power_of_the_size():
    curve = curve_of([1.0, 0.1, 1e-3], [1.0, 1.0, 0.01])
    np.testing.assert_allclose(curve.samples_needed(0.5), [10 * 2.0, 100 * 2**0.5], rtol=1e-12)
    np.testing.assert_allclose(curve.samples_needed(0.01), [10**2.5, 1000], rtol=1e-12)


def test_an_error_that_is_never_reached_needs_infinitely_many():
    np.testing.assert_array_equal(curve_of([1.0, 0.5, 0.2]).samples_needed(0.1), [np.inf])


def test_an_error_that_the_first_size_reaches_needs_no_more():
    np.testing.assert_array_equal(curve_of([0.1, 0.5, 0.2]).samples_needed(0.1), [10.0])


def test_the_first_time_counts():
    """What rises again later was still reached."""
    needed = curve_of([1.0, 0.01, 0.5]).samples_needed(0.1)
    np.testing.assert_allclose(needed, [10**1.5], rtol=1e-12)


def test_an_error_of_zero_is_reached_at_its_size():
    np.testing.assert_array_equal(curve_of([1.0, 0.0, 0.0]).samples_needed(0.1), [100.0])


# On a screen and as a plot


def plotted(curve, axes=None, **options):
    return curve.plot(Figure().subplots() if axes is None else axes, **options)


def test_a_curve_prints_as_a_table():
    lines = repr(curve_of([1.0, 0.1, 1e-5])).split("\n")
    assert lines[0] == "LearningCurve: 1 target, errors relative to its variance"
    assert [line.split() for line in lines[1:]] == [
        ["examples", "test", "error", "alpha"],
        ["10", "1", "1"],
        ["100", "0.1", "1"],
        ["1000", "1.0e-05", "1"],
    ]
    lines = repr(curve_of([1.0, 0.1, 0.01], [2.0, 0.2, 0.02])).split("\n")
    assert lines[0] == "LearningCurve: 2 targets, errors relative to their variance"
    assert lines[1].split("  ")[1:] == ["examples", "error 0", "error 1"]
    assert lines[2].split() == ["10", "1", "2"]


def test_notebooks_show_the_table():
    page = curve_of([1.0, 0.1, 1e-5])._repr_html_()
    assert "<td>1.0e-05</td>" in page
    assert "1 target, errors relative to its variance" in page


def test_a_plot_has_a_curve_for_every_target_on_logarithmic_scales():
    axes = plotted(curve_of([1.0, 0.1, 0.01], [2.0, 0.2, 0.02]))
    assert axes.get_xscale() == axes.get_yscale() == "log"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("examples", "test error / variance")
    first, second = axes.lines
    np.testing.assert_array_equal(first.get_xydata(), [[10, 1.0], [100, 0.1], [1000, 0.01]])
    np.testing.assert_array_equal(second.get_ydata(), [2.0, 0.2, 0.02])
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["target 0", "target 1"]


def test_one_target_has_a_legend_only_with_a_label():
    curve = curve_of([1.0, 0.1, 0.01])
    assert plotted(curve).get_legend() is None
    axes = plotted(curve, plotted(curve, label="attention"), label="network")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["attention", "network"]
    first, second = axes.lines
    assert first.get_color() != second.get_color()
    assert first.get_marker() != second.get_marker()


def test_several_targets_are_numbered_after_a_label():
    axes = plotted(curve_of([1.0, 0.1, 0.01], [2.0, 0.2, 0.02]), label="attention")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["attention target 0", "attention target 1"]


# What is refused


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ([10, 5], ValueError, r"sizes are \[10, 5\], expected at least one, in ascending order"),
        ([5, 5], ValueError, r"sizes are \[5, 5\], expected at least one, in ascending order"),
        ([], ValueError, r"sizes are \[\], expected at least one, in ascending order"),
        (np.array([9, 2]), ValueError, r"sizes are \[9, 2\], expected"),
        ([46], ValueError, "sizes go up to 46, expected at most 45, the examples of X"),
        ([0, 5], ValueError, "a size is 0, expected a whole number of at least 1"),
        ([2.5], TypeError, r"a size is 2\.5, expected a whole number of at least 1"),
        (None, TypeError, "sizes is None, expected a list of whole numbers"),
    ],
)
def test_sizes_ascend_up_to_the_number_of_examples(sizes, error, message):
    with pytest.raises(error, match=message):
        ol.learning_curve(MODELS["few heads"], X, Y, X_TEST, Y_TEST, sizes)


@pytest.mark.parametrize("constant", [0.0, 0.1])
def test_a_test_target_that_does_not_vary_is_refused(constant):
    flat = Y_TEST.copy()
    flat[:, 1] = constant
    message = "y_test is constant in target 1, expected targets that vary: errors are relative"
    with pytest.raises(ValueError, match=message):
        ol.learning_curve(MODELS["few heads"], X, Y, X_TEST, flat, [10])


def test_test_targets_are_as_many_as_those_of_the_fit():
    with pytest.raises(ValueError, match="y_test has 1 targets, expected 2 as y has"):
        ol.learning_curve(MODELS["few heads"], X, Y, X_TEST, Y_TEST[:, 0], [10])


def test_test_targets_are_as_many_as_the_test_examples():
    message = "y_test has 19 rows, expected 20: one for each example"
    with pytest.raises(ValueError, match=message):
        ol.learning_curve(MODELS["few heads"], X, Y, X_TEST, Y_TEST[1:], [10])


def test_test_targets_are_asked_for_by_their_name():
    with pytest.raises(ValueError, match="requires y_test to be passed, but the target y_test is"):
        ol.learning_curve(MODELS["few heads"], X, Y, X_TEST, None, [10])


def test_test_tokens_have_the_dimension_of_the_fit():
    with pytest.raises(ValueError, match="tokens of dimension 2, expected 3 as at fit"):
        ol.learning_curve(MODELS["few heads"], X, Y, X_TEST[:, :, :2], Y_TEST, [10])


@pytest.mark.parametrize(
    "estimator", [ol.RandomFeatureAttentionClassifier(), ol.AttentionFeatures(), Ridge()]
)
def test_only_the_ridge_regressions_of_this_package_have_curves(estimator):
    message = (
        f"estimator is a {type(estimator).__name__}, expected RandomFeatureAttention, "
        "RandomFeatureMLP or AttentionKernelRidge"
    )
    with pytest.raises(TypeError, match=message):
        ol.learning_curve(estimator, X, Y, X_TEST, Y_TEST, [10])
