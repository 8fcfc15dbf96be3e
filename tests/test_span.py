import numpy as np
import pytest
from cases import random_mask
from hypothesis import given
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.span import moments, span_of


def normalised(X, dtype=np.float64):
    """Tokens as LayerNorm leaves them: mean zero, length √d."""
    X = X - X.mean(axis=2, keepdims=True)
    return (X / np.sqrt(np.mean(X**2, axis=2, keepdims=True))).astype(dtype)


def degenerate(kind, n=200, dim=5):
    """Tokens on an affine span of fewer dimensions."""
    X = inputs.gaussian(n, 3, dim, seed=0)
    if kind == "normalised":
        return normalised(X)
    if kind == "shifted":
        return normalised(X) + 0.5
    if kind == "constant":
        X[..., 1] = 2.5
    elif kind == "copied":
        X[..., 1] = X[..., 3]
    elif kind == "vocabulary":
        X = X[:4, 0][np.random.default_rng(1).integers(0, 4, (n, 3))]
    elif kind == "one-hot":
        X = np.eye(dim)[np.random.default_rng(1).integers(0, dim, (n, 3))]
    return X


DEGENERATE = {
    "gaussian": (5, False),
    "normalised": (4, False),
    "shifted": (4, True),
    "constant": (4, True),
    "copied": (4, False),
    "vocabulary": (3, True),
    "one-hot": (4, True),
}


# The directions


