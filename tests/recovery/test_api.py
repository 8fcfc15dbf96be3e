import itertools

import numpy as np
import pytest
from cases import random_mask

from onelayer import AttentionLayer, Reason, Recovery, inputs, recover
from onelayer.array.backend import namespace, to_numpy

EXPLAINED = (Reason.EXACT, Reason.NOISE_FLOOR, Reason.APPROXIMATE)


def examples(n=160, tokens=3, draw=inputs.gaussian, layer_seed=0, seed=1, noise=0.0, **options):
    """A random layer with examples of it: (layer, X, Y)."""
    layer = AttentionLayer.random(**{"heads": 2, "dim": 4, "seed": layer_seed, **options})
    X = draw(n, tokens, layer.dim, seed=seed)
    Y = layer(X)
    return layer, X, Y + noise * np.random.default_rng(seed + 1000).standard_normal(Y.shape)


def head_error(found, layer):
    """The largest relative error of a head, projections included."""
    match = found.layer.distance(layer)
    return max(match.attention.max(), match.projection.max(), match.output_bias)


def assert_exact(found, layer, within=1e-9):
    assert found.reason is Reason.EXACT
    assert found.converged
    assert head_error(found, layer) < within
    assert found.certificate.undetermined_heads == []
    assert found.certificate.determined.shape == (layer.heads,)


def bits(layer):
    return {name: to_numpy(array).tobytes() for name, array in layer.arrays().items()}


# Exact recovery


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"heads": 1, "dim": 2},
        {"heads": 3, "dim": 5},
        {"scale": 10.0, "n": 300},
        {"dim": 6, "tokens": 4},
        {"out_dim": 1},
        {"out_dim": 2},
        {"out_dim": 7},
        {"tokens": 2, "n": 300},
    ],
)
@pytest.mark.parametrize("draw", [inputs.boolean, inputs.gaussian])
def test_layers_are_recovered(options, draw):
    layer, X, Y = examples(draw=draw, **options)
    assert_exact(recover(X, Y, heads=layer.heads), layer)


def test_layers_are_recovered_on_every_backend(xp_array):
    layer, X, Y = examples()
    found = recover(xp_array(X), xp_array(Y), heads=2)
    assert_exact(found, layer)
    assert isinstance(found, Recovery)
    for array in found.layer.arrays().values():
        assert namespace(array) is namespace(xp_array(X))
        assert to_numpy(array).dtype == np.float64


@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_inputs_on_the_sphere_do(scale):
    layer, X, Y = examples(draw=inputs.sphere, scale=scale)
    assert_exact(recover(X, Y, heads=2), layer, within=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 2])
def test_low_rank_is_used_where_it_is_known(xp_array, rank):
    layer, X, Y = examples(n=60, dim=5, rank=rank)
    found = recover(xp_array(X), xp_array(Y), heads=2, rank=rank)
    assert_exact(found, layer)
    ranks = np.linalg.matrix_rank(to_numpy(found.layer.attention), tol=1e-8)
    assert set(ranks) == {rank}


@pytest.mark.slow
def test_low_rank_needs_fewer_examples():
    layer, X, Y = examples(n=22, dim=8, rank=1, out_dim=2, tokens=4)
    assert not recover(X, Y, heads=2, restarts=0, max_steps=60).converged
    assert_exact(recover(X, Y, heads=2, rank=1), layer)


def test_a_rank_of_the_whole_dimension_is_no_restriction():
    _, X, Y = examples()
    plain, whole = recover(X, Y, heads=2), recover(X, Y, heads=2, rank=4)
    assert bits(plain.layer) == bits(whole.layer)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"rank": 2}, {"out_dim": 2}])
def test_biases_are_found(xp_array, options):
    layer, X, Y = examples(bias=True, **options)
    found = recover(xp_array(X), xp_array(Y), heads=2, bias=True, rank=options.get("rank"))
    assert_exact(found, layer)
    assert found.layer.key_bias is not None
    assert found.layer.output_bias is not None


def test_biases_that_are_not_there_are_found_to_be_zero():
    layer, X, Y = examples()
    found = recover(X, Y, heads=2, bias=True)
    assert found.converged
    assert abs(found.layer.key_bias).max() < 1e-9
    assert abs(found.layer.output_bias).max() < 1e-9
    assert found.layer.distance(layer).attention.max() < 1e-9


