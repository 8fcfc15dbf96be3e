"""The values of targets: functions of the tokens of a block of examples.

They take tokens (b, N + 1, d) and a mask (b, N + 1) or None, and return (b,). Most are sums
Σ_i w_i F(x_0, x_i) over the keys, of a function of a query and a key (`PairFunction`) with weights
that know only which keys are there (`Weights`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.theory.sphere_moments import Numbers

PairFunction: TypeAlias = Callable[[Array, Array], Array]  # (b, d) and (b, N, d) -> (b, N)
Weights: TypeAlias = Callable[[Array], Array]  # which keys are there, 1 or 0: (b, N) -> (b, N)


def equal(there: Array) -> Array:
    """1/N, N the number of keys that are there."""
    return there / backend.namespace(there).sum(there, axis=1, keepdims=True)


def alternating(there: Array) -> Array:
    """1/N, -1/N, 1/N, .. by position."""
    return equal(there) * backend.like((-1.0) ** np.arange(there.shape[1]), there)


def increasing(there: Array) -> Array:
    """1/N, 2/N, 3/N, .. by position."""
    return equal(there) * backend.like(np.arange(1.0, there.shape[1] + 1), there)


def only(there: Array, position: int) -> Array:
    """1 for the key at `position`, counted from 1, and 0 for the others."""
    return there * backend.like(np.arange(1, there.shape[1] + 1) == position, there)


def key_power(query: Array, keys: Array, power: int, beta: Numbers) -> Array:  # noqa: ARG001
    """<β, x_i>^p."""
    return (keys @ backend.like(beta, keys)) ** power


def query_power(query: Array, keys: Array, power: int, beta: Numbers) -> Array:  # noqa: ARG001
    """<β, x_0>^p: (b, 1), the same for all keys."""
    return ((query @ backend.like(beta, query)) ** power)[:, None]


def correlation(query: Array, keys: Array, power: int, rotation: Numbers, beta: Numbers) -> Array:
    """<x_0, S x_i>^q <β, x_i>."""
    turned = query @ backend.like(rotation, query)
    correlations = (keys @ turned[:, :, None])[:, :, 0]
    return correlations**power * (keys @ backend.like(beta, keys))


def weighted_sum(
    tokens: Array, mask: Array | None, values: PairFunction, weights: Weights
) -> Array:
    """Σ_i w_i F(x_0, x_i), F given by `values`."""
    each = values(tokens[:, 0, :], tokens[:, 1:, :])
    return backend.namespace(tokens).sum(each * weights(_keys_there(tokens, mask)), axis=1)


def two_hops(tokens: Array, mask: Array | None, beta: Numbers) -> Array:
    """x_0ᵀ A² β as a product of A x_0 and A β, A = (1/N) Σ_i x_i x_iᵀ."""
    keys, shares = tokens[:, 1:, :], equal(_keys_there(tokens, mask))
    from_query = (keys @ tokens[:, 0, :, None])[:, :, 0] * shares
    from_beta = (keys @ backend.like(beta, tokens)) * shares
    once = from_query[:, None, :] @ keys
    return backend.namespace(tokens).sum(once * (from_beta[:, None, :] @ keys), axis=(1, 2))


def _keys_there(tokens: Array, mask: Array | None) -> Array:
    """1 for each key that is there, 0 for the others: (b, N), or (1, N) without a mask."""
    if mask is None:
        return backend.ones((1, tokens.shape[1] - 1), tokens)
    return backend.namespace(tokens).astype(mask[:, 1:], tokens.dtype)
