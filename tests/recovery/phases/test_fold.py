import cases
import numpy as np
import pytest
from cases import as_they_are, in_blocks_of, in_small_blocks, whitened
from hypothesis import given
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.array import blocks
from onelayer.array.backend import namespace, to_numpy
from onelayer.data import sources
from onelayer.recovery.phases.fold import fold
from onelayer.recovery.strategies.sculpt import random_positions

NONE = np.array([], dtype=int)


def drawn(n=50, tokens=3, dim=4, out_dim=5, seed=0):
    """Tokens whose coordinates are neither equally long nor independent, and outputs of a layer."""
    rng = np.random.default_rng(seed)
    mixing = np.diag(np.arange(1.0, dim + 1)) + 0.3 * rng.standard_normal((dim, dim))
    X = rng.standard_normal((n, tokens, dim)) @ mixing
    return X, AttentionLayer.random(heads=2, dim=dim, out_dim=out_dim, seed=seed)(X)


def signs(n=50, seed=0):
    """Boolean tokens in int8 and outputs in float32, as large files would hold them."""
    X = inputs.boolean(n, 3, 4, seed=seed)
    Y = AttentionLayer.random(heads=2, dim=4, seed=seed)(X)
    return X.astype(np.int8), Y.astype(np.float32)


def gathered(X, Y, held_out=NONE, as_array=np.asarray, **options):
    return cases.gathered(as_array(X), as_array(Y), held_out, **options)


def scale_of(source):
    """What outputs are divided by."""
    return source.output_scale


def blocks_of(source, most=None):
    """The blocks that a fold shows, as lists of numpy arrays: (tokens, outputs)."""
    pairs = fold(
        source,
        lambda X, Y: [(to_numpy(X), to_numpy(Y))],
        lambda first, second: first + second,
        most,
    )
    return [list(parts) for parts in zip(*pairs, strict=True)]


def seen(source, most=None):
    """All that a fold shows, one array of tokens and one of outputs."""
    return [np.concatenate(parts) for parts in blocks_of(source, most)]


def kept(n, held_out):
    """The positions that are not held out."""
    return [position for position in range(n) if position not in set(held_out.tolist())]


# The whitening


@pytest.mark.parametrize("held_out", [NONE, np.array([0, 3, 4, 49])])
def test_whitening_is_that_of_a_problem_with_the_same_examples(xp_array, held_out):
    X, Y = drawn()
    source = gathered(X, Y, held_out, as_array=xp_array)
    rest = kept(50, held_out)
    posed = whitened(X[rest], Y[rest], None, False, False)
    assert namespace(source.whitening) is namespace(xp_array(X))
    np.testing.assert_allclose(to_numpy(source.whitening), posed.whitening, rtol=0, atol=1e-12)
    assert scale_of(source) == pytest.approx(posed.output_scale, rel=1e-12)


def test_what_is_held_out_does_not_count(xp_array):
    X, Y = drawn()
    held_out = np.array([2, 7, 8])
    rest = kept(50, held_out)
    plain = gathered(X[rest], Y[rest])
    X[held_out] = 1000.0
    Y[held_out] = -1000.0
    source = gathered(X, Y, held_out, as_array=xp_array)
    np.testing.assert_allclose(to_numpy(source.whitening), plain.whitening, rtol=0, atol=1e-12)
    assert scale_of(source) == pytest.approx(scale_of(plain), rel=1e-12)


@pytest.mark.parametrize("sizes", [(1.0, 1e200), (1e90, 1e-200), (1e-90, 1e300), (1e99, 1.0)])
def test_units_do_not_matter(sizes):
    X, Y = drawn()
    plain, other = gathered(X, Y), gathered(X * sizes[0], Y * sizes[1])
    for mine, theirs in zip(seen(other), seen(plain), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-11)
    assert scale_of(other) == pytest.approx(scale_of(plain) * sizes[1], rel=1e-12)
    np.testing.assert_allclose(other.whitening * sizes[0], plain.whitening, rtol=0, atol=1e-11)


def test_tokens_and_outputs_that_are_all_zero_stay_zero(xp_array):
    source = gathered(np.zeros((6, 2, 3)), np.zeros((6, 2, 4)), as_array=xp_array)
    np.testing.assert_array_equal(to_numpy(source.whitening), np.eye(3, 1))
    assert scale_of(source) == 1.0
    assert not any(array.any() for array in seen(source))


def test_sizes_count_what_is_not_held_out():
    X, Y = drawn()
    source = gathered(X, Y, np.array([1, 2, 3]))
    assert source.examples == 47
    assert (source.tokens, source.dim, source.out_dim) == (3, 4, 5)


# Reading


