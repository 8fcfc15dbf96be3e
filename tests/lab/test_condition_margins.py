import math

import pytest
from matplotlib.figure import Figure

from onelayer import AttentionLayer, conditions
from onelayer.lab import condition_margins
from onelayer.lab.claim import Result, Results


def test_the_groups_have_all_conditions_once():
    names = [name for names in condition_margins.GROUPS.values() for name in names]
    assert sorted(names) == sorted(conditions(AttentionLayer.random(heads=2, dim=2)))


@pytest.mark.parametrize(
    ("name", "measured", "expected"),
    [
        ("scale", 3.0, 2.0),
        ("scale", 0.75, 0.5),
        ("largest scale", 5.0, 2.0),
        ("largest scale", 20.0, 0.5),
        ("incoherence", 0.0, math.inf),
    ],
)
def test_a_margin_is_above_1_where_the_condition_holds(name, measured, expected):
    assert condition_margins.margin(name, measured) == pytest.approx(expected)


def test_margins_are_drawn_for_every_condition_but_those_that_always_hold():
    cell = {name: [1.0, 2.0, 4.0] for name in condition_margins.COMPARED}
    axes = Figure().subplots()
    condition_margins.draw(axes, {"made up": Results((Result({"seed": 0}, cell),))})
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == list(condition_margins.COMPARED)
    assert "singular gap" not in labels
    line = next(line for line in axes.lines if line.get_label() == "made up")
    drawn = dict(zip(labels, line.get_xdata(), strict=True))
    assert drawn["scale"] == pytest.approx(2.0 / 1.5)
    assert drawn["largest scale"] == pytest.approx(5.0)
