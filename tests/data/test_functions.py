import operator
import re

import numpy as np
import pytest

from onelayer.data.sources import source

X = np.random.default_rng(0).standard_normal((20, 3, 2))


def total_of(found):
    return found.chunks.map(lambda chunk: chunk.arrays[0].sum(axis=0)).reduce(operator.add)


def test_a_function_is_asked_anew_for_every_pass():
    passes = []

    def blocks():
        passes.append(1)
        return iter(np.split(X, 4))

    found = source({"X": blocks})
    before = len(passes)
    np.testing.assert_allclose(total_of(found), X.sum(axis=0))
    np.testing.assert_allclose(total_of(found), X.sum(axis=0))
    assert len(passes) == before + 2


def test_no_more_blocks_are_asked_for_than_are_wanted():
    asked = []

    def blocks():
        for i in range(10):
            asked.append(i)
            yield X[2 * i : 2 * i + 2]

    found = source({"X": blocks})
    asked.clear()
    np.testing.assert_array_equal(found.rows(np.array([1, 5]))[0], X[[1, 5]])
    assert asked == [0, 1, 2]


def test_empty_blocks_are_passed_over():
    found = source({"X": lambda: [X[:0], X[:5], X[5:5], X[5:], X[:0]]})
    assert found.starts.tolist() == [0, 5, 20]
    assert found.samples[0].shape == (1, 3, 2)
    np.testing.assert_array_equal(found.rows(np.array([4, 5, 19]))[0], X[[4, 5, 19]])


def test_functions_give_blocks_side_by_side_with_arrays_and_one_another():
    lists = [part.tolist() for part in np.split(X[:, 0, 0], 5)]
    found = source({"X": lambda: np.split(X, 5), "y": lambda: lists, "w": np.arange(20)})
    chunk = found.chunks.collect()[2]
    np.testing.assert_array_equal(chunk.arrays[0], X[8:12])
    np.testing.assert_array_equal(chunk.arrays[1], X[8:12, 0, 0])
    np.testing.assert_array_equal(chunk.arrays[2], np.arange(8, 12))


def test_blocks_of_tensors_stay_tensors():
    torch = pytest.importorskip("torch")
    weights = torch.ones(2, requires_grad=True)
    found = source({"X": lambda: (torch.tensor(part) * weights for part in np.split(X, 4))})
    (rows,) = found.rows(np.array([3, 17]))
    assert isinstance(rows, torch.Tensor)
    assert not rows.requires_grad
    np.testing.assert_array_equal(rows.numpy(), X[[3, 17]])
    assert isinstance(found.samples[0], torch.Tensor)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"X": lambda: iter([])}, ValueError, "X gives no examples, expected at least one"),
        ({"X": lambda: [X[:0]]}, ValueError, "X gives no examples, expected at least one"),
        (
            {"X": lambda: 3},
            TypeError,
            "X is a function that returns int, expected an iterator over blocks of examples",
        ),
        (
            {"X": lambda: [X, X[:, :2]]},
            ValueError,
            "block 1 of X has examples of shape (2, 2), expected (3, 2) as block 0 has",
        ),
        (
            {"X": lambda: [X, 4.0]},
            ValueError,
            "block 1 of X is a single value, expected an array of examples",
        ),
        (
            {"X": lambda: [[[1, 2], [3]]]},
            ValueError,
            "block 0 of X is a ragged sequence, expected a rectangular array",
        ),
        (
            {"X": lambda: [X, X], "Y": lambda: [X, X[1:]]},
            ValueError,
            "block 1 of Y has 19 rows, expected 20: one for each example of block 1 of X",
        ),
        (
            {"X": lambda: [X, X], "Y": lambda: [X]},
            ValueError,
            "block 1 of Y has 0 rows, expected 20: one for each example of block 1 of X",
        ),
        (
            {"y": np.ones(5), "X": lambda: [X]},
            ValueError,
            "y has 5 rows, expected 20: one for each example of X",
        ),
    ],
)
def test_blocks_that_cannot_be_are_refused(given, error, message):
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        source(given)


@pytest.mark.parametrize("later", [[X[:10]], [X[:9], X[9:]], [X, X], []])
def test_other_blocks_than_in_the_first_pass_are_refused(later):
    passes = [[X[:10], X[10:]], [X[:10], X[10:]], later]  # the first is only looked into

    def changing():
        return passes.pop(0)

    found = source({"X": changing})
    message = "X gave other blocks than in the first pass, expected the same in every pass"
    with pytest.raises(ValueError, match=f"^{message}$"):
        found.chunks.collect()


def test_what_a_function_raises_is_raised():
    def broken():
        yield X
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        source({"X": broken})


def test_a_function_may_fill_one_buffer_again_and_again():
    buffer = np.empty((2, 3))

    def refilled():
        for i in range(3):
            buffer[:] = i
            yield buffer

    found = source({"X": refilled})
    parts = found.chunks.collect()
    assert [float(part.arrays[0][0, 0]) for part in parts] == [0.0, 1.0, 2.0]


def test_what_has_a_length_may_be_gone_through_block_by_block():
    data = pytest.importorskip("torch.utils.data")
    torch = pytest.importorskip("torch")
    loader = data.DataLoader(torch.arange(12.0).reshape(6, 2), batch_size=4)
    found = source({"X": loader})
    assert len(found) == 6
    np.testing.assert_array_equal(found.rows(np.array([5]))[0], [[10.0, 11.0]])


def test_a_function_that_returns_an_array_is_refused():
    message = "X is a function that returns ndarray, expected an iterator over blocks of examples"
    with pytest.raises(TypeError, match=message):
        source({"X": lambda: np.eye(3)})


def test_blocks_of_a_function_are_in_memory():
    da = pytest.importorskip("dask.array")
    with pytest.raises(TypeError, match="block 0 of X is a Dask array, expected an array in mem"):
        source({"X": lambda: [da.ones((4, 2))]})
