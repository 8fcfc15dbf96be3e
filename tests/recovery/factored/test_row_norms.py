import numpy as np
import pytest
from factorings import factored
from fits import assert_close

from onelayer.array.backend import double, like, single, to_numpy
from onelayer.recovery.factored import model, row_norms

VARIANTS = [
    {},
    {"bias": True},
    {"masked": True, "causal": True},
    {"heads": 3, "out_dim": 6},
    {"out_dim": 5},  # one more than values
    {"rank": None},
]


def at(xp_array=np.asarray, tokens=4, out_dim=4, **options):
    """The norms of a block of examples, with what they are made from."""
    _, block, factors = factored(xp_array, n=5, tokens=tokens, out_dim=out_dim, dim=4, **options)
    activations = model.forward(factors, block)
    heads, rank = factors.heads, activations.key.shape[3]
    drawn = np.random.default_rng(2).standard_normal((heads, rank, rank))
    inverse = drawn @ drawn.transpose(0, 2, 1) + np.eye(rank)
    found = row_norms.row_norms([activations] * 2, like(inverse, factors.query))
    return (None if found is None else found[0]), activations, inverse


def matrices(activations, inverse):
    """(ε + MᵀG⁻¹M)⁻¹ for every example, head and row, by loops."""
    key, value, attention = (
        to_numpy(one) for one in (activations.key, activations.value, activations.attention)
    )
    n, heads, tokens, rank = value.shape
    found = np.empty((n, heads, tokens, rank, rank))
    for i, h, a in np.ndindex(n, heads, tokens):
        p = attention[i, h, a]
        M = key[i, h % key.shape[1]].T @ (np.diag(p) - np.outer(p, p)) @ value[i, h]
        eps = row_norms._EVENNESS * np.eye(rank)
        found[i, h, a] = np.linalg.inv(eps + M.T @ inverse[h] @ M)
    return found * rank / np.trace(found, axis1=3, axis2=4).mean(axis=(0, 2))[:, None, None, None]


@pytest.mark.parametrize("variant", VARIANTS)
def test_rows_are_multiplied_by_the_matrices_of_their_norms(xp_array, variant):
    norms, activations, inverse = at(xp_array, **variant)
    expected = matrices(activations, inverse)
    n, heads, tokens, rank, _ = expected.shape
    rows = np.random.default_rng(0).standard_normal(tuple(activations.residuals.shape))
    inner = heads * rank
    by_head = rows[:, :inner].reshape(n, tokens, heads, rank).transpose(0, 2, 1, 3)
    by_head = (expected @ by_head[..., None])[..., 0]
    whole = np.concatenate(
        [by_head.transpose(0, 2, 1, 3).reshape(n * tokens, inner), rows[:, inner:]], axis=1
    )
    found = norms.times(like(rows, activations.residuals))
    assert_close(found, whole, 1e-6)


@pytest.mark.parametrize("variant", VARIANTS)
def test_random_rows_have_these_matrices_as_covariances(variant):
    norms, activations, inverse = at(**variant)
    expected = matrices(activations, inverse)
    n, heads, tokens, rank, _ = expected.shape
    rng, total, count = np.random.default_rng(0), 0.0, 4000
    for _ in range(count):
        rows = norms.drawn(activations, rng)
        by_head = rows[:, : heads * rank].reshape(n, tokens, heads, rank).transpose(0, 2, 1, 3)
        total = total + by_head[..., :, None] * by_head[..., None, :]
    gap = np.abs(total / count - expected).max()
    assert gap < 8 * expected.max() / count**0.5
    assert gap < 0.3 * np.ptp(expected)


def test_norms_are_of_the_precision_of_what_they_are_made_from(xp_array):
    norms, activations, _ = at(xp_array)
    assert norms.times(single(activations.residuals)).dtype == single(activations.residuals).dtype
    assert norms.times(double(activations.residuals)).dtype == double(activations.residuals).dtype


def test_long_examples_have_no_norms():
    assert at(tokens=4)[0] is not None
    assert at(tokens=5)[0] is None  # more than twice the rank
