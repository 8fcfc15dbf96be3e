from fractions import Fraction

import numpy as np
import pytest

from onelayer.array import checks
from onelayer.array.backend import namespace, to_numpy


@pytest.mark.parametrize("value", [3, np.int8(3), np.uint64(3)])
def test_whole_numbers_become_int(value):
    assert checks.positive_int(value, "heads") == 3
    assert type(checks.positive_int(value, "heads")) is int


@pytest.mark.parametrize("value", [0, -2, np.int64(-1)])
def test_numbers_below_one_are_refused(value):
    with pytest.raises(ValueError, match=r"heads is .*, expected a whole number of at least 1"):
        checks.positive_int(value, "heads")


@pytest.mark.parametrize("value", [2.5, 2.0, True, np.True_, "2", None, [2]])
def test_what_is_no_whole_number_is_refused(value):
    with pytest.raises(TypeError, match=r"heads is .*, expected a whole number of at least 1"):
        checks.positive_int(value, "heads")


@pytest.mark.parametrize("value", [0.5, np.float32(0.5), Fraction(1, 2)])
def test_positive_numbers_become_float(value):
    assert checks.positive_number(value, "scale") == 0.5
    assert type(checks.positive_number(value, "scale")) is float


@pytest.mark.parametrize("value", [0, -1, 0.0, np.inf, np.nan])
def test_numbers_not_above_zero_or_not_finite_are_refused(value):
    with pytest.raises(ValueError, match=r"scale is .*, expected a finite number above 0"):
        checks.positive_number(value, "scale")


@pytest.mark.parametrize("value", ["2", None, True, 1j, np.complex128(1), [1.0]])
def test_what_is_no_real_number_is_refused(value):
    with pytest.raises(TypeError, match=r"scale is .*, expected a finite number above 0"):
        checks.positive_number(value, "scale")


def test_numbers_are_copied(xp_array):
    given = xp_array(np.array([1, 2], dtype=np.float32))
    numbers = checks.numbers_of(given, "beta")
    assert type(numbers) is np.ndarray
    assert numbers.dtype == np.float64
    given[0] = 5
    assert numbers.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("value", "error"), [([np.nan], ValueError), (["a"], TypeError)])
def test_what_is_no_array_of_numbers_is_refused(value, error):
    with pytest.raises(error, match="beta has"):
        checks.numbers_of(value, "beta")


def test_token_arrays_pass(xp_array):
    X = xp_array(np.ones((2, 3, 4), dtype=np.float32))
    assert checks.token_array(X) is X


@pytest.mark.parametrize("shape", [(), (3,), (3, 4), (2, 3, 4, 5)])
def test_token_arrays_of_other_than_three_axes_are_refused(xp_array, shape):
    with pytest.raises(ValueError, match=r"Y has shape \(.*\), expected three axes \(examples, to"):
        checks.token_array(xp_array(np.ones(shape)), "Y")


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_empty_token_arrays_are_refused(xp_array, shape):
    with pytest.raises(ValueError, match=r"expected at least one example, token and dim"):
        checks.token_array(xp_array(np.ones(shape)))


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "float32", "float64"])
def test_plain_token_arrays_are_left_as_they_are(xp_array, dtype):
    X = xp_array(np.ones((2, 3, 4), dtype=dtype))
    assert checks.plain_token_array(X) is X


def test_plain_token_arrays_on_disk_stay_there(tmp_path):
    np.save(tmp_path / "X.npy", np.ones((2, 3, 4), dtype=np.int8))
    X = np.load(tmp_path / "X.npy", mmap_mode="r")
    assert checks.plain_token_array(X) is X


def test_lists_become_plain_token_arrays():
    X = checks.plain_token_array([[[1, 2]], [[3, 4]]])
    assert type(X) is np.ndarray
    assert X.dtype == np.int64
    assert X.shape == (2, 1, 2)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.ones((3, 4)), ValueError, r"Y has shape \(3, 4\), expected three axes \(examples, to"),
        (np.ones((2, 0, 4), dtype=int), ValueError, r"Y has shape \(2, 0, 4\), expected at least "),
        (np.full((1, 2, 3), np.nan), ValueError, "Y has 6 NaN or infinite entries, expected finit"),
        (np.full((1, 2, 3), -np.inf), ValueError, "Y has 6 NaN or infinite entries, expected fini"),
        (np.ones((1, 2, 3)) * 1j, TypeError, "Y has dtype complex128, expected real numbers"),
        (np.full((1, 2, 3), "a"), TypeError, "Y has dtype <U1, expected real numbers"),
        (np.full((1, 2, 3), None), TypeError, "Y has dtype object, expected real numbers"),
        ([[[1.0], [2.0, 3.0]]], ValueError, "Y is a ragged sequence, expected a rectangular arra"),
    ],
)
def test_what_is_no_plain_token_array_is_refused(value, error, message):
    with pytest.raises(error, match=message):
        checks.plain_token_array(value, "Y")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_entry_that_is_not_finite_is_enough_to_refuse_tokens(xp_array, bad):
    X = np.ones((2, 3, 4), dtype=np.float32)
    X[1, 2, 3] = bad
    with pytest.raises(ValueError, match="X has 1 NaN or infinite entries, expected finite number"):
        checks.plain_token_array(xp_array(X))


def test_no_mask_stays_no_mask():
    assert checks.key_mask(None, np.ones((2, 3, 4))) is None


def test_masks_join_the_examples_whatever_they_came_as(xp_array):
    X = xp_array(np.ones((2, 3, 4)))
    values = [[1, 0, 1], [0, 1, 0]]
    for mask in (values, np.array(values, dtype=bool), xp_array(np.array(values))):
        array = checks.key_mask(mask, X)
        assert namespace(array) is namespace(X)
        assert to_numpy(array).dtype == bool
        np.testing.assert_array_equal(to_numpy(array), values)


@pytest.mark.parametrize("shape", [(3,), (3, 2), (2, 4), (2, 3, 3)])
def test_masks_of_other_shapes_are_refused(xp_array, shape):
    X, mask = xp_array(np.ones((2, 3, 4))), xp_array(np.ones(shape, dtype=bool))
    message = r"mask has shape \(.*\), expected \(2, 3\): one entry per token of X"
    with pytest.raises(ValueError, match=message):
        checks.key_mask(mask, X)


def test_example_without_a_token_is_named(xp_array):
    mask = xp_array(np.array([[True, False], [False, False], [False, False]]))
    message = "mask leaves example 1 without a token, expected at least one True in every row"
    with pytest.raises(ValueError, match=message):
        checks.key_mask(mask, xp_array(np.ones((3, 2, 1))))


def test_masks_of_other_numbers_are_refused():
    with pytest.raises(ValueError, match="mask has entries other than 0 and 1, expected Booleans"):
        checks.key_mask([[0.0, -np.inf]], np.ones((1, 2, 3)))
