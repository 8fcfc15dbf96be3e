"""Activations of random features, by name: the one place where feature maps and kernels find them.

To add an activation, write a module that defines an `Activation`, as `relu.py` does, and list it
in `ACTIVATIONS`.
"""

from typing import Any

from onelayer import spelling
from onelayer.features.activations.base import Activation as Activation
from onelayer.features.activations.base import Preactivations as Preactivations
from onelayer.features.activations.relu import RELU

ACTIVATIONS: dict[str, Activation] = {one.name: one for one in (RELU,)}


def get(name: Any) -> Activation:
    """The activation of a name, which must be one of `ACTIVATIONS`."""
    return ACTIVATIONS[spelling.one_of(name, "activation", ACTIVATIONS)]
