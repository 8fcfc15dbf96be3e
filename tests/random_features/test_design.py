import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from example_sets import all_features, gaussian, ragged, random_mask
from hypothesis import given
from hypothesis import strategies as st

from onelayer import blocks
from onelayer.arrays import device, namespace, to_numpy
from onelayer.random_features import attention, design, mlp
from onelayer.random_features.design import Design
from onelayer.random_features.positions import Positions
from onelayer.random_features.sets import as_sets


def draw(heads=6, dim=3, depth=1):
    return attention.draw(heads, 0.5, Positions(None, dim, 5), depth, np.random.default_rng(0))


def draw_mlp(features=20, tokens=5, dim=3):
    return mlp.draw(features, tokens, dim, np.random.default_rng(0))


def by_panels(phi):
    """Φ put together from panels of columns, and from panels of rows."""
    columns = [to_numpy(phi.by_columns(part)).copy() for part in phi.column_panels()]
    rows = [to_numpy(phi.by_rows(part)).copy() for part in phi.row_panels()]
    return np.concatenate(columns, axis=1), np.concatenate(rows, axis=0)


def small_panels(monkeypatch, panel_bytes=500, block_bytes=300):
    """Panels of a few columns or rows, tiles of fewer, and chunks of one example."""
    cut = blocks.slices
    monkeypatch.setattr(design, "PANEL_BYTES", panel_bytes)
    monkeypatch.setattr(
        blocks, "slices", lambda n, each, size=block_bytes, start=0: cut(n, each, size, start)
    )


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
    phi = Design(drawn, as_sets(X, mask))
    assert (phi.rows, phi.columns) == expected.shape
    assert min(len(phi.column_panels()), len(phi.row_panels())) > 1
    tolerance = 1e-13 if dtype == "f8" else 1e-5
    for found in (*by_panels(phi), *by_panels(phi)):
        assert found.dtype == dtype
        np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance)


def test_panels_are_of_the_backend_of_the_examples(xp_array):
    X = xp_array(gaussian(4, 5, 3, dtype="f4"))
    phi = Design(draw(), as_sets(X))
    for panel in (phi.by_columns(slice(0, 8)), phi.by_rows(slice(0, 2))):
        assert namespace(panel) is namespace(X)
        assert panel.dtype == X.dtype


def test_features_live_where_the_examples_do():
    strict = pytest.importorskip("array_api_strict")
    elsewhere = strict.Device("device1")
    examples = ragged([2, 5, 3], dim=3).examples
    sets = as_sets([strict.asarray(example, device=elsewhere) for example in examples])
    for drawn in (draw(depth=2), draw_mlp()):
        phi = Design(drawn, sets)
        predicted = phi.product(np.ones((phi.columns, 1)))
        assert device(predicted) == device(phi.by_columns(slice(0, phi.columns))) == elsewhere


@given(
    n=st.integers(1, 40),
    heads=st.integers(1, 30),
    panel_bytes=st.integers(1, 4000),
    cuts=st.lists(st.integers(1, 40)),
)
def test_panels_cover_everything_once_in_order(n, heads, panel_bytes, cuts):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(design, "PANEL_BYTES", panel_bytes)
        phi = Design(draw(heads, dim=2), as_sets(np.ones((n, 2, 2))))
        cuts = [cut for cut in cuts if cut <= n]
        columns, rows = phi.column_panels(), phi.row_panels(cuts)
    assert [i for part in columns for i in range(3 * heads)[part]] == list(range(3 * heads))
    assert [i for part in rows for i in range(n)[part]] == list(range(n))
    assert all(part.start % 3 == part.stop % 3 == 0 for part in columns)
    assert all(part.stop - part.start == 3 or _bytes(part, n) <= panel_bytes for part in columns)
    assert all(
        part.stop - part.start == 1 or _bytes(part, 3 * heads) <= panel_bytes for part in rows
    )
    assert {part.stop for part in rows} >= {*cuts, n}


