"""The parts of plots: axes in, axes out."""

import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import onelayer as ol
from onelayer import plotting


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def test_given_axes_are_returned_and_new_ones_belong_to_pyplot():
    axes = Figure().subplots()
    assert plotting.axes_or_new(axes) is axes
    assert plt.get_fignums() == []
    made = plotting.axes_or_new(None, (5.0, 2.0))
    assert plt.get_fignums() == [made.figure.number]
    np.testing.assert_allclose(made.figure.get_size_inches(), [5.0, 2.0])


def test_a_new_figure_has_the_style_of_the_package_and_leaves_that_of_the_user():
    with plt.rc_context({"axes.spines.top": True, "font.size": 30.0}):
        made = plotting.axes_or_new(None)
        assert not made.spines["top"].get_visible()
        assert plt.rcParams["font.size"] == 30.0


def test_a_grid_takes_given_axes_in_any_shape():
    axes = Figure().subplots(3, 2)
    found = plotting.grid_or_new(axes.T, 2, 3, "some", (1, 1))
    assert found.shape == (2, 3)
    assert found[0, 1] is axes.T[0, 1]
    single = Figure().subplots()
    assert plotting.grid_or_new(single, 1, 1, "one", (1, 1))[0, 0] is single
    with pytest.raises(ValueError, match="axes has 6 axes, expected 4: 4 heads"):
        plotting.grid_or_new(axes, 1, 4, "4 heads", (1, 1))


def test_a_heat_map_has_one_scale_about_zero_and_no_ticks():
    axes = Figure().subplots()
    image = plotting.heat_map(axes, [[1.0, -2.0]], 3.0)
    assert image.get_clim() == (-3.0, 3.0)
    assert axes.get_xticks().size == axes.get_yticks().size == 0


def test_a_legend_is_beside_the_axes():
    figure = Figure(layout="constrained")
    axes = figure.subplots()
    axes.plot([0, 1], [0, 1], label="a curve")
    plotting.legend_beside(axes)
    FigureCanvasAgg(figure).draw()
    legend, data = axes.get_legend().get_window_extent(), axes.get_window_extent()
    assert legend.x0 >= data.x1
    assert legend.x1 <= figure.bbox.x1


def test_margins_are_medians_with_ranges_and_arrows_where_the_axis_ends():
    axes = Figure().subplots()
    values = [[1.0, 2.0, 8.0], [0.0], [np.inf]]
    plotting.margins(axes, [0, 1, 2], values, 1, "a layer")
    axes.set_xscale("log")
    inside, low, high = axes.lines
    np.testing.assert_array_equal(inside.get_xydata(), [[2.0, 0.0]])
    assert inside.get_label() == "a layer"
    for line, marker, x, row in ((low, "<", 0.0, 1), (high, ">", 1.0, 2)):
        assert line.get_marker() == marker
        np.testing.assert_array_equal(line.get_xydata(), [[x, row]])
    [ranges] = axes.collections
    np.testing.assert_array_equal(ranges.get_segments()[0], [[1.0, 0.0], [8.0, 0.0]])


LAYER = ol.AttentionLayer.random(heads=2, dim=4, seed=0)
X = ol.inputs.boolean(60, 3, 4, seed=1)
CURVE = ol.LearningCurve(np.array([1, 2]), np.ones((2, 1)), np.ones((2, 1)))
PLOTS = {
    "layer": LAYER.plot,
    "recovery": lambda: ol.recover(X, LAYER(X), 2).plot(),
    "learning curve": CURVE.plot,
    "conditions": lambda: ol.conditions(LAYER).plot(),
    "surveys": lambda: ol.survey_conditions(2, 4, samples=2).plot(),
}


@pytest.mark.parametrize("plot", PLOTS.values(), ids=PLOTS)
def test_without_matplotlib_plots_say_what_to_install(monkeypatch, plot):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = r"^plot\(\) needs matplotlib, which is not installed: pip install matplotlib$"
    with pytest.raises(ImportError, match=message):
        plot()


def test_results_need_no_matplotlib_until_they_are_drawn():
    code = (
        "import sys, onelayer as ol; layer = ol.AttentionLayer.random(heads=2, dim=4);"
        "X = ol.inputs.boolean(60, 3, 4); found = ol.recover(X, layer(X), 2);"
        "repr(found), found._repr_html_(), repr(ol.conditions(layer));"
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
