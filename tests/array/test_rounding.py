import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.array.rounding import rounding

FLOATS = ["float16", "float32", "float64"]


def draw(seed, size=400, scale=1.0):
    return scale * np.random.default_rng(seed).standard_normal(size)


def bfloat16(values):
    """Values rounded to eight bits, half to even, as torch does."""
    bits = np.asarray(values, dtype=np.float32).view(np.uint32)
    bits = bits + 0x7FFF + (bits >> 16 & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


def rms(error):
    return np.sqrt(np.mean(error**2))


seeds = st.integers(0, 2**32 - 1)


@given(seeds, st.sampled_from([1e-3, 1.0, 1e3]), st.sampled_from(["bfloat16", *FLOATS[:2]]))
def test_float_formats_are_told_from_values(seed, scale, name):
    exact = draw(seed, scale=scale)
    rounded = bfloat16(exact) if name == "bfloat16" else exact.astype(name).astype(np.float64)
    found = rounding(rounded)
    assert found.name == name
    assert found.error == pytest.approx(rms(rounded - exact), rel=0.25)


@given(seeds, st.integers(1, 8), st.sampled_from([0.3, 1.0, 20.0]))
def test_decimals_are_told_from_values(seed, places, scale):
    exact = draw(seed, scale=scale)
    found = rounding(np.round(exact, places))
    assert found.name == f"{places} decimals"
    assert found.error == pytest.approx(rms(np.round(exact, places) - exact), rel=0.25)


@given(seeds, st.integers(2, 4))
def test_decimals_are_told_in_float32_too(seed, places):
    rounded = np.round(draw(seed), places).astype(np.float32)
    assert rounding(rounded).name == f"{places} decimals"


@given(seeds, st.integers(2, 7), st.sampled_from([1e-30, 1.0, 1e30]))
def test_significant_digits_are_told_from_values(seed, digits, scale):
    exact = draw(seed, scale=scale)
    rounded = np.array([float(f"{x:.{digits - 1}e}") for x in exact])
    found = rounding(rounded)
    assert found.name == f"{digits} significant digits"
    assert found.error == pytest.approx(rms(rounded - exact), rel=0.25)


@given(seeds, st.integers(-300, 300), st.integers(1, 500))
def test_generic_float64_is_nothing_else(seed, exponent, size):
    found = rounding(draw(seed, size, 10.0**exponent))
    assert found.name == "float64"
    assert 0 < found.error < 1e-15 * 10.0**exponent


@given(seeds, st.sampled_from([1e-30, 1e-5, 1.0, 1e30]))
def test_generic_float32_of_any_scale_is_float32(seed, scale):
    found = rounding((draw(seed) * scale).astype(np.float32))
    assert found.name == "float32"
    assert found.error < 1e-7 * scale


def test_integers_are_rounded_if_there_are_many_different_ones():
    assert rounding(np.round(draw(0, scale=100.0))).name == "0 decimals"
    assert rounding(np.round(draw(0))).name == "float64"


@pytest.mark.parametrize(
    "exact",
    [
        np.sign(draw(0)),
        np.eye(10),
        np.arange(8.0),
        np.round(4 * draw(0)) / 4,
        np.round(16 * draw(0)) / 16,
        np.round(256 * draw(0)) / 256,
        np.full(9, 0.1),
        np.zeros(5),
        np.array([]),
        np.array([5e-324, 0.0, 1.7e308]),
    ],
)
def test_exact_numbers_are_not_taken_for_rounded(exact):
    found = rounding(exact)
    assert found.name == "float64"
    assert found.error <= 1e-16 * max(1.0, np.abs(exact).max(initial=0.0))


def test_zeros_do_not_hide_a_format():
    rounded = np.round(draw(0), 3)
    rounded[: rounded.size * 3 // 4] = 0
    assert rounding(rounded).name == "3 decimals"
    assert rounding(np.float16(rounded[:-1]).repeat(2)).name != "float64"


def test_outputs_of_a_layer_are_told_on_every_backend(xp_array):
    layer = AttentionLayer.random(heads=2, dim=4, seed=0)
    Y = layer(inputs.boolean(100, 3, 4, seed=1))
    assert rounding(xp_array(Y)).name == "float64"
    assert rounding(xp_array(np.round(Y, 3))) == rounding(np.round(Y, 3))
    assert rounding(xp_array(Y.astype(np.float32))).name == "float32"


def test_half_precision_tensors():
    torch = pytest.importorskip("torch")
    Y = torch.as_tensor(draw(0).reshape(50, 2, 4))
    assert rounding(Y.to(torch.bfloat16)).name == "bfloat16"
    assert rounding(Y.to(torch.float16).requires_grad_()).name == "float16"
    assert rounding(torch.ones(3, dtype=torch.int32)).name == "float64"


def test_large_arrays_are_sampled_over_their_whole_length():
    exact = draw(0, size=250_000)
    assert rounding(np.round(exact, 4)).name == "4 decimals"
    half = np.concatenate([np.round(exact, 4), exact])
    assert rounding(half).name == "float64"


@pytest.mark.parametrize(
    ("dtype", "size"), [(np.float16, 1e-3), (np.float64, 1e-3), (np.float64, 1e-9)]
)
def test_zeros_are_exact(dtype, size):
    values = (np.random.default_rng(0).standard_normal(1000) * size).astype(dtype)
    sparse = np.concatenate([values, np.zeros_like(values)])
    assert rounding(sparse).error / rounding(values).error == pytest.approx(2**-0.5, rel=0.01)
