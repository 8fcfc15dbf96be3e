"""A layer as factors of its heads, and the derivatives of its outputs by hand.

With attention matrices Θ_i = Q_i K_iᵀ and projections W_i = V_i O_i of rank r far below d, a row
costs 8 d m r operations, where Θ_i and W_i themselves take 2 m d (d + e). A key bias c_i is
free. For row a

    s_ib = (x_a Q_i) · (x_b K_i) + x_b c_i,    p_i = softmax(s_i),    h_i = Σ_b p_ib x_b V_i,

and y_a = Σ_i h_i O_i + b. Factors are not unique (Q_i G and K_i G⁻ᵀ are the same head), so nothing
here looks at them one by one: descent orthogonalises the steps of a head, and Gauss-Newton is in a
metric of its own for each head.

The key factor is None where attention matrices have full rank: Q_i is Θ_i then. The value factor is
None where projections have: O_i is W_i. Arrays are those of one backend, in one precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.heads import dense
from onelayer.recovery.gauss_newton.batches import Block

_FORBIDDEN = -1e30  # a score without weight, also where it is the only one


@dataclass(frozen=True, eq=False)
class Factors:
    """The factors of all heads side by side, or directions in which these may move."""

    query: Array  # (d, m·r)
    key: Array | None  # (d, m·r)
    key_bias: Array | None  # (d, m)
    value: Array | None  # (d, m·q)
    output: Array  # (m·q, e)
    output_bias: Array | None  # (e,)
    heads: int

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Names and arrays of the factors that there are."""
        for field in fields(self):
            array = getattr(self, field.name)
            if field.name != "heads" and array is not None:
                yield field.name, array

    def map(self, work: Callable[..., Array], *others: Factors) -> Factors:
        """`work(array, *arrays of others)` for every factor."""
        found = {
            name: work(array, *(getattr(other, name) for other in others))
            for name, array in self.arrays()
        }
        return replace(self, **found)

    def flat(self) -> Array:
        """All numbers in one row."""
        parts = [backend.namespace(one).reshape(one, (-1,)) for _, one in self.arrays()]
        return backend.namespace(*parts).concat(parts)

    def unflat(self, flat: Array) -> Factors:
        """Factors of these shapes from such a row."""
        found, start = {}, 0
        for name, array in self.arrays():
            stop = start + int(np.prod(array.shape))
            found[name] = backend.namespace(flat).reshape(flat[start:stop], array.shape)
            start = stop
        return replace(self, **found)

    def theta(self) -> Array:
        """The attention matrices as `heads.dense` lays them out."""
        attention = split_heads(self.query, self.heads)
        if self.key is not None:
            attention = attention @ backend.transpose(split_heads(self.key, self.heads))
        bias = None if self.key_bias is None else backend.transpose(self.key_bias)
        return dense.pack(attention, bias)

    def projections(self) -> Array:
        """The projections (m, d, e)."""
        output = output_by_head(self)
        return output if self.value is None else split_heads(self.value, self.heads) @ output


class Activations(NamedTuple):
    """What a layer computes from a block, by head (n, m, k, ·), and its attended values."""

    query: Array
    key: Array  # of one head if all have the same
    value: Array
    attention: Array  # (n, m, k, k)
    attended: Array  # (n·k, m·q)
    residuals: Array  # (n·k, e): outputs less what the layer computes


class Backward(NamedTuple):
    """How a linear function of the outputs changes with what a layer computes."""

    query: Array  # (n·k, m·r)
    key: Array | None
    key_bias: Array | None  # (n·k, m)
    value: Array | None

    def named(self) -> Iterator[tuple[str, Array]]:
        """Names and arrays of those that there are."""
        return ((name, one) for name, one in self._asdict().items() if one is not None)


def random(
    shape: tuple[int, int, int],
    rank: int | None,
    value_rank: int | None,
    bias: bool,
    rng: np.random.Generator,
    reference: Array,
) -> Factors:
    """Random heads of (m, d, e) with scores of unit size on whitened tokens, in float32."""
    heads, dim, out_dim = shape
    inner = dim if value_rank is None else value_rank
    sizes = deviations(dim, rank, heads * inner)

    def drawn(name: str, *shape: int) -> Array:
        return backend.single(backend.like(rng.standard_normal(shape) * sizes[name], reference))

    columns = heads * (dim if rank is None else rank)
    zeros = backend.single(backend.zeros((dim, heads), reference))
    return Factors(
        query=drawn("query", dim, columns),
        key=None if rank is None else drawn("key", dim, columns),
        key_bias=zeros if bias else None,
        value=None if value_rank is None else drawn("value", dim, heads * inner),
        output=drawn("output", heads * inner, out_dim),
        output_bias=backend.single(backend.zeros((out_dim,), reference)),
        heads=heads,
    )


