import tracemalloc

import numpy as np
import pytest
from example_sets import gaussian, ragged, random_mask, small_raggeds
from hypothesis import given

from onelayer.array import backend, blocks
from onelayer.array.backend import device, namespace, to_numpy
from onelayer.data.sets import SetRules, Sets, as_sets, is_collection_of_sets, joined, single_tokens

ALL = slice(0, None)


def objects(examples):
    """A one-dimensional array of arrays."""
    array = np.empty(len(examples), dtype=object)
    array[:] = examples
    return array


def on_disk(tmp_path, X):
    np.save(tmp_path / "X.npy", X)
    return np.load(tmp_path / "X.npy", mmap_mode="r")


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_arrays_come_back_in_blocks(xp_array, dtype):
    X = gaussian(5, 3, 2, dtype=dtype)
    sets = as_sets(xp_array(X))
    assert (len(sets), sets.dim, sets.longest) == (5, 2, 3)
    tokens, mask = sets.block(slice(1, 4))
    assert mask is None
    assert tokens.dtype == xp_array(X).dtype
    assert namespace(tokens) is namespace(xp_array(X))
    np.testing.assert_array_equal(to_numpy(tokens), X[1:4])


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint8"])
def test_whole_numbers_become_floating_point_block_by_block(xp_array, dtype):
    X = xp_array(np.ones((4, 3, 2), dtype=dtype))
    sets = as_sets(X)
    assert sets.tokens is X
    assert sets.block(slice(0, 2))[0].dtype == sets.sample.dtype == namespace(X).float64
    np.testing.assert_array_equal(to_numpy(sets.block(ALL)[0]), np.ones((4, 3, 2)))


@pytest.mark.parametrize("dtype", ["bool", "int64", "f8"])
def test_masks_are_cut_along(xp_array, dtype):
    mask = np.array([[1, 1, 0], [1, 1, 1], [1, 0, 1]])
    sets = as_sets(xp_array(gaussian(3, 3, 2)), xp_array(mask.astype(dtype)))
    found = sets.block(slice(1, 3))[1]
    assert found.dtype == namespace(found).bool
    np.testing.assert_array_equal(to_numpy(found), mask[1:] == 1)


def test_lists_may_be_masks(xp_array):
    sets = as_sets(xp_array(gaussian(2, 3, 2)), [[1, 1, 0], [1, 0, 1]])
    assert to_numpy(sets.block(slice(1, 2))[1]).tolist() == [[True, False, True]]


@pytest.mark.slow
@given(examples=small_raggeds())
def test_lists_are_padded_within_a_block(xp_array, examples):
    sets = as_sets([xp_array(example) for example in examples.examples])
    assert (len(sets), sets.longest) == examples.mask.shape
    assert sets.dim == examples.X.shape[2]
    tokens, mask = sets.block(ALL)
    there = np.ones(examples.mask.shape, bool) if mask is None else to_numpy(mask)
    np.testing.assert_array_equal(there, examples.mask)
    zeroed = np.where(examples.mask[:, :, None], examples.X, 0.0)
    np.testing.assert_array_equal(to_numpy(tokens), zeroed)


def test_blocks_of_a_list_are_no_longer_than_they_need_to_be(xp_array):
    examples = ragged([2, 4, 3, 3, 5], dim=2).examples
    sets = as_sets([xp_array(example) for example in examples])
    assert sets.sample.shape == (1, 2, 2)
    tokens, mask = sets.block(slice(0, 3))
    assert tokens.shape == (3, 4, 2)
    assert to_numpy(mask).sum(axis=1).tolist() == [2, 4, 3]
    tokens, mask = sets.block(slice(2, 4))
    assert mask is None
    np.testing.assert_array_equal(to_numpy(tokens), np.stack(examples[2:4]))


@pytest.mark.parametrize(
    "form",
    [list, tuple, objects, iter, lambda examples: [example.tolist() for example in examples]],
    ids=["list", "tuple", "objects", "iterator", "nested lists"],
)
def test_all_collections_of_arrays_are_the_same(form):
    examples = ragged([2, 4], dim=3).examples
    tokens, mask = as_sets(form(examples)).block(ALL)
    np.testing.assert_array_equal(tokens[0, :2], examples[0])
    np.testing.assert_array_equal(tokens[1], examples[1])
    assert mask.sum(axis=1).tolist() == [2, 4]


