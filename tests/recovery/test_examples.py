"""Examples that stay where they live: which are fitted, any cutting, and what is held of them."""

from dataclasses import replace

import cases
import numpy as np
import places
import pytest
from cases import flat, random_case, small_cases, whitened
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from recoveries import in_blocks, solved

from onelayer import AttentionLayer, inputs
from onelayer.array.backend import to_numpy
from onelayer.data import chunks, dask, sources
from onelayer.data.chunks import InMemory, Streamed
from onelayer.data.progress import no_progress
from onelayer.heads import dense, low_rank
from onelayer.recovery import holdout, validation
from onelayer.recovery.examples import whiten
from onelayer.recovery.gauss_newton import jacobian, preconditioner, varpro
from onelayer.recovery.options import Options
from onelayer.recovery.phases.fold import fold
from onelayer.recovery.validation import ValidatedExamples

pytestmark = pytest.mark.usefixtures("calm")


# Which examples are fitted, held out and sampled


def posed(X, Y, mask=None, **options):
    """The examples to fit and those held out, as `refine` sees them."""
    examples = validation.examples(X, Y, mask)
    rng = np.random.default_rng(7)
    return holdout.split(examples, Options(**{"heads": 2, **options}), no_progress, rng)


@pytest.mark.parametrize("masked", [False, True])
def test_parts_are_blocks_of_about_so_many_rows(xp_array, masked):
    found = random_case(0, n=10, tokens=3, masked=masked, causal=True).problem(xp_array)
    (whole,) = found.parts(1000)
    parts = found.parts(14)  # four examples of three tokens
    assert [part.keys.shape[0] for part in parts] == [4, 4, 2]
    for name in ("queries", "keys", "outputs", *(["counted", "allowed"] if masked else [])):
        joined = np.concatenate([to_numpy(getattr(part, name)) for part in parts])
        np.testing.assert_array_equal(joined, to_numpy(getattr(whole, name)))
    assert len(found.parts(1)) == 10  # one example at least


def assert_same_examples(mine, theirs):
    """The same whitened examples in the same order."""
    for name in ("X", "Y", "mask"):
        found, expected = getattr(mine, name), getattr(theirs, name)
        assert (found is None) == (expected is None)
        if expected is not None:
            np.testing.assert_allclose(to_numpy(found), expected, rtol=0, atol=1e-12)
    assert mine.equations == theirs.equations
    assert (mine.causal, mine.bias) == (theirs.causal, theirs.bias)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "everything"])
def test_the_same_examples_are_held_out_in_the_same_order(put, name):
    job = solved(name)
    options = {"bias": name == "everything", "causal": name == "everything"}
    fitted, held_out = posed(job.X, job.Y, job.mask, **options)
    found, found_out = posed(put(job.X), put(job.Y), put(job.mask), **options)
    assert_same_examples(found_out, held_out)
    assert (found.examples, found.equations) == (fitted.examples, fitted.equations)
    np.testing.assert_allclose(to_numpy(found.whitening), fitted.whitening, rtol=0, atol=1e-12)
    assert found.output_scale == pytest.approx(fitted.output_scale, rel=1e-12)
    for count in (1, 17, fitted.examples):
        assert_same_examples(found.sample(count), fitted.sample(count))


