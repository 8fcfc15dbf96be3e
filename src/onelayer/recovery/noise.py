"""Is what a fit leaves over only noise?

At the right minimum of noisy examples the residuals are the noise and know nothing of the inputs.
In a bad minimum they still are a function of the inputs, and correlate with other functions of
them. So the residuals r_j of the examples are correlated with features φ_j that a missing head
might have (the attended tokens of random heads), and |Σ_j φ_jᵀ r_j|² is compared with what it is
when the signs of whole examples are flipped at random: no change if r is symmetric noise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onelayer import arrays
from onelayer.arrays import Array
from onelayer.recovery import reduced
from onelayer.recovery.reduced import Fit

_FLIPS = 99
_PROBES = 4  # random heads
_SCORE = 1.0  # standard deviation of their scores
_LEVEL = 0.02  # residuals as structured as this share of the flips, or less, are not noise


def is_noise(fit: Fit, rng: np.random.Generator) -> bool:
    """True if the residuals show no trace of the inputs."""
    observed, flipped = structure(fit, rng)
    return bool(np.mean(flipped >= observed) > _LEVEL)


def structure(fit: Fit, rng: np.random.Generator) -> tuple[float, np.ndarray[Any, Any]]:
    """|Σ φᵀ r|² as it is, and under random flips of sign."""
    block = fit.blocks[0]
    xp = arrays.namespace(fit.stacked)
    rows, dim = block.queries.shape[2], block.keys.shape[2]
    entries = rng.standard_normal((rows, _PROBES * dim)) * (_SCORE / dim)
    probes = arrays.like(entries, fit.stacked)
    totals: Array = 0.0
    for part, residual in zip(fit.blocks, fit.residuals, strict=True):
        features = reduced.attend(part, probes, False).features
        n, tokens, _ = part.keys.shape
        features = xp.reshape(features, (n, tokens, -1))
        products = arrays.transpose(features) @ xp.reshape(residual, (n, tokens, -1))
        signs = rng.integers(0, 2, (_FLIPS + 1, n)) * 2.0 - 1.0
        signs[0] = 1.0
        totals = totals + arrays.like(signs, products) @ xp.reshape(products, (n, -1))
    sizes = arrays.to_numpy(xp.sum(totals * totals, axis=1))
    return float(sizes[0]), sizes[1:]
