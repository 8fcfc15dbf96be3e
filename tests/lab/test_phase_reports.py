import numpy as np
import pytest

from onelayer import AttentionLayer, inputs, recover
from onelayer.lab import recovery_setup
from onelayer.lab.phase_reports import phase_reports


def test_the_phases_are_those_of_recover():
    layer, X, Y = recovery_setup.instance(1, 7, 2, 4000, seed=0)
    seen = phase_reports(X, Y, layer, seed=5)
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
    seen = {w.number: w.true for w in phase_reports(X @ stretch, 100.0 * Y, stretched, seed=5)}
    assert seen[3] < 0.01 < seen[1]
    assert seen[5] < 0.01 < seen[2]


def test_the_hull_of_one_head_is_the_head():
    layer, X, Y = recovery_setup.instance(1, 7, 2, 4000, seed=1)
    seen = {w.number: w for w in phase_reports(X, Y, layer, seed=5)}
    head = seen[6].heads.distance(layer).attention[0]
    assert seen[5].true == pytest.approx(head, rel=0.1)


def test_a_phase_that_refuses_is_the_last():
    layer, X, Y = recovery_setup.instance(2, 6, 2, 60, seed=0)
    *_, last = phase_reports(X, Y, layer, seed=0)
    assert last.true == np.inf
    assert last.refusal == recover(X, Y, 2, method="sculpt", seed=0).reason.name.lower()


def test_one_output_is_refused_at_once():
    layer = AttentionLayer.random(heads=2, dim=5, out_dim=1)
    X = inputs.boolean(100, 3, 5)
    (only,) = phase_reports(X, layer(X), layer, seed=0)
    assert (only.number, only.refusal) == (1, "agreement_hidden")
