"""Slabs from rows on which heads agree: the narrowest of all examples, from one pass over them.

Where all heads agree on the attention p of row a (see `agreement`), every head satisfies

    x_a Θ_i (x_b - x_c) = log(p_b / p_c).

Its accuracy follows from the error of log p. An error δ of W moves y by δ size, equally in all e
directions on average. So with r = residual + δ size / √e, p_b is known to r times its spread, and
log(p_b / p_c) to

    error = r (spread_b / p_b + spread_c / p_c).

c is the token with the largest p. Slabs are chosen one by one, those with the least error first,
not row by row: a token that no head attends to is agreed on by all heads, and the other pairs of
the row need to agree on fewer numbers. That softens the exponent with which agreement becomes rare
as tokens are added. A log-ratio near 0 has the least error but does not determine how large the Θ_i
are, so slabs are ordered by the error relative to it, up to a ratio of 1. A pair whose p_b is
smaller than its error gives a one-sided slab: all that is known is that c is ahead of b.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.phases.agreement import agreement
from onelayer.recovery.phases.fold import fold
from onelayer.recovery.phases.state import Numbers

# Slabs per unknown: more have larger errors, fewer average less.
_TWO_SIDED, _ONE_SIDED = 16, 4
# Smaller errors of a log-ratio count as this: choosing by them would only select similar slabs.
_LEAST_ERROR = 0.03
WIDTH = 8.0  # half the width of a slab in units of its error; see `Sculpt.inconsistent`


class Slabs(NamedTuple):
    """Candidate slabs; `b` and `c` are positions of tokens in their example."""

    key: Numbers  # slabs with small keys are preferred
    tokens: Numbers  # (s, k, d)
    output: Numbers  # (s, e)
    row: Numbers
    b: Numbers
    c: Numbers
    value: Numbers  # log(p_b / p_c), or an upper bound on it
    error: Numbers
    tolerance: Numbers  # of y
    least: Numbers  # the smallest p of the row
    fingerprint: Numbers  # equal for equal normals

    def take(self, index: Numbers) -> Slabs:
        return Slabs(*(array[index] for array in self))

    def smallest(self, count: int) -> Slabs:
        """The `count` slabs with the smallest keys, only the first of equal ones."""
        return self.take(_least(self.key, self.fingerprint, count))

    def concat(self, other: Slabs) -> Slabs:
        return Slabs(*map(np.concatenate, zip(self, other, strict=True)))

    def normals(self) -> Numbers:
        """x_aᵀ (x_b - x_c) as vectors (s, d²)."""
        each = np.arange(len(self.row))
        queries = self.tokens[each, self.row]
        gaps = self.tokens[each, self.b] - self.tokens[each, self.c]
        products = np.asarray(queries[:, :, None] * gaps[:, None, :])
        return products.reshape(len(gaps), gaps.shape[1] ** 2)


def find_slabs(
    examples: WhitenedExamples, projection_sum: Array, error: float
) -> tuple[Slabs, Slabs]:
    """The most accurate two-sided slabs, and the most certain one-sided ones."""
    counts = _TWO_SIDED * examples.dim**2, _ONE_SIDED * examples.dim**2

    def work(X: Array, Y: Array) -> tuple[Slabs, Slabs]:
        pairs = _pairs(X, Y, projection_sum, error)
        two_sided = pairs.gather(counts[0], *pairs.two_sided())
        return two_sided, pairs.gather(counts[1], *pairs.one_sided())

    def merge(first: tuple[Slabs, Slabs], second: tuple[Slabs, Slabs]) -> tuple[Slabs, Slabs]:
        pairs = zip(first, second, counts, strict=True)
        two_sided, one_sided = (a.concat(b).smallest(count) for a, b, count in pairs)
        return two_sided, one_sided

    return fold(examples, work, merge)


@dataclass(frozen=True, eq=False)
class _Pairs:
    """For every row of a block, each token b compared with the top token c: (n, k rows, k b)."""

    X: Array
    Y: Array
    top: Numbers  # c, (n, k rows, 1)
    tolerance: Numbers  # of y, (n, k rows)
    weights: Numbers  # p
    wrong: Numbers  # error of p
    fingerprint: Numbers

    def at_top(self, array: Numbers) -> Numbers:
        return np.take_along_axis(array, self.top, axis=2)

    def two_sided(self) -> tuple[Numbers, Numbers, Numbers]:
        """Keys, log(p_b / p_c), and its error."""
        certain = self.weights > self.wrong
        safe = np.where(certain, self.weights, 1.0)
        relative = np.where(certain, self.wrong / safe, np.inf)
        value = np.log(safe / self.at_top(safe))
        error = np.maximum(relative + self.at_top(relative), _LEAST_ERROR)
        size = np.minimum(np.abs(value), 1.0)  # zero for b = c
        key = np.where(size > 0, error / np.where(size > 0, size, 1.0), np.inf)
        return key, value, error

    def one_sided(self) -> tuple[Numbers, Numbers, Numbers]:
        """Keys, upper bounds on log(p_b / p_c) where p_b is below its error, and zero errors."""
        highest = np.maximum(self.weights, 0.0) + WIDTH * self.wrong
        lowest = self.at_top(self.weights - WIDTH * self.wrong)
        ahead = ~(self.weights > self.wrong) & (lowest > highest)
        bound = np.log(np.where(ahead, highest / np.where(ahead, lowest, 1.0), 1.0))
        return np.where(ahead, self.wrong, np.inf), bound, np.zeros_like(bound)

    def gather(self, count: int, key: Numbers, value: Numbers, error: Numbers) -> Slabs:
        """At most `count` slabs with the smallest keys, all different."""
        index = _least(key.ravel(), self.fingerprint.ravel(), count)
        example, row, b = place = np.unravel_index(index, key.shape)
        tokens, outputs = (backend.to_numpy(backend.rows(a, example)) for a in (self.X, self.Y))
        return Slabs(
            key=key[place],
            tokens=tokens,
            output=outputs[np.arange(len(row)), row],
            row=row,
            b=b,
            c=self.top[example, row, 0],
            value=value[place],
            error=error[place],
            tolerance=self.tolerance[example, row],
            least=self.weights[example, row].min(axis=1),
            fingerprint=self.fingerprint[place],
        )


def _pairs(X: Array, Y: Array, projection_sum: Array, error: float) -> _Pairs:
    weights, residual, size, spread = map(backend.to_numpy, agreement(X, Y, projection_sum))
    tolerance = residual + error * size / math.sqrt(Y.shape[2])
    top = np.argmax(weights, axis=2, keepdims=True)
    # A random number x_a R x_b for each pair: the difference of those of b and c identifies the
    # normal up to its sign. Boolean examples repeat, and without this many slabs would be copies.
    mixing = np.random.default_rng(0).standard_normal((X.shape[2], X.shape[2]))
    mixed = backend.to_numpy(X @ backend.like(mixing, X) @ backend.transpose(X))
    apart = np.abs(mixed - np.take_along_axis(mixed, top, axis=2))
    wrong = tolerance[:, :, None] * spread[:, None, :]
    return _Pairs(X, Y, top, tolerance, weights, wrong, np.round(apart, 9))


def _least(keys: Numbers, fingerprints: Numbers, count: int) -> Numbers:
    """Positions of the smallest finite keys, ascending, the first of equal fingerprints only."""
    index = np.flatnonzero(np.isfinite(keys))
    index = index[np.argsort(keys[index], kind="stable")]
    _, first = np.unique(fingerprints[index], return_index=True)
    return np.asarray(index[np.sort(first)[:count]])
