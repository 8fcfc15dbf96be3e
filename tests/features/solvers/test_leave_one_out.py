import numpy as np
import oracles
import pytest
from ridge_problems import solve

from onelayer import inputs
from onelayer.array.backend import to_numpy
from onelayer.data.sets import SetRules, as_sets
from onelayer.features import mlp_features
from onelayer.features.solvers import design as design_module
from onelayer.features.solvers import leave_one_out
from onelayer.features.solvers.design import Panels

FEATURES = 12
WEIGHTS = {"alike": None, "weighted": np.array([0.0, 1.0, 2.5, 0.3])}


def problem(n, weights=None, xp_array=np.asarray):
    """A design with weighted rows, its features without weights, and three targets.

    The targets have more or less noise, so that they want different penalties.
    """
    X = inputs.gaussian(n, 3, 2)
    neurons = mlp_features.draw(FEATURES, 3, 2, np.random.default_rng(5))
    phi = Panels(neurons, as_sets(X)).by_rows(slice(0, n))
    rng = np.random.default_rng(1)
    targets = phi @ rng.standard_normal((FEATURES, 3))
    targets += rng.standard_normal((n, 3)) * np.array([1.0, 0.03, 0.3])
    scale = None if weights is None else xp_array(np.sqrt(weights))
    return Panels(neurons, as_sets(xp_array(X)), scale), phi, targets


def solved(design, targets, weights, xp_array=np.asarray, fit_intercept=False):
    rows = targets if weights is None else targets * np.sqrt(weights)[:, None]
    sizes = [design.rows]
    ((coefficients, alphas, _),) = solve(
        design, xp_array(rows), None, sizes, fit_intercept=fit_intercept
    )
    return to_numpy(coefficients), alphas


def with_constant(phi, targets, alpha, weights):
    """What leaving out each example gives where a constant feature has no penalty."""
    columns = np.concatenate([phi, np.ones((len(phi), 1))], axis=1)
    return oracles.left_out_error(columns, targets, [*[alpha] * phi.shape[1], 0.0], weights)


def weights_of(kind, n):
    return None if WEIGHTS[kind] is None else np.resize(WEIGHTS[kind], n)


@pytest.fixture
def errors_seen(monkeypatch):
    """The penalties that were tried, and the errors on which they were judged."""
    seen = []

    def with_the_best(values, vectors, rotated, path, errors):
        seen.append((path, errors))
        return choose(values, vectors, rotated, path, errors)

    choose = leave_one_out._with_the_best
    monkeypatch.setattr(leave_one_out, "_with_the_best", with_the_best)
    return seen


# More features than examples: by the kernel; fewer: by the features


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("n", [1, 9, 18])
def test_closed_form_is_what_leaving_out_each_example_gives(xp_array, errors_seen, n, kind):
    weights = np.ones(1) if n == 1 else weights_of(kind, n)
    design, phi, targets = problem(n, weights, xp_array)
    solved(design, targets, weights, xp_array)
    ((path, errors),) = errors_seen
    assert errors.shape == (path.size, 3)
    root = np.ones(n) if weights is None else np.sqrt(weights)
    size = abs(root[:, None] * targets).max(axis=0)  # errors are relative to it
    for alpha, got in list(zip(path, errors * size**2, strict=True))[::5]:
        expected = oracles.left_out_error(phi, targets, alpha, weights)
        np.testing.assert_allclose(got, expected, rtol=1e-8 + 1e-16 * path[-1] / alpha)


@pytest.mark.slow
@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("n", [9, 18])
def test_closed_form_with_an_intercept(xp_array, errors_seen, n, kind):
    weights = weights_of(kind, n)
    design, phi, targets = problem(n, weights, xp_array)
    targets = targets + 20.0
    _, alphas = solved(design, targets, weights, xp_array, fit_intercept=True)
    ((path, errors),) = errors_seen
    exact = np.array([with_constant(phi, targets, alpha, weights) for alpha in path])
    ratio = exact / errors  # errors are relative to the size of the targets
    for alpha, got in zip(path, ratio / ratio[-1], strict=True):
        np.testing.assert_allclose(got, 1.0, rtol=1e-8 + 1e-16 * path[-1] / alpha)
    np.testing.assert_allclose(alphas, path[np.argmin(exact, axis=0)], rtol=1e-9)


