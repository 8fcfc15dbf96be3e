from functools import cache

import numpy as np
import pytest
from cases import random_mask, whitened

from onelayer import AttentionLayer, inputs
from onelayer.heads.low_rank import tangent
from onelayer.recovery import error_bars
from onelayer.recovery.gauss_newton import levenberg_marquardt, varpro
from onelayer.recovery.sensitivity import sensitivity


def refined(layer, X, noise, bias=False, rank=None, mask=None, causal=False, seed=0, steps=6):
    """The problem of noisy outputs, and the fit that steps from the true heads lead to."""
    Y = layer(X, mask=mask, causal=causal)
    Y = Y + noise * np.random.default_rng(seed + 500).standard_normal(Y.shape)
    posed = whitened(X, Y, mask, causal, bias)
    theta = posed.heads_of(layer)
    state = levenberg_marquardt.begin(
        posed.batches(layer.heads), theta, tangent(theta, posed.dim, rank)
    )
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        state = levenberg_marquardt.step(state, rng)
    return posed, state.fit


def bars_of(posed, fit, rank=None, rounding=0.0, seed=0, sharp=1e-9):
    rng = np.random.default_rng(seed)
    return error_bars.error_bars(fit, posed, rank, rounding, rng, sharp)


def errors_of(posed, fit, layer, X, mask=None):
    """True errors of attention and projection, in the order of the fit's heads."""
    match = posed.layer(fit.theta, fit.weights).distance(layer, inputs=X, mask=mask)
    assert match.permutation.tolist() == list(range(layer.heads))
    return match.attention, match.projection


def drawn(seed, dim=3, n=80, tokens=3, heads=2, **options):
    layer = AttentionLayer.random(heads=heads, dim=dim, seed=seed, **options)
    return layer, inputs.gaussian(n, tokens, dim, seed=seed + 100)


# Bars hold, and are not idle


KINDS = {
    "plain": {},
    "bias": {"bias": True},
    "causal": {"causal": True},
    "four dimensions": {"dim": 4, "n": 150},
    "rank": {"dim": 4, "rank": 1},
    "mask": {"masked": True, "n": 150},
    "far away": {"shift": 5.0, "n": 150},
    "normalised": {"dim": 4, "normalised": True, "n": 150},
}


@cache
def ratios(kind, seeds=40):
    """Bars over errors of all heads of some layers, attention and projections: (2, count)."""
    found = []
    for seed in range(seeds):
        options = dict(KINDS[kind])
        masked, causal = options.pop("masked", False), options.pop("causal", False)
        shift, normalised = options.pop("shift", 0.0), options.pop("normalised", False)
        layer, X = drawn(seed, **options)
        X = X - X.mean(axis=2, keepdims=True) if normalised else X + shift
        mask = random_mask(np.random.default_rng(seed), *X.shape[:2]) if masked else None
        rank, bias = options.get("rank"), options.get("bias", False)
        posed, fit = refined(layer, X, 1e-3, bias, rank, mask, causal, seed)
        bars = bars_of(posed, fit, rank, seed=seed)
        errors = errors_of(posed, fit, layer, X, mask)
        pairs = zip((bars.attention, bars.projection), errors, strict=True)
        found.append([bar / error for bar, error in pairs])
    return np.concatenate(found, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_true_errors_are_below_the_bars_and_not_far_below(kind):
    found = ratios(kind)
    assert (found > 1).mean(axis=1).min() >= 0.95
    assert np.median(found, axis=1).max() < 10


@pytest.mark.parametrize("noise", [1e-6, 1e-2])
def test_bars_grow_with_the_noise(noise):
    layer, X = drawn(0)
    plain, other = (bars_of(*refined(layer, X, size)) for size in (1e-4, noise))
    for name in ("attention", "projection", "noise"):
        ratio = getattr(other, name) / getattr(plain, name)
        np.testing.assert_allclose(ratio, noise / 1e-4, rtol=0.3)


def test_bars_rest_on_the_rounding_if_that_is_larger_than_the_residuals():
    layer, X = drawn(0)
    posed, fit = refined(layer, X, 1e-6)
    small, large = (bars_of(posed, fit, rounding=size) for size in (1e-5, 1e-3))
    assert (small.noise, large.noise) == (1e-5, 1e-3)
    np.testing.assert_allclose(large.attention / small.attention, 100, rtol=0.05)
    np.testing.assert_allclose(large.projection / small.projection, 100, rtol=0.05)


def test_a_search_that_ended_early_has_its_error_in_the_bars():
    layer, X = drawn(0)
    posed = whitened(X, layer(X), None, False, False)
    away = posed.heads_of(layer) * (1 + 0.02 * np.random.default_rng(0).standard_normal((3, 6)))
    fit = varpro.fit(posed.batches(2), away)
    bars, errors = bars_of(posed, fit), errors_of(posed, fit, layer, X)
    assert (bars.attention > errors[0]).all()
    assert (bars.projection > errors[1]).all()
    assert bars.attention.max() < 20 * errors[0].max()


def test_bars_are_the_same_on_every_backend(xp_array):
    layer, X = drawn(0)
    posed, fit = refined(layer, X, 1e-3)
    X, Y = posed.X, posed.Y
    layer = posed.in_whitened_coordinates(fit.theta, fit.weights)
    whole = whitened(xp_array(X), xp_array(Y), None, False, False)
    plain = whitened(X, Y, None, False, False)
    found, expected = (
        bars_of(one, varpro.fit(one.batches(2), one.heads_of(layer))) for one in (whole, plain)
    )
    np.testing.assert_allclose(found.attention, expected.attention, rtol=1e-6)
    np.testing.assert_allclose(found.projection, expected.projection, rtol=1e-6)


# The caller's coordinates


@pytest.mark.slow
@pytest.mark.parametrize("squeezed", [1e-3, 1e3])
def test_bars_are_in_the_callers_coordinates(squeezed):
    found = []
    for seed in range(12):
        layer, X = drawn(seed)
        stretch = np.array([1.0, 1.0, squeezed])
        other = AttentionLayer(
            layer.attention / stretch / stretch[:, None], layer.projection / stretch[:, None]
        )
        posed, fit = refined(other, X * stretch, 1e-4, seed=seed)
        bars = bars_of(posed, fit, seed=seed)
        attention, projection = errors_of(posed, fit, other, X * stretch)
        found.append([bars.attention / attention, bars.projection / projection])
    found = np.array(found)
    assert (found > 1).mean() >= 0.95
    assert np.median(found) < 10


@pytest.mark.parametrize("scale", [1e-4, 1e4])
def test_bars_do_not_depend_on_the_units_of_outputs(scale):
    layer, X = drawn(0)
    other = AttentionLayer(layer.attention, layer.projection * scale)
    plain, scaled = (
        bars_of(*refined(one, X, 1e-3 * unit)) for one, unit in ((layer, 1.0), (other, scale))
    )
    np.testing.assert_allclose(scaled.attention, plain.attention, rtol=1e-5)
    np.testing.assert_allclose(scaled.projection, plain.projection, rtol=1e-5)


def test_weak_directions_are_what_is_uncertain():
    layer, X = drawn(0, dim=4, n=150)
    bars = bars_of(*refined(layer, X * [1.0, 1.0, 1.0, 1e-3], 1e-4))
    assert bars.nested.shape == (4,)
    assert bars.nested[:3].max() < 0.05 < 1 < bars.nested[3]


# The coarse bound


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "bias", "rank", "far away", "stretched"])
def test_the_coarse_bound_is_never_below_the_draws(kind):
    for seed in range(5):
        options = {} if kind == "stretched" else dict(KINDS[kind])
        shift = options.pop("shift", 0.0)
        layer, X = drawn(seed, **options)
        X = X * [1.0, 0.1, 10.0] if kind == "stretched" else X + shift
        rank, bias = options.get("rank"), options.get("bias", False)
        posed, fit = refined(layer, X, 1e-3, bias, rank, seed=seed)
        coarse, fine = (bars_of(posed, fit, rank, sharp=sharp) for sharp in (np.inf, 0.0))
        assert (coarse.attention >= fine.attention).all()
        assert (coarse.projection >= fine.projection).all()


