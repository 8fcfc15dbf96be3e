"""Features of random-feature attention: frozen random heads, of which only values are trained.

With x̃ = [x; 1], N keys, M heads and an activation σ, head m compares the query with key i by a
random matrix W_m = W_0 + G_m, entries of G_m from N(0, 1/4), and has the D = d + 1 features

    φ_m(x) = M^{-1/2} (1/N) Σ_i σ(x̃_0ᵀ W_m x̃_i) x̃_i.

W_0 = 0 is RFA and W_0 = the identity on the first d coordinates BRFA (arXiv 2307.11353). With the
factor M^{-1/2} products of features converge to a kernel as M grows (`kernels/attention.py`).

With a depth above 1 the tokens pass through frozen layers first. Each layer adds to every token,
query or key, what random heads read for it from the keys, mixed by random matrices V_m:

    x_a <- (x_a + |x_a| z_a / |z_a|) / √2,        z_a = Σ_m V_m φ_m(x_a, keys),

so that a token keeps its norm, as in a normalised residual stream.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from onelayer.array import backend, blocks
from onelayer.array.backend import Array, NumpyArray
from onelayer.features import queries
from onelayer.features.activations import Activation
from onelayer.features.activations.relu import RELU
from onelayer.features.positions import PositionalEncoding
from onelayer.heads import dense


class AttentionInputs(NamedTuple):
    """A block of examples as the heads read it; D is the size of an extended token."""

    queries: Array  # (b, 1, D)
    keys: Array  # (b, N, D), zero where there is none
    values: Array  # (b, N, D), the keys over (number of keys) · √(number of heads)


class HiddenLayer(NamedTuple):
    """A frozen layer: its heads (D, M·D), and the matrix (M·D, d) that mixes their features."""

    heads: Array
    mix: Array


@dataclass(frozen=True)
class AttentionMap:
    """Random heads, drawn once: `weights` (D, M·D) holds the W_m side by side."""

    weights: Array
    positions: PositionalEncoding
    hidden: tuple[HiddenLayer, ...] = ()
    query: str = "first"  # see `queries.py`
    activation: Activation = RELU

    @property
    def unit(self) -> int:
        return int(self.weights.shape[0])

    @property
    def size(self) -> int:
        return int(self.weights.shape[1])

    def like(self, reference: Array) -> AttentionMap:
        hidden = [
            HiddenLayer(*(backend.like(array, reference) for array in layer))
            for layer in self.hidden
        ]
        return replace(self, weights=backend.like(self.weights, reference), hidden=tuple(hidden))

    def workspace(self, tokens: int) -> int:
        return 2 * self.unit + tokens

    def prepare(self, tokens: Array, mask: Array | None) -> AttentionInputs:
        tokens, mask = queries.with_query_first(self.positions(tokens), mask, self.query)
        for layer in self.hidden:
            tokens = _through(layer, tokens, mask, self.activation)
        prepared = _extended(tokens, mask, self.size // self.unit)
        return prepared._replace(queries=prepared.queries[:, :1, :])

    def features(self, prepared: AttentionInputs, part: slice) -> Array:
        return _read(prepared, self.weights[:, part], self.activation)


def draw(
    heads: int,
    bias: Array | float,
    positions: PositionalEncoding,
    depth: int,
    rng: np.random.Generator,
    query: str = "first",
    varying: NumpyArray | None = None,
    activation: Activation = RELU,
) -> AttentionMap:
    """Draw the heads; at depth 1 the first heads do not depend on their number.

    `bias` is W_0, see `bias_matrix`. Random entries are drawn for the coordinates that may be
    nonzero: those of `varying` (dim,), all for None, and those that positions add. The others are
    zero, so that the heads are those of tokens without these coordinates.
    """
    streams, used = rng.spawn(depth), positions.used(varying)
    centre = bias_matrix(bias, positions)
    noise = [masked_normal(stream, np.ones(heads, bool), used, used) / 2 for stream in streams]
    layers = [dense.side_by_side(centre + one) for one in noise]
    hidden = [
        HiddenLayer(matrices, masked_normal(stream, np.tile(used, heads), used[:-1]))
        for matrices, stream in zip(layers[1:], streams[1:], strict=True)
    ]
    return AttentionMap(layers[0], positions, tuple(hidden), query, activation)


def bias_matrix(bias: Array | float, positions: PositionalEncoding) -> NumpyArray:
    """W_0, (D, D): the matrix itself, or a number times the identity on the token's coordinates."""
    size = positions.encoded_dim + 1
    if np.ndim(bias) == 0:
        diagonal = np.zeros(size)
        diagonal[: positions.dim] = bias
        return np.diag(diagonal)
    matrix = backend.to_numpy(bias)
    if matrix.shape != (size, size):
        raise ValueError(
            f"bias has shape {matrix.shape}, expected a number or a matrix of shape "
            f"{(size, size)}: tokens of dimension {size - 1} and a constant 1"
        )
    return matrix


