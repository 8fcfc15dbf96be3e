import tracemalloc

import numpy as np
import oracles
import places
import pytest
from cases import random_mask
from gauges import permuted
from hypothesis import given
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.array import blocks
from onelayer.array.backend import namespace, to_numpy

TOLERANCE = {"float64": 1e-12, "float32": 2e-5}


def by_loops(layer, X, **options):
    """The layer's outputs from the oracle."""
    weights = {name: to_numpy(array) for name, array in layer.arrays().items()}
    return oracles.attention_layer(np.asarray(X), **weights, **options)


@st.composite
def forward_cases(draw):
    """A layer, examples for it as numpy arrays, and the options of the call."""
    size = st.integers(1, 4)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, tokens, heads, dim, out_dim = (draw(size) for _ in range(5))
    weights = {
        "attention": rng.standard_normal((heads, dim, dim)),
        "projection": rng.standard_normal((heads, dim, out_dim)),
    }
    if draw(st.booleans()):
        weights["key_bias"] = rng.standard_normal((heads, dim))
    if draw(st.booleans()):
        weights["output_bias"] = rng.standard_normal(out_dim)
    X = rng.standard_normal((n, tokens, dim)).astype(draw(st.sampled_from(["f4", "f8"])))
    mask = random_mask(rng, n, tokens) if draw(st.booleans()) else None
    return AttentionLayer(**weights), X, {"mask": mask, "causal": draw(st.booleans())}


# The forward pass


@given(case=forward_cases())
def test_forward_pass_matches_the_loops(xp_array, case):
    layer, X, options = case
    expected = by_loops(layer, X, **options)
    array = xp_array(X)
    if options["mask"] is not None:
        options["mask"] = xp_array(options["mask"])
    result = layer(array, **options)
    assert namespace(result) is namespace(array)
    assert result.dtype == array.dtype
    np.testing.assert_allclose(
        to_numpy(result), expected, rtol=0, atol=TOLERANCE[X.dtype.name] * (1 + abs(expected).max())
    )


def test_weights_of_one_backend_meet_examples_of_another(xp_array):
    layer = AttentionLayer.random(heads=2, dim=3, bias=True)
    X = inputs.gaussian(2, 3, 3)
    moved = layer.to(xp_array(X))
    assert all(namespace(a) is namespace(xp_array(X)) for a in moved.arrays().values())
    np.testing.assert_allclose(moved(X), layer(X), rtol=1e-12)


def test_weights_with_negative_strides_meet_every_backend(xp_array):
    layer = AttentionLayer.random(heads=3, dim=2)
    X = inputs.gaussian(2, 3, 2)
    turned = AttentionLayer(layer.attention[::-1], layer.projection[::-1])
    np.testing.assert_allclose(to_numpy(turned(xp_array(X))), layer(X), rtol=1e-12)


def test_row_with_nothing_to_attend_to_gets_the_output_bias_alone(xp_array):
    layer = AttentionLayer.random(heads=2, dim=3, bias=True)
    X = xp_array(inputs.gaussian(1, 2, 3))
    result = to_numpy(layer(X, mask=xp_array(np.array([[False, True]])), causal=True))
    np.testing.assert_array_equal(result[0, 0], layer.output_bias)
    assert not np.allclose(result[0, 1], layer.output_bias)


def test_masked_tokens_have_no_influence(xp_array):
    layer = AttentionLayer.random(heads=2, dim=3)
    X = inputs.gaussian(2, 4, 3)
    mask = np.array([[True, False, True, False]] * 2)
    changed = np.where(mask[:, :, None], X, 100.0)
    before, after = (to_numpy(layer(xp_array(a), mask=xp_array(mask))) for a in (X, changed))
    np.testing.assert_array_equal(before[mask], after[mask])


def test_causal_tokens_do_not_see_later_ones(xp_array):
    layer = AttentionLayer.random(heads=2, dim=3)
    X = inputs.gaussian(2, 4, 3)
    changed = X.copy()
    changed[:, 2:] += 1.0
    before, after = (to_numpy(layer(xp_array(a), causal=True)) for a in (X, changed))
    np.testing.assert_allclose(before[:, :2], after[:, :2], rtol=1e-12)
    assert not np.allclose(before[:, 2:], after[:, 2:])


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"mask": [[1, 0, 1]]}])
def test_large_scores_do_not_overflow(xp_array, options):
    layer = AttentionLayer.random(heads=2, dim=3, scale=1e4)
    X = inputs.gaussian(1, 3, 3)
    result = to_numpy(layer(xp_array(X), **options))
    expected = oracles.attention_layer(
        X, layer.attention, layer.projection, mask=options.get("mask"), causal="causal" in options
    )
    np.testing.assert_allclose(result, expected, rtol=1e-9)