@pytest.mark.parametrize("bias", [False, True])
def test_causal_layers_are_recovered(xp_array, bias):
    layer, X, _ = examples(bias=bias)
    Y = layer(X, causal=True)
    assert_exact(recover(xp_array(X), xp_array(Y), heads=2, causal=True, bias=bias), layer)


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_padding_does_not_matter_whatever_is_in_it(xp_array, causal, bias):
    layer, X, _ = examples(n=200, bias=bias)
    mask = random_mask(np.random.default_rng(0), 200, 3)
    Y = layer(X, mask=mask, causal=causal)
    Y[~mask] = 1e6
    X[~mask] = -50.0
    found = recover(
        xp_array(X), xp_array(Y), heads=2, mask=xp_array(mask), causal=causal, bias=bias
    )
    assert_exact(found, layer)


def test_huge_numbers_in_the_padding_do_not_matter(xp_array):
    layer, X, _ = examples()
    mask = random_mask(np.random.default_rng(0), 160, 3)
    Y = layer(X, mask=mask)
    X[~mask] = 1e25
    assert_exact(recover(xp_array(X), xp_array(Y), heads=2, mask=xp_array(mask)), layer)


def test_a_mask_of_zeros_and_ones_is_a_mask():
    layer, X, _ = examples()
    mask = random_mask(np.random.default_rng(0), 160, 3)
    Y = layer(X, mask=mask)
    plain, numbers = (recover(X, Y, heads=2, mask=m) for m in (mask, mask.astype(int)))
    assert_exact(plain, layer)
    assert bits(plain.layer) == bits(numbers.layer)


@pytest.mark.slow
def test_single_precision_is_enough(xp_array):
    layer, X, _ = examples()
    X = X.astype(np.float32)
    Y = layer(X)
    assert Y.dtype == np.float32
    found = recover(xp_array(X), xp_array(Y), heads=2)
    assert_exact(found, layer, within=1e-5)
    assert to_numpy(found.layer.attention).dtype == np.float32


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [bool, np.int8, np.uint8, np.int64, np.float16])
def test_integers_and_booleans_are_taken_as_numbers(dtype):
    layer = AttentionLayer.random(heads=2, dim=4)
    X = np.random.default_rng(0).integers(0, 2, (200, 3, 4))
    found = recover(X.astype(dtype), layer(X), heads=2)
    assert_exact(found, layer)
    assert found.layer.attention.dtype == np.float64


def test_integer_outputs_are_taken_as_numbers():
    X = inputs.boolean(100, 3, 3)
    layer = AttentionLayer(np.zeros((1, 3, 3)), 6 * np.eye(3)[None])  # the sum of the tokens
    found = recover(X, np.round(layer(X)).astype(int), heads=1)
    np.testing.assert_allclose(found.layer.projection[0], 6 * np.eye(3), atol=1e-9)


def test_examples_of_which_few_are_different_are_not_all_held_out():
    X = inputs.boolean(100, 1, 3)
    found = recover(X, (2 * X).astype(int), heads=1)
    np.testing.assert_allclose(found.layer.projection[0], 2 * np.eye(3), atol=1e-9)


def test_lists_are_taken_as_arrays():
    layer, X, Y = examples()
    assert_exact(recover(X.tolist(), Y.tolist(), heads=2), layer)


def test_arrays_of_two_backends_meet_in_that_of_the_inputs(xp_array):
    layer, X, Y = examples()
    found = recover(xp_array(X), Y, heads=2)
    assert_exact(found, layer)
    assert namespace(found.layer.attention) is namespace(xp_array(X))


def test_torch_tensors_that_need_gradients_are_taken():
    torch = pytest.importorskip("torch")
    layer, X, Y = examples()
    tensors = [torch.tensor(a, requires_grad=True) for a in (X, Y)]
    found = recover(*tensors, heads=2)
    assert_exact(found, layer)
    assert not found.layer.attention.requires_grad
    assert tensors[0].grad is None


