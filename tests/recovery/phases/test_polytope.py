import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from onelayer.recovery.phases.polytope import Polytope

INFINITE = np.inf


def body_of(normals, lower, upper, error=None):
    """A polytope of slabs given as lists."""
    arrays = (np.array(values, dtype=float) for values in (normals, lower, upper))
    return Polytope(*arrays, np.ones(len(lower)) if error is None else np.array(error, dtype=float))


def cube(dim=3, centre=0.0, half=1.0):
    middle = np.zeros(dim) + centre
    return body_of(np.eye(dim), middle - half, middle + half)


def random_body(seed, dim, slabs, one_sided=0, away=1.0):
    """A bounded polytope around a point at a distance from 0; the last slabs are one-sided."""
    rng = np.random.default_rng(seed)
    normals = rng.standard_normal((slabs + one_sided, dim))
    middle = normals @ (away * rng.standard_normal(dim))
    half = rng.uniform(0.1, 1.0, (2, slabs + one_sided))
    upper = middle + half[1]
    upper[slabs:] = INFINITE
    error = rng.uniform(0.1, 1.0, slabs + one_sided)
    error[slabs:] = 0.0
    return Polytope(normals, middle - half[0], upper, error)


@st.composite
def bounded_bodies(draw):
    """Small bodies with corners, around 0 or away from it."""
    dim = draw(st.integers(1, 3))
    return random_body(
        draw(st.integers(0, 2**32 - 1)),
        dim,
        slabs=dim + draw(st.integers(0, 2)),
        one_sided=draw(st.integers(0, 2)),
        away=draw(st.sampled_from([0.0, 1.0, 10.0])),
    )


def corners(polytope):
    return oracles.vertices(polytope.normals, polytope.lower, polytope.upper)


def around(polytope, seed):
    """Points in a polytope and around it."""
    rng = np.random.default_rng(seed)
    ends = corners(polytope)
    middle = ends.mean(axis=0)
    steps = rng.uniform(-1.5, 1.5, (20, 1)) * (ends[rng.integers(len(ends), size=20)] - middle)
    return middle + steps


def is_in_all_slabs(polytope, point):
    slabs = zip(polytope.normals, polytope.lower, polytope.upper, strict=True)
    return all(low <= oracles.dot(normal, point) <= high for normal, low, high in slabs)


# Membership


@given(polytope=bounded_bodies(), seed=st.integers(0, 99))
def test_a_body_contains_what_is_in_all_of_its_slabs(polytope, seed):
    points = around(polytope, seed)
    expected = [is_in_all_slabs(polytope, point) for point in points]
    assert [polytope.contains(point) for point in points] == expected
    assert set(expected) == {False, True}


def test_slack_is_allowed_on_both_sides():
    polytope = body_of([[1, 0], [0, 2]], [0, 0], [1, 1])
    for outside in ([1.1, 0.2], [-0.1, 0.2], [0.5, 0.55], [0.5, -0.05]):
        assert not polytope.contains(np.array(outside), slack=0.09)
        assert polytope.contains(np.array(outside), slack=0.11)


def test_a_point_may_be_a_matrix():
    polytope = body_of([[0, 0, 1, 0]], [1], [2])
    assert polytope.contains(np.array([[9, 9], [1.5, 9]]))
    assert not polytope.contains(np.array([[9, 1.5], [9, 9]]))


def test_a_one_sided_slab_has_no_upper_end():
    polytope = body_of([[1, 0], [0, 1]], [0, 0], [1, INFINITE])
    np.testing.assert_array_equal(polytope.two_sided, [True, False])
    assert polytope.contains(np.array([0.5, 1e9]))
    assert not polytope.contains(np.array([0.5, -1e-9]))


def test_part_is_the_body_of_some_slabs():
    polytope = random_body(0, dim=3, slabs=4, one_sided=2)
    for kept in (np.array([4, 0, 2]), np.array([True, False, True, False, False, True])):
        part = polytope.part(kept)
        np.testing.assert_array_equal(part.normals, polytope.normals[kept])
        np.testing.assert_array_equal(part.lower, polytope.lower[kept])
        np.testing.assert_array_equal(part.upper, polytope.upper[kept])
        np.testing.assert_array_equal(part.error, polytope.error[kept])


# Support


