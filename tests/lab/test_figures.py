import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from onelayer.lab import figures
from onelayer.lab.claim import Claim, Result, Results

TEXTS = dict.fromkeys(("title", "source", "prediction", "rule"), "")
RESULTS = (1, 5.0), (1, 3.0), (2, 2.0), (2, 1.0)


def results(*cells):
    """Cells (x, y) with a seed each."""
    return Results(
        tuple(Result({"x": x, "seed": seed}, {"y": y}) for seed, (x, y) in enumerate(cells))
    )


def drawn(cells, **options):
    axes = Figure().subplots()
    figures.curve(axes, results(*cells), "x", "y", **options)
    return axes


def draw(found, figure):
    axes = figure.subplots()
    figures.curve(axes, found, "x", "y", "$y_1$")
    axes.set(xlabel="heads", title="a figure")
    axes.legend()


def rendered(*options, draw=draw):
    """The figure of a made-up claim."""
    claim = Claim(**TEXTS, sizes={}, measure=dict, judge=list, draw=draw)
    return figures.render(claim, results(*RESULTS), *options)


@pytest.mark.parametrize(("labels", "columns"), [("ab", 2), (["x" * 30] * 3, 2), ([], None)])
def test_a_figure_without_a_legend_gets_one_below(labels, columns):
    figure = Figure()
    for axes in figure.subplots(1, 2):
        for i, label in enumerate(labels):
            axes.plot([1], [1], label=f"{label}{i}")
    figures._add_legend(figure)
    assert [legend._ncols for legend in figure.legends] == ([columns] if columns else [])
    figures._add_legend(figure)
    assert len(figure.legends) == bool(labels)


def test_curve_is_the_median_with_a_band_from_least_to_largest():
    axes = drawn([(1, 5.0), (1, 1.0), (1, 2.0), (4, 8.0), (4, 6.0)], label="a")
    [line] = axes.lines
    np.testing.assert_array_equal(line.get_xydata(), [[1, 2.0], [4, 7.0]])
    assert line.get_label() == "a"
    band = axes.collections[0].get_paths()[0].vertices
    np.testing.assert_array_equal(np.unique(band, axis=0), [[1, 1], [1, 5], [4, 6], [4, 8]])


def test_one_x_shows_its_spread_too():
    segments = drawn([(3, 1.0), (3, 2.0)]).collections[1].get_segments()
    np.testing.assert_array_equal(segments, [[[3, 1.0], [3, 2.0]]])


def test_cells_without_a_value_are_left_out():
    axes = drawn([(1, None), (2, 3.0), (2, None), (3, 1.0)])
    np.testing.assert_array_equal(axes.lines[0].get_xydata(), [[2, 3.0], [3, 1.0]])


def test_without_any_value_there_is_no_curve():
    axes = drawn([(1, None)])
    assert [*axes.lines, *axes.collections] == []


def test_numbers_are_drawn_in_order_and_names_as_they_come():
    assert list(drawn([(4, 1.0), (1, 2.0), (2.5, 3.0)]).lines[0].get_xdata()) == [1, 2.5, 4]
    assert list(drawn([("b", 1.0), ("a", 2.0)]).lines[0].get_xdata()) == ["b", "a"]


def test_curves_differ_in_colour_and_marker():
    lines = [drawn([(1, 1.0)], number=number).lines[0] for number in range(len(figures.COLOURS))]
    assert len({line.get_color() for line in lines}) == len(lines)
    assert len({line.get_marker() for line in lines}) == len(lines)


def test_prediction_is_dashed():
    axes = Figure().subplots()
    figures.predicted(axes, [1, 2], [3, 4])
    figures.predicted(axes, [1, 2], [3, 4], number=1)
    assert [line.get_linestyle() for line in axes.lines] == ["--", "--"]
    assert [line.get_color() for line in axes.lines] == ["#000000", figures.COLOURS[1]]


def test_heat_maps_share_one_scale_about_zero():
    figure = Figure()
    small, large = [[0.5, -1.0]], [[-4.0, 2.0]]
    figures.heat_maps(figure, [[small, large], [large, small]], ["a", "b"], ["true", "found"])
    images = [image for axes in figure.axes for image in axes.get_images()]
    assert [image.get_clim() for image in images] == [(-4.0, 4.0)] * 4
    np.testing.assert_array_equal(images[1].get_array(), large)
    assert [axes.get_title() for axes in figure.axes[:4]] == ["true", "found", "", ""]
    assert [axes.get_ylabel() for axes in figure.axes[:4]] == ["a", "", "b", ""]


def test_heat_maps_of_zeros_are_drawn():
    figure = Figure()
    figures.heat_maps(figure, [[[[0.0]]]], ["a"], ["b"])
    assert figure.axes[0].get_images()[0].get_clim() == (-1.0, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("file_format", "start"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_rendered_file_depends_on_the_results_alone(file_format, start):
    content = rendered(file_format)
    assert content.startswith(start)
    with matplotlib.rc_context({"lines.linewidth": 9.0, "text.color": "red", "font.size": 20.0}):
        assert rendered(file_format) == content


def test_rendering_leaves_the_users_settings_alone():
    with matplotlib.rc_context({"font.size": 20.0}):
        before = dict(matplotlib.rcParams)
        rendered()
        assert dict(matplotlib.rcParams) == before


def test_svg_needs_no_fonts():
    content = rendered()
    assert b"<text" not in content
    assert b"<path" in content


def test_a_claim_may_choose_the_size():
    content = rendered(draw=lambda _, figure: figure.set_size_inches(10, 2))
    assert b'width="720pt" height="144pt"' in content


def test_other_formats_are_refused():
    with pytest.raises(ValueError, match="the format is 'gif', expected one of svg, pdf"):
        rendered("gif")


def test_without_matplotlib_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        ImportError, match="a figure needs matplotlib, which is not installed: pip ins"
    ):
        rendered()


def test_what_was_not_reached_is_drawn_at_the_largest_size():
    sizes = {2: 20.0, 8: 50.0, 32: None}
    cells = [
        Result({"model": "rfmlp", "keys": keys, "examples": 64, "seed": 0}, {"f": size})
        for keys, size in sizes.items()
    ]
    axes = Figure().subplots()
    figures.examples_needed(axes, Results(tuple(cells)), "f")
    curve, beyond = axes.get_lines()
    assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([2, 8], [20, 50])
    assert (list(beyond.get_xdata()), list(beyond.get_ydata())) == ([32], [64])
    assert curve.get_label() == "RFMLP"
    assert beyond.get_label() == "RFMLP: more than this"
