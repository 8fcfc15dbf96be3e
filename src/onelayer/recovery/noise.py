"""Is what a fit leaves over only noise?

At the right minimum of noisy examples the residuals are the noise and know nothing of the inputs.
In a bad minimum they still are a function of the inputs, and correlate with other functions of
them. So the residuals r_j of the examples are correlated with features φ_j that a missing head
or a bias might have (see `_features`), and |Σ_j φ_jᵀ r_j|² is compared with what it is
when the signs of whole examples are flipped at random: no change if r is symmetric noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from onelayer import arrays, attention
from onelayer.arrays import Array
from onelayer.recovery import reduced
from onelayer.recovery.cut import Block
from onelayer.recovery.reduced import Fit

_FLIPS = 99
_PROBES = 4  # random heads, with scores of standard deviation 1
_LEVEL = 0.01  # residuals as structured as this share of the flips, or less, are not noise


def is_noise(fit: Fit, blocks: Sequence[Block], rng: np.random.Generator) -> bool:
    """True if the residuals of the blocks show no trace of the inputs in any kind of feature."""
    return all(np.mean(sizes[1:] >= sizes[0]) > _LEVEL for sizes in structure(fit, blocks, rng))


def structure(
    fit: Fit, blocks: Sequence[Block], rng: np.random.Generator
) -> list[np.ndarray[Any, Any]]:
    """|Σ φᵀ r|² for every kind of feature: as it is, then under random flips of sign."""
    xp = arrays.namespace(fit.stacked)
    dim = fit.cut.dim
    entries = rng.standard_normal((3, dim + 1, _PROBES * dim)) / dim
    probes = [arrays.like(matrix, fit.stacked) for matrix in entries]
    totals: list[Array] = []
    for block, residual in zip(blocks, reduced.residuals_on(fit, blocks), strict=True):
        n, tokens, _ = block.keys.shape
        signs = rng.integers(0, 2, (_FLIPS + 1, n)) * 2.0 - 1.0
        signs[0] = 1.0
        sums = []
        for features in _features(block, residual, probes):
            rows = xp.reshape(features, (n, tokens, -1))
            products = arrays.transpose(rows) @ xp.reshape(residual, (n, tokens, -1))
            sums.append(arrays.like(signs, products) @ xp.reshape(products, (n, -1)))
        totals = sums if not totals else [a + b for a, b in zip(totals, sums, strict=True)]
    return [arrays.to_numpy(xp.sum(total * total, axis=1)) for total in totals]


def _features(block: Block, residual: Array, probes: list[Array]) -> list[Array]:
    """Kinds of features, odd and even in the inputs (a layer without biases is odd in them).

    Tokens attended to by random heads with a key bias; their squares, with a constant; products of
    two coordinates of the row's own token; and powers of what was fitted, which show an output
    that was bent afterwards (Ramsey 1969).
    """
    xp = arrays.namespace(residual)
    queries = attention.with_constant(block.keys)
    extended = replace(block, queries=queries)
    attended = reduced.attend(extended, probes[0], output_bias=True).features
    own = xp.reshape(queries, (-1, queries.shape[2]))
    fitted = block.outputs - residual
    return [
        attended[:, :-1],
        xp.concat([attended[:, :-1] ** 2, attended[:, -1:]], axis=1),
        (own @ probes[1]) * (own @ probes[2]),
        xp.concat([fitted**2, fitted**3], axis=1),
    ]
