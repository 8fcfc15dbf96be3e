"""Recoveries on a screen, in notebooks and as plots."""

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.figure import Figure

from onelayer import AttentionLayer, Reason, inputs, recover
from onelayer.recovery.trace import TraceRow


@pytest.fixture(scope="module")
def found():
    layer = AttentionLayer.random(heads=2, dim=4, seed=0)
    X = inputs.boolean(150, 3, 4, seed=1)
    return recover(X, layer(X), heads=2)


def row(step, stage, error, **options):
    return TraceRow(step, stage, 2, 100, error, 0.1, 1, 0.5, **options)


def drawn(recovery, *rows, held_out=1e-3):
    trace = list(rows)
    proof = replace(recovery.certificate, error=held_out)
    return replace(recovery, trace=trace, certificate=proof).plot(Figure().subplots())


def lines(axes):
    return {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}


def test_a_screen_has_the_reason_errors_and_the_bars_of_every_head(found):
    text = repr(found)
    lines = text.split("\n")
    assert lines[0].startswith("Recovery: converged in ")
    assert lines[0].endswith(f" s, {len(found.trace)} steps")
    assert "exact: the layer explains the examples" in text
    assert "AttentionLayer(heads=2, dim=4, out_dim=4)" in text
    assert f"{found.relative_error:.1e} on the examples" in text
    assert f"on {found.certificate.examples} that were held out" in text
    assert "vary along 4 of 4 directions" in text
    assert lines[-3].split("  ")[1:] == [
        "head",
        "attention error at most",
        "projection error at most",
    ]
    proof = found.certificate
    for head, line in enumerate(lines[-2:]):
        bars = proof.attention_error[head], proof.projection_error[head]
        assert line.split() == [str(head), *(f"{bar:.1e}" for bar in bars)]
    assert "what to try" not in text
    assert max(map(len, lines)) <= 88
    assert str(found) == text


@pytest.mark.parametrize(
    ("advice", "shown"), [("Give more.", "Give more."), ("", "raise max_steps or max_seconds")]
)
def test_what_did_not_converge_says_what_to_try_and_claims_nothing_about_heads(
    found, advice, shown
):
    failed = replace(found, converged=False, reason=Reason.BUDGET_SPENT, advice=advice)
    text = repr(failed)
    assert text.startswith("Recovery: not converged in ")
    assert shown in text
    assert "without error bars, which assume a layer that explains the examples" in text
    assert "error at most" not in text


@pytest.mark.parametrize("reason", [Reason.HEADS_NOT_DETERMINED, Reason.NOISE_FLOOR])
def test_bars_are_shown_where_the_examples_are_explained(found, reason):
    shown = replace(found, converged=reason.good, reason=reason)
    assert "attention error at most" in repr(shown)


def test_notebooks_show_the_same_escaped(found):
    page = replace(found, advice="<b>more</b>")._repr_html_()
    assert "&lt;b&gt;more&lt;/b&gt;" in page
    assert "exact: the layer explains the examples" in page
    assert page.count("<tr>") >= 4 + 3


def test_certificates_are_shown_too(found):
    proof = replace(found.certificate, attention_error=np.array([0.5, np.inf]))
    text = repr(proof)
    assert text.startswith("Certificate: bounds at 95% confidence\n")
    assert "heads not determined     1\n" in text
    assert text.split("\n")[-1].split()[:2] == ["1", "inf"]
    assert "heads not determined" in proof._repr_html_()
    assert "heads not determined     none\n" in repr(found.certificate)


def test_a_plot_has_the_errors_of_every_stage_and_the_held_out_error(found):
    axes = found.plot(Figure().subplots())
    assert axes.get_yscale() == "log"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "relative error")
    curves = lines(axes)
    held_out = curves.pop("certificate, held out")
    np.testing.assert_array_equal(np.unique(held_out.get_ydata()), [found.certificate.error])
    steps = {r.step: r.error for r in found.trace if not r.note}
    assert list(curves) == list(dict.fromkeys(r.stage for r in found.trace if not r.note))
    shown = {x: y for line in curves.values() for x, y in line.get_xydata()}
    assert shown == steps


def test_stages_differ_and_notes_are_left_out(found):
    rows = (
        row(0, "auto", 1.0, note="refine, since the examples fit in memory"),
        row(1, "start", 0.5),
        row(2, "start", 0.25),
        row(3, "phase 2: sculpt", 0.1, note="distance of two halves", phase=2),
        row(4, "start", 0.2),
    )
    axes = drawn(found, *rows)
    curves = lines(axes)
    assert list(curves) == ["start", "phase 2: sculpt", "certificate, held out"]
    first, again = (line for line in axes.lines if line.get_color() == curves["start"].get_color())
    np.testing.assert_array_equal(first.get_xydata(), [[1, 0.5], [2, 0.25]])
    np.testing.assert_array_equal(again.get_xydata(), [[4, 0.2]])
    assert curves["start"].get_marker() != curves["phase 2: sculpt"].get_marker()


def test_errors_on_held_out_examples_are_open_markers(found):
    curves = lines(drawn(found, row(0, "a", 0.5), row(1, "a", 0.4, held_out_error=0.6)))
    tested = curves["held-out examples"]
    np.testing.assert_array_equal(tested.get_xydata(), [[1, 0.6]])
    assert tested.get_fillstyle() == "none"
    assert "held-out examples" not in lines(drawn(found, row(0, "a", 0.5)))


def test_errors_of_zero_have_no_place_on_the_scale(found):
    curves = lines(drawn(found, row(0, "a", 0.5), row(1, "a", 0.0), held_out=0.0))
    assert list(curves) == ["a"]
    np.testing.assert_array_equal(curves["a"].get_xydata(), [[0, 0.5]])


def test_of_many_stages_the_longest_and_the_best_are_named(found):
    sizes = {"a": 5, "b": 1, "c": 4, "d": 3, "e": 9, "f": 2, "g": 6, "h": 7, "best": 1}
    rows, step = [], 0
    for stage, size in sizes.items():
        for _ in range(size):
            rows.append(row(step, stage, 1e-9 if stage == "best" else 0.5))
            step += 1
    curves = lines(drawn(found, *rows))
    assert list(curves)[:6] == ["a", "c", "e", "g", "h", "best"]
    assert list(curves)[6:] == ["other stages", "certificate, held out"]
    assert len({curves[name].get_color() for name in list(curves)[:7]}) == 7


def test_a_recovery_without_steps_is_drawn(found):
    assert list(lines(drawn(found))) == ["certificate, held out"]