@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint16, np.int64, np.float16])
def test_integers_and_booleans_are_taken_as_numbers(dtype):
    layer = AttentionLayer.random(heads=2, dim=3)
    X = np.random.default_rng(0).integers(0, 2, (2, 3, 3)).astype(dtype)
    result = layer(X)
    assert result.dtype == np.float64
    np.testing.assert_array_equal(result, layer(X.astype(float)))


def test_lists_are_taken_as_arrays():
    layer = AttentionLayer([[[1, 2], [3, 4]]], [[[1], [0]]], [[0, 1]], [5])
    X = [[[1.0, 2.0], [0.5, 0.0]]]
    np.testing.assert_allclose(layer(X, mask=[[1, 1]]), by_loops(layer, X), rtol=1e-12)


@pytest.mark.parametrize("causal", [False, True])
def test_blocks_give_what_one_block_gives(xp_array, monkeypatch, causal):
    layer = AttentionLayer.random(heads=3, dim=4, bias=True)
    rng = np.random.default_rng(0)
    X, mask = xp_array(inputs.gaussian(7, 3, 4)), xp_array(random_mask(rng, 7, 3))
    whole = to_numpy(layer(X, mask=mask, causal=causal))
    seen = []

    def pairs(n, bytes_per_example):
        seen.extend(slices(n, 1, block_bytes=2))
        return seen

    slices = blocks.slices
    monkeypatch.setattr(blocks, "slices", pairs)
    np.testing.assert_allclose(to_numpy(layer(X, mask=mask, causal=causal)), whole, rtol=1e-12)
    assert len(seen) == 4


@pytest.mark.slow
def test_memory_beyond_the_result_is_bounded():
    layer = AttentionLayer.random(heads=8, dim=8)
    X = inputs.boolean(50_000, 4, 8)
    in_one_block = 8 * X.shape[0] * 4 * 8 * (8 + 4)
    tracemalloc.start()
    try:
        result = layer(X, causal=True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak - result.nbytes < 3 * blocks.BLOCK_BYTES < in_one_block


def test_permuted_heads_give_the_same_output(xp_array):
    layer = AttentionLayer.random(heads=4, dim=3, bias=True)
    X = xp_array(inputs.gaussian(5, 3, 3))
    other = permuted(layer, [2, 0, 3, 1])
    np.testing.assert_allclose(to_numpy(other(X)), to_numpy(layer(X)), rtol=1e-10)


# Examples that are elsewhere


@pytest.fixture(params=places.KINDS)
def elsewhere(request):
    """A function that brings an array to another place than memory."""
    return places.place(request.param, request)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int8])
@pytest.mark.parametrize("with_mask", [False, True])
def test_outputs_are_the_same_wherever_the_examples_are(elsewhere, dtype, with_mask):
    layer = AttentionLayer.random(heads=2, dim=3, out_dim=2, bias=True)
    X = (3 * inputs.gaussian(100, 4, 3)).astype(dtype)
    mask = random_mask(np.random.default_rng(0), 100, 4) if with_mask else None
    expected = layer(X, mask=mask, causal=True)
    outputs = layer(elsewhere(X), mask=mask, causal=True)
    found = places.brought(outputs)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found, expected, rtol=1e-6 if dtype is np.float32 else 1e-13)


def test_masks_may_be_elsewhere_too(elsewhere):
    layer = AttentionLayer.random(heads=2, dim=3)
    X = inputs.gaussian(60, 4, 3)
    mask = random_mask(np.random.default_rng(0), 60, 4)
    found = places.brought(layer(elsewhere(X), mask=elsewhere(mask.astype(int))))
    np.testing.assert_allclose(found, layer(X, mask=mask), rtol=1e-13)


def test_outputs_are_of_the_kind_of_the_examples(elsewhere):
    layer = AttentionLayer.random(heads=2, dim=3, out_dim=2)
    X = inputs.gaussian(60, 4, 3)
    there = elsewhere(X)
    outputs = layer(there)
    if isinstance(there, np.memmap):
        assert type(outputs) is np.ndarray
    elif callable(there):
        assert [len(block) for block in outputs()] == [len(block) for block in there()]
        assert len(list(outputs())) == 5  # as often as it is asked
    else:
        assert outputs.chunks == (there.chunks[0], (4,), (2,))
        assert (outputs.dtype, outputs._meta.dtype) == (np.float64, np.float64)
        np.testing.assert_allclose(outputs[20:22].compute(), layer(X[20:22]), rtol=1e-13)


