"""Kernels of infinitely many heads: against naive loops, exact numbers and finite heads."""

import math

import kernel_kinds
import numpy as np
import oracles
import pytest
from example_sets import all_features
from hypothesis import given
from hypothesis import strategies as st
from scipy import special

from onelayer import inputs
from onelayer.array import backend, blocks
from onelayer.data.sets import as_sets
from onelayer.features import activations, attention_features, mlp_features
from onelayer.features.activations import Activation
from onelayer.features.activations.relu import RELU
from onelayer.features.kernels import attention, base
from onelayer.features.kernels.attention import AttentionKernel
from onelayer.features.kernels.mlp import MLPKernel
from onelayer.features.positions import PositionalEncoding


@pytest.fixture(params=kernel_kinds.KINDS[1:])
def tensor(request):
    """A function that turns a numpy array into a tensor, on a CPU or a GPU."""
    return kernel_kinds.converter(request.param)


def examples(n, keys, dim=3, seed=0):
    """Tokens (n, keys + 1, dim + 1) with their constant 1, in no way normalised."""
    X = np.random.default_rng(seed).standard_normal((n, keys + 1, dim + 1))
    X[:, :, -1] = 1.0
    return X


def attention_block(X, mask, Z, other_mask, bias):
    """The kernel between examples that have their constant 1 already."""
    kernel = AttentionKernel(bias, "first", RELU)
    sides = [kernel.prepare(x[:, :, :-1], there) for x, there in ((X, mask), (Z, other_mask))]
    return kernel.block(*sides)


def mlp_block(X, Z, std):
    """The kernel of neurons with weights of a standard deviation, between rows."""
    return MLPKernel(std**-2 - 1, RELU).block(X, Z)


def identity_bias(dim=3):
    return np.diag([1.0] * dim + [0.0])


def random_bias(dim=3, seed=7):
    return np.random.default_rng(seed).standard_normal((dim + 1, dim + 1))


# Attention


@pytest.mark.slow
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
    found = attention_block(X, mask, Z, other_mask, bias)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12 * np.abs(expected).max())


def random_mask(rng, n, keys):
    """Any keys but at least the first, and the query."""
    mask = rng.random((n, keys + 1)) < 0.5
    mask[:, :2] = True
    return mask


def test_attention_kernel_with_a_bias_of_zeros_is_that_without():
    X, Z = examples(20, 4), examples(30, 5, seed=1)
    without = attention_block(X, None, Z, None, None)
    zeros = attention_block(X, None, Z, None, np.zeros((4, 4)))
    np.testing.assert_allclose(zeros, without, rtol=0, atol=1e-13 * np.abs(without).max())


@pytest.mark.parametrize("bias", [None, random_bias()], ids=["unbiased", "biased"])
def test_attention_kernel_does_not_depend_on_the_blocks(bias, monkeypatch):
    X, Z = examples(7, 5), examples(9, 3, seed=1)
    mask = random_mask(np.random.default_rng(0), 7, 5)
    whole = attention_block(X, mask, Z, None, bias)
    for pairs, width in [(1, 1), (7, 2), (40, 4), (100, 100)]:
        monkeypatch.setattr(base, "block_pairs", lambda *_, pairs=pairs: pairs)
        monkeypatch.setattr(attention, "_WIDTH", width * (blocks.BLOCK_BYTES // 64) // pairs)
        parts = attention_block(X, mask, Z, None, bias)
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-14 * np.abs(whole).max())


@pytest.mark.parametrize("bias", [None, random_bias()], ids=["unbiased", "biased"])
def test_masked_keys_do_not_count(bias):
    X, Z = examples(4, 6), examples(5, 3, seed=1)
    mask = np.ones((4, 7), dtype=bool)
    mask[:, 4:] = False
    expected = attention_block(X[:, :4], None, Z, None, bias)
    for padding in (0.0, 1.0, 1e6):
        X[:, 4:, :-1] = padding
        found = attention_block(X, mask, Z, None, bias)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14 * np.abs(expected).max())
        turned = attention_block(Z, None, X, mask, bias)
        np.testing.assert_allclose(turned, expected.T, rtol=0, atol=1e-14 * np.abs(expected).max())


@pytest.mark.parametrize("bias", [None, identity_bias()], ids=["unbiased", "biased"])
def test_an_example_without_keys_has_kernel_zero(bias):
    X = examples(3, 2)
    mask = np.array([[True, True, True], [True, False, False], [True, True, False]])
    kernel = attention_block(X, mask, X, mask, bias)
    assert not kernel[1].any()
    assert not kernel[:, 1].any()
    assert kernel[0, 0] > 0
    assert not attention_block(X[:, :1], None, X, mask, bias).any()


