"""Kernels of infinitely many heads: against naive loops, exact numbers and finite heads."""

import math

import mpmath
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from onelayer.random_features import kernels

NEAR_ONE = [0.0, 2.0**-53, 1e-15, 1e-12, 1e-8, 1e-4, 0.1, 0.4]
CORRELATIONS = [*(1 - gap for gap in NEAR_ONE), 0.3, 0.0, -0.3, *(gap - 1 for gap in NEAR_ONE)]
MEANS = [0.0, 1e-300, -1e-9, 0.4, -0.4, 0.4000001, 2.0, -2.0, -7.5, 30.0, -30.0, 1e3, -1e3]

means = st.one_of(st.floats(-5, 5), st.floats(-1e3, 1e3))
correlations = st.one_of(
    st.floats(-1, 1),
    st.floats(0, 17).map(lambda digits: 1 - 10**-digits),
    st.floats(0, 17).map(lambda digits: 10**-digits - 1),
)


def examples(n, keys, dim=3, seed=0):
    """Tokens (n, keys + 1, dim + 1) with their constant 1, in no way normalised."""
    X = np.random.default_rng(seed).standard_normal((n, keys + 1, dim + 1))
    X[:, :, -1] = 1.0
    return X


def identity_bias(dim=3):
    return np.diag([1.0] * dim + [0.0])


def random_bias(dim=3, seed=7):
    return np.random.default_rng(seed).standard_normal((dim + 1, dim + 1))


def error(value, true):
    """Relative to the true value where that is above 1."""
    return abs(value - true) / max(1.0, abs(true))


# E[relu(u) relu(v)]


@pytest.mark.parametrize("rho", CORRELATIONS)
def test_moment_is_exact_in_every_corner(rho):
    grid = kernels.relu_moment(np.array(MEANS)[:, None], MEANS, rho)
    assert grid.shape == (len(MEANS), len(MEANS))
    for i, h in enumerate(MEANS):
        for j, k in enumerate(MEANS[: i + 1]):
            assert error(grid[i, j], oracles.relu_moment(h, k, rho)) < 1e-13, (h, k)


@given(h=means, k=means, rho=correlations)
def test_moment_is_exact_anywhere(h, k, rho):
    assert error(kernels.relu_moment(h, k, rho), oracles.relu_moment(h, k, rho)) < 1e-13


@given(h=means, k=means, rho=correlations)
def test_moment_keeps_its_symmetries(h, k, rho):
    moment = kernels.relu_moment(h, k, rho)
    assert moment >= 0
    assert error(kernels.relu_moment(k, h, rho), moment) < 1e-14
    # relu(u) - relu(-u) = u, and E[u relu(v)] = h E relu(v) + ρ P(v > 0).
    mirrored = kernels.relu_moment(-h, k, -rho) + h * oracles.relu_mean(k, 1.0) + rho * ndtr(k)
    assert abs(moment - mirrored) < 1e-14 * max(1.0, abs(h)) * max(1.0, k)


def test_moment_agrees_with_fifty_digits_where_cancellation_is_worst():
    corners = [
        (0.5, 0.5, 1 - 1e-10),
        (0.5, 0.5 + 1e-5, 1 - 1e-10),
        (0.5, -0.5, 1e-10 - 1),
        (1e-12, -2e-12, 1 - 2**-53),
        (1e3, -2.5, -0.999),
        (-1.0, 1.0, 0.61),
    ]
    for h, k, rho in corners:
        assert error(kernels.relu_moment(h, k, rho), precise_moment(h, k, rho)) < 1e-14


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


def test_moment_takes_correlations_that_rounding_left_outside():
    outside = np.array([1 + 1e-15, -1 - 1e-15])
    inside = np.array([1.0, -1.0])
    for h, k in [(0.0, 0.0), (0.5, 0.5), (1.0, -1.0), (-2.0, 3.0)]:
        np.testing.assert_array_equal(
            kernels.relu_moment(h, k, outside), kernels.relu_moment(h, k, inside)
        )
    np.testing.assert_array_equal(kernels.arc_cosine(outside), kernels.arc_cosine(inside))


def test_moment_of_means_far_out_does_not_drown_in_rounding():
    assert kernels.relu_moment(-1e9, 1.0000001, [-1.0, 0.5, 1.0]).max() < 1e-14
    linear = 1e9 * oracles.relu_mean(1.0000001, 1.0) + 0.9 * ndtr(1.0000001)
    assert kernels.relu_moment(1e9, 1.0000001, 0.9) == pytest.approx(linear, rel=1e-15)


