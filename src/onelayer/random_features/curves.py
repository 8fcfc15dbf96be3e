"""Learning curves: the error at every sample size and target, from what the sizes share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone

from onelayer import arrays, checks
from onelayer.random_features import validation
from onelayer.random_features.estimators import Regressor
from onelayer.random_features.sets import Sets


@dataclass(frozen=True)
class LearningCurve:
    """The outcome of `learning_curve`: errors relative to the variance of each target."""

    sizes: np.ndarray[Any, Any]  # (sizes,)
    test_error: np.ndarray[Any, Any]  # (sizes, targets)
    alpha: np.ndarray[Any, Any]  # (sizes, targets): the penalty used

    def samples_needed(self, error: float) -> np.ndarray[Any, Any]:
        """For every target, the size at which its error first falls to `error`.

        Between two sizes the error is taken for a power of the size; infinity where it stays above.

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
    """Errors on the test set of the estimator fitted to the first s examples, for all s of `sizes`.

    The error is the mean squared error over the variance of the target on the test set: 1 is what
    the best constant reaches. Sizes ascend; y is (n,) or (n, targets), and all targets come at
    once; X and X_test, with `mask` and `mask_test`, take any form that the estimator takes. The
    features are drawn once, for X, so that the result is that of fitting at every size with the
    same `random_state` (if the longest set is among the first, where features depend on it). What
    the sizes share is computed once: the Gram matrix and, for a given alpha and up to as many
    examples as features, its factor. The estimator is not changed, and tells its callbacks how
    far it is.

    >>> from onelayer import inputs
    >>> from onelayer.random_features.estimators import RandomFeatureAttention
    >>> X = inputs.sphere(400, tokens=5, dim=4)
    >>> y = X[:, 1:, 0].mean(axis=1)
    >>> model = RandomFeatureAttention(heads=100, random_state=0)
    >>> curve = learning_curve(model, X[:200], y[:200], X[200:], y[200:], sizes=[25, 50, 100, 200])
    >>> curve.test_error.shape
    (4, 1)
    >>> bool((curve.test_error[1:] < curve.test_error[:-1]).all())
    True
    """
    if not isinstance(estimator, Regressor):
        raise TypeError(
            f"estimator is a {type(estimator).__name__}, expected RandomFeatureAttention, "
            "RandomFeatureMLP or AttentionKernelRidge"
        )
    model = clone(estimator)
    problem = model._problem(X, y, mask)
    checked = validation.as_sizes(sizes, problem.sets)
    examples = model._sets(X_test, mask_test, reset=False, name="X_test")
    targets = _checked_targets(y_test, examples, problem.targets.shape[1])
    found = model._solve(problem, checked, "learning curve")
    predictions = model._model.predict(examples, [coefficients for coefficients, _ in found])
    errors = [np.mean((arrays.to_numpy(p) - targets) ** 2, axis=0) for p in predictions]
    alphas = np.stack([alphas for _, alphas in found])
    return LearningCurve(np.array(checked), np.stack(errors) / targets.var(axis=0), alphas)


def _checked_targets(y_test: Any, examples: Sets, count: int) -> np.ndarray[Any, Any]:
    """The test targets (n, t) in numpy: as many as there are to learn, and none constant."""
    targets = arrays.to_numpy(validation.as_targets(y_test, examples, "y_test"))
    targets = targets.reshape(len(examples), -1)
    if targets.shape[1] != count:
        raise ValueError(f"y_test has {targets.shape[1]} targets, expected {count} as y has")
    constant = (np.ptp(targets, axis=0) == 0) | (targets.var(axis=0) == 0)  # either may underflow
    if constant.any():
        raise ValueError(
            f"y_test is constant in target {int(np.argmax(constant))}, expected targets that vary: "
            "errors are relative to their variance"
        )
    return targets


def _crossing(sizes: np.ndarray[Any, Any], errors: np.ndarray[Any, Any], level: float) -> float:
    """Where the piecewise linear curve of log error against log size first reaches the level."""
    below = np.flatnonzero(errors <= level)
    if below.size == 0:
        return float("inf")
    i = below[0]
    if i == 0 or errors[i] <= 0:
        return float(sizes[i])
    steepness = np.log(errors[i - 1] / level) / np.log(errors[i - 1] / errors[i])
    return float(sizes[i - 1] * (sizes[i] / sizes[i - 1]) ** steepness)
