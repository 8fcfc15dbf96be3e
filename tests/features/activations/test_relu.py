"""E[relu(u) relu(v)]: against fifty digits, exact integrals and its own symmetries."""

import math

import kernel_kinds
import mpmath
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr, owens_t

from onelayer.array import backend
from onelayer.features.activations import Preactivations, relu

NEAR_ONE = [0.0, 2.0**-53, 1e-15, 1e-12, 1e-8, 1e-4, 0.1, 0.4]
CORRELATIONS = [*(1 - gap for gap in NEAR_ONE), 0.3, 0.0, -0.3, *(gap - 1 for gap in NEAR_ONE)]
MEANS = [0.0, 1e-300, -1e-9, 0.4, -0.4, 0.4000001, 2.0, -2.0, -7.5, 30.0, -30.0, 1e3, -1e3]

means = st.one_of(st.floats(-5, 5), st.floats(-1e3, 1e3))
correlations = st.one_of(
    st.floats(-1, 1),
    st.floats(0, 17).map(lambda digits: 1 - 10**-digits),
    st.floats(0, 17).map(lambda digits: 10**-digits - 1),
)


@pytest.fixture(scope="session", params=kernel_kinds.KINDS)
def kind(request):
    """A function that turns a numpy array into the kind of array to compute in."""
    return kernel_kinds.converter(request.param)


@pytest.fixture(scope="session")
def moment(kind):
    """The moment computed in the kind of array, from and to numpy."""

    def computed(h, k, rho):
        h, k, rho = np.broadcast_arrays(*(np.asarray(x, dtype=np.float64) for x in (h, k, rho)))
        return _computed(kind, rho, h, k).clip(0.0, None)

    return computed


@pytest.fixture(scope="session")
def arc_cosine(kind):
    """The moment without means computed in the kind of array, from and to numpy."""

    def computed(rho):
        return _computed(kind, np.asarray(rho, dtype=np.float64), None, None)

    return computed


def _computed(kind, rho, h, k):
    moments = kind(rho.reshape(-1).copy())
    means = [None if x is None else kind(x.reshape(-1).copy()) for x in (h, k)]
    rows, columns = (Preactivations(None, mean) for mean in means)
    work = backend.empty((relu.RELU.work, *moments.shape), moments)
    relu.RELU.moments(rows, columns, moments, work)
    return backend.to_numpy(moments).reshape(rho.shape)[()]


def error(value, true):
    """Relative to the true value where that is above 1."""
    return abs(value - true) / max(1.0, abs(true))


# E[relu(u) relu(v)]


@pytest.mark.slow
@pytest.mark.parametrize("rho", CORRELATIONS)
def test_moment_is_exact_in_every_corner(moment, rho):
    grid = moment(np.array(MEANS)[:, None], MEANS, rho)
    assert grid.shape == (len(MEANS), len(MEANS))
    for i, h in enumerate(MEANS):
        for j, k in enumerate(MEANS[: i + 1]):
            assert error(grid[i, j], oracles.relu_moment(h, k, rho)) < 1e-13, (h, k)


@given(h=means, k=means, rho=correlations)
def test_moment_is_exact_anywhere(moment, h, k, rho):
    assert error(moment(h, k, rho), oracles.relu_moment(h, k, rho)) < 1e-13


@given(h=means, k=means, rho=correlations)
def test_moment_keeps_its_symmetries(moment, h, k, rho):
    value = moment(h, k, rho)
    assert value >= 0
    assert error(moment(k, h, rho), value) < 1e-14
    # relu(u) - relu(-u) = u, and E[u relu(v)] = h E relu(v) + ρ P(v > 0).
    mirrored = moment(-h, k, -rho) + h * oracles.relu_mean(k, 1.0) + rho * ndtr(k)
    assert abs(value - mirrored) < 1e-14 * max(1.0, abs(h)) * max(1.0, k)


@pytest.mark.slow
def test_moment_agrees_with_fifty_digits_where_cancellation_is_worst(moment):
    corners = [
        (0.5, 0.5, 1 - 1e-10),
        (0.5, 0.5 + 1e-5, 1 - 1e-10),
        (0.5, -0.5, 1e-10 - 1),
        (1e-12, -2e-12, 1 - 2**-53),
        (1e3, -2.5, -0.999),
        (-1.0, 1.0, 0.61),
    ]
    for h, k, rho in corners:
        assert error(moment(h, k, rho), precise_moment(h, k, rho)) < 1e-14


def precise_moment(h, k, rho):
    """R(h) R(k) + ρ Φ(h) Φ(k) + the integral of (ρ - t) times the density at the origin."""
    with mpmath.workdps(50):
        h, k, rho = mpmath.mpf(h), mpmath.mpf(k), mpmath.mpf(rho)

        def remainder(angle):  # t = sin(angle)
            t, gap = mpmath.sin(angle), mpmath.cos(angle) ** 2
            return (rho - t) * mpmath.exp(-(h**2 - 2 * t * h * k + k**2) / (2 * gap))

        def relu_mean(x):
            return mpmath.npdf(x) + x * mpmath.ncdf(x)

        panels = mpmath.linspace(0, mpmath.asin(rho), 9)
        integral = mpmath.quad(remainder, panels) / (2 * mpmath.pi)
        product = relu_mean(h) * relu_mean(k) + rho * mpmath.ncdf(h) * mpmath.ncdf(k)
        return float(product + integral)


