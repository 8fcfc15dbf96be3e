import numpy as np
import pytest

from onelayer import inputs

DRAWS = [inputs.boolean, inputs.gaussian, inputs.sphere]
every_draw = pytest.mark.parametrize("draw", DRAWS)


@every_draw
def test_shape_and_dtype(draw):
    X = draw(2, 3, 4)
    assert X.shape == (2, 3, 4)
    assert X.dtype == np.float64


@every_draw
def test_same_seed_same_numbers(draw):
    np.testing.assert_array_equal(draw(3, 4, 5, seed=7), draw(3, 4, 5, seed=7))
    assert not np.array_equal(draw(3, 4, 5, seed=7), draw(3, 4, 5, seed=8))


@every_draw
def test_a_generator_moves_on(draw):
    rng = np.random.default_rng(7)
    first, second = draw(3, 4, 5, seed=rng), draw(3, 4, 5, seed=rng)
    np.testing.assert_array_equal(first, draw(3, 4, 5, seed=7))
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    ("draw", "variance"), [(inputs.boolean, 1), (inputs.gaussian, 1), (inputs.sphere, 1 / 5)]
)
def test_entries_are_centred_and_uncorrelated(draw, variance):
    tokens = draw(10_000, 2, 5).reshape(-1, 5)
    np.testing.assert_allclose(tokens.mean(axis=0), 0, atol=0.04)
    np.testing.assert_allclose(tokens.T @ tokens / len(tokens), variance * np.eye(5), atol=0.04)


def test_boolean_entries_are_signs():
    assert set(inputs.boolean(10, 3, 4).ravel()) == {-1.0, 1.0}


def test_sphere_tokens_have_norm_one():
    norms = np.linalg.norm(inputs.sphere(10, 3, 4), axis=-1)
    np.testing.assert_allclose(norms, 1.0, rtol=1e-14)


@every_draw
@pytest.mark.parametrize("name", ["n", "tokens", "dim"])
def test_sizes_that_are_not_whole_or_positive_are_refused(draw, name):
    sizes = {"n": 2, "tokens": 3, "dim": 4}
    with pytest.raises(ValueError, match=f"{name} is 0, expected a whole number of at least 1"):
        draw(**{**sizes, name: 0})
    with pytest.raises(TypeError, match=f"{name} is 1.5, expected a whole number of at least 1"):
        draw(**{**sizes, name: 1.5})
