from dataclasses import replace

import numpy as np
import oracles
import pytest
from cases import random_mask, solved_case
from hypothesis import example, given
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.recovery import certificate
from onelayer.recovery.examples import hold

DELTA = 0.05


def solved(n=60, tokens=3, masked=False, causal=False, noise=0.0, **options):
    """A layer's own outputs seen with its own attention matrices."""
    layer = AttentionLayer.random(**{"heads": 2, "dim": 3, "scale": 2.0, "seed": 1, **options})
    X = inputs.gaussian(n, tokens, layer.dim, seed=2)
    rng = np.random.default_rng(3)
    case = solved_case(layer, X, random_mask(rng, n, tokens) if masked else None, causal)
    return replace(case, Y=case.Y + noise * rng.standard_normal(case.Y.shape))


def certify(case, held_out, rank=None, seed=0):
    """The certificate of the case's fit, judged on other examples of the same layer."""
    posed = case.problem()
    others = hold(posed, *posed.apply(held_out.X, held_out.Y, held_out.mask))
    rng = np.random.default_rng(seed)
    return certificate.certify(case.fit(), posed, others, rank, 0.0, rng)


# The bound on the mean


@given(mean=st.floats(0, 1), count=st.integers(1, 10_000), delta=st.sampled_from([0.5, 0.05, 1e-6]))
@example(mean=0.0, count=100, delta=0.05)
@example(mean=1.0, count=1, delta=0.05)
def test_bound_on_a_mean_solves_its_equation(mean, count, delta):
    bound = certificate.mean_bound(mean, count, delta)
    assert mean <= bound <= 1
    if bound < 1 - 1e-9:
        reached = count * oracles.coin_divergence(mean, bound)
        assert reached == pytest.approx(np.log(1 / delta), rel=1e-4)


@pytest.mark.parametrize("count", [1, 10, 300])
@pytest.mark.parametrize("delta", [0.5, 0.05])
def test_bound_on_errors_of_zero_has_a_closed_form(count, delta):
    bound = certificate.mean_bound(0.0, count, delta)
    assert bound == pytest.approx(1 - delta ** (1 / count), rel=1e-9)


@given(mean=st.floats(0, 0.9), more=st.floats(1e-3, 0.1), count=st.integers(2, 1000))
def test_bound_grows_with_the_mean_and_falls_with_the_count(mean, more, count):
    bound = certificate.mean_bound(mean, count, DELTA)
    assert certificate.mean_bound(mean + more, count, DELTA) > bound
    assert certificate.mean_bound(mean, 2 * count, DELTA) < bound
    assert certificate.mean_bound(mean, count, DELTA / 2) > bound


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(0.02, 2.0), (1.0, 1.0), (0.3, 0.01)])
@pytest.mark.parametrize("count", [5, 60])
def test_bound_covers_the_true_mean_as_often_as_it_promises(shape, count):
    rng = np.random.default_rng(0)
    delta, runs = 0.2, 400
    samples = np.clip(rng.beta(*shape, (runs, count)), 0.0, 1.0)
    true = shape[0] / sum(shape)
    missed = sum(certificate.mean_bound(float(s.mean()), count, delta) < true for s in samples)
    slack = 3 * (delta * (1 - delta) * runs) ** 0.5
    assert missed <= delta * runs + slack


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [0.0, 0.1, 0.5, 2.0])
def test_bound_covers_the_true_error_of_right_and_wrong_layers(wrong):
    """100 layers and answers that are off by `wrong`: the bound may fail for one in twenty.

    The chance of more than 10 failures is below 2 % even if each had the full 5 %.
    """
    rng = np.random.default_rng(11)
    failures = 0
    for seed in range(100):
        layer = AttentionLayer.random(heads=2, dim=4, scale=2.0, seed=seed)
        answer = AttentionLayer(
            layer.attention * (1 + wrong * rng.standard_normal(layer.attention.shape)),
            layer.projection,
        )
        X = inputs.boolean(60, 3, 4, seed=rng)
        case = solved_case(answer, X)
        held_out = solved_case(layer, inputs.boolean(40, 3, 4, seed=rng))
        proof = certify(case, held_out)
        fresh = inputs.boolean(4000, 3, 4, seed=rng)
        squared = np.sum((answer(fresh) - layer(fresh)) ** 2, axis=(1, 2))
        share = np.minimum(squared / np.sum(layer(fresh) ** 2, axis=(1, 2)), 1.0)
        failures += bool(share.mean() > proof.error_bound)
        assert proof.confidence == 1 - DELTA
    assert failures <= 10


