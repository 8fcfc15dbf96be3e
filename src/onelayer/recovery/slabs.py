"""Slabs from rows on which heads agree: the narrowest of all examples, from one pass over them.

Where all heads agree on the attention p of row a (see `agreement`), every head satisfies

    x_a Θ_i (x_b - x_c) = log(p_b / p_c).

How far that can be trusted follows from the error of log p. With r = residual + δ size, δ the
relative error of W, p_b is known to r times its spread, and log(p_b / p_c) to

    error = r (spread_b / p_b + spread_c / p_c).

c is the token with the largest p. Slabs are chosen one by one, those with the least error first,
and not row by row: where a token has next to no attention from any head, heads agree on it for
free, and the other pairs of the row need to agree on fewer numbers. That softens the exponent with
which agreement becomes rare as tokens are added. A log-ratio near 0 has the least error but says
nothing of how large the Θ_i are, so what counts is the error relative to it. A pair whose p_b is
lost in its error gives a one-sided slab: all that is known is that c is ahead of b.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from onelayer import arrays
from onelayer.arrays import Array
from onelayer.recovery.agreement import agreement
from onelayer.recovery.examples import Examples

# Slabs per unknown: more have larger errors, fewer average less.
_TWO_SIDED, _ONE_SIDED = 16, 4
# A log-ratio known to this is as good as exact: more would only make slabs more alike.
_LEAST_ERROR = 0.03
Numbers = np.ndarray[Any, Any]

# Half the width of a slab in units of its error; see `sculpt` for how it was measured.
WIDTH = 8.0


@dataclass(frozen=True, eq=False)
class Slabs:
    """Candidate slabs as they were found: `b` and `c` are positions of tokens in their example."""

    key: Numbers  # what they are chosen by, the smallest first
    tokens: Numbers  # (s, k, d)
    output: Numbers  # (s, e)
    row: Numbers
    b: Numbers
    c: Numbers
    value: Numbers  # log(p_b / p_c), or a bound on it from above
    error: Numbers
    tolerance: Numbers  # of y
    fingerprint: Numbers  # equal for equal normals

    def take(self, index: Numbers) -> Slabs:
        return Slabs(*(array[index] for array in self._arrays()))

    def smallest(self, count: int) -> Slabs:
        """The `count` slabs with the smallest keys, of equal ones only the first."""
        order = np.argsort(self.key, kind="stable")
        _, first = np.unique(self.fingerprint[order], return_index=True)
        return self.take(order[np.sort(first)[:count]])

    def beside(self, other: Slabs) -> Slabs:
        pairs = zip(self._arrays(), other._arrays(), strict=True)
        return Slabs(*(np.concatenate(pair) for pair in pairs))

    def factors(self) -> tuple[Numbers, Numbers]:
        """x_a and x_b - x_c, each (s, d)."""
        each = np.arange(len(self.row))
        gaps = self.tokens[each, self.b] - self.tokens[each, self.c]
        return self.tokens[each, self.row], gaps

    def normals(self) -> Numbers:
        """x_aᵀ (x_b - x_c) as vectors (s, d²)."""
        queries, gaps = self.factors()
        products = np.asarray(queries[:, :, None] * gaps[:, None, :])
        return products.reshape(len(gaps), gaps.shape[1] ** 2)

    def _arrays(self) -> list[Numbers]:
        return [getattr(self, field.name) for field in fields(self)]


def find_slabs(examples: Examples, projection_sum: Array, error: float) -> tuple[Slabs, Slabs]:
    """The two-sided slabs with the least errors, and the surest one-sided ones."""
    unknowns = examples.dim**2
    counts = _TWO_SIDED * unknowns, _ONE_SIDED * unknowns

    def work(X: Array, Y: Array) -> tuple[Slabs, Slabs]:
        return _block_slabs(X, Y, projection_sum, error, counts)

    def merge(first: tuple[Slabs, Slabs], second: tuple[Slabs, Slabs]) -> tuple[Slabs, Slabs]:
        pairs = zip(first, second, counts, strict=True)
        two_sided, one_sided = (a.beside(b).smallest(count) for a, b, count in pairs)
        return two_sided, one_sided

    return examples.fold(work, merge)


def _block_slabs(
    X: Array, Y: Array, projection_sum: Array, error: float, counts: tuple[int, int]
) -> tuple[Slabs, Slabs]:
    """The slabs of one block that may be among the best, two-sided and one-sided."""
    found = agreement(X, Y, projection_sum)
    weights, residual, size, spread = (
        arrays.to_numpy(array)
        for array in (found.weights, found.residual, found.size, found.spread)
    )
    tolerance = residual + error * size
    wrong = tolerance[:, :, None] * spread[:, None, :]  # error of p: (n, k rows, k tokens)
    top = np.argmax(weights, axis=2, keepdims=True)

    def at_top(array: Numbers) -> Numbers:
        return np.take_along_axis(array, top, axis=2)

    def gather(key: Numbers, count: int, value: Numbers, errors: Numbers) -> Slabs:
        index = _least(key.ravel(), count)
        example, row, b = np.unravel_index(index, key.shape)
        tokens, outputs = (_rows(array, example) for array in (X, Y))
        slabs = Slabs(
            key=key[example, row, b],
            tokens=tokens,
            output=outputs[np.arange(len(row)), row],
            row=row,
            b=b,
            c=top[example, row, 0],
            value=value[example, row, b],
            error=errors[example, row, b],
            tolerance=tolerance[example, row],
            fingerprint=np.zeros(len(row)),
        )
        return replace(slabs, fingerprint=_fingerprint(slabs))

    certain = weights > wrong
    safe = np.where(certain, weights, 1.0)
    relative = np.where(certain, wrong / safe, np.inf)
    value = np.log(safe / at_top(safe))
    log_error = np.maximum(relative + at_top(relative), _LEAST_ERROR)
    # Half attention to b, half to c would be known best, and says nothing of how large Θ is.
    distinct = np.minimum(np.abs(value), 1.0)
    key = np.where(distinct > 0, log_error / np.where(distinct > 0, distinct, 1.0), np.inf)
    two_sided = gather(key, counts[0], value, log_error)

    # Lost in its error: log(p_b / p_c) is at most that of the largest p_b and the least p_c.
    highest, lowest = np.maximum(weights, 0.0) + WIDTH * wrong, at_top(weights - WIDTH * wrong)
    one_sided = ~certain & (lowest > highest)
    bound = np.log(np.where(one_sided, highest / np.where(one_sided, lowest, 1.0), 1.0))
    sure = np.where(one_sided, wrong, np.inf)
    return two_sided, gather(sure, counts[1], bound, np.zeros_like(wrong))


def _fingerprint(slabs: Slabs) -> Numbers:
    """One number a slab, equal for slabs with equal normals or opposite ones.

    Boolean examples repeat, and so do their slabs: without care half of them may be copies.
    """
    dim = slabs.tokens.shape[2]
    mixing = np.random.default_rng(0).standard_normal((dim, dim))
    queries, gaps = slabs.factors()
    return np.asarray(np.round(np.abs(np.sum((queries @ mixing) * gaps, axis=1)), 9))


def _least(keys: Numbers, count: int) -> Numbers:
    """Positions of the smallest finite keys, at most so many."""
    if count < len(keys):
        index = np.sort(np.argpartition(keys, count)[:count])
    else:
        index = np.arange(len(keys))
    return np.asarray(index[np.isfinite(keys[index])])


def _rows(array: Array, index: Numbers) -> Numbers:
    xp = arrays.namespace(array)
    place = xp.asarray(index, device=arrays.device(array))
    return arrays.to_numpy(xp.take(array, place, axis=0))
