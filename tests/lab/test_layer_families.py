import numpy as np
import pytest

from onelayer import conditions
from onelayer.lab import layer_families
from onelayer.lab.layer_families import FAMILIES, LayerShape
from onelayer.lab.seeds import generator


def made(name, step, examples=1, seed=0):
    """An instance of a family in its usual shape."""
    return layer_families.instance(FAMILIES[name], step, 8, 3, 3.0, examples, seed)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_starts_with_a_layer_that_meets_the_conditions(name):
    layer, X, Y = made(name, FAMILIES[name].steps[0], examples=5)
    assert {n for n, c in conditions(layer).items() if not c.holds} == set()
    assert X.shape == Y.shape == ((5, 2, 10) if name == "attention-independence" else (5, 3, 8))
    assert set(np.unique(X)) == {-1.0, 1.0}
    assert bool(np.allclose(layer(X), Y, rtol=0, atol=1e-12)) == (name != "noise")


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].conditions])
def test_the_condition_of_a_family_degrades_with_its_steps(name):
    found = [conditions(made(name, step)[0]) for step in FAMILIES[name].steps]
    condition = [conditions[FAMILIES[name].conditions[0]] for conditions in found]
    changes = np.diff([one.measured for one in condition])
    assert np.all(changes < 0 if condition[0].at_least else changes > 0)
    assert not condition[-1].holds


def test_noise_has_the_size_of_the_step():
    layer, X, Y = made("noise", 0.1, examples=2000)
    clean = layer(X)
    share = np.linalg.norm(Y - clean) / np.linalg.norm(clean)
    assert share == pytest.approx(0.1, rel=0.05)


def test_all_steps_of_a_seed_start_from_one_layer():
    first, near = (made("distance", step)[0] for step in (90, 60))
    np.testing.assert_array_equal(first.attention[0], near.attention[0])
    np.testing.assert_array_equal(first.projection, near.projection)
    other, _, _ = made("distance", 90, seed=1)
    assert np.abs(other.attention[0] - first.attention[0]).max() > 0.1


def test_heads_stand_at_the_angle_that_was_asked_for():
    first, second = made("distance", 30)[0].attention
    cosine = np.vdot(first, second) / np.linalg.norm(first) / np.linalg.norm(second)
    assert np.rad2deg(np.arccos(cosine)) == pytest.approx(30)


@pytest.mark.parametrize(("blocks", "entries"), [(1, 64), (2, 32), (4, 16), (8, 8)])
def test_block_diagonal_attention_has_zeros_outside_of_its_blocks(blocks, entries):
    layer = layer_families.block_diagonal(blocks, LayerShape(2, 8, 3.0), generator(0, "layer"))
    assert [int(np.sum(head != 0)) for head in layer.attention] == [entries] * 2
    assert np.all(layer.attention[:, range(8), range(8)] != 0)
    np.testing.assert_allclose(np.linalg.norm(layer.attention, axis=(1, 2)), 3.0)


@pytest.mark.parametrize("rank", [1, 3])
def test_low_rank_attention_has_that_rank(rank):
    layer = layer_families.low_rank(rank, LayerShape(2, 8, 3.0), generator(0, "layer"))
    assert set(np.linalg.matrix_rank(layer.attention)) == {rank}


@pytest.mark.parametrize(
    ("count", "steps"), [(1, (3,)), (2, (3, 0.5)), (3, (3, 1.5, 0.5)), (9, (3, 2, 1.5, 1, 0.5))]
)
def test_thinned_steps_go_from_the_first_to_the_worst(count, steps):
    assert FAMILIES["small-scale"].thinned(count) == steps