def test_moment_takes_correlations_that_rounding_left_outside(moment, arc_cosine):
    outside = np.array([1 + 1e-15, -1 - 1e-15])
    inside = np.array([1.0, -1.0])
    for h, k in [(0.0, 0.0), (0.5, 0.5), (1.0, -1.0), (-2.0, 3.0)]:
        np.testing.assert_array_equal(moment(h, k, outside), moment(h, k, inside))
    np.testing.assert_array_equal(arc_cosine(outside), arc_cosine(inside))


def test_moment_of_means_far_out_does_not_drown_in_rounding(moment):
    assert moment(-1e9, 1.0000001, [-1.0, 0.5, 1.0]).max() < 1e-14
    linear = 1e9 * oracles.relu_mean(1.0000001, 1.0) + 0.9 * ndtr(1.0000001)
    assert moment(1e9, 1.0000001, 0.9) == pytest.approx(linear, rel=1e-15)


def test_moment_grows_with_the_correlation(moment):
    rho = np.sort([*np.linspace(-1, 1, 401), *CORRELATIONS])
    for h, k in [(0.0, 0.0), (0.7, 0.7), (-1.0, 2.0), (3.0, -3.0), (20.0, 20.0)]:
        moments = moment(h, k, rho)
        assert np.diff(moments).min() > -3e-15 * max(1.0, moments.max())


def test_moment_goes_on_smoothly_where_nodes_give_way_to_owens_function(moment):
    edge = relu._STEEP
    h, k = np.meshgrid(np.linspace(-4, 4, 33), np.linspace(-4, 4, 33))
    for rho in (edge, -edge):
        outward = np.nextafter(rho, 2 * rho)
        moments = moment(h, k, rho)
        jumps = np.abs(moment(h, k, outward) - moments) / np.maximum(1, moments)
        assert 0 < jumps.max() < 5e-15


def test_moment_broadcasts_and_leaves_its_arguments_alone(moment):
    h, k, rho = np.array([[0.5], [-0.5]]), np.array([1.0, 2.0, 3.0]), np.array(0.9)
    kept = h.copy(), k.copy(), rho.copy()
    moments = moment(h, k, rho)
    assert moments.shape == (2, 3)
    assert moments[1, 2] == pytest.approx(moment(-0.5, 3.0, 0.9), rel=1e-15)
    for argument, copy in zip((h, k, rho), kept, strict=True):
        np.testing.assert_array_equal(argument, copy)
    assert np.ndim(moment(0.0, 0.0, 0.0)) == 0
    assert moment(np.zeros((0, 2)), 0.0, 0.5).shape == (0, 2)


def test_owens_function_is_that_of_scipy_for_every_slope(kind):
    sizes = [0.0, 1e-100, 1e-8, 0.3, 1 - 1e-12, 1.0, 1 + 1e-12, 3.0, 1e8, 1e200]
    slopes = np.array([*sizes, *(-size for size in sizes)])
    for h in (1e-100, 1e-9, 0.2, 1.0, 2.5, 6.0, 40.0):
        means = np.full(len(slopes), h)
        found = backend.to_numpy(relu._owens_function(kind(means), kind(slopes)))
        np.testing.assert_allclose(found, owens_t(means, slopes), rtol=0, atol=3e-16)


# The case of no means


def precise_arc_cosine(rho):
    with mpmath.workdps(60):
        rho = mpmath.mpf(rho)
        value = mpmath.sqrt(1 - rho**2) + rho * (mpmath.pi - mpmath.acos(rho))
        return value / (2 * mpmath.pi)


@pytest.mark.parametrize("sign", [1, -1])
def test_arc_cosine_is_right_in_every_digit(arc_cosine, sign):
    rho = sign * (1 - np.concatenate([np.logspace(-16, 0, 200), np.linspace(0, 1, 101)[1:]]))
    true = [precise_arc_cosine(float(r)) for r in rho]
    for value, exact in zip(arc_cosine(rho), true, strict=True):
        assert abs(value - exact) <= 3e-15 * exact


def test_arc_cosine_at_its_ends(arc_cosine):
    assert arc_cosine(-1.0) == 0.0
    assert arc_cosine(1.0) == 0.5
    assert arc_cosine(0.0) == pytest.approx(0.5 / math.pi, rel=1e-15)


def test_arc_cosine_is_the_moment_without_means(moment, arc_cosine):
    rho = np.linspace(-1, 1, 1001)
    np.testing.assert_allclose(arc_cosine(rho), moment(0.0, 0.0, rho), rtol=0, atol=1e-15)
