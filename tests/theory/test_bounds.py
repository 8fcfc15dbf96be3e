import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer import inputs
from onelayer.theory import bounds, norms, targets

BETA = np.array([0.6, 0.0, -0.8, 0.0])


def arc_cosine(rho):
    """E relu(u) relu(v) for standard normal u, v of correlation ρ."""
    rho = min(1.0, max(-1.0, rho))
    return (math.sqrt(1 - rho**2) + rho * (math.pi - math.acos(rho))) / (2 * math.pi)


def attention_kernel(x, z):
    """The kernel of RFA with infinitely many heads, key by key."""
    total = 0.0
    for key in x[1:]:
        for other in z[1:]:
            match = 1 + key @ other
            total += arc_cosine((1 + x[0] @ z[0]) * match / 4) * match
    return total / ((len(x) - 1) * (len(z) - 1))


def network_kernel(x, z):
    """The kernel of RFMLP with infinitely many features."""
    return arc_cosine((np.sum(x * z) + 1) / (len(x) + 1))


def least_norm(kernel, X, y):
    """The least squared norm in the kernel's space of a function with these values, nearly."""
    gram = np.array([[kernel(x, z) for z in X] for x in X])
    return y @ np.linalg.solve(gram + 1e-9 * np.eye(len(X)), y)


@pytest.mark.parametrize(
    "f",
    [
        targets.average_power(1, 4, BETA),
        targets.average_power(2, 4, BETA),
        targets.query_only(2, 4, BETA),
        targets.correlation_weighted(1, 4, BETA),
        targets.polynomial({(0, 0): 1.0, (0, 4): np.ones((4,) * 4) / 16}),
    ],
    ids=lambda f: f.name,
)
def test_norms_bound_those_in_the_space_of_the_kernel(f):
    X = inputs.sphere(60, 3, 4, seed=5)
    least = least_norm(attention_kernel, X, f(X))
    assert 0.01 < least <= 4.5 * bounds.target_norm(f)
    least = least_norm(network_kernel, X, f(X))
    assert 0.01 < least <= 6 * bounds.target_norm(f, "rfmlp", keys=2)


@pytest.mark.parametrize("r", range(6))
@pytest.mark.parametrize("s", range(6))
def test_constants_bound_the_coefficients_of_the_kernel(r, s):
    """K = Σ_rs c_rs <x_0, z_0>^r <x_i, z_i>^s has norms |f_rs|² / c_rs, at most 4.5 C_k |f_rs|²."""
    powers = arc_cosine_series(60)
    coefficient = sum(
        power * 4.0**-k * math.comb(k, r) * math.comb(k + 1, s) for k, power in enumerate(powers)
    )
    assert 1 / coefficient <= 4.5 * norms.norm_constant(max(r, s))


def arc_cosine_series(length):
    """The Taylor coefficients of the kernel, by an integral over a circle of radius 1/2."""
    points = np.exp(2j * np.pi * np.arange(512) / 512) / 2
    values = (np.sqrt(1 - points**2) + points * (np.pi - np.arccos(points))) / (2 * np.pi)
    return np.fft.fft(values).real[:length] / 512 * 2.0 ** np.arange(length)


def test_the_norm_of_coefficients_is_that_of_their_polynomial():
    tensors = {(0, 2): np.diag(BETA), (1, 0): BETA}
    expected = 2**4.5 * 16 * np.sum(BETA**2) + 4 * np.sum(BETA**2)
    assert bounds.target_norm(tensors) == pytest.approx(expected)
    assert bounds.target_norm(targets.polynomial(tensors)) == pytest.approx(expected)
    assert bounds.sample_size("rfa", tensors) == bounds.sample_size(
        "rfa", targets.polynomial(tensors)
    )


@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 40))
def test_rfmlp_pays_for_the_keys_and_rfa_does_not(degree, dim, keys):
    ratio = bounds.sample_size_ratio(degree, keys)
    assert ratio == pytest.approx(((keys + 2) / 4) ** degree)
    by_degree = [bounds.sample_size(model, degree, dim, keys) for model in ("rfa", "rfmlp")]
    assert by_degree[1] / by_degree[0] == pytest.approx(ratio)
    for make in (targets.average_power, targets.query_only):
        f = make(degree, dim + 1)
        sizes = [bounds.sample_size(model, f, keys=keys) for model in ("rfa", "rfmlp")]
        assert sizes[1] / sizes[0] == pytest.approx(ratio)
        assert sizes[0] == bounds.sample_size("rfa", f, keys=1) == bounds.sample_size("rfa", f)


@pytest.mark.parametrize("q", [1, 2, 3])
def test_brfa_does_not_pay_for_the_dimension_of_correlations(q):
    def size(model, dim):
        return bounds.target_norm(targets.correlation_weighted(q, dim), model)

    assert size("brfa", 8) == size("brfa", 800)
    growth = size("rfa", 2000) / size("rfa", 1000)
    assert growth == pytest.approx(2.0**q, rel=0.01)
    assert size("rfa", 16) > size("brfa", 16)


