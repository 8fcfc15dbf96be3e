"""Learning curves: the error at every sample size and target, from what the sizes share."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone

from onelayer.array import backend, checks
from onelayer.data.chunks import Chunk
from onelayer.data.sources import Source
from onelayer.features import scores, validation
from onelayer.features.estimators import Regressor
from onelayer.features.models import Model
from onelayer.features.scores import Spread
from onelayer.features.solvers.leave_one_out import Found


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
    once; X and X_test, with `mask` and `mask_test`, take any form that the estimator takes, and may
    be anywhere that its examples may be. The features are drawn once, for X, so that the result is
    that of fitting at every size with the same `random_state` (if the longest set is among the
    first, where features depend on it). With `standardize=True` tokens are centred and scaled once,
    by the examples of the largest size. What the sizes share is computed once: the Gram matrix and,
    for a given alpha and up to as many examples as features, its factor. The estimator is not
    changed, and tells its callbacks how far it is.

    >>> from onelayer import inputs
    >>> from onelayer.features.estimators import RandomFeatureAttention
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
    checked = validation.as_sizes(sizes)
    problem = model._problem(X, y, mask, first=checked[-1])
    validation.check_enough(checked, problem)
    test, _ = model._examples(X_test, y_test, mask_test, None, reset=False, name="X_test")
    spread = _checked_spread(test, problem.targets)
    found = model._solve(problem, checked, "learning curve")
    solution = (model._model, found, problem.device)
    squares = test.chunks.map(_squared_errors, *solution).reduce(operator.add)
    alphas = np.stack([one.alphas for one in found])
    return LearningCurve(np.array(checked), squares / len(test) / spread.variance, alphas)


def _checked_spread(test: Source, count: int) -> Spread:
    """How the test targets spread: as many as there are to learn, and none constant."""
    targets = test.samples[1].shape[1]
    if targets != count:
        raise ValueError(f"y_test has {targets} targets, expected {count} as y has")
    found: Spread = test.chunks.map(_spread).reduce(operator.add)
    constant = (found.most == found.least) | (found.squares == 0)  # either may underflow
    if constant.any():
        raise ValueError(
            f"y_test is constant in target {int(np.argmax(constant))}, expected targets that vary: "
            "errors are relative to their variance"
        )
    return found


def _spread(chunk: Chunk) -> Spread:
    return scores.spread(backend.to_numpy(chunk.arrays[1]), np.ones(len(chunk)))


def _squared_errors(
    chunk: Chunk, model: Model, found: Sequence[Found], device: str | None
) -> np.ndarray[Any, Any]:
    """The sums of the squared errors of all test examples of a chunk, (sizes, targets)."""
    sets, targets, _ = chunk.arrays
    predictions = model.predict(sets, [one.coefficients for one in found], device)
    truth = backend.to_numpy(targets)
    squares = []
    for one, linear in zip(found, predictions, strict=True):
        wanted = truth - backend.to_numpy(one.intercept)
        squares.append(np.sum((backend.to_numpy(linear) - wanted) ** 2, axis=0))
    return np.stack(squares)


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