@pytest.mark.parametrize(
    ("dtypes", "expected"), [("f4 f4", "float32"), ("f4 f8", "float64"), ("i8 f4", "float64")]
)
def test_lists_take_the_widest_of_their_dtypes(xp_array, dtypes, expected):
    sets = as_sets([xp_array(np.ones((2, 3), dtype=dtype)) for dtype in dtypes.split()])
    for array in (sets.sample, sets.block(ALL)[0], sets.block(slice(1, 2))[0]):
        assert array.dtype == getattr(namespace(array), expected)


def test_first_examples_of_an_array_and_its_mask(xp_array):
    X, mask = gaussian(4, 3, 2), np.array([[1, 1, 0], [1, 0, 1], [1, 1, 1], [1, 1, 1]]) == 1
    first = as_sets(xp_array(X), xp_array(mask))[:2]
    assert len(first) == 2
    tokens, there = first.block(ALL)
    np.testing.assert_array_equal(to_numpy(tokens), np.where(mask[:2, :, None], X[:2], 0.0))
    np.testing.assert_array_equal(to_numpy(there), mask[:2])
    assert as_sets(xp_array(X))[:3].block(ALL)[1] is None


def test_first_examples_of_a_list(xp_array):
    examples = ragged([2, 4, 3], dim=2).examples
    first = as_sets([xp_array(example) for example in examples])[:2]
    assert len(first) == 2
    np.testing.assert_array_equal(to_numpy(first.block(ALL)[0])[1], examples[1])


@pytest.mark.parametrize("masked", [False, True])
def test_examples_can_be_cut_like_an_array_and_joined_again(xp_array, masked):
    X, mask = gaussian(5, 3, 2), random_mask(np.random.default_rng(0), 5, 3) if masked else None
    sets = as_sets(xp_array(X), None if mask is None else xp_array(mask))
    assert sets.shape == (5, 3, 2)
    parts = [sets[:2, ...], sets[2:3], sets[3:, ...]]
    assert [part.shape for part in parts] == [(2, 3, 2), (1, 3, 2), (2, 3, 2)]
    for found, expected in zip(joined(parts).block(ALL), sets.block(ALL), strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            np.testing.assert_array_equal(to_numpy(found), to_numpy(expected))


def test_a_part_of_a_list_has_room_for_the_longest():
    sets = as_sets(ragged([2, 4, 3], dim=2).examples)
    assert sets[:1].shape == (1, 4, 2)


def test_examples_are_placed_with_their_masks(monkeypatch):
    placed = []
    monkeypatch.setattr(
        backend, "place", lambda array, device: placed.append((array, device)) or -array
    )
    X, mask = gaussian(2, 3, 2), np.ones((2, 3), dtype=int)
    there = Sets(X, mask, 2, 3).placed("there")
    assert (placed[0][0] is mask, placed[0][1]) == (True, "there")
    np.testing.assert_array_equal(there.tokens, -X)
    np.testing.assert_array_equal(there.mask, -mask)
    for found, expected in zip(as_sets(list(X)).placed("there").tokens, X, strict=True):
        np.testing.assert_array_equal(found, -expected)


def test_sample_is_one_example(xp_array):
    X = gaussian(4, 3, 2, dtype="f4")
    sample = as_sets(xp_array(X)).sample
    assert sample.dtype == xp_array(X).dtype
    np.testing.assert_array_equal(to_numpy(sample), X[:1])


def test_a_single_token_counts_as_often_as_asked(xp_array):
    X = gaussian(4, 3)
    for tokens in (1, 2):
        sets = single_tokens(xp_array(X), tokens)
        assert (len(sets), sets.dim, sets.longest) == (4, 3, tokens)
        found, mask = sets.block(slice(1, 3))
        assert mask is None
        np.testing.assert_array_equal(to_numpy(found), np.stack([X[1:3]] * tokens, axis=1))
    assert single_tokens(xp_array(X)).longest == 2


@pytest.mark.parametrize(
    ("X", "expected"),
    [
        (np.ones((2, 3, 4)), True),
        (np.ones((2, 3, 4, 5)), True),
        (np.ones((2, 3)), False),
        (np.ones(2), False),
        ([np.ones((2, 3)), np.ones((4, 3))], True),
        ((np.ones((2, 3)), np.ones((4, 3))), True),
        ([np.ones(3), np.ones((2, 3))], True),  # and `as_sets` says what is wrong with it
        ([np.ones(3)], False),
        ([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]], True),
        ([[np.ones(2), np.ones(2)]], True),
        ([[1.0, 2.0]], False),
        ([[]], False),
        ([], False),
        (objects([np.ones((2, 3)), np.ones((4, 3))]), True),
        (np.array([["a", "b"]], dtype=object), False),
        ("text", False),
        (None, False),
    ],
)
def test_what_is_a_collection_of_sets(X, expected):
    assert is_collection_of_sets(X) is expected


