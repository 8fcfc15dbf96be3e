import re

import numpy as np
import pytest

from onelayer.array.backend import to_numpy
from onelayer.recovery import roles

MASK = np.array([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 0]], dtype=bool)
X = np.zeros((3, 4, 2))


def by_loops(mask, observed):
    """The roles, token by token."""
    found = np.zeros(mask.shape, int)
    for i, j in np.argwhere(mask):
        found[i, j] = 2 if observed[i, j] else 1
    return found


def roles_of(xp_array, mask, observed):
    pattern, by_example = roles.given(observed)
    mask = None if mask is None else xp_array(mask)
    return roles.of(mask, by_example, pattern, xp_array(X), 0)


def test_without_observed_the_roles_are_the_mask(xp_array):
    assert roles_of(xp_array, None, None) is None
    np.testing.assert_array_equal(to_numpy(roles_of(xp_array, MASK, None)), MASK)
    assert not roles.partly(None)
    assert not roles.partly(xp_array(MASK))
    assert roles.there(None) is roles.observed(None) is None


@pytest.mark.parametrize("mask", [None, MASK], ids=["whole", "masked"])
@pytest.mark.parametrize(
    "observed", [[False, True, True, False], np.array([[0, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1]])]
)
def test_observed_is_for_all_examples_or_for_each(xp_array, mask, observed):
    found = roles_of(xp_array, mask, observed)
    whole = np.ones((3, 4), bool) if mask is None else mask
    expected = by_loops(whole, np.broadcast_to(observed, (3, 4)))
    np.testing.assert_array_equal(to_numpy(found), expected)
    np.testing.assert_array_equal(to_numpy(roles.there(found)), whole)
    np.testing.assert_array_equal(to_numpy(roles.observed(found)), expected == 2)
    assert roles.partly(found)
    assert roles.sample(xp_array(X)).dtype == found.dtype


@pytest.mark.parametrize(
    ("name", "mask", "places"),
    [
        ("first", None, [0, 0, 0]),
        ("first", MASK, [0, 1, 0]),
        ("last", None, [3, 3, 3]),
        ("last", MASK, [2, 3, 2]),
    ],
)
def test_first_and_last_tokens_leave_out_padding(xp_array, name, mask, places):
    found = to_numpy(roles_of(xp_array, mask, name))
    np.testing.assert_array_equal(np.argwhere(found == roles.OBSERVED)[:, 1], places)
    assert (found != roles.PADDING).sum() == (12 if mask is None else MASK.sum())


def refused(message, mask, observed):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        roles_of(np.asarray, mask, observed)


def test_other_values_are_refused():
    message = "observed is 'frist', expected one of 'first', 'last'; did you mean 'first'?"
    refused(message, None, "frist")
    message = "leaves example 1 without a token, expected at least one True in every row"
    some = np.ones((3, 4), bool)
    some[1] = False
    refused(f"observed {message}", None, some)
    some[1, 0] = True  # where there is padding
    refused(f"observed, without padding, {message}", MASK, some)
    with pytest.raises(ValueError, match="observed has entries other than 0 and 1"):
        roles.given([0, 2])
    message = "observed has shape (3,), expected (4,) or (examples, tokens): one entry per token"
    with pytest.raises(ValueError, match=re.escape(message)):
        roles.check_pattern(np.ones(3, bool), 4)
