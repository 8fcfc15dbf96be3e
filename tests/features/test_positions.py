import numpy as np
import oracles
import pytest
from example_sets import gaussian

from onelayer.array.backend import device, namespace, to_numpy
from onelayer.features.positions import KINDS, PositionalEncoding

ADDED = ["sinusoidal", "learned-random"]


def codes(kind, count, dim, seed=0):
    """The encodings (count, encoded_dim) that zero tokens get."""
    return PositionalEncoding(kind, dim, count, seed)(np.zeros((1, count, dim)))[0]


def test_without_a_kind_tokens_stay_as_they_are(xp_array):
    tokens = xp_array(gaussian(2, 3, 4))
    positions = PositionalEncoding(None, dim=4, longest=3)
    assert positions(tokens) is tokens
    assert positions.encoded_dim == 4


@pytest.mark.parametrize("dim", [2, 3, 6, 7])
def test_sinusoidal_codes_match_the_loops(dim):
    expected = [oracles.sinusoidal_position(position, dim) for position in range(9)]
    np.testing.assert_allclose(codes("sinusoidal", 9, dim), expected, rtol=0, atol=1e-14)


def test_sinusoidal_codes_need_two_dimensions():
    with pytest.raises(ValueError, match="got tokens of n_features = 1, expected at least 2"):
        PositionalEncoding("sinusoidal", dim=1, longest=3)


@pytest.mark.parametrize("kind", ADDED)
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_codes_are_added_to_every_example(xp_array, kind, dtype):
    tokens = gaussian(3, 5, 4, dtype=dtype)
    encoded = PositionalEncoding(kind, dim=4, longest=5, seed=7)(xp_array(tokens))
    assert namespace(encoded) is namespace(xp_array(tokens))
    assert encoded.dtype == xp_array(tokens).dtype
    expected = tokens + codes(kind, 5, 4, seed=7).astype(dtype)
    np.testing.assert_allclose(to_numpy(encoded), expected, rtol=0, atol=1e-6)
    assert PositionalEncoding(kind, dim=4, longest=5).encoded_dim == 4


@pytest.mark.parametrize("kind", ADDED)
@pytest.mark.parametrize("dim", [2, 5])
def test_every_code_has_unit_norm(kind, dim):
    np.testing.assert_allclose(np.linalg.norm(codes(kind, 50, dim), axis=1), 1.0, rtol=1e-14)


@pytest.mark.parametrize("kind", ADDED)
@pytest.mark.parametrize("dim", [2, 5])
def test_no_two_positions_share_a_code(kind, dim):
    table = codes(kind, 50, dim)
    gaps = np.linalg.norm(table[:, None] - table, axis=2) + np.eye(50)
    assert gaps.min() > 1e-4


@pytest.mark.parametrize("kind", ADDED)
def test_longer_sets_than_at_fit_begin_with_the_same_codes(kind):
    encoding = PositionalEncoding(kind, dim=3, longest=4, seed=5)
    longer = encoding(np.zeros((1, 9, 3)))
    np.testing.assert_array_equal(longer[:, :4], encoding(np.zeros((1, 4, 3))))


def test_seed_decides_on_random_codes():
    first, again, other = (codes("learned-random", 4, 3, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_onehot_appends_one_coordinate_for_each_position_at_fit(xp_array, count, dtype):
    tokens = gaussian(3, count, 2, dtype=dtype)
    positions = PositionalEncoding("onehot", dim=2, longest=5)
    encoded = positions(xp_array(tokens))
    assert encoded.dtype == xp_array(tokens).dtype
    assert positions.encoded_dim == 7
    encoded = to_numpy(encoded)
    np.testing.assert_array_equal(encoded[:, :, :2], tokens)
    np.testing.assert_array_equal(encoded[:, :, 2:], np.stack([np.eye(5)[:count]] * 3))


def test_onehot_refuses_positions_that_fit_did_not_see(xp_array):
    message = (
        "X has sets of 4 tokens, expected at most 3: "
        "positions='onehot' has no code for positions that fit did not see"
    )
    with pytest.raises(ValueError, match=message):
        PositionalEncoding("onehot", dim=2, longest=3)(xp_array(gaussian(1, 4, 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_live_where_the_tokens_do(kind):
    strict = pytest.importorskip("array_api_strict")
    tokens = strict.asarray(gaussian(2, 3, 4), device=strict.Device("device1"))
    assert device(PositionalEncoding(kind, dim=4, longest=3)(tokens)) == strict.Device("device1")


@pytest.mark.parametrize("kind", ["rotary", "", 1])
def test_unknown_kinds_are_refused(kind):
    message = (
        f"positions is {kind!r}, expected one of None, 'sinusoidal', 'learned-random', 'onehot'"
    )
    with pytest.raises(ValueError, match=message):
        PositionalEncoding(kind, dim=4, longest=3)
