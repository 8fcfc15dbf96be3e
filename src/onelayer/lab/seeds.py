"""Random generators of a cell, one for each purpose."""

import numpy as np


def generator(seed: int, purpose: str) -> np.random.Generator:
    """The generator of a cell with this seed for one purpose: "layer", "inputs", "noise" and so on.

    >>> draws = [generator(0, purpose).integers(100) for purpose in ("layer", "inputs", "layer")]
    >>> bool(draws[0] == draws[2]), bool(draws[0] == draws[1])
    (True, False)
    """
    return np.random.default_rng([seed, *purpose.encode()])
