"""Models that compute on another device than the one where their examples are."""

import re

import numpy as np
import places
import pytest
from example_sets import ragged, random_mask
from sklearn.base import clone

import onelayer as ol
from onelayer import inputs
from onelayer.array import backend, linalg
from onelayer.features.solvers import design as design_module
from onelayer.features.solvers import ridge

torch = pytest.importorskip("torch")

X, X_TEST = inputs.sphere(90, 4, 3), inputs.sphere(50, 4, 3, seed=1)
Y = np.stack([X[:, 1:, 0].mean(axis=1), X[:, 0, 1] * X[:, 1, 2]], axis=1)
Y += 0.1 * np.random.default_rng(0).standard_normal(Y.shape)
Y_TEST = np.stack([X_TEST[:, 1:, 0].mean(axis=1), X_TEST[:, 0, 1] * X_TEST[:, 1, 2]], axis=1)
MASK = random_mask(np.random.default_rng(4), 90, 4)
WEIGHT = np.random.default_rng(2).uniform(0, 2, 90)
LABELS = np.array(["low", "mid", "top"])[np.digitize(Y[:, 0], [-0.1, 0.1])]

MODELS = {
    "attention": ol.RandomFeatureAttention(heads=10, alpha=0.1, random_state=0),
    "chosen": ol.RandomFeatureAttention(heads=10, alpha="loo", random_state=0),
    "many heads": ol.RandomFeatureAttention(heads=50, alpha=0.1, random_state=0),
    "deep": ol.RandomFeatureAttention(
        heads=10, alpha=0.1, positions="sinusoidal", depth=2, random_state=0
    ),
    "network": ol.RandomFeatureMLP(features=40, alpha=0.1, random_state=0),
    "kernel": ol.AttentionKernelRidge(alpha=0.1),
    "biased kernel": ol.AttentionKernelRidge(bias=1.0, alpha=0.1),
}


def model_of(name, **parameters):
    return clone(MODELS[name]).set_params(**parameters)


@pytest.fixture
def gpu(monkeypatch):
    """The name of a GPU; where there is none, torch on the CPU stands in for it."""
    if torch.cuda.is_available():
        return "cuda"
    place, check = backend.place, backend.check_device

    def stand_in(array, device):
        tensor = torch.as_tensor(backend.to_numpy(array).copy())
        return tensor if device == "cuda" else place(array, device)

    monkeypatch.setattr(backend, "place", stand_in)
    monkeypatch.setattr(backend, "check_device", lambda device: device == "cuda" or check(device))
    return "cuda"


@pytest.fixture
def products(monkeypatch):
    """The kinds of arrays of which Gram matrices are made."""
    seen, add = set(), linalg.add_gram

    def add_gram(total, rows):
        seen.add(type(rows))
        return add(total, rows)

    monkeypatch.setattr(linalg, "add_gram", add_gram)
    return seen


def close(found, expected, atol=1e-10):
    assert type(found) is type(expected)
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


# On a GPU


@pytest.mark.parametrize("name", MODELS)
def test_results_are_the_same_and_come_back_to_the_examples(gpu, name):
    here = model_of(name).fit(X, Y, sample_weight=WEIGHT, mask=MASK)
    model = model_of(name, device=gpu).fit(X, Y, sample_weight=WEIGHT, mask=MASK)
    kept = "dual_coef_" if "kernel" in name else "coef_"
    close(getattr(model, kept), getattr(here, kept))
    np.testing.assert_allclose(model.alpha_, here.alpha_, rtol=1e-10)
    close(model.predict(X_TEST), here.predict(X_TEST))
    close(model.predict(X, mask=MASK), here.predict(X, mask=MASK))
    assert model.score(X_TEST, Y_TEST) == pytest.approx(here.score(X_TEST, Y_TEST), abs=1e-10)
    close(model.set_params(device=None).predict(X_TEST), here.predict(X_TEST))


@pytest.mark.parametrize("name", MODELS)
def test_curves_are_the_same(gpu, name):
    sizes = [10, 40, 41, 90]
    expected = ol.learning_curve(model_of(name), X, Y, X_TEST, Y_TEST, sizes)
    curve = ol.learning_curve(model_of(name, device=gpu), X, Y, X_TEST, Y_TEST, sizes)
    close(curve.test_error, expected.test_error)


def test_a_curve_in_float32_with_corrections_is_the_same(gpu, monkeypatch):
    expected = ol.learning_curve(model_of("many heads"), X, Y, X_TEST, Y_TEST, [10, 90])
    monkeypatch.setattr(ridge, "_MIXED_FROM", 0)
    model = model_of("many heads", device=gpu)
    curve = ol.learning_curve(model, X, Y, X_TEST, Y_TEST, [10, 90])
    close(curve.test_error, expected.test_error, atol=1e-8)


