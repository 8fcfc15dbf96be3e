import math
from dataclasses import FrozenInstanceError
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer import (
    AttentionLayer,
    Condition,
    ConditionSurvey,
    conditions,
    hard_instance,
    survey_conditions,
)

NAMES = [
    "scale",
    "largest scale",
    "distance",
    "hull distance",
    "incoherence",
    "norm ratio",
    "effective rank",
    "singular gap",
    "sum size",
    "sum conditioning",
    "attention independence",
    "projection independence",
]

shapes = {
    "heads": st.integers(1, 4),
    "dim": st.integers(1, 5),
    "out_dim": st.integers(1, 4),
    "seed": st.integers(0, 1000),
}


def random_layer(heads, dim, out_dim, seed):
    """Heads of different norms."""
    layer = AttentionLayer.random(heads=heads, dim=dim, out_dim=out_dim, seed=seed)
    factors = np.random.default_rng(seed).uniform(0.5, 2.0, size=(heads, 1, 1))
    return AttentionLayer(layer.attention * factors, layer.projection)


def measured(layer):
    return {name: condition.measured for name, condition in conditions(layer).items()}


def failing(layer):
    return {name for name, condition in conditions(layer).items() if not condition.holds}


# Naive versions: plain loops over heads and entries


def inner(A, B):
    total = 0.0
    for index in np.ndindex(*A.shape):
        total += A[index] * B[index]
    return total


def norm(A):
    return math.sqrt(inner(A, A))


def singular_values(A):
    """Descending, from the eigenvalues of the smaller of A Aᵀ and Aᵀ A."""
    gram = A @ A.T if A.shape[0] <= A.shape[1] else A.T @ A
    return [math.sqrt(max(value, 0.0)) for value in np.linalg.eigvalsh(gram)[::-1]]


def independence(matrices):
    gram = np.zeros((len(matrices), len(matrices)))
    for i, A in enumerate(matrices):
        for j, B in enumerate(matrices):
            gram[i, j] = inner(A, B) / (norm(A) * norm(B))
    return math.sqrt(max(np.linalg.eigvalsh(gram)[0], 0.0))


def hull_distance(thetas):
    """From the Gram matrix G of the heads: z = G⁻¹1 / 1ᵀG⁻¹1 minimises zᵀGz where Σ z = 1."""
    gram = np.array([[inner(A, B) for A in thetas] for B in thetas])
    ones = np.ones(len(thetas))
    # The pseudo-inverse of G with a border of ones solves the minimum even where G is singular.
    border = np.block([[gram, ones[:, None]], [ones[None, :], np.zeros((1, 1))]])
    z = np.linalg.lstsq(border, np.append(0 * ones, 1.0), rcond=1e-10)[0][:-1]
    return norm(sum(share * A for share, A in zip(z, thetas, strict=True)))


def naive_conditions(thetas, projections):
    distance, incoherence = math.inf, 0.0
    for i, A in enumerate(thetas):
        for B in thetas[:i]:
            distance = min(distance, norm(A - B) / max(norm(A), norm(B)))
            incoherence = max(incoherence, abs(inner(A, B)) / (norm(A) * norm(B)))
    rank, gap = math.inf, math.inf
    for A in thetas:
        values = singular_values(A)
        rank = min(rank, inner(A, A) / values[0] ** 2)
        for larger, smaller in pairwise(values):
            gap = min(gap, (larger - smaller) / values[0])
    total = singular_values(sum(projections))
    norms = [norm(A) for A in thetas]
    return {
        "scale": min(norms),
        "largest scale": max(norms),
        "distance": distance,
        "hull distance": hull_distance(thetas) / min(norms),
        "incoherence": incoherence,
        "norm ratio": max(norms) / min(norms),
        "effective rank": rank,
        "singular gap": gap,
        "sum size": norm(sum(projections)) / math.sqrt(sum(inner(B, B) for B in projections)),
        "sum conditioning": total[-1] / total[0],
        "attention independence": independence(thetas),
        "projection independence": independence(projections),
    }


def assert_same(found, expected, without=(), rtol=1e-6, atol=1e-7):
    """atol: the oracle takes roots of eigenvalues, whose rounding errors grow near 0."""
    assert list(found) == NAMES
    for name in set(NAMES) - set(without):
        assert found[name] == pytest.approx(expected[name], rel=rtol, abs=atol), name


