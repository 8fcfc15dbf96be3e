"""Random features in infinite number: their kernels in closed form, and Gram matrices in tiles.

For (u, v) Gaussian with unit variances, means h and k and correlation ρ, everything here rests on

    M(h, k, ρ) = E[relu(u) relu(v)].

Its second derivative in ρ is the density of (u, v) at the origin, its value and slope at ρ = 0 are
products, for then u and v are independent. Hence, with R(h) = E relu(u) = φ(h) + h Φ(h),

    M(h, k, ρ) = R(h) R(k) + ρ Φ(h) Φ(k) + D(h, k, ρ),

    D(h, k, ρ) = ∫_0^ρ (ρ - t) exp(-(h² - 2thk + k²) / (2 (1 - t²))) / (2π √(1 - t²)) dt.

The first two terms cost a few products of what is known for each key. The remainder D is below
0.1 whatever the means, so that its rounding errors never matter beside the rest; it changes
nothing when h and ρ, or k and ρ, change their signs together, so that means of one sign suffice.
Unless ρ is near ±1 a few nodes integrate it to the last digit; where it is, Owen's function does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr, owens_t, roots_jacobi

from onelayer import blocks
from onelayer.random_features.progress import Track, untracked

Floats: TypeAlias = NDArray[np.float64]
Mask: TypeAlias = NDArray[np.bool_]
Tile: TypeAlias = tuple[slice, slice]

# Up to this correlation `_NODES` nodes integrate D, beyond it Owen's function gives it: the nodes
# cost 40 ns a pair together, Owen's function 200 ns or more, and few pairs of keys are so alike.
_STEEP = 0.6
_NODES = 10
_WORK = 6  # arrays that the moments of a block of pairs are computed in
_PAIRS = blocks.BLOCK_BYTES // (8 * (_WORK + 2))  # pairs of keys in a block
_WIDTH = 64  # examples on the long side of a block: the length of numpy's innermost loops
_TILE = 256  # examples on one side of a tile of a Gram matrix


def relu_moment(h: ArrayLike, k: ArrayLike, rho: ArrayLike) -> Floats:
    """E[relu(u) relu(v)] for Gaussian (u, v) of means h, k, variances 1 and correlation rho.

    The arguments are broadcast. With s = √(1 - ρ²) and Φ₂ the distribution function of (u, v),

        (hk + ρ) Φ₂(h, k; ρ) + k φ(h) Φ((k - ρh)/s) + h φ(k) Φ((h - ρk)/s) + s φ(h) φ((k - ρh)/s),

    with errors below 1e-14 max(1, value) for all correlations and means up to 1,000. A correlation
    that rounding has left just outside [-1, 1] counts as ±1.

    >>> print(relu_moment(0.0, 0.0, [-1.0, 0.0, 1.0]).round(4))
    [0.     0.1592 0.5   ]
    >>> print(relu_moment(100.0, [-100.0, 0.0, 100.0], 0.5).round(2))
    [    0.      40.14 10000.5 ]
    """
    first, second, correlation = (np.asarray(x, dtype=np.float64) for x in (h, k, rho))
    shape = np.broadcast_shapes(first.shape, second.shape, correlation.shape)
    moments = np.array(np.broadcast_to(correlation, shape), ndmin=1, order="C")
    _relu_moments(first, second, moments, np.empty((_WORK, *moments.shape)))
    return np.maximum(moments, 0.0).reshape(shape)[()]


def arc_cosine(rho: ArrayLike) -> Floats:
    """E[relu(u) relu(v)] for Gaussian (u, v) of means 0, variances 1 and correlation rho.

    This is (√(1 - ρ²) + ρ (π - arccos ρ)) / 2π. The error is a few units in the last place of the
    value itself, which vanishes like (1 + ρ)^1.5 at -1. A correlation that rounding has left just
    outside [-1, 1] counts as ±1.

    >>> print(arc_cosine([-1.0, 0.0, 1.0]).round(4))
    [0.     0.1592 0.5   ]
    """
    values = np.array(rho, dtype=np.float64, ndmin=1, order="C")
    _replace_by_arc_cosines(values)
    return values.reshape(np.shape(rho))[()]


def attention_kernel_block(
    tokens: Floats, mask: Mask | None, others: Floats, others_mask: Mask | None, bias: Floats | None
) -> Floats:
    """The kernel of random-feature attention between examples and others, (n, n').

    `tokens` is (n, N+1, D), `others` (n', N'+1, D): token 0 is the query, the rest are keys, each
    with the constant 1 among its D coordinates. Keys whose mask is False do not count; an example
    without a key has kernel 0 with all. With W = W_0 + Gaussian entries of variance 1/4, where
    W_0 is `bias`, or 0 for None,

        K = 1/(N N') Σ_ij E[relu(x_0ᵀ W x_i) relu(x'_0ᵀ W x'_j)] <x_i, x'_j>.

    >>> x = np.array([[[1.0, 1.0], [-1.0, 1.0]]])
    >>> attention_kernel_block(x, None, x, None, None).round(12)  # 1/2 variance |x_1|²
    array([[1.]])
    """
    rows, columns = _side(tokens, mask, bias), _side(others, others_mask, bias)
    n, row_keys, _ = rows.keys.shape
    m, column_keys, _ = columns.keys.shape
    kernel = np.zeros((n, m))
    if kernel.size == 0 or row_keys == 0 or column_keys == 0:
        return kernel
    width = max(1, min(m, _WIDTH, _PAIRS // column_keys))
    per_key = column_keys * width
    work = np.empty((_WORK + 2) * max(_PAIRS, per_key))  # allocated once: fresh memory is slow
    for across in blocks.slices(m, 1, width):
        right = columns.part(across, slice(None)).with_examples_innermost()
        for down in blocks.slices(n, per_key * row_keys, _PAIRS):
            for keys in blocks.slices(row_keys, per_key, _PAIRS):
                kernel[down, across] += _sum_over_keys(rows.part(down, keys), right, work)
    return kernel


def mlp_kernel_block(flat: Floats, others: Floats, std: float) -> Floats:
    """The kernel of the features relu(<w, x>) with w ~ N(0, std² I) between rows, (n, n').

    `flat` is (n, P) and `others` (n', P), none of their rows zero: with ρ their correlations,
    K = std² |x| |x'| (√(1 - ρ²) + ρ (π - arccos ρ)) / 2π.

    >>> x = np.array([[3.0, 4.0], [-3.0, -4.0]])
    >>> mlp_kernel_block(x, x, std=2.0).round(12)  # 1/2 variance |x|²
    array([[50.,  0.],
           [ 0., 50.]])
    """
    norms, other_norms = _norms(flat), _norms(others)
    kernel: Floats = (flat / norms[:, None]) @ (others / other_norms[:, None]).T
    _replace_by_arc_cosines(kernel)
    kernel *= std**2 * norms[:, None]
    kernel *= other_norms
    return kernel


def tiles(count: int, others: int | None = None, size: int = _TILE) -> list[Tile]:
    """The tiles (rows, columns) that `gram` computes, in its order.

    With `others` None the matrix is symmetric: only tiles on and below the diagonal are listed.

    >>> tiles(3, size=2)
    [(slice(0, 2, None), slice(0, 2, None)),
     (slice(2, 3, None), slice(0, 2, None)),
     (slice(2, 3, None), slice(2, 3, None))]
    >>> len(tiles(3, 3, size=2))
    4
    """
    rows = list(blocks.slices(count, 1, size))
    columns = rows if others is None else list(blocks.slices(others, 1, size))
    return [(a, b) for a in rows for b in columns if others is not None or b.start <= a.start]


def gram(
    count: int,
    others: int | None,
    block: Callable[[slice, slice], Floats],
    track: Track = untracked,
    size: int = _TILE,
) -> Floats:
    """The matrix (count, others) whose parts are `block(rows, columns)`, tile by tile.

    With `others` None the matrix is (count, count) and symmetric to the last bit: the tiles above
    the diagonal are not computed but mirrored. `track` sees all `tiles` before the first is
    computed, and each as its turn comes.

    >>> x = np.array([1.0, 2.0, 3.0])
    >>> gram(3, None, lambda rows, columns: np.outer(x[rows], x[columns]), size=2)
    array([[1., 2., 3.],
           [2., 4., 6.],
           [3., 6., 9.]])
    """
    matrix = np.empty((count, count if others is None else others))
    for rows, columns in track(tiles(count, others, size), "kernel"):
        part = block(rows, columns)
        if others is None and rows == columns:
            part = (part + part.T) / 2  # rounding may differ between the two halves
        matrix[rows, columns] = part
        if others is None and rows != columns:
            matrix[columns, rows] = part.T
    return matrix


class _Side(NamedTuple):
    """Examples on one side of the kernel: what is known for each key before any pair is formed."""

    queries: Floats  # (n, D) unit vectors
    keys: Floats  # (n, N, D) unit vectors
    weights: Floats  # (n, N): standard deviation times length, over the number of keys
    means: Floats | None  # (n, N): h, in standard deviations; None where all are 0

    def part(self, examples: slice, keys: slice) -> _Side:
        """Some of the examples, with some of their keys."""
        means = None if self.means is None else self.means[examples, keys]
        return _Side(
            self.queries[examples], self.keys[examples, keys], self.weights[examples, keys], means
        )

    def with_examples_innermost(self) -> _Side:
        """The same in another order in memory, in which the keys are one matrix (D, N · n)."""
        by_coordinate = np.ascontiguousarray(self.keys.transpose(2, 1, 0))
        return self._replace(keys=by_coordinate.transpose(2, 1, 0))


def _side(tokens: Floats, mask: Mask | None, bias: Floats | None) -> _Side:
    """What `attention_kernel_block` needs to know of the examples on one of its sides."""
    lengths = _norms(tokens)
    units = tokens / lengths[:, :, None]
    queries, keys = units[:, 0], units[:, 1:]
    weights = 0.5 * lengths[:, :1] * lengths[:, 1:] ** 2
    if mask is None:
        weights /= max(1, weights.shape[1])
    else:
        weights *= mask[:, 1:]
        weights /= np.maximum(1, mask[:, 1:].sum(axis=1, keepdims=True))
    means = None
    if bias is not None:
        means = 2.0 * (keys @ (queries @ bias)[:, :, None])[:, :, 0]
    return _Side(queries, keys, weights, means)


def _sum_over_keys(rows: _Side, columns: _Side, work: Floats) -> Floats:
    """Σ_ij of weights, moments and cosines, (n, n').

    All pairs lie in one array (n, N, N', n'): the innermost axis, over which the cosine of the
    queries varies, is long, and the sum over i is a product of the weights with a matrix.
    """
    n, row_keys, dim = rows.keys.shape
    m, column_keys, _ = columns.keys.shape
    right = columns.keys.transpose(2, 1, 0).reshape(dim, column_keys * m)
    shape = (n, row_keys, column_keys, m)
    work = work[: (_WORK + 2) * math.prod(shape)].reshape(-1, *shape)
    cosines, rho, rest = work[0], work[1], work[2:]
    np.matmul(rows.keys.reshape(-1, dim), right, out=cosines.reshape(-1, right.shape[1]))
    np.multiply(cosines, (rows.queries @ columns.queries.T)[:, None, None, :], out=rho)
    if rows.means is None or columns.means is None:
        _arc_cosines(rho, rest)
    else:
        means = np.ascontiguousarray(columns.means.T)
        _relu_moments(rows.means[:, :, None, None], means, rho, rest)
    rho *= cosines
    summed = rows.weights[:, None, :] @ rho.reshape(n, row_keys, column_keys * m)
    total: Floats = np.einsum("abc,cb->ac", summed.reshape(n, column_keys, m), columns.weights)
    return total


def _replace_by_arc_cosines(rho: Floats) -> None:
    """Put M(0, 0, ρ) in the place of a C-contiguous array ρ of any size, block by block."""
    flat = rho.reshape(-1)
    work = np.empty((2, min(flat.size, _PAIRS)))
    for part in blocks.slices(flat.size, 1, _PAIRS):
        _arc_cosines(flat[part], work[:, : part.stop - part.start])


def _arc_cosines(rho: Floats, work: Floats) -> None:
    """Put M(0, 0, ρ) in the place of the correlations ρ; `work` is two or more arrays like ρ."""
    value, angle = work[0], work[1]
    np.clip(rho, -1.0, 1.0, out=rho)
    np.add(1.0, rho, out=value)
    value *= np.subtract(1.0, rho, out=angle)  # 1 - ρ² from two factors that are exact near ±1
    np.sqrt(value, out=value)
    np.arccos(np.negative(rho, out=angle), out=angle)  # π - arccos ρ, without its cancellation
    opposite = np.flatnonzero(rho < -0.75) if rho.min() < -0.75 else None
    rho *= angle
    rho += value
    if opposite is not None:
        rho.flat[opposite] = _sine_less_angle_cosine(angle.flat[opposite])
    rho *= 0.5 / math.pi


def _relu_moments(h: Floats, k: Floats, rho: Floats, work: Floats) -> None:
    """Put M(h, k, ρ) in the place of the correlations ρ, to which h and k are broadcast.

    `work` is `_WORK` arrays of the shape of ρ.
    """
    np.clip(rho, -1.0, 1.0, out=rho)
    remainder, product = work[0], work[1]
    _remainder_by_quadrature(h, k, rho, work)
    steep = np.flatnonzero(np.abs(rho, out=product) > _STEEP)
    if steep.size:
        first, second = (np.broadcast_to(x, rho.shape).flat[steep] for x in (h, k))
        remainder.flat[steep] = _remainder_by_owen(first, second, rho.flat[steep])
    rho *= ndtr(h)
    rho *= ndtr(k)
    rho += np.multiply(_relu_mean(h), _relu_mean(k), out=product)
    rho += remainder


def _remainder_by_quadrature(h: Floats, k: Floats, rho: Floats, work: Floats) -> None:
    """Put D(h, k, ρ) into `work[0]`, of correlations cut off at ±`_STEEP`.

    With t = ρx the factor 1 - x is the weight of a Gauss-Jacobi rule on [0, 1]. The exponent is

        -(h + k)² / (4 (1 + t)) - (h - k)² / (4 (1 - t)),

    whose real part is negative wherever |Re t| < 1. So the integrand is analytic and bounded there
    alike for all means, and the error falls as E^(-2 nodes), with E + 1/E = 2 (2 - |ρ|) / |ρ|.
    """
    total, square, slope, level, gap, term = work
    np.clip(rho, -_STEEP, _STEEP, out=square)
    np.multiply(h, square, out=slope)
    slope *= k
    np.square(square, out=square)
    np.add(0.5 * h * h, 0.5 * k * k, out=level)
    total[...] = 0.0
    for node, weight in _rule(_NODES):
        np.multiply(square, -node * node, out=gap)
        gap += 1.0  # 1 - t²
        np.multiply(slope, node, out=term)
        term -= level
        term /= gap
        np.exp(term, out=term)
        np.sqrt(gap, out=gap)
        term /= gap
        term *= weight
        total += term
    total *= square


@cache
def _rule(nodes: int) -> list[tuple[float, float]]:
    """Nodes x and weights for the integrals of (1 - x) f(x) / 2π over [0, 1]."""
    points, weights = roots_jacobi(nodes, 1.0, 0.0)
    return list(zip((0.5 + 0.5 * points).tolist(), (weights / (8 * math.pi)).tolist(), strict=True))


def _remainder_by_owen(h: Floats, k: Floats, rho: Floats) -> Floats:
    """D(h, k, ρ) for any correlation in [-1, 1], by the closed form at means -a, -b <= 0:

        M(-a, -b, r) = (ab + r) Φ₂ - b φ(a) Φ(-z) - a φ(b) Φ(-y) + s φ(a) φ(z),
        Φ₂ = (Φ(-a) + Φ(-b)) / 2 - T(a, z/a) - T(b, y/b),    z = (b - ra)/s,    y = (a - rb)/s,

    with T Owen's function. No term exceeds 1/2 by much, so that nothing large cancels. Near r = 1
    the difference b - ra would lose the digits that 1/s magnifies: (b - a) + (1 - r) a keeps them.
    The limits a, b, s -> 0 are taken by staying 1e-100 away: T has reached its limit long before.
    """
    rho = np.where((h > 0) == (k > 0), rho, -rho)
    # At 40 standard deviations everything has vanished but the rounding errors, which grow.
    a, b = (np.clip(np.abs(x), 1e-100, 40.0) for x in (h, k))
    s = np.maximum(np.sqrt((1.0 - rho) * (1.0 + rho)), 1e-100)
    z = ((b - a) + (1.0 - rho) * a) / s
    y = ((a - b) + (1.0 - rho) * b) / s
    below_a, below_b, density_a, density_b = ndtr(-a), ndtr(-b), _density(a), _density(b)
    both = 0.5 * (below_a + below_b) - owens_t(a, z / a) - owens_t(b, y / b)
    moment = (a * b + rho) * both + s * density_a * _density(z)
    moment -= b * density_a * ndtr(-z) + a * density_b * ndtr(-y)
    remainder: Floats = moment - _relu_mean(-a) * _relu_mean(-b) - rho * below_a * below_b
    return remainder


def _sine_less_angle_cosine(angle: Floats) -> Floats:
    """sin α - α cos α = Σ_n (-1)^(n+1) 2n α^(2n+1) / (2n+1)! for angles up to 0.75.

    The two terms of the left side cancel to α³/3: the series has no such loss.
    """
    square = angle * angle
    total = np.zeros_like(angle)
    for n in range(9, 0, -1):
        total *= -square
        total += 2 * n / math.factorial(2 * n + 1)
    total *= square
    total *= angle
    return total


def _relu_mean(h: Floats) -> Floats:
    """R(h) = E relu(u) for u Gaussian of mean h and variance 1."""
    mean: Floats = _density(h) + h * ndtr(h)
    return mean


def _density(x: Floats) -> Floats:
    density: Floats = np.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return density


def _norms(vectors: Floats) -> Floats:
    """The lengths along the last axis."""
    norms: Floats = np.sqrt(np.einsum("...i,...i->...", vectors, vectors))
    return norms