def test_arrays_of_every_backend_are_collections_of_sets(xp_array):
    assert is_collection_of_sets(xp_array(gaussian(2, 3, 4)))
    assert is_collection_of_sets([xp_array(gaussian(3, 4))])
    assert not is_collection_of_sets(xp_array(gaussian(3, 4)))


def test_blocks_live_where_the_examples_do():
    strict = pytest.importorskip("array_api_strict")
    elsewhere = strict.Device("device1")
    X, mask = gaussian(2, 3, 4), np.array([[True, True, False]] * 2)
    forms = [
        as_sets(strict.asarray(X, device=elsewhere), mask),
        as_sets([strict.asarray(example, device=elsewhere) for example in (X[0], X[1, :2])]),
    ]
    for sets in forms:
        assert [device(array) for array in sets.block(ALL)] == [elsewhere] * 2


# At the door


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 3, 2, 1)])
def test_arrays_with_other_axes_are_refused(xp_array, shape):
    message = r"X has shape \(4.*\), expected three axes \(examples, tokens, dim\)"
    with pytest.raises(ValueError, match=message):
        as_sets(xp_array(np.ones(shape)))


@pytest.mark.parametrize("shape", [(0, 3, 2), (4, 3, 0)])
def test_empty_arrays_are_refused(xp_array, shape):
    message = r"X has shape \(\d, 3, \d\), expected at least one example and one dimension"
    with pytest.raises(ValueError, match=message):
        as_sets(xp_array(np.ones(shape)))


def test_a_query_without_keys_is_refused(xp_array):
    expected = "expected a query and at least one key"
    with pytest.raises(ValueError, match=rf"X has shape \(4, 1, 2\), {expected}"):
        as_sets(xp_array(np.ones((4, 1, 2))))
    with pytest.raises(ValueError, match=rf"X\[1\] has shape \(1, 2\), {expected}"):
        as_sets([xp_array(np.ones((3, 2))), xp_array(np.ones((1, 2)))])


def test_one_token_is_enough_where_asked(xp_array):
    assert as_sets(xp_array(np.ones((4, 1, 2))), rules=SetRules(1)).longest == 1
    assert as_sets([xp_array(np.ones((1, 2)))], rules=SetRules(1)).longest == 1
    mask = np.array([[True, False]])
    assert len(as_sets(xp_array(np.ones((1, 2, 2))), mask, rules=SetRules(1))) == 1
    with pytest.raises(ValueError, match=r"\(4, 0, 2\), expected a token"):
        as_sets(xp_array(np.ones((4, 0, 2))), rules=SetRules(1))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_entries_that_are_not_finite_are_refused(xp_array, bad, dtype):
    X = np.ones((4, 3, 2), dtype=dtype)
    X[3, 1, 0] = X[3, 2, 1] = bad
    message = "has 2 NaN or infinite entries, expected finite numbers"
    with pytest.raises(ValueError, match=f"X {message}"):
        as_sets(xp_array(X))
    with pytest.raises(ValueError, match=rf"X\[3\] {message}"):
        as_sets([xp_array(example) for example in X])


def test_what_is_no_number_is_refused(xp_array):
    X = xp_array(np.ones((4, 3, 2), dtype=complex))
    with pytest.raises(TypeError, match=r"X has dtype .*complex128, expected real numbers"):
        as_sets(X)
    with pytest.raises(TypeError, match=r"X\[0\] has dtype .*complex128, expected real numbers"):
        as_sets([X[0, ...]])
    with pytest.raises(TypeError, match=r"X\[0\] has dtype object, expected real numbers"):
        as_sets(np.full((4, 3, 2), None))


