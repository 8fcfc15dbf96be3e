"""A metric for steps on all factors: positive definite, cheap to invert, and near JᵀJ.

It is the preconditioner of solves and the matrix of their damping. Derivatives of different factors
are taken to be independent, except where outputs are decoupled (see `decoupling.py`).

The derivative by the query factor of a head is Σ_a x_aᵀ g_a, with g_a (r) what flows back to the
query of row a from random outputs. Its covariance is near C ⊗ G, with G = Σ g_aᵀ g_a and C the mean
of x_aᵀ x_a, in which rows weigh as much as their g_a are long (Martens and Grosse 2015, "K-FAC").
Keys are the same.

Outputs y = Σ_i h_i O_i + b with h_i = (Σ_b p_ib x_b) V_i are linear in all V_i, then in all O_i.
Where they are decoupled, changes of V_i move the outputs of head i only. So those outputs are a
linear regression, on the attended tokens of head i (for V_i), on the values of all heads (for the
columns of all O_j that belong to head i) and on a constant. The metric has its exact normal matrix,
of size d + m r + 1. This matters as heads attend to similar tokens: then V_i and O_j can nearly
replace each other. On hidden states of text, solves with it were ahead of those without by a factor
of 40 after 64 products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.heads import dense
from onelayer.recovery.factored import model
from onelayer.recovery.factored.model import Activations, Backward, Factors
from onelayer.recovery.factored.row_norms import RowNorms, row_norms
from onelayer.recovery.gauss_newton.batches import Block

Place: TypeAlias = tuple[Block, Activations]
Flow: TypeAlias = tuple[Place, Array]  # what flows back to a factor, row by row
T = TypeVar("T")

_SHARE = 4  # second moments of queries and keys are those of every fourth block
_RIDGE = 1e-3  # added to eigenvalues of second moments, relative to their mean
_LINEAR_RIDGE = 1e-5  # of normal matrices, which are exact, relative to their diagonals


class Pair(NamedTuple):
    """Matrices and their inverses."""

    matrix: Array
    inverse: Array

    def chosen(self, inverse: bool) -> Array:
        return self.inverse if inverse else self.matrix


class ByHead(NamedTuple):
    """Values, outputs and the output bias where outputs are decoupled."""

    own: Pair  # (m, d + m·q + 1, ..), for outputs of a head
    rest: Pair  # (m·q + 1, ..), for outputs that no head has

    def times(self, direction: Factors, inverse: bool) -> Factors:
        heads, bias = direction.heads, direction.output_bias
        xp, (inner, _) = backend.namespace(direction.output), direction.output.shape
        rows = direction.output if bias is None else xp.concat([direction.output, bias[None, :]])
        value = model.split_heads(direction.value, heads)
        own = xp.concat([value, model.split_heads(rows[:, :inner], heads)], axis=1)
        own = self.own.chosen(inverse) @ own
        dim = value.shape[1]
        rest = self.rest.chosen(inverse) @ rows[:, inner:]
        rows = xp.concat([model.join_heads(own[:, dim:, :]), rest], axis=1)
        return replace(
            direction,
            value=model.join_heads(own[:, :dim, :]),
            output=rows[:inner, :],
            output_bias=None if bias is None else rows[inner, :],
        )


class Separate(NamedTuple):
    """Values, outputs and the output bias where outputs are not decoupled."""

    value: Pair | None  # (m, q, q)
    output: Pair  # (m·q, m·q)
    output_bias: Pair  # numbers

    def times(self, direction: Factors, inverse: bool) -> Factors:
        value, bias = direction.value, direction.output_bias
        if value is not None and self.value is not None:
            by_head = model.split_heads(value, direction.heads)
            value = model.join_heads(by_head @ self.value.chosen(inverse))
        return replace(
            direction,
            value=value,
            output=self.output.chosen(inverse) @ direction.output,
            output_bias=None if bias is None else self.output_bias.chosen(inverse) * bias,
        )


@dataclass(frozen=True, eq=False)
class JointMetric:
    """A matrix for every head and kind of factor."""

    tokens: dict[str, Pair]  # C of queries and keys, (m, d, d)
    moments: dict[str, Pair]  # G of queries and keys, (m, r, r)
    key_bias: Pair | None  # numbers (d, m)
    linear: ByHead | Separate

    def times(self, direction: Factors, inverse: bool = False) -> Factors:
        found = {}
        for name, pair in self.moments.items():
            tall = model.split_heads(getattr(direction, name), direction.heads)
            tall = self.tokens[name].chosen(inverse) @ tall @ pair.chosen(inverse)
            found[name] = model.join_heads(tall)
        if self.key_bias is not None:
            found["key_bias"] = direction.key_bias * self.key_bias.chosen(inverse)
        return replace(self.linear.times(direction, inverse), **found)


def metric(
    factors: Factors,
    places: Sequence[Place],
    rng: np.random.Generator,
    by_head: bool,
    norms: Sequence[RowNorms] | None = None,
) -> JointMetric:
    """The metric at some factors, from random outputs on some of the blocks.

    With `by_head` the outputs are decoupled, and residuals may be measured in `norms`. Factors and
    blocks are float32.
    """
    some = _random_backwards(factors, places, rng, norms)
    share = sum(_rows(place) for place in places) / sum(_rows(place) for place, _ in some)
    names = ["query"] if factors.key is None else ["query", "key"]
    moments, tokens = {}, {}
    for name in names:
        flows = [(place, getattr(back, name)) for place, back in some]
        moment = _sum(flows, partial(_moments_of_heads, factors.heads), factors.query)
        pair = _inverted(moment * share)
        queries = name == "query"
        work = partial(_weighted_tokens, factors, pair.inverse * share, queries)
        weighted = _sum(flows, work, factors.query)
        mean = _mean_of_diagonals(weighted)
        mean = backend.namespace(mean).where(mean > 0, mean, 1.0)
        moments[name], tokens[name] = pair, _inverted(weighted / mean)
    bias = None
    if factors.key_bias is not None:
        flows = [(place, back.key_bias) for place, back in some]
        bias = _of_numbers(share * _sum(flows, _weighted_squares, factors.query))
    linear = _by_head(factors, places) if by_head else _separate(factors, places, some, share)
    return JointMetric(tokens, moments, bias, linear)


def norms(
    factors: Factors, places: Sequence[Place], rng: np.random.Generator
) -> list[RowNorms] | None:
    """Norms for the residuals of decoupled outputs, if examples are short enough."""
    some = _random_backwards(factors, places, rng)
    flows = [(place, back.query) for place, back in some]
    moment = _sum(flows, partial(_moments_of_heads, factors.heads), factors.query)
    mean = _inverted(moment / sum(_rows(place) for place, _ in some))
    return row_norms([at for _, at in places], mean.inverse)


def _random_backwards(
    factors: Factors,
    places: Sequence[Place],
    rng: np.random.Generator,
    norms: Sequence[RowNorms] | None = None,
) -> list[tuple[Place, Backward]]:
    """What flows back from random outputs of some blocks."""
    found = []
    for number in range(0, len(places), _SHARE):
        block, at = places[number]
        if norms is None:
            drawn = backend.like(rng.standard_normal(tuple(at.residuals.shape)), at.residuals)
        else:
            drawn = norms[number].drawn(at, rng)
        found.append((places[number], model.backward(factors, at, model.counted(drawn, block))))
    return found


def _rows(place: Place) -> int:
    return int(place[0].outputs.shape[0])


def _sum(given: Sequence[T], work: Callable[[T], Array], reference: Array) -> Array:
    """The sum of `work` over what belongs to the blocks, in float64."""
    return backend.double(blocks.fold_over(given, work, lambda a, b: a + b, reference))


def _moments_of_heads(heads: int, flow: Flow) -> Array:
    by_head = model.split_heads(flow[1], heads)
    return backend.transpose(by_head) @ by_head


def _weighted_tokens(
    factors: Factors,
    inverse: Array,
    queries: bool,
    flow: Flow,
) -> Array:
    """Second moments of tokens, weighted by head with the lengths of what flows back, (m, d, d)."""
    (block, _), back = flow
    by_head = model.split_heads(back, factors.heads)
    xp = backend.namespace(by_head)
    weights = xp.sum((by_head @ backend.like(inverse, by_head)) * by_head, axis=-1)
    rows = model.queries_of(factors, block) if queries else dense.flat_tokens(block.keys)
    found = [backend.transpose(rows * one[:, None]) @ rows for one in _along_first(weights)]
    return xp.stack(found)


def _weighted_squares(flow: Flow) -> Array:
    """Squares of tokens, weighted by those of what flows back to key biases, (d, m)."""
    (block, _), back = flow
    keys = dense.flat_tokens(block.keys)
    return backend.transpose(keys * keys) @ (back * back)


def _along_first(array: Array) -> list[Array]:
    return [array[i, ...] for i in range(array.shape[0])]


def _by_head(factors: Factors, places: Sequence[Place]) -> ByHead:
    """The normal matrices of decoupled outputs."""
    inner = int(factors.output.shape[0])

    def work(place: Place) -> Array:
        block, at = place
        xp, (n, heads, tokens, _) = backend.namespace(at.attended), at.attention.shape
        columns = [at.attended]
        if factors.output_bias is not None:
            columns.append(backend.ones((n * tokens, 1), at.attended))
        shared = model.counted(xp.concat(columns, axis=1), block)
        found = []
        for head in range(heads):
            own = xp.reshape(at.attention[:, head, :, :] @ block.keys, (n * tokens, -1))
            features = xp.concat([model.counted(own, block), shared], axis=1)
            found.append(backend.transpose(features) @ features)
        return xp.stack(found)

    normal = _sum(places, work, factors.query)
    dim = int(normal.shape[1]) - inner - int(factors.output_bias is not None)
    # The values of a head are combinations of its attended tokens: V_i alone moves its outputs.
    heads, size = int(normal.shape[0]), int(normal.shape[1])
    of_feature = (np.arange(size) - dim) // (inner // heads)
    fixed = backend.like(of_feature[None, :] == np.arange(heads)[:, None], normal)
    return ByHead(_of_normal(normal, fixed), _of_normal(normal[0, dim:, dim:]))


def _separate(
    factors: Factors,
    places: Sequence[Place],
    some: list[tuple[Place, Backward]],
    share: float,
) -> Separate:
    value = None
    if factors.value is not None:
        flows = [(place, back.value) for place, back in some]
        work = partial(_moments_of_heads, factors.heads)
        value = _inverted(_sum(flows, work, factors.query) * share)

    def gram(place: Place) -> Array:
        attended = model.counted(place[1].attended, place[0])
        return backend.transpose(attended) @ attended

    rows = sum(map(_rows, places)) * backend.ones((1,), backend.double(factors.query))
    return Separate(value, _inverted(_sum(places, gram, factors.query)), _of_numbers(rows))


def _inverted(moment: Array) -> Pair:
    """Matrices, in float64, with a part of their mean eigenvalue added to all eigenvalues."""
    mean = _mean_of_diagonals(moment)
    xp, size = backend.namespace(moment), int(moment.shape[-1])
    largest = float(xp.max(mean)) or 1.0
    one = backend.like(np.eye(size), moment)
    matrix = moment + (_RIDGE * mean + _RIDGE**2 * largest) * one
    return Pair(backend.single(matrix), backend.single(xp.linalg.inv(matrix)))


def _of_normal(normal: Array, fixed: Array | None = None) -> Pair:
    """Normal matrices with a part of their diagonals added, zero for features that are `fixed`."""
    xp = backend.namespace(normal)
    diagonal = xp.linalg.diagonal(normal)
    ridge = _LINEAR_RIDGE * (diagonal + _LINEAR_RIDGE * (float(xp.max(diagonal)) or 1.0))
    one = backend.like(np.eye(int(normal.shape[-1])), normal)
    if fixed is None:
        matrix = normal + ridge[..., None] * one
        return Pair(backend.single(matrix), backend.single(xp.linalg.inv(matrix)))
    free = (1.0 - fixed)[:, :, None] * (1.0 - fixed)[:, None, :]
    matrix = normal * free + (ridge + fixed * diagonal)[..., None] * one
    inverse = xp.linalg.inv(matrix)
    return Pair(backend.single(matrix * free), backend.single(inverse * free))


def _of_numbers(found: Array) -> Pair:
    matrix = found + _RIDGE * (float(backend.namespace(found).mean(found)) or 1.0)
    return Pair(backend.single(matrix), backend.single(1 / matrix))


def _mean_of_diagonals(matrices: Array) -> Array:
    """The mean eigenvalue of symmetric matrices (m, ·, ·), as (m, 1, 1)."""
    xp = backend.namespace(matrices)
    return xp.mean(xp.linalg.diagonal(matrices), axis=-1)[..., None, None]
