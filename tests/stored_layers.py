"""A layer to store, and its comparison with what comes back."""

import numpy as np

from onelayer import AttentionLayer
from onelayer.array.backend import to_numpy


def random_layer(**options):
    return AttentionLayer.random(**{"heads": 2, "dim": 3, "out_dim": 4, "bias": True, **options})


def assert_same(layer, other):
    """The layers have the same arrays, to the bit."""
    assert layer.arrays().keys() == other.arrays().keys()
    for name, array in other.arrays().items():
        np.testing.assert_array_equal(to_numpy(layer.arrays()[name]), to_numpy(array))
