"""Heads that are combinations of few directions: steps on their coefficients alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data.chunks import Chunks
from onelayer.heads import dense
from onelayer.heads.base import Inputs


@dataclass(frozen=True, eq=False)
class Subspace:
    """The span of orthonormal directions (count, p·d), the same for every head."""

    dim: int
    directions: Array
    inputs: Chunks[tuple[Array, ...]]  # their `scores`, of which changes are combinations

    def project(self, direction: Array) -> Array:
        return self.lift(self._coefficients(direction))

    def retract(self, theta: Array, direction: Array) -> tuple[Array, Subspace]:
        return theta + direction, self

    def scores_jvp(self, direction: Array) -> Callable[..., Array]:
        return partial(_combined_scores, coefficients=self._coefficients(direction))

    def scores_vjp(self, _reference: Array) -> Callable[..., Array]:
        return _coefficients_vjp

    def lift(self, total: Array) -> Array:
        return dense.unflatten(total @ backend.like(self.directions, total), self.dim)

    def _coefficients(self, direction: Array) -> Array:
        """Coefficients (m, count) of the nearest direction in the span."""
        basis = backend.like(self.directions, direction)
        return dense.flatten(direction, self.dim) @ backend.transpose(basis)


def scores(inputs: Inputs, theta: Array) -> Array:
    """The scores of directions, given as heads, for a block: (n, k, count, k)."""
    n, tokens, dim = inputs.keys.shape
    shape = (n, tokens, dense.count(theta, dim), tokens)
    return backend.namespace(theta).reshape(dense.scores(inputs, theta), shape)


def _combined_scores(scores: Array, coefficients: Array) -> Array:
    """How scores of all heads change along combinations of directions, (n, k·m, k)."""
    n, tokens, _, _ = scores.shape
    combined = coefficients @ backend.like(scores, coefficients)
    shape = (n, tokens * coefficients.shape[0], tokens)
    return backend.namespace(combined).reshape(combined, shape)


def _coefficients_vjp(scores: Array, change: Array) -> Array:
    """Inner products of changes of scores with the scores of the directions, (m, count)."""
    xp, (n, tokens, _, _) = backend.namespace(change), scores.shape
    change = xp.reshape(change, (n, tokens, change.shape[1] // tokens, tokens))
    flat, against = (
        xp.reshape(xp.permute_dims(one, (2, 0, 1, 3)), (one.shape[2], n * tokens**2))
        for one in (change, backend.like(scores, change))
    )
    return flat @ backend.transpose(against)
