import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from onelayer.recovery.equal_rows import distinct, first_equal, row_keys

small = st.integers(-1, 1)


@given(st.lists(st.tuples(small, small, small), min_size=1, max_size=12))
def test_rows_are_equal_if_they_are_in_all_arrays(rows):
    pairs, last = np.array(rows)[:, :2], np.array(rows)[:, 2]
    expected = [rows.index(row) for row in rows]
    assert first_equal(pairs, last).tolist() == expected
    assert distinct(pairs, last).tolist() == sorted(set(expected))


def test_zero_has_no_sign_and_rounding_is_as_asked():
    values = np.array([[0.0, 1.0], [-0.0, 1.0], [1e-12, 1.0], [-1e-12, 1.0]])
    assert first_equal(values).tolist() == [0, 0, 2, 3]
    assert len(set(row_keys(values, decimals=9))) == 1


def test_rows_need_not_lie_together_in_memory():
    values = np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]])
    assert first_equal(np.asfortranarray(values)).tolist() == [0, 1, 0]
