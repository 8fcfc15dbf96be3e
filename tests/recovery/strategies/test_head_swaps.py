"""Heads that are dropped, and heads that take the place of others."""

from dataclasses import replace

import numpy as np
import oracles
import pytest
from cases import missing_one, solved, with_outputs

from onelayer.array.backend import to_numpy
from onelayer.heads import dense
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.strategies import head_swaps


def heads_kept(case, theta):
    """Which of the case's heads are left, by their attention matrices."""
    left = dense.by_head(to_numpy(theta), 3)
    full = dense.by_head(dense.pack(case.attention, case.key_bias), 3)
    return [next(i for i in range(len(full)) if np.array_equal(full[i], head)) for head in left]


# Pruning


def test_pruning_drops_the_head_without_projection(xp_array):
    case = solved(heads=2)
    rng = np.random.default_rng(0)
    extra = rng.standard_normal((1, 3, 3))
    beside = np.concatenate([case.attention[:1], extra, case.attention[1:]])
    case = replace(case, attention=beside)
    assert heads_kept(case, head_swaps.prune(case.fit(xp_array), 2)) == [0, 2]


def test_pruning_merges_heads_that_were_found_twice(xp_array):
    case = solved(heads=2)
    twice = np.concatenate([case.attention, case.attention[:1] * (1 + 1e-5)])
    case = replace(case, attention=twice)
    kept = heads_kept(case, head_swaps.prune(case.fit(xp_array), 2))
    assert 1 in kept
    assert len(kept) == 2


@pytest.mark.parametrize("options", [{}, {"bias": True, "masked": True}])
def test_pruning_drops_the_cheapest_head_at_each_turn(options):
    case = solved(heads=3, **options)
    kept = heads_kept(case, head_swaps.prune(case.fit(), 2))
    losses = []
    for dropped in range(3):
        rest = [i for i in range(3) if i != dropped]
        X, Y = case.whitened()
        bias = None if case.key_bias is None else case.key_bias[rest]
        losses.append(
            oracles.reduced_loss(X, Y, case.attention[rest], bias, case.mask, output_bias=case.bias)
        )
    assert kept == [i for i in range(3) if i != int(np.argmin(losses))]
    assert len(heads_kept(case, head_swaps.prune(case.fit(), 1))) == 1


def test_nothing_is_pruned_where_there_is_nothing_to_spare():
    fit = solved(heads=2).fit()
    assert head_swaps.prune(fit, 2) is fit.theta


def test_of_a_head_found_twice_one_is_dropped_in_float32_too():
    case = solved(heads=2)
    case = replace(case, attention=np.concatenate([case.attention, case.attention[:1]]))
    fit = case.fit()
    fit = varpro.fit(fit.batches, fit.theta, single=True)
    assert min(varpro.cost_of_dropping(fit)) >= 0
    _, dropped = head_swaps.without_cheapest(fit)
    assert dropped in (0, 2)


# Heads that are missing


def missing(posed, fit, rank=None):
    return head_swaps.missing(fit, posed, rank, np.random.default_rng(0))


@pytest.mark.slow
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("options", [{}, {"bias": True}, {"rank": 2}])
def test_a_missing_head_takes_the_place_of_an_idle_one(xp_array, options, few):
    posed, fit, true = missing_one(xp_array, **options)
    if few:
        fit = varpro.fit(posed.sample(300).batches(3), fit.theta)
    repaired = to_numpy(head_swaps.repaired(fit, missing(posed, fit, options.get("rank"))))
    assert repaired.shape == true.shape
    np.testing.assert_array_equal(repaired[:, :8], true[:, :8])
    np.testing.assert_array_equal(repaired[:, 8:16], true[:, 16:])
    new, lost = repaired[:, 16:], true[:, 8:16]
    cosine = np.sum(new * lost) / np.linalg.norm(new) / np.linalg.norm(lost)
    assert cosine > 0.8


def test_nothing_is_repaired_where_nothing_is_missing():
    posed, _, true = missing_one()
    noise = np.random.default_rng(0).standard_normal(posed.Y.shape)
    noisy = with_outputs(posed, posed.Y + 1e-3 * noise)
    fit = varpro.fit(noisy.batches(3), true)
    assert head_swaps.repaired(fit, missing(noisy, fit)) is None