@given(**shapes)
def test_measured_values_are_those_of_the_formulas(xp_array, heads, dim, out_dim, seed):
    plain = random_layer(heads, dim, out_dim, seed)
    layer = AttentionLayer(xp_array(plain.attention), xp_array(plain.projection))
    expected = naive_conditions(list(plain.attention), list(plain.projection))
    assert_same(measured(layer), expected)
    assert all(type(value) is float for value in measured(layer).values())


def test_single_precision_is_measured_in_double(xp_array):
    plain = random_layer(3, 4, 4, seed=0)
    theta, projection = (a.astype(np.float32) for a in (plain.attention, plain.projection))
    layer = AttentionLayer(xp_array(theta), xp_array(projection))
    assert_same(measured(layer), measured(AttentionLayer(theta.astype(float), projection)))


def test_biases_are_passed_over():
    layer = AttentionLayer.random(heads=3, dim=4, bias=True)
    assert measured(layer) == measured(AttentionLayer(layer.attention, layer.projection))


# Invariants


@given(**shapes)
def test_the_order_of_the_heads_does_not_matter(heads, dim, out_dim, seed):
    layer = random_layer(heads, dim, out_dim, seed)
    order = np.random.default_rng(seed).permutation(heads)
    permuted = AttentionLayer(layer.attention[order], layer.projection[order])
    assert_same(measured(permuted), measured(layer), rtol=1e-9, atol=1e-12)


@given(**shapes, factor=st.sampled_from([1e-320, 1e-300, 1e-100, 0.37, -1.0, 3.0, 1e100, 1e300]))
def test_a_common_factor_changes_the_scale_alone(heads, dim, out_dim, seed, factor):
    layer = random_layer(heads, dim, out_dim, seed)
    found = measured(AttentionLayer(layer.attention * factor, layer.projection))
    rtol = 1e-2 if factor == 1e-320 else 1e-9  # such numbers have few digits
    sizes = ["scale", "largest scale"]
    assert_same(found, measured(layer), without=sizes, rtol=rtol, atol=rtol)
    for name in sizes:
        assert found[name] == pytest.approx(measured(layer)[name] * abs(factor), rel=rtol)


@given(**shapes)
def test_a_change_of_basis_does_not_matter(heads, dim, out_dim, seed):
    layer = random_layer(heads, dim, out_dim, seed)
    rotation = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))[0]
    rotated = AttentionLayer(rotation @ layer.attention @ rotation.T, layer.projection)
    assert_same(measured(rotated), measured(layer), rtol=1e-9, atol=1e-12)


@given(**shapes, factor=st.sampled_from([1e-300, 0.2, -5.0, 1e300]))
def test_a_common_factor_of_the_projections_does_not_matter(heads, dim, out_dim, seed, factor):
    layer = random_layer(heads, dim, out_dim, seed)
    found = measured(AttentionLayer(layer.attention, layer.projection * factor))
    assert_same(found, measured(layer), rtol=1e-9, atol=1e-12)


# Layers made by hand that fail one condition, or as few as there can be


def parts(count, values=(1.0, 0.9, 0.8, 0.7)):
    """Orthogonal matrices times the singular values; the parts have no entry in common."""
    return np.stack([np.roll(np.diag(values), part, axis=0) for part in range(count)])


ATTENTION = 2 * parts(2)
PROJECTION = parts(2, np.ones(4)) * np.array([1.0, 0.5])[:, None, None]
# Three heads, the third nearly the mean of the others.
FLAT = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.04]]


