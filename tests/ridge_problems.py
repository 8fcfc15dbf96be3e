"""Small ridge problems on random neurons, and their comparison with least squares."""

import numpy as np
import oracles

from onelayer import inputs
from onelayer.array.backend import namespace, to_numpy
from onelayer.data import sources
from onelayer.data.sets import as_sets
from onelayer.features import mlp_features
from onelayer.features.progress import untracked
from onelayer.features.solvers import design as design_module
from onelayer.features.solvers import ridge
from onelayer.features.solvers.design import Design, Panels


def tokens(n, seed=0, dtype="f8"):
    return inputs.gaussian(n, 3, 2, seed=seed).astype(dtype)


def duplicated(n, distinct):
    """Examples of which only the first few differ."""
    return tokens(distinct)[np.arange(n) % distinct]


def targets_for(X, count=2, seed=1):
    """Noisy targets of different sizes."""
    noise = np.random.default_rng(seed).standard_normal((len(X), count))
    return (noise + X[:, 1, :1].astype(float)) * 10.0 ** np.arange(count)


def design_for(X, features, xp_array=np.asarray, weights=None):
    neurons = mlp_features.draw(features, X.shape[1], X.shape[2], np.random.default_rng(5))
    scale = None if weights is None else xp_array(np.sqrt(weights).astype(X.dtype))
    return Panels(neurons, as_sets(xp_array(X)), scale)


def spread(design, targets):
    """The same features with their targets, as the solvers want them."""
    examples = sources.in_memory(design._sets, targets, design._row_scale)
    return Design(design._map, examples, design.sample)


def solve(design, targets, alpha, sizes, track=untracked, fit_intercept=False):
    return ridge.solve_features(spread(design, targets), alpha, sizes, track, fit_intercept)


def features_of(design):
    """Φ, as numpy numbers of float64."""
    return to_numpy(design.by_rows(slice(0, design.rows))).astype(float)


def stages_of(told):
    """A `Track` that notes the stages it is told of."""

    def track(parts, stage):
        told.append(stage)
        return iter(parts)

    return track


def check_all_sizes(
    design,
    targets,
    alpha,
    sizes,
    xp_array=np.asarray,
    rtol=1e-9,
    track=None,
    fit_intercept=False,
):
    """The weights of every size are those of its own least-squares problem."""
    track = untracked if track is None else track
    phi, array = features_of(design), xp_array(targets)
    ones = to_numpy(design.ones)[:, None]
    found = solve(design, array, alpha, sizes, track, fit_intercept)
    assert len(found) == len(sizes)
    for size, (weights, alphas, intercept) in zip(sizes, found, strict=True):
        if fit_intercept:
            columns = np.concatenate([phi[:size], ones[:size]], axis=1)
            penalties = [*[alpha] * phi.shape[1], 0.0]
            *expected, constant = oracles.ridge_weights(columns, targets[:size], penalties)
            expected = np.array(expected)
        else:
            expected = oracles.ridge_weights(phi[:size], targets[:size], alpha)
            constant = np.zeros(targets.shape[1])
        largest = 1 + abs(constant)
        np.testing.assert_allclose(to_numpy(intercept), constant, rtol=0, atol=rtol * largest.max())
        assert namespace(intercept) is namespace(array)
        assert namespace(weights) is namespace(array)
        assert weights.dtype == array.dtype
        for got, wanted in zip(to_numpy(weights).T, expected.T, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=rtol * (1 + abs(wanted).max()))
        np.testing.assert_array_equal(alphas, np.full(targets.shape[1], alpha))


def narrow_panels(patch):
    """Cut features into panels of a few rows or columns."""
    patch.setattr(design_module, "PANEL_BYTES", 3 * 8 * 20)