@pytest.mark.parametrize("sizes", [(1e-6, 1e6), (1e6, 1e-6)])
def test_units_do_not_matter(sizes):
    layer, X, Y = examples()
    found = recover(X * sizes[0], Y * sizes[1], heads=2)
    scaled = AttentionLayer(
        layer.attention / sizes[0] ** 2, layer.projection * (sizes[1] / sizes[0])
    )
    assert_exact(found, scaled)


def test_coordinates_of_very_different_sizes_do_not_matter():
    layer, X, Y = examples()
    stretch = np.diag([1.0, 1e2, 1e-2, 10.0])
    back = np.linalg.inv(stretch)
    found = recover(X @ stretch, Y, heads=2)
    assert_exact(found, AttentionLayer(back @ layer.attention @ back, back @ layer.projection))


def test_the_arguments_are_left_as_they_were():
    _, X, Y = examples()
    before = X.copy(), Y.copy()
    recover(X, Y, heads=2)
    np.testing.assert_array_equal(X, before[0])
    np.testing.assert_array_equal(Y, before[1])


@pytest.mark.parametrize("seed", range(4))
def test_bad_minima_are_escaped_from(seed):
    layer, X, Y = examples(
        n=130, tokens=4, heads=4, dim=8, scale=10.0, draw=inputs.boolean, layer_seed=seed
    )
    assert_exact(recover(X, Y, heads=4, seed=seed), layer, within=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("tol", [1e-3, 1e-15])
@pytest.mark.parametrize("rank", [None, 1, 2])
def test_the_error_asked_for_is_reached_or_rounding_is(tol, rank):
    layer, X, Y = examples(rank=rank)
    # A residual of 1e-3 leaves error bars of about the default of `head_tol`, on either side of it.
    found = recover(X, Y, heads=2, rank=rank, tol=tol, restarts=2, head_tol=0.5)
    assert found.converged
    assert found.relative_error <= max(tol, 1e-13)
    assert head_error(found, layer) < max(100 * tol, 1e-10)


# The number of heads


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2, 3])
def test_the_number_of_heads_is_found(xp_array, heads):
    layer, X, Y = examples(heads=heads, n=200)
    found = recover(xp_array(X), xp_array(Y), heads="auto")
    assert_exact(found, layer)
    evidence = {
        row.heads: row.held_out_error for row in found.trace if row.held_out_error is not None
    }
    assert evidence[heads] < 1e-6
    assert heads == 1 or evidence[heads - 1] > 1e-3


def test_heads_that_do_nothing_are_not_counted():
    layer, X, _ = examples(heads=3)
    layer.projection[1] = 0.0
    found = recover(X, layer(X), heads="auto")
    assert found.converged
    assert found.layer.heads == 2


def test_equal_heads_are_counted_once():
    layer, X, _ = examples(heads=3)
    layer.attention[2] = layer.attention[0]
    found = recover(X, layer(X), heads="auto")
    merged = AttentionLayer(
        layer.attention[:2], layer.projection[:2] + layer.projection[[2]] * [[[1]], [[0]]]
    )
    assert_exact(found, merged)


@pytest.mark.slow
def test_the_number_of_heads_is_found_under_noise():
    layer, X, Y = examples(n=500, noise=1e-2)
    found = recover(X, Y, heads="auto")
    assert found.reason is Reason.NOISE_FLOOR
    assert found.layer.heads == 2
    assert head_error(found, layer) < 0.02


# Noise


@pytest.mark.slow
@pytest.mark.parametrize(
    ("noise", "n", "bias"), [(1e-4, 300, False), (1e-2, 300, True), (0.3, 1500, False)]
)
def test_noisy_outputs_are_explained_down_to_the_noise(noise, n, bias):
    layer, X, Y = examples(n=n, noise=noise, bias=bias, seed=2)
    found = recover(X, Y, heads=2, bias=bias)
    assert found.reason is Reason.NOISE_FLOOR
    assert found.converged
    outputs = Y - Y.mean(axis=(0, 1)) if bias else Y
    relative = noise / np.sqrt(np.mean(outputs**2))
    assert found.relative_error == pytest.approx(relative, rel=0.2)
    assert found.certificate.noise == pytest.approx(relative, rel=0.2)
    assert found.certificate.error == pytest.approx(relative, rel=0.3)
    assert head_error(found, layer) < 0.5 * relative