@pytest.mark.parametrize("name", ["attention", "many heads", "network"])
def test_features_are_computed_there(gpu, products, name):
    model_of(name, device=gpu).fit(X, Y)
    assert products == {torch.Tensor}


def test_lists_of_sets_are_moved_too(gpu):
    sets = ragged([2, 4, 3, 3, 2, 4], dim=3)
    for name in ("attention", "kernel"):
        expected = model_of(name).fit(sets.examples, Y[:6]).predict(sets.examples)
        close(model_of(name, device=gpu).fit(sets.examples, Y[:6]).predict(sets.examples), expected)


def test_classes_and_features_are_the_same(gpu, monkeypatch):
    here = ol.RandomFeatureAttentionClassifier(heads=10, random_state=0).fit(X, LABELS)
    model = clone(here).set_params(device=gpu).fit(X, LABELS)
    close(model.decision_function(X), here.decision_function(X))
    np.testing.assert_array_equal(model.predict(X), here.predict(X))
    features = ol.AttentionFeatures(heads=3, random_state=0)
    expected = features.fit_transform(X, mask=MASK)
    monkeypatch.setattr(design_module, "PANEL_BYTES", 8 * 12 * 20)  # twenty examples
    close(features.set_params(device=gpu).fit_transform(X, mask=MASK), expected)


def test_tensors_come_back_as_tensors_to_where_they_were(gpu):
    model = model_of("attention", device=gpu).fit(torch.tensor(X), torch.tensor(Y))
    predictions = model.predict(torch.tensor(X_TEST))
    for array in (model.coef_, predictions):
        assert isinstance(array, torch.Tensor)
        assert array.device == torch.device("cpu")
    expected = model_of("attention").fit(X, Y).predict(X_TEST)
    np.testing.assert_allclose(predictions.numpy(), expected, rtol=0, atol=1e-10)


def test_precision_is_that_of_the_examples(gpu):
    single, test = X.astype("f4"), X_TEST.astype("f4")
    predictions = model_of("attention", device=gpu).fit(single, Y).predict(test)
    assert predictions.dtype == np.float32
    close(predictions, model_of("attention").fit(single, Y).predict(test), atol=1e-4)


@pytest.mark.parametrize("kind", ["file", "function", "dask"])
@pytest.mark.parametrize("name", ["attention", "chosen", "kernel"])
def test_examples_elsewhere_are_moved_chunk_by_chunk(request, gpu, products, kind, name):
    there = places.place(kind, request)
    expected = model_of(name).fit(X, Y, sample_weight=WEIGHT, mask=MASK).predict(X_TEST)
    products.clear()
    model = model_of(name, device=gpu)
    model.fit(there(X), there(Y), sample_weight=there(WEIGHT), mask=there(MASK))
    close(places.brought(model.predict(there(X_TEST))), expected)
    assert products <= {torch.Tensor}
    curve = ol.learning_curve(model, there(X), Y, there(X_TEST), Y_TEST, [10, 90])
    here = ol.learning_curve(model_of(name), X, Y, X_TEST, Y_TEST, [10, 90])
    close(curve.test_error, here.test_error)


# On the CPU


@pytest.mark.parametrize("name", MODELS)
def test_the_cpu_is_where_numpy_is(name):
    expected = model_of(name).fit(X, Y).predict(X_TEST)
    found = model_of(name, device="cpu").fit(X, Y).predict(X_TEST)
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, expected)


def test_tensors_may_be_asked_to_stay_on_the_cpu():
    expected = model_of("attention").fit(torch.tensor(X), Y).predict(torch.tensor(X_TEST))
    model = model_of("attention", device="cpu").fit(torch.tensor(X), Y)
    assert torch.equal(model.predict(torch.tensor(X_TEST)), expected)


# What is refused

ESTIMATORS = [
    *MODELS.values(),
    ol.RandomFeatureAttentionClassifier(heads=5),
    ol.AttentionFeatures(heads=5),
]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:77", "device='cuda:77' was asked for, but torch sees no such GPU here"),
        ("tpu", "device='tpu' is unknown, expected 'cpu' or 'cuda'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(estimator, device, message):
    model = clone(estimator).set_params(device=device)
    with pytest.raises(ValueError, match=re.escape(message)):
        model.fit(X, LABELS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="device='cuda' was asked for, but torch sees no such GPU"):
        model_of("attention", device="cuda").fit(X, Y)


def test_a_gpu_is_not_for_examples_on_a_cluster(gpu, cluster):
    message = (
        "device='cuda' was asked for, but X is on a Dask cluster, expected device=None: "
        "its workers compute where the examples are"
    )
    fitted = model_of("attention", device=gpu).fit(X, Y)
    features = ol.AttentionFeatures(heads=3, device=gpu)
    for use in (lambda X: fitted.predict(X), lambda X: fitted.fit(X, Y), features.fit):
        with pytest.raises(ValueError, match=message):
            use(places.in_dask(X))
