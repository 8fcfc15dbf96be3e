import numpy as np
import pytest

from onelayer import AttentionLayer, inputs
from onelayer.recovery.diagnosis import dependence
from onelayer.recovery.diagnosis import suspicions as module
from onelayer.recovery.diagnosis.suspicions import DataCheck, Suspicion, suspicions

SERIOUS = {"axes", "causal", "not causal", "padding", "window", "positions", "unrelated"}
TRIALS = range(4)


def tokens(kind, n, count, dim, rng):
    X = rng.standard_normal((n, count, dim))
    match kind:
        case "boolean":
            return np.sign(X)
        case "sphere":
            return X / np.linalg.norm(X, axis=2, keepdims=True) * np.sqrt(dim)
        case "layer norm":
            X = X - X.mean(axis=2, keepdims=True)
            return X / X.std(axis=2, keepdims=True) * 1.5 + 0.3 * rng.standard_normal(dim)
        case "correlated":
            shared = 0.7 * rng.standard_normal((n, 1, dim))
            return (X + shared) @ rng.standard_normal((dim, dim)) / np.sqrt(dim)
        case "far from zero":
            return X + 10
    return X


KINDS = ["boolean", "gaussian", "sphere", "layer norm", "correlated", "far from zero"]


def kinds(X, Y, mask=None, bias=False, causal=False, **options):
    return {one.kind for one in suspicions(X, Y, mask, bias=bias, causal=causal, **options)}


def drawn(seed, noise=0.1, **options):
    """Tokens, a layer of two heads for them, and noise to put on its outputs."""
    rng = np.random.default_rng(seed)
    n, count = int(rng.integers(300, 1000)), int(rng.integers(4, 9))
    X = tokens(KINDS[seed % 2], n, count, 16, rng)
    layer = AttentionLayer.random(heads=2, dim=16, seed=seed, **options)
    return X, layer, noise * rng.standard_normal(X.shape), rng


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_right_layers_raise_no_suspicion(kind):
    for seed in range(18):
        rng = np.random.default_rng(seed)
        n, count = int(rng.integers(300, 1000)), int(rng.integers(2, 9))
        dim, scale = int(rng.choice([8, 16])), float(rng.uniform(0.5, 5))
        bias = seed % 2 == 0
        layer = AttentionLayer.random(1 + seed % 4, dim, scale, seed=seed, bias=bias)
        X = tokens(kind, n, count, dim, rng)
        assert not kinds(X, layer(X), bias=bias, seed=seed)


@pytest.mark.parametrize("options", [{"causal": True}, {"masked": True}])
def test_right_arguments_raise_no_suspicion(options):
    for seed in TRIALS:
        X, layer, noise, rng = drawn(seed)
        mask = None
        if options.get("masked"):
            mask = np.arange(X.shape[1]) < rng.integers(1, X.shape[1] + 1, (len(X), 1))
        causal = options.get("causal", False)
        assert not kinds(X, layer(X, mask=mask, causal=causal) + noise, mask, causal=causal)


@pytest.mark.slow
def test_long_sequences_of_many_dimensions_are_judged_too():
    rng = np.random.default_rng(0)
    layer = AttentionLayer.random(heads=2, dim=64, seed=0)
    X = rng.standard_normal((400, 40, 64))
    assert not kinds(X, layer(X))
    assert kinds(X, layer(X, causal=True)) == {"causal"}


def test_a_forgotten_causal_is_named():
    for seed in TRIALS:
        X, layer, noise, _ = drawn(seed)
        (found,) = suspicions(X, layer(X, causal=True) + noise, bias=False, causal=False)
        assert found.kind == "causal"
        assert "causal=True" in found.message


def test_a_wrong_causal_is_named():
    for seed in TRIALS:
        X, layer, noise, _ = drawn(seed)
        assert kinds(X, layer(X) + noise, causal=True) == {"not causal"}


@pytest.mark.slow
@pytest.mark.parametrize("content", ["like tokens", "zeros", "one vector"])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("silent", [False, True])
def test_a_forgotten_mask_is_named(content, left, silent):
    for seed in TRIALS:
        X, layer, noise, rng = drawn(seed)
        mask = np.arange(X.shape[1]) < rng.integers(1, X.shape[1] + 1, (len(X), 1))
        mask = mask[:, ::-1] if left else mask
        if content != "like tokens":
            X = np.where(mask[:, :, None], X, 0.0 if content == "zeros" else 0.37)
        Y = layer(X, mask=mask) + noise
        if silent:
            Y = Y * mask[:, :, None]
        found = suspicions(X, Y, bias=False, causal=False)
        assert [one.kind for one in found] == ["padding"]
        assert "mask=" in found[0].message