def test_a_layer_that_meets_all_conditions():
    found = conditions(AttentionLayer(ATTENTION, PROJECTION))
    assert list(found) == NAMES
    assert all(condition.holds for condition in found.values())
    size = math.sqrt(1 + 0.81 + 0.64 + 0.49)
    expected = [2 * size, 2 * size, math.sqrt(2), math.sqrt(0.5), 0, 1, size**2, 0.1, 1, 1 / 3]
    expected += [1, 1]
    assert [c.measured for c in found.values()] == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "attention", "projection"),
    [
        ("scale", 0.1 * ATTENTION, PROJECTION),
        ("largest scale", 4 * ATTENTION, PROJECTION),
        ("hull distance", np.stack([ATTENTION[0], ATTENTION[1] - ATTENTION[0]]), PROJECTION),
        ("sum size", ATTENTION, PROJECTION + np.array([3, -3])[:, None, None] * np.eye(4)[::-1]),
        ("sum conditioning", ATTENTION, parts(2, np.ones(4))),
        ("effective rank", 3 * parts(2, (1.0, 0.2, 0.1, 0.05)), PROJECTION),
        ("norm ratio", ATTENTION * np.array([2.5, 0.7])[:, None, None], PROJECTION),
        (
            "attention independence",
            np.einsum("hp,pij->hij", FLAT, 2 * parts(3)),
            parts(3, np.ones(4)),
        ),
        ("projection independence", ATTENTION, np.stack([PROJECTION[0]] * 2)),
    ],
)
def test_a_layer_that_fails_one_condition(name, attention, projection):
    assert failing(AttentionLayer(attention, projection)) == {name}


def test_heads_that_are_close_are_aligned_too():
    attention = np.stack([ATTENTION[0], ATTENTION[0] + 0.05 * ATTENTION[1]])
    layer = AttentionLayer(attention, PROJECTION)
    assert failing(layer) == {"distance", "incoherence", "attention independence"}
    size = math.sqrt(1.0025)
    found = measured(layer)
    assert found["distance"] == pytest.approx(0.05 / size)
    assert found["incoherence"] == pytest.approx(1 / size)
    assert found["attention independence"] == pytest.approx(math.sqrt(1 - 1 / size))


def test_one_head_has_no_other_to_be_compared_with():
    found = measured(AttentionLayer(ATTENTION[:1], PROJECTION[:1]))
    assert found["distance"] == math.inf
    assert found["incoherence"] == 0.0
    assert found["norm ratio"] == 1.0
    assert found["attention independence"] == pytest.approx(1.0)
    assert failing(AttentionLayer(ATTENTION[:1], PROJECTION[:1])) == set()


def test_tokens_of_dimension_one():
    found = measured(AttentionLayer([[[3.0]], [[2.0]]], [[[1.0]], [[1.0]]]))
    assert found["effective rank"] == 1.0
    assert found["singular gap"] == math.inf
    assert found["attention independence"] == 0.0  # two vectors on one line
    assert found["distance"] == pytest.approx(1 / 3)


def test_a_head_of_norm_zero_fails_what_divides_by_it():
    attention = ATTENTION * np.array([1.0, 0.0])[:, None, None]
    layer = AttentionLayer(attention, PROJECTION)
    found = measured(layer)
    assert failing(layer) == {
        "scale",
        "hull distance",
        "incoherence",
        "norm ratio",
        "effective rank",
        "attention independence",
    }
    assert found["distance"] == 1.0  # |Θ_1 - 0| / |Θ_1|
    assert found["norm ratio"] == math.inf


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("dim", [1, 3])
def test_a_layer_of_zeros_fails_all_it_can_and_nothing_is_nan(heads, dim):
    layer = AttentionLayer(np.zeros((heads, dim, dim)), np.zeros((heads, dim, 2)))
    assert not any(math.isnan(value) for value in measured(layer).values())
    never_failing = {"largest scale", "singular gap"}
    holding = never_failing | ({"distance", "incoherence"} if heads == 1 else set())
    assert failing(layer) == set(NAMES) - holding


def test_a_hard_instance_fails():
    assert failing(hard_instance()) >= {
        "largest scale",
        "attention independence",
        "projection independence",
    }


@pytest.mark.parametrize("wrong", [None, np.ones((2, 3, 3)), "layer.safetensors"])
def test_what_is_no_layer_is_refused(wrong):
    message = f"^layer is a {type(wrong).__name__}, expected an AttentionLayer$"
    with pytest.raises(TypeError, match=message):
        conditions(wrong)


# One condition


@pytest.mark.parametrize(
    ("value", "at_least", "holds"),
    [
        (1.9, True, False),
        (2.0, True, True),
        (2.1, True, True),
        (1.9, False, True),
        (2.0, False, True),
        (2.1, False, False),
        (math.inf, True, True),
        (math.inf, False, False),
    ],
)
def test_a_condition_holds_from_the_needed_value_on(value, at_least, holds):
    condition = Condition(measured=value, needed=2.0, at_least=at_least, meaning="made up")
    assert condition.holds is holds


