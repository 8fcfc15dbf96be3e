import numpy as np

from onelayer.array.backend import to_numpy
from onelayer.data.chunks import InMemory
from onelayer.heads import dense
from onelayer.heads.subspace import Subspace


def test_directions_are_projected_on_the_subspace(xp_array):
    basis = np.linalg.qr(np.random.default_rng(0).standard_normal((9, 2)))[0].T
    space = Subspace(3, xp_array(basis.copy()), InMemory(()))
    direction = np.random.default_rng(1).standard_normal((3, 6))
    once = to_numpy(space.project(xp_array(direction)))
    np.testing.assert_allclose(to_numpy(space.project(xp_array(once))), once, atol=1e-12)
    expected = dense.flatten(direction, 3) @ basis.T @ basis
    np.testing.assert_allclose(dense.flatten(once, 3), expected)
    moved, same = space.retract(xp_array(direction), xp_array(once))
    np.testing.assert_allclose(to_numpy(moved), direction + once)
    assert same is space
