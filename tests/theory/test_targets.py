import itertools
import math
import pickle

import array_api_compat
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import dot

from onelayer import inputs
from onelayer.theory import targets

RNG = np.random.default_rng(7)
DIM = 3
BETA = np.array([0.5, -1.0, 0.75])
ROTATION = np.linalg.qr(RNG.normal(size=(DIM, DIM)))[0]
TENSORS = {
    (0, 0): np.array(0.3),
    (0, 2): RNG.normal(size=(DIM,) * 2),
    (1, 2): RNG.normal(size=(DIM,) * 3),
    (3, 1): RNG.normal(size=(DIM,) * 4),
}

# Naive values: `query` (d,) and `keys`, a dict from the positions that are there to tokens.


def mean_over(keys, value):
    return sum(value(position, key) for position, key in keys.items()) / len(keys)


def two_hops(query, keys):
    total = 0.0
    for one, other in itertools.product(keys.values(), repeat=2):
        total += dot(query, one) * dot(one, other) * dot(BETA, other)
    return total / len(keys) ** 2


CASES = {
    "average": (
        targets.average_power(3, DIM, BETA),
        lambda query, keys: mean_over(keys, lambda _, key: dot(BETA, key) ** 3),
    ),
    "correlation": (
        targets.correlation_weighted(2, DIM, BETA),
        lambda query, keys: mean_over(keys, lambda _, key: dot(query, key) ** 2 * dot(BETA, key)),
    ),
    "rotated": (
        targets.rotated_correlation(3, DIM, ROTATION, BETA),
        lambda query, keys: mean_over(
            keys, lambda _, key: dot(query, ROTATION @ key) ** 3 * dot(BETA, key)
        ),
    ),
    "query": (targets.query_only(3, DIM, BETA), lambda query, keys: dot(BETA, query) ** 3),
    "polynomial": (
        targets.polynomial(TENSORS),
        lambda query, keys: mean_over(keys, lambda _, key: oracles.polynomial(query, key, TENSORS)),
    ),
    "position": (
        targets.one_position(2, 2, DIM, BETA),
        lambda query, keys: dot(BETA, keys[2]) ** 2 if 2 in keys else 0.0,
    ),
    "alternating": (
        targets.ordered_sum(DIM, 2, beta=BETA),
        lambda query, keys: mean_over(
            keys, lambda position, key: (-1) ** (position - 1) * dot(BETA, key) ** 2
        ),
    ),
    "increasing": (
        targets.ordered_sum(DIM, 1, "increasing", BETA),
        lambda query, keys: mean_over(keys, lambda position, key: position * dot(BETA, key)),
    ),
    "three": (targets.three_token(DIM, BETA), two_hops),
}
MASK = np.array([[1, 1, 1, 1, 1], [1, 0, 0, 1, 0], [1, 0, 1, 0, 1], [1, 1, 1, 0, 0]], dtype=bool)
X = inputs.sphere(4, 5, DIM, seed=3)


