from functools import cache

import numpy as np
import pytest
from cases import as_they_are

from onelayer import AttentionLayer, inputs
from onelayer.recovery.phases import sculpt as sculpt_module
from onelayer.recovery.phases.polytope import Spectrum
from onelayer.recovery.phases.sculpt import Sculpt

GOOD = 0.003  # relative error of the sum of projections after phase 3

sculpt = Sculpt().sculpt


def layer_of(heads, dim=8, seed=0):
    return AttentionLayer.random(heads=heads, dim=dim, scale=3.0, seed=seed)


def examples_of(layer, X, xp_array=np.asarray):
    """Examples in the coordinates in which they are given, so that the layer's weights hold."""
    parts = (xp_array(array) for array in (X, layer(X)))
    return as_they_are(*parts)


def sum_with_error(layer, error, seed=0):
    """Σ_i W_i, off by this relative error."""
    exact = layer.projection.sum(axis=0)
    away = np.random.default_rng(seed).standard_normal(exact.shape)
    return exact + error * np.linalg.norm(exact) / np.linalg.norm(away) * away


@cache
def good_case(seed):
    """A layer with two heads and its polytope from 20,000 Boolean examples and a good sum."""
    layer = layer_of(2, seed=seed)
    examples = examples_of(layer, inputs.boolean(20_000, 3, 8, seed=seed + 1000))
    sculpture = sculpt(examples, sum_with_error(layer, GOOD, seed), GOOD, heads=2)
    return layer.attention.reshape(2, 64), examples, sculpture


def distances(heads, sculpture):
    """How far each head is from the centre and its free directions, relative to its size."""
    free = sculpture.spectrum.directions[: sculpture.free]
    away = heads - sculpture.centre
    away = away - away @ free.T @ free
    return np.linalg.norm(away, axis=1) / np.linalg.norm(heads, axis=1)


def sculpt_with(monkeypatch, seed, change):
    """The good case again, after `change` of the two-sided and one-sided slabs that are found."""
    _, examples, _ = good_case(seed)
    found = sculpt_module.find_slabs
    monkeypatch.setattr(sculpt_module, "find_slabs", lambda *given: change(*found(*given)))
    return sculpt(examples, sum_with_error(layer_of(2, seed=seed), GOOD, seed), GOOD, heads=2)


def is_kept(normals, sculpture):
    """Which of the normals are those of two-sided slabs of a polytope."""
    kept = {normal.tobytes() for normal in sculpture.polytope.normals[sculpture.polytope.two_sided]}
    return np.array([normal.tobytes() in kept for normal in normals])


# Two heads, a good sum


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_all_heads_are_in_the_body(seed):
    heads, _, sculpture = good_case(seed)
    polytope = sculpture.polytope
    assert all(polytope.contains(head) for head in heads)
    between = heads[1] - heads[0]
    # As long as the heads are apart, and thin across.
    across = np.random.default_rng(seed).standard_normal(64)
    across -= (across @ between) / (between @ between) * between
    across *= np.linalg.norm(between) / np.linalg.norm(across)
    length, thickness = (polytope.support(v) + polytope.support(-v) for v in (between, across))
    assert length > between @ between
    assert length > 4 * thickness


@pytest.mark.parametrize("seed", range(4))
def test_nearly_all_slabs_contain_all_heads(seed):
    heads, _, sculpture = good_case(seed)
    polytope = sculpture.polytope
    values = polytope.normals @ heads.T
    inside = ((values >= polytope.lower[:, None]) & (values <= polytope.upper[:, None])).all(axis=1)
    assert inside[polytope.two_sided].mean() > 0.997
    assert inside[~polytope.two_sided].all()
    assert (~polytope.two_sided).sum() == 4 * 64


@pytest.mark.parametrize("seed", range(4))
def test_centre_and_free_direction_contain_the_heads_to_a_few_percent(seed):
    heads, _, sculpture = good_case(seed)
    assert sculpture.free == 1
    assert distances(heads, sculpture).max() < 0.03
    between = (heads[1] - heads[0]) / np.linalg.norm(heads[1] - heads[0])
    assert abs(sculpture.spectrum.directions[0] @ between) > 0.999
    assert sculpture.spectrum.directions[0] @ sculpture.centre == pytest.approx(0.0, abs=1e-9)
    assert 0 < sculpture.rejected < 0.1


