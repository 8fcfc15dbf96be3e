import numpy as np
import pytest

import onelayer as ol
from onelayer.recovery.reasons import Reason


def asked(layer, **options):
    """What `query` finds, with bars that are compared with the true errors."""
    found = ol.query(layer, layer.dim, **options)
    if found.converged:
        match = found.layer.distance(layer)
        bars = found.certificate.attention_error[match.permutation]
        assert (match.attention <= 3 * bars + 1e-15).all()
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"heads": 1, "dim": 3},
        {"heads": 3, "dim": 5},
        {"heads": 2, "dim": 4, "bias": True},
        {"heads": 2, "dim": 6, "rank": 2, "out_dim": 3},
    ],
)
def test_layers_are_found_with_their_number_of_heads(options):
    layer = ol.AttentionLayer.random(scale=2.0, seed=0, **options)
    found = asked(layer, bias=options.get("bias", False))
    assert found.converged
    assert found.reason is Reason.EXACT
    assert found.layer.heads == layer.heads
    assert found.layer.distance(layer).attention.max() < 1e-8
    X = ol.inputs.gaussian(20, 6, layer.dim, seed=9)
    np.testing.assert_allclose(found.layer(X), layer(X), rtol=1e-6, atol=1e-8)


def test_what_was_asked_is_counted_and_shown():
    layer = ol.AttentionLayer.random(heads=3, dim=6, scale=2.0, seed=1)
    sizes = []

    def oracle(X):
        sizes.append(X.shape)
        return layer(X)

    found = ol.query(oracle, 6, heads=3)
    assert found.queries == sum(n for n, *_ in sizes)
    assert found.scalars_returned == sum(n * tokens * 6 for n, tokens, _ in sizes)
    assert found.scalars < 4 * 3 * 6**2 - 2 * 3 + 1 < found.scalars_returned
    assert max(tokens for _, tokens, _ in sizes) <= 8
    shown = " ".join(repr(found).split())
    assert f"{found.queries} inputs; the layer from {found.scalars} of" in shown
    assert f"{found.scalars_returned} output entries" in shown


def test_recoveries_from_examples_have_no_queries():
    layer = ol.AttentionLayer.random(heads=1, dim=3, seed=0)
    X = ol.inputs.gaussian(60, 3, 3, seed=1)
    found = ol.recover(X, layer(X), heads=1)
    assert (found.queries, found.scalars, found.scalars_returned) == (None, None, None)
    assert "queries" not in repr(found)


def test_the_same_seed_asks_the_same_and_finds_the_same():
    layer = ol.AttentionLayer.random(heads=2, dim=4, scale=2.0, seed=2)
    runs = []
    for _ in range(2):
        inputs = []
        found = ol.query(lambda X, seen=inputs: (seen.append(X.copy()), layer(X))[1], 4, seed=5)
        runs.append((found.layer.attention, *inputs))
    assert len(runs[0]) == len(runs[1])
    assert all(np.array_equal(a, b) for a, b in zip(*runs, strict=True))


def test_progress_tells_what_is_done():
    layer = ol.AttentionLayer.random(heads=2, dim=4, scale=2.0, seed=3)
    rows = []
    found = ol.query(layer, 4, progress=rows.append)
    assert rows == found.trace
    notes = {row.stage: row.note for row in rows if row.note}
    assert notes["scale of the inputs"].startswith("standard deviation ")
    assert notes["closed form"] == f"2 heads from {found.scalars} output entries"
    assert notes["random inputs"] == "20 of 3 tokens"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float16, 0.02)])
def test_outputs_of_limited_precision_give_bars_that_are_as_wide(dtype, tolerance):
    layer = ol.AttentionLayer.random(heads=2, dim=4, scale=2.0, seed=4)
    found = ol.query(lambda X: layer(X).astype(dtype), 4, heads=2)
    assert found.converged
    match = found.layer.distance(layer)
    bars = found.certificate.attention_error[match.permutation]
    assert (match.attention <= 3 * bars).all()
    assert np.finfo(dtype).eps / 10 < bars.max() < tolerance
    assert found.certificate.noise > np.finfo(dtype).eps / 20


@pytest.mark.slow
def test_noise_is_found_as_such():
    layer = ol.AttentionLayer.random(heads=2, dim=4, scale=2.0, seed=0)
    rng = np.random.default_rng(0)
    noisy = ol.query(lambda X: layer(X) + 1e-4 * rng.standard_normal(X.shape), 4, heads=2)
    assert noisy.converged
    assert noisy.reason is Reason.NOISE_FLOOR
    match = noisy.layer.distance(layer)
    bars = noisy.certificate.attention_error[match.permutation]
    assert (match.attention <= 3 * bars).all()
    assert 1e-5 < bars.max() < 0.1


@pytest.mark.slow
def test_more_heads_than_dimensions_are_searched_from_random_inputs():
    layer = ol.AttentionLayer.random(heads=3, dim=2, scale=2.0, seed=0)
    found = ol.query(layer, 2, heads=3)
    assert found.converged
    assert found.layer.distance(layer).attention.max() < 1e-8
    assert any("not found" in row.note for row in found.trace if row.stage == "closed form")
    assert 0 < found.scalars <= found.scalars_returned


@pytest.mark.slow
def test_a_function_that_is_no_such_layer_does_not_converge():
    found = ol.query(np.tanh, 3, heads=1, max_seconds=10)
    assert not found.converged


def test_queries_end_at_their_limit():
    layer = ol.AttentionLayer.random(heads=2, dim=4, scale=2.0, seed=0)
    found = ol.query(layer, 4, max_queries=30)
    assert found.queries == 30
    assert not found.converged
    with pytest.raises(ValueError, match="max_queries is 10, and 10 queries were not enough to"):
        ol.query(layer, 4, max_queries=10)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"oracle": np.eye(3)}, TypeError, "oracle is ndarray, expected a function"),
        ({"dim": 0}, ValueError, "dim is 0, expected"),
        ({"max_queries": 0}, ValueError, "max_queries is 0, expected"),
        ({"heads": "all"}, ValueError, "heads is 'all', expected a whole number or 'auto'"),
        ({"rank": 4}, ValueError, "rank is 4, expected at most 3, the dimension of a token"),
        ({"tol": 1.0}, ValueError, "tol is 1, expected at most 0.001"),
        ({"bias": 1}, TypeError, "bias is 1, expected True or False"),
        ({"progress": 3}, TypeError, "progress is 3, expected True, False, None or a function"),
    ],
)
def test_arguments_are_checked(arguments, kind, message):
    given = {"oracle": np.tanh, "dim": 3, **arguments}
    with pytest.raises(kind) as refused:
        ol.query(**given)
    assert message in str(refused.value)


def test_bad_answers_are_refused():
    with pytest.raises(ValueError, match=r"oracle returned an array of shape \(1, 1\) for inputs"):
        ol.query(lambda X: X.sum(axis=2), 3)
    with pytest.raises(ValueError, match=r"infinite or missing values \(NaN\)"):
        ol.query(lambda X: X * np.nan, 3)
