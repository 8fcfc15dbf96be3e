import numpy as np
import pytest
from lab_cases import judged, measured

from onelayer import inputs
from onelayer.features.estimators import RandomFeatureAttention
from onelayer.lab import learning_setup
from onelayer.lab.seeds import generator
from onelayer.theory import targets

NAME = "bias-structure"
PREDICTED = {  # by bias, with 300 examples: on the plain and on the rotated target
    "none": (0.4, 0.4),
    "identity": (0.2, 0.4),
    "identity x 2": (0.2, 0.4),
    "identity x 0.5": (0.3, 0.4),
    "sparse": (0.3, 0.4),
    "low rank": (0.3, 0.4),
    "rotation": (0.4, 0.2),
}


def as_predicted(changes=(), elsewhere=1.0):
    """With other numbers of examples the identity leaves `elsewhere` of the error without."""
    errors = PREDICTED | dict(changes)

    def measure(bias, examples, **_):
        plain, rotated = errors[bias]
        if examples != 300:
            plain = rotated = elsewhere if bias == "identity" else 1.0
        return {"plain": plain, "rotated": rotated}

    return measure


def test_holds_as_predicted():
    assert judged(NAME, as_predicted()) == ("holds", [])


def test_little_help_fails():
    partial = dict.fromkeys(("identity x 0.5", "sparse", "low rank"), (0.38, 0.4))
    little = {"identity": (0.35, 0.4), "rotation": (0.4, 0.35), **partial}
    assert judged(NAME, as_predicted(little)) == (
        "fails",
        ["the identity helps on the plain target, the rotation on the rotated one"],
    )


@pytest.mark.parametrize(
    ("bias", "errors", "statement"),
    [
        ("identity", (0.2, 0.3), "does not help"),
        ("rotation", (0.3, 0.2), "does not help"),
        ("rotation", (0.4, 0.3), "the right rotation"),
        ("rotation", (0.4, 0.1), "the right rotation"),
        ("identity x 0.5", (0.45, 0.4), "in part"),
        ("sparse", (0.45, 0.4), "in part"),
        ("low rank", (0.15, 0.4), "in part"),
        ("identity x 2", (0.45, 0.4), "twice"),
    ],
)
def test_every_check_can_fail(bias, errors, statement):
    outcome, failed = judged(NAME, as_predicted({bias: errors}))
    assert outcome == "fails"
    assert len(failed) == 1
    assert statement in failed[0]


def test_harm_with_other_numbers_of_examples_fails():
    outcome, failed = judged(NAME, as_predicted(elsewhere=1.1))
    assert outcome == "fails"
    assert len(failed) == 1
    assert "no harm" in failed[0]


def test_cannot_judge_without_all_biases_or_with_one_size():
    assert judged(NAME, as_predicted(), bias=["none", "identity"]) == ("undecided", [])
    assert judged(NAME, as_predicted(), examples=300) == ("undecided", [])


def direct(bias):
    """The error on the plain target with a bias on the token's coordinates, by the estimator."""
    X = inputs.sphere(2060, 3, 3, generator(0, "inputs"))
    y = targets.correlation_weighted(1, 3)(X)
    centre = np.zeros((4, 4))
    centre[:3, :3] = bias
    model = RandomFeatureAttention(
        20, centre, random_state=generator(0, "model"), **learning_setup.PAPER
    )
    left = y[60:] - model.fit(X[:60], y[:60]).predict(X[60:])
    return np.mean(left**2) / np.var(y[60:])


@pytest.mark.slow
def test_a_number_times_the_identity_is_the_bias_of_the_estimator():
    factors = {"none": 0.0, "identity": 1.0, "identity x 2": 2.0, "identity x 0.5": 0.5}
    tiny = {"dim": 3, "keys": 2, "heads": 20, "seeds": 1}
    results = measured(NAME, examples=[40, 60], **tiny)
    for name, factor in factors.items():
        (error,) = results.where(bias=name, examples=60).numbers("plain")
        assert error == pytest.approx(direct(factor * np.eye(3)), rel=1e-6)
    several = results.where(examples=60).numbers("plain")
    assert len(set(several)) == len(several)  # no two biases are the same


@pytest.mark.slow
def test_the_rotation_is_to_the_rotated_target_what_the_identity_is_to_the_plain_one():
    both = ["identity", "rotation"]
    results = measured(NAME, bias=both, dim=8, keys=4, heads=60, examples=[100, 200], seeds=4)
    identity, rotation = (results.where(bias=bias, examples=200) for bias in both)
    matched = np.median(rotation.numbers("rotated"))
    assert matched == pytest.approx(np.median(identity.numbers("plain")), rel=0.15)
    assert matched < 0.9 * np.median(rotation.numbers("plain"))
    assert matched < 0.9 * np.median(identity.numbers("rotated"))
