"""R² and accuracy from sums over chunks: examples and predictions need not fit in memory.

Means, and squares about them, are merged by the formula of Chan, Golub and LeVeque: with weights
w, w' and means m, m' of two parts, the squares about the mean of both are the sum of both squares
and (m - m')² w w' / (w + w').
"""

from __future__ import annotations

import operator
import warnings
from dataclasses import dataclass, replace

import numpy as np
from sklearn.exceptions import UndefinedMetricWarning

from onelayer.array import backend
from onelayer.array.backend import NumpyArray
from onelayer.data.standardization import Standardization
from onelayer.features import validation
from onelayer.features.examples import CheckedChunk, GivenExamples, OfSets, valid


@dataclass(frozen=True)
class Scatter:
    """The weighted mean of rows of numbers and the squares about it, for every column (t,)."""

    weight: float
    mean: NumpyArray
    squares: NumpyArray  # weighted squares of the distances from the mean
    least: NumpyArray
    most: NumpyArray

    @property
    def variance(self) -> NumpyArray:
        return self.squares / self.weight

    def __add__(self, other: Scatter) -> Scatter:
        weight = self.weight + other.weight
        share = other.weight / weight if weight > 0 else 0.0
        apart = other.mean - self.mean
        return Scatter(
            weight,
            self.mean + share * apart,
            self.squares + other.squares + self.weight * share * apart**2,
            np.minimum(self.least, other.least),
            np.maximum(self.most, other.most),
        )


def scatter(values: NumpyArray, weights: NumpyArray) -> Scatter:
    """Of rows of values (n, t) with weights (n,).

    >>> two, one = np.array([[1.0], [3.0]]), np.array([[8.0]])
    >>> both = scatter(two, np.ones(2)) + scatter(one, np.ones(1))
    >>> both.mean, both.variance.round(6)
    (array([4.]), array([8.666667]))
    """
    weight = float(np.sum(weights))
    mean = np.sum(weights[:, None] * values, axis=0) / (weight if weight > 0 else 1.0)
    squares = np.sum(weights[:, None] * (values - mean) ** 2, axis=0)
    return Scatter(weight, mean, squares, values.min(axis=0), values.max(axis=0))


def r_squared(given: GivenExamples, predict: OfSets, standard: Standardization | None) -> float:
    """The coefficient of determination, the mean over all targets, as scikit-learn's `r2_score`."""
    found = given.checked.map(_errors, predict, standard).reduce(operator.add)
    if len(given.source) < 2:
        message = "R^2 score is not well-defined with less than two samples."
        warnings.warn(message, UndefinedMetricWarning, stacklevel=3)
        return float("nan")
    validation.check_some_weight(found.scatter.weight)
    unexplained, total = found.squares, found.scatter.squares
    constant = np.where(unexplained > 0, 0.0, 1.0)  # for targets that do not vary
    explained = 1.0 - unexplained / np.where(total > 0, total, 1.0)
    return float(np.mean(np.where(total > 0, explained, constant)))


def accuracy(given: GivenExamples, predict: OfSets, standard: Standardization | None) -> float:
    """The share of right labels."""
    right, weight = given.checked.map(_rights, predict, standard).reduce(operator.add)
    validation.check_some_weight(weight)
    return float(right / weight)


@dataclass(frozen=True)
class _TargetErrors:
    """The scatter of targets, and weighted squares (t,) of the errors of their predictions."""

    scatter: Scatter
    squares: NumpyArray

    def __add__(self, other: _TargetErrors) -> _TargetErrors:
        return _TargetErrors(self.scatter + other.scatter, self.squares + other.squares)


def _errors(
    checked: CheckedChunk | Exception, predict: OfSets, standard: Standardization | None
) -> _TargetErrors:
    chunk = valid(checked)
    targets = backend.to_numpy(validation.columns(chunk.targets, None))
    predicted = _predicted(chunk, predict, standard).reshape(len(chunk.sets), -1)
    if predicted.shape != targets.shape:
        raise ValueError(
            f"y has {targets.shape[1]} targets, expected {predicted.shape[1]} as at fit"
        )
    weights = _weights(chunk)
    squares = np.sum(weights[:, None] * (targets - predicted) ** 2, axis=0)
    return _TargetErrors(scatter(targets, weights), squares)


def _rights(
    checked: CheckedChunk | Exception, predict: OfSets, standard: Standardization | None
) -> NumpyArray:
    """The weight of the examples whose labels are right, and that of all."""
    chunk = valid(checked)
    right = chunk.targets == _predicted(chunk, predict, standard)
    weights = _weights(chunk)
    return np.array([np.sum(weights * right), np.sum(weights)])


def _predicted(
    chunk: CheckedChunk, predict: OfSets, standard: Standardization | None
) -> NumpyArray:
    return backend.to_numpy(predict(replace(chunk.sets, standard=standard)))


def _weights(chunk: CheckedChunk) -> NumpyArray:
    return np.ones(len(chunk.sets)) if chunk.weights is None else backend.to_numpy(chunk.weights)
