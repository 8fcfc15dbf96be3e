"""Between attention matrices with eliminated projections and factors of heads."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.heads import dense
from onelayer.recovery import roles
from onelayer.recovery.examples import WhitenedExamples, hold
from onelayer.recovery.factored.model import Factors
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.whitening import Whitening

Matrix: TypeAlias = np.ndarray[Any, Any]

_FAINT = 1e-6  # least deviation of outputs, relative to the largest, that is made larger
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
    """Coordinates of tokens and outputs for descent, between the caller's and whitened ones.

    Tokens z in whitened coordinates are z H here, and outputs y are y M, with deviations that are
    the roots of what they were along each direction, and a mean square of 1. Whitening makes weak
    directions, which carry little, as loud as strong ones: on hidden states of text descent then
    took twice the steps. As they are, weak directions of raw tables would be invisible, and so
    would heads in weak directions of the outputs: on ±1 inputs one of 12 heads was missing, and
    with half-whitened outputs none.
    """

    tokens: Array  # H (dim, dim)
    tokens_back: Array
    outputs: Array  # M (e, e)
    outputs_back: Array

    @classmethod
    def of(cls, examples: WhitenedExamples) -> HalfWhitened:
        """Those of examples in memory; tokens stay as they are if they vary alike everywhere."""
        reference = examples.whitening
        found = (*_half_whitened_tokens(examples), *_half_whitened_outputs(examples))
        return cls(*(backend.like(one, reference) for one in found))

    def examples(self, given: WhitenedExamples) -> WhitenedExamples:
        X, Y, mask = given.arrays
        return hold(given, X @ self.tokens, Y @ self.outputs, mask)

    def leave(self, found: Factors) -> Factors:
        """Factors of z H and y M as factors of z and y."""
        return _turned(found, self.tokens, self.outputs_back)

    def enter(self, found: Factors) -> Factors:
        """Factors of z and y as factors of z H and y M."""
        return _turned(found, self.tokens_back, self.outputs)


def _half_whitened_tokens(problem: Whitening) -> tuple[Matrix, Matrix]:
    """H and its inverse."""
    span, one = problem.span, np.eye(problem.dim)
    if problem.offset is not None or span.rank != problem.dim:
        return one, one
    if span.deviations[-1] > _ALIKE * span.deviations[0]:
        return one, one
    roots = np.sqrt(span.deviations / span.deviations.mean())
    turn = np.linalg.pinv(backend.to_numpy(problem.whitening)) @ span.basis / span.deviations
    return turn * roots, np.linalg.inv(turn * roots)


def _half_whitened_outputs(examples: WhitenedExamples) -> tuple[Matrix, Matrix]:
    """M and its inverse."""
    rows, count = dense.flat_tokens(examples.Y), examples.examples * examples.tokens
    observed = roles.observed(examples.mask)
    if observed is not None:
        rows = rows * backend.like(dense.flat_tokens(observed[..., None]), rows)
        count = int(np.count_nonzero(backend.to_numpy(observed)))
    found = backend.to_numpy(backend.transpose(rows) @ rows) / max(count, 1)
    values, vectors = np.linalg.eigh(found)
    largest = float(values[-1]) or 1.0
    deviations = np.sqrt(np.maximum(values, _FAINT**2 * largest))
    roots = np.sqrt(deviations)
    roots = roots * (float(np.mean(values / roots**2)) ** 0.5 or 1.0)
    return (vectors / roots) @ vectors.T, (vectors * roots) @ vectors.T


def _turned(found: Factors, matrix: Array, outputs: Array) -> Factors:
    """Factors of tokens x A, A the matrix, as factors of x, with outputs times another matrix."""
    matrix, outputs = (backend.like(one, found.query) for one in (matrix, outputs))
    turned = {"query": matrix @ found.query, "output": found.output @ outputs}
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
        projections = matrix @ found.projections() @ outputs
        turned["output"] = backend.namespace(matrix).reshape(projections, found.output.shape)
    if found.output_bias is not None:
        turned["output_bias"] = found.output_bias @ outputs
    return replace(found, **turned)
