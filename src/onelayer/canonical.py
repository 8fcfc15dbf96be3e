"""The canonical form of a layer: `AttentionLayer.canonical`.

Heads with the same attention matrix Θ and key bias c attend alike, so only the sum of their
projections matters, and a head without a projection does nothing. The sum over heads has no order.
What is left of these freedoms is one layer:

1. Heads within `tol` of each other are merged, also through others in between. The merged head has
   the (Θ, c) of the one with the largest projection, so that merged heads stay apart.
2. Heads are dropped whose projection is zero up to `tol`, relative to the largest of the layer and
   to the projections that were added up.
3. Heads are sorted by the norm of (Θ, c), then by that of W, the largest first, then by the entries
   of (Θ, c). Differences at the level of rounding do not count: what comes next decides.

On the affine span of tokens (see `onelayer.span`) three more freedoms are used up. With P the
orthogonal projection on the directions of the tokens and o the part of their mean outside of it,
tokens are x = o + x P. Up to terms in x_a alone, which softmax ignores,

    x_a Θ x_b + c x_b  =  x_a (P Θ P) x_b + (c + o Θ) P x_b,        x W  =  x (P W) + o W,

and attention sums to 1: P Θ P, (c + o Θ) P, P W and b + Σ_i o W_i compute the same.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from scipy.sparse.csgraph import connected_components

from onelayer.array import backend
from onelayer.array.backend import Array, NumpyArray
from onelayer.comparison import as_points, distances, in_range
from onelayer.span import Span

if TYPE_CHECKING:
    from onelayer.weights import LayerWeights

_ROUNDINGS = 100.0  # default tolerance, in machine epsilons


def canonical(layer: LayerWeights, tol: float | None) -> dict[str, Array]:
    """The arrays of the canonical form, by name."""
    epsilon = max(backend.epsilon(array) for array in layer.arrays().values())
    tol = _ROUNDINGS * epsilon if tol is None else tol
    attention, projection = (in_range(points)[0] for points in as_points(layer))
    groups = _groups(distances(attention, attention) <= tol)
    norms = np.linalg.norm(projection, axis=1)
    added = np.array([norms[group].sum() for group in groups])
    sizes = np.array([np.linalg.norm(projection[group].sum(axis=0)) for group in groups])
    kept = np.flatnonzero(sizes > tol * np.maximum(added, sizes.max()))
    chosen = np.array([group[norms[group].argmax()] for group in groups])
    keys = [np.linalg.norm(attention, axis=1)[chosen], sizes, attention[chosen]]
    order = kept[_order(_relative(np.column_stack(keys))[kept], max(tol, math.sqrt(epsilon)))]
    return _merged(layer, [groups[i] for i in order], chosen[order])


def on_span(layer: LayerWeights, inside: Span) -> dict[str, Array]:
    """The arrays of the layer that is zero outside of a span and computes the same on it."""
    if inside.rank == layer.dim:
        return layer.arrays()
    P, outside = inside.basis @ inside.basis.T, inside.outside
    arrays = {name: backend.to_numpy(array) for name, array in layer.arrays().items()}
    attention, projection = arrays["attention"], arrays["projection"]
    found = {"attention": P @ attention @ P, "projection": P @ projection}
    if outside.any() or "key_bias" in arrays:
        found["key_bias"] = (arrays.get("key_bias", 0.0) + outside @ attention) @ P
    if outside.any() or "output_bias" in arrays:
        constant = (outside @ projection).sum(axis=0)
        found["output_bias"] = arrays.get("output_bias", 0.0) + constant
    return {name: backend.like(array, layer.attention) for name, array in found.items()}


def _groups(close: NumpyArray) -> list[NumpyArray]:
    """The connected components of a graph of heads, as their numbers."""
    count, labels = connected_components(close, directed=False)
    return [np.flatnonzero(labels == label) for label in range(count)]


def _relative(keys: NumpyArray) -> NumpyArray:
    """Keys of heads, one a row: norms of (Θ, c) and W relative to the largest, entries to Θ's."""
    largest = keys.max(axis=0)
    scales = np.full(keys.shape[1], largest[0])
    scales[1] = largest[1]
    return keys / np.where(scales > 0, scales, 1.0)


def _order(keys: NumpyArray, tie: float) -> NumpyArray:
    """The order of rows by their columns, the first one first, the largest values first.

    Values that no gap above `tie` separates are equal. Rows that are equal in all columns are
    ordered by their bits.
    """
    if len(keys) < 2:
        return np.arange(len(keys))
    gaps = np.diff(np.sort(-keys, axis=0), axis=0) > tie
    apart = np.flatnonzero(gaps.any(axis=0))
    if not apart.size:
        return np.lexsort(-keys.T[::-1])
    column = apart[0]
    order = np.argsort(-keys[:, column])
    parts = np.split(order, np.flatnonzero(gaps[:, column]) + 1)
    return np.concatenate([part[_order(keys[part], tie)] for part in parts])


def _merged(layer: LayerWeights, groups: list[NumpyArray], chosen: NumpyArray) -> dict[str, Array]:
    """The arrays of a layer with one head for each group, which attends as the chosen one does."""
    found = {name: backend.to_numpy(array) for name, array in layer.arrays().items()}
    attention, projection = found["attention"], found["projection"]
    if groups:
        found["attention"] = attention[chosen]
        found["projection"] = np.stack([projection[group].sum(axis=0) for group in groups])
        if "key_bias" in found:
            found["key_bias"] = found["key_bias"][chosen]
    else:  # a layer has at least one head
        found["attention"], found["projection"] = 0 * attention[:1], 0 * projection[:1]
        found.pop("key_bias", None)
    for name in ("key_bias", "output_bias"):
        if name in found and not found[name].any():
            del found[name]
    return {name: backend.like(array, layer.arrays()[name]) for name, array in found.items()}
