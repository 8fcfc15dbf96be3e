import numpy as np
import pytest
from lab_cases import judged, measured

from onelayer import inputs
from onelayer.features.estimators import AttentionFeatures
from onelayer.features.kernels.functions import attention_kernel
from onelayer.lab.claims.kernel_limit import ALPHA, DISTANCES
from onelayer.lab.seeds import generator
from onelayer.theory.targets import average_power, correlation_weighted

NAME = "kernel-limit"


def as_predicted(heads, **_):
    return dict.fromkeys(DISTANCES, heads**-0.5)


def test_holds_as_predicted():
    assert judged(NAME, as_predicted) == ("holds", [])


@pytest.mark.parametrize("rate", [-0.35, -0.65])
@pytest.mark.parametrize("distance", DISTANCES)
@pytest.mark.parametrize("model", ["rfa", "brfa"])
def test_every_check_can_fail(model, distance, rate):
    def measure(**cell):
        off = {distance: cell["heads"] ** rate} if cell["model"] == model else {}
        return as_predicted(**cell) | off

    statement = f"{DISTANCES[distance]} of {model.upper()}: distance as M^-0.5, ± 0.1"
    assert judged(NAME, measure) == ("fails", [statement])


def test_cannot_judge_one_number_of_heads():
    assert judged(NAME, as_predicted, heads=16) == ("undecided", [])


@pytest.mark.slow
def test_measures_both_distances():
    tiny = {"heads": [20, 500], "dim": 3, "keys": 2, "examples": 30}
    results = measured(NAME, seeds=1, **tiny)
    X = inputs.sphere(530, 3, 3, generator(0, "inputs"))
    Y = [f(X[:30]) / np.sqrt(f.variance(2)) for f in (average_power(1, 3), _weighted())]
    for model, bias in (("rfa", 0.0), ("brfa", 1.0)):
        limit = attention_kernel(X, X[:30], bias=bias)
        for cell in results.where(model=model):
            drawn = generator(0, "model")
            features = AttentionFeatures(
                cell["heads"], bias, standardize=False, random_state=drawn
            ).fit_transform(X)
            finite = features @ features[:30].T
            assert cell["gram"] == pytest.approx(_distance(finite[:30], limit[:30]), rel=1e-8)
            both = [_regression(kernel, np.stack(Y, axis=1)) for kernel in (finite, limit)]
            assert cell["predictions"] == pytest.approx(_distance(*both), rel=1e-6)


def _weighted():
    return correlation_weighted(1, 3)


def _regression(kernel, targets):
    return kernel[30:] @ np.linalg.solve(kernel[:30] + ALPHA * np.eye(30), targets)


def _distance(found, limit):
    return np.linalg.norm(found - limit) / np.linalg.norm(limit)
