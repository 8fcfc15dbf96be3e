import numpy as np
import oracles
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.array.backend import namespace, to_numpy
from onelayer.recovery.phases.agreement import Agreement, agreement, certified

# Relative 1e-10 of the images' squared distances is added, so that equal tokens do no harm: with a
# condition number of 100, squared, that much is left of the digits.
SAME = 1e-5


def random_rows(seed, n=4, tokens=3, dim=4, out_dim=5, noise=1.0):
    """Tokens, a sum of projections, and outputs that no p explains."""
    rng = np.random.default_rng(seed)
    X = rng.standard_normal((n, tokens, dim))
    projection_sum = rng.standard_normal((dim, out_dim))
    p = rng.dirichlet(np.ones(tokens), (n, tokens))
    Y = p @ X @ projection_sum + noise * rng.standard_normal((n, tokens, out_dim))
    return X, Y, projection_sum


@st.composite
def rows_in_general_position(draw):
    """Rows whose images are far from being in line, so that p is well determined."""
    tokens = draw(st.integers(1, 4))
    X, Y, projection_sum = random_rows(
        draw(st.integers(0, 2**32 - 1)),
        n=draw(st.integers(1, 4)),
        tokens=tokens,
        dim=draw(st.integers(max(1, tokens - 1), 5)),
        out_dim=draw(st.integers(max(1, tokens - 1), 5)),
    )
    if tokens > 1:
        images = X @ projection_sum
        assume(np.linalg.cond(images[:, 1:] - images[:, :1]).max() < 100)
    return X, Y, projection_sum


def agreement_of(xp_array, X, Y, projection_sum):
    """The agreement on a backend, as numpy arrays."""
    found = agreement(xp_array(X), xp_array(Y), xp_array(projection_sum))
    assert {namespace(part) for part in found} == {namespace(xp_array(X))}
    return Agreement(*(to_numpy(part) for part in found))


def one_by_one(function, X, Y, projection_sum):
    """A function of images and output for every row, (n, k, ..)."""
    images = X @ projection_sum
    return np.array([[function(images[i], output) for output in Y[i]] for i in range(len(images))])


def true_attention(layer, X):
    """The attention of every head (heads, n, k, k), by loops."""
    keys = range(X.shape[1])
    return np.array(
        [
            [[list(oracles.attention_row(x, a, keys, theta).values()) for a in keys] for x in X]
            for theta in layer.attention
        ]
    )


# Least squares


@given(rows=rows_in_general_position())
def test_weights_and_residual_are_those_of_least_squares_with_sum_one(xp_array, rows):
    found = agreement_of(xp_array, *rows)
    p = one_by_one(lambda *row: oracles.agreed_row(*row)[0], *rows)
    residual = one_by_one(lambda *row: oracles.agreed_row(*row)[1], *rows)
    np.testing.assert_allclose(found.weights, p, rtol=0, atol=SAME * abs(p).max())
    np.testing.assert_allclose(found.residual, residual, rtol=SAME, atol=SAME)
    np.testing.assert_allclose(found.weights.sum(axis=2), 1.0, atol=1e-9 * abs(p).max())


@given(rows=rows_in_general_position())
def test_spread_is_how_far_an_error_of_length_one_moves_the_weights(xp_array, rows):
    found = agreement_of(xp_array, *rows)
    spread = one_by_one(oracles.agreed_spread, *rows)
    assert found.spread.shape == rows[0].shape[:2]
    for row in range(spread.shape[1]):  # it is the same for all rows of an example
        np.testing.assert_allclose(found.spread, spread[:, row], rtol=SAME, atol=1e-9)


def test_no_error_moves_a_weight_farther_than_its_spread(xp_array):
    X, Y, projection_sum = random_rows(0)
    found = agreement_of(xp_array, X, Y, projection_sum)
    nearest = 0.0
    for seed in range(200):
        moved = np.random.default_rng(seed).standard_normal(Y.shape)
        length = np.linalg.norm(moved, axis=2, keepdims=True)
        other = agreement_of(np.asarray, X, Y + moved, projection_sum)
        share = abs(other.weights - found.weights) / (length * found.spread[:, None, :])
        assert share.max() < 1 + 1e-8
        nearest = max(nearest, share.max())
    assert nearest > 0.95


def test_size_is_that_of_the_images_in_the_shares_they_have(xp_array):
    X, Y, projection_sum = random_rows(1)
    found = agreement_of(xp_array, X, Y, projection_sum)
    images = [[oracles.row_times(token, projection_sum) for token in tokens] for tokens in X]
    length = [np.sqrt(np.mean([image @ image for image in example])) for example in images]
    share = np.minimum(1.0, np.sqrt(np.sum(np.asarray(found.weights) ** 2, axis=2)))
    assert share.min() < 1 <= share.max()
    np.testing.assert_allclose(found.size, np.array(length)[:, None] * share, rtol=1e-12)


