import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from example_sets import all_features, gaussian, ragged, random_mask
from hypothesis import given
from hypothesis import strategies as st

from onelayer.array import blocks
from onelayer.array.backend import device, namespace, to_numpy
from onelayer.data import sources
from onelayer.data.chunks import Streamed
from onelayer.data.sets import as_sets
from onelayer.features import attention_features, mlp_features
from onelayer.features.positions import PositionalEncoding
from onelayer.features.solvers import design
from onelayer.features.solvers.design import Design, Panels


def draw(heads=6, dim=3, depth=1):
    return attention_features.draw(
        heads, 0.5, PositionalEncoding(None, dim, 5), depth, np.random.default_rng(0)
    )


def draw_mlp(features=20, tokens=5, dim=3):
    return mlp_features.draw(features, tokens, dim, np.random.default_rng(0))


def by_panels(phi):
    """Φ put together from panels of columns, and from panels of rows."""
    columns = [to_numpy(phi.by_columns(part)).copy() for part in phi.column_panels()]
    rows = [to_numpy(phi.by_rows(part)).copy() for part in phi.row_panels()]
    return np.concatenate(columns, axis=1), np.concatenate(rows, axis=0)


def small_panels(monkeypatch):
    """Panels of a few columns or rows, tiles of fewer, and blocks of one example."""
    monkeypatch.setattr(design, "PANEL_BYTES", 500)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 300)


FORMS = {
    "array": lambda xp_array, dtype: (xp_array(gaussian(7, 5, 3, dtype=dtype)), None),
    "mask": lambda xp_array, dtype: (
        xp_array(gaussian(7, 5, 3, dtype=dtype)),
        xp_array(random_mask(np.random.default_rng(0), 7, 5)),
    ),
    "list": lambda xp_array, dtype: (
        [xp_array(example) for example in ragged([2, 5, 3, 3, 4, 5, 2], 3, dtype=dtype).examples],
        None,
    ),
}


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "drawn", [draw(), draw(depth=2), draw_mlp()], ids=["attention", "depth", "mlp"]
)
def test_panels_are_parts_of_all_features(monkeypatch, xp_array, drawn, form, dtype):
    X, mask = FORMS[form](xp_array, dtype)
    expected = to_numpy(all_features(drawn, X, mask))
    small_panels(monkeypatch)
    phi = Panels(drawn, as_sets(X, mask))
    assert (phi.rows, phi.columns) == expected.shape
    assert min(len(phi.column_panels()), len(phi.row_panels())) > 1
    tolerance = 1e-13 if dtype == "f8" else 1e-5
    for found in (*by_panels(phi), *by_panels(phi)):
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def test_panels_are_of_the_backend_of_the_examples(xp_array):
    X = xp_array(gaussian(4, 5, 3, dtype="f4"))
    phi = Panels(draw(), as_sets(X))
    for panel in (phi.by_columns(slice(0, 8)), phi.by_rows(slice(0, 2))):
        assert namespace(panel) is namespace(X)
        assert panel.dtype == X.dtype


def test_features_live_where_the_examples_do():
    strict = pytest.importorskip("array_api_strict")
    elsewhere = strict.Device("device1")
    examples = ragged([2, 5, 3], dim=3).examples
    sets = as_sets([strict.asarray(example, device=elsewhere) for example in examples])
    for drawn in (draw(depth=2), draw_mlp()):
        phi = Panels(drawn, sets)
        predicted = phi.product(np.ones((phi.columns, 1)))
        assert device(predicted) == device(phi.by_columns(slice(0, phi.columns))) == elsewhere


