import numpy as np
import pytest
from lab_cases import judged, measured

from onelayer.theory import bounds

NAME = "keys"


def as_predicted(model, keys, examples, **_):
    factors = [bounds.sample_size_ratio(p, keys) if model == "rfmlp" else 1 for p in (1, 2)]
    sizes = [30 * factors[0], 200 * factors[1]]
    sizes = [n if n <= examples else None for n in sizes]
    return dict(zip(("f_{1,1}", "f_{1,2}"), sizes, strict=True))


def changed(model, target, by_keys):
    """As predicted, but for one model and target: its sizes for some numbers of keys."""

    def measure(**cell):
        sizes = as_predicted(**cell)
        if cell["model"] == model and cell["keys"] in by_keys:
            sizes[target] = by_keys[cell["keys"]]
        return sizes

    return measure


def test_holds_as_predicted():
    assert judged(NAME, as_predicted) == ("holds", [])


@pytest.mark.parametrize(
    ("measure", "statement"),
    [
        (changed("rfa", "f_{1,1}", {32: 61}), "RFA needs as many examples for f_{1,1}"),
        (changed("rfa", "f_{1,2}", {2: 99}), "RFA needs as many examples for f_{1,2}"),
        (changed("rfa", "f_{1,2}", {8: None}), "RFA needs as many examples for f_{1,2}"),
        (changed("rfmlp", "f_{1,1}", {8: 29}), "RFMLP needs more examples for f_{1,1}"),
        (changed("rfmlp", "f_{1,1}", {8: None}), "RFMLP needs more examples for f_{1,1}"),
        (changed("rfmlp", "f_{1,1}", {8: 60, 32: 120}), "from 2 to 32 keys at least 0.5"),
    ],
)
def test_every_check_can_fail(measure, statement):
    outcome, (failed,) = judged(NAME, measure)
    assert outcome == "fails"
    assert failed.startswith(statement)


def test_a_network_that_does_not_get_there_is_a_lower_bound():
    never = {8: None, 32: None}
    assert judged(NAME, changed("rfmlp", "f_{1,1}", never)) == ("holds", [])
    outcome, (failed,) = judged(
        NAME, changed("rfmlp", "f_{1,1}", never), network_examples=120, attention_examples=512
    )
    assert outcome == "fails"
    assert failed.startswith("from 2 to 32 keys")


def test_cannot_judge_without_something_to_compare():
    assert judged(NAME, as_predicted, keys=8) == ("undecided", [])
    assert judged(NAME, as_predicted, model="rfmlp") == ("undecided", [])
    assert judged(NAME, as_predicted, attention_examples=100) == ("undecided", [])


@pytest.mark.slow
def test_measures_that_only_the_network_sees_the_keys():
    tiny = {"dim": 3, "heads": 150, "attention_examples": 128, "network_examples": 256}
    results = measured(NAME, keys=[2, 12], seeds=2, **tiny)
    growth = {}
    for model, part in results.by("model"):
        few, many = (np.mean(part.where(keys=keys).numbers("f_{1,1}")) for keys in (2, 12))
        growth[model] = many / few
    assert growth["rfa"] < 2 < growth["rfmlp"] < np.inf