@pytest.mark.parametrize("bias", [None, random_bias()], ids=["unbiased", "biased"])
def test_attention_kernel_does_not_see_the_order_of_the_keys(bias):
    X, Z = examples(6, 8), examples(5, 4, seed=1)
    mask = random_mask(np.random.default_rng(0), 6, 8)
    kernel = attention_block(X, mask, Z, None, bias)
    order = np.array([0, *(1 + np.random.default_rng(2).permutation(8))])
    shuffled = attention_block(X[:, order], mask[:, order], Z, None, bias)
    np.testing.assert_allclose(shuffled, kernel, rtol=0, atol=1e-12 * np.abs(kernel).max())
    queries_moved = attention_block(X[:, ::-1], mask[:, ::-1], Z, None, bias)
    assert np.abs(queries_moved - kernel).max() > 1e-3 * np.abs(kernel).max()


@pytest.mark.parametrize("bias", [None, identity_bias(), random_bias()])
def test_attention_kernel_is_positive_semidefinite(bias):
    X = examples(40, 3)
    X[20:30] = X[:10]
    X[30:] = X[:10] + 1e-9 * X[10:20]  # correlations at and near 1
    kernel = attention_block(X, None, X, None, bias)
    values = np.linalg.eigvalsh(kernel)
    assert values[0] > -1e-13 * values[-1]
    assert values[20] > 1e-6 * values[-1]  # and of the rank of the different examples


def test_attention_kernel_of_no_examples_is_empty():
    X = examples(3, 2)
    assert attention_block(X[:0], None, X, None, None).shape == (0, 3)
    assert attention_block(X, None, X[:0], None, random_bias()).shape == (3, 0)


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
    kernel = attention_block(X, None, X, None, bias)
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
    found = mlp_block(X, Z, 0.3)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13 * max(1, expected.max()))


def test_mlp_kernel_is_the_limit_of_many_features():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((5, 4))
    features = np.maximum(X @ (0.5 * rng.standard_normal((4, 400_000))), 0)
    kernel = mlp_block(X, X, 0.5)
    np.testing.assert_allclose(features @ features.T / 400_000, kernel, atol=0.01 * kernel.max())


# Gram matrices


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_a_matrix_of_tiles_is_the_whole_matrix(size, monkeypatch):
    monkeypatch.setattr(base, "tile_size", lambda *_: size)
    X, Z = examples(5, 2), examples(4, 3, seed=1)
    kernel = AttentionKernel(None, "first", RELU)
    sets, others = as_sets(X[:, :, :-1]), as_sets(Z[:, :, :-1])
    symmetric = base.matrix(kernel, sets)
    np.testing.assert_allclose(symmetric, attention_block(X, None, X, None, None), rtol=1e-13)
    np.testing.assert_array_equal(symmetric, symmetric.T)
    found = base.matrix(kernel, sets, others)
    np.testing.assert_allclose(found, attention_block(X, None, Z, None, None), rtol=1e-13)


def test_a_symmetric_matrix_does_half_of_the_work_and_tells_of_it(monkeypatch):
    monkeypatch.setattr(base, "tile_size", lambda *_: 5)
    computed, seen = [], []
    whole = MLPKernel.block

    def block(self, rows, columns):
        computed.append((rows, columns))
        return whole(self, rows, columns)

    def track(parts, stage):
        assert parts == base.tiles(20, None, 5)
        for part in parts:
            yield part
            seen.append(stage)
            assert len(seen) == len(computed)

    monkeypatch.setattr(MLPKernel, "block", block)
    base.matrix(MLPKernel(3, RELU), as_sets(inputs.gaussian(20, 3, 2)), None, track)
    assert len(seen) == len(computed) == 10
    assert all(down.start >= across.start for down, across in base.tiles(20, None, 5))


@given(count=st.integers(0, 9), others=st.none() | st.integers(0, 9), size=st.integers(1, 10))
def test_tiles_cover_every_entry_once(count, others, size):
    covered = np.zeros((count, count if others is None else others), dtype=int)
    for rows, columns in base.tiles(count, others, size):
        covered[rows, columns] += 1
        if others is None and rows != columns:
            covered[columns, rows] += 1
    assert (covered == 1).all()


# In torch

BIASES = {"unbiased": None, "identity": identity_bias(), "random": random_bias()}
BIASES["huge means"] = 1e4 * random_bias()