@pytest.mark.slow
def test_noise_is_met_on_every_backend(xp_array):
    layer, X, Y = examples(n=300, noise=1e-3)
    found = recover(xp_array(X), xp_array(Y), heads=2)
    assert found.reason is Reason.NOISE_FLOOR
    assert head_error(found, layer) < 1e-3


@pytest.mark.slow
def test_nothing_but_noise_is_no_layer():
    X = inputs.gaussian(100, 3, 4)
    Y = np.random.default_rng(1).standard_normal(X.shape)
    found = recover(X, Y, heads=2, restarts=4)
    assert not found.converged
    assert found.certificate.error > 0.9


# What cannot be found


def assert_refuted(found, *reasons):
    """Not to be believed, for one of these reasons, with a remedy."""
    assert not found.converged
    assert found.reason in reasons
    assert found.reason.remedy


def test_equal_attention_of_two_heads_is_not_determined(xp_array):
    layer, X, _ = examples()
    layer.attention[1] = layer.attention[0]
    found = recover(xp_array(X), xp_array(layer(X)), heads=2)
    assert_refuted(found, Reason.HEADS_NOT_DETERMINED)
    assert found.relative_error < 1e-9
    assert found.certificate.undetermined_heads != []


def test_a_head_without_projection_is_not_determined(xp_array):
    layer, X, _ = examples(heads=3)
    layer.projection[1] = 0.0
    found = recover(xp_array(X), xp_array(layer(X)), heads=3)
    assert_refuted(found, Reason.HEADS_NOT_DETERMINED)
    (free,) = found.certificate.undetermined_heads
    match = found.layer.distance(layer)
    assert match.permutation[1] == free
    assert max(match.attention[[0, 2]]) < 1e-8


def test_more_heads_than_there_are_is_not_determined():
    _, X, Y = examples()
    found = recover(X, Y, heads=3)
    assert_refuted(found, Reason.HEADS_NOT_DETERMINED)
    assert len(found.certificate.undetermined_heads) >= 1


@pytest.mark.parametrize("heads", [1, 2])
def test_single_tokens_say_nothing_of_attention(xp_array, heads):
    _, X, Y = examples(tokens=1, heads=heads)
    found = recover(xp_array(X), xp_array(Y), heads=heads, restarts=2)
    assert_refuted(found, Reason.HEADS_NOT_DETERMINED)
    assert found.certificate.undetermined_heads == list(range(heads))
    np.testing.assert_allclose(to_numpy(found.layer(X)), Y, atol=1e-6)


@pytest.mark.parametrize("outputs", [0.0, 1.0])
def test_tokens_that_are_all_zero_say_nothing(xp_array, outputs):
    X = xp_array(np.zeros((20, 3, 2)))
    found = recover(X, X + outputs, heads=2, restarts=2)
    assert not found.converged
    assert found.reason.remedy
    assert found.certificate.undetermined_heads == [0, 1]
    assert found.relative_error == pytest.approx(outputs)


def test_outputs_that_are_all_zero_say_nothing(xp_array):
    _, X, _ = examples()
    found = recover(xp_array(X), xp_array(0 * X), heads=2)
    assert_refuted(found, Reason.HEADS_NOT_DETERMINED)
    assert found.certificate.undetermined_heads == [0, 1]
    assert abs(to_numpy(found.layer(X))).max() == 0


# Inputs on a span of fewer dimensions


def degenerate_inputs(kind):
    _, X, _ = examples()
    if kind == "zero":
        X[..., 3] = 0.0
    elif kind == "constant":
        X[..., 3] = 1.0
    elif kind == "copy":
        X[..., 3] = X[..., 2]
    elif kind == "centred":
        X -= X.mean(axis=2, keepdims=True)
    elif kind == "equal tokens":
        X = np.repeat(X[:, :1], 3, axis=1)
    else:
        X = np.eye(4)[np.random.default_rng(0).integers(0, 4, (160, 3))]
    return X


