import operator
import os
import tempfile
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer.data import sources
from onelayer.data.chunks import Chunk, InMemory, Streamed
from onelayer.data.dask import OnCluster
from onelayer.data.sources import Source, source

RNG = np.random.default_rng(0)
X = RNG.standard_normal((23, 3, 2))
Y = RNG.integers(0, 9, (23, 4))
MASK = RNG.random((23, 3)) < 0.5
CUTS = ((0, 5, 6, 14, 20, 23), (0, 23), tuple(range(24)), (0, 1, 22, 23))


class Anew:
    """Blocks that can be gone through again and again."""

    def __init__(self, blocks):
        self.blocks = blocks

    def __iter__(self):
        return iter(self.blocks)


def blocks_of(array, cuts):
    return [array[start:stop] for start, stop in pairwise(cuts)]


def by_function(array, cuts):
    return lambda: iter(blocks_of(array, cuts))


def by_iterable(array, cuts):
    return Anew(blocks_of(array, cuts))


def by_dask(array, cuts):
    da = pytest.importorskip("dask.array")
    lengths = tuple(stop - start for start, stop in pairwise(cuts))
    return da.from_array(array, chunks=(lengths, *array.shape[1:]))


def by_file(array, cuts):
    """A file mapped into memory, which lasts as long as the mapping does."""
    with tempfile.NamedTemporaryFile() as file:
        np.save(file, array)
        file.flush()
        return np.load(file.name, mmap_mode="r")


KINDS = {"function": by_function, "iterable": by_iterable, "dask": by_dask, "file": by_file}


