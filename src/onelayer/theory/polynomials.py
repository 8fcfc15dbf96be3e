"""Polynomials of a query and a key, given by tensors: their values, and their exact moments.

    F(x_0, x_i) = Σ_rs <x_0^{⊗r} ⊗ x_i^{⊗s}, f_rs>,

where f_rs has r + s legs, those of the query first. Tensors are made symmetric in the legs of the
query and in those of the key: that changes no value of F, makes the norm smaller, and lets one
pairing of legs stand for many in the moments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import product
from typing import Any, TypeAlias

import numpy as np

from onelayer.array import backend, blocks, checks
from onelayer.array.backend import Array
from onelayer.theory.sphere_moments import Numbers, PairMoments

Degrees: TypeAlias = tuple[int, int]  # (r, s): the powers of the query and of the key
Coefficients: TypeAlias = Mapping[Degrees, Any]  # f_rs, arrays of shape (d,) * (r + s)
Tensors: TypeAlias = Mapping[Degrees, Numbers]  # the same in float64, symmetric
SquaredNorms: TypeAlias = Mapping[Degrees, float]  # |f_rs|²


def checked(coefficients: Coefficients) -> tuple[Tensors, int]:
    """The tensors, each made symmetric in the legs of the query and in those of the key, and d."""
    if not isinstance(coefficients, Mapping):
        raise TypeError(
            f"coefficients is a {type(coefficients).__name__}, expected a mapping from (r, s) "
            "to tensors"
        )
    tensors = {_degrees(rs): checks.numbers_of(f, f"f_{rs}") for rs, f in coefficients.items()}
    dims = {size for tensor in tensors.values() for size in tensor.shape}
    if len(dims) != 1:
        raise ValueError(
            f"coefficients have axes of sizes {sorted(dims)}, expected one size, the dimension "
            "of the tokens, and at least one tensor with r + s > 0"
        )
    for (r, s), tensor in tensors.items():
        if tensor.ndim != r + s:
            raise ValueError(f"f_{(r, s)} has shape {tensor.shape}, expected {r + s} axes")
    dim = checks.positive_int(dims.pop(), "the dimension of the coefficients")
    return {(r, s): _symmetrised(_symmetrised(f, 0, r), r, s) for (r, s), f in tensors.items()}, dim


def _degrees(key: Any) -> Degrees:
    if not isinstance(key, tuple) or len(key) != 2:
        raise TypeError(f"coefficients have the key {key!r}, expected pairs (r, s) of degrees")
    r, s = key
    return checks.whole_number(r, "r", least=0), checks.whole_number(s, "s", least=0)


def _symmetrised(tensor: Numbers, first: int, legs: int) -> Numbers:
    """The mean over all orders of some axes: each new one trades places with all before it."""
    for new in range(1, legs):
        swaps = [np.swapaxes(tensor, first + old, first + new) for old in range(new + 1)]
        tensor = np.asarray(sum(swaps)) / (new + 1)
    return tensor


def values(query: Array, keys: Array, tensors: Tensors) -> Array:
    """F(x_0, x_i) for queries (b, d) and keys (b, N, d): (b, N)."""
    n, count, dim = keys.shape
    xp, total = backend.namespace(keys), backend.zeros((n, count), keys)
    for (r, s), tensor in tensors.items():
        f = backend.like(tensor, keys)
        numbers = dim ** (r + s - 1 if r else 0) + count * dim ** max(0, s - 1)
        parts = blocks.slices(n, 8 * numbers)
        total += xp.concat([_contracted(query[i, :], keys[i, :, :], f, r, s) for i in parts])
    return total


def _contracted(query: Array, keys: Array, tensor: Array, r: int, s: int) -> Array:
    """<x_0^{⊗r} ⊗ x_i^{⊗s}, tensor> for all keys, leg by leg: (b, N)."""
    xp = backend.namespace(keys)
    n, count, dim = keys.shape
    rest = xp.reshape(tensor, (1, -1))
    for _ in range(r):
        rest = _leg(query, rest)
    if s == 0:
        return xp.broadcast_to(rest, (n, count))
    rest = xp.reshape(keys @ xp.reshape(rest, (rest.shape[0], dim, -1)), (n * count, -1))
    for _ in range(s - 1):
        rest = _leg(xp.reshape(keys, (n * count, dim)), rest)
    return xp.reshape(rest, (n, count))


def _leg(vectors: Array, tensors: Array) -> Array:
    """The first legs of tensors (b or 1, d · m) joined with vectors (b, d): (b, m)."""
    shape = (tensors.shape[0], vectors.shape[1], -1)
    by_leg = backend.namespace(vectors).reshape(tensors, shape)
    return vectors @ by_leg[0, ...] if shape[0] == 1 else (vectors[:, None, :] @ by_leg)[:, 0, :]


def moments(tensors: Tensors, dim: int) -> PairMoments:
    """Moments of F on the unit sphere, exact for all degrees."""
    given_query = _averaged_over_keys(tensors, dim)
    of_query = {(0, r): tensor for (r, _), tensor in given_query.items()}
    mean = float(_averaged_over_keys(of_query, dim).get((0, 0), 0.0))
    total, explained = _second_moment(tensors, dim), _second_moment(given_query, dim)
    return PairMoments(mean, max(0.0, total - explained), max(0.0, explained - mean**2))


def _averaged_over_keys(tensors: Tensors, dim: int) -> dict[Degrees, Numbers]:
    """The tensors of E[F | x_0], a polynomial in x_0 alone."""
    averaged: dict[Degrees, Numbers] = {}
    for (r, s), tensor in tensors.items():
        for pairs, _, weight in _pairings(s, 0, dim):
            averaged[r, 0] = averaged.get((r, 0), 0.0) + weight * _traced(tensor, 0, pairs)
    return averaged


def _second_moment(tensors: Tensors, dim: int) -> float:
    """E F²: legs of the query pair with legs of the query, legs of the key with legs of the key."""
    terms = []
    for ((r, s), one), ((r2, s2), other) in product(tensors.items(), repeat=2):
        for of_query, of_key in product(_pairings(r, r2, dim), _pairings(s, s2, dim)):
            (a, a2, query_weight), (b, b2, key_weight) = of_query, of_key
            overlap = np.vdot(_traced(one, a, b), _traced(other, a2, b2))
            terms.append(query_weight * key_weight * float(overlap))
    return math.fsum(terms)


def _pairings(legs: int, other_legs: int, dim: int) -> list[tuple[int, int, float]]:
    """How E x^{⊗(k+l)} joins symmetric tensors of k and l legs, as (a, b, weight).

    E x^{⊗2m} is the sum over all pairings of the legs, divided by d (d+2) ... (d+2m-2). Those that
    join a pairs of legs inside the first tensor, b inside the second and the other j = k - 2a =
    l - 2b across all give the same; there are k! l! / (2^(a+b) a! b! j!) of them.
    """
    if (legs + other_legs) % 2:
        return []
    density = math.prod(1 / (dim + 2 * i) for i in range((legs + other_legs) // 2))
    found = []
    for across in range(legs % 2, min(legs, other_legs) + 1, 2):
        a, b = (legs - across) // 2, (other_legs - across) // 2
        ways = math.factorial(legs) * math.factorial(other_legs)
        ways //= 2 ** (a + b) * math.factorial(a) * math.factorial(b) * math.factorial(across)
        found.append((a, b, ways * density))
    return found


def _traced(tensor: Numbers, query_pairs: int, key_pairs: int) -> Numbers:
    """The tensor with pairs of legs of the query, the first, and of the key, the last, joined."""
    for _ in range(query_pairs):
        tensor = np.trace(tensor, axis1=0, axis2=1)
    for _ in range(key_pairs):
        tensor = np.trace(tensor, axis1=-2, axis2=-1)
    return tensor
