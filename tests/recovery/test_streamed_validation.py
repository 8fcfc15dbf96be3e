"""The door and the display of `recover` for examples that live elsewhere."""

import numpy as np
import places
import pytest
from recoveries import PLACES, in_order, solved

from onelayer import recover
from onelayer.array import backend
from onelayer.data.chunks import Streamed
from onelayer.recovery import display, validation

pytestmark = pytest.mark.usefixtures("calm")


# The door


def good(n=30, tokens=2, dim=3):
    return np.random.default_rng(0).standard_normal((n, tokens, dim))


def bad(value, *where):
    """Good examples but for one entry."""
    array = good()
    array[where] = value
    return array


def without_tokens(*examples):
    mask = np.ones((30, 2), dtype=bool)
    mask[list(examples)] = False
    return mask


REFUSED = {
    "nan": (bad(np.nan, 23, 1), None, None, "X has 3 NaN or infinite entries, expected finite nu"),
    "infinite": (None, bad(-np.inf, 29), None, "Y has 6 NaN or infinite entries, expected finite"),
    "both": (bad(np.nan, 0), bad(np.nan, 29), None, "X has 6 NaN or infinite entries, expected"),
    "too large": (
        bad(1e101, 17, 0, 0),
        None,
        None,
        r"X has entries up to 1e\+101, expected between 1e-100 and 1e\+100: scale it",
    ),
    "too small": (1e-120 * good(), None, None, "X has entries up to .e-120, expected between 1e-"),
    "one example": (good(1), good(1), None, "X has 1 example, expected at least 2: one is held"),
    "flat": (good()[:, 0], None, None, r"X has shape \(30, 3\), expected three axes \(examples, "),
    "flat outputs": (None, good()[:, 0], None, r"Y has shape \(30, 3\), expected three axes"),
    "no tokens": (good()[:, :0], None, None, r"X has shape \(30, 0, 3\), expected at least one ex"),
    "other rows": (
        None,
        good(tokens=3),
        None,
        "X has 2 tokens of dimension 3, but Y has 3 rows: expected one output row per token",
    ),
    "a token less": (
        None,
        None,
        np.ones((30, 1), dtype=bool),
        r"mask has shape \(30, 1\), expected \(30, 2\): one entry per token of X",
    ),
    "no rows": (
        None,
        None,
        np.ones(30),
        r"mask has shape \(30,\), expected \(30, 2\): one entry",
    ),
    "no token": (
        None,
        None,
        without_tokens(27, 21),
        "mask leaves example 21 without a token, expected at least one True in every row",
    ),
    "no mask": (None, None, np.full((30, 2), 2), "mask has entries other than 0 and 1, expected B"),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "function", "dask", "cluster"])
@pytest.mark.parametrize("name", REFUSED)
def test_examples_that_cannot_be_are_refused(request, kind, name):
    X, Y, mask, message = REFUSED[name]
    X, Y = (good() if array is None else array for array in (X, Y))
    X, Y, mask = (None if a is None else PLACES[kind](a, 7, request) for a in (X, Y, mask))
    with pytest.raises(ValueError, match=message):
        recover(X, Y, heads=1, mask=mask)


@pytest.mark.parametrize("kind", ["function", "file", "dask"])
@pytest.mark.parametrize(
    ("short", "message"),
    [
        ("Y", "Y has .* rows, expected .*: one for each example of .*X"),
        ("mask", "mask has 29 rows"),
    ],
)
def test_as_many_of_one_as_of_the_other_are_expected(request, kind, short, message):
    given = {"X": good(), "Y": good(), "mask": np.ones((30, 2), dtype=bool)}
    given[short] = given[short][:29]
    there = {name: PLACES[kind](array, 7, request) for name, array in given.items()}
    if short == "mask":
        there["mask"] = given["mask"]
    with pytest.raises(ValueError, match=message):
        recover(**there, heads=1)


def by_function(array):
    return places.by_function(array, 7)


