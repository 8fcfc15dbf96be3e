import numpy as np
import pytest

import onelayer as ol
from onelayer.recovery.queries.closed_form import ClosedForm, NotApplicableError
from onelayer.recovery.queries.oracle import Oracle


def solved(layer, heads=None, seed=0, oracle=None):
    """A layer in closed form, and the oracle that was asked."""
    oracle = oracle or Oracle(layer)
    bias = layer.key_bias is not None
    form = ClosedForm(oracle, layer.dim, heads, bias, np.random.default_rng(seed))
    form.measure()
    return form, form.layer()


def assert_same(found, layer, tolerance):
    match = found.distance(layer)
    assert found.heads == layer.heads
    assert max(match.attention.max(), match.projection.max()) < tolerance


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [
        ({"heads": 1, "dim": 4}, 1e-9),
        ({"heads": 1, "dim": 5, "bias": True}, 1e-9),
        ({"heads": 1, "dim": 6, "out_dim": 1}, 1e-9),
        ({"heads": 3, "dim": 6}, 1e-5),
        ({"heads": 3, "dim": 6, "out_dim": 4}, 1e-5),
        ({"heads": 2, "dim": 5, "out_dim": 9}, 1e-5),
        ({"heads": 4, "dim": 6, "bias": True}, 1e-4),
        ({"heads": 3, "dim": 8, "rank": 2}, 1e-4),
        ({"heads": 6, "dim": 8, "scale": 30.0}, 1e-4),
        ({"heads": 6, "dim": 8, "scale": 0.01}, 1e-4),
    ],
)
def test_layers_are_found_in_closed_form(options, tolerance):
    layer = ol.AttentionLayer.random(seed=1, **{"scale": 2.0, **options})
    form, found = solved(layer)
    assert_same(found, layer, tolerance)
    if layer.key_bias is not None:
        np.testing.assert_allclose(form.output_bias, layer.output_bias, atol=1e-12)


@pytest.mark.parametrize("heads", [2, 6])
def test_fewer_entries_are_used_than_twice_the_unknowns(heads):
    """The number of scalar queries of arXiv 2608.03294 is 4 H d² - 2 H + 1."""
    layer = ol.AttentionLayer.random(heads=heads, dim=12, scale=2.0, seed=2)
    oracle = Oracle(layer)
    solved(layer, oracle=oracle)
    assert 2 * heads * 12**2 < oracle.scalars < 4 * heads * 12**2 - 2 * heads + 1


def test_projections_of_low_rank_are_found():
    layer = ol.AttentionLayer.random(heads=3, dim=6, scale=2.0, seed=3)
    values = np.random.default_rng(0).standard_normal((3, 6, 2))
    narrow = ol.AttentionLayer(layer.attention, values @ layer.projection[:, :2])
    assert_same(solved(narrow)[1], narrow, 1e-4)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_inputs_are_scaled_such_that_scores_are_of_order_one(scale):
    layer = ol.AttentionLayer.random(heads=2, dim=6, scale=scale, seed=4)
    form = ClosedForm(Oracle(layer), 6, None, False, np.random.default_rng(0))
    form.measure()
    assert 0.05 < form.scale**2 * scale < 20


def test_a_layer_without_attention_is_not_found():
    flat = ol.AttentionLayer(np.zeros((1, 3, 3)), np.eye(3)[None])
    with pytest.raises(NotApplicableError, match="outputs do not depend on attention"):
        solved(flat)


def test_another_number_of_heads_is_not_found():
    layer = ol.AttentionLayer.random(heads=3, dim=6, seed=5)
    with pytest.raises(NotApplicableError, match="outputs along one direction have rank 3"):
        solved(layer, heads=2)


def test_heads_with_equal_attention_are_one():
    layer = ol.AttentionLayer.random(heads=2, dim=5, scale=2.0, seed=6)
    doubled = ol.AttentionLayer(
        layer.attention[[0, 1, 1]],
        layer.projection[[0, 1, 1]] * np.array([1, 2, -1])[:, None, None],
    )
    assert_same(solved(doubled)[1], layer, 1e-5)
