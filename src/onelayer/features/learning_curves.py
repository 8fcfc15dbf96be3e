"""Learning curves: test errors at many sample sizes, from one factorization where possible."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone

from onelayer.array import backend, checks
from onelayer.array.backend import NumpyArray
from onelayer.data.chunks import Chunk
from onelayer.data.sources import Source
from onelayer.features import base, scores, validation
from onelayer.features.base import Fit
from onelayer.features.estimators import Regressor
from onelayer.features.scores import Scatter


@dataclass(frozen=True)
class LearningCurve:
    """Test errors of an estimator at several sample sizes, from `learning_curve`.

    Attributes
    ----------
    sizes : array of shape (sizes,)
        The sample sizes.
    test_error : array of shape (sizes, targets)
        Mean squared errors relative to the variance of each target.
    alpha : array of shape (sizes, targets)
        The penalties used.
    """

    sizes: NumpyArray
    test_error: NumpyArray
    alpha: NumpyArray

    def samples_needed(self, error: float) -> NumpyArray:
        """Sample size at which the error of each target first falls to `error`.

        Parameters
        ----------
        error : float
            The error to reach.

        Returns
        -------
        array of shape (targets,)
            Sizes, by interpolation as a power of the size; infinity if the error stays above.

        Examples
        --------
        >>> curve = LearningCurve(np.array([10, 100]), np.array([[1.0], [0.01]]), np.ones((2, 1)))
        >>> curve.samples_needed(0.1).round(6)
        array([31.622777])
        """
        level = checks.positive_number(error, "error")
        return np.array([_crossing(self.sizes, column, level) for column in self.test_error.T])


def learning_curve(
    estimator: Regressor,
    X: Any,
    y: Any,
    X_test: Any,
    y_test: Any,
    sizes: Sequence[int],
    *,
    mask: Any = None,
    mask_test: Any = None,
) -> LearningCurve:
    """Test errors of an estimator fitted to the first s examples, for many sample sizes s.

    The error is the mean squared error over the variance of the target on the test set: the best
    constant has error 1. Features are drawn once, so the result is that of fitting at every size
    with the same `random_state` (if the longest set is among the first examples, where features
    depend on it). Computation that the sizes share is done once: the Gram matrix and, for a given
    alpha and sizes up to the number of features, its factor.

    Parameters
    ----------
    estimator : RandomFeatureAttention, RandomFeatureMLP or AttentionKernelRidge
        It is cloned, not changed; its callbacks report progress. With `standardize=True` tokens
        are centred and scaled once, by the examples of the largest size.
    X, y, X_test, y_test : examples and targets
        In any form and place that the estimator takes; y is (n,) or (n, targets).
    sizes : list of int
        Ascending sample sizes.
    mask, mask_test : arrays of shape (n, tokens), optional
        True for tokens that exist.

    Returns
    -------
    LearningCurve
        The errors of all sizes and targets, and the penalties used.

    Examples
    --------
    >>> import onelayer as ol
    >>> X = ol.inputs.sphere(400, tokens=5, dim=4)
    >>> y = X[:, 1:, 0].mean(axis=1)
    >>> model = ol.RandomFeatureAttention(heads=100, random_state=0)
    >>> learning_curve(model, X[:200], y[:200], X[200:], y[200:], sizes=[25, 200]).test_error.shape
    (2, 1)
    """
    if not isinstance(estimator, Regressor):
        raise TypeError(
            f"estimator is a {type(estimator).__name__}, expected RandomFeatureAttention, "
            "RandomFeatureMLP or AttentionKernelRidge"
        )
    model = clone(estimator)
    checked = validation.as_sizes(sizes)
    problem = base.ridge_problem(model, X, y, mask, first=checked[-1])
    validation.check_enough(checked, problem)
    test = base.examples_to_test(model, X_test, y_test, mask_test, "X_test")
    scatter = _checked_scatter(test, problem.targets)
    fit = base.solve(model, problem, checked, "learning curve")
    squares = test.chunks.map(_squared_errors, fit, problem.device).reduce(operator.add)
    alphas = np.stack([one.alphas for one in fit.solutions])
    return LearningCurve(np.array(checked), squares / len(test) / scatter.variance, alphas)


def _checked_scatter(test: Source, count: int) -> Scatter:
    """The scatter of `count` test targets, none of which may be constant."""
    targets = test.samples[1].shape[1]
    if targets != count:
        raise ValueError(f"y_test has {targets} targets, expected {count} as y has")
    found = test.chunks.map(_scatter).reduce(operator.add)
    constant = (found.most == found.least) | (found.squares == 0)  # either may underflow
    if constant.any():
        raise ValueError(
            f"y_test is constant in target {int(np.argmax(constant))}, expected targets that vary: "
            "errors are relative to their variance"
        )
    return found


def _scatter(chunk: Chunk) -> Scatter:
    return scores.scatter(backend.to_numpy(chunk.arrays[1]), np.ones(len(chunk)))


def _squared_errors(chunk: Chunk, fit: Fit, device: str | None) -> NumpyArray:
    """The sums of squared errors over the test examples of a chunk, (sizes, targets)."""
    sets, targets, _ = chunk.arrays
    coefficients = [one.coefficients for one in fit.solutions]
    predictions = fit.model.predict(sets, coefficients, device)
    truth = backend.to_numpy(targets)
    squares = []
    for one, linear in zip(fit.solutions, predictions, strict=True):
        wanted = truth - backend.to_numpy(one.intercept)
        squares.append(np.sum((backend.to_numpy(linear) - wanted) ** 2, axis=0))
    return np.stack(squares)


def _crossing(sizes: NumpyArray, errors: NumpyArray, level: float) -> float:
    """Where the piecewise linear curve of log error against log size first reaches the level."""
    below = np.flatnonzero(errors <= level)
    if below.size == 0:
        return float("inf")
    i = below[0]
    if i == 0 or errors[i] <= 0:
        return float(sizes[i])
    steepness = np.log(errors[i - 1] / level) / np.log(errors[i - 1] / errors[i])
    return float(sizes[i - 1] * (sizes[i] / sizes[i - 1]) ** steepness)