def masked_normal(rng: np.random.Generator, *used: NumpyArray) -> NumpyArray:
    """Standard normal numbers where all the axes are used, and zeros elsewhere.

    >>> masked_normal(np.random.default_rng(0), np.ones(1, bool), np.array([False, True])).round(2)
    array([[0.  , 0.13]])
    """
    drawn = rng.standard_normal(tuple(int(axis.sum()) for axis in used))
    if all(axis.all() for axis in used):
        return drawn
    found = np.zeros(tuple(axis.size for axis in used))
    found[np.ix_(*used)] = drawn
    return found


def _extended(tokens: Array, mask: Array | None, heads: int) -> AttentionInputs:
    """All tokens as queries; missing keys are zero."""
    xp = backend.namespace(tokens)
    extended = dense.with_constant(tokens)
    keys = extended[:, 1:, :]
    if mask is None:
        return AttentionInputs(extended, keys, keys / (keys.shape[1] * heads**0.5))
    count = xp.sum(xp.astype(mask[:, 1:, None], tokens.dtype), axis=1, keepdims=True)
    keys = xp.where(mask[:, 1:, None], keys, backend.zeros((1, 1, 1), keys))
    return AttentionInputs(extended, keys, keys / (count * heads**0.5))


def _read(prepared: AttentionInputs, weights: Array, activation: Activation) -> Array:
    """The features of the heads of `weights` (D, h·D) for every query, (b·queries, h·D)."""
    xp = backend.namespace(weights)
    queries, keys, values = prepared
    b, count, size = queries.shape
    projected = xp.reshape(queries, (b * count, size)) @ weights
    scores = xp.reshape(projected, (b, -1, size)) @ backend.transpose(keys)
    return xp.reshape(activation.apply(scores) @ values, (b * count, -1))


def _through(
    layer: HiddenLayer, tokens: Array, mask: Array | None, activation: Activation
) -> Array:
    """The tokens (b, T, d) after a frozen layer."""
    xp = backend.namespace(tokens)
    size = layer.heads.shape[0]
    prepared = _extended(tokens, mask, layer.heads.shape[1] // size)
    per_head = 8 * tokens.shape[0] * tokens.shape[1] * (2 * size + tokens.shape[1])

    def mixed(heads: slice) -> Array:
        part = slice(heads.start * size, heads.stop * size)
        return _read(prepared, layer.heads[:, part], activation) @ layer.mix[part, :]

    update = blocks.sum_over(blocks.slices(layer.heads.shape[1] // size, per_head), mixed)
    update = xp.reshape(update, tokens.shape)
    norm = xp.linalg.vector_norm(update, axis=2, keepdims=True)
    norm = xp.where(norm == 0, xp.ones_like(norm), norm)  # all heads may be inactive
    token_norm = xp.linalg.vector_norm(tokens, axis=2, keepdims=True)
    return (tokens + update * (token_norm / norm)) / 2**0.5