def test_moment_grows_with_the_correlation():
    rho = np.sort([*np.linspace(-1, 1, 401), *CORRELATIONS])
    for h, k in [(0.0, 0.0), (0.7, 0.7), (-1.0, 2.0), (3.0, -3.0), (20.0, 20.0)]:
        moments = kernels.relu_moment(h, k, rho)
        assert np.diff(moments).min() > -3e-15 * max(1.0, moments.max())


def test_moment_goes_on_smoothly_where_nodes_give_way_to_owens_function():
    edge = kernels._STEEP
    h, k = np.meshgrid(np.linspace(-4, 4, 33), np.linspace(-4, 4, 33))
    for rho in (edge, -edge):
        outward = np.nextafter(rho, 2 * rho)
        moments = kernels.relu_moment(h, k, rho)
        jumps = np.abs(kernels.relu_moment(h, k, outward) - moments) / np.maximum(1, moments)
        assert 0 < jumps.max() < 5e-15


def test_moment_broadcasts_and_leaves_its_arguments_alone():
    h, k, rho = np.array([[0.5], [-0.5]]), np.array([1.0, 2.0, 3.0]), np.array(0.9)
    kept = h.copy(), k.copy(), rho.copy()
    moments = kernels.relu_moment(h, k, rho)
    assert moments.shape == (2, 3)
    assert moments[1, 2] == kernels.relu_moment(-0.5, 3.0, 0.9)
    for argument, copy in zip((h, k, rho), kept, strict=True):
        np.testing.assert_array_equal(argument, copy)
    assert np.ndim(kernels.relu_moment(0.0, 0.0, 0.0)) == 0
    assert kernels.relu_moment(np.zeros((0, 2)), 0.0, 0.5).shape == (0, 2)


# The case of no means


def precise_arc_cosine(rho):
    with mpmath.workdps(60):
        rho = mpmath.mpf(rho)
        value = mpmath.sqrt(1 - rho**2) + rho * (mpmath.pi - mpmath.acos(rho))
        return value / (2 * mpmath.pi)


@pytest.mark.parametrize("sign", [1, -1])
def test_arc_cosine_is_right_in_every_digit(sign):
    rho = sign * (1 - np.concatenate([np.logspace(-16, 0, 200), np.linspace(0, 1, 101)[1:]]))
    true = [precise_arc_cosine(float(r)) for r in rho]
    for value, exact in zip(kernels.arc_cosine(rho), true, strict=True):
        assert abs(value - exact) <= 3e-15 * exact


def test_arc_cosine_at_its_ends():
    assert kernels.arc_cosine(-1.0) == 0.0
    assert kernels.arc_cosine(1.0) == 0.5
    assert kernels.arc_cosine(0.0) == pytest.approx(0.5 / math.pi, rel=1e-15)


def test_arc_cosine_is_the_moment_without_means():
    rho = np.linspace(-1, 1, 1001)
    np.testing.assert_allclose(
        kernels.arc_cosine(rho), kernels.relu_moment(0.0, 0.0, rho), rtol=0, atol=1e-15
    )