def test_empty_lists_are_refused():
    with pytest.raises(ValueError, match="X is an empty list, expected at least one example"):
        as_sets([])


@pytest.mark.parametrize("shape", [(3,), (3, 2, 1), (3, 0)])
def test_lists_of_arrays_with_other_axes_are_refused(xp_array, shape):
    examples = [xp_array(np.ones((3, 2))), xp_array(np.ones(shape))]
    message = r"X\[1\] has shape \(3,.*\), expected two axes \(tokens, dim\)"
    with pytest.raises(ValueError, match=message):
        as_sets(examples)


def test_lists_of_different_dimensions_are_refused(xp_array):
    examples = [xp_array(np.ones((3, dim))) for dim in (2, 2, 5)]
    message = r"X\[2\] has tokens of dimension 5, expected 2 as X\[0\] has"
    with pytest.raises(ValueError, match=message):
        as_sets(examples)


def test_ragged_examples_are_refused():
    with pytest.raises(ValueError, match=r"X\[1\] is a ragged sequence, expected a rectangular"):
        as_sets([[[1, 2], [3, 4]], [[1, 2], [3]]])


def test_a_mask_with_a_list_is_refused(xp_array):
    message = "mask was given with a list of arrays, expected an array for a mask"
    with pytest.raises(ValueError, match=message):
        as_sets([xp_array(np.ones((3, 2)))], mask=[[True, True, True]])


@pytest.mark.parametrize("shape", [(4,), (3, 4), (4, 2), (4, 3, 2)])
def test_a_mask_of_another_shape_is_refused(xp_array, shape):
    message = r"mask has shape .*, expected \(4, 3\): one entry per token of X"
    with pytest.raises(ValueError, match=message):
        as_sets(xp_array(np.ones((4, 3, 2))), xp_array(np.ones(shape, dtype=bool)))


def test_a_mask_of_other_numbers_is_refused(xp_array):
    with pytest.raises(ValueError, match="mask has entries other than 0 and 1, expected Booleans"):
        as_sets(xp_array(np.ones((4, 3, 2))), xp_array(np.full((4, 3), 2)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 0, 0], "mask leaves example 2 without a token, expected at least one True"),
        ([0, 1, 1], r"mask leaves example 2 without its query, expected True for token 0"),
        ([1, 0, 0], "mask leaves example 2 without a key, expected at least one True after the qu"),
    ],
)
def test_a_mask_that_leaves_too_little_is_refused(xp_array, row, message):
    mask = np.array([[1, 1, 1], [1, 0, 1], row, row]) == 1
    with pytest.raises(ValueError, match=message):
        as_sets(xp_array(np.ones((4, 3, 2))), xp_array(mask))


# On disk


@pytest.mark.parametrize("dtype", ["f4", "f8", "int8"])
def test_arrays_on_disk_are_read_block_by_block(tmp_path, dtype):
    X = (10 * gaussian(2**13, 16, 8)).astype(dtype)
    mapped = on_disk(tmp_path, X)
    tracemalloc.start()
    sets = as_sets(mapped)
    first = sets[:5000]
    tokens, _ = sets.block(slice(4000, 4100))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**18
    assert sets.tokens is mapped
    assert isinstance(first.tokens, np.memmap)
    np.testing.assert_array_equal(tokens, X[4000:4100])


def test_entries_on_disk_are_checked(tmp_path):
    X = np.ones((2**13, 16, 8))
    X[-1, -1, -1] = np.nan
    with pytest.raises(ValueError, match="X has 1 NaN or infinite entries"):
        as_sets(on_disk(tmp_path, X))


def test_entries_are_checked_once_and_in_blocks(monkeypatch):
    X, checked = gaussian(2**13, 16, 8), []
    monkeypatch.setattr(backend, "check_finite", lambda part, name: checked.append(part))
    as_sets(X)
    assert len(checked) > 1
    assert all(part.nbytes <= blocks.BLOCK_BYTES for part in checked)
    np.testing.assert_array_equal(np.concatenate(checked), X)
