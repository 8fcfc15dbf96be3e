"""Outputs at some positions only: what counts as an equation, and what is only attended to."""

import re

import numpy as np
import places
import pytest
from cases import random_mask
from command_line import run, words
from recoveries import bits

import onelayer as ol
from onelayer import AttentionLayer, inputs, recover
from onelayer.array.backend import to_numpy
from onelayer.heads import dense
from onelayer.recovery import validation
from onelayer.recovery.diagnosis import noise
from onelayer.recovery.examples import hold, whiten
from onelayer.recovery.factored import model
from onelayer.recovery.gauss_newton import jacobian, varpro

N, TOKENS, DIM = 60, 4, 5
FIRST = [True, False, False, False]


def problem(observed, mask=None, causal=False, bias=False, n=N):
    """A layer and examples, with outputs that are not observed far off."""
    layer = AttentionLayer.random(heads=2, dim=DIM, scale=2.0, seed=0)
    if bias:
        rng = np.random.default_rng(5)
        added = {"key_bias": rng.standard_normal((2, DIM)), "output_bias": np.ones(DIM)}
        layer = AttentionLayer(layer.attention, layer.projection, **added)
    X = inputs.gaussian(n, TOKENS, DIM, seed=1)
    Y = layer(X, mask=mask, causal=causal)
    seen = np.broadcast_to(observed, (n, TOKENS))
    return layer, X, np.where(seen[:, :, None], Y, 1e6)


def in_blocks(X, Y, mask, observed, causal=False, bias=False):
    given = validation.examples(X, Y, mask, observed=observed)
    return whiten(given, causal, bias, hold_all=True)


def random_observed(seed=3, n=N):
    """At least one output in every example."""
    return random_mask(np.random.default_rng(seed), n, TOKENS)