def lying(block, dtype=float):
    """A Dask array whose chunks are others than it says."""
    da = pytest.importorskip("dask.array")
    return da.from_array(good(), chunks=(10, 2, 3)).map_blocks(lambda _: block, dtype=dtype)


@pytest.mark.parametrize(
    ("X", "Y", "error", "message"),
    [
        (by_function(good() + 0j), good(), TypeError, "X has dtype complex128, expected real"),
        (good(), by_function(good().astype(str)), TypeError, "Y has dtype <U32, expected real"),
        (by_function(good().astype(object)), good(), TypeError, "X has dtype object, expected r"),
        (in_order([good(), good() + 0j]), good(60), TypeError, "X has dtype complex128, expected"),
        (good(60), in_order([good(), good().astype(str)]), TypeError, "Y has dtype <U32, expected"),
        (by_function(good())(), good(), TypeError, "X is a generator, which can be read only once"),
        (good(), by_function(good())(), TypeError, "Y is a generator, which can be read only once"),
        (iter([good()]), good(), TypeError, "X is a list_iterator, which can be read only once"),
        (None, by_function(good()), TypeError, r"X is None, expected examples \(n, tokens, dim\)"),
        (by_function(good()), None, TypeError, r"Y is None, expected examples \(n, tokens, dim\)"),
        (lambda: None, good(), TypeError, "X is a function that returns NoneType, expected an it"),
        (lambda: [1.0, 2.0], good(), ValueError, "block 0 of X is a single value, expected an arr"),
        (in_order([]), in_order([]), ValueError, "X gives no examples, expected at least one"),
        (in_order([good(0)]), good(0), ValueError, "X gives no examples, expected at least one"),
        (
            in_order([good(), good(dim=4)]),
            good(60),
            ValueError,
            r"block 1 of X has examples of shape \(2, 4\), expected \(2, 3\) as block 0 has",
        ),
        (
            by_function(good()),
            places.by_function(good(), 8),
            ValueError,
            "block 0 of Y has 8 rows, expected 7: one for each example of block 0 of X",
        ),
    ],
)
def test_functions_that_cannot_be_are_refused(X, Y, error, message):
    with pytest.raises(error, match=message):
        recover(X, Y, heads=1)


def test_dask_arrays_of_unknown_size_are_refused():
    X, known = places.in_dask(good(), 7), places.in_dask(np.ones(30, dtype=bool), 7)
    for there, name in (({"X": X[known], "Y": X}, "X"), ({"X": good(), "Y": X[known]}, "Y")):
        with pytest.raises(ValueError, match=f"{name} has chunks of unknown size, expected known "):
            recover(**there, heads=1)


def test_dask_arrays_do_not_go_with_functions():
    message = "Y is a function, expected a Dask array as others are"
    with pytest.raises(TypeError, match=message):
        recover(places.in_dask(good(), 7), by_function(good()), heads=1)


@pytest.mark.parametrize("kind", ["dask", "cluster"])
@pytest.mark.parametrize(
    ("block", "error", "message"),
    [
        (
            good(9),
            ValueError,
            r"X has a chunk of shape \(9, 2, 3\) at example .*, expected \(10, 2",
        ),
        (good(10, dim=4), ValueError, r"X has a chunk of shape \(10, 2, 4\) at example .*0, expec"),
        (good(10) + 0j, TypeError, "X has dtype complex128, expected real numbers"),
    ],
)
def test_dask_arrays_that_are_not_what_they_say_are_refused(request, kind, block, error, message):
    if kind == "cluster":
        request.getfixturevalue("cluster")
    with pytest.raises(error, match=message):
        recover(lying(block), good(), heads=1)


def test_functions_that_give_other_blocks_later_are_refused():
    asked = []

    def changing():
        asked.append(1)
        return places.by_function(good(), 7 if len(asked) < 4 else 6)()

    message = "X gave other blocks than in the first pass, expected the same in every pass"
    with pytest.raises(ValueError, match=message):
        recover(changing, good(), heads=1)
    assert len(asked) >= 4