def naive(case, X, mask):
    present = [
        {i: tokens[i] for i in range(1, len(tokens)) if row[i]}
        for tokens, row in zip(X, mask, strict=True)
    ]
    return [CASES[case][1](tokens[0], keys) for tokens, keys in zip(X, present, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_formula(case, xp_array):
    tokens = xp_array(X)
    values = CASES[case][0](tokens)
    assert array_api_compat.array_namespace(values) is array_api_compat.array_namespace(tokens)
    assert values.dtype == tokens.dtype
    np.testing.assert_allclose(np.asarray(values), naive(case, X, np.ones_like(MASK)), atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_keys_that_are_not_there_do_not_count(case, xp_array):
    values = CASES[case][0](xp_array(X), mask=xp_array(MASK))
    np.testing.assert_allclose(np.asarray(values), naive(case, X, MASK), atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_single_precision_stays_single(case, xp_array):
    tokens = xp_array(X.astype(np.float32))
    values = CASES[case][0](tokens)
    assert values.dtype == tokens.dtype
    expected = naive(case, X, np.ones_like(MASK))
    np.testing.assert_allclose(np.asarray(values), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_list_of_examples_of_different_lengths(case):
    examples = [inputs.sphere(1, tokens, DIM, seed=tokens)[0] for tokens in (2, 5, 3)]
    expected = [naive(case, tokens[None], np.ones((1, len(tokens))))[0] for tokens in examples]
    np.testing.assert_allclose(CASES[case][0](examples), expected, atol=1e-12)


def test_one_position_of_short_examples_in_a_block_of_their_own():
    tokens = 300_000  # more than a block of 4 MB
    examples = [np.ones((2, 2)), np.ones((2, 2)), np.ones((tokens, 2))]
    f = targets.one_position(tokens - 1, 1, dim=2)
    assert f(examples).tolist() == [0.0, 0.0, 1.0]


# Norms


def test_three_tokens_have_no_norm():
    f = targets.three_token(DIM)
    assert f.norm == f.biased_norm == f.flat_norm(4) == math.inf


def test_only_the_plain_correlation_gains_from_the_identity_as_a_bias():
    f = targets.correlation_weighted(2, DIM, BETA)
    assert f.biased_norm == pytest.approx(3**4.5 * 64 * np.sum(BETA**2))
    assert targets.rotated_correlation(2, DIM, ROTATION).biased_norm == math.inf
    assert targets.average_power(2, DIM).biased_norm == math.inf


# What makes a target what it is


@given(st.permutations(range(1, 5)))
def test_targets_of_the_class_are_blind_to_the_order(order):
    shuffled = X[:, [0, *order]]
    for case in ("average", "correlation", "rotated", "query", "polynomial", "three"):
        f = CASES[case][0]
        np.testing.assert_allclose(f(shuffled), f(X), atol=1e-12)


@pytest.mark.parametrize("weights", ["alternating", "increasing"])
def test_what_blindness_to_the_order_leaves_of_an_ordered_sum(weights):
    f, average = targets.ordered_sum(DIM, 2, weights), targets.average_power(2, DIM)
    orders = [[0, *order] for order in itertools.permutations(range(1, 5))]
    values = [f(X[:, order]) for order in orders]
    assert np.ptp(values, axis=0).min() > 0.01
    share = {"alternating": 0.0, "increasing": 2.5}[weights]
    np.testing.assert_allclose(np.mean(values, axis=0), share * average(X), atol=1e-12)


def test_rotation_turns_the_query():
    turned = X.copy()
    turned[:, 0] = turned[:, 0] @ ROTATION
    f, g = CASES["rotated"][0], targets.correlation_weighted(3, DIM, BETA)
    np.testing.assert_allclose(f(X), g(turned), atol=1e-12)


def test_a_random_rotation_comes_from_the_seed():
    first, again, other = (targets.rotated_correlation(1, DIM, seed=seed)(X) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.allclose(first, other)
    assert not np.allclose(first, targets.correlation_weighted(1, DIM)(X))


def test_beta_is_the_first_unit_vector_unless_given():
    assert np.array_equal(targets.average_power(1, DIM)(X), X[:, 1:, 0].mean(axis=1))


@pytest.mark.parametrize(
    ("f", "name", "degree"),
    [
        (targets.average_power(2, DIM), "f_{1,2}", 2),
        (targets.correlation_weighted(3, DIM), "f_{2,3}", 4),
        (targets.rotated_correlation(1, DIM), "f_{3,1}", 2),
        (targets.query_only(2, DIM), "<beta, x_0>^2", 2),
        (targets.polynomial(TENSORS, name="mine"), "mine", 3),
        (targets.one_position(4, 2, DIM), "<beta, x_4>^2", 2),
        (targets.ordered_sum(DIM), "alternating sum of <beta, x_i>^1", 1),
        (targets.three_token(DIM), "three tokens", 2),
    ],
)
def test_names_and_degrees(f, name, degree):
    assert (f.name, f.dim, f.degree) == (name, DIM, degree)
    assert repr(f) == f"Target(name='{name}', dim={DIM}, degree={degree})"


@pytest.mark.parametrize("case", CASES)
def test_targets_survive_pickling(case):
    f = CASES[case][0]
    again = pickle.loads(pickle.dumps(f))
    assert np.array_equal(again(X), f(X))
    assert (again.norm, again.variance(4)) == (f.norm, f.variance(4))
    assert again.flat_norm(4) == f.flat_norm(4)


def test_what_is_given_may_change_afterwards():
    beta = np.array([1.0, 0.0, 0.0])
    f = targets.average_power(1, DIM, beta)
    before = f(X)
    beta[:] = 0.0
    assert np.array_equal(f(X), before)


# Errors at the door


def test_examples_of_another_dimension():
    with pytest.raises(ValueError, match=r"X has tokens of dimension 4, expected 3 for f_\{1,3\}"):
        CASES["average"][0](inputs.sphere(2, 3, 4))


def test_examples_without_keys():
    with pytest.raises(ValueError, match="expected a query and at least one key"):
        CASES["average"][0](inputs.sphere(2, 1, DIM))


def test_examples_without_the_position():
    f = targets.one_position(5, 1, DIM)
    with pytest.raises(ValueError, match=r"X has 4 keys, expected at least 5 for <beta, x_5>\^1"):
        f(X)
    for moment in (f.mean, f.variance, f.flat_norm):
        with pytest.raises(ValueError, match="keys is 4, expected at least 5 for"):
            moment(4)
        assert math.isfinite(moment(5))


def test_a_mask_without_keys():
    mask = MASK.copy()
    mask[2, 1:] = False
    with pytest.raises(ValueError, match="mask leaves example 2 without a key"):
        CASES["average"][0](X, mask=mask)


@pytest.mark.parametrize("keys", [0, -1])
def test_moments_of_no_keys(keys):
    with pytest.raises(ValueError, match=f"keys is {keys}, expected a whole number of at least 1"):
        CASES["three"][0].variance(keys)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: targets.average_power(0, 3), "p is 0, expected a whole number of at least 1"),
        (lambda: targets.query_only(0, 3), "p is 0, expected a whole number of at least 1"),
        (lambda: targets.correlation_weighted(-1, 3), "q is -1, expected a whole number"),
        (lambda: targets.rotated_correlation(-1, 3), "q is -1, expected a whole number"),
        (lambda: targets.one_position(0, 1, 3), "position is 0, expected a whole number"),
        (lambda: targets.three_token(0), "dim is 0, expected a whole number of at least 1"),
        (lambda: targets.average_power(1, 3, [1, 2]), r"beta has shape \(2,\), expected \(3,\)"),
        (lambda: targets.average_power(1, 2, [0, 0]), "beta is zero, expected a vector of pos"),
        (lambda: targets.average_power(1, 1, [math.nan]), "beta has 1 NaN or infinite entries"),
        (
            lambda: targets.rotated_correlation(1, 3, np.eye(2)),
            r"rotation has shape \(2, 2\), expected \(3, 3\)",
        ),
        (
            lambda: targets.rotated_correlation(1, 2, np.eye(2) * 2),
            "off the identity by 3, expected an orthogonal matrix",
        ),
        (
            lambda: targets.ordered_sum(3, weights="falling"),
            "weights is 'falling', expected one of 'alternating', 'increasing'",
        ),
    ],
)
def test_wrong_values(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: targets.average_power(1.5, 3), "p is 1.5, expected a whole number"),
        (lambda: targets.polynomial([np.ones(3)]), "coefficients is a list, expected a mapping"),
    ],
)
def test_wrong_types(make, message):
    with pytest.raises(TypeError, match=message):
        make()