VARIANTS = {
    "plain": {},
    "masked": {"mask": np.tile([False, True, True, True], (N, 1))},
    "causal": {"causal": True},
    "biased": {"bias": True},
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def one_at_a_time(X, Y, observed, mask):
    """The same equations, as examples with one observed output each."""
    example, token = np.nonzero(observed if mask is None else observed & mask)
    alone = np.arange(TOKENS) == token[:, None]
    return X[example], Y[example], None if mask is None else mask[example], alone


@every_variant
def test_an_example_counts_as_its_observed_rows_one_by_one(variant):
    mask = variant.get("mask")
    options = {name: value for name, value in variant.items() if name != "mask"}
    observed = random_observed()
    if mask is not None:
        observed[:, 1] |= ~(observed & mask).any(1)
    _, X, Y = problem(observed, **variant)
    given = in_blocks(X, Y, mask, observed, **options)
    assert given.equations == (observed & (True if mask is None else mask)).sum() * DIM
    X, Y, mask, observed = one_at_a_time(X, Y, observed, mask)
    # In the same coordinates, which are found from all tokens.
    kinds = validation.examples(X, Y, mask, observed=observed).source.first(len(X))[2]
    split = hold(given, *given.apply(X, Y, kinds))
    theta = given.heads_of(AttentionLayer.random(heads=2, dim=DIM, seed=4))
    one, other = (varpro.fit(posed.batches(2), theta) for posed in (given, split))
    assert 0.1 < one.error == pytest.approx(other.error, rel=1e-9)
    np.testing.assert_allclose(one.weights, other.weights, atol=1e-9)
    change = np.random.default_rng(0).standard_normal(theta.shape)
    products = [jacobian.jacobian(fit).gauss_newton_product(change) for fit in (one, other)]
    np.testing.assert_allclose(*products, atol=1e-9 * np.abs(products[0]).max())


def test_weights_are_those_of_least_squares_over_observed_rows():
    observed = random_observed()
    _, X, Y = problem(observed)
    posed = in_blocks(X, Y, None, observed)
    layer = AttentionLayer.random(heads=2, dim=DIM, seed=4)
    fit = varpro.fit(posed.batches(2), posed.heads_of(layer))
    rows = [
        np.concatenate([attend(x, theta)[token] for theta in layer.attention])
        for x, seen in zip(X, observed, strict=True)
        for token in np.flatnonzero(seen)
    ]
    expected, *_ = np.linalg.lstsq(np.array(rows), Y[observed], rcond=None)
    found = posed.transform.layer(fit.theta, fit.weights).projection
    np.testing.assert_allclose(found.reshape(-1, DIM), expected, atol=1e-8)


def attend(x, theta):
    """The attended tokens (k, d) of one example and head."""
    scores = np.exp(x @ theta @ x.T)
    return scores / scores.sum(1, keepdims=True) @ x


def test_unobserved_rows_of_a_factored_layer_have_no_residuals():
    observed = random_observed()
    _, X, Y = problem(observed)
    posed = in_blocks(X, Y, None, observed)
    (block,) = posed.parts(10**6)
    np.testing.assert_array_equal(to_numpy(block.counted)[:, 0], observed.ravel())
    np.testing.assert_array_equal(block.allowed, np.repeat(observed[:, :, None], TOKENS, axis=2))
    assert not block.outputs[~observed.ravel()].any()
    assert np.abs(dense.flat_tokens(block.keys)[~observed.ravel()]).min() > 0  # still attended to
    assert model.counted(block.outputs + 1, block)[~observed.ravel()].sum() == 0


# Recoveries


@pytest.mark.parametrize(
    ("observed", "options"),
    [
        ("first", {}),
        ("last", {"causal": True}),
        ([False, True, True, False], {"bias": True}),
        ("last", {"mask": random_mask(np.random.default_rng(3), 400, TOKENS)}),
    ],
    ids=["first", "last-causal", "pattern-biased", "last-masked"],
)
def test_the_layer_is_found_from_some_outputs(observed, options):
    mask = options.get("mask")
    pattern, by_example = validation.roles.given(observed)
    X = inputs.gaussian(400, TOKENS, DIM, seed=1)
    seen = validation.roles.of(mask, by_example, pattern, X, 0) == 2
    layer, X, Y = problem(seen, n=400, **options)
    Y[~seen] = np.nan
    found = recover(X, Y, heads=2, observed=observed, **options)
    assert found.converged, found.reason
    match = found.layer.distance(layer)
    assert max(match.attention.max(), match.projection.max()) < 1e-9
    assert found.certificate.attention_error.max() < 1e-9
    assert (match.attention[np.isfinite(match.attention)] <= 1e-9).all()


def test_unobserved_outputs_do_not_matter_to_the_last_bit():
    _, X, Y = problem(FIRST, n=300)
    other = Y.copy()
    other[:, 1:] = np.random.default_rng(0).standard_normal(other[:, 1:].shape)
    first, second = (recover(X, one, heads=2, observed="first") for one in (Y, other))
    assert bits(first.layer) == bits(second.layer)


def test_all_outputs_observed_is_the_default():
    layer, X, Y = problem(True, n=200)
    for observed in (np.ones((200, TOKENS), bool), np.ones(TOKENS)):
        found = recover(X, Y, heads=2, observed=observed)
        assert found.converged
        assert found.layer.distance(layer).attention.max() < 1e-9


def test_the_number_of_heads_is_found_from_first_tokens():
    layer, X, Y = problem(FIRST, n=500)
    found = recover(X, Y, heads="auto", observed="first")
    assert found.converged
    assert found.layer.heads == layer.heads == 2


@pytest.mark.slow
def test_noise_is_recognised_and_error_bars_hold():
    layer, X, Y = problem(FIRST, n=3000)
    Y = Y + 0.01 * np.random.default_rng(0).standard_normal(Y.shape)
    found = recover(X, Y, heads=2, observed="first")
    assert found.reason.name == "NOISE_FLOOR", found.reason
    match = found.layer.distance(layer)
    bars = found.certificate.attention_error[list(match.permutation)]
    assert (match.attention < 3 * bars).all()
    assert bars.max() < 0.2


@pytest.mark.slow
def test_large_problems_are_found_from_first_tokens(all_are_large):
    layer = AttentionLayer.random(heads=3, dim=6, rank=2, seed=0)
    X = inputs.boolean(4000, 4, 6, seed=1)
    Y = layer(X)
    Y[:, 1:] = np.nan
    found = recover(X, Y, heads=3, rank=2, observed="first")
    assert found.converged, found.reason
    assert found.layer.distance(layer).attention.max() < 1e-8
    assert found.certificate.attention_error.max() < 1e-6


@pytest.mark.parametrize("kind", ["file", "function", "dask"])
@pytest.mark.parametrize("by_example", [False, True], ids=["first", "array"])
def test_observed_outputs_may_be_anywhere(kind, by_example, request):
    put = places.place(kind, request)
    layer, X, Y = problem(FIRST, n=300)
    observed = np.tile(FIRST, (300, 1)) if by_example else "first"
    found = recover(put(X), put(Y), heads=2, observed=put(observed) if by_example else observed)
    assert found.converged
    assert found.layer.distance(layer).attention.max() < 1e-9


def test_constant_queries_are_not_called_determined():
    """A first token that is always the same shows one row of every attention matrix."""
    layer = AttentionLayer.random(heads=1, dim=DIM, seed=0)
    X = inputs.gaussian(300, TOKENS, DIM, seed=1)
    X[:, 0] = 1.0
    found = recover(X, layer(X), heads=1, observed="first", restarts=1)
    assert not found.converged
    assert np.isinf(found.certificate.attention_error).all()


# Diagnosis


def test_scatter_is_that_of_observed_outputs():
    _, X, Y = problem(FIRST, n=100)
    X, Y = np.repeat(X, 3, axis=0), np.repeat(Y, 3, axis=0)
    size = np.sqrt(np.mean(Y[:, 0] ** 2))
    Y = Y + 0.2 * size * np.random.default_rng(0).standard_normal(Y.shape)
    blocks = in_blocks(X, Y, None, "first").parts(10**6)
    pairs, variance = noise.scatter(blocks)
    assert pairs == 200
    assert variance == pytest.approx(0.2**2 / (1 + 0.2**2), rel=0.15)


def test_tokens_that_no_observed_row_attends_to_make_no_difference():
    _, X, Y = problem([False, True, False, False], causal=True, n=50)
    other = X.copy()
    other[:, 2:] += 1.0
    other[:, 1] = X[:, 1]
    both, outputs = np.concatenate([X, other]), np.concatenate([Y, Y])
    pattern = [False, True, False, False]
    blocks = in_blocks(both, outputs, None, pattern, causal=True).parts(10**6)
    assert noise.scatter(blocks) == (0, 0.0)  # copies
    assert noise.scatter(in_blocks(both, outputs, None, pattern).parts(10**6)) == (0, 0.0)
    (block,) = blocks
    expected = np.tile([True, True, False, False], (100, 1))
    np.testing.assert_array_equal(noise._read(block), expected)


# Refusals and the command line


def refused(message, n=40, observed="first", **options):
    _, X, Y = problem(True, n=n)
    with pytest.raises(ValueError, match=re.escape(message)):
        recover(X, Y, heads=2, observed=observed, **options)


def test_arguments_that_do_not_fit_are_refused():
    refused("observed is 'frist', expected one of 'first', 'last'", observed="frist")
    refused("observed has shape (3,), expected (4,) or (examples, tokens)", observed=[1, 0, 0])
    refused(
        "observed has shape (40, 3), expected (40, 4), (4,), 'first'", observed=np.ones((40, 3))
    )
    refused("observed has 39 rows, expected 40", observed=np.ones((39, 4)))
    some = np.ones((40, 4))
    some[7] = 0
    refused("observed leaves example 7 without a token", observed=some)
    refused(
        "method='sculpt' was asked for with observed, expected outputs of all tokens: "
        "method='refine' finds layers from some of them",
        method="sculpt",
    )


def test_observed_outputs_may_not_be_infinite():
    _, X, Y = problem(True, n=40)
    Y[3, 0] = np.inf
    with pytest.raises(ValueError, match="Y "):
        recover(X, Y, heads=2, observed="first")


def test_the_command_reads_observed_from_the_file(tmp_path):
    layer, X, Y = problem(FIRST, n=300)
    Y[:, 1:] = np.nan
    observed = np.tile(FIRST, (300, 1))
    np.savez(tmp_path / "examples.npz", X=X, Y=Y, observed=observed)
    output = tmp_path / "layer.safetensors"
    result = run("recover", tmp_path / "examples.npz", "--heads", 2, "-o", output)
    assert result.exit_code == 0, words(result.output)
    assert ol.AttentionLayer.load(output).distance(layer).attention.max() < 1e-9
