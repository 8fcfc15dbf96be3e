import numpy as np
import pytest
from lab_cases import judged, made_up, measured

from onelayer import AttentionLayer, inputs, recover
from onelayer.lab import figures, recovery_setup
from onelayer.lab.claims import known, six_phases
from onelayer.lab.recovery_setup import worst_head
from onelayer.lab.seeds import generator

NAME = "six-phases"
TRUE = {1: 0.25, 2: 0.6, 3: 0.002, 4: 0.015, 5: 0.015, 6: 0.02}
OWN = {1: 0.3, 2: 0.2, 3: 0.005, 4: 0.03, 5: 0.03, 6: 0.01}


def predicted(**_):
    values = {"polished": 1e-13, "reason": "exact"}
    for n in TRUE:
        values |= {f"true_{n}": TRUE[n], f"measured_{n}": OWN[n]}
    return values


def changed(**values):
    return lambda **cell: predicted(**cell) | values


def test_errors_that_fall_from_phase_to_phase_are_as_predicted():
    assert judged(NAME, predicted) == ("holds", [])
    assert judged(NAME, predicted, size="default") == ("holds", [])


@pytest.mark.parametrize(
    ("measure", "statement"),
    [
        (
            changed(true_3=0.026, measured_3=0.03),
            "phase 3 makes the sum of projections better by a factor of at least 10",
        ),
        (
            changed(true_5=0.051, measured_5=0.05),
            "after phase 5 every head is within 5% of the hull",
        ),
        (changed(true_6=0.051), "after phase 6 every head is within 5%"),
        (
            changed(measured_3=0.0006),
            "errors are at most 3 times what phases 3 and 5 measured themselves",
        ),
        (
            changed(measured_5=0.0049),
            "errors are at most 3 times what phases 3 and 5 measured themselves",
        ),
        (changed(polished=1.1e-9), "polished, every head is within 1e-09 on every seed"),
    ],
)
def test_every_part_of_the_rule_can_fail(measure, statement):
    assert judged(NAME, measure) == ("fails", [statement])


def test_a_phase_that_is_not_reached_fails_what_rests_on_it():
    stopped = changed(true_5=None, measured_5=None, true_6=None, measured_6=None)
    outcome, failed = judged(NAME, stopped)
    assert (outcome, len(failed)) == ("fails", 3)
    results = made_up(NAME, stopped)
    checks = known()[NAME].verdict(results).checks
    assert checks[1].measured == "2x8x3x20000: not reached"
    assert figures.render(known()[NAME], results).startswith(b"<?xml")


def test_one_bad_seed_is_no_median():
    def measure(seed, **cell):
        return predicted(**cell) | ({"true_6": 0.5} if seed == 0 else {})

    assert judged(NAME, measure, seeds=3) == ("holds", [])


@pytest.mark.parametrize("shape", ["2x8x3", "2x8x3x1e5", "two"])
def test_shapes_are_four_numbers(shape):
    with pytest.raises(ValueError, match=f"shape is '{shape}', expected HEADSxDIMxTOKENSxEXAMPLES"):
        six_phases.measure(shape, seed=0)


@pytest.mark.slow
def test_phases_are_those_of_recover():
    (cell,) = measured(NAME, shape="1x7x2x4000", seeds=1)
    layer, X, Y = recovery_setup.instance(1, 7, 2, 4000, seed=0)
    how = {"heads": 1, "method": "sculpt", "seed": generator(0, "search"), "polish": False}
    found = recover(X, Y, **how)
    own = {row.phase: row.error for row in found.trace}  # the last round of a phase
    assert {n: cell[f"measured_{n}"] for n in TRUE} == own
    assert cell["true_6"] == worst_head(found.layer, layer)
    assert 1e-6 < cell["true_6"] < 0.05
    assert cell["true_3"] < 0.01 < cell["true_1"]
    assert cell["polished"] < 1e-9
    assert cell["reason"] == "exact"
    np.testing.assert_allclose(cell["true_heads"], layer.attention, atol=5e-5)
    np.testing.assert_allclose(cell["found_heads"], found.layer.attention, atol=5e-5)


def test_phases_that_refuse_are_none():
    (cell,) = measured(NAME, shape="2x6x2x60", seeds=1)
    reached = [n for n in TRUE if cell[f"true_{n}"] is not None]
    assert reached == list(range(1, len(reached) + 1))
    assert len(reached) < 6
    assert "true_heads" not in cell.measured


def test_heads_side_by_side_are_matched():
    layer = AttentionLayer.random(heads=3, dim=4, seed=0)
    order = [2, 0, 1]
    estimate = AttentionLayer(layer.attention[order], layer.projection[order])
    pair = six_phases.side_by_side(layer, estimate)
    assert pair["true_heads"] == pair["found_heads"]


# Reports of phases


@pytest.mark.slow
def test_the_phases_are_those_of_recover():
    layer, X, Y = recovery_setup.instance(1, 7, 2, 4000, seed=0)
    seen = six_phases.phase_reports(X, Y, layer, seed=5)
    found = recover(X, Y, heads=1, method="sculpt", seed=5, polish=False)
    assert [(w.number, w.measured, w.examples) for w in seen] == [
        (row.phase, row.error, row.examples) for row in found.trace
    ]
    assert {w.refusal for w in seen} == {""}
    assert [w.heads is None for w in seen] == [True] * (len(seen) - 1) + [False]
    np.testing.assert_array_equal(seen[-1].heads.attention, found.layer.attention)


def test_errors_do_not_depend_on_the_units_of_inputs_and_outputs():
    layer, X, Y = recovery_setup.instance(1, 7, 2, 4000, seed=0)
    stretch = np.diag(np.linspace(0.5, 2.0, 7)) + 0.1
    inverse = np.linalg.inv(stretch)
    # Tokens X A have the same outputs under A⁻¹ Θ A⁻ᵀ and A⁻¹ W.
    stretched = AttentionLayer(
        inverse @ layer.attention @ inverse.T, inverse @ layer.projection * 100.0
    )
    np.testing.assert_allclose(stretched(X @ stretch), 100.0 * Y, atol=1e-9)
    seen = {
        w.number: w.true
        for w in six_phases.phase_reports(X @ stretch, 100.0 * Y, stretched, seed=5)
    }
    assert seen[3] < 0.01 < seen[1]
    assert seen[5] < 0.01 < seen[2]


def test_the_hull_of_one_head_is_the_head():
    layer, X, Y = recovery_setup.instance(1, 7, 2, 4000, seed=1)
    seen = {w.number: w for w in six_phases.phase_reports(X, Y, layer, seed=5)}
    head = seen[6].heads.distance(layer).attention[0]
    assert seen[5].true == pytest.approx(head, rel=0.1)


def test_a_phase_that_refuses_is_the_last():
    layer, X, Y = recovery_setup.instance(2, 6, 2, 60, seed=0)
    *_, last = six_phases.phase_reports(X, Y, layer, seed=0)
    assert last.true == np.inf
    assert last.refusal == recover(X, Y, 2, method="sculpt", seed=0).reason.name.lower()


def test_one_output_is_refused_at_once():
    layer = AttentionLayer.random(heads=2, dim=5, out_dim=1)
    X = inputs.boolean(100, 3, 5)
    (only,) = six_phases.phase_reports(X, layer(X), layer, seed=0)
    assert (only.number, only.refusal) == (1, "agreement_hidden")