def _bytes(part, width):
    return 8 * (part.stop - part.start) * width


def test_panels_are_no_smaller_than_they_need_to_be():
    phi = Design(draw(), as_sets(gaussian(7, 5, 3)))
    assert phi.column_panels() == [slice(0, 24)]
    assert phi.row_panels() == [slice(0, 7)]
    assert phi.row_panels(cuts=[3, 5]) == [slice(0, 3), slice(3, 5), slice(5, 7)]
    assert phi.row_panels(cuts=[0, 7, 7]) == [slice(0, 7)]


def test_panels_share_memory():
    phi = Design(draw(), as_sets(gaussian(7, 5, 3)))
    first, second = phi.by_columns(slice(0, 8)), phi.by_columns(slice(8, 16))
    assert np.shares_memory(first, second)


def test_every_row_is_scaled_once(monkeypatch, xp_array):
    X, scale = gaussian(7, 5, 3), np.arange(1.0, 8.0)
    expected = all_features(draw(), X) * scale[:, None]
    small_panels(monkeypatch)
    phi = Design(draw(), as_sets(xp_array(X)), xp_array(scale))
    for found in (*by_panels(phi), *by_panels(phi), *by_panels(phi.first(7))):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    for found in by_panels(phi.first(4)):
        np.testing.assert_allclose(found, expected[:4], rtol=0, atol=1e-12)


def test_the_twin_in_double_precision_is_another_only_if_need_be(xp_array):
    X = gaussian(7, 5, 3)
    single, double = (Design(draw(), as_sets(xp_array(X.astype(t)))) for t in ("f4", "f8"))
    assert double.double() is double
    expected = by_panels(Design(draw(), as_sets(xp_array(X.astype("f4").astype("f8")))))
    for found, exact in zip(by_panels(single.double()), expected, strict=True):
        assert found.dtype == np.float64
        np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6)


def test_the_twin_in_single_precision_has_the_same_features(xp_array):
    scale = np.arange(1.0, 8.0)
    phi = Design(draw(), as_sets(xp_array(gaussian(7, 5, 3))), xp_array(scale))
    for found, expected in zip(by_panels(phi.single()), by_panels(phi), strict=True):
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_first_examples_have_the_same_features(xp_array, form):
    X, mask = FORMS[form](xp_array, "f8")
    phi = Design(draw(), as_sets(X, mask))
    first = phi.first(3)
    assert (first.rows, first.columns) == (3, 24)
    for found in by_panels(first):
        np.testing.assert_allclose(found, by_panels(phi)[0][:3], rtol=0, atol=1e-13)


def test_all_examples_are_the_same_design():
    phi = Design(draw(), as_sets(gaussian(7, 5, 3)))
    assert phi.first(7) is phi


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_product_is_that_of_all_features(monkeypatch, xp_array, dtype):
    X, weights = gaussian(7, 5, 3, dtype=dtype), gaussian(24, 2, seed=1)
    expected = to_numpy(all_features(draw(), X)) @ weights
    small_panels(monkeypatch)
    found = Design(draw(), as_sets(xp_array(X))).product(xp_array(weights))
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
    Design(fake, as_sets([np.ones((length, 3)) for length in lengths])).by_columns(slice(0, 1))
    assert max(prepared) <= blocks.BLOCK_BYTES // 4


def test_products_with_examples_on_disk_take_little_memory(monkeypatch, tmp_path):
    X, drawn = gaussian(2**13, 16, 8), draw(heads=2, dim=8)
    np.save(tmp_path / "X.npy", X)
    mapped = np.load(tmp_path / "X.npy", mmap_mode="r")
    monkeypatch.setattr(design, "PANEL_BYTES", 2**16)
    weights = np.ones((18, 1))
    tracemalloc.start()
    found = Design(drawn, as_sets(mapped)).product(weights)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < X.nbytes / 4
    np.testing.assert_allclose(found[::1000], all_features(drawn, X[::1000]) @ weights, atol=1e-12)
