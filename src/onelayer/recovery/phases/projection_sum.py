"""Phases 1 and 3: the sum of the projections, W = Σ_i W_i.

Phase 1. Averaged over the inputs attention is nearly uniform, and the correlation of the summed
tokens with the summed outputs of an example is nearly W: E (Σ_b x_b)ᵀ (Σ_a y_a) = k W for uniform
attention and independent, whitened tokens of mean 0. What attention has of its own is left as an
error of 15 to 35 %.

Phase 3. A point G of the affine hull of the heads with ⟨Θ_i, G⟩ > 0 for all of them (the
minimum-norm point of the body has this) is on the side of every head: a row whose largest score
under G is far ahead of the others makes every head attend to that token x_b, and y = x_b W. Most
such rows are nearly exact and some are not at all, so the regression on the rows with the largest
margins ends with weights that forget the worse ones.

Boolean, Gaussian and sphere inputs need no difference here: tokens are whitened. For phase 3
margins have to be large on some rows; on the sphere all tokens are equally long and margins have
lighter tails than on Gaussian inputs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import gammaincinv

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.recovery.phases.agreement import agreement
from onelayer.recovery.phases.examples import Examples

# Rows for the regression of phase 3: so many per dimension, but no more than this share of all
# unless that leaves too few per dimension.
_ROWS_PER_DIM, _LARGEST_SHARE, _FEWEST_PER_DIM = 2000, 0.02, 20
# Its weights: 1/(1 + (residual/s)²)², with s one quantile of the residuals after the other.
_ROUNDS, _QUANTILES = 10, (0.5, 0.25, 0.1)
_SAMPLE, _AGREEING = 20_000, 0.02  # examples and share of rows by which phase 1 is judged
_DEGENERATE = 1e-6  # a second moment of the attended tokens below this: a direction is not seen
_CAUTION = 1.5  # what attention leaves over is no noise: the fit takes some of it for its own
_FEWEST_DISTINCT = 1.5  # tokens per dimension: with fewer the regression fits whatever they say


@dataclass(frozen=True, eq=False)
class Estimate:
    """An estimate of W (d, e) and its measured relative error: infinite if it is no estimate."""

    projection_sum: Array
    error: float
    rows: int  # that it rests on


def crude(examples: Examples) -> Estimate:
    """Phase 1: W from the correlation of tokens and outputs, one pass over all examples."""

    def correlation(X: Array, Y: Array) -> Array:
        xp = backend.namespace(X)
        return backend.transpose(xp.sum(X, axis=1)) @ xp.sum(Y, axis=1)

    estimate = examples.fold(correlation, lambda total, term: total + term) / examples.rows
    return Estimate(estimate, _error_by_agreement(examples, estimate), examples.rows)


def _error_by_agreement(examples: Examples, estimate: Array) -> float:
    """The relative error of W, from the rows that agree best with it.

    A row on which heads agree leaves a residual (see `agreement`) because W is wrong and for no
    other reason: relative to the size of p X W its square is error² χ²/e, with e - k + 1 degrees of
    freedom. If all rows were of that kind, the 2 % with the least residuals would be
    the 2 % of that distribution; if fewer are, the error is overestimated.
    """
    left = examples.out_dim - examples.tokens + 1

    def residuals(X: Array, Y: Array) -> np.ndarray[Any, Any]:
        found = agreement(X, Y, estimate)
        residual, size = backend.to_numpy(found.residual), backend.to_numpy(found.size)
        relative = np.divide(residual, size, out=np.full_like(residual, np.inf), where=size > 0)
        return np.asarray(relative.ravel())

    def joined(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return np.concatenate([first, second])

    relative = examples.fold(residuals, joined, most=_SAMPLE)
    least = np.quantile(relative, _AGREEING, method="higher")
    quantile = 2 * gammaincinv(left / 2, _AGREEING)  # of a chi-squared variable
    return float(least / math.sqrt(quantile / examples.out_dim))


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows with their margins: the token that G would attend to, and the output."""

    margin: np.ndarray[Any, Any]
    token: np.ndarray[Any, Any]
    output: np.ndarray[Any, Any]

    def largest(self, count: int) -> _Rows:
        order = np.argsort(-self.margin, kind="stable")[:count]
        return _Rows(self.margin[order], self.token[order], self.output[order])

    def beside(self, other: _Rows) -> _Rows:
        return _Rows(
            np.concatenate([self.margin, other.margin]),
            np.concatenate([self.token, other.token]),
            np.concatenate([self.output, other.output]),
        )