@pytest.mark.parametrize("out_dim", [1, 2])
def test_outputs_too_narrow_for_one_answer_are_explained_all_the_same(xp_array, out_dim):
    X, Y, projection_sum = random_rows(2, tokens=4, dim=4, out_dim=out_dim)
    found = agreement_of(xp_array, X, Y, projection_sum)
    np.testing.assert_allclose(found.residual, 0.0, atol=SAME)
    np.testing.assert_allclose(found.weights @ X @ projection_sum, Y, atol=SAME)
    np.testing.assert_allclose(found.weights.sum(axis=2), 1.0, atol=SAME)


# Heads that agree


@pytest.mark.parametrize("heads", [1, 3])
def test_heads_with_equal_attention_matrices_are_seen_through(xp_array, heads):
    one = AttentionLayer.random(heads=1, dim=4, scale=1.0, seed=3)
    projection = AttentionLayer.random(heads=heads, dim=4, seed=4).projection
    layer = AttentionLayer(np.repeat(one.attention, heads, axis=0), projection)
    X = inputs.gaussian(20, 3, 4, seed=5)
    found = agreement_of(xp_array, X, layer(X), projection.sum(axis=0))
    (expected,) = true_attention(one, X)
    np.testing.assert_allclose(found.weights, expected, atol=1e-7)
    np.testing.assert_allclose(found.residual / found.size, 0.0, atol=1e-8)


def test_residual_shows_heads_that_differ(xp_array):
    layer = AttentionLayer.random(heads=2, dim=6, scale=3.0, seed=6)
    X = inputs.gaussian(100, 3, 6, seed=7)
    found = agreement_of(xp_array, X, layer(X), layer.projection.sum(axis=0))
    first, second = true_attention(layer, X)
    order = np.argsort(np.linalg.norm(first - second, axis=2), axis=None)
    relative = (found.residual / found.size).ravel()[order]
    assert np.median(relative[-30:]) > 10 * np.median(relative[:30])


@given(rows=rows_in_general_position(), seed=st.integers(0, 99))
def test_a_common_rotation_of_the_outputs_changes_nothing(rows, seed):
    X, Y, projection_sum = rows
    square = np.random.default_rng(seed).standard_normal((Y.shape[2], Y.shape[2]))
    rotation, _ = np.linalg.qr(square)
    plain = agreement(X, Y, projection_sum)
    turned = agreement(X, Y @ rotation, projection_sum @ rotation)
    for left, right in zip(plain, turned, strict=True):
        np.testing.assert_allclose(left, right, rtol=SAME, atol=SAME)