def test_dask_arrays_may_be_cut_along_every_axis():
    da = pytest.importorskip("dask.array")
    layer = AttentionLayer.random(heads=2, dim=3)
    X = inputs.gaussian(20, 4, 3)
    outputs = layer(da.from_array(X, chunks=((0, 7, 0, 13), 3, 2)))
    assert outputs.chunks == ((0, 7, 0, 13), (4,), (3,))
    np.testing.assert_allclose(outputs.compute(), layer(X), rtol=1e-13)


def test_blocks_of_tensors_have_outputs_that_are_tensors():
    torch = pytest.importorskip("torch")
    layer = AttentionLayer.random(heads=2, dim=3)
    (block,) = layer(lambda: [torch.ones(5, 2, 3)])()
    assert (type(block), block.dtype, block.shape) == (torch.Tensor, torch.float32, (5, 2, 3))


def test_wrong_shapes_are_refused_before_any_work(elsewhere):
    layer = AttentionLayer.random(heads=2, dim=3)
    X = inputs.gaussian(60, 4, 3)
    with pytest.raises(ValueError, match="X has tokens of dimension 5, expected 3 as the layer"):
        layer(elsewhere(np.ones((60, 4, 5))))
    message = r"mask has rows of shape \(3,\), expected \(4,\): one entry per token of X"
    with pytest.raises(ValueError, match=message):
        layer(elsewhere(X), mask=np.ones((60, 3)))


def test_arrays_of_dask_and_functions_that_cannot_be_are_refused_before_any_work():
    da = pytest.importorskip("dask.array")
    layer = AttentionLayer.random(heads=2, dim=3)
    for X in (da.ones((8, 3), chunks=4), lambda: [np.ones((8, 3))]):
        with pytest.raises(ValueError, match=r"X has shape \(., 3\), expected three axes"):
            layer(X)
    for X in (da.ones((8, 2, 3), dtype=complex), lambda: [np.ones((8, 2, 3)) * 1j]):
        with pytest.raises(TypeError, match="X has dtype complex128, expected real numbers"):
            layer(X)
    with pytest.raises(ValueError, match=r"X has shape \(0, 2, 3\), expected at least one example"):
        layer(da.ones((0, 2, 3)))
    with pytest.raises(ValueError, match="X gives no examples, expected at least one"):
        layer(lambda: iter(()))
    with pytest.raises(ValueError, match="mask has 7 rows, expected 8: one for each example of X"):
        layer(da.ones((8, 2, 3), chunks=4), mask=np.ones((7, 2)))


def test_what_can_be_read_only_once_is_refused():
    layer = AttentionLayer.random(heads=2, dim=3)
    with pytest.raises(TypeError, match="X is a generator, which can be read only once, expected"):
        layer(np.ones((2, 2, 3)) for _ in range(3))
    with pytest.raises(TypeError, match="mask is a map, which can be read only once, expected"):
        layer(lambda: [np.ones((2, 2, 3))], mask=map(np.ones, [(2, 2)]))


def test_what_is_in_the_blocks_is_refused_when_they_are_read(elsewhere):
    layer = AttentionLayer.random(heads=2, dim=3)
    X, mask = inputs.gaussian(60, 4, 3), np.ones((60, 4), dtype=bool)
    mask[41] = False
    with pytest.raises(ValueError, match="mask leaves example 41 without a token"):
        places.brought(layer(elsewhere(X), mask=mask))
    X[33, 1] = np.nan
    with pytest.raises(ValueError, match="X has 3 NaN or infinite entries, expected finite"):
        places.brought(layer(elsewhere(X)))


# Attention weights


def weights_by_loops(layer, X, **options):
    """The attention weights from the oracle."""
    key_bias = None if layer.key_bias is None else to_numpy(layer.key_bias)
    return oracles.attention_weights(np.asarray(X), to_numpy(layer.attention), key_bias, **options)


@given(case=forward_cases())
def test_attention_weights_match_the_loops(xp_array, case):
    layer, X, options = case
    expected = weights_by_loops(layer, X, **options)
    array = xp_array(X)
    if options["mask"] is not None:
        options["mask"] = xp_array(options["mask"])
    result = layer.attention_weights(array, **options)
    assert namespace(result) is namespace(array)
    assert result.dtype == array.dtype
    np.testing.assert_allclose(to_numpy(result), expected, rtol=0, atol=TOLERANCE[X.dtype.name])


@given(case=forward_cases())
def test_attention_weights_give_the_outputs(case):
    layer, X, options = case
    weights = layer.attention_weights(X, **options)
    outputs = np.einsum("nmab,nbd,mde->nae", weights, X, layer.projection)
    if layer.output_bias is not None:
        outputs += layer.output_bias
    np.testing.assert_allclose(outputs, layer(X, **options), rtol=1e-4, atol=1e-4)