def deviations(dim: int, rank: int | None, inner: int) -> dict[str, float]:
    """The size of the entries of each factor in a random layer, with `inner` values of all heads.

    Scores of independent tokens have unit variance, and outputs do if attention is on one token.
    """
    both = 1 / dim if rank is None else dim**-0.5 * rank**-0.25
    sizes = {"query": both, "key": both, "key_bias": dim**-0.5, "value": dim**-0.5}
    return {**sizes, "output": inner**-0.5, "output_bias": inner**-0.5}


def widened(factors: Factors) -> Factors:
    """The same layer with projections of any rank."""
    output = factors.projections()
    rows = output.shape[0] * output.shape[1]
    output = backend.namespace(output).reshape(output, (rows, output.shape[2]))
    return replace(factors, value=None, output=output)


def with_head(factors: Factors, head: int, other: Factors) -> Factors:
    """The factors with one head replaced by that of a layer with a single one."""

    def replaced(name: str, array: Array) -> Array:
        if name == "output_bias":
            return array
        axis = 0 if name == "output" else 1
        each = array.shape[axis] // factors.heads
        start, stop = head * each, (head + 1) * each
        if axis == 0:
            ends = array[:start, :], array[stop:, :]
        else:
            ends = array[:, :start], array[:, stop:]
        parts = [ends[0], getattr(other, name), ends[1]]
        return backend.namespace(array).concat(parts, axis=axis)

    return replace(factors, **{name: replaced(name, one) for name, one in factors.arrays()})


def forward(factors: Factors, block: Block) -> Activations:
    """What the layer computes from a block, and the residuals."""
    xp, heads = backend.namespace(block.keys), factors.heads
    query = _split(queries_of(factors, block) @ factors.query, block, heads)
    keys = dense.flat_tokens(block.keys)
    key = _of_tokens(factors.key, keys, block, heads)
    value = _of_tokens(factors.value, keys, block, heads)
    scores = query @ backend.transpose(key)
    if factors.key_bias is not None:
        scores = scores + backend.transpose(_split(keys @ factors.key_bias, block, heads))
    if block.allowed is not None:
        forbidden = backend.like(np.asarray(_FORBIDDEN), scores)
        scores = xp.where(block.allowed[:, None, :, :], scores, forbidden)
    scores = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
    attention = scores / xp.sum(scores, axis=-1, keepdims=True)
    heard = attended(attention, value)
    outputs = heard @ factors.output
    if factors.output_bias is not None:
        outputs = outputs + factors.output_bias
    residuals = counted(block.outputs - outputs, block)
    return Activations(query, key, value, attention, heard, residuals)


def attended(attention: Array, value: Array) -> Array:
    """The attended values (n·k, m·q)."""
    return joined(attention @ value)


def jvp(factors: Factors, block: Block, at: Activations, change: Factors) -> Array:
    """How outputs (n·k, e) move if the factors do."""
    heads, keys = factors.heads, dense.flat_tokens(block.keys)
    query = _split(queries_of(factors, block) @ change.query, block, heads)
    scores = query @ backend.transpose(at.key)
    if change.key is not None:
        scores = scores + at.query @ backend.transpose(_split(keys @ change.key, block, heads))
    if change.key_bias is not None:
        scores = scores + backend.transpose(_split(keys @ change.key_bias, block, heads))
    moved = softmax_jvp(at.attention, scores) @ at.value
    if change.value is not None:
        moved = moved + at.attention @ _split(keys @ change.value, block, heads)
    outputs = joined(moved) @ factors.output + at.attended @ change.output
    if change.output_bias is not None:
        outputs = outputs + change.output_bias
    return counted(outputs, block)