@given(data=st.data(), n=st.integers(1, 40), block_bytes=st.integers(1, 8000))
def test_blocks_show_what_is_not_held_out_once_and_in_order(data, n, block_bytes):
    most = n - 1
    out = data.draw(st.lists(st.integers(0, n - 1), unique=True, max_size=most))
    held_out = np.array(sorted(out), dtype=int)
    X, Y = drawn(n)
    source = gathered(X, Y, held_out)
    with pytest.MonkeyPatch.context() as monkeypatch:
        in_small_blocks(monkeypatch, block_bytes)
        tokens, outputs = seen(source)
    rest = kept(n, held_out)
    np.testing.assert_allclose(tokens, X[rest] @ source.whitening, rtol=0, atol=1e-12)
    np.testing.assert_allclose(outputs, Y[rest] / scale_of(source), rtol=0, atol=1e-12)


def test_blocks_are_read_on_every_backend(xp_array, monkeypatch):
    X, Y = drawn()
    held_out = np.array([0, 10, 11, 49])
    expected = seen(gathered(X, Y, held_out))
    in_small_blocks(monkeypatch, 8000)
    source = gathered(X, Y, held_out, as_array=xp_array)
    kinds = fold(source, lambda X, Y: {type(X), type(Y)}, set.union)
    assert kinds == {type(xp_array(X))}
    for mine, theirs in zip(seen(source), expected, strict=True):
        assert mine.dtype == np.float64
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("block_bytes", [1, 3000, 10_000])
def test_size_of_the_blocks_does_not_matter(monkeypatch, block_bytes):
    X, Y = drawn()
    held_out = np.array([5, 6, 30])
    whole = gathered(X, Y, held_out)
    before = seen(whole)
    in_small_blocks(monkeypatch, block_bytes)
    cut = gathered(X, Y, held_out)
    assert len(blocks_of(cut)[0]) > 1
    np.testing.assert_allclose(cut.whitening, whole.whitening, rtol=0, atol=1e-13)
    assert scale_of(cut) == pytest.approx(scale_of(whole), rel=1e-13)
    for mine, theirs in zip(seen(cut), before, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


def test_memory_of_a_block_is_bounded_whatever_the_number_of_examples():
    X, Y = (np.broadcast_to(np.ones(1), (200_000, 4, 16)) for _ in range(2))
    source = as_they_are(X, Y)
    sizes = fold(source, lambda X, Y: [X.nbytes + Y.nbytes], lambda first, second: first + second)
    assert max(sizes) <= blocks.BLOCK_BYTES
    assert sum(sizes) == 2 * 8 * 200_000 * 4 * 16
    assert len(sizes) < 2 * 8 * sum(sizes) / blocks.BLOCK_BYTES


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int64", "float32", "float64"])
def test_numbers_of_any_kind_are_read_as_the_same_numbers(xp_array, dtype):
    X = np.random.default_rng(0).integers(0, 2, (40, 3, 4)).astype(dtype)
    Y = np.random.default_rng(1).integers(0, 2, (40, 3, 4)).astype(dtype)
    plain = gathered(X.astype(float), Y.astype(float), np.array([3]))
    source = gathered(X, Y, np.array([3]), as_array=xp_array)
    for mine, theirs in zip(seen(source), seen(plain), strict=True):
        assert mine.dtype == np.float64
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("pieces", [1, 4])
def test_files_on_disk_are_read_as_the_arrays_in_them(tmp_path, monkeypatch, pieces):
    def source_of(*arrays):
        found = sources.in_memory(*arrays)
        return found if pieces == 1 else found.in_pieces()

    X, Y = signs()
    in_small_blocks(monkeypatch, 8000)
    monkeypatch.setattr("onelayer.data.chunks.CHUNK_BYTES", 1000)
    for name, array in (("X", X), ("Y", Y)):
        np.save(tmp_path / f"{name}.npy", array)
    mapped = [np.load(tmp_path / f"{name}.npy", mmap_mode="r") for name in "XY"]
    held_out = np.array([0, 1, 20, 49])
    source = gathered(*mapped, held_out, as_array=lambda a: a, source=source_of)
    plain = gathered(X, Y, held_out, source=source_of)
    assert len(source.source.chunks) == pieces
    np.testing.assert_array_equal(source.whitening, plain.whitening)
    assert scale_of(source) == scale_of(plain)
    assert len(blocks_of(source)[0]) > 1
    for mine, theirs in zip(seen(source), seen(plain), strict=True):
        assert type(mine) is np.ndarray
        np.testing.assert_array_equal(mine, theirs)
    index = np.array([2, 7, 30])
    for name in ("X", "Y"):
        mine, theirs = (getattr(s.take(index), name) for s in (source, plain))
        assert type(mine) is np.ndarray
        assert mine.dtype == np.float64
        np.testing.assert_array_equal(mine, theirs)


def test_the_cpu_is_a_device(xp_array):
    X, Y = drawn()
    source = gathered(X, Y, device="cpu", as_array=xp_array)
    for mine, theirs in zip(seen(source), seen(gathered(X, Y)), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-12)


def test_passes_tell_how_far_they_are(monkeypatch):
    X, Y = drawn(40)
    in_small_blocks(monkeypatch, 8000)
    told = []
    source = gathered(X, Y, progress=told.append)
    whitening = told.copy()
    seen(source)
    for shares in (whitening, told[len(whitening) :]):
        assert len(shares) > 2
        assert (np.diff(shares) > 0).all()
        assert (shares[0], shares[-1]) == (0.0, 1.0)


# Reading a part


@pytest.mark.parametrize("most", [1, 7, 35, 199, 399])
def test_about_so_many_examples_are_read_from_all_over(monkeypatch, most):
    n = 400
    position = np.repeat(np.arange(n, dtype=float), 2).reshape(n, 2, 1)
    source = as_they_are(position, position)
    in_blocks_of(monkeypatch, 10, source)
    assert {len(part) for part in blocks_of(source)[0]} == {10}
    read = seen(source, most)[0][:, 0, 0]
    assert most <= len(read) < most + 10
    assert len(set(read)) == len(read)
    assert (np.diff(read) > 0).all()
    for quarter in range(4 if most > 30 else 0):
        share = np.mean((read >= 100 * quarter) & (read < 100 * (quarter + 1)))
        assert share == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("most", [400, 401, 10**9, None])
def test_all_examples_are_read_if_so_many_are_asked_for(monkeypatch, most):
    position = np.repeat(np.arange(400.0), 2).reshape(400, 2, 1)
    source = as_they_are(position, position, np.array([17]))
    in_small_blocks(monkeypatch, 1500)
    assert seen(source, most)[0][:, 0, 0].tolist() == kept(400, np.array([17]))


def test_a_part_shows_nothing_that_is_held_out(monkeypatch):
    position = np.repeat(np.arange(400.0), 2).reshape(400, 2, 1)
    held_out = np.arange(0, 400, 3)
    source = as_they_are(position, position, held_out)
    in_blocks_of(monkeypatch, 10, source)
    read = seen(source, 100)[0][:, 0, 0]
    assert 60 <= len(read) <= 70
    assert not set(read) & set(held_out)


# Single examples


@given(
    seed=st.integers(0, 999),
    n=st.integers(2, 60),
    share=st.floats(0.0, 0.9),
    most=st.integers(1, 80),
)
def test_positions_are_ascending_and_not_held_out(seed, n, share, most):
    rng = np.random.default_rng(seed)
    held_out = np.sort(rng.choice(n, int(share * n), replace=False))
    X = np.zeros((n, 1, 1))
    source = as_they_are(X, X, held_out)
    found = random_positions(source, most, np.random.default_rng(seed))
    assert len(found) == min(most, source.examples)
    assert (np.diff(found) > 0).all()
    assert set(found.tolist()) <= set(kept(n, held_out))
    again = random_positions(source, most, np.random.default_rng(seed))
    np.testing.assert_array_equal(found, again)


def test_positions_are_other_ones_with_another_generator():
    X = np.zeros((1000, 1, 1))
    source = as_they_are(X, X, np.arange(10))
    first, second = (random_positions(source, 20, np.random.default_rng(seed)) for seed in (0, 1))
    assert len(set(first) & set(second)) < 10


@pytest.mark.parametrize("index", [[0], [3, 1, 2], list(range(50))])
def test_a_problem_holds_the_whitened_rows(xp_array, index):
    X, Y = drawn()
    source = gathered(X, Y, np.array([1, 4]), as_array=xp_array)
    posed = source.take(np.array(index))
    whitening = to_numpy(source.whitening)
    assert namespace(posed.X) is namespace(xp_array(X))
    np.testing.assert_allclose(to_numpy(posed.X), X[index] @ whitening, rtol=0, atol=1e-12)
    expected = Y[index] / scale_of(source)
    np.testing.assert_allclose(to_numpy(posed.Y), expected, rtol=0, atol=1e-12)
    assert posed.mask is None
    assert not posed.causal
    assert not posed.bias
    assert posed.output_scale == scale_of(source)
    assert posed.whitening is source.whitening


def test_a_problem_of_all_examples_is_the_one_that_is_posed():
    X, Y = drawn()
    mine = gathered(X, Y).take(np.arange(50))
    theirs = whitened(X, Y, None, False, False)
    np.testing.assert_allclose(mine.X, theirs.X, rtol=0, atol=1e-12)
    np.testing.assert_allclose(mine.Y, theirs.Y, rtol=0, atol=1e-12)