@pytest.mark.parametrize("size", [1e-6, 1e6])
def test_the_unit_of_the_outputs_does_not_matter_to_the_weights(xp_array, size):
    X, Y, projection_sum = random_rows(8)
    plain = agreement_of(xp_array, X, Y, projection_sum)
    other = agreement_of(xp_array, X, Y * size, projection_sum * size)
    np.testing.assert_allclose(other.weights, plain.weights, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(other.residual, plain.residual * size, rtol=1e-8)
    np.testing.assert_allclose(other.size, plain.size * size, rtol=1e-8)
    np.testing.assert_allclose(other.spread, plain.spread / size, rtol=1e-8)


# What cannot be known


def test_equal_tokens_share_their_weight_with_a_huge_spread(xp_array):
    X, Y, projection_sum = random_rows(9, tokens=4)
    X[:, 2] = X[:, 0]
    found = agreement_of(xp_array, X, Y, projection_sum)
    distinct = agreement(np.delete(X, 2, axis=1), Y, projection_sum)
    assert np.isfinite(found.spread).all()
    assert np.isfinite(found.weights).all()
    assert found.spread[:, [0, 2]].min() > 1e3 * found.spread[:, [1, 3]].max()
    # Together they weigh what one of them would weigh without the other, and so do the rest.
    together = found.weights[..., 0] + found.weights[..., 2]
    np.testing.assert_allclose(together, distinct.weights[..., 0], atol=SAME)
    np.testing.assert_allclose(found.weights[..., [1, 3]], distinct.weights[..., 1:], atol=SAME)
    np.testing.assert_allclose(found.spread[:, [1, 3]], distinct.spread[:, 1:], rtol=SAME)
    np.testing.assert_allclose(found.residual, distinct.residual, rtol=SAME)


def test_two_equal_tokens_leave_everything_open(xp_array):
    X, Y, projection_sum = random_rows(10, tokens=2)
    X[:, 1] = X[:, 0]
    found = agreement_of(xp_array, X, Y, projection_sum)
    np.testing.assert_allclose(found.weights, 1 / 2, atol=1e-12)
    apart = np.linalg.norm(Y - X @ projection_sum, axis=2)
    np.testing.assert_allclose(found.residual, apart, rtol=1e-9)
    assert found.spread.min() > 1e4


@pytest.mark.parametrize("tokens", [3, 5])
def test_tokens_that_are_all_equal_have_a_huge_spread(xp_array, tokens):
    X, Y, projection_sum = random_rows(10, tokens=tokens)
    X[:] = X[:, :1]
    found = agreement_of(xp_array, X, Y, projection_sum)
    assert found.spread.min() > 1e4
    assert np.isfinite(found.spread).all()
    assert np.isfinite(found.weights).all()


def test_one_token_has_all_the_weight(xp_array):
    X, Y, projection_sum = random_rows(11, tokens=1)
    found = agreement_of(xp_array, X, Y, projection_sum)
    np.testing.assert_array_equal(found.weights, np.ones((4, 1, 1)))
    np.testing.assert_allclose(
        found.residual, np.linalg.norm(Y - X @ projection_sum, axis=2), rtol=1e-12
    )
    np.testing.assert_array_equal(found.spread, np.zeros((4, 1)))


def test_images_that_are_all_zero_explain_nothing(xp_array):
    X, Y, projection_sum = random_rows(12)
    found = agreement_of(xp_array, X, Y, 0 * projection_sum)
    np.testing.assert_allclose(found.weights, 1 / 3, atol=1e-12)
    np.testing.assert_allclose(found.residual, np.linalg.norm(Y, axis=2), rtol=1e-12)
    np.testing.assert_array_equal(found.size, np.zeros(Y.shape[:2]))
    assert found.spread.min() > 1e4
    assert np.isfinite(found.spread).all()


# The certificate


def flat_rows(X, Y):
    """One row at a time: its tokens (r, k, d) and its output (r, e)."""
    return np.repeat(X, X.shape[1], axis=0), Y.reshape(-1, Y.shape[2])


def test_certificate_is_that_of_one_program_a_row():
    X, Y, projection_sum = random_rows(13, n=30)
    distance = one_by_one(oracles.certifying_distance, X, Y, projection_sum).ravel()
    rows = flat_rows(X, Y)
    assert certified(*rows, projection_sum, distance * (1 + 1e-6)).all()
    assert not certified(*rows, projection_sum, distance * (1 - 1e-6)).any()
    other = 1.001 * np.random.default_rng(0).permutation(distance)
    assert 0.3 < np.mean(distance <= other) < 0.7
    np.testing.assert_array_equal(certified(*rows, projection_sum, other), distance <= other)


@given(seed=st.integers(0, 2**32 - 1), tokens=st.integers(1, 4), more=st.integers(0, 2))
def test_certificate_is_that_of_least_squares_up_to_the_root_of_the_out_dim(seed, tokens, more):
    X, Y, projection_sum = random_rows(seed, 10, tokens, 6, out_dim=tokens + more, noise=0.1)
    found = agreement(X, Y, projection_sum)
    rows, residual = flat_rows(X, Y), found.residual.ravel()
    explained = (found.weights >= 0).all(axis=2).ravel()
    assert certified(*rows, projection_sum, residual + 1e-6)[explained].all()
    # No p does better than least squares, whatever its signs.
    below = residual / np.sqrt(tokens + more) - 1e-6
    assert not certified(*rows, projection_sum, below).any()


def test_rows_that_only_a_negative_weight_explains_are_not_certified():
    X, _, projection_sum = random_rows(14, n=20, tokens=2)
    p = np.array([[1.5, -0.5], [0.5, 0.5]])
    Y = p @ X @ projection_sum
    found = agreement(X, Y, projection_sum)
    assert (found.residual < 1e-6 * found.size).all()
    tolerance = 0.01 * found.size.ravel()
    verdicts = certified(*flat_rows(X, Y), projection_sum, tolerance).reshape(20, 2)
    np.testing.assert_array_equal(verdicts, np.tile([False, True], (20, 1)))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_least_squares_and_certificate_agree_on_nine_rows_of_ten_of_a_layer(seed):
    layer = AttentionLayer.random(heads=2, dim=8, scale=3.0, seed=seed)
    X = inputs.boolean(300, 3, 8, seed=seed)
    Y, projection_sum = layer(X), layer.projection.sum(axis=0)
    found = agreement(X, Y, projection_sum)
    tolerance = 0.03 * found.size.ravel()
    verdicts = certified(*flat_rows(X, Y), projection_sum, tolerance)
    accepted = found.residual.ravel() <= tolerance
    assert 0.03 < accepted.mean() < 0.3
    assert np.mean(verdicts == accepted) > 0.9
    # Where they differ a weight is negative, or the residual between τ and √e τ.
    negative = (found.weights < 0).any(axis=2).ravel()
    between = ~accepted & (found.residual.ravel() <= np.sqrt(8) * tolerance)
    assert (negative | between)[verdicts != accepted].all()
