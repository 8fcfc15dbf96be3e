"""Scores from sums over chunks: neither examples nor predictions need be in one place.

scikit-learn's scores want targets and predictions in two columns of n numbers, and those may be all
that does not fit one machine. Means, and squares about them, are merged by the formula of Chan,
Golub and LeVeque: with weights w, w' and means m, m' of two parts, the squares about the mean of
both are the sum of both squares and (m - m')² w w' / (w + w').
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelayer.array import backend
from onelayer.data.chunks import Chunk
from onelayer.features import validation
from onelayer.features.streamed import Answer, Given, Reader

Matrix = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Spread:
    """The mean of rows of numbers and their spread about it, for every column (t,)."""

    weight: float
    mean: Matrix
    squares: Matrix  # weighted squares of the distances from the mean
    least: Matrix
    most: Matrix

    @property
    def variance(self) -> Matrix:
        return self.squares / self.weight

    def __add__(self, other: Spread) -> Spread:
        weight = self.weight + other.weight
        share = other.weight / weight if weight > 0 else 0.0
        apart = other.mean - self.mean
        return Spread(
            weight,
            self.mean + share * apart,
            self.squares + other.squares + self.weight * share * apart**2,
            np.minimum(self.least, other.least),
            np.maximum(self.most, other.most),
        )


def spread(values: Matrix, weights: Matrix) -> Spread:
    """Of rows of values (n, t) with weights (n,).

    >>> both = spread(np.array([[1.0], [3.0]]), np.ones(2)) + spread(np.array([[8.0]]), np.ones(1))
    >>> both.mean, both.variance.round(6)
    (array([4.]), array([8.666667]))
    """
    weight = float(np.sum(weights))
    mean = np.sum(weights[:, None] * values, axis=0) / (weight if weight > 0 else 1.0)
    squares = np.sum(weights[:, None] * (values - mean) ** 2, axis=0)
    return Spread(weight, mean, squares, values.min(axis=0), values.max(axis=0))


def r_squared(given: Given, predict: Answer) -> float:
    """The coefficient of determination, the mean over all targets, as scikit-learn's `r2_score`."""
    errors = given.source.chunks.map(_errors, given.reader, predict)
    found = errors.reduce(operator.add)
    validation.check_some_weight(found.spread.weight)
    unexplained, total = found.squares, found.spread.squares
    constant = np.where(unexplained > 0, 0.0, 1.0)  # nothing to explain: all or nothing
    explained = 1.0 - unexplained / np.where(total > 0, total, 1.0)
    return float(np.mean(np.where(total > 0, explained, constant)))


def accuracy(given: Given, predict: Answer) -> float:
    """The share of right labels."""
    rights = given.source.chunks.map(_rights, given.reader, predict)
    right, weight = rights.reduce(operator.add)
    validation.check_some_weight(weight)
    return float(right / weight)


@dataclass(frozen=True)
class _Errors:
    """The spread of targets, and weighted squares (t,) of the errors of their predictions."""

    spread: Spread
    squares: Matrix

    def __add__(self, other: _Errors) -> _Errors:
        return _Errors(self.spread + other.spread, self.squares + other.squares)


def _errors(chunk: Chunk, reader: Reader, predict: Answer) -> _Errors:
    sets = reader.sets(chunk)
    targets = backend.to_numpy(validation.columns(reader.targets(chunk, sets), None))
    predicted = backend.to_numpy(predict(sets)).reshape(len(sets), -1)
    if predicted.shape != targets.shape:
        raise ValueError(
            f"y has {targets.shape[1]} targets, expected {predicted.shape[1]} as at fit"
        )
    weights = _weights(reader, chunk)
    squares = np.sum(weights[:, None] * (targets - predicted) ** 2, axis=0)
    return _Errors(spread(targets, weights), squares)


def _rights(chunk: Chunk, reader: Reader, predict: Answer) -> Matrix:
    """The weight of the examples whose labels are right, and that of all."""
    sets = reader.sets(chunk)
    right = validation.as_labels(chunk.arrays[2], sets) == backend.to_numpy(predict(sets))
    weights = _weights(reader, chunk)
    return np.array([np.sum(weights * right), np.sum(weights)])


def _weights(reader: Reader, chunk: Chunk) -> Matrix:
    weights = reader.weights(chunk, reader.sets(chunk))
    return np.ones(len(chunk)) if weights is None else backend.to_numpy(weights)