def torch_cases():
    """Examples on two sides, with their masks."""
    rng = np.random.default_rng(0)
    X, Z = examples(9, 5), examples(8, 4, seed=1)
    alike, nearly, opposite, zero = examples(9, 5), examples(9, 5), examples(9, 5), examples(9, 5)
    alike[:, 1:] = alike[:1, 1:2]
    nearly[1:] = nearly[:1] + 1e-9 * nearly[1:]
    opposite[1::2, :, :-1] *= -1e6
    zero[2:, :, :-1] = 0.0
    return {
        "random": (X, None, Z, None),
        "masked": (X, random_mask(rng, 9, 5), Z, random_mask(rng, 8, 4)),
        "without keys": (X, np.arange(6) < rng.integers(1, 3, (9, 1)), Z, None),
        "alike": (alike, None, alike, None),
        "nearly alike": (nearly, None, nearly, None),
        "opposite": (opposite, None, opposite, None),
        "zero": (zero, None, zero, None),
        "itself": (X, None, X, None),
        "one": (X[:1, :2], None, Z[:1, :2], None),
        "no keys": (X[:, :1], None, Z, None),
        "none": (X[:0], None, Z, None),
    }


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("case", torch_cases())
def test_attention_kernel_in_torch_is_that_in_numpy(tensor, case, bias):
    X, mask, Z, other_mask = torch_cases()[case]
    given = [X, mask, Z, other_mask, BIASES[bias]]
    expected = attention_block(*given)
    found = attention_block(*(None if x is None else tensor(x) for x in given))
    assert backend.device(found) == backend.device(tensor(X))
    largest = np.abs(expected).max(initial=0.0)
    np.testing.assert_allclose(backend.to_numpy(found), expected, rtol=0, atol=1e-13 * largest)


@pytest.mark.parametrize("bias", [None, random_bias()], ids=["unbiased", "biased"])
def test_blocks_as_large_as_on_a_gpu_change_nothing(tensor, bias, monkeypatch):
    X, Z = examples(70, 3), examples(130, 4, seed=1)
    expected = attention_block(X, None, Z, None, bias)
    monkeypatch.setattr(blocks, "block_bytes", lambda reference: 64 * 2**20)
    summed = []
    whole = attention._sum_over_keys

    def counted(activation, rows, columns, work):
        summed.append(backend.namespace(work))
        return whole(activation, rows, columns, work)

    monkeypatch.setattr(attention, "_sum_over_keys", counted)
    bias = None if bias is None else tensor(bias)
    found = attention_block(tensor(X), None, tensor(Z), None, bias)
    assert summed == [backend.namespace(found)]
    atol = 1e-13 * np.abs(expected).max()
    np.testing.assert_allclose(backend.to_numpy(found), expected, rtol=0, atol=atol)


def test_tiles_of_cheap_entries_are_blocks(monkeypatch):
    reference = np.zeros(1)
    assert [base.tile_size(RELU, reference, pairs) for pairs in (0, 1, 100)] == [256, 256, 256]
    monkeypatch.setattr(blocks, "block_bytes", lambda reference: 512 * 2**20)
    assert [base.tile_size(RELU, reference, pairs) for pairs in (1, 4, 256)] == [2896, 1448, 256]


def test_mlp_kernel_in_torch_is_that_in_numpy(tensor):
    X = np.random.default_rng(0).standard_normal((40, 6))
    X[10:20], X[20:30] = -2 * X[:10], X[:10] * (1 + 1e-9)
    expected = mlp_block(X, X[::2], 0.3)
    found = mlp_block(tensor(X), tensor(X)[::2], 0.3)
    assert backend.device(found) == backend.device(tensor(X))
    atol = 1e-14 * expected.max()
    np.testing.assert_allclose(backend.to_numpy(found), expected, rtol=0, atol=atol)


# Other activations


def erf_moments(rows, columns, rho, work):
    """E[erf(u) erf(v)] for u and v without means."""
    left, right = rows.deviations, columns.deviations
    rho *= 2 * left * right / np.sqrt((1 + 2 * left**2) * (1 + 2 * right**2))
    rho[...] = 2 / np.pi * np.arcsin(rho)


ERF = Activation("erf", special.erf, homogeneous=False, moments=erf_moments)


def test_attention_kernel_of_an_activation_that_is_not_homogeneous():
    X = inputs.gaussian(5, 3, 2)
    heads = attention_features.draw(
        20_000, 0.0, PositionalEncoding(None, 2, 3), 1, np.random.default_rng(0), activation=ERF
    )
    features = all_features(heads, X)
    kernel = base.matrix(AttentionKernel(None, "first", ERF), as_sets(X))
    np.testing.assert_allclose(features @ features.T, kernel, rtol=0, atol=0.03 * kernel.max())


def test_mlp_kernel_of_an_activation_that_is_not_homogeneous():
    X = inputs.gaussian(5, 3, 2)
    neurons = mlp_features.draw(200_000, 3, 2, np.random.default_rng(0), activation=ERF)
    features = all_features(neurons, X)
    kernel = base.matrix(MLPKernel(3, ERF), as_sets(X))
    np.testing.assert_allclose(features @ features.T, kernel, rtol=0, atol=0.01 * kernel.max())


def test_an_activation_without_moments_has_no_kernel():
    sign = Activation("sign", np.sign, homogeneous=False)
    for kernel in (MLPKernel(3, sign), AttentionKernel(None, "first", sign)):
        with pytest.raises(ValueError, match="activation 'sign' has no kernel in closed form"):
            base.matrix(kernel, as_sets(inputs.gaussian(5, 3, 2)))


def test_activations_are_found_by_name():
    assert activations.get("relu") is RELU
    for name in ("tanh", None, ["relu"]):
        with pytest.raises(ValueError, match="expected one of 'relu'"):
            activations.get(name)