@given(
    n=st.integers(1, 40),
    heads=st.integers(1, 30),
    panel_bytes=st.integers(1, 4000),
)
def test_panels_cover_everything_once_in_order(n, heads, panel_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(design, "PANEL_BYTES", panel_bytes)
        phi = Panels(draw(heads, dim=2), as_sets(np.ones((n, 2, 2))))
        columns, rows = phi.column_panels(), phi.row_panels()
    assert [i for part in columns for i in range(3 * heads)[part]] == list(range(3 * heads))
    assert [i for part in rows for i in range(n)[part]] == list(range(n))
    assert all(part.start % 3 == part.stop % 3 == 0 for part in columns)
    assert all(part.stop - part.start == 3 or _bytes(part, n) <= panel_bytes for part in columns)
    assert all(
        part.stop - part.start == 1 or _bytes(part, 3 * heads) <= panel_bytes for part in rows
    )


def _bytes(part, width):
    return 8 * (part.stop - part.start) * width


def test_panels_are_no_smaller_than_they_need_to_be():
    phi = Panels(draw(), as_sets(gaussian(7, 5, 3)))
    assert phi.column_panels() == [slice(0, 24)]
    assert phi.row_panels() == [slice(0, 7)]


def test_panels_share_memory():
    phi = Panels(draw(), as_sets(gaussian(7, 5, 3)))
    first, second = phi.by_columns(slice(0, 8)), phi.by_columns(slice(8, 16))
    assert np.shares_memory(first, second)


def test_every_row_is_scaled_once(monkeypatch, xp_array):
    X, scale = gaussian(7, 5, 3), np.arange(1.0, 8.0)
    expected = all_features(draw(), X) * scale[:, None]
    small_panels(monkeypatch)
    phi = Panels(draw(), as_sets(xp_array(X)), xp_array(scale))
    for found in (*by_panels(phi), *by_panels(phi)):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


def test_features_are_computed_in_the_kind_of_a_sample(xp_array):
    X, mask = gaussian(7, 5, 3, dtype="f4"), random_mask(np.random.default_rng(0), 7, 5)
    phi = Panels(draw(), as_sets(X, mask), sample=xp_array(np.zeros((1, 5, 3))))
    expected = all_features(draw(), X.astype("f8"), mask)
    panel = phi.by_rows(slice(0, 7))
    assert namespace(panel) is namespace(phi.sample)
    for found in by_panels(phi):
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_the_twin_in_single_precision_has_the_same_features(xp_array):
    scale = np.arange(1.0, 8.0)
    phi = Panels(draw(), as_sets(xp_array(gaussian(7, 5, 3))), xp_array(scale))
    for found, expected in zip(by_panels(phi.single()), by_panels(phi), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_product_is_that_of_all_features(monkeypatch, xp_array, dtype):
    X, weights = gaussian(7, 5, 3, dtype=dtype), gaussian(24, 2, seed=1)
    expected = to_numpy(all_features(draw(), X)) @ weights
    small_panels(monkeypatch)
    found = Panels(draw(), as_sets(xp_array(X))).product(xp_array(weights))
    assert found.dtype == xp_array(X).dtype
    tolerance = 1e-12 if dtype == "f8" else 1e-4
    np.testing.assert_allclose(to_numpy(found), expected, rtol=0, atol=tolerance)


def test_few_examples_are_prepared_at_once_even_if_the_first_are_short():
    lengths, prepared = [2, *[2000] * 40], []

    def prepare(tokens, mask):
        prepared.append(tokens.nbytes)
        return tokens[:, 0, :1]

    fake = SimpleNamespace(
        unit=1,
        size=1,
        like=lambda _: fake,
        workspace=lambda _: 1,
        prepare=prepare,
        features=lambda values, part: values,
    )
    Panels(fake, as_sets([np.ones((length, 3)) for length in lengths])).by_columns(slice(0, 1))
    assert max(prepared) <= blocks.BLOCK_BYTES // 4


def test_products_with_examples_on_disk_take_little_memory(monkeypatch, tmp_path):
    X, drawn = gaussian(2**13, 16, 8), draw(heads=2, dim=8)
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    monkeypatch.setattr(design, "PANEL_BYTES", 2**16)
    weights = np.ones((18, 1))
    tracemalloc.start()
    found = Panels(drawn, as_sets(mapped)).product(weights)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < X.nbytes / 4
    np.testing.assert_allclose(found[::1000], all_features(drawn, X[::1000]) @ weights, atol=1e-12)


# Wherever the examples are


def spread(X, targets, scale, rows=3):
    """Examples in memory, and the same in chunks of a few."""
    sets = as_sets(X)
    here = sources.in_memory(sets, targets, scale)
    starts = np.append(np.arange(0, len(sets), rows), len(sets))

    def read(positions):
        return (here.between(*starts[i : i + 2]).chunks.values[0] for i in positions)

    chunks = Streamed(read, tuple(range(len(starts) - 1)))
    for examples in (here, sources.Source(chunks, starts, here.samples)):
        yield Design(draw(), examples, sets.sample)


def products(panels, targets, factor, told):
    """A sum over examples that needs their features, their targets and something of all."""
    told(1.0)
    return factor * to_numpy(panels.by_rows(slice(0, panels.rows))).T @ to_numpy(targets)


def test_sums_are_the_same_in_one_chunk_and_in_many(xp_array):
    X, targets, scale = gaussian(7, 5, 3), gaussian(7, 2, seed=1), np.arange(1.0, 8.0)
    expected = 2.0 * all_features(draw(), X).T @ (scale[:, None] * targets)
    for phi in spread(xp_array(X), xp_array(targets), xp_array(scale)):
        told = []
        found = phi.sum(products, 2.0, progress=told.append)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
        assert len(told) == phi.steps


def test_a_pass_tells_of_panels_in_memory_and_of_chunks_elsewhere(monkeypatch):
    monkeypatch.setattr(design, "PANEL_BYTES", 8 * 24 * 2)  # two examples
    here, there = spread(gaussian(7, 5, 3), gaussian(7, 2), None)
    assert (here.steps, there.steps) == (4, 3)
    assert (here.between(0, 5).steps, there.between(0, 5).steps) == (3, 2)


@pytest.mark.parametrize("scale", [None, np.arange(1.0, 8.0)])
def test_examples_can_be_brought_here(xp_array, scale):
    X, targets = gaussian(7, 5, 3), gaussian(7, 2, seed=1)
    rows = np.ones(7) if scale is None else scale
    expected = all_features(draw(), X) * rows[:, None]
    scale = None if scale is None else xp_array(scale)
    for whole in spread(xp_array(X), xp_array(targets), scale):
        for part in (slice(0, 7), slice(3, 6)):
            phi, y = whole.between(part.start, part.stop).here()
            np.testing.assert_allclose(by_panels(phi)[0], expected[part], rtol=0, atol=1e-12)
            np.testing.assert_array_equal(to_numpy(y), targets[part])