def test_rejected_is_the_share_of_slabs_that_are_not_in_the_body():
    _, _, sculpture = good_case(1)
    assert sculpture.rejected == pytest.approx(1 - sculpture.polytope.two_sided.sum() / (16 * 64))


@pytest.mark.parametrize("kind", ["gaussian", "sphere"])
def test_continuous_inputs_need_no_difference(kind):
    layer = layer_of(2, seed=1)
    X = getattr(inputs, kind)(20_000, 2, 8, seed=1)
    X *= np.sqrt(1 / np.mean(X**2))
    sculpture = sculpt(examples_of(layer, X), sum_with_error(layer, GOOD), GOOD, heads=2)
    assert sculpture.free == 1
    assert distances(layer.attention.reshape(2, 64), sculpture).max() < 0.03


def test_backends_find_the_same_body(xp_array):
    layer = layer_of(2, dim=6, seed=2)
    X, projection_sum = inputs.gaussian(3_000, 2, 6, seed=2), sum_with_error(layer, GOOD)
    plain = sculpt(examples_of(layer, X), projection_sum, GOOD, heads=2)
    other = sculpt(examples_of(layer, X, xp_array), xp_array(projection_sum), GOOD, heads=2)
    assert type(other.centre) is np.ndarray
    assert other.free == plain.free == 1
    assert other.rejected == plain.rejected
    np.testing.assert_allclose(other.centre, plain.centre, atol=1e-6)
    np.testing.assert_allclose(
        np.sort(other.polytope.lower), np.sort(plain.polytope.lower), atol=1e-6
    )


# The number of heads


@pytest.mark.parametrize(
    ("heads", "dim", "tokens", "n"), [(1, 8, 3, 3_000), (2, 8, 3, 20_000), (3, 10, 2, 40_000)]
)
def test_the_number_of_heads_shows(heads, dim, tokens, n):
    layer = layer_of(heads, dim, seed=3)
    examples = examples_of(layer, inputs.boolean(n, tokens, dim, seed=3))
    sculpture = sculpt(examples, layer.projection.sum(axis=0), 1e-4, heads=None)
    assert sculpture.free == heads - 1
    assert distances(layer.attention.reshape(heads, -1), sculpture).max() < 0.06


@pytest.mark.parametrize("error", [0.1, 0.3])
def test_a_crude_sum_shows_no_free_direction(error):
    _, examples, _ = good_case(1)
    crude = sum_with_error(layer_of(2, seed=1), error)
    sculpture = sculpt(examples, crude, error, heads=2)
    assert sculpture.free == 0
    assert sculpture.centre @ sculpture.spectrum.directions[0] != 0


# Too little to go by


@pytest.mark.parametrize("heads", [None, 1, 2])
def test_too_few_examples_give_no_body(heads):
    layer = layer_of(2)
    examples = examples_of(layer, inputs.boolean(30, 3, 8))
    assert sculpt(examples, layer.projection.sum(axis=0), GOOD, heads) is None


def test_a_sum_that_may_be_all_wrong_gives_no_body():
    layer = layer_of(2)
    examples = examples_of(layer, inputs.boolean(2_000, 3, 8))
    assert sculpt(examples, layer.projection.sum(axis=0), 10.0, heads=2) is None


@pytest.mark.parametrize(("slabs", "enough"), [(95, False), (300, True)])
def test_three_slabs_for_two_unknowns_are_too_few(monkeypatch, slabs, enough):
    def change(two_sided, one_sided):
        return two_sided.take(np.arange(slabs)), one_sided

    assert (sculpt_with(monkeypatch, 1, change) is not None) == enough


# Slabs that do not belong


@pytest.mark.parametrize("seed", [1, 3])
def test_slabs_that_do_not_fit_with_the_others_are_dropped(monkeypatch, seed):
    rng = np.random.default_rng(seed)
    normals, wrong = [], []

    def change(two_sided, one_sided):
        normals.extend(two_sided.normals())
        wrong.extend(rng.random(len(two_sided.key)) < 0.2)
        shift = 20 * two_sided.error * rng.choice([-1, 1], len(wrong)) * wrong
        return two_sided._replace(value=two_sided.value + shift), one_sided

    heads, _, before = good_case(seed)
    sculpture = sculpt_with(monkeypatch, seed, change)
    wrong, kept = np.array(wrong), is_kept(normals, sculpture)
    assert kept[wrong].mean() < 0.01
    assert kept[~wrong & is_kept(normals, before)].mean() > 0.97
    assert sculpture.rejected > wrong.mean()
    assert distances(heads, sculpture).max() < 0.04