def refined(examples: Examples, point: np.ndarray[Any, Any]) -> Estimate:
    """Phase 3: W from the rows with the largest margins under `point` (d, d), one pass.

    Where those few tokens that have the largest margins do not show all directions, as may happen
    in few dimensions, further passes take four and sixteen times as many rows.
    """
    share = int(_LARGEST_SHARE * examples.rows)
    wanted = min(_ROWS_PER_DIM * examples.dim, share)
    count = max(wanted, _FEWEST_PER_DIM * examples.dim)
    for more in (1, 4, 16):
        rows = _largest_margins(examples, point, more * count)
        estimate, error = _regression(rows.token, rows.output)
        if math.isfinite(error):
            break
    reference = examples.whitening
    return Estimate(backend.like(estimate, reference), error, len(rows.margin))


def _largest_margins(examples: Examples, point: np.ndarray[Any, Any], count: int) -> _Rows:
    """The rows with the largest margins of all examples."""

    def work(X: Array, Y: Array) -> _Rows:
        return _margins(X, Y, point).largest(count)

    def merge(first: _Rows, second: _Rows) -> _Rows:
        return first.beside(second).largest(count)

    return examples.fold(work, merge)


def _margins(X: Array, Y: Array, point: np.ndarray[Any, Any]) -> _Rows:
    """All rows of a block, with how far their largest score is ahead of the second."""
    xp = backend.namespace(X)
    scores = backend.to_numpy(X @ backend.like(point, X) @ backend.transpose(X))
    top = np.argmax(scores, axis=2)
    ordered = np.sort(scores, axis=2)
    margin = ordered[:, :, -1] - ordered[:, :, -2]
    tokens = np.take_along_axis(backend.to_numpy(X), top[:, :, None], axis=1)
    flat = xp.reshape(Y, (-1, Y.shape[2]))
    return _Rows(margin.ravel(), tokens.reshape(-1, X.shape[2]), backend.to_numpy(flat))


def _regression(
    tokens: np.ndarray[Any, Any], outputs: np.ndarray[Any, Any]
) -> tuple[np.ndarray[Any, Any], float]:
    """Weighted least squares y = x W, rows that do not fit forgotten, and a bound on its error.

    With weights w and M = Σ w xᵀx / Σ w the estimate is off by M⁻¹ Σ w xᵀ(y - x W) / Σ w, which
    is at most the root mean square of y - x W over √λ_min(M); that of the fit takes its place. As
    more rows are forgotten the residuals fall, but the tokens that are left may no longer show all
    directions: of all turns the one with the least bound is taken. The bound is infinite if none
    shows all directions. Of Boolean tokens in few dimensions there may be few that are distinct:
    residuals are then small because W was fitted to them, which the usual factor N / (N - d) makes
    up for.
    """
    size = float(np.sqrt(np.mean(np.sum(outputs**2, axis=1)))) or 1.0
    dim = tokens.shape[1]
    kind = _kinds(tokens)
    share = 1 / np.bincount(kind)[kind]  # so that every kind of token has the same say at first
    weights = share
    best, least = np.zeros((dim, outputs.shape[1])), math.inf
    for quantile in np.repeat(_QUANTILES, _ROUNDS):
        weighted = tokens * (weights / weights.sum())[:, None]
        moments = weighted.T @ tokens
        smallest = float(np.linalg.eigvalsh(moments)[0])
        distinct = _effective_number(kind, weights)
        if smallest < _DEGENERATE or distinct < _FEWEST_DISTINCT * dim:
            break
        estimate = np.linalg.solve(moments, weighted.T @ outputs)
        residual = np.sqrt(np.sum((outputs - tokens @ estimate) ** 2, axis=1))
        variance = float(np.sum(weights * residual**2) / weights.sum())
        spread = _CAUTION * math.sqrt(variance / smallest * distinct / (distinct - dim))
        length = float(np.linalg.norm(estimate))
        if spread < least * length:
            best, least = estimate, spread / length
        scale = max(float(np.quantile(residual, quantile)), 1e-9 * size)
        weights = share / (1 + (residual / scale) ** 2) ** 2
    return best, least


def _kinds(tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A number for every token, the same for those that are equal or opposite."""
    mixed = np.abs(tokens @ np.random.default_rng(0).standard_normal(tokens.shape[1]))
    return np.unique(np.round(mixed, 9), return_inverse=True)[1]


def _effective_number(kind: np.ndarray[Any, Any], weights: np.ndarray[Any, Any]) -> float:
    """How many kinds of tokens have a say: (Σ w)² / Σ w² over the kinds' weights."""
    totals = np.bincount(kind, weights)
    return float(totals.sum() ** 2 / np.sum(totals**2))
