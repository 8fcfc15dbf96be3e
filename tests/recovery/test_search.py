from dataclasses import replace

import numpy as np
import oracles
import pytest
from cases import random_mask, solved_case

from onelayer import AttentionLayer, attention, inputs
from onelayer.arrays import to_numpy
from onelayer.recovery import reduced, search


def solved(heads=3, masked=False, **options):
    """A layer's own outputs seen with its own attention matrices."""
    layer = AttentionLayer.random(heads=heads, dim=3, seed=1, **options)
    mask = random_mask(np.random.default_rng(3), 60, 3) if masked else None
    return solved_case(layer, inputs.gaussian(60, 3, 3, seed=2), mask)


def heads_kept(case, stacked):
    """Which of the case's heads are left, by their attention matrices."""
    left = attention.unstack(to_numpy(stacked), 3)
    full = attention.unstack(attention.stack(case.attention, case.key_bias), 3)
    return [next(i for i in range(len(full)) if np.array_equal(full[i], head)) for head in left]


# Pruning


def test_pruning_drops_the_head_without_projection(xp_array):
    case = solved(heads=2)
    rng = np.random.default_rng(0)
    extra = rng.standard_normal((1, 3, 3))
    beside = np.concatenate([case.attention[:1], extra, case.attention[1:]])
    case = replace(case, attention=beside)
    assert heads_kept(case, search.prune(case.fit(xp_array), 2)) == [0, 2]


def test_pruning_merges_heads_that_were_found_twice(xp_array):
    case = solved(heads=2)
    twice = np.concatenate([case.attention, case.attention[:1] * (1 + 1e-5)])
    case = replace(case, attention=twice)
    kept = heads_kept(case, search.prune(case.fit(xp_array), 2))
    assert 1 in kept
    assert len(kept) == 2


@pytest.mark.parametrize("options", [{}, {"bias": True, "masked": True}])
def test_pruning_drops_the_cheapest_head_at_each_turn(options):
    case = solved(heads=3, **options)
    kept = heads_kept(case, search.prune(case.fit(), 2))
    losses = []
    for dropped in range(3):
        rest = [i for i in range(3) if i != dropped]
        X, Y = case.whitened()
        bias = None if case.key_bias is None else case.key_bias[rest]
        losses.append(
            oracles.reduced_loss(X, Y, case.attention[rest], bias, case.mask, output_bias=case.bias)
        )
    assert kept == [i for i in range(3) if i != int(np.argmin(losses))]
    assert len(heads_kept(case, search.prune(case.fit(), 1))) == 1


def test_nothing_is_pruned_where_there_is_nothing_to_spare():
    fit = solved(heads=2).fit()
    assert search.prune(fit, 2) is fit.stacked


# Errors


@pytest.mark.parametrize("masked", [False, True])
def test_held_out_error_is_relative_to_the_outputs(xp_array, masked):
    case = solved(masked=masked, bias=True)
    fit = case.fit(xp_array)
    assert reduced.held_out_error(fit, case.problem(xp_array)) < 1e-12
    case.Y[:] += np.random.default_rng(0).standard_normal(case.Y.shape)
    posed = case.problem(xp_array)
    expected = posed.layer(fit.stacked, fit.weights)(
        xp_array(case.X), mask=None if case.mask is None else xp_array(case.mask)
    )
    gap = to_numpy(expected) - case.Y
    there = np.ones(gap.shape[:2], dtype=bool) if case.mask is None else case.mask
    size = np.sqrt(np.mean(case.Y[there] ** 2))
    found = reduced.held_out_error(fit, posed)
    assert found == pytest.approx(np.sqrt(np.mean(gap[there] ** 2)) / size, rel=0.01)
