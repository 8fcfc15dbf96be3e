"""Between attention matrices with eliminated projections and factors of heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.heads import dense
from onelayer.recovery.examples import WhitenedExamples, hold
from onelayer.recovery.factored.model import Factors
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.whitening import Whitening

_ALIKE = 0.5  # least deviation, relative to the largest, of directions of similar strength


def value_rank(rank: int | None, problem: Whitening) -> int | None:
    """The rank of projections to begin with: that of the attention matrices where it is known."""
    return None if rank is None or rank >= problem.out_dim else rank


def factors(problem: WhitenedExamples, theta: Array, rank: int | None) -> Factors:
    """Factors of heads with these attention matrices, and projections fitted to the examples."""
    xp, heads = backend.namespace(theta), dense.count(theta, problem.dim)
    fit = varpro.fit(problem.batches(heads), theta, single=True)
    attention, bias = dense.unpack(theta, problem.dim)
    query, key = _halves(attention, rank)
    value, output = _halves(fit.projection, value_rank(rank, problem))
    if output is None:
        value, output = None, value
    constant = dense.unpack_weights(fit.weights, heads, problem.dim)[1]
    found = Factors(
        query=dense.side_by_side(query),
        key=None if key is None else dense.side_by_side(backend.transpose(key)),
        key_bias=None if bias is None else backend.transpose(bias),
        value=None if value is None else dense.side_by_side(value),
        output=xp.reshape(output, (-1, problem.out_dim)),
        output_bias=backend.zeros((problem.out_dim,), theta) if constant is None else constant,
        heads=heads,
    )
    if problem.offset is not None:  # which factors do not know
        found = replace(found, output_bias=problem.offset @ xp.sum(found.projections(), axis=0))
    return found.map(backend.single)


def _halves(matrices: Array, rank: int | None) -> tuple[Array, Array | None]:
    """Factors (m, d, r) and (m, r, e) of nearest matrices of a rank, of equal size."""
    if rank is None:
        return matrices, None
    left, sizes, right = backend.namespace(matrices).linalg.svd(matrices, full_matrices=False)
    root = backend.namespace(matrices).sqrt(sizes[:, :rank])
    return left[:, :, :rank] * root[:, None, :], root[:, :, None] * right[:, :rank, :]


def theta(found: Factors, problem: Whitening) -> Array:
    """The attention matrices of factors, in float64."""
    return backend.like(found.theta(), problem.whitening)


def weights(found: Factors, problem: Whitening) -> Array:
    """The projections of factors, and the output bias where there is one, in float64."""
    projections = backend.like(found.projections(), problem.whitening)
    xp = backend.namespace(projections)
    rows = xp.reshape(projections, (-1, problem.out_dim))
    if not problem.constant or found.output_bias is None:
        return rows
    return xp.concat([rows, backend.like(found.output_bias, rows)[None, :]], axis=0)


@dataclass(frozen=True, eq=False)
class HalfWhitened:
    """Coordinates between the caller's and whitened ones, for descent.

    Tokens z in whitened coordinates are z H here, with deviations that are the roots of what they
    were along each direction of the span, and a mean square of 1. Whitened tokens make weak
    directions, which carry little of the outputs, as loud as strong ones: on hidden states of text
    descent then took twice the steps. Tokens as they are would make weak directions of raw tables
    invisible.
    """

    matrix: Array  # H (dim, dim)
    inverse: Array

    @classmethod
    def of(cls, problem: Whitening) -> HalfWhitened | None:
        """Those of a problem; None where whitened coordinates are as good."""
        span = problem.span
        if problem.offset is not None or span.rank != problem.dim:
            return None
        if span.deviations[-1] > _ALIKE * span.deviations[0]:
            return None
        roots = np.sqrt(span.deviations / span.deviations.mean())
        turn = np.linalg.pinv(backend.to_numpy(problem.whitening)) @ span.basis / span.deviations
        matrix, inverse = turn * roots, np.linalg.inv(turn * roots)
        return cls(
            backend.like(matrix, problem.whitening), backend.like(inverse, problem.whitening)
        )

    def examples(self, given: WhitenedExamples) -> WhitenedExamples:
        X, Y, mask = given.arrays
        return hold(given, X @ self.matrix, Y, mask)

    def leave(self, found: Factors) -> Factors:
        """Factors of tokens z H as factors of z."""
        return _turned(found, self.matrix)

    def enter(self, found: Factors) -> Factors:
        """Factors of tokens z as factors of z H."""
        return _turned(found, self.inverse)


def _turned(found: Factors, matrix: Array) -> Factors:
    """Factors of tokens x M as factors of x."""
    matrix = backend.like(matrix, found.query)
    turned = {"query": matrix @ found.query}
    if found.key is None:
        right = dense.by_head(turned["query"], found.query.shape[0]) @ backend.transpose(matrix)
        turned["query"] = dense.side_by_side(right)
    else:
        turned["key"] = matrix @ found.key
    if found.key_bias is not None:
        turned["key_bias"] = matrix @ found.key_bias
    if found.value is not None:
        turned["value"] = matrix @ found.value
    else:
        projections = matrix @ found.projections()
        turned["output"] = backend.namespace(matrix).reshape(projections, found.output.shape)
    return replace(found, **turned)