def test_errors_of_a_function_are_its_own():
    def broken():
        yield good()[:10]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        recover(broken, good(), heads=1)


def test_a_cluster_computes_where_the_examples_are(cluster, monkeypatch):
    X = places.in_dask(good(), 7)
    message = (
        "device='cuda' was asked for, but the examples are on a Dask cluster, expected "
        "device=None: its workers compute where they are"
    )
    monkeypatch.setattr(backend, "check_device", lambda device: None)  # as if there were a GPU
    for there in ({"X": X, "Y": X}, {"X": good(), "Y": X}):
        with pytest.raises(ValueError, match=message):
            recover(**there, heads=1, device="cuda")


@pytest.mark.parametrize("by", [by_function, lambda array: places.in_dask(array, 7)])
def test_a_gpu_is_only_in_the_way_of_a_cluster(by):
    found = validation.examples(by(good()), by(good()), None, device="cuda")
    assert isinstance(found.source.chunks, Streamed)
    assert len(found.source) == 30


@pytest.mark.parametrize("name", ["bias", "causal", "mask"])
def test_what_cannot_be_sculpted_is_refused_elsewhere_too(name):
    X = by_function(good())
    mask = by_function(np.ones((30, 2), dtype=bool)) if name == "mask" else None
    options = {} if name == "mask" else {name: True}
    with pytest.raises(ValueError, match=f"method='sculpt' was asked for with {name}, expected"):
        recover(X, X, heads=1, method="sculpt", mask=mask, **options)


def test_what_a_look_shows_is_the_same_elsewhere(put):
    job = solved("everything")
    X, Y = np.where(job.mask[..., None], job.X, -9.0), job.Y
    expected, found = (
        validation.examples(X, Y, job.mask),
        validation.examples(put(X), put(Y), put(job.mask)),
    )
    assert found.shape == expected.shape == (160, 3, 4, 4)
    largest = abs(X[job.mask]).max(), abs(Y[job.mask]).max()  # padding does not count
    assert found.largest == expected.largest == largest
    assert found.rows == expected.rows == job.mask.sum()
    assert found.masked


# Progress


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "cluster"])
def test_a_display_is_told_of_every_pass(request, monkeypatch, kind):
    job = solved("unpolished")
    told = []
    report = display.Display.report

    def listen(self, stage, share):
        told.append((stage, share))
        report(self, stage, share)

    monkeypatch.setattr(display.Display, "report", listen)
    X, Y = (PLACES[kind](array, 1000, request) for array in (job.X, job.Y))
    found = recover(X, Y, **job.options, progress=True)
    phases = [row.stage for row in found.trace[:4]]
    stages = [stage for i, (stage, _) in enumerate(told) if i == 0 or told[i - 1][0] != stage]
    assert stages == ["reading the examples", "whitening", *phases]
    for stage in stages:
        shares = [share for name, share in told if name == stage]
        assert set(shares) <= {0.0, 0.25, 0.5, 0.75, 1.0}
        assert shares[-1] == 1.0
        assert {0.25, 0.5, 0.75} <= set(shares)


@pytest.mark.parametrize("kind", ["function", "cluster"])
def test_a_listener_hears_of_every_row(request, kind):
    job = solved("plain")
    heard = []
    X, Y = (PLACES[kind](array, 60, request) for array in (job.X, job.Y))
    found = recover(X, Y, **job.options, progress=heard.append)
    assert heard == found.trace
    assert [row.stage for row in heard[:2]] == ["span of the inputs", "start, few examples"]
    assert heard[-1].examples == 128


@pytest.mark.parametrize("name", ["X", "Y"])
def test_masked_arrays_are_refused(name):
    job = solved("plain")
    given = {"X": job.X, "Y": job.Y}
    given[name] = np.ma.array(given[name], mask=given[name] > 1)
    with pytest.raises(TypeError, match=f"{name} is a masked array, expected a plain one"):
        recover(**given, heads=2)