def test_relative_sizes_do_not_depend_on_the_scale_of_the_target():
    for model in bounds.MODELS:
        one, ten = (
            bounds.sample_size(model, targets.correlation_weighted(2, 4, scale * BETA), keys=3)
            for scale in (1, 10)
        )
        assert one == pytest.approx(ten)


def test_sample_sizes_worked_out_by_hand():
    f = targets.average_power(1, dim=16)  # variance 1/16 for one key, 1/64 for four
    assert bounds.sample_size("rfa", f, dim=16, keys=4, error=0.5) == pytest.approx(4 * 16 * 4)
    assert bounds.sample_size("rfmlp", f, keys=4, error=0.5) == pytest.approx(6 / 4 * 64 * 4)
    assert bounds.sample_size("rfa", 3, dim=2, error=1) == 512
    assert bounds.sample_size("rfmlp", 3, dim=2, keys=1, error=1) == 216
    g = targets.correlation_weighted(1, dim=15)  # variance 1/225 for one key
    assert bounds.sample_size("brfa", g, error=1) == pytest.approx(2**4.5 * 16 * 225)
    assert bounds.sample_size("rfa", g, error=1) == pytest.approx(2**4.5 * 16 * 225 * 8)


@given(st.sampled_from(["rfa", "rfmlp"]), st.integers(1, 3), st.floats(0.01, 1.0))
def test_excess_risk_at_the_sample_size_is_the_error(model, degree, error):
    f = targets.average_power(degree, dim=8)
    for target in (degree, f):
        size = math.ceil(bounds.sample_size(model, target, dim=8, keys=5, error=error))
        risk = bounds.excess_risk(model, target, size, dim=8, keys=5)
        assert risk == pytest.approx(error, rel=0.02)
        quartered = bounds.excess_risk(model, target, 4 * size, dim=8, keys=5)
        assert quartered == pytest.approx(risk / 2)


@pytest.mark.parametrize(
    ("model", "target"),
    [
        ("rfa", targets.one_position(1, 1, 4)),
        ("rfa", targets.ordered_sum(4)),
        ("rfa", targets.three_token(4)),
        ("brfa", targets.average_power(1, 4)),
        ("brfa", targets.rotated_correlation(1, 4)),
        ("rfmlp", targets.three_token(4)),
    ],
)
def test_nothing_is_promised_without_a_bound(model, target):
    assert bounds.sample_size(model, target, keys=3) == math.inf
    assert bounds.excess_risk(model, target, 100, keys=3) == math.inf


def test_rfmlp_sees_positions():
    average, position = targets.average_power(2, 4), targets.one_position(2, 2, 4)
    sizes = [bounds.sample_size("rfmlp", f, keys=6) for f in (average, position)]
    assert sizes[0] == pytest.approx(sizes[1])
    assert math.isfinite(bounds.sample_size("rfmlp", targets.ordered_sum(4), keys=6))


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda: bounds.sample_size("mlp", 1, 4),
            "model is 'mlp', expected one of 'rfa', 'brfa', 'rfmlp'",
        ),
        (
            lambda: bounds.target_norm(targets.three_token(3), "RFA"),
            "model is 'RFA', expected one of 'rfa', 'brfa', 'rfmlp'",
        ),
        (lambda: bounds.sample_size("rfa", 1), "dim is None, expected a whole number"),
        (lambda: bounds.sample_size("rfmlp", 1, 4), "keys is None, expected a whole number"),
        (
            lambda: bounds.target_norm(targets.average_power(1, 3), "rfmlp"),
            "keys is None, expected a whole number of at least 1: the norm of 'rfmlp' grows",
        ),
        (
            lambda: bounds.sample_size("rfa", targets.average_power(1, 3), dim=4),
            r"dim is 4, expected 3 for f_\{1,1\}, or None",
        ),
        (
            lambda: bounds.sample_size("brfa", 2, 4),
            "model is 'brfa' and target a degree, expected a target",
        ),
        (
            lambda: bounds.sample_size("rfa", {(0, 0): 1.0, (0, 1): np.zeros(3)}),
            "polynomial has variance 0, expected a target that varies",
        ),
        (
            lambda: bounds.sample_size("rfmlp", targets.one_position(4, 1, 3), keys=3),
            "keys is 3, expected at least 4 for",
        ),
        (lambda: bounds.sample_size("rfa", 0, 4), "the degree of the target is 0, expected"),
        (lambda: bounds.sample_size("rfa", 1, 4, error=0), "error is 0, expected a finite number"),
        (lambda: bounds.excess_risk("rfa", 1, 0, 4), "examples is 0, expected a whole number"),
        (lambda: bounds.sample_size_ratio(1, 0), "keys is 0, expected a whole number"),
        (lambda: bounds.sample_size_ratio(-1, 2), "degree is -1, expected a whole number"),
    ],
)
def test_wrong_values(ask, message):
    with pytest.raises(ValueError, match=message):
        ask()


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: bounds.sample_size("rfa", "f", 4), "the degree of the target is 'f', expected a"),
        (lambda: bounds.target_norm(3), "coefficients is a int, expected a mapping"),
        (lambda: bounds.excess_risk("rfa", 1, 1.5, 4), "examples is 1.5, expected a whole"),
    ],
)
def test_wrong_types(ask, message):
    with pytest.raises(TypeError, match=message):
        ask()
