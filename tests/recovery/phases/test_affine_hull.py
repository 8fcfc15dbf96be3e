from functools import cache

import numpy as np
import pytest
from cases import as_they_are
from hypothesis import given
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.recovery.phases.affine_hull import distance_of_halves, extract
from onelayer.recovery.phases.polytope import Polytope
from onelayer.recovery.phases.sculpt import Sculpt
from onelayer.recovery.phases.state import AffineHull, Sculpture

GOOD = 0.003  # relative error of the sum of projections after phase 3


@cache
def sculpted(seed, kind="boolean", tokens=2, n=10_000):
    """The heads of a layer, as vectors, and its polytope with a good sum of projections."""
    layer = AttentionLayer.random(heads=2, dim=8, scale=3.0, seed=seed)
    X = getattr(inputs, kind)(n, tokens, 8, seed=seed + 1000)
    examples = as_they_are(X, layer(X))
    exact = layer.projection.sum(axis=0)
    away = np.random.default_rng(seed).standard_normal(exact.shape)
    near = exact + GOOD * np.linalg.norm(exact) / np.linalg.norm(away) * away
    return layer.attention.reshape(2, 64), Sculpt().sculpt(examples, near, GOOD, heads=2)


def distances(heads, hull):
    """How far each head is from a hull, relative to its size: by least squares."""
    away = [
        head - hull.points(np.linalg.lstsq(hull.basis.T, head - hull.centre, rcond=None)[0])
        for head in heads
    ]
    return np.linalg.norm(away, axis=1) / np.linalg.norm(heads, axis=1)


def slabs_around(seed, heads, noise=0.0, leak=0.0, slabs=400):
    """A polytope of slabs around heads, between which normals have only a share `leak`.

    Middles are those of the first head, off by `noise` errors.
    """
    rng = np.random.default_rng(seed)
    between = np.linalg.qr((heads[1:] - heads[0]).T)[0]
    normals = rng.standard_normal((slabs, heads.shape[1]))
    normals -= (1 - leak) * normals @ between @ between.T
    scale = rng.uniform(0.5, 1.0, slabs)
    middle = normals @ heads[0] + noise * scale * rng.standard_normal(slabs)
    return Polytope(normals, middle - 8 * scale, middle + 8 * scale, scale)


def sculpture_of(polytope, free):
    spectrum = polytope.spectrum()
    return Sculpture(polytope, spectrum, free, polytope.centre(spectrum, free), 0.0)


# The hull


@given(seed=st.integers(0, 2**32 - 1), heads=st.integers(1, 3))
def test_space_is_the_affine_hull_of_heads_that_no_slab_cuts(seed, heads):
    theta = np.random.default_rng(seed).standard_normal((heads, 16))
    hull = extract(sculpture_of(slabs_around(seed, theta), heads - 1), heads)
    assert hull.centre.shape == (16,)
    assert hull.basis.shape == (heads - 1, 16)
    np.testing.assert_allclose(hull.basis @ hull.basis.T, np.eye(heads - 1), atol=1e-10)
    np.testing.assert_allclose(hull.basis @ hull.centre, 0.0, atol=1e-9)
    np.testing.assert_allclose(distances(theta, hull), 0.0, atol=1e-6)
    assert hull.error < 1e-6
    assert hull.gap > 1e3


@given(seed=st.integers(0, 2**32 - 1), heads=st.integers(1, 4))
def test_heads_are_counted_by_the_directions_that_slabs_hardly_cut(seed, heads):
    theta = np.random.default_rng(seed).standard_normal((heads, 16))
    sculpture = sculpture_of(slabs_around(seed, theta, leak=0.05), heads - 1)
    hull = extract(sculpture, None)
    assert hull.heads == heads
    assert hull.clear
    known = extract(sculpture, heads)
    np.testing.assert_array_equal(hull.centre, known.centre)
    np.testing.assert_array_equal(hull.basis, known.basis)
    assert (hull.gap, hull.error) == (known.gap, known.error)
    assert hull.gap > 5


def test_points_are_the_centre_and_multiples_of_the_basis():
    basis = np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    hull = AffineHull(np.array([5.0, 0.0, 0.0]), basis, gap=9.0, error=0.0)
    np.testing.assert_array_equal(hull.points(np.array([2.0, 3.0])), [5.0, 2.0, 3.0])
    assert hull.points(np.zeros((4, 7, 2))).shape == (4, 7, 3)
    assert hull.heads == 3


