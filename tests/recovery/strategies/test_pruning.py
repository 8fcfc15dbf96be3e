from dataclasses import replace

import numpy as np
import oracles
import pytest
from cases import solved

from onelayer.array.backend import to_numpy
from onelayer.heads import dense
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.strategies import pruning


def heads_kept(case, theta):
    """Which of the case's heads are left, by their attention matrices."""
    left = dense.by_head(to_numpy(theta), 3)
    full = dense.by_head(dense.pack(case.attention, case.key_bias), 3)
    return [next(i for i in range(len(full)) if np.array_equal(full[i], head)) for head in left]


def test_pruning_drops_the_head_without_projection(xp_array):
    case = solved(heads=2)
    rng = np.random.default_rng(0)
    extra = rng.standard_normal((1, 3, 3))
    beside = np.concatenate([case.attention[:1], extra, case.attention[1:]])
    case = replace(case, attention=beside)
    assert heads_kept(case, pruning.prune(case.fit(xp_array), 2)) == [0, 2]


def test_pruning_merges_heads_that_were_found_twice(xp_array):
    case = solved(heads=2)
    twice = np.concatenate([case.attention, case.attention[:1] * (1 + 1e-5)])
    case = replace(case, attention=twice)
    kept = heads_kept(case, pruning.prune(case.fit(xp_array), 2))
    assert 1 in kept
    assert len(kept) == 2


@pytest.mark.parametrize("options", [{}, {"bias": True, "masked": True}])
def test_pruning_drops_the_cheapest_head_at_each_turn(options):
    case = solved(heads=3, **options)
    kept = heads_kept(case, pruning.prune(case.fit(), 2))
    losses = []
    for dropped in range(3):
        rest = [i for i in range(3) if i != dropped]
        X, Y = case.whitened()
        bias = None if case.key_bias is None else case.key_bias[rest]
        losses.append(
            oracles.reduced_loss(X, Y, case.attention[rest], bias, case.mask, output_bias=case.bias)
        )
    assert kept == [i for i in range(3) if i != int(np.argmin(losses))]
    assert len(heads_kept(case, pruning.prune(case.fit(), 1))) == 1


def test_nothing_is_pruned_where_there_is_nothing_to_spare():
    fit = solved(heads=2).fit()
    assert pruning.prune(fit, 2) is fit.theta


def test_of_a_head_found_twice_one_is_dropped_in_float32_too():
    case = solved(heads=2)
    case = replace(case, attention=np.concatenate([case.attention, case.attention[:1]]))
    fit = case.fit()
    fit = varpro.fit(fit.batches, fit.theta, single=True)
    assert min(varpro.cost_of_dropping(fit)) >= 0
    _, dropped = pruning.without_cheapest(fit)
    assert dropped in (0, 2)