def test_samples_are_random_examples_that_are_not_held_out():
    position = np.arange(300.0)[:, None, None] + np.array([[0.0], [0.5]])
    fitted, held_out = posed(*(places.by_function(position, 40) for _ in range(2)))
    assert not fitted.in_memory

    def positions(some):
        return np.round(some.Y[:, 0, 0] * some.output_scale).astype(int)

    first, few = positions(fitted.sample(60)), positions(fitted.sample(20))
    np.testing.assert_array_equal(first[:20], few)
    assert len(set(first)) == 60
    assert [np.sum(first // 75 == quarter) > 5 for quarter in range(4)] == [True] * 4
    assert list(first) != sorted(first)
    assert not set(first) & set(positions(held_out))
    everything = set(positions(fitted.sample(300))) | set(positions(held_out))
    assert everything == set(range(300))


def test_a_split_leaves_all_examples_once():
    case = random_case(0, n=30, masked=True, bias=True)
    source = sources.source({"X": places.by_function(case.X), "Y": case.Y, "mask": case.mask})
    order = np.random.default_rng(1).permutation(30)
    whole = whiten(ValidatedExamples.of(source), bias=True, order=order)
    rest, out = whole.split(7)
    again, more = rest.split(3)
    assert (rest.examples, out.examples, again.examples, more.examples) == (23, 7, 20, 3)
    np.testing.assert_array_equal(rest.held_out, np.sort(order[:7]))
    np.testing.assert_array_equal(again.held_out, np.sort(order[:10]))
    assert whole.equations == rest.equations + out.equations == case.equations
    assert rest.equations == again.equations + more.equations
    left = again.sample(30)
    assert left.equations == again.equations
    parts = [out, more, left]
    posed = whitened(case.X, case.Y, case.mask, False, True)
    for name in ("X", "Y", "mask"):
        together = np.concatenate([getattr(part, name) for part in parts])
        expected = getattr(posed, name)[order]
        np.testing.assert_allclose(together, expected, rtol=0, atol=1e-12)


# Any cutting


@st.composite
def cuttings(draw, n):
    """Where n examples may be cut; blocks may be empty."""
    return [0, *sorted(draw(st.lists(st.integers(0, n), max_size=6))), n]


@given(data=st.data(), case=small_cases(most_examples=12, least_examples=2))
def test_any_cutting_gives_the_same_frame(data, case):
    n = len(case.X)
    held_out = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1))), int)
    cuts = data.draw(cuttings(n))
    source = sources.source(
        {
            "X": in_blocks(case.X, cuts),
            "Y": in_blocks(case.Y, cuts),
            "mask": None if case.mask is None else in_blocks(case.mask, cuts),
        }
    )
    found = whiten(ValidatedExamples.of(source), case.causal, case.bias, held_out=held_out)
    rest = np.setdiff1d(np.arange(n), held_out)
    mask = None if case.mask is None else case.mask[rest]
    expected = whitened(case.X[rest], case.Y[rest], mask, case.causal, case.bias)
    # Where the span has fewer dimensions its basis may be any: inner products are the same.
    products, expected_products = (one.whitening @ one.whitening.T for one in (found, expected))
    size = abs(expected_products).max()
    np.testing.assert_allclose(products, expected_products, rtol=0, atol=1e-7 * size)
    if abs(expected.Y).max() > 0:  # outputs that are all their mean have no scale
        assert found.output_scale == pytest.approx(expected.output_scale, rel=1e-12)
    np.testing.assert_allclose(found.output_mean, expected.output_mean, rtol=0, atol=1e-12)
    assert (found.equations, found.examples) == (expected.equations, expected.examples)
    assert (found.tokens, found.dim, found.out_dim) == expected.X.shape[1:] + case.Y.shape[2:]


@given(data=st.data(), case=cases.well_posed_cases())
@settings(max_examples=15)
def test_any_cutting_gives_the_same_sums(data, case):
    n = len(case.X)
    cuts = data.draw(cuttings(n))
    given = {"X": in_blocks(case.X, cuts), "Y": case.Y, "mask": case.mask}
    examples = ValidatedExamples.of(sources.source(given))
    spread = whiten(examples, case.causal, case.bias, order=np.arange(n))
    whole = whitened(case.X, case.Y, case.mask, case.causal, case.bias)
    assume(np.allclose(spread.whitening, whole.whitening))  # signs may depend on rounding errors
    theta = dense.pack(case.attention, case.key_bias)
    expected = varpro.fit(whole.batches(case.heads), theta)
    batches = spread.batches(case.heads)
    room = data.draw(st.sampled_from([0, 8 * batches.rows * batches.dim, batches.memory_budget]))
    found = varpro.fit(replace(batches, memory_budget=room), expected.theta)
    assert batches.equations == expected.batches.equations
    assert (batches.rows, batches.examples) == (expected.batches.rows, n)
    close(found.gram, expected.gram)
    assert found.loss == pytest.approx(expected.loss, rel=1e-9)
    close(jacobian.gradient(found), jacobian.gradient(expected))
    direction = np.random.default_rng(0).standard_normal(expected.theta.shape)
    close(
        jacobian.jacobian(found).gauss_newton_product(direction),
        jacobian.jacobian(expected).gauss_newton_product(direction),
    )


@pytest.mark.parametrize("bias", [False, True])
def test_a_chunk_of_which_all_is_held_out_changes_nothing(bias):
    layer = AttentionLayer.random(heads=2, dim=8, rank=2, bias=bias, seed=0)
    X = inputs.boolean(30, 3, 8, seed=1)
    Y, held_out = layer(X), np.arange(10, 20)
    cuts = [0, 10, 20, 30]
    given = {"X": in_blocks(X, cuts), "Y": in_blocks(Y, cuts), "mask": None}
    rest = np.setdiff1d(np.arange(30), held_out)
    examples = ValidatedExamples.of(sources.source(given))
    spread = whiten(examples, bias=bias, order=rest, held_out=held_out)
    plain = whitened(X[rest], Y[rest], None, False, bias)
    heads = np.random.default_rng(2).standard_normal((8 + bias, 16)) / 4
    theta = low_rank.nearest(heads, 8, 2)
    allowed = low_rank.tangent(theta, 8, 2)
    found, expected = (
        varpro.fit(replace(posed.batches(2), memory_budget=0), theta) for posed in (spread, plain)
    )
    products = [jacobian.jacobian(fit) for fit in (found, expected)]
    close(*(jacobian.gradient(fit, None, allowed) for fit in (found, expected)))
    close(*(one.gauss_newton_product(allowed.project(heads), allowed) for one in products))
    preconditioned = [
        preconditioner.preconditioner(fit, one).times(heads, 1.0)
        for fit, one in zip((found, expected), products, strict=True)
    ]
    np.testing.assert_allclose(*preconditioned, atol=1e-4)


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8 * abs(expected).max() + 1e-12)


