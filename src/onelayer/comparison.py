"""The distance between two layers, head by head: `AttentionLayer.distance`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy.optimize import linear_sum_assignment

from onelayer.array import backend
from onelayer.array.backend import Array, NumpyArray
from onelayer.span import Span

if TYPE_CHECKING:
    from onelayer.weights import LayerWeights


@dataclass(frozen=True, eq=False)
class HeadMatch:
    """Distance between two layers, head by head, under the best matching of heads.

    The distance of two matrices A and B is |A - B| / max(|A|, |B|) in Frobenius norms: 0 if they
    are equal, 1 if one of them is zero, and 2 at most. Near 0 it is the relative error of either.

    Attributes
    ----------
    permutation : ndarray of shape (m,)
        The head that was matched with head i of the other layer, or -1 if none was left.
    attention, projection : ndarray of shape (m,)
        Distances, infinite for unmatched heads. The key bias counts as a row of the attention
        matrix.
    output_bias : float
        Distance of the output biases.

    Examples
    --------
    >>> from onelayer import AttentionLayer
    >>> layer = AttentionLayer.random(heads=2, dim=4)
    >>> match = layer.distance(layer)
    >>> match.permutation, match.attention
    (array([0, 1]), array([0., 0.]))
    """

    permutation: NumpyArray
    attention: NumpyArray
    projection: NumpyArray
    output_bias: float


def distance(one: LayerWeights, other: LayerWeights, inside: Span | None) -> HeadMatch:
    """Distances of all heads of `other` from those of `one`, on a span of tokens if there is one.

    The matching minimises the sum of squared distances of both kinds.
    """
    pairs = zip(as_points(one, inside), as_points(other, inside), strict=True)
    apart = [distances(mine, theirs) for mine, theirs in pairs]
    chosen, matched = linear_sum_assignment(sum(each**2 for each in apart))
    permutation = np.full(other.heads, -1)
    permutation[matched] = chosen
    attention, projection = np.full((2, other.heads), np.inf)
    attention[matched], projection[matched] = (each[chosen, matched] for each in apart)
    bias = distances(_constant(one, inside), _constant(other, inside))
    return HeadMatch(permutation, attention, projection, float(bias[0, 0]))


def as_points(layer: LayerWeights, inside: Span | None = None) -> list[NumpyArray]:
    """Attention (with the key bias) and projection as one row of numbers a head."""
    heads = layer.heads
    theta, projection = backend.to_numpy(layer.attention), backend.to_numpy(layer.projection)
    bias = _flat(layer.key_bias, heads * layer.dim).reshape(heads, 1, -1)
    if inside is None:
        points = np.concatenate([theta, bias], axis=1)
    else:
        points, projection = inside.attention(theta, bias[:, 0, :]), inside.projection(projection)
    return [points.reshape(heads, -1), projection.reshape(heads, -1)]


def distances(mine: NumpyArray, theirs: NumpyArray) -> NumpyArray:
    """|a - b| / max(|a|, |b|) for all pairs of rows a and b, with 0/0 taken as 0."""
    mine, theirs = in_range(mine, theirs)
    gap = np.stack([np.linalg.norm(row - theirs, axis=1) for row in mine])
    sizes = [np.linalg.norm(rows, axis=1) for rows in (mine, theirs)]
    larger = np.maximum(sizes[0][:, None], sizes[1])
    return np.asarray(np.divide(gap, larger, out=np.zeros_like(gap), where=larger > 0))


def in_range(*arrays: NumpyArray) -> list[NumpyArray]:
    """Arrays in float64 over one power of two, so that squares neither overflow nor vanish."""
    largest = max(np.abs(array).max(initial=0.0) for array in arrays)
    return [np.ldexp(array.astype(float), -np.frexp(largest)[1]) for array in arrays]


def _constant(layer: LayerWeights, inside: Span | None) -> NumpyArray:
    """The output bias (1, e), with what it gets from the mean token on the span of inputs."""
    bias = _flat(layer.output_bias, layer.out_dim)
    return bias if inside is None else inside.output_bias(backend.to_numpy(layer.projection), bias)


def _flat(array: Array | None, size: int) -> NumpyArray:
    return np.zeros((1, size)) if array is None else backend.to_numpy(array).reshape(1, -1)
