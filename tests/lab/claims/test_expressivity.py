import pytest
from lab_cases import judged, measured

from onelayer import inputs
from onelayer.lab import learning_setup
from onelayer.lab.claims.expressivity import TARGETS
from onelayer.lab.seeds import generator

NAME = "expressivity"


def as_predicted(heads, **_):
    return dict.fromkeys(TARGETS, 0.5 * (2 / heads) ** 1.5)


def test_holds_as_predicted():
    assert judged(NAME, as_predicted) == ("holds", [])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("heads", "error", "statement"),
    [
        (8, 0.6, "the error on {} falls with every step in the number of heads"),
        (32, 0.0011, "in the last step errors fall as M^-0.9 or faster, predicted M^-1"),
        (128, 0.0201 / 25, "with the most heads at most 0.02 of the variance is left"),
    ],
)
def test_every_check_can_fail(target, heads, error, statement):
    factor = 25 if heads == 128 else 1  # so that the last step is steep all the same

    def measure(**cell):
        errors = as_predicted(**cell)
        chosen = error if cell["heads"] == heads else errors[target]
        return errors | {target: factor * chosen}

    assert judged(NAME, measure) == ("fails", [statement.format(target)])


def test_cannot_judge_one_number_of_heads():
    assert judged(NAME, as_predicted, heads=8) == ("undecided", [])


@pytest.mark.slow
def test_measures_the_error_of_a_fit():
    results = measured(NAME, heads=[2, 20], dim=3, keys=2, examples=300, seeds=1)
    X = inputs.sphere(300 + learning_setup.TEST_EXAMPLES, 3, 3, generator(0, "inputs"))
    for cell in results:
        for name, target in TARGETS.items():
            y = target(3)(X)
            fitted = learning_setup.make_model("rfa", cell["heads"], 3, seed=0).fit(
                X[:300], y[:300]
            )
            assert cell[name] == pytest.approx(1 - fitted.score(X[300:], y[300:]), rel=1e-6)
