from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from cases import block_of, random_mask, solved_case

from onelayer import AttentionLayer, inputs
from onelayer.data.chunks import InMemory
from onelayer.heads import dense, low_rank
from onelayer.recovery import sensitivity
from onelayer.recovery.gauss_newton import jacobian, varpro

OPTIONS = [
    {},
    {"bias": True},
    {"masked": True},
    {"causal": True, "bias": True},
    {"rank": 1},
    {"rank": 2, "bias": True},
    {"heads": 3, "out_dim": 1, "n": 70},
    {"out_dim": 5, "scale": 6.0},
    {"heads": 1, "dim": 2},
]


def solved(n=60, tokens=3, masked=False, causal=False, noise=0.0, **options):
    """A layer's own outputs seen with its own attention matrices."""
    layer = AttentionLayer.random(**{"heads": 2, "dim": 3, "scale": 2.0, "seed": 1, **options})
    X = inputs.gaussian(n, tokens, layer.dim, seed=2)
    rng = np.random.default_rng(3)
    case = solved_case(layer, X, random_mask(rng, n, tokens) if masked else None, causal)
    return replace(case, Y=case.Y + noise * rng.standard_normal(case.Y.shape))


def tangent_basis(theta, dim, rank):
    """Orthonormal directions that the rank allows, (p·m·d, count)."""
    tangent = low_rank.tangent(theta, dim, rank)
    units = np.eye(theta.size).reshape(-1, *theta.shape)
    projector = np.stack([tangent.project(unit).ravel() for unit in units])
    values, vectors = np.linalg.eigh(projector)
    return vectors[:, values > 0.5]


@cache
def with_jacobian(options):
    """A noisy case, its rank, and its dense reduced Jacobian."""
    options = dict(options)
    case = solved(noise=0.01, **{"n": 40, **options})
    return case, options.get("rank"), case.reduced_jacobian(case.fit().weights)


def allowed(case, strengths, rank):
    """A basis of the directions that the rank allows, heads at equal strength."""
    theta, dim = case.fit().theta, case.X.shape[2]
    units = np.broadcast_to(np.repeat(1 / strengths, dim), theta.shape).reshape(-1, 1)
    return units * tangent_basis(theta, dim, rank)


def look(case, rank=None, seed=0, xp_array=np.asarray):
    return sensitivity.sensitivity(case.fit(xp_array), rank, np.random.default_rng(seed))


@pytest.fixture(params=["formed", "never formed"])
def formed(request, monkeypatch):
    """S as it is formed, and as Lanczos steps and conjugate gradients see it."""
    if request.param == "never formed":
        monkeypatch.setattr(sensitivity, "_CHEAP", 0.0)
        monkeypatch.setattr(sensitivity, "_BEARABLE", 0.0)
        return False
    return True


# Against the dense Jacobian


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_extremes_are_those_of_the_dense_jacobian(formed, options):
    case, rank, J = with_jacobian(tuple(options.items()))
    found = look(case, rank)
    assert found.formed is formed
    values = np.linalg.svd(J @ allowed(case, found.strengths, rank), compute_uv=False)
    exact = formed
    assert found.extremes[1] == pytest.approx(values[0], rel=1e-6 if exact else 0.05)
    assert found.extremes[0] == pytest.approx(values[-1], rel=1e-6 if exact else 0.3)
    assert found.extremes[0] > 1e-3 * found.extremes[1]
    assert found.determined.all()


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_solutions_are_those_of_the_normal_equations(formed, options):
    case, rank, J = with_jacobian(tuple(options.items()))
    found = look(case, rank)
    basis = allowed(case, found.strengths, rank)
    noise = np.random.default_rng(4).standard_normal(len(J))
    right = (J.T @ noise).reshape(case.fit().theta.shape)
    expected = basis @ (np.linalg.pinv(J @ basis) @ noise)
    solution = np.ravel(found.solve(right.astype(found.products.weights.dtype)))
    within = 1e-6 if formed else 0.6  # errors are known by their size
    assert np.linalg.norm(solution - expected) < within * np.linalg.norm(expected)


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.1, 1e-2])
def test_solutions_have_the_weak_heads_part_too(formed, size):
    layer = AttentionLayer.random(heads=2, dim=3, seed=1)
    layer.projection[1] *= size
    case = solved_case(layer, inputs.gaussian(40, 3, 3, seed=2))
    J = case.reduced_jacobian(case.fit().weights)
    noise = np.random.default_rng(6).standard_normal(len(J))
    found = look(case)
    solution = found.solve((J.T @ noise).reshape(3, 6).astype(found.products.weights.dtype))
    expected = (np.linalg.pinv(J) @ noise).reshape(3, 6)
    error = np.linalg.norm((solution - expected)[:, 3:])
    assert error < 0.3 * np.linalg.norm(expected[:, 3:])


def test_strengths_of_heads_are_how_strongly_the_outputs_answer_to_them():
    case = solved(n=20, heads=3)
    J = case.reduced_jacobian(case.fit().weights).reshape(-1, 3, 3, 3)  # rows, p, m, d
    strengths = np.sqrt(np.sum(J**2, axis=(0, 1, 3)))
    np.testing.assert_allclose(look(case).strengths, strengths / strengths.max(), rtol=1e-6)