@pytest.mark.parametrize("seed", [1, 3])
def test_slabs_that_cut_between_the_heads_are_dropped(monkeypatch, seed):
    heads, _, _ = good_case(seed)
    cutting = np.arange(20)
    normals = []

    def change(two_sided, one_sided):
        """Random rows whose slab goes through the middle of the heads, and looks good."""
        tokens, value, tolerance = two_sided.tokens, two_sided.value, two_sided.tolerance
        error = two_sided.error.copy()
        tokens[cutting] = inputs.boolean(20, 3, 8, seed=seed)
        changed = two_sided._replace(tokens=tokens)
        value[cutting] = (changed.normals() @ heads.mean(axis=0))[cutting]
        tolerance[cutting], error[cutting] = np.inf, 0.1
        normals.extend(changed.normals()[cutting])
        return changed._replace(value=value, tolerance=tolerance, error=error), one_sided

    sculpture = sculpt_with(monkeypatch, seed, change)
    apart = abs(np.array(normals) @ (heads[1] - heads[0])) / 2
    assert np.sum(apart > 1) > 10
    assert not is_kept(normals, sculpture)[apart > 1].any()
    assert sculpture.free == 1
    assert distances(heads, sculpture).max() < 0.03


def test_rows_that_are_not_certified_are_dropped(monkeypatch):
    normals = []

    def change(two_sided, one_sided):
        normals.extend(two_sided.normals())
        output = two_sided.output.copy()
        output[::10] += 1.0  # the middle of the images is far from it
        least = two_sided.least.copy()
        least[::10] = -1.0  # so that they are looked at
        return two_sided._replace(output=output, least=least), one_sided

    _, _, before = good_case(1)
    kept, kept_before = (is_kept(normals, s) for s in (sculpt_with(monkeypatch, 1, change), before))
    assert not kept[::10].any()
    assert kept_before[::10].mean() > 0.9
    others = np.arange(len(kept)) % 10 > 0
    assert np.mean(kept[others] == kept_before[others]) > 0.97


def test_half_spaces_without_the_centre_are_left_out(monkeypatch):
    def change(two_sided, one_sided):
        value = one_sided.value.copy()
        value[:100] -= 1e3
        return two_sided, one_sided._replace(value=value)

    polytope = sculpt_with(monkeypatch, 1, change).polytope
    assert (~polytope.two_sided).sum() == 4 * 64 - 100
    _, _, before = good_case(1)
    assert (
        polytope.normals[~polytope.two_sided] @ before.centre >= polytope.lower[~polytope.two_sided]
    ).all()


# Gaps


def spectrum_of(*values):
    return Spectrum(np.array(values, dtype=float), np.eye(len(values)))


@pytest.mark.parametrize(
    ("values", "free", "gap"),
    [
        ((0.1, 1, 1, 1, 1, 1, 1, 1), 1, 10.0),
        ((0.1, 0.1, 1, 1, 1, 1, 1, 1), 2, 10.0),
        ((0.1, 0.3, 3, 3, 3, 3, 3, 3), 2, 10.0),
        ((0.1, 1, 3, 3, 3, 3, 3, 3), 1, 10.0),
        ((1, 2, 2, 2, 2, 2, 2, 2), 1, 2.0),
        ((1, 1.99, 2, 2, 2, 2, 2, 2), 0, np.inf),
        ((1, 1, 1, 9, 9, 9, 9, 9), 0, np.inf),  # more than a quarter of the unknowns
        ((1, 5), 1, 5.0),
    ],
)
def test_free_directions_are_those_below_the_largest_clear_gap(values, free, gap):
    assert spectrum_of(*values).clear_gap() == (free, pytest.approx(gap))


@pytest.mark.parametrize(("free", "gap"), [(0, np.inf), (1, 1.5), (2, 4.0), (3, 1.25)])
def test_the_gap_above_a_given_number_is_told_whether_clear_or_not(free, gap):
    assert spectrum_of(1, 1.5, 6, 7.5, 8, 8, 8, 8).clear_gap(free) == (free, pytest.approx(gap))


def test_a_direction_that_no_slab_cuts_has_an_enormous_gap():
    free, gap = spectrum_of(0, 1, 1, 1, 1, 1, 1, 1).clear_gap()
    assert free == 1
    assert gap == pytest.approx(1e7)