@pytest.mark.parametrize("kind", DEGENERATE)
def test_the_span_is_that_of_the_tokens(kind):
    X = degenerate(kind)
    rank, away = DEGENERATE[kind]
    found = span_of(X)
    rows = X.reshape(-1, 5)
    assert found.rank == rank
    assert bool(found.outside.any()) == away
    np.testing.assert_allclose(found.mean, rows.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(found.basis.T @ found.basis, np.eye(rank), atol=1e-12)
    along = (rows - found.mean) @ found.basis
    np.testing.assert_allclose(along @ found.basis.T + found.mean, rows, atol=1e-9)
    np.testing.assert_allclose(found.deviations, along.std(axis=0), rtol=1e-9)
    assert (np.diff(found.deviations) <= 0).all()
    np.testing.assert_allclose(found.outside @ found.basis, 0.0, atol=1e-12)


def test_the_span_is_the_same_on_every_backend(xp_array):
    X = degenerate("constant")
    found, expected = span_of(xp_array(X)), span_of(X)
    assert found.rank == expected.rank == 4
    for name in ("mean", "deviations", "outside"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), atol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("dim", [4, 64])
def test_rounding_of_normalised_tokens_is_no_direction(dtype, dim):
    X = normalised(inputs.gaussian(2000, 4, dim, seed=0), dtype)
    assert span_of(X).rank == dim - 1
    assert not span_of(X).outside.any()
    assert span_of(X.astype(np.float64)).rank == dim - 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_weak_directions_count_where_they_are_above_the_rounding(dtype):
    X = inputs.gaussian(500, 3, 4, seed=0) * [1.0, 1.0, 1.0, 0.05]
    assert span_of(X.astype(dtype)).rank == 4


@pytest.mark.parametrize(("weakest", "rank"), [(1e-2, 5), (1e-5, 5), (3e-7, 5), (1e-9, 4)])
def test_directions_count_down_to_a_share_of_the_strongest(weakest, rank):
    turn = np.linalg.qr(np.random.default_rng(1).standard_normal((5, 5)))[0]
    X = inputs.gaussian(500, 3, 5, seed=0) * np.geomspace(1, weakest, 5)[[0, 0, 0, 0, 4]] @ turn
    assert span_of(X).rank == rank


@pytest.mark.parametrize("size", [1e-150, 1e-9, 1.0, 1e9, 1e150])
@pytest.mark.parametrize("kind", DEGENERATE)
def test_the_scale_of_the_tokens_does_not_matter(kind, size):
    plain, scaled = span_of(degenerate(kind)), span_of(degenerate(kind) * size)
    assert scaled.rank == plain.rank
    np.testing.assert_allclose(scaled.mean, plain.mean * size, rtol=1e-9, atol=1e-12 * size)
    np.testing.assert_allclose(scaled.deviations, plain.deviations * size, rtol=1e-9)
    assert scaled.outside.any() == plain.outside.any()


def test_tokens_that_are_not_there_do_not_count(xp_array):
    X = degenerate("constant")
    mask = random_mask(np.random.default_rng(0), *X.shape[:2])
    X[~mask] = 77.0
    found = span_of(xp_array(X), xp_array(mask))
    assert found.rank == 4
    np.testing.assert_allclose(found.mean, X[mask].mean(axis=0), atol=1e-12)
    assert span_of(X).rank == 5


@pytest.mark.parametrize("kind", ["zeros", "ones"])
def test_tokens_that_are_all_the_same_have_no_direction(kind):
    found = span_of(getattr(np, kind)((6, 2, 3)))
    assert found.rank == 0
    assert found.basis.shape == (3, 0)
    assert bool(found.outside.any()) == (kind == "ones")


@pytest.mark.parametrize("n", [1000, 20_000])
def test_tokens_that_are_all_the_same_have_no_direction_by_rounding(n):
    assert span_of(np.full((n, 5, 4), [0.1, 1.0, -0.7, 1 / 3])).rank == 0


# Moments


@given(
    seed=st.integers(0, 2**32 - 1),
    counts=st.lists(st.integers(0, 7), min_size=1, max_size=5),
    masked=st.booleans(),
    by_column=st.booleans(),
    far=st.sampled_from([0.0, 1e6]),
)
def test_moments_of_blocks_add_up_to_those_of_all(seed, counts, masked, by_column, far):
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal((n, 2, 3)) + far for n in counts]
    there = [rng.random((n, 2)) < 0.6 if masked else None for n in counts]
    terms = [moments(part, mask, by_column) for part, mask in zip(parts, there, strict=True)]
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    kept = np.concatenate(
        [p.reshape(-1, 3) if m is None else p[m] for p, m in zip(parts, there, strict=True)]
    )
    assert total.rows == len(kept)
    if len(kept):
        about = kept - kept.mean(axis=0)
        expected = np.sum(about**2, axis=0) if by_column else about.T @ about
        np.testing.assert_allclose(total.mean, kept.mean(axis=0), rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(total.scatter, expected, rtol=0, atol=1e-8 * (1 + far / 1e3))


def test_the_span_does_not_depend_on_the_blocks(monkeypatch):
    X = degenerate("constant")
    whole = span_of(X)
    monkeypatch.setattr("onelayer.array.blocks.BLOCK_BYTES", 16 * 3 * 5 * 7)
    cut = span_of(X)
    np.testing.assert_allclose(cut.mean, whole.mean, atol=1e-12)
    np.testing.assert_allclose(cut.deviations, whole.deviations, rtol=1e-12)


# Heads on the span


@pytest.mark.parametrize("kind", DEGENERATE)
@pytest.mark.parametrize("bias", [False, True])
def test_heads_on_the_span_compute_what_the_layer_does(kind, bias):
    layer = AttentionLayer.random(heads=2, dim=5, out_dim=3, bias=bias, seed=1)
    X = degenerate(kind)
    inside = span_of(X)
    parts = inside.attention(layer.attention, layer.key_bias)
    assert parts.shape == (2, inside.rank + 1, inside.rank)
    coordinates = (X - inside.mean) @ inside.basis
    on_span = AttentionLayer(
        parts[:, :-1],
        inside.projection(layer.projection),
        parts[:, -1],
        inside.output_bias(
            layer.projection, 0.0 if layer.output_bias is None else layer.output_bias
        ),
    )
    np.testing.assert_allclose(on_span(coordinates), layer(X), atol=1e-9)


def distances(first, second, **options):
    match = first.distance(second, **options)
    return max(*match.attention, *match.projection, match.output_bias)


def normal_to(X):
    """n with n x = 1 for all tokens, which lie on a hyperplane away from the origin."""
    outside = span_of(X).outside
    return outside / (outside @ outside)


def with_changes(layer, attention=0.0, projection=0.0, key_bias=0.0, output_bias=0.0):
    return AttentionLayer(
        layer.attention + attention,
        layer.projection + projection,
        layer.key_bias + key_bias,
        layer.output_bias + output_bias,
    )


@pytest.mark.parametrize("gauge", ["row constant", "key bias", "output bias"])
def test_layers_that_differ_by_a_gauge_are_the_same_on_the_inputs(xp_array, gauge):
    rng = np.random.default_rng(0)
    layer = AttentionLayer.random(heads=2, dim=5, bias=True, seed=1)
    X = degenerate("shifted")
    n, v = normal_to(X), rng.standard_normal((2, 5))
    other = {
        "row constant": with_changes(layer, attention=v[:, :, None] * n),
        "key bias": with_changes(layer, attention=n[:, None] * v[:, None], key_bias=-v),
        "output bias": with_changes(
            layer, projection=n[:, None] * v[:, None], output_bias=-v.sum(axis=0)
        ),
    }[gauge]
    np.testing.assert_allclose(other(X), layer(X), atol=1e-9)
    assert distances(other, layer, inputs=xp_array(X)) < 1e-12
    assert distances(other, layer) > 0.1


def test_distance_on_inputs_does_not_count_what_padding_could_show():
    layer = AttentionLayer.random(heads=2, dim=5, bias=True, seed=1)
    X = degenerate("shifted")
    mask = random_mask(np.random.default_rng(0), *X.shape[:2])
    other = with_changes(layer, attention=np.ones((2, 5, 1)) * normal_to(X))
    X[~mask] = 100 * inputs.gaussian(*X.shape, seed=3)[~mask]
    assert distances(other, layer, inputs=X, mask=mask) < 1e-9
    assert distances(other, layer, inputs=X) > 0.1


def test_distance_on_inputs_that_span_everything_is_zero_only_for_equal_layers():
    layer = AttentionLayer.random(heads=2, dim=5, bias=True, seed=1)
    X = degenerate("gaussian")
    assert distances(layer, layer, inputs=X) == 0
    assert distances(with_changes(layer, attention=0.1), layer, inputs=X) > 0.05


def test_inputs_that_do_not_fit_the_layer_are_refused():
    layer = AttentionLayer.random(heads=1, dim=3)
    with pytest.raises(ValueError, match="inputs has tokens of dimension 4, expected 3"):
        layer.distance(layer, inputs=np.ones((2, 2, 4)))
    with pytest.raises(ValueError, match="expected three axes"):
        layer.distance(layer, inputs=np.ones((2, 3)))
