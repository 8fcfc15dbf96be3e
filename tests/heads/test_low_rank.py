import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer.array.backend import to_numpy
from onelayer.heads import dense, low_rank


@st.composite
def heads_of_rank(draw):
    """Theta of heads with a rank below their dimension, their dimension and that rank."""
    heads, dim = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    rank = draw(st.integers(1, dim - 1))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    attention = rng.standard_normal((heads, dim, rank)) @ rng.standard_normal((heads, rank, dim))
    key_bias = rng.standard_normal((heads, dim)) if draw(st.booleans()) else None
    return dense.pack(attention, key_bias), dim, rank


def random_like(theta, seed):
    return np.random.default_rng(seed).standard_normal(theta.shape)


def matrices(theta, dim):
    return to_numpy(dense.unpack(theta, dim)[0])


def project(xp_array, theta, dim, rank, direction):
    """A numpy direction on the tangent space, as a numpy array."""
    tangent = low_rank.tangent(xp_array(theta), dim, rank)
    return to_numpy(tangent.project(xp_array(direction)))


# The tangent space


@given(case=heads_of_rank(), seed=st.integers(0, 99))
def test_projection_is_orthogonal(xp_array, case, seed):
    theta, dim, rank = case
    first, second = random_like(theta, seed), random_like(theta, seed + 100)
    once = project(xp_array, theta, dim, rank, first)
    np.testing.assert_allclose(project(xp_array, theta, dim, rank, once), once, atol=1e-12)
    other = project(xp_array, theta, dim, rank, second)
    assert np.sum(once * second) == pytest.approx(np.sum(first * other), abs=1e-10)
    assert not np.allclose(once, first)


@given(case=heads_of_rank(), seed=st.integers(0, 99))
def test_multiples_on_either_side_are_tangent(xp_array, case, seed):
    theta, dim, rank = case
    attention = matrices(theta, dim)
    rng = np.random.default_rng(seed)
    A, B = rng.standard_normal((2, len(attention), dim, dim))
    direction = theta * 0.0
    direction[:dim] = dense.pack(attention @ A + B @ attention)
    projected = project(xp_array, theta, dim, rank, direction)
    np.testing.assert_allclose(projected, direction, atol=1e-10)


@given(case=heads_of_rank())
def test_tangent_space_has_the_dimension_of_the_manifold(case):
    theta, dim, rank = case
    tangent = low_rank.tangent(theta, dim, rank)
    trace = 0.0
    for entry in np.ndindex(theta.shape):
        unit = np.zeros(theta.shape)
        unit[entry] = 1.0
        trace += tangent.project(unit)[entry]
    heads = theta.shape[1] // dim
    biases = heads * dim * (theta.shape[0] - dim)
    assert trace == pytest.approx(heads * rank * (2 * dim - rank) + biases, abs=1e-9)


@given(case=heads_of_rank(), seed=st.integers(0, 99))
def test_key_bias_stays_free(xp_array, case, seed):
    theta, dim, rank = case
    direction = random_like(theta, seed)
    projected = project(xp_array, theta, dim, rank, direction)
    np.testing.assert_array_equal(projected[dim:], direction[dim:])
    moved = to_numpy(low_rank.nearest(xp_array(theta + direction), dim, rank))
    np.testing.assert_array_equal(moved[dim:], (theta + direction)[dim:])


def test_projection_keeps_single_precision(xp_array):
    attention = np.random.default_rng(0).standard_normal((2, 3, 1)) @ np.ones((2, 1, 3))
    tangent = low_rank.tangent(xp_array(dense.pack(attention)), 3, 1)
    direction = xp_array(np.ones((3, 6), dtype=np.float32))
    assert to_numpy(tangent.project(direction)).dtype == np.float32


# Back to the manifold


@given(case=heads_of_rank(), seed=st.integers(0, 99))
def test_nearest_has_the_rank_and_is_the_truncated_svd(xp_array, case, seed):
    theta, dim, rank = case
    full = theta + random_like(theta, seed)
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
    theta, dim, rank = case
    np.testing.assert_allclose(
        to_numpy(low_rank.nearest(xp_array(theta), dim, rank)), theta, atol=1e-10
    )


@given(case=heads_of_rank(), seed=st.integers(0, 99))
def test_a_small_tangent_step_stays_near_the_manifold_to_first_order(case, seed):
    theta, dim, rank = case
    tangent = low_rank.tangent(theta, dim, rank)
    smallest = min(np.linalg.svd(head)[1][rank - 1] for head in matrices(theta, dim))
    step = tangent.project(random_like(theta, seed))
    step *= 1e-3 * smallest / np.linalg.norm(step)
    gap = np.linalg.norm(low_rank.nearest(theta + step, dim, rank) - theta - step)
    assert gap <= 1e-2 * np.linalg.norm(step)


def test_full_rank_leaves_everything_as_it_is(xp_array):
    theta = xp_array(np.random.default_rng(0).standard_normal((4, 6)))
    tangent = low_rank.tangent(theta, 3, None)
    assert tangent.project(theta) is theta
    assert low_rank.nearest(theta, 3, None) is theta


# Moving


@given(case=heads_of_rank(), seed=st.integers(0, 99))
def test_moving_ends_at_the_nearest_heads_of_the_rank(xp_array, case, seed):
    theta, dim, rank = case
    assert_moved(xp_array, theta, dim, rank, seed)


@pytest.mark.parametrize("bias", [False, True])
def test_moving_takes_no_more_than_thin_matrices(xp_array, bias):
    rng = np.random.default_rng(0)
    attention = rng.standard_normal((2, 9, 3)) @ rng.standard_normal((2, 3, 9))
    theta = dense.pack(attention, rng.standard_normal((2, 9)) if bias else None)
    assert_moved(xp_array, theta, 9, 3, seed=1)


def assert_moved(xp_array, theta, dim, rank, seed):
    tangent = low_rank.tangent(xp_array(theta), dim, rank)
    direction = tangent.project(xp_array(0.3 * random_like(theta, seed)))
    moved, there = tangent.retract(xp_array(theta), direction)
    expected = low_rank.nearest(theta + to_numpy(direction), dim, rank)
    np.testing.assert_allclose(to_numpy(moved), expected, atol=1e-9)
    probe = random_like(theta, seed + 1)
    theirs = low_rank.tangent(expected, dim, rank).project(probe)
    np.testing.assert_allclose(to_numpy(there.project(xp_array(probe))), theirs, atol=1e-6)


def test_without_a_rank_heads_go_anywhere():
    tangent = low_rank.tangent(np.eye(3), 3, None)
    moved, there = tangent.retract(np.eye(3), np.ones((3, 3)))
    np.testing.assert_array_equal(moved, np.eye(3) + 1)
    assert there is tangent
