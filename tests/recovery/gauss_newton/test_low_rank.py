import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer.array.backend import to_numpy
from onelayer.heads import dense
from onelayer.recovery.gauss_newton import low_rank


@st.composite
def heads_of_rank(draw):
    """Stacked heads (p, m·d) of a rank below their dimension, their dimension and that rank."""
    heads, dim = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    rank = draw(st.integers(1, dim - 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    theta = rng.standard_normal((heads, dim, rank)) @ rng.standard_normal((heads, rank, dim))
    key_bias = rng.standard_normal((heads, dim)) if draw(st.booleans()) else None
    return dense.stack(theta, key_bias), dim, rank


def random_like(stacked, seed):
    return np.random.default_rng(seed).standard_normal(stacked.shape)


def matrices(stacked, dim):
    return to_numpy(dense.unstack(stacked, dim))[:, :dim]


def project(xp_array, stacked, dim, rank, direction):
    """A numpy direction on the tangent space, as a numpy array."""
    tangent = low_rank.tangent(xp_array(stacked), dim, rank)
    return to_numpy(tangent.project(xp_array(direction)))


# The tangent space


@given(case=heads_of_rank(), seed=st.integers(0, 99))
def test_projection_is_orthogonal(xp_array, case, seed):
    stacked, dim, rank = case
    first, second = random_like(stacked, seed), random_like(stacked, seed + 100)
    once = project(xp_array, stacked, dim, rank, first)
    np.testing.assert_allclose(project(xp_array, stacked, dim, rank, once), once, atol=1e-12)
    other = project(xp_array, stacked, dim, rank, second)
    assert np.sum(once * second) == pytest.approx(np.sum(first * other), abs=1e-10)
    assert not np.allclose(once, first)


@given(case=heads_of_rank(), seed=st.integers(0, 99))
def test_multiples_on_either_side_are_tangent(xp_array, case, seed):
    stacked, dim, rank = case
    theta = matrices(stacked, dim)
    rng = np.random.default_rng(seed)
    A, B = rng.standard_normal((2, len(theta), dim, dim))
    direction = stacked * 0.0
    direction[:dim] = dense.stack(theta @ A + B @ theta)
    projected = project(xp_array, stacked, dim, rank, direction)
    np.testing.assert_allclose(projected, direction, atol=1e-10)


@given(case=heads_of_rank())
def test_tangent_space_has_the_dimension_of_the_manifold(case):
    stacked, dim, rank = case
    tangent = low_rank.tangent(stacked, dim, rank)
    trace = 0.0
    for entry in np.ndindex(stacked.shape):
        unit = np.zeros(stacked.shape)
        unit[entry] = 1.0
        trace += tangent.project(unit)[entry]
    heads = stacked.shape[1] // dim
    biases = heads * dim * (stacked.shape[0] - dim)
    assert trace == pytest.approx(heads * rank * (2 * dim - rank) + biases, abs=1e-9)


@given(case=heads_of_rank(), seed=st.integers(0, 99))
def test_key_bias_stays_free(xp_array, case, seed):
    stacked, dim, rank = case
    direction = random_like(stacked, seed)
    projected = project(xp_array, stacked, dim, rank, direction)
    np.testing.assert_array_equal(projected[dim:], direction[dim:])
    moved = to_numpy(low_rank.nearest(xp_array(stacked + direction), dim, rank))
    np.testing.assert_array_equal(moved[dim:], (stacked + direction)[dim:])


def test_projection_keeps_single_precision(xp_array):
    theta = np.random.default_rng(0).standard_normal((2, 3, 1)) @ np.ones((2, 1, 3))
    tangent = low_rank.tangent(xp_array(dense.stack(theta)), 3, 1)
    direction = xp_array(np.ones((3, 6), dtype=np.float32))
    assert to_numpy(tangent.project(direction)).dtype == np.float32


# Back to the manifold


@given(case=heads_of_rank(), seed=st.integers(0, 99))
def test_nearest_has_the_rank_and_is_the_truncated_svd(xp_array, case, seed):
    stacked, dim, rank = case
    full = stacked + random_like(stacked, seed)
    found = matrices(low_rank.nearest(xp_array(full), dim, rank), dim)
    for head, target in zip(found, matrices(full, dim), strict=True):
        left, sizes, right = np.linalg.svd(target)
        np.testing.assert_allclose(head, (left[:, :rank] * sizes[:rank]) @ right[:rank], atol=1e-10)
        assert np.linalg.matrix_rank(head) == rank
        # No matrix of this rank is nearer than the sizes that are left over (Eckart and Young).
        gap = np.linalg.norm(head - target)
        assert gap == pytest.approx(np.linalg.norm(sizes[rank:]), rel=1e-9)


@given(case=heads_of_rank())
def test_heads_of_the_rank_are_their_own_nearest(xp_array, case):
    stacked, dim, rank = case
    np.testing.assert_allclose(
        to_numpy(low_rank.nearest(xp_array(stacked), dim, rank)), stacked, atol=1e-10
    )


@given(case=heads_of_rank(), seed=st.integers(0, 99))
def test_a_small_tangent_step_stays_near_the_manifold_to_first_order(case, seed):
    stacked, dim, rank = case
    tangent = low_rank.tangent(stacked, dim, rank)
    smallest = min(np.linalg.svd(head)[1][rank - 1] for head in matrices(stacked, dim))
    step = tangent.project(random_like(stacked, seed))
    step *= 1e-3 * smallest / np.linalg.norm(step)
    gap = np.linalg.norm(low_rank.nearest(stacked + step, dim, rank) - stacked - step)
    assert gap <= 1e-2 * np.linalg.norm(step)


def test_full_rank_leaves_everything_as_it_is(xp_array):
    stacked = xp_array(np.random.default_rng(0).standard_normal((4, 6)))
    tangent = low_rank.tangent(stacked, 3, None)
    assert tangent.project(stacked) is stacked
    assert low_rank.nearest(stacked, 3, None) is stacked


# Moving


@given(case=heads_of_rank(), seed=st.integers(0, 99))
def test_moving_ends_at_the_nearest_heads_of_the_rank(xp_array, case, seed):
    stacked, dim, rank = case
    assert_moved(xp_array, stacked, dim, rank, seed)


@pytest.mark.parametrize("bias", [False, True])
def test_moving_takes_no_more_than_thin_matrices(xp_array, bias):
    rng = np.random.default_rng(0)
    theta = rng.standard_normal((2, 9, 3)) @ rng.standard_normal((2, 3, 9))
    stacked = dense.stack(theta, rng.standard_normal((2, 9)) if bias else None)
    assert_moved(xp_array, stacked, 9, 3, seed=1)


def assert_moved(xp_array, stacked, dim, rank, seed):
    tangent = low_rank.tangent(xp_array(stacked), dim, rank)
    direction = tangent.project(xp_array(0.3 * random_like(stacked, seed)))
    moved, there = tangent.moved(xp_array(stacked), direction)
    expected = low_rank.nearest(stacked + to_numpy(direction), dim, rank)
    np.testing.assert_allclose(to_numpy(moved), expected, atol=1e-9)
    probe = random_like(stacked, seed + 1)
    theirs = low_rank.tangent(expected, dim, rank).project(probe)
    np.testing.assert_allclose(to_numpy(there.project(xp_array(probe))), theirs, atol=1e-6)


def test_without_a_rank_heads_go_anywhere():
    tangent = low_rank.tangent(np.eye(3), 3, None)
    moved, there = tangent.moved(np.eye(3), np.ones((3, 3)))
    np.testing.assert_array_equal(moved, np.eye(3) + 1)
    assert there is tangent