def test_strengths_without_s_are_those_of_a_random_direction():
    case = solved()
    fit = case.fit()
    dim = case.X.shape[2]
    start = np.random.default_rng(1).standard_normal(fit.theta.shape)
    index = dense.head_index(fit.theta, dim)
    found = sensitivity._strengths(jacobian.jacobian(fit), start, index)
    answers = []
    for head in range(fit.heads):
        alone = np.zeros_like(start)
        alone[:, head * dim : (head + 1) * dim] = start[:, head * dim : (head + 1) * dim]
        moved = case.push(alone, fit.weights)
        answers.append(np.linalg.norm(moved) / np.linalg.norm(alone))
    np.testing.assert_allclose(found, np.array(answers) / max(answers))


@pytest.mark.parametrize("size", [1e-2, 1e-4])
def test_a_weak_head_is_not_free_for_being_weak(formed, size):
    layer = AttentionLayer.random(heads=2, dim=3, seed=1)
    layer.projection[1] *= size
    found = look(solved_case(layer, inputs.gaussian(60, 3, 3, seed=2)))
    assert found.formed is formed
    assert found.determined.all()
    assert found.strengths[1] == pytest.approx(size, rel=0.8)
    assert found.extremes[0] > 1e-3 * found.extremes[1]


def test_sensitivity_is_the_same_on_every_backend(xp_array):
    case = solved(bias=True)
    expected, found = look(case), look(case, xp_array=xp_array)
    np.testing.assert_allclose(found.extremes, expected.extremes, rtol=1e-6)
    assert found.determined.tolist() == [True, True]


def test_blocks_without_examples_change_nothing():
    case = solved(bias=True)
    posed = case.problem()
    parts = block_of(posed, slice(0, 60)), block_of(posed, slice(60, 60))
    batches = replace(posed.batches(2), chunks=InMemory((parts,)))
    fit = varpro.fit(batches, case.fit().theta)
    found = sensitivity.sensitivity(fit, None, np.random.default_rng(0))
    np.testing.assert_allclose(found.extremes, look(case).extremes, rtol=1e-9)


def test_small_problems_are_formed_and_large_ones_are_not(monkeypatch):
    case = solved()
    assert look(case).formed
    monkeypatch.setattr(sensitivity, "_CHEAP", 0.0)
    assert not look(case).formed
    monkeypatch.setattr(sensitivity, "_MOST_LANCZOS_STEPS", 2)
    assert look(case).formed  # two steps leave it undecided
    monkeypatch.setattr(sensitivity, "_BEARABLE", 0.0)
    assert not look(case).easy


@pytest.mark.slow
def test_rounding_outside_of_the_tangent_space_does_not_grow(monkeypatch):
    layer = AttentionLayer.random(heads=3, dim=16, rank=2, seed=1)
    fit = solved_case(layer, inputs.boolean(400, 3, 16, seed=2)).fit()
    tangent = low_rank.tangent(fit.theta, 16, 2)
    start = tangent.project(np.random.default_rng(0).standard_normal(fit.theta.shape))
    scale = np.ones((1, fit.theta.shape[1]))
    monkeypatch.setattr(sensitivity, "_LANCZOS_ACCURACY", 0.0)  # as many steps as it may take
    smallest = []
    for kind in (np.float32, np.float64):
        products = jacobian.jacobian(fit, single=kind is np.float32)
        arguments = products, tangent, start.astype(kind), scale.astype(kind)
        values, _, _ = sensitivity._extreme_eigenvalues(*arguments)
        smallest.append(values[0] / values[-1])
    assert smallest[0] == pytest.approx(smallest[1], rel=1e-4)
    assert smallest[1] > 1e-3


# Which heads are free


def undetermined(case, rank=None, seed=0):
    found = look(case, rank, seed)
    return found.extremes[0] / (found.extremes[1] or 1.0), np.flatnonzero(~found.determined)


def test_two_equal_heads_are_free(formed):
    layer = AttentionLayer.random(heads=3, dim=3, seed=1)
    layer.attention[2] = layer.attention[0]
    _, heads = undetermined(solved_case(layer, inputs.gaussian(60, 3, 3, seed=2)))
    assert {0, 2} <= set(heads)


@pytest.mark.parametrize("bias", [False, True])
def test_heads_without_projection_are_free(formed, bias):
    layer = AttentionLayer.random(heads=4, dim=3, seed=1, bias=bias)
    layer.projection[1] = layer.projection[3] = 0.0
    smallest, heads = undetermined(solved_case(layer, inputs.gaussian(90, 3, 3, seed=2)))
    assert heads.tolist() == [1, 3]
    assert smallest < 1e-6


@pytest.mark.parametrize("heads", [1, 2])
def test_single_tokens_leave_all_heads_free(formed, heads):
    smallest, found = undetermined(solved(tokens=1, heads=heads))
    assert found.tolist() == list(range(heads))
    assert smallest < 1e-6


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_a_coordinate_that_never_varies_leaves_heads_free_if_it_is_taken_for_one(formed, fill):
    layer = AttentionLayer.random(heads=2, dim=4, seed=1)
    X = inputs.boolean(200, 3, 4, seed=2)
    X[..., 3] = fill
    smallest, heads = undetermined(solved_case(layer, X))
    assert heads.tolist() == [0, 1]
    assert smallest < 1e-6


def test_fewer_equations_than_unknowns_leave_heads_free(formed):
    smallest, heads = undetermined(solved(n=3, out_dim=1))
    assert heads.tolist() == [0, 1]
    assert smallest < 1e-6


def test_solutions_have_no_part_along_free_directions():
    layer = AttentionLayer.random(heads=2, dim=3, seed=1)
    layer.projection[1] = 0.0
    case = solved_case(layer, inputs.gaussian(60, 3, 3, seed=2))
    solution = look(case).solve(np.ones(case.fit().theta.shape))
    assert abs(solution[:, 3:]).max() < 1e-6 * abs(solution[:, :3]).max()
