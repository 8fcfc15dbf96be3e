"""Images of the attention weights of one example."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from gauges import permuted

from onelayer import AttentionLayer, inputs

LAYER = AttentionLayer.random(heads=3, dim=4, bias=True)
X = inputs.gaussian(1, 5, 4)


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def image(axes):
    (found,) = axes.images
    return np.asarray(found.get_array())


@pytest.mark.parametrize("causal", [False, True])
def test_every_head_is_its_weights_on_one_scale_from_zero(xp_array, causal):
    axes = LAYER.plot_attention(xp_array(X[0]), causal=causal)
    weights = LAYER.attention_weights(X, causal=causal)[0]
    assert axes.shape == (1, 3)
    for ax, expected in zip(axes[0], weights, strict=True):
        np.testing.assert_allclose(image(ax), expected)
        assert ax.images[0].get_clim() == pytest.approx((0.0, weights.max()))
        assert len(ax.get_xticks()) == len(ax.get_yticks()) == 0


def test_tokens_are_labels_at_the_edges():
    words = ["one", "two", "three", "four", "five"]
    axes = LAYER.plot_attention(X, tokens=words, other=LAYER, heads=[2, 0])
    labels = [
        [[label.get_text() for label in ticks(ax)] for ax in axes.flat]
        for ticks in (plt.Axes.get_yticklabels, plt.Axes.get_xticklabels)
    ]
    assert labels == [[words, [], words, []], [[], [], words, words]]


def test_heads_of_another_layer_are_below_those_they_match():
    axes = LAYER.plot_attention(X, other=permuted(LAYER, [2, 0, 1]))
    assert [ax.get_title() for ax in axes.flat] == [f"head {i}" for i in (0, 1, 2, 1, 2, 0)]
    for above, below in axes.T:
        np.testing.assert_allclose(image(above), image(below))


@pytest.mark.parametrize(
    ("X", "options", "error", "message"),
    [
        (np.ones((2, 3, 4)), {}, ValueError, r"X has shape \(2, 3, 4\), expected one example"),
        (np.ones(4), {}, ValueError, r"X has shape \(4,\), expected one example: \(tokens, dim\)"),
        (np.ones((3, 5)), {}, ValueError, "X has tokens of dimension 5, expected 4 as the layer"),
        (X, {"tokens": "ab"}, ValueError, "tokens has 2 labels, expected 5: one for each of X"),
        (X, {"other": 3}, TypeError, "other is a int, expected an AttentionLayer"),
        (X, {"heads": [3]}, ValueError, r"heads are \[3\], expected at least one, each below 3"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(X, options, error, message):
    with pytest.raises(error, match=message):
        LAYER.plot_attention(X, **options)
