"""Phases 1 and 3: the sum of the projections, W = Σ_i W_i.

Phase 1. Averaged over the inputs attention is nearly uniform, and the correlation of the summed
tokens with the summed outputs of an example is nearly W: E (Σ_b x_b)ᵀ (Σ_a y_a) = k W for uniform
attention and independent, whitened tokens of mean 0. The deviation of attention from uniform leaves
an error of 15 to 35 %.

Phase 3. Let G be a point of the affine hull of the heads with ⟨Θ_i, G⟩ > 0 for all of them, such as
the minimum-norm point of the polytope. If the largest score of a row under G is far ahead of the
others, every head attends to that token x_b, and y = x_b W. Most such rows are nearly exact and
some are far off, so the regression on the rows with the largest margins is reweighted to discard
the latter.

Tokens are whitened, so Boolean, Gaussian and sphere inputs are treated alike. Phase 3 needs large
margins on some rows; on the sphere all tokens have equal length, and margins have lighter tails
than on Gaussian inputs.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np
from scipy.special import gammaincinv

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.phases.agreement import agreement
from onelayer.recovery.phases.fold import fold
from onelayer.recovery.phases.state import Numbers, Phase, PhaseState, Step, SumEstimate
from onelayer.recovery.reasons import Reason

# Weights of the regression of phase 3: 1/(1 + (residual/s)²)², where s takes these quantiles of the
# residuals, each for some iterations.
_ITERATIONS, _QUANTILES = 10, (0.5, 0.25, 0.1)
_DEGENERATE = 1e-6  # smallest second moment of the attended tokens that determines a direction
_CAUTION = 1.5  # residuals of other attention are no noise: the fit explains part of them
_DISTINCT_PER_DIM = 1.5  # fewest distinct tokens: with fewer the regression interpolates


@dataclass(frozen=True)
class CrudeSum(Phase):
    """Phase 1. It refuses if the outputs cannot show on which rows heads agree."""

    refusal: ClassVar[Reason | None] = Reason.AGREEMENT_HIDDEN
    sample: int = 20_000  # examples from which the error is measured
    agreeing: float = 0.02  # share of the rows from which the error is measured

    def step(self, state: PhaseState) -> Step:
        examples = state.examples
        if examples.out_dim < examples.tokens:
            note = f"{examples.tokens} tokens, outputs of dimension {examples.out_dim}"
            return Step(state, 0, math.inf, note, refused=True)
        estimate = self.estimate(examples)
        note = "W by correlation; its error from the rows that agree best with it"
        refused = not math.isfinite(estimate.error)
        return Step(replace(state, sum=estimate), examples.examples, estimate.error, note, refused)

    def estimate(self, examples: WhitenedExamples) -> SumEstimate:
        """W from the correlation of tokens and outputs, in one pass over all examples."""

        def correlation(X: Array, Y: Array) -> Array:
            xp = backend.namespace(X)
            return backend.transpose(xp.sum(X, axis=1)) @ xp.sum(Y, axis=1)

        rows = examples.examples * examples.tokens
        total = fold(examples, correlation, operator.add) / rows
        return SumEstimate(total, self._error_by_agreement(examples, total), rows)

    def _error_by_agreement(self, examples: WhitenedExamples, estimate: Array) -> float:
        """The relative error of W, from the rows that agree best with it.

        A row on which heads agree has a residual (see `agreement`) only because W is wrong:
        relative to the size of p X W its square is error² χ²/e, with e - k + 1 degrees of freedom.
        If all rows were of that kind, the 2 % with the least residuals would be the 2 % of that
        distribution; if fewer are, the error is overestimated.
        """
        freedom = examples.out_dim - examples.tokens + 1

        def residuals(X: Array, Y: Array) -> Numbers:
            residual, size = map(backend.to_numpy, agreement(X, Y, estimate)[1:3])
            relative = np.divide(residual, size, out=np.full_like(residual, np.inf), where=size > 0)
            return np.asarray(relative.ravel())

        relative = fold(examples, residuals, lambda *two: np.concatenate(two), most=self.sample)
        least = np.quantile(relative, self.agreeing, method="higher")
        quantile = 2 * gammaincinv(freedom / 2, self.agreeing)  # of a chi-squared variable
        return float(least / math.sqrt(quantile / examples.out_dim))


@dataclass(frozen=True)
class RefinedSum(Phase):
    """Phase 3. It refuses if rows with large margins do not determine W."""

    refusal: ClassVar[Reason | None] = Reason.NO_LARGE_MARGINS
    # Rows of the regression, per dimension, but at most this share of all rows unless fewer than
    # `fewest_per_dim` remain.
    rows_per_dim: int = 2000
    largest_share: float = 0.02
    fewest_per_dim: int = 20
    slabs_in_program: int = 1024  # fewest in the quadratic program, which has four per unknown

    def step(self, state: PhaseState) -> Step:
        assert state.sculpture is not None
        examples, dim, sculpture = state.examples, state.examples.dim, state.sculpture
        most = max(self.slabs_in_program, 4 * dim * dim)
        point = sculpture.polytope.narrowed(sculpture.centre, most).minimum_norm()
        if point is None:  # the solver failed; the centre of the slabs is in the hull too
            point = sculpture.centre
        estimate = self.estimate(examples, point.reshape(dim, dim))
        note = f"W from the {estimate.rows} rows with the largest margins; a bound from residuals"
        refused = not math.isfinite(estimate.error)
        state = state if refused else replace(state, sum=estimate)
        return Step(state, examples.examples, estimate.error, note, refused)

    def estimate(self, examples: WhitenedExamples, point: Numbers) -> SumEstimate:
        """W from the rows with the largest margins under `point` (d, d), in one pass.

        If these do not show all directions, as may happen in few dimensions, further passes take
        four and sixteen times as many rows.
        """
        rows = examples.examples * examples.tokens
        wanted = min(self.rows_per_dim * examples.dim, int(self.largest_share * rows))
        count = max(wanted, self.fewest_per_dim * examples.dim)
        for factor in (1, 4, 16):
            found = _largest_margins(examples, point, factor * count)
            estimate, error = _regression(found.token, found.output)
            if math.isfinite(error):
                break
        return SumEstimate(backend.like(estimate, examples.whitening), error, len(found.margin))


class _Rows(NamedTuple):
    """Rows with their margins: the token with the largest score under G, and the output."""

    margin: Numbers
    token: Numbers
    output: Numbers

    def largest(self, count: int) -> _Rows:
        order = np.argsort(-self.margin, kind="stable")[:count]
        return _Rows(*(array[order] for array in self))


def _largest_margins(examples: WhitenedExamples, point: Numbers, count: int) -> _Rows:
    """The rows with the largest margins of all examples."""

    def work(X: Array, Y: Array) -> _Rows:
        return _margins(X, Y, point).largest(count)

    def merge(first: _Rows, second: _Rows) -> _Rows:
        return _Rows(*map(np.concatenate, zip(first, second, strict=True))).largest(count)

    return fold(examples, work, merge)


def _margins(X: Array, Y: Array, point: Numbers) -> _Rows:
    """All rows of a block, and the margin between their largest and second largest score."""
    scores = backend.to_numpy(X @ backend.like(point, X) @ backend.transpose(X))
    top = np.argmax(scores, axis=2)
    ordered = np.sort(scores, axis=2)
    margin = ordered[:, :, -1] - ordered[:, :, -2]
    tokens = np.take_along_axis(backend.to_numpy(X), top[:, :, None], axis=1)
    outputs = backend.to_numpy(Y).reshape(-1, Y.shape[2])
    return _Rows(margin.ravel(), tokens.reshape(-1, X.shape[2]), outputs)


def _regression(tokens: Numbers, outputs: Numbers) -> tuple[Numbers, float]:
    """Reweighted least squares y = x W, rows that do not fit discarded, and a bound on its error.

    With weights w and M = Σ w xᵀx / Σ w the estimate is off by M⁻¹ Σ w xᵀ(y - x W) / Σ w, which
    is at most the root mean square of y - x W over √λ_min(M); the fitted W stands in for the true
    one. As more rows are discarded residuals fall, but the remaining tokens may no longer show all
    directions: the iteration with the smallest bound is returned. The bound is infinite if none
    shows all directions. Boolean tokens in few dimensions may have few distinct values: residuals
    are then small because W was fitted to them, which the factor N / (N - d) corrects.
    """
    size = float(np.sqrt(np.mean(np.sum(outputs**2, axis=1)))) or 1.0
    dim = tokens.shape[1]
    # Tokens are of one kind if they are equal or opposite.
    mixed = np.abs(tokens @ np.random.default_rng(0).standard_normal(dim))
    kind = np.unique(np.round(mixed, 9), return_inverse=True)[1]
    share = 1 / np.bincount(kind)[kind]  # every kind of token has the same total weight at first
    weights = share
    best, least = np.zeros((dim, outputs.shape[1])), math.inf
    for quantile in np.repeat(_QUANTILES, _ITERATIONS):
        weighted = tokens * (weights / weights.sum())[:, None]
        moments = weighted.T @ tokens
        smallest = float(np.linalg.eigvalsh(moments)[0])
        totals = np.bincount(kind, weights)
        distinct = float(totals.sum() ** 2 / np.sum(totals**2))  # effective number of kinds
        if smallest < _DEGENERATE or distinct < _DISTINCT_PER_DIM * dim:
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