def test_arc_cosine_of_more_than_a_block_keeps_shape_and_argument():
    rho = np.linspace(-1, 1, 3 * kernels._PAIRS + 6).reshape(3, -1).T
    kept = rho.copy()
    values = kernels.arc_cosine(rho)
    assert values.shape == rho.shape
    np.testing.assert_array_equal(rho, kept)
    rows = [0, 1, kernels._PAIRS // 3, -1]
    for row in rows:
        np.testing.assert_allclose(values[row], kernels.arc_cosine(rho[row]), rtol=1e-15)
    assert kernels.arc_cosine(np.zeros((0, 3))).shape == (0, 3)


# Attention


@given(
    keys=st.integers(1, 3),
    other_keys=st.integers(1, 4),
    masked=st.booleans(),
    other_masked=st.booleans(),
    bias=st.sampled_from(["none", "identity", "random"]),
    seed=st.integers(0, 2**16),
)
def test_attention_kernel_is_what_the_loops_say(keys, other_keys, masked, other_masked, bias, seed):
    X, Z = examples(2, keys, seed=seed), examples(3, other_keys, seed=seed + 1)
    Z[0, : min(keys, other_keys) + 1] = X[0, : min(keys, other_keys) + 1]  # correlations of 1
    rng = np.random.default_rng(seed)
    mask = random_mask(rng, 2, keys) if masked else None
    other_mask = random_mask(rng, 3, other_keys) if other_masked else None
    bias = {"none": None, "identity": identity_bias(), "random": random_bias(seed=seed)}[bias]
    expected = oracles.attention_kernel(X, mask, Z, other_mask, bias)
    found = kernels.attention_kernel_block(X, mask, Z, other_mask, bias)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def random_mask(rng, n, keys):
    """Any keys but at least the first, and the query."""
    mask = rng.random((n, keys + 1)) < 0.5
    mask[:, :2] = True
    return mask


def test_attention_kernel_with_a_bias_of_zeros_is_that_without():
    X, Z = examples(20, 4), examples(30, 5, seed=1)
    without = kernels.attention_kernel_block(X, None, Z, None, None)
    zeros = kernels.attention_kernel_block(X, None, Z, None, np.zeros((4, 4)))
    np.testing.assert_allclose(zeros, without, rtol=0, atol=1e-13 * np.abs(without).max())


@pytest.mark.parametrize("bias", [None, random_bias()], ids=["unbiased", "biased"])
def test_attention_kernel_does_not_depend_on_the_blocks(bias, monkeypatch):
    X, Z = examples(7, 5), examples(9, 3, seed=1)
    mask = random_mask(np.random.default_rng(0), 7, 5)
    whole = kernels.attention_kernel_block(X, mask, Z, None, bias)
    for pairs, width in [(1, 1), (7, 2), (40, 4), (100, 100)]:
        monkeypatch.setattr(kernels, "_PAIRS", pairs)
        monkeypatch.setattr(kernels, "_WIDTH", width)
        parts = kernels.attention_kernel_block(X, mask, Z, None, bias)
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-14 * np.abs(whole).max())


@pytest.mark.parametrize("bias", [None, random_bias()], ids=["unbiased", "biased"])
def test_masked_keys_do_not_count(bias):
    X, Z = examples(4, 6), examples(5, 3, seed=1)
    mask = np.ones((4, 7), dtype=bool)
    mask[:, 4:] = False
    expected = kernels.attention_kernel_block(X[:, :4], None, Z, None, bias)
    for padding in (0.0, 1.0, 1e6):
        X[:, 4:, :-1] = padding
        found = kernels.attention_kernel_block(X, mask, Z, None, bias)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14 * np.abs(expected).max())
        turned = kernels.attention_kernel_block(Z, None, X, mask, bias)
        np.testing.assert_allclose(turned, expected.T, rtol=0, atol=1e-14 * np.abs(expected).max())


@pytest.mark.parametrize("bias", [None, identity_bias()], ids=["unbiased", "biased"])
def test_an_example_without_keys_has_kernel_zero(bias):
    X = examples(3, 2)
    mask = np.array([[True, True, True], [True, False, False], [True, True, False]])
    kernel = kernels.attention_kernel_block(X, mask, X, mask, bias)
    assert not kernel[1].any()
    assert not kernel[:, 1].any()
    assert kernel[0, 0] > 0
    assert not kernels.attention_kernel_block(X[:, :1], None, X, mask, bias).any()


@pytest.mark.parametrize("bias", [None, random_bias()], ids=["unbiased", "biased"])
def test_attention_kernel_does_not_see_the_order_of_the_keys(bias):
    X, Z = examples(6, 8), examples(5, 4, seed=1)
    mask = random_mask(np.random.default_rng(0), 6, 8)
    kernel = kernels.attention_kernel_block(X, mask, Z, None, bias)
    order = np.array([0, *(1 + np.random.default_rng(2).permutation(8))])
    shuffled = kernels.attention_kernel_block(X[:, order], mask[:, order], Z, None, bias)
    np.testing.assert_allclose(shuffled, kernel, rtol=0, atol=1e-12 * np.abs(kernel).max())
    queries_moved = kernels.attention_kernel_block(X[:, ::-1], mask[:, ::-1], Z, None, bias)
    assert np.abs(queries_moved - kernel).max() > 1e-3 * np.abs(kernel).max()


@pytest.mark.parametrize("bias", [None, identity_bias(), random_bias()])
def test_attention_kernel_is_positive_semidefinite(bias):
    X = examples(40, 3)
    X[20:30] = X[:10]
    X[30:] = X[:10] + 1e-9 * X[10:20]  # correlations at and near 1
    kernel = kernels.attention_kernel_block(X, None, X, None, bias)
    values = np.linalg.eigvalsh(kernel)
    assert values[0] > -1e-13 * values[-1]
    assert values[20] > 1e-6 * values[-1]  # and of the rank of the different examples


