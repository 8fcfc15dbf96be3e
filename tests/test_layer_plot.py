"""Images of the heads of layers, and layers in notebooks."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure

from onelayer import AttentionLayer, inputs
from onelayer.span import span_of


@pytest.fixture(autouse=True)
def _closed():
    yield
    plt.close("all")


def layer(heads=3, dim=4, **options):
    return AttentionLayer.random(heads=heads, dim=dim, seed=0, **options)


def image(axes):
    (found,) = axes.images
    return np.asarray(found.get_array())


def titles(row):
    return [axes.get_title() for axes in row]


def test_every_head_is_its_attention_matrix_on_one_scale():
    drawn = layer()
    axes = drawn.plot()
    assert axes.shape == (1, 3)
    assert titles(axes[0]) == ["head 0", "head 1", "head 2"]
    largest = np.abs(drawn.attention).max()
    for one, theta in zip(axes[0], drawn.attention, strict=True):
        np.testing.assert_allclose(image(one), theta)
        assert one.images[0].get_clim() == (-largest, largest)


def test_some_heads_are_drawn_in_the_order_asked_for():
    drawn = layer()
    axes = drawn.plot(heads=(2, 0))
    assert titles(axes[0]) == ["head 2", "head 0"]
    np.testing.assert_allclose(image(axes[0, 0]), drawn.attention[2])
    assert axes[0, 0].images[0].get_clim()[1] == np.abs(drawn.attention[[2, 0]]).max()


def test_heads_of_another_layer_are_below_those_they_match():
    true = layer()
    order = [2, 0, 1]
    axes = true.plot(AttentionLayer(true.attention[order], true.projection[order]))
    assert axes.shape == (2, 3)
    assert titles(axes[1]) == ["head 1", "head 2", "head 0"]
    for above, below in axes.T:
        np.testing.assert_allclose(image(above), image(below))
    assert [row[0].get_ylabel() for row in axes] == ["this layer", "other"]


def test_a_head_without_a_match_has_an_empty_place():
    true = layer()
    axes = true.plot(AttentionLayer(true.attention[1:], true.projection[1:]))
    assert titles(axes[1]) == ["none", "head 0", "head 1"]
    assert not axes[1, 0].images


def test_on_inputs_layers_that_agree_there_look_the_same():
    rng = np.random.default_rng(1)
    X = inputs.gaussian(50, 3, 4, seed=2)
    X[:, :, 3] = 0.0  # a direction that the tokens do not have
    true = layer()
    changed = true.attention.copy()
    changed[:, 3, :] += rng.standard_normal((3, 4))
    axes = true.plot(AttentionLayer(changed, true.projection), inputs=X)
    basis = span_of(X).basis
    for (above, below), theta in zip(axes.T, true.attention, strict=True):
        assert image(above).shape == (3, 3)
        np.testing.assert_allclose(image(above), basis.T @ theta @ basis, atol=1e-12)
        np.testing.assert_allclose(image(below), image(above), atol=1e-9)


def test_padding_does_not_count_as_inputs():
    X = inputs.gaussian(50, 3, 4, seed=2)
    X[:, 0, 3], X[:, 2, 3] = 0.0, 0.0
    mask = np.array([[True, False, True]] * 50)
    assert image(layer().plot(inputs=X)[0, 0]).shape == (4, 4)
    assert image(layer().plot(inputs=X, mask=mask)[0, 0]).shape == (3, 3)


def test_given_axes_are_drawn_on():
    given = Figure().subplots(2, 2)
    axes = layer(heads=4).plot(axes=given)
    assert list(axes.flat) == list(given.flat)
    assert axes.shape == (1, 4)
    with pytest.raises(ValueError, match="axes has 4 axes, expected 3: 3 heads"):
        layer().plot(axes=given)
    with pytest.raises(ValueError, match="axes has 4 axes, expected 6: 3 heads of two layers"):
        layer().plot(layer(), axes=given)


def test_a_layer_of_zeros_has_a_scale_too():
    axes = AttentionLayer(np.zeros((1, 2, 2)), np.ones((1, 2, 2))).plot()
    assert axes[0, 0].images[0].get_clim() == (-1.0, 1.0)


@pytest.mark.parametrize("heads", [[3], [], [0, 7]])
def test_heads_that_do_not_exist_are_refused(heads):
    message = rf"heads are \[{', '.join(map(str, heads))}\], expected at least one, each below 3"
    with pytest.raises(ValueError, match=message):
        layer().plot(heads=heads)


def test_other_things_than_layers_are_refused():
    with pytest.raises(TypeError, match="other is a ndarray, expected an AttentionLayer"):
        layer().plot(np.ones(3))
    with pytest.raises(ValueError, match="inputs has tokens of dimension 5, expected 4"):
        layer().plot(inputs=np.ones((2, 2, 5)))


def test_torch_layers_are_drawn():
    torch = pytest.importorskip("torch")
    drawn = layer()
    axes = drawn.to(torch.ones(1, dtype=torch.float64)).plot()
    np.testing.assert_allclose(image(axes[0, 1]), drawn.attention[1])


def test_notebooks_show_the_shape_and_the_size_of_every_head():
    page = layer(out_dim=5, bias=True)._repr_html_()
    assert "3 heads, tokens of dimension 4, outputs of 5" in page
    assert "key bias, output bias" in page
    assert page.count("<td>2</td>") >= 3  # norms of the attention matrices
    assert "none" in layer()._repr_html_()
