"""Conditions as tables and plots, and as the dicts they are."""

import copy
import math
import pickle

import numpy as np
import pytest
from matplotlib.figure import Figure

from onelayer import (
    AttentionLayer,
    Condition,
    Conditions,
    ConditionSurvey,
    ConditionSurveys,
    survey_conditions,
)
from onelayer import conditions as measure

GOOD = Condition(measured=3.0, needed=1.5, at_least=True, meaning="what is <good>")
BAD = Condition(measured=8.0, needed=2.0, at_least=False, meaning="what is bad")
ALWAYS = Condition(measured=1.0, needed=0.0, at_least=True, meaning="what always holds")
NONE = Condition(measured=0.0, needed=1.0, at_least=True, meaning="what is missing")
SOME = Conditions({"good": GOOD, "bad": BAD, "always": ALWAYS, "missing": NONE})
SURVEY = ConditionSurvey(np.array([1.0, 2.0, 4.0]), needed=2.0, at_least=True)


def points(axes):
    """What is drawn, by label: x and y of every marker."""
    return {
        line.get_label(): line.get_xydata().tolist()
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def names(axes):
    return [label.get_text() for label in axes.get_yticklabels()]


@pytest.mark.parametrize(
    ("condition", "margin"), [(GOOD, 2.0), (BAD, 0.25), (ALWAYS, math.inf), (NONE, 0.0)]
)
def test_a_margin_is_how_many_times_better_than_needed(condition, margin):
    assert condition.margin == margin
    assert type(condition.margin) is float


def test_an_upper_bound_on_zero_is_met_infinitely_well():
    assert Condition(0.0, 2.0, at_least=False, meaning="").margin == math.inf
    assert Condition(math.inf, 2.0, at_least=False, meaning="").margin == 0.0


def test_margins_of_a_survey_are_those_of_its_layers():
    np.testing.assert_array_equal(SURVEY.margins, [0.5, 1.0, 2.0])
    upper = ConditionSurvey(np.array([0.0, 1.0, 4.0]), needed=2.0, at_least=False)
    np.testing.assert_array_equal(upper.margins, [math.inf, 2.0, 0.5])


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, copy.copy, lambda x: pickle.loads(pickle.dumps(x))]
)
def test_conditions_are_dicts(copied):
    assert isinstance(SOME, dict)
    assert SOME == {"good": GOOD, "bad": BAD, "always": ALWAYS, "missing": NONE}
    assert copied(SOME) == SOME
    assert type(copied(SOME)) is Conditions
    assert {**SOME} == SOME


def test_the_conditions_that_fail_are_named():
    assert SOME.failed == ["bad", "missing"]
    assert Conditions(good=GOOD).failed == []


def test_conditions_print_as_a_table():
    lines = repr(SOME).split("\n")
    assert lines[0] == "2 of 4 conditions hold"
    assert [line.split() for line in lines[1:]] == [
        ["condition", "measured", "needed", "holds"],
        ["good", "3", ">=", "1.5", "yes"],
        ["bad", "8", "<=", "2", "no"],
        ["always", "1", ">=", "0", "yes"],
        ["missing", "0", ">=", "1", "no"],
    ]


def test_a_table_of_a_layer_fits_on_a_screen():
    lines = repr(measure(AttentionLayer.random(heads=3, dim=8))).split("\n")
    assert len(lines) == 14
    assert max(map(len, lines)) <= 80


def test_notebooks_have_meanings_too_escaped():
    page = SOME._repr_html_()
    assert "what is &lt;good&gt;" in page
    assert "2 of 4 conditions hold" in page


def test_a_plot_tells_conditions_that_are_met_from_others():
    axes = SOME.plot(Figure().subplots())
    assert names(axes) == ["good", "bad", "missing"]
    found = points(axes)
    assert found["met"] == [[2.0, 0.0]]
    assert found["not met"] == [[0.25, 1.0]]
    assert found["needed"][0][0] == 1.0
    assert axes.get_xscale() == "log"
    [arrow] = [line for line in axes.lines if line.get_marker() == "<"]
    assert arrow.get_ydata() == [2.0]
    colours = {line.get_label(): line.get_color() for line in axes.lines}
    assert colours["met"] != colours["not met"] == arrow.get_color()


def test_surveys_print_and_draw_median_range_and_share():
    surveys = ConditionSurveys(some=SURVEY)
    assert repr(surveys).split("\n")[0] == "Conditions of 3 layers"
    assert repr(surveys).split("\n")[2].split() == ["some", "2", "1", "4", ">=", "2", "67%"]
    assert "67%" in surveys._repr_html_()
    axes = surveys.plot(Figure().subplots())
    assert names(axes) == ["some, 67%"]
    assert points(axes)["median and range"] == [[1.0, 0.0]]
    segment = axes.collections[0].get_segments()[0]
    np.testing.assert_array_equal(segment, [[0.5, 0.0], [2.0, 0.0]])


def test_the_functions_return_them():
    found = measure(AttentionLayer.random(heads=2, dim=4))
    assert type(found) is Conditions
    survey = survey_conditions(heads=2, dim=4, samples=3)
    assert type(survey) is ConditionSurveys
    assert list(survey) == list(found)


def test_layers_with_infinite_values_are_drawn_without_warnings():
    zero = AttentionLayer(np.zeros((2, 3, 3)), np.zeros((2, 3, 3)))
    figure = Figure(layout="constrained")
    measure(zero).plot(figure.subplots())
    survey_conditions(heads=1, dim=3, samples=2).plot(figure.add_axes((0.1, 0.1, 0.5, 0.5)))
    figure.savefig("/dev/null", format="svg")
