import numpy as np
import pytest

from onelayer import inputs
from onelayer.features.estimators import RandomFeatureAttention, RandomFeatureMLP
from onelayer.features.learning_curves import LearningCurve
from onelayer.lab import learning_setup
from onelayer.lab.seeds import generator
from onelayer.theory.targets import average_power, correlation_weighted

CHOSEN = [average_power(1, 3), correlation_weighted(1, 3)]


def test_models_have_as_many_trained_parameters():
    attention = {name: learning_setup.make_model(name, 10, 3, seed=0) for name in ("rfa", "brfa")}
    assert all(type(model) is RandomFeatureAttention for model in attention.values())
    assert [model.bias for model in attention.values()] == [0.0, 1.0]
    network = learning_setup.make_model("rfmlp", 10, 3, seed=0)
    assert type(network) is RandomFeatureMLP
    assert network.features == 10 * (3 + 1)
    assert network.alpha == attention["rfa"].alpha == "loo"


def test_options_of_attention_come_last():
    model = learning_setup.make_model("rfa", 10, 3, 0, 0.1, bias=0.5, positions="onehot")
    assert (model.alpha, model.bias, model.positions) == (0.1, 0.5, "onehot")


def test_a_curve_has_the_errors_of_fits():
    curve = learning_setup.learning_curve(
        learning_setup.make_model("rfa", 20, 3, seed=4), CHOSEN, 2, [10, 30], seed=4
    )
    X = inputs.sphere(30 + learning_setup.TEST_EXAMPLES, 3, 3, generator(4, "inputs"))
    for i, n in enumerate((10, 30)):
        for j, target in enumerate(CHOSEN):
            y = target(X)
            model = learning_setup.make_model("rfa", 20, 3, seed=4).fit(X[:n], y[:n])
            error = 1 - model.score(X[30:], y[30:])
            assert curve.test_error[i, j] == pytest.approx(error, rel=1e-6)


def test_noise_is_in_what_is_learned_from_alone():
    """A model that predicts next to nothing has the same error whatever it learned from."""

    def error(noise):
        model = learning_setup.make_model("rfa", 20, 3, 0, alpha=1e9)
        return learning_setup.learning_curve(model, CHOSEN, 2, [50], seed=0, noise=noise).test_error

    np.testing.assert_allclose(error(0.0), error(3.0), rtol=1e-3)


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_noise_is_relative_to_the_target(monkeypatch, noise):
    learned = {}
    monkeypatch.setattr(
        learning_setup.ol,
        "learning_curve",
        lambda model, X, Y, *rest: learned.update({len(X): (X, Y)}),
    )
    learning_setup.learning_curve(
        learning_setup.make_model("rfa", 2, 3, 0), CHOSEN, 4, [20_000], seed=0, noise=noise
    )
    X, Y = learned[20_000]
    for j, target in enumerate(CHOSEN):
        added = np.std(Y[:, j] - target(X)) / np.std(target(X))
        assert added == pytest.approx(noise, rel=0.05)


def test_sizes_end_with_the_largest():
    assert learning_setup.sizes_up_to(16) == [16]
    assert learning_setup.sizes_up_to(128, per_octave=1) == [16, 32, 64, 128]
    assert learning_setup.sizes_up_to(10, least=4, per_octave=1) == [4, 8, 10]


def test_needed_examples_are_by_the_name_of_the_target():
    errors = np.array([[1.0, 1.0], [0.01, 0.5]])
    curve = LearningCurve(np.array([10, 1000]), errors, alpha=np.ones((2, 2)))
    needed = learning_setup.needed(curve, CHOSEN, 0.1)
    assert needed == {"f_{1,1}": pytest.approx(100.0), "f_{2,1}": None}
