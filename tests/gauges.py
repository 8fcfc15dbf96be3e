"""Layers that are equal up to what outputs do not show: the order of heads, splits, factors."""

import numpy as np
from hypothesis import strategies as st

from onelayer import AttentionLayer


def permuted(layer, order):
    """The same layer with its heads in another order, or with some of them alone."""
    key_bias = None if layer.key_bias is None else layer.key_bias[order]
    return AttentionLayer(
        layer.attention[order], layer.projection[order], key_bias, layer.output_bias
    )


def split(layer, rng):
    """The same layer with each head in one to three parts, and with heads that do nothing."""
    parts = rng.integers(1, 4, layer.heads)
    owner = np.repeat(np.arange(layer.heads), parts)
    shares = rng.uniform(0.5, 1.5, owner.size)
    shares /= np.bincount(owner, shares)[owner]
    found = permuted(layer, [*owner, *owner])
    found.projection[: owner.size] *= shares[:, None, None]
    found.projection[owner.size :] = 0.0
    found.attention[owner.size :] += rng.standard_normal(layer.attention[owner].shape)
    return permuted(found, rng.permutation(found.heads))


@st.composite
def layers(draw, most_heads=4):
    """Layers of all shapes, with biases or without."""
    size = st.integers(1, 4)
    heads, out_dim, seed = draw(st.integers(1, most_heads)), draw(size), draw(st.integers(0, 999))
    dim, bias = draw(size), draw(st.booleans())
    return AttentionLayer.random(heads, dim, out_dim=out_dim, bias=bias, seed=seed)
