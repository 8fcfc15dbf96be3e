import pytest
from lab_cases import judged, measured

from onelayer.lab import learning_setup
from onelayer.theory import targets

NAME = "positions"
PREDICTED = {  # by encoding, four keys: one position (floor 0.75), alternating sum (1), average
    "none": (0.76, 1.0, 0.01),
    "sinusoidal": (0.6, 0.8, 0.02),
    "learned-random": (0.5, 0.7, 0.02),
    "onehot": (0.1, 0.1, 0.02),
}


def as_predicted(**changes):
    errors = PREDICTED | {name.replace("_", "-"): value for name, value in changes.items()}
    names = ("one position", "alternating sum", "average")
    return lambda positions, **_: dict(zip(names, errors[positions], strict=True))


def test_holds_as_predicted():
    assert judged(NAME, as_predicted()) == ("holds", [])


@pytest.mark.parametrize(
    ("changes", "statement"),
    [
        ({"none": (0.7, 1.0, 0.01)}, "one position: without"),
        ({"none": (0.76, 0.9, 0.01)}, "alternating sum: without"),
        ({"sinusoidal": (0.7, 0.8, 0.02)}, "one position: every"),
        ({"learned_random": (0.5, 0.95, 0.02)}, "alternating sum: every"),
        ({"onehot": (0.4, 0.1, 0.02)}, "one position: one-hot"),
        ({"onehot": (0.1, 0.6, 0.02)}, "alternating sum: one-hot"),
        ({"onehot": (0.1, 0.1, 0.005)}, "cost"),
        ({"sinusoidal": (0.6, 0.8, 0.2)}, "cost"),
    ],
)
def test_every_check_can_fail(changes, statement):
    outcome, failed = judged(NAME, as_predicted(**changes))
    assert outcome == "fails"
    assert len(failed) == 1
    assert statement in failed[0]


def test_judges_with_the_most_examples():
    def measure(examples, **cell):
        return as_predicted()(**cell) if examples == 256 else as_predicted()("none")

    assert judged(NAME, measure, examples=[256, 64])[0] == "holds"
    assert judged(NAME, measure, examples=[256, 1024])[0] == "fails"


def test_cannot_judge_without_all_encodings():
    assert judged(NAME, as_predicted(), positions=["none", "onehot"]) == ("undecided", [])


@pytest.mark.slow
def test_one_hot_positions_see_the_order():
    results = measured(NAME, dim=3, keys=2, heads=60, examples=300, seeds=1)
    blind, seen = results.where(positions="none"), results.where(positions="onehot")
    assert blind.numbers("one position") == pytest.approx(0.5, abs=0.1)
    assert blind.numbers("alternating sum") == pytest.approx(1.0, abs=0.1)
    assert seen.numbers("one position") < 0.1
    assert seen.numbers("alternating sum") < 0.1


@pytest.mark.slow
def test_average_is_the_target_that_needs_no_positions():
    tiny = {"dim": 3, "keys": 2, "heads": 20, "seeds": 1}
    results = measured(NAME, positions="onehot", examples=[50, 100], **tiny)
    model = learning_setup.make_model("rfa", 20, 3, 0, positions="onehot")
    curve = learning_setup.learning_curve(
        model, [targets.average_power(1, 3)], 2, [100], 0, test_examples=8000
    )
    (cell,) = results.where(examples=100)
    assert cell["average"] == pytest.approx(curve.test_error[0, 0], rel=1e-6)