@given(case=forward_cases())
def test_rows_of_attention_sum_to_one_over_the_keys_that_they_may_attend_to(case):
    layer, X, options = case
    weights = layer.attention_weights(X, **options)
    there = np.ones(X.shape[:2], dtype=bool) if options["mask"] is None else options["mask"]
    pairs = np.broadcast_to(there[:, None, :], (len(X), X.shape[1], X.shape[1]))
    if options["causal"]:
        pairs = np.tril(pairs)
    assert not weights[np.broadcast_to(~pairs[:, None], weights.shape)].any()
    expected = np.broadcast_to(pairs.any(axis=2)[:, None, :], weights.shape[:3])
    np.testing.assert_allclose(weights.sum(axis=3), expected, atol=1e-5)


def test_attention_weights_are_the_same_wherever_the_examples_are(elsewhere):
    layer = AttentionLayer.random(heads=2, dim=3, out_dim=1, bias=True)
    X = inputs.gaussian(60, 4, 3).astype(np.float32)
    mask = random_mask(np.random.default_rng(0), 60, 4)
    expected = layer.attention_weights(X, mask=mask, causal=True)
    found = places.brought(layer.attention_weights(elsewhere(X), mask=mask, causal=True))
    assert (found.shape, found.dtype) == ((60, 2, 4, 4), np.float32)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_attention_weights_of_wrong_examples_are_refused(elsewhere):
    layer = AttentionLayer.random(heads=2, dim=3)
    for place in (np.asarray, elsewhere):
        with pytest.raises(ValueError, match="X has tokens of dimension 5, expected 3 as the lay"):
            layer.attention_weights(place(np.ones((60, 4, 5))))
    with pytest.raises(TypeError, match="X is a generator, which can be read only once"):
        layer.attention_weights(np.ones((2, 2, 3)) for _ in range(3))


# The random layer


def test_random_layer_has_attention_of_the_norm_asked_for():
    layer = AttentionLayer.random(heads=3, dim=5, scale=7.0)
    np.testing.assert_allclose(np.linalg.norm(layer.attention, axis=(1, 2)), 7.0, rtol=1e-12)
    low = AttentionLayer.random(heads=3, dim=5, scale=0.1, rank=2)
    np.testing.assert_allclose(np.linalg.norm(low.attention, axis=(1, 2)), 0.1, rtol=1e-12)


@pytest.mark.parametrize("draw", [inputs.boolean, inputs.gaussian])
def test_scale_is_the_standard_deviation_of_a_score(draw):
    theta = AttentionLayer.random(heads=1, dim=8, scale=3.0).attention[0]
    X = draw(20_000, 2, 8)
    scores = np.sum((X[:, 0] @ theta) * X[:, 1], axis=1)
    assert np.std(scores) == pytest.approx(3.0, rel=0.05)


def test_random_projections_and_biases_have_the_sizes_documented():
    layer = AttentionLayer.random(heads=100, dim=20, scale=3.0, out_dim=50, bias=True)
    assert np.mean(layer.projection**2) == pytest.approx(1 / 20, rel=0.05)
    norms = np.linalg.norm(layer.key_bias, axis=1)
    assert np.mean(norms**2) ** 0.5 == pytest.approx(3 / 20**0.5, rel=0.05)
    assert np.std(layer.output_bias) == pytest.approx(1, rel=0.3)


@pytest.mark.parametrize(("rank", "expected"), [(None, 6), (1, 1), (3, 3), (9, 6)])
def test_random_layer_has_the_rank_asked_for(rank, expected):
    layer = AttentionLayer.random(heads=4, dim=6, rank=rank)
    assert set(np.linalg.matrix_rank(layer.attention)) == {expected}


def test_random_layer_repeats_with_its_seed():
    first, again, other = (
        AttentionLayer.random(heads=2, dim=3, seed=seed, bias=True) for seed in (1, 1, 2)
    )
    for name, array in first.arrays().items():
        np.testing.assert_array_equal(array, again.arrays()[name])
        assert not np.any(array == other.arrays()[name])


def test_random_layer_takes_a_generator_and_moves_it_on():
    rng = np.random.default_rng(1)
    first, second = (AttentionLayer.random(heads=2, dim=3, seed=rng) for _ in range(2))
    seeded = AttentionLayer.random(heads=2, dim=3, seed=1)
    np.testing.assert_array_equal(first.attention, seeded.attention)
    assert not np.any(second.attention == seeded.attention)


