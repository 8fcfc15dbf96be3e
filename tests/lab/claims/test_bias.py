import pytest
from lab_cases import judged, measured

from onelayer import inputs
from onelayer.features.estimators import RandomFeatureAttention
from onelayer.lab import learning_setup
from onelayer.lab.claims.bias import LINEAR, WEIGHTED
from onelayer.lab.seeds import generator
from onelayer.theory.targets import correlation_weighted

NAME = "bias"
SIZES = [64, 128, 256]


def as_predicted(model, **_):
    weighted, linear = (0.4, 0.5) if model == "brfa" else (0.5, 0.1)
    curves = dict.fromkeys(WEIGHTED.values(), [weighted] * 3)
    return {"sizes": SIZES, LINEAR: [linear] * 3, **curves}


def changed(target, errors):
    """As predicted, but for the curve of the bias on one target."""

    def measure(**cell):
        curves = as_predicted(**cell)
        return curves | ({target: errors} if cell["model"] == "brfa" else {})

    return measure


def test_holds_as_predicted():
    assert judged(NAME, as_predicted) == ("holds", [])


def test_help_at_one_size_is_enough():
    assert judged(NAME, changed("f_{2,2}", [0.9, 0.44, 0.52])) == ("holds", [])


@pytest.mark.parametrize("target", WEIGHTED.values())
@pytest.mark.parametrize(
    ("errors", "statement"),
    [
        ([0.46, 0.46, 0.46], "the bias helps on {} somewhere"),
        ([0.4, 0.4, 0.56], "with the most examples it hurts on none"),
    ],
)
def test_every_check_can_fail(target, errors, statement):
    outcome, (failed,) = judged(NAME, changed(target, errors))
    assert outcome == "fails"
    assert failed.startswith(statement.format(target))


def test_help_where_nothing_is_to_gain_fails():
    outcome, (failed,) = judged(NAME, changed(LINEAR, [0.5, 0.08, 0.5]))
    assert outcome == "fails"
    assert failed.startswith("it helps nowhere on f_{1,1}")


def test_seeds_are_compared_one_by_one():
    """Hard and easy examples are so for both models: the ratio is that of a seed."""

    def measure(model, seed, **_):
        curves = as_predicted(model)
        return {k: v if k == "sizes" else [x * 10**seed for x in v] for k, v in curves.items()}

    assert judged(NAME, measure) == ("holds", [])


def test_cannot_judge_one_model():
    assert judged(NAME, as_predicted, model="rfa") == ("undecided", [])


@pytest.mark.slow
def test_measures_learning_curves():
    results = measured(NAME, dim=3, keys=2, heads=30, examples=100, seeds=1)
    X = inputs.sphere(100 + learning_setup.TEST_EXAMPLES, 3, 3, generator(0, "inputs"))
    y = correlation_weighted(2, 3)(X)
    for cell, bias in zip(results, (0.0, 1.0), strict=True):
        assert cell["sizes"] == [64, 100]
        drawn = generator(0, "model")
        fitted = RandomFeatureAttention(30, bias=bias, random_state=drawn, **learning_setup.PAPER)
        score = fitted.fit(X[:100], y[:100]).score(X[100:], y[100:])
        assert cell["f_{2,2}"][-1] == pytest.approx(1 - score, rel=1e-6)
