import math

import numpy as np
import oracles
import pytest

from onelayer.theory import norms, targets

RNG = np.random.default_rng(7)
BETA = np.array([0.5, -1.0, 0.75])


@pytest.mark.parametrize(("k", "expected"), [(0, 1.0), (1, 4.0), (2, 2**4.5 * 16), (4, 2.0**17)])
def test_norm_constants(k, expected):
    assert norms.norm_constant(k) == pytest.approx(expected)


def test_norm_constants_of_no_degree():
    with pytest.raises(ValueError, match="k is -1, expected a whole number of at least 0"):
        norms.norm_constant(-1)


def test_the_higher_power_of_the_two_tokens_counts():
    assert norms.pair_norm({(1, 2): 0.5}) == norms.pair_norm({(2, 0): 0.5}) == 2**4.5 * 16 * 0.5
    assert norms.pair_norm(None) == math.inf


# Norms in all tokens side by side, against explicit tensors in all their coordinates.


def flat_square(tensor, r, weights):
    """|g|² of the symmetric tensor g of Σ_i w_i F(x_0, x_i) in all tokens side by side."""
    dim, legs = tensor.shape[0], tensor.ndim
    whole = np.zeros((dim * (len(weights) + 1),) * legs)
    for i, weight in enumerate(weights):
        blocks = [slice(0, dim)] * r + [slice(dim * (i + 1), dim * (i + 2))] * (legs - r)
        whole[tuple(blocks)] += weight * tensor
    return np.sum(oracles.symmetric(whole, range(legs)) ** 2)


@pytest.mark.parametrize("rs", [(0, 1), (0, 2), (1, 2), (2, 0), (2, 1)])
@pytest.mark.parametrize("keys", [1, 3])
def test_flat_norms_are_of_tensors_in_all_tokens(rs, keys):
    degree, tensor = sum(rs), RNG.normal(size=(2,) * sum(rs))
    f = targets.polynomial({rs: tensor, (0, 0): 0.5})
    square = flat_square(tensor, rs[0], np.ones(keys) / keys)
    assert f.flat_norm(keys) == pytest.approx(degree**4.5 * (keys + 2) ** degree * square + 0.25)


def test_tensors_of_different_tokens_add_up():
    squares = {(2, 0): 3.0, (1, 1): 5.0, (0, 2): 7.0}
    alone = [norms.flat_norm({rs: square}, np.ones(4) / 4) for rs, square in squares.items()]
    assert norms.flat_norm(squares, np.ones(4) / 4) == pytest.approx(sum(alone))


@pytest.mark.parametrize(
    ("f", "weights"),
    [
        (targets.one_position(2, 2, 3, BETA), [0, 1, 0]),
        (targets.ordered_sum(3, 2, beta=BETA), np.array([1, -1, 1]) / 3),
        (targets.ordered_sum(3, 2, "increasing", BETA), np.array([1, 2, 3]) / 3),
    ],
    ids=["position", "alternating", "increasing"],
)
def test_targets_outside_of_the_class(f, weights):
    assert f.norm == f.biased_norm == math.inf
    square = flat_square(np.outer(BETA, BETA), 0, weights)
    assert f.flat_norm(3) == pytest.approx(2**4.5 * 25 * square)
