import numpy as np
import pytest
from lab_cases import judged, measured

from onelayer import inputs
from onelayer.lab import learning_setup
from onelayer.lab.learning_setup import ORDERED

NAME = "order"


def as_predicted(model, examples, keys, dim, **_):
    if model == "rfmlp":
        return dict.fromkeys(ORDERED, 0.05)
    return {name: 1.05 * learning_setup.order_floor(name, dim, keys) for name in ORDERED}


def test_holds_as_predicted():
    assert judged(NAME, as_predicted) == ("holds", [])


@pytest.mark.parametrize("target", ORDERED)
@pytest.mark.parametrize(
    ("model", "factor", "statement"),
    [
        ("rfa", 0.85, "and not below"),
        ("rfa", 1.2, "and not below"),
        ("rfmlp", 3.0, "a network on all tokens"),
    ],
)
def test_every_check_can_fail(target, model, factor, statement):
    def measure(**cell):
        errors = as_predicted(**cell)
        return errors | {target: errors[target] * (factor if cell["model"] == model else 1)}

    outcome, failed = judged(NAME, measure)
    assert outcome == "fails"
    assert len(failed) == 1
    assert failed[0].startswith(target)
    assert statement in failed[0]


def test_attention_may_not_be_below_the_floor_at_any_size():
    def measure(**cell):
        errors = as_predicted(**cell)
        low = cell["model"] == "rfa" and cell["examples"] == 64
        return {name: error / 2 if low else error for name, error in errors.items()}

    outcome, failed = judged(NAME, measure)
    assert outcome == "fails"
    assert len(failed) == len(ORDERED)


def test_cannot_judge_one_model():
    assert judged(NAME, as_predicted, model="rfa") == ("undecided", [])


@pytest.mark.parametrize("keys", [3, 4])
@pytest.mark.parametrize("name", ORDERED)
def test_the_floor_is_what_the_mean_over_orders_leaves(name, keys):
    X = inputs.sphere(40_000, keys + 1, 3, seed=0)
    target = ORDERED[name](3)
    values = target(X)
    turns = [np.concatenate([X[:, :1], np.roll(X[:, 1:], i, axis=1)], axis=1) for i in range(keys)]
    blind = np.mean([target(turned) for turned in turns], axis=0)
    left = np.mean((values - blind) ** 2) / np.var(values)
    assert learning_setup.order_floor(name, 3, keys) == pytest.approx(left, abs=0.02)


@pytest.mark.slow
def test_measures_what_each_model_can_see():
    results = measured(NAME, dim=3, keys=2, heads=60, examples=[100, 300], seeds=1)
    most = results.where(examples=300)
    floors = {"one position": 0.5, "alternating sum": 1.0, "increasing sum": 0.1}
    for name, floor in floors.items():
        assert most.where(model="rfa").numbers(name) == pytest.approx(floor, abs=0.08)
        assert most.where(model="rfmlp").numbers(name) < 0.08
