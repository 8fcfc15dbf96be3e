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
class TargetSpread:
    """The weighted mean of rows of targets and the squares about it, for every target (t,)."""

    weight: float
    mean: NumpyArray
    squares: NumpyArray  # weighted squares of the distances from the mean
    least: NumpyArray
    most: NumpyArray

    def __add__(self, other: TargetSpread) -> TargetSpread:
        weight = self.weight + other.weight
        share = other.weight / weight if weight > 0 else 0.0
        apart = other.mean - self.mean
        return TargetSpread(
            weight,
            self.mean + share * apart,
            self.squares + other.squares + self.weight * share * apart**2,
            np.minimum(self.least, other.least),
            np.maximum(self.most, other.most),
        )


def spread(values: NumpyArray, weights: NumpyArray) -> TargetSpread:
    """The spread of rows of values (n, t) with weights (n,)."""
    weight = float(np.sum(weights))
    mean = np.sum(weights[:, None] * values, axis=0) / (weight if weight > 0 else 1.0)
    squares = np.sum(weights[:, None] * (values - mean) ** 2, axis=0)
    return TargetSpread(weight, mean, squares, values.min(axis=0), values.max(axis=0))


def r_squared(given: GivenExamples, predict: OfSets, standard: Standardization | None) -> float:
    """The coefficient of determination, the mean over all targets, as scikit-learn's `r2_score`."""
    found, unexplained = given.checked.map(_errors, predict, standard).reduce(_merge)
    if len(given.source) < 2:
        message = "R^2 score is not well-defined with less than two samples."
        warnings.warn(message, UndefinedMetricWarning, stacklevel=3)
        return float("nan")
    validation.check_some_weight(found.weight)
    total = found.squares
    constant = np.where(unexplained > 0, 0.0, 1.0)  # for targets that do not vary
    explained = 1.0 - unexplained / np.where(total > 0, total, 1.0)
    return float(np.mean(np.where(total > 0, explained, constant)))


def accuracy(given: GivenExamples, predict: OfSets, standard: Standardization | None) -> float:
    """The share of right labels."""
    right, weight = given.checked.map(_rights, predict, standard).reduce(operator.add)
    validation.check_some_weight(weight)
    return float(right / weight)


def _errors(
    checked: CheckedChunk | Exception, predict: OfSets, standard: Standardization | None
) -> tuple[TargetSpread, NumpyArray]:
    """The spread of targets, and weighted squares (t,) of the errors of their predictions."""
    chunk, predicted, weights = _predicted(checked, predict, standard)
    targets = backend.to_numpy(chunk.targets).reshape(len(predicted), -1)
    predicted = predicted.reshape(targets.shape[0], -1)
    if predicted.shape != targets.shape:
        raise ValueError(
            f"y has {targets.shape[1]} targets, expected {predicted.shape[1]} as at fit"
        )
    squares = np.sum(weights[:, None] * (targets - predicted) ** 2, axis=0)
    return spread(targets, weights), squares


def _merge(
    one: tuple[TargetSpread, NumpyArray], other: tuple[TargetSpread, NumpyArray]
) -> tuple[TargetSpread, NumpyArray]:
    return one[0] + other[0], one[1] + other[1]


def _rights(
    checked: CheckedChunk | Exception, predict: OfSets, standard: Standardization | None
) -> NumpyArray:
    """The weight of the examples whose labels are right, and that of all."""
    chunk, predicted, weights = _predicted(checked, predict, standard)
    return np.array([np.sum(weights * (chunk.targets == predicted)), np.sum(weights)])


def _predicted(
    checked: CheckedChunk | Exception, predict: OfSets, standard: Standardization | None
) -> tuple[CheckedChunk, NumpyArray, NumpyArray]:
    """A chunk, its predictions and its weights (n,)."""
    chunk = valid(checked)
    found = backend.to_numpy(predict(replace(chunk.sets, standard=standard)))
    own = np.ones(len(chunk.sets)) if chunk.weights is None else backend.to_numpy(chunk.weights)
    return chunk, found, own