def test_bound_on_coins_is_not_idle():
    rng = np.random.default_rng(1)
    bounds = [certificate.mean_bound(c / 50, 50, 0.2) for c in rng.binomial(50, 0.3, 400)]
    missed = np.mean(np.array(bounds) < 0.3)
    assert 0.02 < missed < 0.2
    assert np.mean(bounds) < 0.5


# The errors on held-out examples


@pytest.mark.parametrize("masked", [False, True])
def test_errors_are_those_of_the_examples_one_by_one(masked):
    case = solved(noise=0.1, masked=masked, bias=True)
    held_out = solved(n=7, noise=0.3, masked=masked, bias=True)
    result = certify(case, held_out)
    posed = case.problem()
    layer = posed.layer(case.fit().theta, case.fit().weights)
    outputs = layer(held_out.X, mask=held_out.mask)
    wrong, size = np.zeros(7), np.zeros(7)
    for i, row in oracles.present_rows(7, 3, held_out.mask):
        wrong[i] += np.sum((outputs[i, row] - held_out.Y[i, row]) ** 2)
        size[i] += np.sum(held_out.Y[i, row] ** 2)
    assert result.examples == 7
    assert result.error == pytest.approx((wrong.sum() / size.sum()) ** 0.5, rel=1e-9)
    assert result.worst == pytest.approx(max(wrong / size) ** 0.5, rel=1e-9)
    mean = float(np.minimum(wrong / size, 1.0).mean())
    assert result.error_bound == pytest.approx(certificate.mean_bound(mean, 7, DELTA), rel=1e-9)
    assert result.confidence == 1 - DELTA
    assert (1 - result.exceed_probability) ** 7 == pytest.approx(DELTA)


def test_one_very_wrong_example_counts_as_no_more_than_wrong():
    case, held_out = solved(), solved(n=20)
    held_out.Y[3] += 1e6
    result = certify(case, held_out)
    assert result.worst > 0.9
    assert result.error_bound == pytest.approx(certificate.mean_bound(1 / 20, 20, DELTA), rel=1e-2)


def test_outputs_of_zero_that_were_not_foreseen_are_infinitely_wrong():
    case, held_out = solved(), solved(n=4)
    held_out.Y[1] = 0.0
    result = certify(case, held_out)
    assert result.worst == np.inf
    assert np.isfinite(result.error)
    assert 0.25 < result.error_bound < 1


def test_a_certificate_of_nothing_but_zeros():
    case = solved()
    case.Y[:] = 0.0
    result = certify(case, case)
    assert (result.error, result.worst) == (0.0, 0.0)
    assert result.undetermined_heads == [0, 1]


# Which heads are determined


def test_heads_are_determined_where_both_bars_are_finite():
    sizes = np.array([1e-3, 0.2, np.inf, 1e-3]), np.array([1e-3, 1e-3, 1e-3, np.nan])
    found = replace(
        certify(solved(), solved(n=4)), attention_error=sizes[0], projection_error=sizes[1]
    )
    assert found.determined.tolist() == [True, True, False, False]
    assert found.undetermined_heads == [2, 3]
    assert found.uncertain_heads(0.1) == [1, 2, 3]
    assert found.uncertain_heads(0.5) == [2, 3]


def test_noise_as_large_as_the_outputs_leaves_all_heads_uncertain():
    assert certify(solved(noise=30.0, out_dim=1), solved(n=4, out_dim=1)).uncertain_heads(1.0) == [
        0,
        1,
    ]


def test_the_noise_is_that_of_the_residuals_or_of_rounding():
    case = solved(noise=1e-3, n=200)
    rng = np.random.default_rng(0)
    posed = case.problem()
    found = [
        certificate.certify(case.fit(), posed, posed, None, rounding, rng).noise
        for rounding in (0.0, 1e-9, 0.1)
    ]
    assert found[0] == pytest.approx(1e-3 / posed.output_scale, rel=0.1)
    assert found[1:] == [found[0], 0.1]


def test_thinning_does_not_change_the_verdict():
    case = solved(n=3000, dim=2)
    few = replace(case, X=case.X[:200], Y=case.Y[:200])
    whole, part = certify(case, few), certify(few, few)
    assert whole.smallest_singular_value == pytest.approx(part.smallest_singular_value, rel=0.4)
    assert whole.undetermined_heads == []
    assert whole.input_rank == 2
