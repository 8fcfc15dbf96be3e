import numpy as np
import pytest
from lab_cases import judged, measured

from onelayer import inputs
from onelayer.lab.claims import depth as claim
from onelayer.theory import targets

NAME = "depth"
PREDICTED = {  # by depth: two hops, 0.057 of it out of reach for one layer; that part; others
    1: (0.07, 1.0, 0.01, 0.001),
    2: (0.05, 0.5, 0.02, 0.002),
}


def as_predicted(changes=()):
    errors = PREDICTED | dict(changes)
    return lambda depth, **_: dict(zip(claim.SHOWN, errors[depth], strict=True))


def test_holds_as_predicted():
    assert judged(NAME, as_predicted()) == ("holds", [])


@pytest.mark.parametrize(
    ("changes", "statement"),
    [
        ({1: (0.07, 0.9, 0.01, 0.001)}, "one layer learns nothing"),
        ({1: (0.05, 1.0, 0.01, 0.001), 2: (0.04, 0.5, 0.02, 0.002)}, "one layer learns nothing"),
        ({2: (0.05, 0.95, 0.02, 0.002)}, "more layers learn"),
        ({2: (0.068, 0.5, 0.02, 0.002)}, "more layers leave"),
        ({2: (0.05, 0.5, 0.005, 0.002)}, "price"),
    ],
)
def test_every_check_can_fail(changes, statement):
    outcome, failed = judged(NAME, as_predicted(changes))
    assert outcome == "fails"
    assert len(failed) == 1
    assert statement in failed[0]


def test_cannot_judge_one_depth_or_none_of_one_layer():
    assert judged(NAME, as_predicted(), depth=1) == ("undecided", [])
    assert judged(NAME, as_predicted({3: PREDICTED[2]}), depth=[2, 3]) == ("undecided", [])


@pytest.mark.parametrize(("dim", "keys"), [(3, 2), (4, 5)])
def test_the_three_token_part_has_its_moments_and_nothing_of_pairs(dim, keys):
    X = inputs.sphere(100_000, keys + 1, dim, seed=0)
    part = claim.three_token_part(dim)
    values = part(X)
    assert np.mean(values) == pytest.approx(part.mean(keys), abs=0.02 * np.std(values))
    assert np.var(values) == pytest.approx(part.variance(keys), rel=0.03)
    pairs = targets.correlation_weighted(1, dim)(X)
    for known in (pairs, targets.query_only(1, dim)(X), X[:, 0, 0] * X[:, 1, 0] ** 2):
        assert abs(np.corrcoef(values, known)[0, 1]) < 0.02


def test_without_the_three_token_part_keys_add_up():
    """A sum over single keys: what two of them change together is what each changes alone."""
    X, other = inputs.sphere(100, 4, 3, seed=0), inputs.sphere(100, 4, 3, seed=1)

    def pairs_alone(*changed):
        tokens = X.copy()
        tokens[:, changed] = other[:, changed]
        return targets.three_token(3)(tokens) - claim.three_token_part(3)(tokens)

    together = pairs_alone(1, 2) + pairs_alone()
    np.testing.assert_allclose(together, pairs_alone(1) + pairs_alone(2), atol=1e-14)


@pytest.mark.slow
def test_one_layer_stays_at_its_floor():
    results = measured(NAME, depth=1, dim=3, keys=2, heads=60, examples=1500, seeds=1)
    (cell,) = results
    assert cell["three-token part"] == pytest.approx(1.0, abs=0.05)
    assert cell["three tokens"] == pytest.approx(claim.out_of_reach(results), abs=0.03)
    assert cell["f_{1,1}"] < cell["f_{2,1}"] < 0.05