@given(polytope=bounded_bodies(), seed=st.integers(0, 99))
def test_support_is_reached_at_a_corner(polytope, seed):
    ends = corners(polytope)
    for direction in np.random.default_rng(seed).standard_normal((3, polytope.normals.shape[1])):
        assert polytope.support(direction) == pytest.approx((ends @ direction).max(), abs=1e-7)


def test_support_of_a_matrix_direction():
    assert cube(4).support(np.array([[1.0, -2.0], [3.0, 0.0]])) == pytest.approx(6.0)


def test_support_is_infinite_where_a_body_has_no_end():
    half_space = body_of([[1, 1]], [1], [INFINITE])
    assert half_space.support(np.array([1.0, 1.0])) == INFINITE
    assert half_space.support(np.array([1.0, -1.0])) == INFINITE
    assert half_space.support(np.array([-1.0, -1.0])) == pytest.approx(-1.0)
    strip = body_of([[1, 1]], [1], [2])
    assert strip.support(np.array([1.0, 1.0])) == pytest.approx(2.0)
    assert strip.support(np.array([1.0, -1.0])) == INFINITE


@pytest.mark.parametrize(
    "empty",
    [
        body_of([[1, 0], [1, 0]], [0, 2], [1, 3]),
        body_of([[1, 0], [-1, 0]], [1, 0], [INFINITE, INFINITE]),
        body_of([[1, 0], [0, 1], [1, 1]], [0, 0, 3], [1, 1, INFINITE]),
    ],
)
def test_an_empty_body_has_no_support_and_no_nearest_point(empty):
    for direction in ([1.0, 0.0], [0.0, 1.0], [-1.0, 2.0]):
        assert empty.support(np.array(direction)) == -INFINITE
    assert empty.minimum_norm() is None


# The nearest point to 0


@given(polytope=bounded_bodies())
def test_nearest_point_is_in_the_body_and_no_corner_is_nearer(polytope):
    point = polytope.minimum_norm()
    assert polytope.contains(point, slack=1e-6)
    # <g, x - g> ≥ 0 for all corners x, so for the whole polytope: g is the projection of 0 on it.
    assert ((corners(polytope) - point) @ point).min() > -1e-6 * (1 + point @ point)


@pytest.mark.parametrize("seed", range(5))
def test_nearest_point_is_that_of_least_distance_programming(seed):
    polytope = random_body(seed, dim=6, slabs=8, one_sided=4, away=2.0)
    above = polytope.two_sided
    faces = np.concatenate([polytope.normals, -polytope.normals[above]])
    limits = np.concatenate([polytope.lower, -polytope.upper[above]])
    # Lawson and Hanson: the least |x| with faces @ x ≥ limits, from non-negative least squares.
    system = np.concatenate([faces.T, limits[None]])
    target = np.eye(7)[6]
    weights, _ = nnls(system, target)
    left = system @ weights - target
    expected = -left[:6] / left[6]
    np.testing.assert_allclose(polytope.minimum_norm(), expected, atol=1e-4)
    assert np.linalg.norm(expected) > 0.1


@given(
    centre=st.lists(st.floats(-5, 5), min_size=2, max_size=5),
    half=st.floats(0.01, 3),
    scale=st.sampled_from([1.0, 1e3]),
)
def test_nearest_point_of_a_box_is_found_entry_by_entry(centre, half, scale):
    centre, half = np.array(centre) * scale, half * scale
    expected = np.clip(0.0, centre - half, centre + half)
    found = cube(len(centre), centre, half).minimum_norm()
    # The solver knows the squared norm to 1e-8, so that a point at 0 is known to 1e-4.
    np.testing.assert_allclose(found, expected, atol=5e-4 * scale)


def test_nearest_point_of_a_half_space_is_on_its_normal():
    normal = np.array([1.0, -2.0, 2.0])
    point = body_of([normal], [3.0], [INFINITE]).minimum_norm()
    np.testing.assert_allclose(point, 3.0 * normal / 9.0, atol=1e-7)
    np.testing.assert_allclose(body_of([normal], [-3.0], [INFINITE]).minimum_norm(), 0.0, atol=1e-7)


