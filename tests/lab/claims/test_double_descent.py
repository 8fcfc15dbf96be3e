import pytest
from lab_cases import judged, measured

from onelayer import inputs
from onelayer.features.estimators import RandomFeatureAttention
from onelayer.lab import learning_setup
from onelayer.lab.seeds import generator
from onelayer.theory import targets

NAME = "double-descent"
HEADS = (4, 8, 16, 32, 64, 128, 256, 512)  # 64 have as many parameters as there are examples
FREE = dict(zip(HEADS, (0.6, 0.5, 0.4, 0.5, 30.0, 0.5, 0.3, 0.2), strict=True))
CHOSEN = dict(zip(HEADS, (0.6, 0.5, 0.4, 0.3, 0.2, 0.2, 0.2, 0.2), strict=True))


def as_predicted(free=(), chosen=()):
    errors = {"almost none": FREE | dict(free), "leave-one-out": CHOSEN | dict(chosen)}
    return lambda penalty, heads, **_: {"error": errors[penalty][heads]}


def test_holds_as_predicted():
    assert judged(NAME, as_predicted()) == ("holds", [])


@pytest.mark.parametrize(
    ("changes", "statement"),
    [
        ({"free": {64: 0.5, 128: 30.0}}, "peaks where"),
        ({"free": {64: 0.7, 512: 0.2}}, "times the lowest error with fewer heads"),
        ({"free": {512: 0.45}}, "no larger than"),
        ({"chosen": {64: 0.35}}, "leave-one-out"),
    ],
)
def test_every_check_can_fail(changes, statement):
    outcome, failed = judged(NAME, as_predicted(**changes))
    assert outcome == "fails"
    assert len(failed) == 1
    assert statement in failed[0]


def test_an_error_that_stays_high_beyond_the_peak_fails():
    outcome, failed = judged(NAME, as_predicted(free={512: 20.0}))
    assert outcome == "fails"
    assert len(failed) == 2  # nor is it below the lowest before the peak
    assert "falls again" in failed[0]


@pytest.mark.parametrize(
    "changes",
    [{"heads": 64}, {"heads": [4, 8]}, {"heads": [256, 512]}, {"penalty": "leave-one-out"}],
)
def test_cannot_judge_without_both_sides_and_both_penalties(changes):
    assert judged(NAME, as_predicted(), **changes) == ("undecided", [])


def test_fits_noise_and_is_tested_without():
    (cell,) = measured(
        NAME, penalty="almost none", heads=3, examples=40, dim=3, keys=2, noise=0.5, seeds=1
    )
    target = targets.correlation_weighted(1, 3)
    X = inputs.sphere(2040, 3, 3, generator(0, "inputs"))
    y = target(X)
    noise = generator(0, "noise").standard_normal(40) * 0.5 * target.variance(2) ** 0.5
    model = RandomFeatureAttention(
        3, alpha=1e-9, random_state=generator(0, "model"), **learning_setup.PAPER
    )
    left = y[40:] - model.fit(X[:40], y[:40] + noise).predict(X[40:])
    assert cell["error"] == pytest.approx((left**2).mean() / y[40:].var(), rel=1e-6)


@pytest.mark.slow
def test_peaks_where_parameters_equal_examples():
    results = measured(NAME, heads=[5, 20, 80], examples=80, dim=3, keys=3, seeds=2)
    few, equal, many = (
        results.where(penalty="almost none", heads=m).numbers("error") for m in (5, 20, 80)
    )
    assert equal.min() > 3 * max(few.max(), many.max())
    assert results.where(penalty="leave-one-out").numbers("error").max() < 1.2