def test_one_example_and_its_intercept_leave_nothing_to_choose():
    design, _, targets = problem(1)
    ((weights, alphas, intercept),) = solve(design, targets, None, [1], fit_intercept=True)
    np.testing.assert_array_equal(weights, np.zeros((FEATURES, 3)))
    np.testing.assert_allclose(intercept, targets[0], rtol=1e-12)
    assert np.isfinite(alphas).all()


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("n", [9, 18])
def test_the_best_penalty_of_the_path_is_chosen_for_every_target(n, kind):
    weights = weights_of(kind, n)
    design, phi, targets = problem(n, weights)
    coefficients, alphas = solved(design, targets, weights)
    root = np.ones(n) if weights is None else np.sqrt(weights)
    largest = np.linalg.norm(root[:, None] * phi, ord=2) ** 2
    path = largest * 10.0 ** np.arange(-12, 1.01, 0.25)
    errors = [oracles.left_out_error(phi, targets, alpha, weights) for alpha in path]
    np.testing.assert_allclose(alphas, path[np.argmin(errors, axis=0)], rtol=1e-10)
    assert len(set(alphas)) > 1
    for target, alpha in enumerate(alphas):
        expected = oracles.ridge_weights(phi, targets, alpha, weights)[:, target]
        np.testing.assert_allclose(coefficients[:, target], expected, rtol=1e-6, atol=1e-7)


def test_every_size_of_a_curve_chooses_for_itself():
    design, _, targets = problem(30)
    sizes = [5, 12, 20, 30]
    found = solve(design, targets, None, sizes)
    for size, (coefficients, alphas, _) in zip(sizes, found, strict=True):
        alone, its_alphas = solved(problem(size)[0], targets[:size], None)
        np.testing.assert_allclose(alphas, its_alphas, rtol=1e-9)
        np.testing.assert_allclose(coefficients, alone, rtol=1e-6, atol=1e-8)
    assert len({float(alphas[0]) for _, alphas, _ in found}) > 1


def test_narrow_panels_choose_the_same(monkeypatch):
    design, _, targets = problem(30)
    expected = solve(design, targets, None, [20, 30])
    monkeypatch.setattr(design_module, "PANEL_BYTES", 4 * 8 * FEATURES)
    assert len(design.row_panels()) > 2
    for (a, alphas, _), (b, others, _) in zip(
        solve(design, targets, None, [20, 30]), expected, strict=True
    ):
        np.testing.assert_allclose(alphas, others, rtol=1e-12)
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def test_duplicate_examples_are_no_trouble():
    """Their kernel is singular: a penalty is chosen that makes the problem a good one."""
    kernel = np.ones((6, 6))
    dual, alphas, _ = leave_one_out.by_kernel(kernel, np.array([[1.0], [2.0]] * 3))
    np.testing.assert_allclose(kernel @ dual, np.full((6, 1), 1.5), rtol=0.1)
    assert 0 < alphas[0] < 6


def test_features_that_are_all_zero_predict_zero():
    dual, alphas, _ = leave_one_out.by_kernel(np.zeros((3, 3)), np.ones((3, 1)))
    assert np.isfinite(dual).all()
    assert alphas[0] > 0


def test_an_example_that_decides_alone_is_not_divided_by_zero():
    """A feature that one example has alone: without the example nothing is known of it."""
    silent_but_one = mlp_features.MLPMap(np.array([[1.0], [-0.5]]), 1)
    X = np.zeros((4, 1, 1))
    X[2] = 1.0
    design = Panels(silent_but_one, as_sets(X, rules=SetRules(1)))
    targets = np.array([[0.0], [0.0], [1.0], [0.0]])
    ((weights, alphas, _),) = solve(design, targets, None, [4])
    assert np.isfinite(weights).all()
    assert np.isfinite(alphas).all()
