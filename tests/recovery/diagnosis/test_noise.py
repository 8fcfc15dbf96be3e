from dataclasses import replace

import numpy as np
import pytest
from cases import random_mask, solved_case

from onelayer import AttentionLayer, inputs
from onelayer.array.backend import like
from onelayer.heads import dense
from onelayer.recovery.diagnosis import noise
from onelayer.recovery.gauss_newton import varpro

SEEDS = range(8)


def seen(case, xp_array=np.asarray, held_out=100):
    """A fit to most examples of a case at its own attention matrices, and the blocks of both."""
    posed = case.problem(xp_array)
    training = posed.take(np.arange(held_out, posed.examples))
    other = posed.take(np.arange(held_out))
    theta = like(dense.pack(case.attention, case.key_bias), posed.X)
    fit = varpro.fit(training.batches(case.heads), theta)
    return fit, training.blocks(case.heads), other.blocks(case.heads)


def is_noise(case, seed=0, **options):
    return noise.is_noise(*seen(case, **options), np.random.default_rng(seed))


def evidence(case, seed=0, **options):
    return noise.evidence(*seen(case, **options), np.random.default_rng(seed))[0]


def noisy(case, seed, size=0.1):
    rng = np.random.default_rng(1000 + seed)
    scale = size * np.sqrt(np.mean(case.Y**2))
    return replace(case, Y=case.Y + scale * rng.standard_normal(case.Y.shape))


def right(seed, n=500, tokens=4, dim=4, heads=2, size=0.1, bias=False, masked=False, causal=False):
    """A layer's outputs with noise on them, seen with the true attention matrices."""
    rng = np.random.default_rng(seed)
    layer = AttentionLayer.random(heads=heads, dim=dim, seed=seed, bias=bias)
    mask = random_mask(rng, n, tokens) if masked else None
    X = inputs.gaussian(n, tokens, dim, seed=rng)
    return noisy(solved_case(layer, X, mask, causal), seed, size)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"bias": True, "masked": True}, {"causal": True, "size": 1e-6}, {"tokens": 1}],
)
def test_noise_passes(options):
    verdicts = [is_noise(right(seed, **options), seed) for seed in SEEDS]
    assert sum(verdicts) >= len(SEEDS) - 1  # a false alarm is to be rare


@pytest.mark.slow
def test_noise_in_long_examples_of_many_dimensions_passes():
    case = right(0, n=60, tokens=40, dim=36)  # places are grouped, coordinates mixed
    assert is_noise(case, held_out=20)


def wrong_cases(seed):
    """Models that are not the one that is fitted, by name, and what was fitted to them."""
    case = right(seed, size=0.0)
    layer = AttentionLayer.random(heads=2, dim=4, seed=seed)
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 5, len(case.X))
    present = np.arange(4) < lengths[:, None]
    biased = AttentionLayer(
        layer.attention, layer.projection, key_bias=np.ones((2, 4)), output_bias=np.zeros(4)
    )
    centred = case.Y - case.Y.mean(axis=2, keepdims=True)
    return {
        "causal": layer(case.X, causal=True),
        "padding": layer(case.X, mask=present),
        "padding, rows of zeros": layer(case.X, mask=present) * present[:, :, None],
        "output bias": case.Y + 0.3,
        "key bias": biased(case.X),
        "layer norm": centred / centred.std(axis=2, keepdims=True),
        "relu": np.maximum(case.Y, 0.1 * case.Y),
        "another head": case.Y + AttentionLayer.random(heads=1, dim=4, seed=seed + 99)(case.X),
        "place": case.Y + 0.3 * np.arange(4)[:, None] * case.X,
        "no attention": np.tanh(case.X @ rng.standard_normal((4, 4)) * 2),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", wrong_cases(0))
def test_wrong_models_do_not_pass(name):
    for seed in range(3):
        case = right(seed, size=0.0)
        wrong = noisy(replace(case, Y=wrong_cases(seed)[name]), seed, 0.1)
        largest = max(evidence(wrong, seed).values())
        assert largest > noise.threshold(100)  # whatever the size of the error
        assert not is_noise(wrong, seed)


@pytest.mark.parametrize("options", [{}, {"bias": True, "masked": True}])
def test_residuals_of_a_missing_head_do_not_pass(options):
    for seed in SEEDS:
        case = right(seed, **options)
        bias = None if case.key_bias is None else case.key_bias[:1]
        assert not is_noise(replace(case, attention=case.attention[:1], key_bias=bias), seed)


def test_residuals_of_wrong_attention_do_not_pass(xp_array):
    case = right(0, size=1e-3)
    assert not is_noise(replace(case, attention=1.5 * case.attention), xp_array=xp_array)


@pytest.mark.slow
def test_evidence_is_the_same_on_every_backend(xp_array):
    case = right(1)
    expected, found = evidence(case, 3), evidence(case, 3, xp_array=xp_array)
    assert found.keys() == expected.keys()
    for kind, t in expected.items():
        assert found[kind] == pytest.approx(t, rel=1e-4, abs=1e-6)


def test_an_exact_fit_leaves_noise():
    assert is_noise(right(0, size=0.0))


def test_with_few_held_out_examples_only_tiny_residuals_pass():
    assert not is_noise(right(0, size=0.01), held_out=7)
    assert is_noise(right(0, size=1e-4), held_out=7)
    assert is_noise(right(0, size=1e-4), held_out=0)


def repeated(case, times=3):
    """Every example several times, each with noise of its own on its outputs."""
    return replace(case, X=np.repeat(case.X, times, axis=0), Y=np.repeat(case.Y, times, axis=0))


def test_large_residuals_pass_only_if_repeated_inputs_scatter_as_much():
    large = right(0, size=0.6)
    assert not is_noise(large)
    assert is_noise(noisy(repeated(right(0, n=200, size=0.0)), 1, size=0.6))


def test_repeated_inputs_that_scatter_less_than_the_residuals_speak_against_noise():
    # Residuals that no features can predict, yet are the same whenever the input is.
    case = noisy(repeated(right(0, n=200, size=0.3)), 1, size=0.01)
    assert not is_noise(case)


def test_scatter_is_the_variance_of_outputs_with_the_same_inputs():
    case = noisy(repeated(right(0, n=100, size=0.0)), 1, size=0.2)
    _, training, held_out = seen(case)
    pairs, variance = noise.scatter([*training, *held_out])
    assert pairs == 200
    assert variance == pytest.approx(0.2**2 / (1 + 0.2**2), rel=0.15)


def test_copies_do_not_scatter_and_are_no_evidence():
    noisy_case = right(0, n=250, size=0.2)
    copied = replace(
        noisy_case, X=np.concatenate([noisy_case.X] * 2), Y=np.concatenate([noisy_case.Y] * 2)
    )
    _, training, held_out = seen(copied)
    assert noise.scatter([*training, *held_out])[0] == 0
    assert is_noise(copied, held_out=260)  # ten of them are no copies


def test_padding_counts_neither_as_repeated_nor_as_scatter():
    case = right(0, masked=True, size=0.0)
    filled = np.where(case.mask[:, :, None], case.X, 7.0)
    twice = replace(
        case,
        X=np.concatenate([case.X, filled]),
        Y=np.concatenate([case.Y] * 2),
        mask=np.concatenate([case.mask] * 2),
    )
    _, training, _ = seen(twice, held_out=0)
    assert noise.scatter(training) == (0, 0.0)