def test_conditions_cannot_be_changed_and_say_what_they_mean():
    found = conditions(AttentionLayer(ATTENTION, PROJECTION))
    assert all(condition.meaning for condition in found.values())
    assert {n for n, c in found.items() if not c.at_least} == {
        "largest scale",
        "incoherence",
        "norm ratio",
    }
    with pytest.raises(FrozenInstanceError):
        found["scale"].measured = 3.0


# Surveys


def test_a_survey_is_of_layers_drawn_from_one_generator():
    survey = survey_conditions(
        heads=2, dim=4, rank=3, samples=7, seed=5, scale=1.5 + 1e-9, out_dim=2
    )
    rng = np.random.default_rng(5)
    layers = [
        AttentionLayer.random(2, 4, scale=1.5 + 1e-9, rank=3, out_dim=2, seed=rng) for _ in range(7)
    ]
    assert list(survey) == NAMES
    for name, found in survey.items():
        each = [conditions(layer)[name] for layer in layers]
        np.testing.assert_array_equal(found.values, sorted(c.measured for c in each))
        assert found.share == pytest.approx(np.mean([c.holds for c in each]))
        assert (found.needed, found.at_least) == (each[0].needed, each[0].at_least)


def test_a_survey_can_be_repeated_from_its_seed():
    first, again, other = (survey_conditions(2, 4, samples=5, seed=seed) for seed in (1, 1, 2))
    for name in NAMES:
        np.testing.assert_array_equal(first[name].values, again[name].values)
    assert not np.array_equal(first["distance"].values, other["distance"].values)
    generated = survey_conditions(2, 4, samples=5, seed=np.random.default_rng(1))
    np.testing.assert_array_equal(first["distance"].values, generated["distance"].values)


def test_a_survey_has_a_hundred_layers_of_scale_two_unless_told():
    survey = survey_conditions(heads=2, dim=3)
    assert all(len(found.values) == 100 for found in survey.values())
    np.testing.assert_allclose(survey["scale"].values, 2.0)


def test_a_survey_of_single_heads_has_infinite_distances():
    found = survey_conditions(heads=1, dim=3, samples=4)["distance"]
    assert found.median == math.inf
    assert found.share == 1.0


@given(values=st.lists(st.floats(-5, 5), min_size=1, max_size=20), q=st.floats(0, 1))
def test_quantiles_are_values_that_a_share_does_not_exceed(values, q):
    survey = ConditionSurvey(np.sort(values), needed=1.0, at_least=True)
    quantile = survey.quantile(q)
    assert quantile in values
    assert np.mean(np.array(values) <= quantile) >= q - 1e-12
    assert np.mean(np.array(values) < quantile) <= q + 1e-12
    assert survey.median == survey.quantile(0.5)
    assert survey.share == np.mean(np.array(values) >= 1.0)


def test_share_of_what_is_to_be_small():
    assert ConditionSurvey(np.array([1.0, 2, 3, 4]), needed=3.0, at_least=False).share == 0.75


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_quantiles_out_of_range_are_refused(q):
    survey = ConditionSurvey(np.array([1.0]), needed=1.0, at_least=True)
    with pytest.raises(ValueError, match=f"^q is {q}, expected a number from 0 to 1$"):
        survey.quantile(q)


def test_progress_is_told_after_every_layer():
    told = []
    survey_conditions(2, 3, samples=4, progress=told.append)
    assert told == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"samples": 0}, ValueError, "samples is 0, expected a whole number of at least 1"),
        ({"samples": 2.5}, TypeError, "samples is 2.5, expected a whole number of at least 1"),
        ({"heads": 0}, ValueError, "heads is 0, expected a whole number of at least 1"),
        ({"dim": 0}, ValueError, "dim is 0, expected a whole number of at least 1"),
        ({"rank": 0}, ValueError, "rank is 0, expected a whole number of at least 1"),
        ({"scale": 0.0}, ValueError, "scale is 0.0, expected a finite number above 0"),
        ({"out_dim": 0}, ValueError, "out_dim is 0, expected a whole number of at least 1"),
        ({"progress": True}, TypeError, "progress is True, expected None or a function"),
    ],
)
def test_surveys_that_cannot_be(options, error, message):
    with pytest.raises(error, match=f"^{message}$"):
        survey_conditions(**{"heads": 2, "dim": 3, "samples": 2, **options})
