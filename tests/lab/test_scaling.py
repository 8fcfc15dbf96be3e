import pytest
from matplotlib.figure import Figure

from onelayer.lab import scaling
from onelayer.lab.claim import Result, Results


def test_every_model_has_its_own_largest_size():
    settings = {"model": ["rfa", "rfmlp"], "keys": [2, 4], "seeds": 2}
    cells = scaling.cells({**settings, "attention_examples": 8, "network_examples": 64})
    assert len(cells) == 8
    assert {(cell["model"], cell["examples"]) for cell in cells} == {("rfa", 8), ("rfmlp", 64)}
    assert all(set(cell) == {"model", "keys", "seed", "examples"} for cell in cells)


def test_points_of_curves_keep_their_parameters_and_values():
    measured = {"sizes": [8, 16], "f": [0.5, None], "needed": 11.0}
    curves = Results((Result({"seed": 3, "examples": 16}, measured),))
    points = scaling.by_size(curves)
    assert [dict(point.parameters) for point in points] == [
        {"seed": 3, "examples": 8},
        {"seed": 3, "examples": 16},
    ]
    assert [dict(point.measured) for point in points] == [{"f": 0.5}, {"f": None}]


def test_the_exponent_is_fitted_to_all_points():
    assert scaling.exponent([1, 10, 100], [5, 0.5, 0.05]) == pytest.approx(-1)
    assert scaling.exponent([1, 10, 100], [1, 100, 1]) == pytest.approx(0, abs=1e-12)


def test_what_was_not_reached_is_drawn_at_the_largest_size():
    sizes = {2: 20.0, 8: 50.0, 32: None}
    cells = [
        Result({"model": "rfmlp", "keys": keys, "examples": 64, "seed": 0}, {"f": size})
        for keys, size in sizes.items()
    ]
    axes = Figure().subplots()
    scaling.draw_needed(axes, Results(tuple(cells)), "f")
    curve, beyond = axes.get_lines()
    assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([2, 8], [20, 50])
    assert (list(beyond.get_xdata()), list(beyond.get_ydata())) == ([32], [64])
    assert curve.get_label() == "RFMLP"
    assert beyond.get_label() == "RFMLP: more than this"