def test_nearest_point_of_a_thin_body_is_near_the_projection_on_the_hull():
    rng = np.random.default_rng(1)
    heads = rng.standard_normal((2, 6))
    between = (heads[1] - heads[0]) / np.linalg.norm(heads[1] - heads[0])
    normals = rng.standard_normal((40, 6))
    normals -= np.outer(normals @ between, between)
    middle = normals @ heads[0]
    point = body_of(normals, middle - 1e-4, middle + 1e-4).minimum_norm()
    # The same inner product with every head.
    np.testing.assert_allclose(heads @ point, point @ point, atol=1e-3)
    assert point @ point > 0.1


# Spectrum and centre


@given(seed=st.integers(0, 2**32 - 1), dim=st.integers(1, 5), more=st.integers(0, 5))
def test_spectrum_is_that_of_the_slabs_in_units_of_their_errors(seed, dim, more):
    polytope = random_body(seed, dim, slabs=dim + more, one_sided=3)
    spectrum = polytope.spectrum()
    rows = [n / e for n, e in zip(polytope.normals[:-3], polytope.error[:-3], strict=True)]
    expected = np.linalg.svd(np.array(rows), compute_uv=False)[::-1] / np.sqrt(dim + more)
    np.testing.assert_allclose(spectrum.values, expected, atol=1e-7 * expected[-1])
    np.testing.assert_allclose(spectrum.directions @ spectrum.directions.T, np.eye(dim), atol=1e-12)
    for value, direction in zip(spectrum.values, spectrum.directions, strict=True):
        rms = np.sqrt(np.mean([oracles.dot(row, direction) ** 2 for row in rows]))
        assert value == pytest.approx(rms, abs=1e-7 * expected[-1])


def test_a_direction_that_no_slab_cuts_has_the_value_zero():
    spectrum = body_of([[1, 0, 0], [0, 1, 0]], [0, 0], [1, 1]).spectrum()
    np.testing.assert_allclose(spectrum.values, np.sqrt([0, 0.5, 0.5]), atol=1e-12)
    np.testing.assert_allclose(abs(spectrum.directions[0]), [0, 0, 1], atol=1e-12)


@given(seed=st.integers(0, 2**32 - 1), dim=st.integers(1, 5), free=st.integers(0, 4))
def test_centre_is_the_least_squares_middle_off_the_free_directions(seed, dim, free):
    free = min(free, dim - 1)
    polytope = random_body(seed, dim, slabs=2 * dim + 4, one_sided=3)
    spectrum = polytope.spectrum()
    centre = polytope.centre(spectrum, free)
    rows = polytope.normals[:-3] / polytope.error[:-3, None]
    middle = ((polytope.lower + polytope.upper) / 2)[:-3] / polytope.error[:-3]
    thin = spectrum.directions[free:]
    best, *_ = np.linalg.lstsq(rows @ thin.T, middle, rcond=None)
    np.testing.assert_allclose(centre, best @ thin, rtol=1e-6, atol=1e-8)
    np.testing.assert_allclose(spectrum.directions[:free] @ centre, 0.0, atol=1e-8)
    if free == 0:
        np.testing.assert_allclose(centre, np.linalg.lstsq(rows, middle, rcond=None)[0], atol=1e-6)


def test_centre_finds_the_point_that_all_middles_share():
    rng = np.random.default_rng(2)
    normals, point = rng.standard_normal((30, 4)), rng.standard_normal(4)
    error = rng.uniform(0.1, 1.0, 30)
    polytope = Polytope(normals, normals @ point - 8 * error, normals @ point + 8 * error, error)
    np.testing.assert_allclose(polytope.centre(polytope.spectrum(), 0), point, atol=1e-12)


def test_centre_listens_to_slabs_by_their_errors():
    polytope = body_of([[1], [1]], [-1, 9], [1, 11], error=[1.0, 3.0])
    # Weights 1/error²: (0 · 9 + 10 · 1) / 10.
    np.testing.assert_allclose(polytope.centre(polytope.spectrum(), 0), [1.0], rtol=1e-12)


# Smaller bodies