def test_attention_kernel_of_no_examples_is_empty():
    X = examples(3, 2)
    assert kernels.attention_kernel_block(X[:0], None, X, None, None).shape == (0, 3)
    assert kernels.attention_kernel_block(X, None, X[:0], None, random_bias()).shape == (3, 0)


def finite_kernel(X, heads, bias, rng):
    """Φ Φᵀ of heads W_m = W_0 + N(0, 1/4), features (1/N) Σ_i relu(x_0ᵀ W_m x_i) x_i / √M."""
    dim = X.shape[2]
    W = (0.0 if bias is None else bias) + 0.5 * rng.standard_normal((heads, dim, dim))
    scores = np.einsum("na,mab,nib->nmi", X[:, 0], W, X[:, 1:], optimize=True)
    features = np.maximum(scores, 0) @ X[:, 1:] / (X.shape[1] - 1)
    features = features.reshape(len(X), -1) / math.sqrt(heads)
    return features @ features.T


@pytest.mark.parametrize("bias", [None, identity_bias(), random_bias()])
def test_many_heads_converge_to_the_kernel_at_the_rate_of_one_over_root(bias):
    X = examples(6, 3)
    kernel = kernels.attention_kernel_block(X, None, X, None, bias)
    heads = [32, 128, 512, 2048]
    rng = np.random.default_rng(0)
    errors = [
        np.sqrt(
            np.mean([np.sum((finite_kernel(X, m, bias, rng) - kernel) ** 2) for _ in range(60)])
        )
        for m in heads
    ]
    slope = np.polyfit(np.log(heads), np.log(errors), 1)[0]
    assert abs(slope + 0.5) < 0.1
    assert errors[-1] < 0.1 * np.linalg.norm(kernel)


# Features of all coordinates at once


@given(n=st.integers(1, 3), others=st.integers(1, 3), seed=st.integers(0, 2**16))
def test_mlp_kernel_is_what_the_loops_say(n, others, seed):
    rng = np.random.default_rng(seed)
    X, Z = rng.standard_normal((n, 4)), rng.standard_normal((others, 4))
    Z[0] = -2 * X[0] if seed % 2 else 3 * X[0]
    expected = oracles.mlp_kernel(X, Z, 0.3)
    found = kernels.mlp_kernel_block(X, Z, 0.3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * max(1, expected.max()))


def test_mlp_kernel_is_the_limit_of_many_features():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((5, 4))
    features = np.maximum(X @ (0.5 * rng.standard_normal((4, 400_000))), 0)
    kernel = kernels.mlp_kernel_block(X, X, 0.5)
    np.testing.assert_allclose(features @ features.T / 400_000, kernel, atol=0.01 * kernel.max())


# Gram matrices


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_gram_of_both_kinds_is_the_whole_matrix(size):
    X, Z = examples(5, 2), examples(4, 3, seed=1)
    whole = kernels.attention_kernel_block(X, None, X, None, None)
    symmetric = kernels.gram(5, None, attention_tile(X, X), size=size)
    np.testing.assert_allclose(symmetric, whole, rtol=1e-13)
    np.testing.assert_array_equal(symmetric, symmetric.T)
    whole = kernels.attention_kernel_block(X, None, Z, None, None)
    np.testing.assert_allclose(
        kernels.gram(5, 4, attention_tile(X, Z), size=size), whole, rtol=1e-13
    )


def attention_tile(X, Z):
    def block(rows, columns):
        return kernels.attention_kernel_block(X[rows], None, Z[columns], None, None)

    return block


def test_symmetric_gram_does_half_of_the_work_and_tells_of_it():
    computed, seen = [], []

    def block(rows, columns):
        computed.append((rows, columns))
        return np.zeros((rows.stop - rows.start, columns.stop - columns.start))

    def track(parts, stage):
        assert len(parts) == 10
        for part in parts:
            yield part
            seen.append(stage)
            assert len(seen) == len(computed)

    kernels.gram(20, None, block, track, size=5)
    assert computed == kernels.tiles(20, None, 5)
    assert len(seen) == 10
    assert all(rows.start >= columns.start for rows, columns in computed)


@given(count=st.integers(0, 9), others=st.none() | st.integers(0, 9), size=st.integers(1, 10))
def test_tiles_cover_every_entry_once(count, others, size):
    covered = np.zeros((count, count if others is None else others), dtype=int)
    for rows, columns in kernels.tiles(count, others, size):
        covered[rows, columns] += 1
        if others is None and rows != columns:
            covered[columns, rows] += 1
    assert (covered == 1).all()
