import numpy as np
import pytest
from lab_cases import judged, measured

from onelayer import inputs
from onelayer.lab.claims import learned_attention as claim
from onelayer.lab.seeds import generator
from onelayer.layer import AttentionLayer

NAME = "learned-attention"
SIZES = (16, 32, 64, 128)  # 2, 4, 8 and 16 equations per unknown
FLAT = {
    "refine": (1e-3, 1e-20, 1e-20, 1e-20),
    "gradient descent": (0.1, 0.01, 1e-4, 1e-4),
    "random features": (0.2, 0.1, 0.05, 0.02),
}
SHARP = {
    "refine": (1e-20, 1e-20, 1e-20, 1e-20),
    "gradient descent": (1.0, 1e-20, 1e-20, 1e-20),
    "random features": (0.8, 0.7, 0.6, 0.5),
}


def as_predicted(flat=(), sharp=()):
    errors = {0.1: FLAT | dict(flat), 2.0: SHARP | dict(sharp)}

    def measure(method, sharpness, examples, **_):
        return {"error": errors[sharpness][method][SIZES.index(examples)]}

    return measure


def test_holds_as_predicted():
    assert judged(NAME, as_predicted()) == ("holds", [])


@pytest.mark.parametrize(
    ("changes", "statement"),
    [
        ({"sharp": {"refine": (1e-20, 1e-20, 1e-9, 1e-20)}}, "refine is exact"),
        ({"flat": {"refine": (1e-3, 1e-9, 1e-20, 1e-20)}}, "refine is exact"),
        ({"sharp": {"random features": (0.8, 0.09, 0.05, 0.02)}}, "far off"),
        (
            {"sharp": {"refine": (0.5, 1e-20, 1e-20, 1e-20), "gradient descent": (0.0,) * 4}},
            "gradient descent needs",
        ),
        ({"sharp": {"gradient descent": (1.0, 0.5, 0.5, 0.5)}}, "gradient descent needs"),
        ({"flat": {"random features": (0.2, 0.1, 0.1, 0.1)}}, "come near"),
    ],
)
def test_every_check_can_fail(changes, statement):
    outcome, failed = judged(NAME, as_predicted(**changes))
    assert outcome == "fails"
    assert len(failed) == 1
    assert statement in failed[0]


@pytest.mark.parametrize(
    "changes",
    [
        {"method": ["refine", "random features"]},
        {"sharpness": 2.0},
        {"examples": 64},
        {"examples": [16, 32], "heads": 8},
    ],
)
def test_cannot_judge_without_all_that_is_compared(changes):
    assert judged(NAME, as_predicted(), **changes) == ("undecided", [])


TINY = {"dim": 3, "tokens": 3, "heads": 1, "random_heads": 20, "steps": 300, "seeds": 1}


@pytest.mark.slow
def test_refine_and_gradient_descent_learn_what_random_features_do_not():
    results = measured(NAME, sharpness=2.0, examples=40, **TINY)
    error = {cell["method"]: cell["error"] for cell in results}
    assert error["refine"] < 1e-20
    assert error["gradient descent"] < 1e-3
    assert 0.02 < error["random features"] < 1


def test_random_features_read_every_row_as_a_query():
    layer = AttentionLayer.random(heads=2, dim=3, seed=0)
    X = inputs.gaussian(5, 4, 3, seed=1)
    rows = claim._queries(X) * np.sqrt(3)
    assert rows.shape == (20, 5, 3)
    # A query that is in front of its keys, and so counts once more: masked it does not.
    outputs = layer(rows, mask=np.tile(np.arange(5) > 0, (20, 1)))[:, 0]
    np.testing.assert_allclose(outputs, layer(X).reshape(-1, 3), atol=1e-12)


def test_the_scale_of_the_layer_is_that_of_its_scores():
    layer = AttentionLayer.random(heads=1, dim=6, scale=2.0, seed=0)
    X = claim._tokens(4000, 2, 6, generator(0, "inputs"))
    scores = np.einsum("nd,de,ne->n", X[:, 0], layer.attention[0], X[:, 1])
    assert scores.std() == pytest.approx(2.0, rel=0.05)


def test_equations_per_unknown_counts_outputs_and_weights():
    results = measured(NAME, method="refine", sharpness=2.0, examples=12, **TINY)
    assert claim.equations_per_unknown(results, 12) == 12 * 3 * 3 / (9 + 9)


# Gradient descent


def test_the_loss_is_that_of_the_layer():
    layer, other = (AttentionLayer.random(heads=2, dim=3, seed=seed) for seed in (0, 1))
    X = inputs.gaussian(6, 4, 3, seed=2)
    Y = other(X)
    loss, _ = claim.loss(layer.attention, layer.projection, X, Y)
    assert loss == pytest.approx(np.sum((layer(X) - Y) ** 2) / np.sum(Y**2), rel=1e-12)


def test_gradients_are_finite_differences():
    layer = AttentionLayer.random(heads=2, dim=3, out_dim=2, seed=0)
    X = inputs.gaussian(6, 4, 3, seed=2)
    Y = np.random.default_rng(3).standard_normal((6, 4, 2))
    weights = [layer.attention, layer.projection]
    _, gradients = claim.loss(*weights, X, Y)
    for which, gradient in enumerate(gradients):
        for index in np.ndindex(gradient.shape):
            moved = []
            for step in (1e-5, -1e-5):
                changed = [weight.copy() for weight in weights]
                changed[which][index] += step
                moved.append(claim.loss(*changed, X, Y)[0])
            assert gradient[index] == pytest.approx((moved[0] - moved[1]) / 2e-5, abs=1e-8)


def test_more_steps_come_closer():
    layer = AttentionLayer.random(heads=1, dim=3, seed=0)
    X = inputs.gaussian(30, 3, 3, seed=1)
    Y = layer(X)
    left = []
    for steps in (10, 100, 1000):
        found = claim.descend(X, Y, 1, steps, np.random.default_rng(0))
        left.append(np.sum((found(X) - Y) ** 2) / np.sum(Y**2))
    assert left[0] > left[1] > left[2]
    assert left[2] < 1e-8