@pytest.mark.parametrize(
    ("kind", "rank"), [("zero", 3), ("constant", 3), ("copy", 3), ("centred", 3), ("one-hot", 3)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_layers_are_recovered_on_the_span_of_the_inputs(kind, rank, bias):
    layer = AttentionLayer.random(heads=2, dim=4, bias=bias)
    X = degenerate_inputs(kind)
    found = recover(X, layer(X), heads=2, bias=bias)
    assert found.reason is Reason.EXACT
    match = found.layer.distance(layer, inputs=X)
    assert max(match.attention.max(), match.projection.max(), match.output_bias) < 1e-8
    assert found.certificate.input_rank == rank
    assert found.certificate.nested_error.shape == (rank,)
    assert f"vary along {rank} of 4 directions" in found.advice
    assert found.trace[1].note.startswith(f"inputs vary along {rank} of 4 directions")


def test_equal_tokens_explain_but_do_not_determine():
    layer = AttentionLayer.random(heads=2, dim=4)
    X = degenerate_inputs("equal tokens")
    found = recover(X, layer(X), heads=2, restarts=1)
    assert_refuted(found, Reason.HEADS_NOT_DETERMINED)
    assert found.certificate.undetermined_heads == [0, 1]
    assert found.certificate.input_rank == 4
    assert found.relative_error < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 3, 5])
def test_fewer_equations_than_unknowns_are_too_few(n):
    _, X, Y = examples(n=n)
    found = recover(X, Y, heads=2, restarts=1)
    assert_refuted(found, Reason.TOO_FEW_EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("n", [6, 7, 9])
def test_few_examples_never_give_a_confident_wrong_answer(n, seed):
    layer, X, Y = examples(n=n, seed=seed, layer_seed=seed)
    found = recover(X, Y, heads=2, seed=seed, restarts=1)
    right = found.layer.distance(layer).attention.max() < 1e-6
    assert right or not found.converged
    assert found.converged == (found.reason in EXPLAINED)


@pytest.mark.parametrize("seed", [1, 3])
def test_examples_known_only_by_heart_are_too_few(seed, monkeypatch):
    monkeypatch.setattr("onelayer.recovery.validation._LARGEST_TOL", 0.5)
    X = inputs.gaussian(8, 3, 4, seed=seed)
    Y = np.random.default_rng(seed + 50).standard_normal(X.shape)
    found = recover(X, Y, heads=2, tol=0.45, seed=seed, restarts=2)
    assert_refuted(found, Reason.TOO_FEW_EXAMPLES)
    assert found.relative_error <= 0.45
    assert found.certificate.error > 1


@pytest.mark.slow
@pytest.mark.parametrize("heads", [1, 2])
def test_fewer_heads_than_there_are_do_not_explain(heads):
    _, X, Y = examples(heads=3)
    found = recover(X, Y, heads=heads, restarts=3)
    assert_refuted(found, Reason.TOO_FEW_HEADS, Reason.LOCAL_MINIMUM)
    assert found.layer.heads == heads
    assert found.relative_error > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"rank": 1}, {"causal": True}])
def test_the_wrong_kind_of_layer_does_not_explain(options):
    _, X, Y = examples()
    found = recover(X, Y, heads=2, restarts=2, **options)
    assert_refuted(found, Reason.LOCAL_MINIMUM, Reason.TOO_FEW_HEADS, Reason.WRONG_MODEL)


@pytest.mark.slow
def test_biases_that_were_not_asked_for_are_missed():
    _, X, Y = examples(bias=True)
    found = recover(X, Y, heads=2, restarts=2)
    assert_refuted(found, Reason.WRONG_MODEL)
    assert "pass bias=True" in found.advice
    assert found.layer.key_bias is None
    assert found.layer.output_bias is None


# Repeatable


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, "auto"])
def test_the_same_seed_gives_the_same_bits(xp_array, heads):
    _, X, Y = examples(noise=1e-3, n=60, dim=3)
    first, again = (
        recover(xp_array(X), xp_array(Y), heads=heads, seed=5, max_steps=70) for _ in range(2)
    )
    assert bits(first.layer) == bits(again.layer)
    assert [row.error for row in first.trace] == [row.error for row in again.trace]
    assert first.certificate.error_bound == again.certificate.error_bound


def test_another_seed_gives_other_bits_of_the_same_layer():
    layer, X, Y = examples()
    first, other = (recover(X, Y, heads=2, seed=seed) for seed in (5, 6))
    assert_exact(first, layer)
    assert_exact(other, layer)
    assert bits(first.layer) != bits(other.layer)