@pytest.fixture(params=[*KINDS, "cluster"])
def kind(request):
    """A function that puts an array somewhere else."""
    if request.param == "cluster":
        request.getfixturevalue("cluster")
    return KINDS.get(request.param, by_dask)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of a file are five examples of X and Y; and such files are large."""
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", 5 * (X[0].nbytes + Y[0].nbytes))


# The same examples everywhere


@pytest.mark.parametrize("cuts", CUTS)
def test_all_places_have_the_same_examples(kind, cuts):
    found = source({"X": kind(X, cuts), "mask": None, "Y": kind(Y, cuts)})
    assert isinstance(found, Source)
    assert len(found) == 23
    parts = found.chunks.collect()
    assert [part.start for part in parts] == found.starts[:-1].tolist()
    assert all(part.arrays[1] is None for part in parts)
    np.testing.assert_array_equal(np.concatenate([part.arrays[0] for part in parts]), X)
    np.testing.assert_array_equal(np.concatenate([part.arrays[2] for part in parts]), Y)
    assert [len(part) for part in parts] == np.diff(found.starts).tolist()
    samples = found.samples
    assert samples[1] is None
    assert [one.shape for one in (samples[0], samples[2])] == [(1, 3, 2), (1, 4)]
    assert [one.dtype for one in (samples[0], samples[2])] == [X.dtype, Y.dtype]


@pytest.mark.parametrize("cuts", CUTS)
def test_examples_are_had_by_their_positions(kind, cuts):
    found = source({"X": kind(X, cuts), "Y": Y, "mask": None})
    for positions in ([0], [22], [4, 5, 6], [0, 0, 7, 22], list(range(23)), []):
        x, y, mask = found.rows(np.array(positions, dtype=int))
        np.testing.assert_array_equal(x, X[positions])
        np.testing.assert_array_equal(y, Y[positions])
        assert (x.dtype, y.dtype, mask) == (X.dtype, Y.dtype, None)
    np.testing.assert_array_equal(found.first(8)[0], X[:8])
    with pytest.raises(IndexError):
        found.rows(np.array([23]))


@pytest.mark.parametrize("cuts", CUTS)
def test_ranges_of_examples_keep_their_positions(kind, cuts):
    found = source({"X": kind(X, cuts), "Y": Y})
    assert found.between(0, 23) is found
    for start, stop in [(0, 7), (5, 6), (6, 14), (7, 23), (0, 23)]:
        part = found.between(start, stop)
        assert len(part) == stop - start
        parts = part.chunks.collect()
        assert all(len(chunk) for chunk in parts)
        np.testing.assert_array_equal(np.concatenate([c.arrays[0] for c in parts]), X[start:stop])
        assert parts[0].start == part.starts[0] == start
        assert part.starts[-1] == stop
        np.testing.assert_array_equal(part.rows(np.array([stop - 1]))[1], Y[stop - 1 : stop])
        assert part.between(start, stop) is part
    nested = found.between(3, 20).between(7, 12)
    np.testing.assert_array_equal(nested.rows(np.arange(7, 12))[0], X[7:12])
    assert len(nested) == 5
    for at in (0, 6, 7, 23):
        empty = found.between(at, at)
        assert (len(empty), len(empty.chunks)) == (0, 0)


cuttings = st.sets(st.integers(1, 22)).map(lambda inner: (0, *sorted(inner), 23))


@given(
    name=st.sampled_from(sorted(KINDS)),
    cuts=cuttings,
    other=cuttings,
    edges=st.tuples(st.integers(0, 23), st.integers(0, 23)).map(sorted),
    positions=st.lists(st.integers(0, 22), min_size=1).map(sorted).map(np.array),
)
def test_no_cutting_changes_anything(name, cuts, other, edges, positions):
    """Dask arrays may even be cut differently from one another; files are cut by their sizes."""
    place = KINDS[name]
    found = source({"X": place(X, cuts), "Y": place(Y, other if name == "dask" else cuts)})
    for expected, rows in zip((X, Y), found.rows(positions), strict=True):
        np.testing.assert_array_equal(rows, expected[positions])
    total = found.chunks.map(lambda chunk: chunk.arrays[1].sum(axis=0)).reduce(operator.add)
    np.testing.assert_array_equal(total, Y.sum(axis=0))
    start, stop = edges
    part = found.between(start, stop)
    assert len(part) == stop - start
    if start < stop:
        sums = part.chunks.map(lambda chunk: chunk.arrays[1].sum(axis=0))
        np.testing.assert_array_equal(sums.reduce(operator.add), Y[start:stop].sum(axis=0))


def test_examples_are_where_they_should_be(cluster):
    cuts = CUTS[0]
    for name, place in KINDS.items():
        expected = OnCluster if name == "dask" else Streamed
        assert type(source({"X": place(X, cuts)}).chunks) is expected
    assert type(sources.in_memory(X, None).chunks) is InMemory


def test_arrays_in_memory_are_one_chunk(xp_array):
    found = sources.in_memory(xp_array(X), None, xp_array(Y))
    (chunk,) = found.chunks.values
    assert (len(found), found.starts.tolist(), chunk.start, len(chunk)) == (23, [0, 23], 0, 23)
    assert chunk.arrays[1] is None
    assert [one if one is None else tuple(one.shape) for one in found.samples] == [
        (1, 3, 2),
        None,
        (1, 4),
    ]
    part = found.between(3, 9)
    assert np.asarray(part.chunks.values[0].arrays[2]).tolist() == Y[3:9].tolist()
    assert np.asarray(found.rows(np.array([2, 4]))[0]).tolist() == X[[2, 4]].tolist()


def test_arrays_in_memory_can_be_gone_through_in_pieces(xp_array):
    found = sources.in_memory(xp_array(X), None, xp_array(Y)).in_pieces()
    assert type(found.chunks) is Streamed
    assert found.starts.tolist() == [0, 5, 10, 15, 20, 23]
    parts = found.chunks.collect()
    assert all(part.arrays[1] is None for part in parts)
    assert np.concatenate([np.asarray(part.arrays[0]) for part in parts]).tolist() == X.tolist()


def test_chunks_know_their_positions():
    chunk = Chunk(10, (X[10:15], None, Y[10:15]))
    assert len(chunk) == 5
    cut = chunk.between(12, 14)
    assert (cut.start, len(cut), cut.arrays[1]) == (12, 2, None)
    np.testing.assert_array_equal(cut.arrays[0], X[12:14])
    assert (chunk.between(0, 11).start, len(chunk.between(0, 11))) == (10, 1)
    assert (chunk.between(13, 99).start, len(chunk.between(13, 99))) == (13, 2)
    x, none, y = chunk.rows(np.array([3, 10, 11, 14, 15]))
    np.testing.assert_array_equal(x, X[[10, 11, 14]])
    np.testing.assert_array_equal(y, Y[[10, 11, 14]])
    assert none is None


# What is elsewhere, and what is not


def test_large_files_functions_and_dask_are_elsewhere():
    cuts = CUTS[0]
    assert all(sources.is_streamed(place(X, cuts)) for place in KINDS.values())
    assert sources.is_streamed(operator.neg)
    assert not any(map(sources.is_streamed, (X, X.tolist(), None, 3.0, "X", b"X", iter([X]))))
    assert not any(map(sources.is_streamed, (map(abs, [1]), (X, X), Anew, {1: X}, range(3))))


def test_torch_tensors_are_here():
    torch = pytest.importorskip("torch")
    assert not sources.is_streamed(torch.ones(3, 2, 1))


def test_small_files_and_those_of_other_shapes_are_here(monkeypatch):
    assert not sources.is_streamed(by_file(np.ones((1000, 100)), None))
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", X.nbytes)
    assert not sources.is_streamed(by_file(X, None))
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", X.nbytes - 1)
    assert sources.is_streamed(by_file(X, None))


@pytest.mark.parametrize(
    ("value", "kind"), [((x for x in [X]), "generator"), (map(abs, [X]), "map")]
)
def test_what_can_be_read_only_once_is_refused(value, kind):
    message = (
        f"X is a {kind}, which can be read only once, "
        "expected a function that returns a new one for every pass"
    )
    with pytest.raises(TypeError, match=message):
        sources.refuse_generator(value, "X")
    for take in (source, sources.sample):
        with pytest.raises(TypeError, match=message):
            take({"Y": by_function(Y, CUTS[0]), "X": value})
    sources.refuse_generator([X], "X")


def test_other_lengths_are_refused(kind):
    message = "Y has 22 rows, expected 23: one for each example of X"
    with pytest.raises(ValueError, match=message):
        source({"X": kind(X, CUTS[0]), "Y": Y[:22]})
    with pytest.raises(ValueError, match="Y has 24 rows, expected 23"):
        source({"X": kind(X, CUTS[0]), "Y": np.ones(24)})


def test_single_values_and_ragged_lists_are_refused(kind):
    with pytest.raises(ValueError, match="Y is a single value, expected an array of examples"):
        source({"X": kind(X, CUTS[0]), "Y": 3.0})
    with pytest.raises(ValueError, match="Y is a ragged sequence, expected a rectangular array"):
        source({"X": kind(X, CUTS[0]), "Y": [[1], [1, 2]]})


def test_lists_and_tensors_go_along(kind):
    torch = pytest.importorskip("torch")
    found = source({"X": kind(X, CUTS[0]), "Y": Y.tolist(), "mask": torch.tensor(MASK)})
    _, y, mask = found.rows(np.arange(4, 16))
    assert np.asarray(y).tolist() == Y[4:16].tolist()
    assert np.asarray(mask).tolist() == MASK[4:16].tolist()


def test_arrays_of_objects_and_of_text_keep_their_kind(kind):
    texts = np.array([f"{i} {'a' * i}" for i in range(23)])
    for array in (texts, texts.astype(object)):
        found = source({"X": kind(X, CUTS[0]), "Y": array})
        assert found.samples[1].dtype == array.dtype
        assert found.rows(np.array([3, 20]))[1].tolist() == array[[3, 20]].tolist()


# Without a pass


def test_a_sample_is_had_without_a_pass(kind):
    x, none, y = sources.sample({"X": kind(X, CUTS[0]), "mask": None, "Y": Y.astype("f4")})
    assert (x.shape, x.dtype, none, y.shape, y.dtype) == ((1, 3, 2), X.dtype, None, (1, 4), "f4")


def test_of_a_function_only_the_first_block_is_asked_for():
    asked = []

    def blocks():
        for i in range(3):
            asked.append(i)
            yield np.ones((2, 3))

    assert sources.sample({"X": blocks})[0].shape == (1, 3)
    assert asked == [0]
    outputs = sources.mapped(lambda chunk: chunk.arrays[0], {"X": blocks}, (3,), float)
    assert asked == [0]
    assert len(list(outputs())) == len(list(outputs())) == 3
    assert asked == [0, 0, 1, 2, 0, 1, 2]


# The way back


def sums(chunk):
    """Of every example the sum of X at the tokens that are there, and its position."""
    x, none, mask = chunk.arrays
    assert none is None
    there = (x * mask[:, :, None]).sum(axis=(1, 2))
    return np.stack([there, chunk.start + np.arange(len(chunk))], axis=1)


@pytest.mark.parametrize("cuts", CUTS)
def test_something_is_computed_from_every_chunk_in_the_kind_that_was_given(kind, cuts):
    expected = np.stack([(X * MASK[:, :, None]).sum(axis=(1, 2)), np.arange(23)], axis=1)
    given = {"X": kind(X, cuts), "Y": None, "mask": MASK}
    outputs = sources.mapped(sums, given, (2,), np.float64)
    if kind is by_file:
        assert type(outputs) is np.ndarray
        found = outputs
    elif kind is by_dask:
        assert outputs.chunks == (given["X"].chunks[0], (2,))
        found = outputs.compute()
    else:
        parts = list(outputs())
        assert [len(part) for part in parts] == np.diff(cuts).tolist()
        found = np.concatenate(parts)
        np.testing.assert_array_equal(np.concatenate(list(outputs())), found)
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_what_is_computed_can_be_a_source_again(kind):
    given = {"X": kind(X, CUTS[0]), "Y": None, "mask": MASK}
    outputs = sources.mapped(sums, given, (2,), np.float64)
    found = source({"X": given["X"], "Y": outputs})
    assert found.rows(np.array([0, 13, 22]))[1][:, 1].tolist() == [0, 13, 22]


def test_a_dask_array_is_computed_late_and_where_it_is(cluster, tmp_path):
    def leave(chunk):
        (tmp_path / f"{chunk.start}-{os.getpid()}").touch()
        return chunk.arrays[0][:, 0, 0]

    outputs = sources.mapped(leave, {"X": by_dask(X, CUTS[0])}, (), np.float64)
    assert list(tmp_path.iterdir()) == []
    np.testing.assert_array_equal(outputs[6:20].compute(), X[6:20, 0, 0])
    left = {path.name.split("-")[0]: path.name.split("-")[1] for path in tmp_path.iterdir()}
    assert sorted(left) == ["14", "6"]
    assert {int(pid) for pid in left.values()} <= set(cluster.run(os.getpid).values())


def test_empty_chunks_are_not_worked_on():
    cuts = (0, 0, 5, 5, 23, 23)
    outputs = sources.mapped(sums, {"X": by_dask(X, cuts), "Y": None, "mask": MASK}, (2,), float)
    assert outputs.chunks[0] == (0, 5, 0, 18, 0)
    np.testing.assert_array_equal(outputs.compute()[:, 1], np.arange(23))
    assert outputs._meta.shape == (0, 0)
