import numpy as np
import pytest
from lab_cases import judged, measured

from onelayer import inputs
from onelayer.features.learning_curves import learning_curve
from onelayer.lab import learning_setup
from onelayer.lab.seeds import generator
from onelayer.theory import bounds, targets

NAME = "sample-size"
MANY = 10**6  # examples, that every network gets there with


def as_predicted(model, keys, examples, **_):
    sizes = {p: 5.0 * 4**p for p in (1, 2, 3)}
    if model == "rfmlp":
        sizes = {p: n * bounds.sample_size_ratio(p, keys) for p, n in sizes.items()}
    return {f"f_{{1,{p}}}": n if n <= examples else None for p, n in sizes.items()}


def test_holds_as_predicted():
    assert judged(NAME, as_predicted) == ("holds", [])
    assert judged(NAME, as_predicted, network_examples=MANY) == ("holds", [])


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize(("factor", "side"), [(1 / 2.1, "at least"), (2.1, "at most")])
def test_every_check_can_fail(degree, factor, side):
    target = f"f_{{1,{degree}}}"

    def measure(**cell):
        sizes = as_predicted(**cell)
        off = factor**degree if cell["model"] == "rfmlp" and cell["keys"] == 6 else 1
        return sizes | {target: sizes[target] * off}

    outcome, (failed,) = judged(NAME, measure, network_examples=MANY)
    assert outcome == "fails"
    assert failed.startswith(f"on {target} RFMLP needs {side}")


def never(**cell):
    """No network gets anywhere."""
    return dict.fromkeys(as_predicted(**cell)) if cell["model"] == "rfmlp" else as_predicted(**cell)


def test_a_lower_bound_counts_where_it_decides():
    outcome, failed = judged(NAME, never, network_examples=MANY)
    assert outcome == "fails"  # it needs far more than predicted
    assert [statement.split(" times")[0] for statement in failed] == [
        f"on f_{{1,{p}}} RFMLP needs at most ((N+2)/4)^{p} x {2**p}" for p in (1, 2, 3)
    ]
    assert judged(NAME, never, network_examples=30) == ("holds", [])
    assert judged(NAME, never, network_examples=2) == ("undecided", [])


def test_degrees_that_attention_does_not_learn_are_left_out():
    def measure(**cell):
        return as_predicted(**cell) | {"f_{1,2}": None, "f_{1,3}": 0.01 * cell["keys"]}

    _, failed = judged(NAME, measure, network_examples=MANY)
    assert failed
    assert all("f_{1,3}" in statement for statement in failed)


def test_cannot_judge_one_model_or_no_success():
    assert judged(NAME, as_predicted, model="rfa") == ("undecided", [])
    assert judged(NAME, lambda **_: dict.fromkeys(("f_{1,1}", "f_{1,2}", "f_{1,3}"))) == (
        "undecided",
        [],
    )


def test_measures_the_crossing_of_learning_curves():
    few = {"keys": 2, "dim": 3, "heads": 50, "attention_examples": 64, "network_examples": 90}
    results = measured(NAME, seeds=1, **few)
    assert [cell["examples"] for cell in results] == [64, 90]
    for cell in results:
        n = cell["examples"]
        X = inputs.sphere(n + learning_setup.TEST_EXAMPLES, 3, 3, generator(0, "inputs"))
        y = targets.average_power(1, 3)(X)
        model = learning_setup.make_model(cell["model"], 50, 3, seed=0)
        sizes = learning_setup.sizes_up_to(n, least=4)
        curve = learning_curve(model, X[:n], y[:n], X[n:], y[n:], sizes)
        (needed,) = curve.samples_needed(0.1)
        assert np.isfinite(needed)
        assert cell["f_{1,1}"] == pytest.approx(needed, rel=1e-6)