def test_the_same_last_token_everywhere_is_no_padding():
    X, layer, _, _ = drawn(1)
    X[:, -1] = 1.0
    assert not kinds(X, layer(X)) & SERIOUS


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2)])
def test_exchanged_axes_are_named(order):
    for seed in TRIALS:
        X, layer, noise, _ = drawn(seed)
        Y = layer(X) + noise
        found = suspicions(X.transpose(order), Y.transpose(order), bias=False, causal=False)
        (axes,) = [one for one in found if one.kind in SERIOUS]
        assert axes.kind == "axes"
        assert f"X.transpose{order}" in axes.message


def test_a_window_is_named():
    for seed in TRIALS:
        X, layer, _, _ = drawn(seed)
        near = np.stack([X[:, max(0, a - 1) : a + 2] for a in range(1, X.shape[1] - 1)], axis=1)
        flat = near.reshape(-1, 3, 16)
        rows = layer(flat)[:, 1].reshape(len(X), -1, 16)
        Y = np.concatenate([layer(X[:, :2])[:, :1], rows, layer(X[:, -2:])[:, 1:]], axis=1)
        assert kinds(X, Y) == {"window"}


@pytest.mark.slow
def test_a_forgotten_bias_is_named():
    for seed in TRIALS:
        X, layer, noise, _ = drawn(seed, bias=True)
        Y = layer(X) + noise
        assert kinds(X, Y) == {"bias"}
        assert not kinds(X, Y, bias=True)


def test_tokens_that_are_not_symmetric_are_not_taken_for_a_bias():
    rng = np.random.default_rng(0)
    X = rng.exponential(size=(500, 4, 8)) - 1
    assert not kinds(X, AttentionLayer.random(heads=2, dim=8, seed=0)(X))


def test_shuffled_outputs_are_unrelated():
    for seed in TRIALS:
        X, layer, _, rng = drawn(seed)
        assert kinds(X, rng.permutation(layer(X))) == {"unrelated"}


def test_constant_outputs_are_named():
    X, *_ = drawn(0)
    assert kinds(X, np.full_like(X, 0.3)) == {"constant"}
    assert kinds(X, np.zeros_like(X)) == {"constant"}


def test_repetitions_are_counted():
    X, layer, _, _ = drawn(0)
    twice = np.concatenate([X, X])
    (found,) = suspicions(twice, layer(twice), bias=False, causal=False)
    assert found.kind == "repeated examples"
    assert "50%" in found.message
    same = np.repeat(X[:, :1], 4, axis=1)
    assert "repeated tokens" in kinds(same, layer(same))
    few = X[0, np.random.default_rng(0).integers(0, 4, (500, 5))]
    assert "vocabulary" in kinds(few, layer(few))


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_scales_do_not_matter(scale):
    X, layer, *_ = drawn(0)
    Y = layer(X, causal=True)
    assert kinds(X * scale, Y / scale) == {"causal"}
    assert kinds(X * scale, Y * scale) == {"causal"}


@pytest.mark.parametrize(("n", "count"), [(1, 1), (1, 3), (5, 2), (80, 1)])
def test_few_examples_raise_no_error(n, count):
    layer = AttentionLayer.random(heads=1, dim=3, seed=0)
    X = inputs.gaussian(n, count, 3, seed=1)
    assert not kinds(X, layer(X)) & SERIOUS


def test_single_precision_and_masked_nan_padding_are_taken():
    X, layer, _, rng = drawn(0)
    mask = np.arange(X.shape[1]) < rng.integers(1, X.shape[1] + 1, (len(X), 1))
    Y = layer(X, mask=mask)
    X, Y = (np.where(mask[:, :, None], values, np.nan).astype(np.float32) for values in (X, Y))
    assert not kinds(X, Y, mask)


def test_energies_are_the_squared_coefficients_of_a_linear_map():
    rng = np.random.default_rng(0)
    z = rng.standard_normal((20_000, 3, 4))
    blocks = rng.standard_normal((3, 3, 4, 2))  # rows a, keys b
    y = np.einsum("jbr,abre->jae", z, blocks)
    found = dependence.energies(z, y, rng)
    expected = np.sum(blocks**2, axis=(2, 3)) / np.mean(np.sum(blocks**2, axis=(1, 2, 3)))
    for a, b in np.ndindex(3, 3):
        pair = np.zeros((3, 3))
        pair[a, b] = 1
        energy, error = found.mean(pair)
        assert energy == pytest.approx(expected[a, b], abs=5 * error + 1e-3)


def test_a_check_is_one_more_entry_of_the_list(monkeypatch):
    def look(examples):
        if examples.X.shape[2] == 8:
            yield "8 dimensions"

    X = inputs.gaussian(100, 3, 8)
    Y = AttentionLayer.random(heads=1, dim=8)(X)
    for check in (
        DataCheck("wide", look),
        DataCheck("wide", look, fewest=101),
        DataCheck("", look, ("wide",)),
    ):
        monkeypatch.setattr(module, "CHECKS", (*module.CHECKS, check))
    found = suspicions(X, Y, bias=False, causal=False)
    assert found == [Suspicion("wide", "8 dimensions")]
