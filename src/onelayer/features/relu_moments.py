"""E[relu(u) relu(v)] of Gaussian u and v: what kernels of infinitely many random features sum.

For (u, v) with unit variances, means h and k and correlation ρ, everything here rests on

    M(h, k, ρ) = E[relu(u) relu(v)].

Its second derivative in ρ is the density of (u, v) at the origin, its value and slope at ρ = 0 are
products, for then u and v are independent. Hence, with R(h) = E relu(u) = φ(h) + h Φ(h),

    M(h, k, ρ) = R(h) R(k) + ρ Φ(h) Φ(k) + D(h, k, ρ),

    D(h, k, ρ) = ∫_0^ρ (ρ - t) exp(-(h² - 2thk + k²) / (2 (1 - t²))) / (2π √(1 - t²)) dt.

The first two terms cost a few products of what is known for each key. The remainder D is below
0.1 whatever the means, so that its rounding errors never matter beside the rest; it changes
nothing when h and ρ, or k and ρ, change their signs together, so that means of one sign suffice.
Unless ρ is near ±1 a few nodes integrate it to the last digit; where it is, Owen's function does.

Arrays are numpy's or torch's, in float64. Billions of pairs pass through here and each operation
costs little, so that what counts is memory: all but the few pairs of steep correlation are computed
in place.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from scipy.special import owens_t, roots_jacobi, roots_legendre

from onelayer.array import backend, blocks
from onelayer.array.backend import Array

# Up to this correlation `_NODES` nodes integrate D, beyond it Owen's function gives it: the nodes
# cost 40 ns a pair together, Owen's function 200 ns or more, and few pairs of keys are so alike.
_STEEP = 0.6
_NODES = 10
_OWEN_NODES = 12  # with which Owen's function is right to 2e-16 where scipy's cannot be had
WORK = 6  # arrays that the moments of a block of pairs are computed in
_PAIR_BYTES = 8 * (WORK + 2)  # of a block, with two arrays more for whoever sums the moments
CACHED_PAIRS = blocks.BLOCK_BYTES // _PAIR_BYTES  # in a block on a CPU


def relu_moment(h: Any, k: Any, rho: Any) -> Array:
    """E[relu(u) relu(v)] for Gaussian (u, v) of means h, k, variances 1 and correlation rho.

    The arguments are broadcast; the moments are of the kind of h. With s = √(1 - ρ²) and Φ₂ the
    distribution function of (u, v),

        (hk + ρ) Φ₂(h, k; ρ) + k φ(h) Φ((k - ρh)/s) + h φ(k) Φ((h - ρk)/s) + s φ(h) φ((k - ρh)/s),

    with errors below 1e-14 max(1, value) for all correlations and means up to 1,000. A correlation
    that rounding has left just outside [-1, 1] counts as ±1.

    >>> print(relu_moment(0.0, 0.0, [-1.0, 0.0, 1.0]).round(4))
    [0.     0.1592 0.5   ]
    >>> print(relu_moment(100.0, [-100.0, 0.0, 100.0], 0.5).round(2))
    [    0.      40.14 10000.5 ]
    """
    given = backend.alike(
        [backend.as_real(x, name) for x, name in ((h, "h"), (k, "k"), (rho, "rho"))]
    )
    xp = backend.namespace(given[0])
    together = xp.broadcast_arrays(*map(backend.double, given))
    first, second, moments = (xp.reshape(x, (-1,)) for x in together)
    moments = xp.asarray(moments, copy=True)
    replace_by_moments(first, second, moments, backend.empty((WORK, *moments.shape), moments))
    return xp.reshape(backend.clip(moments, 0.0, None), together[0].shape)[()]


def arc_cosine(rho: Any) -> Array:
    """E[relu(u) relu(v)] for Gaussian (u, v) of means 0, variances 1 and correlation rho.

    This is (√(1 - ρ²) + ρ (π - arccos ρ)) / 2π. The error is a few units in the last place of the
    value itself, which vanishes like (1 + ρ)^1.5 at -1. A correlation that rounding has left just
    outside [-1, 1] counts as ±1.

    >>> print(arc_cosine([-1.0, 0.0, 1.0]).round(4))
    [0.     0.1592 0.5   ]
    """
    given = backend.double(backend.as_real(rho, "rho"))
    xp = backend.namespace(given)
    values = xp.asarray(xp.reshape(given, (-1,)), copy=True)
    replace_all_by_arc_cosines(values)
    return xp.reshape(values, given.shape)[()]


def replace_all_by_arc_cosines(rho: Array) -> None:
    """Put M(0, 0, ρ) in the place of a C-contiguous array ρ of any size, block by block."""
    xp = backend.namespace(rho)
    flat = xp.reshape(rho, (-1,))
    pairs = block_pairs(rho)
    work = backend.empty((2, min(flat.shape[0], pairs)), rho)
    for part in blocks.slices(flat.shape[0], 1, pairs):
        replace_by_arc_cosines(flat[part], work[:, : part.stop - part.start])


def replace_by_arc_cosines(rho: Array, work: Array) -> None:
    """Put M(0, 0, ρ) in the place of the correlations ρ; `work` is two or more arrays like ρ."""
    xp = backend.namespace(rho)
    value, angle = work[0], work[1]
    one = backend.ones((), rho)
    backend.clip(rho, -1.0, 1.0, out=rho)
    xp.add(one, rho, out=value)
    value *= xp.subtract(one, rho, out=angle)  # 1 - ρ² from two factors that are exact near ±1
    xp.sqrt(value, out=value)
    xp.acos(xp.negative(rho, out=angle), out=angle)  # π - arccos ρ, without its cancellation
    opposite = _positions(rho < -0.75) if float(xp.min(rho)) < -0.75 else None
    rho *= angle
    rho += value
    if opposite is not None:
        _flat(rho)[opposite] = _sine_less_angle_cosine(_flat(angle)[opposite])
    rho *= 0.5 / math.pi


def replace_by_moments(h: Array, k: Array, rho: Array, work: Array) -> None:
    """Put M(h, k, ρ) in the place of the correlations ρ, of whose shape h and k are together.

    `work` is `WORK` arrays of the shape of ρ. Pairs of steep correlation are copied out of them:
    where all are, it takes some thirty arrays more.
    """
    xp = backend.namespace(rho)
    backend.clip(rho, -1.0, 1.0, out=rho)
    remainder, product = work[0], work[1]
    _remainder_by_quadrature(h, k, rho, work)
    steep = _positions(xp.abs(rho, out=product) > _STEEP)
    if steep.shape[0]:
        where = xp.unravel_index(steep, rho.shape)
        first, second, correlation = (xp.broadcast_to(x, rho.shape)[where] for x in (h, k, rho))
        _flat(remainder)[steep] = _remainder_by_owen(first, second, correlation)
    rho *= backend.ndtr(h)
    rho *= backend.ndtr(k)
    rho += xp.multiply(_relu_mean(h), _relu_mean(k), out=product)
    rho += remainder


def block_pairs(reference: Array) -> int:
    """How many pairs are in a block: `CACHED_PAIRS`, or more where the array is on a GPU."""
    return max(1, blocks.block_bytes(reference) // _PAIR_BYTES)


def _remainder_by_quadrature(h: Array, k: Array, rho: Array, work: Array) -> None:
    """Put D(h, k, ρ) into `work[0]`, of correlations cut off at ±`_STEEP`.

    With t = ρx the factor 1 - x is the weight of a Gauss-Jacobi rule on [0, 1]. The exponent is

        -(h + k)² / (4 (1 + t)) - (h - k)² / (4 (1 - t)),

    whose real part is negative wherever |Re t| < 1. So the integrand is analytic and bounded there
    alike for all means, and the error falls as E^(-2 nodes), with E + 1/E = 2 (2 - |ρ|) / |ρ|.
    """
    xp = backend.namespace(rho)
    total, square, slope, level, gap, term = (work[i] for i in range(WORK))
    one = backend.ones((), rho)
    backend.clip(rho, -_STEEP, _STEEP, out=square)
    xp.multiply(h, square, out=slope)
    slope *= k
    xp.square(square, out=square)
    xp.add(-0.5 * h * h, -0.5 * k * k, out=level)
    total[...] = 0.0
    for node, weight in _rule(_NODES):
        backend.add_scaled(one, -node * node, square, out=gap)  # 1 - t²
        backend.add_scaled(level, node, slope, out=term)
        term /= gap
        xp.exp(term, out=term)
        xp.sqrt(gap, out=gap)
        term /= gap
        backend.add_scaled(total, weight, term, out=total)
    total *= square


@cache
def _rule(nodes: int) -> list[tuple[float, float]]:
    """Nodes x and weights for the integrals of (1 - x) f(x) / 2π over [0, 1]."""
    points, weights = roots_jacobi(nodes, 1.0, 0.0)
    return list(zip((0.5 + 0.5 * points).tolist(), (weights / (8 * math.pi)).tolist(), strict=True))


def _remainder_by_owen(h: Array, k: Array, rho: Array) -> Array:
    """D(h, k, ρ) for any correlation in [-1, 1], by the closed form at means -a, -b <= 0:

        M(-a, -b, r) = (ab + r) Φ₂ - b φ(a) Φ(-z) - a φ(b) Φ(-y) + s φ(a) φ(z),
        Φ₂ = (Φ(-a) + Φ(-b)) / 2 - T(a, z/a) - T(b, y/b),    z = (b - ra)/s,    y = (a - rb)/s,

    with T Owen's function. No term exceeds 1/2 by much, so that nothing large cancels. Near r = 1
    the difference b - ra would lose the digits that 1/s magnifies: (b - a) + (1 - r) a keeps them.
    The limits a, b, s -> 0 are taken by staying 1e-100 away: T has reached its limit long before.
    """
    xp = backend.namespace(rho)
    rho = xp.where((h > 0) == (k > 0), rho, -rho)
    # At 40 standard deviations everything has vanished but the rounding errors, which grow.
    a, b = (backend.clip(xp.abs(x), 1e-100, 40.0) for x in (h, k))
    s = backend.clip(xp.sqrt((1.0 - rho) * (1.0 + rho)), 1e-100, None)
    z = ((b - a) + (1.0 - rho) * a) / s
    y = ((a - b) + (1.0 - rho) * b) / s
    below_a, below_b = backend.ndtr(-a), backend.ndtr(-b)
    density_a, density_b = _density(a), _density(b)
    both = 0.5 * (below_a + below_b) - _owens_function(a, z / a) - _owens_function(b, y / b)
    moment = (a * b + rho) * both + s * density_a * _density(z)
    moment -= b * density_a * backend.ndtr(-z) + a * density_b * backend.ndtr(-y)
    return moment - _relu_mean(-a) * _relu_mean(-b) - rho * below_a * below_b


def _owens_function(h: Array, a: Array) -> Array:
    """T(h, a) = (1/2π) ∫_0^a exp(-h² (1 + x²) / 2) / (1 + x²) dx for h > 0: scipy's, or by nodes.

    T is odd in a, and slopes above 1 are exchanged for those below: for a > 0

        T(h, a) + T(ha, 1/a) = (Φ(-h) + Φ(-ha)) / 2 - Φ(-h) Φ(-ha).

    Up to a = 1 the integrand is even in x, so that one half of a Gauss rule on [-a, a] does; it is
    analytic and bounded alike for all h where |Im x| < 1, so that the error is (1 + √2)^(-4 nodes).
    """
    if not backend.is_foreign(h):
        return owens_t(h, a)
    xp = backend.namespace(h)
    slope = xp.abs(a)
    across = h * slope
    exponent = -0.5 * xp.square(xp.maximum(h, across))
    width = xp.minimum(slope, 1.0 / slope)
    square, total = xp.square(width), xp.zeros_like(h)
    for node, weight in _half_rule(_OWEN_NODES):
        gap = node**2 * square + 1.0
        total += weight * xp.exp(exponent * gap) / gap
    total *= width / (2 * math.pi)
    below, below_across = backend.ndtr(-h), backend.ndtr(-across)
    steep = 0.5 * (below + below_across) - below * below_across - total
    return xp.sign(a) * xp.where(slope > 1, steep, total)


@cache
def _half_rule(nodes: int) -> list[tuple[float, float]]:
    """The positive nodes, and their weights, of the Gauss-Legendre rule of twice as many nodes."""
    points, weights = roots_legendre(2 * nodes)
    return list(zip(points[nodes:].tolist(), weights[nodes:].tolist(), strict=True))


def _sine_less_angle_cosine(angle: Array) -> Array:
    """sin α - α cos α = Σ_n (-1)^(n+1) 2n α^(2n+1) / (2n+1)! for angles up to 0.75.

    The two terms of the left side cancel to α³/3: the series has no such loss.
    """
    square = angle * angle
    total = backend.zeros(angle.shape, angle)
    for n in range(9, 0, -1):
        total *= -square
        total += 2 * n / math.factorial(2 * n + 1)
    total *= square
    total *= angle
    return total


def _relu_mean(h: Array) -> Array:
    """R(h) = E relu(u) for u Gaussian of mean h and variance 1."""
    return _density(h) + h * backend.ndtr(h)


def _density(x: Array) -> Array:
    return backend.namespace(x).exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _flat(array: Array) -> Array:
    """A contiguous array's own memory in one row."""
    return backend.namespace(array).reshape(array, (-1,))


def _positions(condition: Array) -> Array:
    """Where in the flattened array the condition holds."""
    (positions,) = backend.namespace(condition).nonzero(_flat(condition))
    return positions
