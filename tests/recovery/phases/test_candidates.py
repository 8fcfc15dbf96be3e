import itertools
import math

import numpy as np
import oracles
import pytest
from cases import block_of, whitened
from hypothesis import given, settings
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.array.backend import namespace, to_numpy
from onelayer.heads import dense
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.phases import candidates
from onelayer.recovery.phases.candidates import SolveCandidates
from onelayer.recovery.phases.polytope import Polytope
from onelayer.recovery.phases.state import AffineHull


def space_through(points):
    """The affine hull of some points (m, d²), and their coordinates in it."""
    _, _, directions = np.linalg.svd(points[1:] - points[0])
    basis = directions[: len(points) - 1]
    centre = points[0] - (points[0] @ basis.T) @ basis
    return AffineHull(centre, basis, gap=np.inf, error=0.0), (points - centre) @ basis.T


def plain_space(heads, dim=2):
    """Along the first entries of the matrices, through 0."""
    return AffineHull(np.zeros(dim * dim), np.eye(dim * dim)[: heads - 1], gap=np.inf, error=0.0)


def posed_layer(seed=0, heads=2, n=400, dim=4, tokens=3, xp_array=np.asarray):
    """A random layer's examples, fitted and other ones, the hull of its heads, where they are."""
    layer = AttentionLayer.random(heads=heads, dim=dim, scale=3.0, seed=seed)
    X = inputs.gaussian(n, tokens, dim, seed=seed + 1)
    whole = whitened(xp_array(X), xp_array(layer(X)), None, False, False)
    root = np.linalg.inv(to_numpy(whole.whitening))
    heads_there = (root @ layer.attention @ root).reshape(heads, -1)
    hull, coordinates = space_through(heads_there)
    return whole.take(np.arange(n // 2)), whole.take(np.arange(n // 2, n)), hull, coordinates


def noise_problem(seed, heads, n=14, dim=2, xp_array=np.asarray):
    """Outputs that no layer explains, and a random hull of matrices."""
    rng = np.random.default_rng(seed)
    X, Y = rng.standard_normal((n, 3, dim)), rng.standard_normal((n, 3, 2))
    points = rng.standard_normal((heads, dim * dim))
    posed = whitened(xp_array(X), xp_array(Y), None, False, False)
    return posed, *space_through(points)


def box(hull, half):
    """Slabs along the hull alone: as a section they leave |z| ≤ half."""
    count = len(hull.basis)
    offset = hull.basis @ hull.centre
    return Polytope(hull.basis, offset - half, offset + half, np.ones(count))


def matrices(hull, coordinates, dim):
    return hull.points(coordinates).reshape(-1, dim, dim)


def squares_left(posed, hull, coordinates):
    """The sum of squares that the best projections for these heads leave over, by loops."""
    X, Y = to_numpy(posed.X), to_numpy(posed.Y)
    heads = matrices(hull, coordinates, posed.dim)
    return oracles.reduced_loss(X, Y, heads) * posed.equations


# The net


@st.composite
def sections(draw):
    """A hull of 1 to 3 dimensions and a polytope with a bounded section of many sides."""
    dimensions = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    hull = AffineHull(
        rng.standard_normal(4), np.linalg.qr(rng.standard_normal((4, 4)))[0][:dimensions], 9.0, 0.1
    )
    normals = np.concatenate([np.eye(4), rng.standard_normal((draw(st.integers(0, 8)), 4))])
    middle = normals @ hull.points(rng.standard_normal(dimensions))
    width = 0.2 + rng.random(len(normals))
    upper = np.where(rng.random(len(normals)) < 0.2, np.inf, middle + width)
    upper[:4] = (middle + width)[:4]
    return hull, Polytope(normals, middle - width, upper, width)


@given(section=sections())
@settings(max_examples=15)
def test_nets_lie_in_the_body_and_have_tuples_enough_but_not_too_many(section):
    hull, polytope = section
    points = SolveCandidates().grid(hull, polytope)
    assert points.shape[1] == len(hull.basis)
    assert len(points) >= hull.heads
    assert 1 <= math.comb(len(points), hull.heads) <= 20_000
    assert len(np.unique(points.round(9), axis=0)) == len(points)
    assert all(polytope.contains(hull.points(point), slack=1e-8) for point in points)


def test_a_net_of_one_dimension_is_an_even_grid():
    hull = plain_space(2)
    polytope = Polytope(np.eye(4)[:1], np.array([-2.0]), np.array([3.0]), np.ones(1))
    np.testing.assert_allclose(
        SolveCandidates().grid(hull, polytope)[:, 0], np.linspace(-2, 3, 41), atol=1e-9
    )


def test_a_net_is_as_fine_as_the_tuples_allow():
    hull = plain_space(3)
    for most, per_axis in ((4, 2), (83, 2), (84, 3), (20_000, 7), (10**9, 41)):
        assert len(SolveCandidates(most_tuples=most).grid(hull, box(hull, 1.0))) == per_axis**2


def test_one_head_has_one_candidate():
    empty = Polytope(np.eye(4), np.ones(4), -np.ones(4), np.ones(4))
    for polytope in (box(plain_space(2), 1.0), empty):
        assert SolveCandidates().grid(plain_space(1), polytope).shape == (1, 0)


@pytest.mark.parametrize("heads", [2, 3, 4])
def test_an_empty_section_has_no_net(heads):
    hull = plain_space(heads)
    polytope = Polytope(np.eye(4), -np.ones(4), np.array([1.0, 1.0, 1.0, -0.5]), np.ones(4))
    assert SolveCandidates().grid(hull, polytope) is None
    impossible = Polytope(
        np.eye(4)[[0, 0]], np.array([-1.0, 2.0]), np.array([1.0, 3.0]), np.ones(2)
    )
    assert SolveCandidates().grid(hull, impossible) is None


@pytest.mark.parametrize("heads", [2, 3, 4])
@pytest.mark.parametrize("upper", [1.0, np.inf])
def test_an_endless_section_has_no_net(heads, upper):
    hull = plain_space(heads)
    sides = heads - 2 if upper == 1.0 else heads - 1
    normals = np.eye(4)[[*range(sides), 3]]
    limits = np.full(len(normals), 1.0)
    limits[sides - 1] = upper
    polytope = Polytope(normals, -np.ones(len(normals)), limits, np.ones(len(normals)))
    assert SolveCandidates().grid(hull, polytope) is None


def test_a_section_too_small_for_as_many_points_as_heads_has_no_net():
    diagonals = np.array([[1.0, -1.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.0]])
    half = np.array([0.1, 2.0])
    polytope = Polytope(diagonals, -half, half, half)
    assert len(SolveCandidates().grid(plain_space(3), polytope)) >= 3
    coarse = SolveCandidates(most_per_axis=3)  # of nine only the middle lies inside
    assert coarse.grid(plain_space(3), polytope) is None


# The regressions on tuples


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_losses_are_those_of_plain_least_squares(xp_array, heads):
    posed, hull, _ = noise_problem(0, heads, xp_array=xp_array)
    apart = np.linspace(-3, 3, (heads + 2) * (heads - 1))
    points = np.random.default_rng(1).permutation(apart).reshape(heads + 2, heads - 1)
    tuples = np.array(list(itertools.combinations(range(heads + 2), heads)))
    found = candidates.losses(hull, points, tuples, posed)
    assert found.shape == (len(tuples),)
    Y = to_numpy(posed.Y).reshape(-1, 2)
    for chosen, loss in zip(tuples, found, strict=True):
        H = oracles.attended_tokens(to_numpy(posed.X), matrices(hull, points[chosen], 2))
        best, *_ = np.linalg.lstsq(H, Y, rcond=None)
        expected = float(np.sum((Y - H @ best) ** 2))
        assert loss == pytest.approx(expected, abs=1e-6 * np.sum(Y**2))
    assert heads == 1 or np.ptp(found) > 0.01


def test_losses_do_not_depend_on_how_tuples_and_examples_are_cut(monkeypatch):
    posed, hull, _ = noise_problem(0, 2, n=40)
    points = np.random.default_rng(1).standard_normal((9, 1))
    tuples = np.array(list(itertools.combinations(range(9), 2)))
    whole = candidates.losses(hull, points, tuples, posed)
    monkeypatch.setattr(candidates, "_CHUNK_BYTES", 5 * 8 * 4 * 4)
    parts = [block_of(posed, slice(start, start + 7)) for start in range(0, 40, 7)]
    monkeypatch.setattr(WhitenedExamples, "blocks", lambda posed, heads: tuple(parts))
    np.testing.assert_allclose(candidates.losses(hull, points, tuples, posed), whole, rtol=1e-9)


def test_the_order_of_a_tuple_does_not_matter():
    posed, hull, _ = noise_problem(0, 3)
    points = np.random.default_rng(1).standard_normal((3, 2))
    found = candidates.losses(hull, points, np.array(list(itertools.permutations(range(3)))), posed)
    np.testing.assert_allclose(found, found[0], rtol=1e-9)


def test_the_true_heads_leave_nothing_over():
    posed, _, hull, coordinates = posed_layer(heads=3)
    others = np.random.default_rng(0).standard_normal((4, 2))
    tuples = np.array(list(itertools.combinations(range(7), 3)))
    found = candidates.losses(hull, np.concatenate([coordinates, others]), tuples, posed)
    size = posed.equations  # outputs have unit mean square
    assert tuples[np.argmin(found)].tolist() == [0, 1, 2]
    assert abs(found.min()) < 1e-6 * size
    assert np.sort(found)[1] > 1e-3 * size


def test_two_equal_candidates_are_no_trouble():
    posed, hull, coordinates = noise_problem(0, 2)
    points = np.concatenate([coordinates[:1], coordinates[:1]])
    (found,) = candidates.losses(hull, points, np.array([[0, 1]]), posed)
    assert found == pytest.approx(squares_left(posed, hull, points[:1]), rel=1e-5)


# Steps inside the hull


def test_heads_at_coordinates_stand_side_by_side(xp_array):
    posed, hull, coordinates = noise_problem(0, 3, xp_array=xp_array)
    theta = candidates.stack(hull, coordinates, posed)
    assert namespace(theta) is namespace(posed.X)
    heads = to_numpy(dense.by_head(theta, 2))
    for head, z in zip(heads, coordinates, strict=True):
        expected = hull.centre + sum(x * axis for x, axis in zip(z, hull.basis, strict=True))
        np.testing.assert_allclose(head.ravel(), expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("heads", "seed"), [(2, 0), (2, 1), (3, 2)])
def test_normal_equations_have_the_slopes_of_the_reduced_loss(xp_array, heads, seed):
    posed, hull, coordinates = noise_problem(seed, heads, xp_array=xp_array)
    fit = varpro.fit(posed.batches(heads), candidates.stack(hull, coordinates, posed))
    directions = candidates._directions(hull, posed)
    _, gradient = candidates._normal_equations(fit, directions)
    assert gradient.shape == (heads * (heads - 1),)
    step = 1e-5
    for entry, slope in enumerate(gradient):
        move = np.zeros(heads * (heads - 1))
        move[entry] = step
        move = move.reshape(coordinates.shape)
        ahead, behind = (squares_left(posed, hull, coordinates + s * move) for s in (1, -1))
        assert -2 * slope == pytest.approx((ahead - behind) / (2 * step), rel=1e-5, abs=1e-5)
    assert abs(gradient).max() > 0.01


@pytest.mark.parametrize("heads", [2, 3])
def test_normal_equations_have_the_curvature_of_the_reduced_loss_where_nothing_is_left(heads):
    posed, _, hull, coordinates = posed_layer(heads=heads, n=60, dim=2)
    fit = varpro.fit(posed.batches(heads), candidates.stack(hull, coordinates, posed))
    normal, gradient = candidates._normal_equations(fit, candidates._directions(hull, posed))
    np.testing.assert_allclose(normal, normal.T, rtol=0, atol=1e-8 * abs(normal).max())
    assert abs(gradient).max() < 1e-8 * abs(normal).max()
    rng = np.random.default_rng(0)
    for _ in range(4):
        move = 1e-4 * rng.standard_normal(coordinates.shape)
        both = sum(squares_left(posed, hull, coordinates + s * move) for s in (1, -1))
        curved = float(move.ravel() @ normal @ move.ravel())
        assert both / 2 == pytest.approx(curved, rel=1e-3)


@pytest.mark.parametrize(("heads", "seed"), [(2, 0), (2, 1), (3, 2)])
def test_refinement_lowers_the_loss_and_stays_in_the_space(xp_array, heads, seed):
    posed, hull, coordinates = noise_problem(seed, heads, n=30, xp_array=xp_array)
    refined, fit = SolveCandidates(most_steps=4).refine(hull, coordinates, posed)
    before = squares_left(posed, hull, coordinates)
    after = squares_left(posed, hull, refined)
    assert after < 0.999 * before
    assert fit.loss * posed.equations == pytest.approx(after, rel=1e-8)
    points = to_numpy(dense.by_head(fit.theta, 2)).reshape(heads, -1)
    np.testing.assert_allclose(points, hull.points(refined), rtol=0, atol=1e-12)
    away = points - hull.centre
    assert abs(away - (away @ hull.basis.T) @ hull.basis).max() < 1e-12 * abs(away).max()


@pytest.mark.parametrize("seed", range(3))
def test_refinement_ends_where_the_loss_is_flat(seed):
    posed, hull, coordinates = noise_problem(seed, 2, n=30)
    _, fit = SolveCandidates().refine(hull, coordinates, posed)
    directions = candidates._directions(hull, posed)
    normal, gradient = candidates._normal_equations(fit, directions)
    # What a full step could gain, relative to what is left.
    gain = float(gradient @ np.linalg.lstsq(normal, gradient, rcond=None)[0])
    assert gain < 1e-2 * fit.loss * posed.equations


@pytest.mark.parametrize(("heads", "seed"), [(2, 0), (2, 1), (3, 2)])
def test_refinement_reaches_the_true_heads_from_nearby(xp_array, heads, seed):
    posed, _, hull, coordinates = posed_layer(seed, heads, n=120, xp_array=xp_array)
    start = coordinates + 0.3 * np.random.default_rng(seed).standard_normal(coordinates.shape)
    refined, fit = SolveCandidates().refine(hull, start, posed)
    np.testing.assert_allclose(refined, coordinates, rtol=0, atol=1e-6)
    assert fit.error < 1e-6


def test_refinement_leaves_the_true_heads_where_they_are():
    posed, _, hull, coordinates = posed_layer()
    refined, fit = SolveCandidates().refine(hull, coordinates, posed)
    np.testing.assert_allclose(refined, coordinates, rtol=0, atol=1e-9)
    assert fit.error < 1e-9


def test_one_head_cannot_be_refined():
    posed, _, hull, _ = posed_layer(heads=1)
    refined, fit = SolveCandidates().refine(hull, np.zeros((1, 0)), posed)
    assert refined.shape == (1, 0)
    assert fit.error < 1e-9


# All together


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "seed"), [(1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (3, 1)])
def test_heads_are_found_if_the_space_contains_them(heads, seed):
    posed, other, hull, coordinates = posed_layer(seed, heads)
    found = SolveCandidates().solve(hull, box(hull, 6.0), posed, other)
    order = sorted(range(heads), key=lambda i: tuple(found.coordinates[i]))
    expected = sorted(range(heads), key=lambda i: tuple(coordinates[i]))
    np.testing.assert_allclose(found.coordinates[order], coordinates[expected], rtol=0, atol=1e-6)
    assert found.held_out_error < 1e-6
    assert found.fit.error < 1e-6
    points = len(SolveCandidates().grid(hull, box(hull, 6.0)))
    assert found.tuples == math.comb(points, heads)


def test_heads_are_found_on_every_backend(xp_array):
    posed, other, hull, coordinates = posed_layer(n=120, xp_array=xp_array)
    found = SolveCandidates(most_per_axis=15, refined=1).solve(hull, box(hull, 6.0), posed, other)
    assert namespace(found.fit.theta) is namespace(posed.X)
    ends = np.sort(found.coordinates.ravel()), np.sort(coordinates.ravel())
    np.testing.assert_allclose(*ends, rtol=0, atol=1e-6)


def test_the_best_on_other_examples_is_the_answer():
    posed, hull, _ = noise_problem(0, 2, n=30)
    other, _, _ = noise_problem(1, 2, n=30)
    refined = []

    class Listening(SolveCandidates):
        def refine(self, *arguments):
            refined.append(super().refine(*arguments))
            return refined[-1]

    found = Listening().solve(hull, box(hull, 3.0), posed, other)
    errors = [varpro.held_out_error(fit, other) for _, fit in refined]
    assert len(errors) == 8
    assert found.held_out_error == min(errors) < max(errors)
    assert found.fit is refined[int(np.argmin(errors))][1]
    assert found.coordinates is refined[int(np.argmin(errors))][0]


def test_refinement_starts_at_the_tuples_with_the_least_losses():
    posed, hull, _ = noise_problem(0, 2)
    starts = []

    class Unrefined(SolveCandidates):
        def refine(self, hull, start, fitted):
            starts.append(start)
            theta = candidates.stack(hull, start, fitted)
            return start, varpro.fit(fitted.batches(2), theta)

    Unrefined(most_per_axis=6).solve(hull, box(hull, 2.0), posed, posed)
    grid = np.linspace(-2, 2, 6)[:, None]
    pairs = itertools.combinations(range(6), 2)
    all_losses = sorted(squares_left(posed, hull, grid[list(pair)]) for pair in pairs)
    mine = [squares_left(posed, hull, start) for start in starts]
    np.testing.assert_allclose(mine, all_losses[:8], rtol=1e-4)


def test_without_a_net_there_is_no_answer():
    posed, other, hull, _ = posed_layer()
    nowhere = Polytope(hull.basis, np.ones(1), -np.ones(1), np.ones(1))
    assert SolveCandidates().solve(hull, nowhere, posed, other) is None