def test_a_generator_is_a_seed():
    _, X, Y = examples()
    seeded, drawn = (recover(X, Y, heads=2, seed=seed) for seed in (5, np.random.default_rng(5)))
    assert bits(seeded.layer) == bits(drawn.layer)


@pytest.mark.parametrize("method", ["auto", "refine"])
def test_both_names_of_the_method_are_one(method):
    layer, X, Y = examples()
    assert_exact(recover(X, Y, heads=2, method=method), layer)


# The trace, progress and budgets


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 3, "auto"])
def test_the_trace_has_one_row_a_step(heads):
    _, X, Y = examples(heads=3, n=120)
    found = recover(X, Y, heads=heads, restarts=2, method="refine")
    rows = found.trace
    assert [row.step for row in rows] == list(range(len(rows)))
    assert rows[0].stage == "span of the inputs"
    seconds = [row.seconds for row in rows]
    assert seconds == sorted(seconds)
    assert 0 <= seconds[-1] <= found.seconds
    rows = rows[1:]
    assert all(row.error >= 0 for row in rows)
    assert all(row.heads >= 1 and 1 <= row.examples < 120 for row in rows)
    assert all(row.damping > 0 and row.products >= 0 for row in rows)
    for before, after in itertools.pairwise(rows):
        if before.stage == after.stage and before.examples == after.examples:
            assert after.error <= before.error
            assert after.heads == before.heads
    assert found.relative_error in [row.error for row in rows if row.heads == found.layer.heads]
    assert found.relative_error == min(
        row.error
        for row in rows
        if row.heads == found.layer.heads and row.examples == rows[-1].examples
    )


@pytest.mark.slow
def test_the_relative_error_is_that_of_the_layer():
    _, X, Y = examples(heads=3)
    found = recover(X, Y, heads=2, restarts=1)
    gap = np.sqrt(np.mean((found.layer(X) - Y) ** 2) / np.mean(Y**2))
    assert gap == pytest.approx(found.relative_error, rel=0.1)


def test_held_out_examples_are_not_fitted():
    _, X, Y = examples(n=100)
    found = recover(X, Y, heads=2, method="refine")
    fitted = max(row.examples for row in found.trace[1:])
    assert found.certificate.examples + fitted == 100
    assert found.certificate.examples >= 1


def test_progress_is_told_every_row():
    _, X, Y = examples()
    heard = []
    found = recover(X, Y, heads=2, progress=heard.append)
    assert heard == found.trace
    assert len(heard) > 3


def test_progress_can_be_shown(capsys):
    layer, X, Y = examples()
    assert_exact(recover(X, Y, heads=2, progress=True), layer)
    assert capsys.readouterr().out == ""


def test_what_progress_raises_ends_the_recovery():
    class Enough(Exception):
        pass

    def stop(row):
        raise Enough

    _, X, Y = examples()
    with pytest.raises(Enough):
        recover(X, Y, heads=2, progress=stop)


@pytest.mark.parametrize("heads", [2, "auto"])
def test_steps_can_be_limited(heads):
    _, X, Y = examples()
    found = recover(X, Y, heads=heads, max_steps=4)
    assert_refuted(found, Reason.BUDGET_SPENT)
    assert 4 <= len(found.trace) <= 4 + 2  # a decision or a new stage has a row of its own
    assert found.layer.dim == 4


@pytest.mark.slow
def test_seconds_can_be_limited():
    X = inputs.gaussian(200, 3, 6)
    Y = np.random.default_rng(1).standard_normal(X.shape)
    found = recover(X, Y, heads=3, restarts=10_000, max_steps=10**9, max_seconds=0.3)
    assert_refuted(found, Reason.BUDGET_SPENT)
    assert 0.3 < found.seconds < 3


@pytest.mark.slow
def test_restarts_can_be_none():
    X = inputs.gaussian(60, 3, 4)
    Y = np.random.default_rng(1).standard_normal(X.shape)
    stages = {row.stage for row in recover(X, Y, heads=2, restarts=0).trace}
    more = {row.stage for row in recover(X, Y, heads=2, restarts=1).trace}
    assert stages < more


