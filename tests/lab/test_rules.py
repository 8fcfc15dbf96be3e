import pytest

from onelayer.lab import rules
from onelayer.lab.claim import Result, Results


def test_points_of_curves_keep_their_parameters_and_values():
    measured = {"sizes": [8, 16], "f": [0.5, None], "needed": 11.0}
    curves = Results((Result({"seed": 3, "examples": 16}, measured),))
    points = rules.curve_points(curves)
    assert [dict(point.parameters) for point in points] == [
        {"seed": 3, "examples": 8},
        {"seed": 3, "examples": 16},
    ]
    assert [dict(point.measured) for point in points] == [{"f": 0.5}, {"f": None}]


def test_the_exponent_is_fitted_to_all_points():
    assert rules.exponent([1, 10, 100], [5, 0.5, 0.05]) == pytest.approx(-1)
    assert rules.exponent([1, 10, 100], [1, 100, 1]) == pytest.approx(0, abs=1e-12)
