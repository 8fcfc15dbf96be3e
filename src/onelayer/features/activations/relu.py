"""The rectified linear unit and E[relu(u) relu(v)] for Gaussian u and v, in closed form.

For (u, v) with unit variances, means h and k and correlation ρ, the moment is

    M(h, k, ρ) = E[relu(u) relu(v)].

Its second derivative in ρ is the density of (u, v) at the origin; its value and slope at ρ = 0 are
products, as u and v are then independent. Hence, with R(h) = E relu(u) = φ(h) + h Φ(h),

    M(h, k, ρ) = R(h) R(k) + ρ Φ(h) Φ(k) + D(h, k, ρ),

    D(h, k, ρ) = ∫_0^ρ (ρ - t) exp(-(h² - 2thk + k²) / (2 (1 - t²))) / (2π √(1 - t²)) dt.

The first two terms are products of numbers known for each key. The remainder D is below 0.1 for all
means, so its rounding errors never matter beside the rest. It is unchanged if h and ρ, or k and ρ,
change their signs together, so means of one sign suffice. A few quadrature nodes give it to the
last digit unless ρ is near ±1; there Owen's function does.

Arrays are numpy's or torch's, in float64. Kernels evaluate billions of pairs, and memory traffic is
the main cost: all but the few pairs of steep correlation are computed in place.
"""

from __future__ import annotations

import math

from scipy.special import owens_t, roots_jacobi, roots_legendre

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.features.activations.base import Activation, Preactivations

# Up to this correlation quadrature gives D, beyond it Owen's function. The nodes together cost
# 40 ns a pair, Owen's function 200 ns or more, and few pairs of keys are so alike.
_STEEP = 0.6
_WORK = 6  # arrays in which the moments of a block of pairs are computed


# Nodes x and weights for the integrals of (1 - x) f(x) / 2π over [0, 1].
_NODES, _WEIGHTS = roots_jacobi(10, 1.0, 0.0)
_NODES, _WEIGHTS = 0.5 + 0.5 * _NODES, _WEIGHTS / (8 * math.pi)
# The positive half of a Gauss-Legendre rule, which gives Owen's function to 2e-16.
_HALF_NODES, _HALF_WEIGHTS = (numbers[12:].tolist() for numbers in roots_legendre(24))


def _replace_by_moments(
    rows: Preactivations, columns: Preactivations, rho: Array, work: Array
) -> None:
    """Replace correlations ρ by M(h, k, ρ), h and k the means; see `Activation.moments`.

    Errors are below 1e-14 max(1, value) for all correlations and means up to 1,000. A correlation
    that rounding has left just outside [-1, 1] counts as ±1. With means, pairs of steep correlation
    are copied: if all are steep, this takes thirty more arrays.
    """
    xp, h, k = backend.namespace(rho), rows.means, columns.means
    backend.clip(rho, -1.0, 1.0, out=rho)
    if h is None or k is None:
        _replace_by_arc_cosines(rho, work)
        return
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


def _replace_by_arc_cosines(rho: Array, work: Array) -> None:
    """Replace correlations ρ by M(0, 0, ρ) = (√(1 - ρ²) + ρ (π - arccos ρ)) / 2π.

    The error is a few units in the last place of the value, which vanishes like (1 + ρ)^1.5 at -1.
    """
    xp = backend.namespace(rho)
    value, angle = work[0], work[1]
    one = backend.ones((), rho)
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


def _remainder_by_quadrature(h: Array, k: Array, rho: Array, work: Array) -> None:
    """Put D(h, k, ρ) into `work[0]`, of correlations cut off at ±`_STEEP`.

    With t = ρx the factor 1 - x is the weight of a Gauss-Jacobi rule on [0, 1]. The exponent is

        -(h + k)² / (4 (1 + t)) - (h - k)² / (4 (1 - t)),

    whose real part is negative wherever |Re t| < 1. So the integrand is analytic and bounded there
    alike for all means, and the error falls as E^(-2 nodes), with E + 1/E = 2 (2 - |ρ|) / |ρ|.
    """
    xp = backend.namespace(rho)
    total, square, slope, level, gap, term = (work[i] for i in range(_WORK))
    one = backend.ones((), rho)
    backend.clip(rho, -_STEEP, _STEEP, out=square)
    xp.multiply(h, square, out=slope)
    slope *= k
    xp.square(square, out=square)
    xp.add(-0.5 * h * h, -0.5 * k * k, out=level)
    total[...] = 0.0
    for node, weight in zip(_NODES.tolist(), _WEIGHTS.tolist(), strict=True):
        backend.add_scaled(one, -node * node, square, out=gap)  # 1 - t²
        backend.add_scaled(level, node, slope, out=term)
        term /= gap
        xp.exp(term, out=term)
        xp.sqrt(gap, out=gap)
        term /= gap
        backend.add_scaled(total, weight, term, out=total)
    total *= square


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
    for node, weight in zip(_HALF_NODES, _HALF_WEIGHTS, strict=True):
        gap = node**2 * square + 1.0
        total += weight * xp.exp(exponent * gap) / gap
    total *= width / (2 * math.pi)
    below, below_across = backend.ndtr(-h), backend.ndtr(-across)
    steep = 0.5 * (below + below_across) - below * below_across - total
    return xp.sign(a) * xp.where(slope > 1, steep, total)


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
    return backend.namespace(array).reshape(array, (-1,))  # its own memory if contiguous


def _positions(condition: Array) -> Array:
    """Where in the flattened array the condition holds."""
    return backend.namespace(condition).nonzero(_flat(condition))[0]


RELU = Activation("relu", backend.relu, homogeneous=True, moments=_replace_by_moments, work=_WORK)