@pytest.mark.parametrize("reason", list(Reason))
def test_reasons_have_remedies_exactly_where_something_is_wrong(reason):
    assert bool(reason.remedy) == (reason not in EXPLAINED)
    assert str(reason) == f"{reason.name.lower()}: {reason.value}"


# Refusals


@pytest.mark.parametrize(
    ("X", "Y", "error", "message"),
    [
        (np.full((4, 2, 3), np.nan), None, ValueError, "X has 24 NaN or infinite entries, expecte"),
        (None, np.full((4, 2, 3), np.inf), ValueError, "Y has 24 NaN or infinite entries, expecte"),
        (np.ones((4, 3)), None, ValueError, r"X has shape \(4, 3\), expected three axes \(exampl"),
        (None, np.ones((4, 3)), ValueError, r"Y has shape \(4, 3\), expected three axes \(exampl"),
        (
            np.ones((2, 3)),
            None,
            ValueError,
            r"X has shape \(2, 3\), expected three axes \(exam",
        ),
        (
            None,
            np.ones((2, 3)),
            ValueError,
            r"Y has shape \(2, 3\), expected three axes \(exam",
        ),
        (np.array([["a"]]), None, TypeError, "X has dtype <U1, expected real numbers"),
        ("text", None, TypeError, "X has dtype <U4, expected real numbers"),
        ({}, None, TypeError, "X has dtype object, expected real numbers"),
        (
            np.ones((0, 2, 3)),
            None,
            ValueError,
            r"X has shape \(0, 2, 3\), expected at least one",
        ),
        (np.ones((4, 0, 3)), None, ValueError, r"X has shape \(4, 0, 3\), expected at least one"),
        (None, np.ones((4, 2, 0)), ValueError, r"Y has shape \(4, 2, 0\), expected at least one"),
        (np.ones((4, 2, 3)) * 1j, None, TypeError, "X has dtype complex128, expected real numbers"),
        (None, np.ones((4, 2, 3)) * 1j, TypeError, "Y has dtype complex128, expected real numbers"),
        (np.full((4, 2, 3), "a"), None, TypeError, "X has dtype <U1, expected real numbers"),
        (None, np.full((4, 2, 3), None), TypeError, "Y has dtype object, expected real numbers"),
        ([[[1.0], [2.0, 3.0]]], None, ValueError, "X is a ragged sequence, expected a rectangular"),
        (
            None,
            np.ones((5, 2, 3)),
            ValueError,
            "Y has 5 rows, expected 4: one for each example of X",
        ),
        (
            None,
            np.ones((4, 3, 3)),
            ValueError,
            "X has 2 tokens of dimension 3, but Y has 3 rows: expected one output row per token",
        ),
        (np.ones((1, 2, 3)), np.ones((1, 2, 3)), ValueError, "X has 1 example, expected at least"),
    ],
)
def test_examples_that_do_not_fit_are_refused(X, Y, error, message):
    plain = np.ones((4, 2, 3))
    with pytest.raises(error, match=message):
        recover(plain if X is None else X, plain if Y is None else Y, heads=1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"heads": 0}, ValueError, "heads is 0, expected a whole number of at least 1"),
        ({"heads": -1}, ValueError, "heads is -1, expected a whole number of at least 1"),
        ({"heads": 2.5}, TypeError, r"heads is 2\.5, expected a whole number of at least 1"),
        ({"heads": True}, TypeError, "heads is True, expected a whole number of at least 1"),
        ({"heads": None}, TypeError, "heads is None, expected a whole number of at least 1"),
        ({"heads": "four"}, ValueError, "heads is 'four', expected a whole number or 'auto'"),
        ({"rank": 0}, ValueError, "rank is 0, expected a whole number of at least 1"),
        ({"rank": 1.0}, TypeError, r"rank is 1\.0, expected a whole number of at least 1"),
        ({"rank": 4}, ValueError, "rank is 4, expected at most 3, the dimension of a token"),
        ({"tol": 0}, ValueError, "tol is 0, expected a finite number above 0"),
        ({"tol": -1e-3}, ValueError, r"tol is -0\.001, expected a finite number above 0"),
        ({"tol": np.nan}, ValueError, "tol is nan, expected a finite number above 0"),
        ({"tol": "1"}, TypeError, "tol is '1', expected a finite number above 0"),
        ({"method": "sculp"}, ValueError, "'refine', 'sculpt'; did you mean 'sculpt'"),
        ({"restarts": -1}, ValueError, "restarts is -1, expected a whole number of at least 0"),
        ({"restarts": 0.5}, TypeError, r"restarts is 0\.5, expected a whole number of at least 0"),
        ({"max_steps": 0}, ValueError, "max_steps is 0, expected a whole number of at least 1"),
        ({"max_seconds": 0}, ValueError, "max_seconds is 0, expected a finite number above 0"),
        ({"device": "tpu"}, ValueError, "device='tpu' is unknown, expected 'cpu' or 'cuda'"),
        ({"mask": np.ones((4, 3))}, ValueError, r"mask has shape \(4, 3\), expected \(4, 2\): one"),
        ({"mask": np.full((4, 2), 2)}, ValueError, "mask has entries other than 0 and 1, expected"),
        ({"mask": np.zeros((4, 2))}, ValueError, "mask leaves example 0 without a token, expected"),
    ],
)
def test_options_that_cannot_be_are_refused(options, error, message):
    X = np.ones((4, 2, 3))
    with pytest.raises(error, match=message):
        recover(X, X, **{"heads": 1, **options})


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    X = np.ones((4, 2, 3))
    message = "device='cuda' was asked for, but torch sees no such GPU here"
    with pytest.raises(ValueError, match=message):
        recover(X, X, heads=1, device="cuda")