def test_random_layer_has_the_shapes_asked_for():
    plain = AttentionLayer.random(heads=2, dim=3)
    assert (plain.heads, plain.dim, plain.out_dim) == (2, 3, 3)
    assert plain.arrays().keys() == {"attention", "projection"}
    biased = AttentionLayer.random(heads=2, dim=3, out_dim=5, bias=True)
    shapes = {name: array.shape for name, array in biased.arrays().items()}
    assert shapes == {
        "attention": (2, 3, 3),
        "projection": (2, 3, 5),
        "key_bias": (2, 3),
        "output_bias": (5,),
    }


def test_repr_says_sizes_and_biases():
    assert repr(AttentionLayer.random(2, 3)) == "AttentionLayer(heads=2, dim=3, out_dim=3)"
    assert repr(AttentionLayer.random(1, 2, bias=True)).endswith("out_dim=2, with biases)")


# Refusals


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(2, 2), (1, 2, 2)], r"attention has shape \(2, 2\), expected \(heads, dim, dim\)"),
        ([(1, 2, 3), (1, 2, 2)], r"attention has shape \(1, 2, 3\), expected \(heads, dim, dim\)"),
        ([(0, 2, 2), (0, 2, 2)], r"attention has shape \(0, 2, 2\), expected"),
        ([(1, 2, 2), (2, 2, 2)], r"projection has shape \(2, 2, 2\), expected \(1, 2, out_dim\)"),
        ([(1, 2, 2), (1, 2, 0)], r"projection has shape \(1, 2, 0\), expected \(1, 2, out_dim\)"),
        ([(1, 2, 2), (1, 2, 3), (2,)], r"key_bias has shape \(2,\), expected \(1, 2\)"),
        ([(1, 2, 2), (1, 2, 3), (1, 2), (2,)], r"output_bias has shape \(2,\), expected \(3,\)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        AttentionLayer(*map(np.ones, shapes))


@pytest.mark.parametrize("name", ["attention", "projection", "key_bias", "output_bias"])
def test_weights_that_are_not_finite_real_numbers_are_refused(name):
    weights = AttentionLayer.random(heads=1, dim=2, bias=True).arrays()
    with pytest.raises(ValueError, match=rf"{name} has \d NaN or infinite entries"):
        AttentionLayer(**{**weights, name: weights[name] * np.nan})
    with pytest.raises(TypeError, match=f"{name} has dtype complex128, expected real numbers"):
        AttentionLayer(**{**weights, name: weights[name] * 1j})


@pytest.mark.parametrize(
    ("X", "error", "message"),
    [
        (np.ones((3, 4)), ValueError, r"X has shape \(3, 4\), expected three axes \(examples"),
        (np.ones((0, 3, 4)), ValueError, r"X has shape \(0, 3, 4\), expected at least one example"),
        (np.ones((1, 3, 5)), ValueError, "X has tokens of dimension 5, expected 4 as the layer"),
        (np.full((1, 1, 4), np.inf), ValueError, "X has 4 NaN or infinite entries, expected finit"),
        (np.ones((1, 1, 4)) * 1j, TypeError, "X has dtype complex128, expected real numbers"),
        ([[["a", "b"]]], TypeError, "X has dtype <U1, expected real numbers"),
        ([[[1.0, 2.0]], [[3.0]]], ValueError, "X is a ragged sequence, expected a rectangular arr"),
        (None, TypeError, "X has dtype object, expected real numbers"),
    ],
)
def test_examples_that_do_not_fit_are_refused(X, error, message):
    with pytest.raises(error, match=message):
        AttentionLayer.random(heads=2, dim=4)(X)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": 0}, ValueError, "heads is 0, expected a whole number of at least 1"),
        ({"heads": 2.5}, TypeError, r"heads is 2\.5, expected a whole number of at least 1"),
        ({"heads": True}, TypeError, "heads is True, expected a whole number of at least 1"),
        ({"dim": -1}, ValueError, "dim is -1, expected a whole number"),
        ({"rank": 0}, ValueError, "rank is 0, expected a whole number"),
        ({"out_dim": "3"}, TypeError, "out_dim is '3', expected a whole number"),
        ({"scale": 0}, ValueError, "scale is 0, expected a finite number above 0"),
        ({"scale": -1.0}, ValueError, r"scale is -1\.0, expected a finite number above 0"),
        ({"scale": np.inf}, ValueError, "scale is inf, expected a finite number above 0"),
        ({"scale": "2"}, TypeError, "scale is '2', expected a finite number above 0"),
    ],
)
def test_random_layers_that_cannot_be_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        AttentionLayer.random(**{"heads": 2, "dim": 3, **options})
