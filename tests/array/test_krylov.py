"""Block Krylov iteration against a singular value decomposition."""

import numpy as np
import pytest

from onelayer.array import krylov
from onelayer.array.backend import to_numpy


@pytest.mark.parametrize("most", [1, 4])
def test_leading_singular_vectors_are_found(xp_array, most):
    rng = np.random.default_rng(0)
    left, _ = np.linalg.qr(rng.standard_normal((40, 30)))
    right, _ = np.linalg.qr(rng.standard_normal((30, 30)))
    values = 2.0 ** -np.arange(30)
    T = xp_array((left * values) @ right.T)
    heard = []
    start = xp_array(rng.standard_normal((5, 30)))
    found, strengths = krylov.block_krylov(
        lambda rows: rows @ T.T, lambda rows: rows @ T, start, 4, most, heard.append
    )
    np.testing.assert_allclose(to_numpy(strengths)[:3], values[:3], rtol=1e-3)
    assert abs(to_numpy(found)[:3] @ left[:, :3]).diagonal().min() > 0.999
    assert heard == [0.0, 0.25, 0.5, 0.75]