def test_the_cpu_is_a_device(xp_array):
    layer, X, Y = examples()
    found = recover(xp_array(X), xp_array(Y), heads=2, device="cpu")
    assert_exact(found, layer)
    assert namespace(found.layer.attention) is namespace(xp_array(X))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_head_without_projection_is_found_out_among_heads_of_unequal_size(seed):
    layer = AttentionLayer.random(4, 8, scale=2.0, seed=seed)
    sizes = np.array([0, 0.03, 0.2, 1])[:, None, None]
    layer = AttentionLayer(layer.attention, layer.projection * sizes)
    X = inputs.boolean(300, 4, 8, seed=seed + 1)
    found = recover(X, layer(X), heads=4)
    assert not found.converged
    assert found.reason is Reason.HEADS_NOT_DETERMINED
    lost = found.layer.distance(layer).permutation[0]
    assert found.certificate.undetermined_heads == [lost]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["output bias", "key bias", "product", "bent"])
def test_what_a_layer_of_this_kind_cannot_be_is_not_taken_for_noise(kind):
    layer = AttentionLayer.random(2, 4, scale=2.0, seed=0, bias=True)
    plain = AttentionLayer(layer.attention, layer.projection)
    X = inputs.boolean(300, 3, 4, seed=10)
    Y = {
        "output bias": plain(X) + 1.0,
        "key bias": AttentionLayer(layer.attention, layer.projection, layer.key_bias)(X),
        "product": plain(X) + 0.3 * X[..., :1] * X[..., 1:2],
        "bent": np.tanh(plain(X)),
    }[kind]
    found = recover(X, Y, heads=2, restarts=4)
    assert not found.converged


def test_a_loose_tolerance_is_refused():
    _, X, Y = examples()
    with pytest.raises(ValueError, match=r"tol is 0.1, expected at most 0.001"):
        recover(X, Y, heads=2, tol=0.1)


def test_entries_beyond_reason_are_refused():
    _, X, Y = examples()
    with pytest.raises(ValueError, match=r"X has entries up to 4e\+170, expected between"):
        recover(X * 1e170, Y, heads=2)


def test_progress_that_is_neither_a_switch_nor_a_function_is_refused():
    _, X, Y = examples()
    with pytest.raises(TypeError, match=r"progress is 'yes', expected True, False, None or a"):
        recover(X, Y, heads=2, progress="yes")


def test_the_certificate_is_for_examples_that_no_decision_rested_on():
    _, X, Y = examples()
    known, unknown = recover(X, Y, heads=2), recover(X, Y, heads="auto")
    assert unknown.certificate.examples < known.certificate.examples