@pytest.mark.slow
@given(data=st.data(), n=st.integers(2, 40), block=st.integers(1, 12))
def test_any_cutting_shows_the_same_examples_in_their_order(data, n, block):
    X, Y = (np.random.default_rng(i).standard_normal((n, 2, 3)) for i in range(2))
    cuts = data.draw(cuttings(n))
    held_out = sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=n - 1)))
    most = data.draw(st.none() | st.integers(1, 40))
    plain = cases.gathered(X, Y, held_out)

    def source(X, Y, _):
        return sources.source({"X": in_blocks(X, cuts), "Y": in_blocks(Y, cuts), "mask": None})

    spread = cases.gathered(X, Y, held_out, source=source)
    with pytest.MonkeyPatch.context() as monkeypatch:
        cases.in_blocks_of(monkeypatch, block, plain)
        mine, theirs = (
            fold(one, lambda X, Y: [X, Y], lambda a, b: list(map(joined, a, b)), most)
            for one in (spread, plain)
        )
    for found, expected in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def joined(first, second):
    return np.concatenate([first, second])


# What is held


def counted_reads(array, rows):
    """A function that gives blocks, and a list of how often it was asked for them."""
    asked = []

    def blocks():
        asked.append(1)
        return places.by_function(array, rows)()

    return blocks, asked


def spread_problem(n=60, heads=3):
    X, asked = counted_reads(inputs.gaussian(n, 3, 4), 20)
    Y = AttentionLayer.random(heads=heads, dim=4)(inputs.gaussian(n, 3, 4))
    source = sources.source({"X": X, "Y": Y, "mask": None})
    return whiten(ValidatedExamples.of(source), order=np.arange(n)), asked


def test_blocks_are_held_where_there_is_room_for_them_but_not_for_their_attention(monkeypatch):
    posed, asked = spread_problem()
    theta = np.random.default_rng(0).standard_normal((4, 12))
    whole = varpro.fit(posed.batches(3), theta)
    assert isinstance(whole.batches.chunks, InMemory)
    assert isinstance(whole.attended, InMemory)
    blocks, attention = 8 * 180 * (4 + 4 + 4 + 3), 8 * 180 * 3 * (4 + 3)
    for room, reads in ((attention, 0), (attention - 1, 0), (blocks, 0), (blocks - 1, 2)):
        monkeypatch.setattr(chunks, "KEPT_BYTES", room)
        batches = posed.batches(3)
        asked.clear()
        fit = varpro.fit(batches, theta)
        assert isinstance(fit.attended, InMemory if room >= attention else Streamed)
        assert min(len(asked), 2) == reads
        assert fit.loss == pytest.approx(whole.loss, rel=1e-12)
        close(jacobian.gradient(fit), jacobian.gradient(whole))


@pytest.mark.slow
def test_what_is_computed_is_held_by_the_workers(cluster, monkeypatch):
    job = solved("plain")
    whole, _ = posed(job.X, job.Y)
    fitted, _ = posed(*(places.in_dask(array, 54) for array in (job.X, job.Y)))
    theta = np.random.default_rng(0).standard_normal((4, 8))
    expected = varpro.fit(whole.batches(2), theta)
    for share in (0.4, 0.0):
        monkeypatch.setattr(dask, "_CLUSTER_SHARE", share)
        fit = varpro.fit(fitted.batches(2), theta)
        held = [len(one.dask) == 1 for one in fit.attended.values]  # nothing left to compute
        assert held == [share > 0] * 3
        assert fit.loss == pytest.approx(expected.loss, rel=1e-12)
        close(fit.weights, expected.weights)
        close(jacobian.gradient(fit), jacobian.gradient(expected))
        single = jacobian.jacobian(fit, single=True).gauss_newton_product(theta.astype(np.float32))
        assert single.dtype == np.float32
        product = jacobian.jacobian(expected).gauss_newton_product(theta)
        np.testing.assert_allclose(single, product, rtol=0, atol=1e-4 * abs(product).max())
        assert sum(len(rows) for rows in flat(fit.residuals)) == 3 * fitted.examples