@given(polytope=bounded_bodies(), seed=st.integers(0, 99), across=st.integers(1, 3))
def test_a_section_contains_what_the_body_contains_in_its_space(polytope, seed, across):
    dim = polytope.normals.shape[1]
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((dim, min(across, dim))))
    point = corners(polytope).mean(axis=0)
    section = polytope.section(point, basis.T)
    assert section.normals.shape == (len(polytope.normals), min(across, dim))
    np.testing.assert_array_equal(section.error, polytope.error)
    np.testing.assert_array_equal(section.two_sided, polytope.two_sided)
    steps = rng.standard_normal((20, min(across, dim)))
    expected = [polytope.contains(point + step @ basis.T) for step in steps]
    assert [section.contains(step) for step in steps] == expected
    assert section.contains(np.zeros(min(across, dim)), slack=1e-9)


def test_a_section_of_a_cube_is_a_square():
    section = cube(3).section(np.array([0.0, 0.0, 0.5]), np.eye(3)[:2])
    ends = section.support(np.array([1.0, 1.0])), section.support(np.array([-1.0, 0.0]))
    assert ends == pytest.approx((2.0, 1.0))
    assert cube(3).section(np.array([0.0, 0.0, 1.5]), np.eye(3)[:2]).minimum_norm() is None


def noisy_slabs(seed):
    """200 slabs 8 errors wide, their middles off by about one error, and 5 one-sided ones."""
    rng = np.random.default_rng(seed)
    normals, point = rng.standard_normal((205, 4)), rng.standard_normal(4)
    error = rng.uniform(0.1, 1.0, 205)
    middle = normals @ point + error * rng.standard_normal(205)
    lower, upper = middle - 8 * error, middle + 8 * error
    upper[200:], error[200:] = INFINITE, 0.0
    return Polytope(normals, lower, upper, error)


@given(seed=st.integers(0, 2**32 - 1), most=st.sampled_from([10, 100, 1000]))
def test_a_narrowed_body_has_its_centre_and_slabs_narrower_by_one_factor(seed, most):
    polytope = noisy_slabs(seed)
    centre = polytope.centre(polytope.spectrum(), 0)
    thin = polytope.narrowed(centre, most)
    assert thin.contains(centre, slack=1e-12)
    assert thin.two_sided.all()
    place = [int(np.flatnonzero((polytope.normals == n).all(axis=1))[0]) for n in thin.normals]
    assert len(place) == len(set(place)) == min(most, 160)
    np.testing.assert_array_equal(thin.error, polytope.error[place])
    middle = (polytope.lower + polytope.upper)[place] / 2
    np.testing.assert_allclose((thin.lower + thin.upper) / 2, middle, atol=1e-12)
    reach = (thin.upper - thin.lower) / (2 * thin.error)
    np.testing.assert_allclose(reach, reach[0], rtol=1e-9)
    assert reach[0] < 4


def test_a_narrowed_body_is_of_the_nearest_four_fifths_with_the_least_errors():
    polytope = noisy_slabs(3)
    centre = polytope.centre(polytope.spectrum(), 0)
    distance = [
        abs(oracles.dot(normal, centre) - (low + high) / 2) / error
        for normal, low, high, error in zip(
            polytope.normals[:200],
            polytope.lower[:200],
            polytope.upper[:200],
            polytope.error[:200],
            strict=True,
        )
    ]
    nearest = sorted(range(200), key=lambda slab: distance[slab])[:160]
    thin = polytope.narrowed(centre, 1000)
    np.testing.assert_array_equal(np.sort(thin.error), np.sort(polytope.error[nearest]))
    reach = ((thin.upper - thin.lower) / (2 * thin.error))[0]
    assert max(distance[slab] for slab in nearest) <= reach * (1 + 1e-9)
    assert reach <= sorted(distance)[160] * (1 + 1e-9)
    few = polytope.narrowed(centre, 20)
    np.testing.assert_array_equal(np.sort(few.error), np.sort(polytope.error[nearest])[:20])


def test_narrowed_slabs_no_longer_contain_zero():
    # As wide as their errors may be, slabs say nothing: 0 is in all of them.
    rng = np.random.default_rng(4)
    normals, point = rng.standard_normal((200, 4)), np.array([1.0, 0.0, 0.0, 0.0])
    middle = normals @ point + 0.05 * rng.standard_normal(200)
    polytope = body_of(normals, middle - 8, middle + 8)
    np.testing.assert_allclose(polytope.minimum_norm(), 0.0, atol=1e-6)
    nearest = polytope.narrowed(polytope.centre(polytope.spectrum(), 0), 1000).minimum_norm()
    assert np.linalg.norm(nearest - point) < 0.1
