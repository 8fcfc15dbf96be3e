import lab_cases
import numpy as np
import pytest

from onelayer import AttentionLayer, conditions
from onelayer.lab import condition_margins
from onelayer.lab.claims import known
from onelayer.lab.seeds import generator

NAME = "conditions-random"
NAMES = [name for names in condition_margins.GROUPS.values() for name in names]


def generic(shape, **parameters):
    """All layers meet all conditions."""
    heads = int(shape.split("x")[0])
    values = {name: [1.0, 1.0, 1.0] for name in NAMES} | {f"{name} holds": 1.0 for name in NAMES}
    return values | {"hull distance": [0.9 * heads**-0.5, heads**-0.5, 1.1 * heads**-0.5]}


def test_layers_that_meet_all_conditions_are_not_degenerate():
    assert lab_cases.judged(NAME, generic) == ("holds", [])


@pytest.mark.parametrize("name", NAMES)
def test_a_condition_that_layers_of_one_shape_fail_is_found(name):
    def failing(shape, **parameters):
        share = {f"{name} holds": 0.94} if shape == "4x16" else {}
        return generic(shape) | share

    outcome, (statement,) = lab_cases.judged(NAME, failing)
    assert outcome == "fails"
    assert name in statement


def test_a_share_that_is_enough_is_one_over_all_seeds():
    def failing(shape, seed, **parameters):
        return generic(shape) | {"scale holds": 0.92 if seed else 0.98}

    assert lab_cases.judged(NAME, failing) == ("holds", [])


def test_heads_nearer_to_cancelling_than_orthogonal_ones_are_found():
    def cancelling(shape, **parameters):
        measured = generic(shape)
        low, middle, high = measured["hull distance"]
        return measured | {"hull distance": [low, 0.8 * middle, high]}

    outcome, (statement,) = lab_cases.judged(NAME, cancelling)
    assert outcome == "fails"
    assert statement.startswith("0 is at least 0.9/√m away from the hull")


@pytest.mark.slow
def test_what_is_measured_is_what_the_conditions_of_these_layers_are():
    results = lab_cases.measured(NAME, shape=["2x6", "5x6x2"], samples=5, seeds=1)
    for (heads, rank), cell in zip([(2, None), (5, 2)], results, strict=True):
        drawn = generator(0, "layer")
        layers = [AttentionLayer.random(heads, 6, 3.0, rank, seed=drawn) for _ in range(5)]
        for name in NAMES:
            found = [conditions(layer)[name] for layer in layers]
            values = np.sort([one.measured for one in found])
            assert cell[name] == [values[0], values[2], values[4]]
            assert cell[f"{name} holds"] == np.mean([one.holds for one in found])


@pytest.mark.parametrize("shape", ["1x8", "8", "2x8x", "two"])
def test_shapes_that_are_none_are_refused(shape):
    with pytest.raises(ValueError, match=f"shape is '{shape}', expected HEADSxDIM or HEADSxDIMx"):
        known()[NAME].measure(shape=shape, scale=3.0, samples=1, seed=0)
