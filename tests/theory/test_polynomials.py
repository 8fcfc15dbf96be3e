import itertools
import math

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer import inputs
from onelayer.theory import polynomials, targets

RNG = np.random.default_rng(7)
DIM = 3
BETA = np.array([0.5, -1.0, 0.75])
X = inputs.sphere(4, 5, DIM, seed=3)


def drawn(degrees, dim, seed):
    """A tensor for each pair of degrees."""
    rng = np.random.default_rng(seed)
    return {rs: rng.normal(size=(dim,) * sum(rs)) for rs in degrees}


degrees = st.tuples(st.integers(0, 3), st.integers(0, 3))
some_degrees = st.sets(degrees, min_size=1, max_size=4).filter(lambda found: found != {(0, 0)})
seeds = st.integers(0, 2**32 - 1)


@given(some_degrees, seeds, st.integers(1, 3))
def test_values_are_those_of_the_formula(found, seed, dim):
    given_tensors = drawn(found, dim, seed)
    tensors, size = polynomials.checked(given_tensors)
    assert size == dim
    tokens = inputs.gaussian(2, 4, dim, seed)
    values = polynomials.values(tokens[:, 0], tokens[:, 1:], tensors)
    expected = [[oracles.polynomial(x[0], key, given_tensors) for key in x[1:]] for x in tokens]
    np.testing.assert_allclose(values, expected, rtol=1e-10, atol=1e-10)


@given(some_degrees, seeds)
def test_moments_are_exact_on_the_circle(found, seed):
    """The corners of a polygon have the moments of the circle: each comes to the sixth power."""
    tensors, _ = polynomials.checked(drawn(found, 2, seed))
    angles = 2 * np.pi * np.arange(14) / 14
    corners = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    values = polynomials.values(corners, np.tile(corners, (14, 1, 1)), tensors)
    expected = values.mean(), values.var(axis=1).mean(), values.mean(axis=1).var()
    assert polynomials.moments(tensors, 2) == pytest.approx(expected, abs=1e-10)


def test_blocks_do_not_show():
    f = targets.polynomial({(1, 3): RNG.normal(size=(12,) * 4), (0, 1): RNG.normal(size=12)})
    examples = inputs.sphere(400, 11, 12, seed=1)  # more than two blocks of 4 MB
    alone = [float(f(example[None])[0]) for example in examples]
    np.testing.assert_allclose(f(examples), alone, atol=1e-12)


# Tensors made symmetric, by going through all permutations, and special cases.


def test_norms_are_of_symmetric_tensors():
    tensor = RNG.normal(size=(DIM,) * 5)
    explicit = oracles.symmetric(oracles.symmetric(tensor, [0, 1]), [2, 3, 4])
    f = targets.polynomial({(2, 3): tensor, (1, 0): BETA, (0, 0): 2.0})
    assert f.tensor_norms == pytest.approx(
        {(2, 3): np.sum(explicit**2), (1, 0): np.sum(BETA**2), (0, 0): 4.0}
    )
    assert f.norm == pytest.approx(3**4.5 * 64 * np.sum(explicit**2) + 4 * np.sum(BETA**2) + 4.0)


def correlation_tensor(q, rotation, beta):
    """The tensor of <x_0, S x_i>^q <β, x_i>, the legs of the query first."""
    dim = len(beta)
    tensor = np.zeros((dim,) * (2 * q + 1))
    for index in itertools.product(range(dim), repeat=2 * q + 1):
        pairs = zip(index[:q], index[q : 2 * q], strict=True)
        tensor[index] = math.prod(rotation[pair] for pair in pairs) * beta[index[-1]]
    return tensor


@pytest.mark.parametrize(("q", "dim"), [(1, 2), (1, 4), (2, 2), (2, 3), (3, 2)])
def test_correlation_as_a_polynomial(q, dim):
    rng = np.random.default_rng(q)
    rotation, beta = np.linalg.qr(rng.normal(size=(dim, dim)))[0], rng.normal(size=dim)
    tensor = correlation_tensor(q, rotation, beta)
    f = targets.rotated_correlation(q, dim, rotation, beta)
    general = targets.polynomial({(q, q + 1): tensor})
    assert general.tensor_norms == pytest.approx(f.tensor_norms)
    assert f.tensor_norms[q, q + 1] < np.sum(tensor**2)
    examples = inputs.sphere(6, 4, dim, seed=q)
    np.testing.assert_allclose(general(examples), f(examples), atol=1e-12)
    assert general.mean(3) == pytest.approx(f.mean(3), abs=1e-12)
    assert general.variance(3) == pytest.approx(f.variance(3))


def test_a_power_as_a_polynomial():
    cube = np.einsum("i,j,k->ijk", BETA, BETA, BETA)
    for general, f in [
        (targets.polynomial({(0, 3): cube}), targets.average_power(3, DIM, BETA)),
        (targets.polynomial({(3, 0): cube}), targets.query_only(3, DIM, BETA)),
    ]:
        assert general.tensor_norms == pytest.approx(f.tensor_norms)
        assert general.degree == f.degree == 3
        np.testing.assert_allclose(general(X), f(X), atol=1e-12)
        assert general.variance(5) == pytest.approx(f.variance(5))


# Errors at the door


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ({(1, 1): np.ones(3)}, r"f_\(1, 1\) has shape \(3,\), expected 2 axes"),
        ({(1, 1): np.ones((3, 2))}, r"axes of sizes \[2, 3\], expected one size"),
        ({(0, 1): np.ones(3), (1, 0): np.ones(2)}, r"axes of sizes \[2, 3\], expected one size"),
        ({(0, 0): 1.0}, r"at least one tensor with r \+ s > 0"),
        ({}, r"at least one tensor with r \+ s > 0"),
        ({(0, 1): []}, "the dimension of the coefficients is 0, expected a whole number"),
        ({(0, -1): 1.0}, "s is -1, expected a whole number"),
    ],
)
def test_wrong_values(coefficients, message):
    with pytest.raises(ValueError, match=message):
        polynomials.checked(coefficients)


@pytest.mark.parametrize(
    ("coefficients", "message"),
    [
        ([np.ones(3)], "coefficients is a list, expected a mapping"),
        ({1: np.ones(3)}, r"the key 1, expected pairs \(r, s\)"),
        ({(0, 1): ["a"]}, r"f_\(0, 1\) has dtype <U1, expected real"),
    ],
)
def test_wrong_types(coefficients, message):
    with pytest.raises(TypeError, match=message):
        polynomials.checked(coefficients)