def test_one_head_is_a_point():
    hull = AffineHull(np.array([5.0, 1.0]), np.zeros((0, 2)), gap=np.inf, error=0.0)
    assert hull.heads == 1
    assert hull.clear
    np.testing.assert_array_equal(hull.points(np.zeros((3, 0))), [[5.0, 1.0]] * 3)


@pytest.mark.parametrize(("gap", "clear"), [(1.99, False), (2.0, True), (50.0, True)])
def test_a_gap_is_clear_from_two_on(gap, clear):
    assert AffineHull(np.ones(2), np.array([[1.0, -1.0]]), gap, 0.0).clear is clear


@pytest.mark.parametrize("seed", range(3))
def test_heads_of_a_layer_are_counted_and_found(seed):
    heads, sculpture = sculpted(seed)
    for hull in (extract(sculpture, None), extract(sculpture, 2)):
        assert hull.heads == 2
        assert hull.clear
        assert distances(heads, hull).max() < 0.02
        assert np.linalg.norm(hull.basis) == pytest.approx(1.0)
        assert hull.basis @ hull.centre == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_third_head_that_is_not_there_shows_no_clear_gap(seed):
    _, sculpture = sculpted(seed)
    hull = extract(sculpture, 3)
    assert hull.heads == 3
    assert hull.gap < 2
    assert not hull.clear


# Its error


@pytest.mark.parametrize(
    ("seed", "kind"), [*((seed, "boolean") for seed in range(6)), (6, "gaussian"), (7, "gaussian")]
)
def test_error_is_an_upper_estimate_of_the_distance_of_the_heads(seed, kind):
    heads, sculpture = sculpted(seed, kind)
    hull = extract(sculpture, 2)
    farthest = distances(heads, hull).max()
    assert farthest < 1.5 * hull.error < 0.06
    assert hull.error < 5 * farthest


@pytest.mark.parametrize("heads", [1, 2])
def test_error_is_about_two_standard_deviations_of_independent_noise(heads):
    ratios = []
    for seed in range(20):
        theta = np.random.default_rng(seed).standard_normal((heads, 16))
        hull = extract(sculpture_of(slabs_around(seed, theta, noise=0.3), heads - 1), heads)
        away = theta[0] - hull.points(hull.basis @ (theta[0] - hull.centre))
        ratios.append(hull.error * np.linalg.norm(hull.centre) / np.linalg.norm(away))
    assert np.median(ratios) == pytest.approx(2.0, rel=0.2)


def test_error_halves_with_four_times_as_many_slabs():
    theta = np.random.default_rng(0).standard_normal((1, 16))
    few, many = (
        np.mean(
            [
                distance_of_halves(slabs_around(seed, theta, 0.3, slabs=slabs), 0)
                for seed in range(20)
            ]
        )
        for slabs in (400, 1600)
    )
    assert few / many == pytest.approx(2.0, rel=0.15)


def test_error_sees_a_direction_that_the_two_halves_do_not_share():
    # The halves take turns by error: one cannot see the first entry, the other not the second.
    turns = [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 1], [0, 0, 1]]
    normals, scale = np.array(turns * 4, dtype=float), np.linspace(0.9, 1.0, 24)
    middle = normals @ np.array([0.0, 0.0, 1.0])
    for order in (np.arange(24), [*range(0, 24, 2), *range(1, 24, 2)]):
        polytope = Polytope(normals, middle - 8, middle + 8, scale).part(order)
        assert distance_of_halves(polytope, free=1) == pytest.approx(1.0, abs=1e-6)
        assert distance_of_halves(polytope, free=2) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("angle", [0.0, 0.1, 1.0])
def test_a_turn_about_a_common_point_counts_once(angle):
    # Lines through (0, 1, 0), one along the first axis, the other turned towards the point.
    turned = [-np.sin(angle), np.cos(angle), 0.0]
    normals = np.array([[0, 1, 0], turned, [0, 0, 1], [0, 0, 1]] * 2)
    middle = normals @ np.array([0.0, 1.0, 0.0])
    polytope = Polytope(normals, middle - 8, middle + 8, np.ones(8))
    assert distance_of_halves(polytope, free=1) == pytest.approx(np.sin(angle), abs=1e-7)


def test_one_sided_slabs_do_not_count_in_the_error():
    _, sculpture = sculpted(0)
    polytope = sculpture.polytope
    assert not polytope.two_sided.all()
    alone = polytope.part(polytope.two_sided)
    assert distance_of_halves(polytope, 1) == distance_of_halves(alone, 1)
