import numpy as np

from onelayer.array.backend import to_numpy
from onelayer.features.solvers import nested_sizes
from onelayer.features.solvers.nested_sizes import Columns

SIZES, TARGETS = [2, 3, 6], 2


def parts():
    """Right sides (s, t) of every size."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((size, TARGETS)) for size in SIZES]


def test_parts_stand_side_by_side_with_zeros_below(xp_array):
    columns = Columns(SIZES, TARGETS)
    matrix = columns.side_by_side([xp_array(part) for part in parts()])
    assert matrix.shape == (6, 6)
    for size, part, column in zip(SIZES, parts(), columns.split(matrix), strict=True):
        np.testing.assert_array_equal(to_numpy(column)[:size], part)
        np.testing.assert_array_equal(to_numpy(column)[size:], 0.0)


def test_rows_beyond_a_size_are_cleared(xp_array):
    columns = Columns(SIZES, TARGETS)
    cleared = to_numpy(columns.cleared(xp_array(np.ones((6, 6)))))
    expected = columns.side_by_side([np.ones((size, TARGETS)) for size in SIZES])
    np.testing.assert_array_equal(cleared, expected)


def test_sizes_can_be_left_behind():
    assert Columns(SIZES, TARGETS).after(2) == Columns([6], TARGETS)


def test_leading_blocks_of_one_factor_solve_every_size(xp_array):
    lower = np.tril(np.random.default_rng(1).standard_normal((6, 6))) + 4 * np.eye(6)
    matrix = lower @ lower.T
    columns = Columns(SIZES, TARGETS)
    right = columns.side_by_side([xp_array(part) for part in parts()])
    solved = columns.split(nested_sizes.solve(xp_array(lower), right, columns))
    for size, part, column in zip(SIZES, parts(), solved, strict=True):
        expected = np.linalg.solve(matrix[:size, :size], part)
        np.testing.assert_allclose(to_numpy(column)[:size], expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(to_numpy(column)[size:], 0.0)


def test_products_leave_out_what_is_zero(xp_array):
    columns = Columns(SIZES, TARGETS)
    panel = np.random.default_rng(2).standard_normal((6, 4))
    dual = columns.side_by_side(parts())
    weights = columns.weights(xp_array(panel), xp_array(dual))
    np.testing.assert_allclose(to_numpy(weights), panel.T @ dual, rtol=1e-12)
    fitted = xp_array(np.ones((6, 6)))
    columns.add_fitted(fitted, xp_array(panel), weights)
    expected = 1.0 + columns.cleared(panel @ panel.T @ dual)
    np.testing.assert_allclose(to_numpy(fitted), expected, rtol=1e-12)