def test_bars_that_are_sharp_enough_cost_no_draws(monkeypatch):
    layer, X = drawn(0)
    posed, fit = refined(layer, X, 0.0)
    monkeypatch.setattr(error_bars, "_by_draws", None)
    bars = bars_of(posed, fit, rounding=1e-15)
    assert bars.attention.max() < 1e-9


# Heads that are not determined


def test_two_equal_heads_have_no_bars():
    layer, X = drawn(0, heads=3, n=150)
    layer.attention[2] = layer.attention[0]
    bars = bars_of(*refined(layer, X, 1e-4, steps=0))
    assert np.isinf(bars.attention[[0, 2]]).all()
    assert np.isinf(bars.projection[[0, 2]]).all()
    assert np.isinf(bars.nested).all()


def test_a_head_without_projection_has_no_bar_and_the_others_do():
    layer, X = drawn(0, heads=3, n=150)
    layer.projection[1] = 0.0
    posed = whitened(X, layer(X), None, False, False)
    fit = varpro.fit(posed.batches(3), posed.heads_of(layer))
    bars = bars_of(posed, fit, rounding=1e-9, sharp=0.0)
    assert np.isinf(bars.attention).tolist() == [False, True, False]
    assert bars.attention[[0, 2]].max() < 1e-6


@pytest.mark.parametrize("n", [2, 4])
def test_too_few_examples_give_no_bars(n):
    layer, X = drawn(0, n=n)
    bars = bars_of(*refined(layer, X, 1e-3))
    assert np.isinf(bars.attention).all()
    assert np.isinf(bars.projection).all()


def test_single_tokens_give_no_bars():
    layer, X = drawn(0, tokens=1)
    assert np.isinf(bars_of(*refined(layer, X, 1e-3, steps=0)).attention).all()


# Many examples, and equal ones


def test_bars_of_many_examples_come_from_few_of_them(monkeypatch):
    layer, X = drawn(0, n=4000)
    posed, fit = refined(layer, X, 1e-2)
    judged = []

    def seen(few, *others):
        judged.append(few.batches.examples)
        return sensitivity(few, *others)

    monkeypatch.setattr(error_bars, "sensitivity", seen)
    bars, errors = bars_of(posed, fit), errors_of(posed, fit, layer, X)
    assert max(judged) < 400
    for bar, error in zip((bars.attention, bars.projection), errors, strict=True):
        assert (bar > error).all()
        assert np.median(bar / error) < 10


def test_equal_rows_count_once():
    layer, X = drawn(0, n=200)
    posed, fit = refined(layer, X, 1e-3)
    assert error_bars._copies(posed) == 1.0
    twice = posed.take(np.tile(np.arange(200), 2))
    again = varpro.fit(twice.batches(2), fit.theta)
    assert error_bars._copies(twice) == 2.0
    plain, doubled = bars_of(posed, fit), bars_of(twice, again)
    np.testing.assert_allclose(doubled.attention, plain.attention, rtol=0.5)
