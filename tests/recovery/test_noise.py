from dataclasses import replace

import numpy as np
import pytest
from cases import flat, random_mask, solved_case

from onelayer import AttentionLayer, inputs
from onelayer.recovery import noise

SEEDS = range(12)


def is_noise(fit, seed):
    return noise.is_noise(fit, flat(fit.cut.chunks), np.random.default_rng(seed))


def structure(fit, seed):
    return noise.structure(fit, flat(fit.cut.chunks), np.random.default_rng(seed))


def residual_case(seed, n=400, size=0.1, bias=False, masked=False):
    """A layer's outputs with noise on them, seen with the true attention matrices."""
    rng = np.random.default_rng(seed)
    layer = AttentionLayer.random(heads=2, dim=3, seed=seed, bias=bias)
    mask = random_mask(rng, n, 3) if masked else None
    case = solved_case(layer, inputs.gaussian(n, 3, 3, seed=rng), mask)
    return replace(case, Y=case.Y + size * rng.standard_normal(case.Y.shape))


@pytest.mark.parametrize("options", [{}, {"bias": True, "masked": True}])
def test_residuals_that_are_noise_pass(options):
    verdicts = [is_noise(residual_case(seed, **options).fit(), seed) for seed in SEEDS]
    assert sum(verdicts) >= len(SEEDS) - 1  # a false alarm is to be rare


@pytest.mark.parametrize("options", [{}, {"bias": True, "masked": True}])
def test_residuals_of_a_missing_head_do_not_pass(options):
    for seed in SEEDS:
        case = residual_case(seed, **options)
        bias = None if case.key_bias is None else case.key_bias[:1]
        fit = replace(case, attention=case.attention[:1], key_bias=bias).fit()
        assert not is_noise(fit, seed)


def test_residuals_of_wrong_attention_do_not_pass(xp_array):
    case = residual_case(0, size=1e-3)
    fit = replace(case, attention=1.5 * case.attention).fit(xp_array)
    assert not is_noise(fit, 0)


def test_noise_passes_on_every_backend_alike(xp_array):
    case = residual_case(1)
    expected = structure(case.fit(), 3)
    found = structure(case.fit(xp_array), 3)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_structure_is_measured_over_all_blocks():
    case = residual_case(2)
    whole = np.array(structure(case.fit(), 3))
    cut = np.array(structure(case.fit(per_block=150), 3))
    np.testing.assert_allclose(cut[:, 0], whole[:, 0], rtol=1e-6)
    for sizes in whole:
        assert len(sizes) > 50
        assert (sizes > 0).all()
        assert np.unique(sizes).size == sizes.size


def test_noise_is_as_large_under_flips_as_without_but_for_what_the_fit_took():
    ratios = []
    for seed in SEEDS:
        kinds = structure(residual_case(seed).fit(), seed)
        ratios.append([sizes[0] / np.median(sizes[1:]) for sizes in kinds])
    assert (np.median(ratios, axis=0) > 0.1).all()
    assert (np.median(ratios, axis=0) < 1.7).all()