def backward(factors: Factors, at: Activations, rows: Array) -> Backward:
    """How Σ rows · outputs changes with queries, keys and values; rows of padding are zero."""
    xp, shape = backend.namespace(rows), at.attention.shape
    n, heads, tokens = shape[:3]
    moved = backend.namespace(rows).reshape(
        rows @ backend.transpose(factors.output), (n, tokens, heads, -1)
    )
    moved = xp.permute_dims(moved, (0, 2, 1, 3))
    scores = softmax_jvp(at.attention, moved @ backend.transpose(at.value))
    turned = backend.transpose(scores)
    key = bias = value = None
    if factors.key is not None:
        key = joined(turned @ at.query)
    if factors.key_bias is not None:
        sums = xp.permute_dims(xp.sum(scores, axis=2), (0, 2, 1))
        bias = xp.reshape(sums, (n * tokens, heads))
    if factors.value is not None:
        value = joined(backend.transpose(at.attention) @ moved)
    return Backward(joined(scores @ at.key), key, bias, value)


def vjp(factors: Factors, block: Block, at: Activations, rows: Array) -> Factors:
    """How Σ rows · outputs changes with the factors: the transpose of `jvp`."""
    back = backward(factors, at, rows)
    keys = backend.transpose(dense.flat_tokens(block.keys))

    def against(moved: Array | None) -> Array | None:
        return None if moved is None else keys @ moved

    bias = None
    if factors.output_bias is not None:
        bias = backend.namespace(rows).sum(rows, axis=0)
    return Factors(
        query=backend.transpose(queries_of(factors, block)) @ back.query,
        key=against(back.key),
        key_bias=against(back.key_bias),
        value=against(back.value),
        output=backend.transpose(at.attended) @ rows,
        output_bias=bias,
        heads=factors.heads,
    )


def queries_of(factors: Factors, block: Block) -> Array:
    """The queries (n·k, d) of a block, without the constant that stands for a key bias."""
    return dense.flat_tokens(block.queries if factors.key_bias is None else block.keys)


def _of_tokens(factor: Array | None, keys: Array, block: Block, heads: int) -> Array:
    """Tokens times a factor by head, or the tokens themselves for all heads."""
    if factor is None:
        return block.keys[:, None, :, :]
    return _split(keys @ factor, block, heads)


def _split(rows: Array, block: Block, heads: int) -> Array:
    """(n·k, m·r) -> (n, m, k, r)."""
    xp, (n, tokens, _) = backend.namespace(rows), block.keys.shape
    return xp.permute_dims(xp.reshape(rows, (n, tokens, heads, -1)), (0, 2, 1, 3))


def joined(by_head: Array) -> Array:
    """(n, m, k, r) -> (n·k, m·r)."""
    xp, (n, heads, tokens, rank) = backend.namespace(by_head), by_head.shape
    return xp.reshape(xp.permute_dims(by_head, (0, 2, 1, 3)), (n * tokens, heads * rank))


def softmax_jvp(attention: Array, change: Array) -> Array:
    """How attention moves if scores do."""
    weighted = attention * change
    total = backend.namespace(change).sum(weighted, axis=-1, keepdims=True)
    return weighted - attention * total


def counted(rows: Array, block: Block) -> Array:
    """Rows with zeros in place of padding."""
    return rows if block.counted is None else rows * block.counted


def equations(parts: Sequence[Block]) -> int:
    """The number of outputs, without those of padding."""
    total = 0
    for part in parts:
        rows = int(part.outputs.shape[0])
        if part.counted is not None:
            rows = int(backend.namespace(part.counted).sum(part.counted))
        total += rows * int(part.outputs.shape[1])
    return total


def split_heads(factor: Array, heads: int) -> Array:
    """(d, m·r) -> (m, d, r); also of rows (n·k, m·r)."""
    return dense.by_head(factor, factor.shape[1] // heads)


def join_heads(by_head: Array) -> Array:
    """(m, d, r) -> (d, m·r): the inverse of `split_heads`."""
    return dense.side_by_side(by_head)


def output_by_head(factors: Factors) -> Array:
    """(m·q, e) -> (m, q, e)."""
    xp, output = backend.namespace(factors.output), factors.output
    return xp.reshape(output, (factors.heads, -1, output.shape[1]))


def by_head(name: str, array: Array, heads: int) -> Any:
    """A factor as one matrix per head, taller than wide, and how to undo that."""
    xp = backend.namespace(array)
    if name == "output_bias":
        return array[None, :, None], lambda found: found[0, :, 0]
    if name == "output":
        wide = xp.reshape(array, (heads, -1, array.shape[1]))
    else:
        wide = split_heads(array, heads)
    turned = wide.shape[1] < wide.shape[2]

    def undo(found: Array) -> Array:
        found = backend.transpose(found) if turned else found
        return xp.reshape(found, array.shape) if name == "output" else join_heads(found)

    return (backend.transpose(wide) if turned else wide), undo
