import numpy as np

from onelayer.array import krylov
from onelayer.array.backend import to_numpy


def symmetric(values, seed=0):
    """A symmetric matrix with these eigenvalues."""
    basis, _ = np.linalg.qr(np.random.default_rng(seed).standard_normal((len(values),) * 2))
    return (basis * values) @ basis.T


def product_with(xp_array, matrix, used=None):
    """Products of a matrix with vectors in any shape, counted in `used`."""

    def product(vector):
        if used is not None:
            used.append(vector)
        flat = to_numpy(vector).reshape(-1)
        return xp_array((matrix @ flat).reshape(vector.shape))

    return product


def test_conjugate_gradients_solve(xp_array):
    matrix = symmetric(np.linspace(1.0, 5.0, 12))
    right = np.random.default_rng(1).standard_normal((3, 4))
    used = []
    product = product_with(xp_array, matrix, used)
    path, count = krylov.conjugate_gradients(product, xp_array(right), 1e-24, 100)
    expected = np.linalg.solve(matrix, right.ravel()).reshape(3, 4)
    np.testing.assert_allclose(to_numpy(path[-1]), expected, atol=1e-11)
    assert count == len(used) <= 13
    # The path has the iterates after 1, 2, 4, .. products, each nearer than the one before.
    assert len(path) == 1 + len([power for power in (1, 2, 4, 8) if power < count])
    gaps = [np.linalg.norm(to_numpy(one) - expected) for one in path]
    assert gaps == sorted(gaps, reverse=True)


def test_conjugate_gradients_stop_as_they_are_told():
    matrix, right = symmetric(np.linspace(1.0, 500.0, 30)), np.ones(30)
    product = product_with(np.asarray, matrix)
    assert krylov.conjugate_gradients(product, right, 1e-24, 5)[1] == 5
    (solution, *_), count = krylov.conjugate_gradients(product, right, 0.0, 9, stop=lambda: True)
    assert count == 0
    assert not solution.any()
    (zero,), count = krylov.conjugate_gradients(product, 0 * right, 0.0, 9)
    assert count == 0
    assert not zero.any()


def test_a_preconditioner_saves_products():
    sizes = np.geomspace(1.0, 1e4, 40)
    matrix, right = symmetric(np.linspace(1.0, 2.0, 40)) * sizes * sizes[:, None], np.ones(40)
    product = product_with(np.asarray, matrix)
    path, count = krylov.conjugate_gradients(
        product, right, 1e-20, 200, precondition=lambda vector: vector / sizes**2
    )
    np.testing.assert_allclose(matrix @ path[-1], right, atol=1e-6)
    assert count < 30
    assert krylov.conjugate_gradients(product, right, 1e-20, 200)[1] > 2 * count


def test_iterations_are_in_the_precision_of_the_reference():
    kinds = []

    def product(vector):
        kinds.append(vector.dtype)
        return 2 * vector

    single = np.zeros(1, dtype=np.float32)
    path, _ = krylov.conjugate_gradients(product, np.ones(3), 1e-6, 9, reference=single)
    assert set(kinds) == {np.dtype(np.float32)}
    assert path[-1].dtype == np.float64
    np.testing.assert_allclose(path[-1], 0.5)


def small_residual(values, residual):
    return residual < 1e-8 * values[-1]


def test_lanczos_finds_the_ends_of_the_spectrum(xp_array):
    values = np.concatenate([[1e-3], np.linspace(1.0, 4.0, 30), [9.0]])
    matrix = symmetric(values)
    start = xp_array(np.random.default_rng(1).standard_normal((4, 8)))
    product = product_with(xp_array, matrix)
    found = krylov.lanczos(product, start, 32, small_residual, (5, 32))
    assert found.converged
    np.testing.assert_allclose(found.values[[0, -1]], [1e-3, 9.0], rtol=1e-6)
    vector = to_numpy(found.vector).ravel()
    np.testing.assert_allclose(matrix @ vector, 1e-3 * vector, atol=1e-6)
    few = krylov.lanczos(product, start, 32, small_residual, (2, 3))
    assert not few.converged
    assert len(few.values) == 3
    assert few.values[0] > 1e-3  # an upper bound


def test_lanczos_steps_stay_in_a_subspace():
    matrix = np.diag([0.0, 1.0, 2.0, 3.0])
    inside = np.array([0.0, 1.0, 1.0, 1.0])
    found = krylov.lanczos(
        lambda vector: matrix @ vector,
        inside,
        3,
        small_residual,
        (20, 20),
        project=lambda vector: vector * inside,
    )
    assert found.converged  # there are no more directions
    np.testing.assert_allclose(found.values, [1.0, 2.0, 3.0], atol=1e-12)
