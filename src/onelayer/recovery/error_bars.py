"""Error bars of recovered heads: noise times sensitivity, in the caller's coordinates.

With residuals r, noise in the outputs moves theta by δ = S⁻¹ JᵀQ u and the weights
by (HᵀH)⁻¹ Hᵀ (u - J δ), where u is like the noise. Draws of u are the residuals themselves with a
random sign for every example (the wild bootstrap; Wu 1986, and Cameron, Gelbach and Miller 2008 for
clusters), so that it matters neither whether noise is as large everywhere nor whether rows of an
example share it. They are made larger as residuals of a fit are smaller than the noise, by the
equations per degree of freedom, and at least as large as the rounding of the outputs.

These changes are taken to the caller's coordinates and there to the span of the inputs
(`onelayer.span`), where their size is compared with that of the heads. Along directions in which
tokens hardly move that is a division by next to nothing: a fit to rounding may leave heads free.

A search that ends early leaves an error that is not noise: the Gauss-Newton step that it did not
take. Its length is part of the bar.

The mean square over K draws estimates that of the error with K degrees of freedom, or more if the
error has more than one direction. So with probability 0.95 or more the error is at most the root of
that mean square times the 0.95-quantile of the F-distribution with 1 and K degrees.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from scipy.special import fdtri

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data.chunks import InMemory
from onelayer.heads.dense import flat_tokens
from onelayer.recovery.diagnosis.copies import DECIMALS, row_keys
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.factored import sensitivity as factored_sensitivity
from onelayer.recovery.gauss_newton import jacobian, varpro
from onelayer.recovery.gauss_newton.batches import Rows, map_blocks
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.sensitivity import Sensitivity, sensitivity
from onelayer.recovery.whitening import Whitening

Values: TypeAlias = np.ndarray[Any, Any]

CONFIDENCE = 0.95
_DRAWS = 6
_MARGIN = 2.0  # the smallest singular value is found up to a part of it, and from above
_COMPARED = 4000  # rows that are compared
# Error bars are computed from at least this many equations per unknown, scores and rows per number
# that they determine, and examples: roughly first, then carefully.
_Enough: TypeAlias = tuple[float, float, int]
_LOW_RANK_ENOUGH = 6.0
_PART_ROWS = 1024  # of blocks for products with factors
_ENOUGH: tuple[_Enough, ...] = ((6.0, 6.0, 1), (6.0, 8.0, 100))


@dataclass(frozen=True, eq=False)
class ErrorBars:
    """Bounds on the relative errors of heads on the span of inputs, infinite if undetermined."""

    attention: Values
    projection: Values
    nested: Values  # (r,), the largest of attention on the strongest 1, 2, .., r directions alone
    noise: float  # relative error of outputs that the bars rest on
    smallest_singular_value: float


def error_bars(
    fit: Fit,
    fitted: WhitenedExamples,
    rank: int | None,
    rounding: float,
    rng: np.random.Generator,
    sharp: float = 1e-9,
) -> ErrorBars:
    """The bars of a fit to examples of a problem, whose outputs have this relative rounding.

    Bars up to `sharp` may be far larger than the errors: they are what the smallest singular value
    allows at most, which costs no draws.
    """
    copies = _copies(fitted)
    if rank is not None and fitted.offset is None:
        known = _of_low_rank(fit, fitted, rank, copies, rounding, rng)
        if known is not None and max(known.attention.max(), known.projection.max()) <= sharp:
            return known
    for enough in _ENOUGH:
        few = _thinned(fit, fitted, rank, copies, enough)
        response = sensitivity(few, rank, rng)
        # The noise that leaves such residuals; on few examples only the weights are fitted.
        equations, weights = few.batches.equations, int(few.weights.shape[0] * few.weights.shape[1])
        spare = equations - (fitted.unknowns(fit.heads, rank) if few is fit else weights)
        noise = max(few.error * (equations / spare) ** 0.5 if spare > 0 else np.inf, rounding)
        bars = _at_most(fit, few, fitted, response, noise * copies**0.5)
        largest = max(bars.attention.max(), bars.projection.max())
        if few is fit or (largest <= sharp and response.determined.all()):
            break
    if not largest <= sharp and np.isfinite(noise):
        bars = _by_draws(fit, few, fitted, rank, response, noise * copies**0.5, rng)
    free = np.where(response.determined, 0.0, np.inf)
    bounds = (bars.attention + free, bars.projection + free, bars.nested + free.max())
    return ErrorBars(*bounds, noise, bars.smallest_singular_value)


def _at_most(
    fit: Fit, few: Fit, fitted: WhitenedExamples, response: Sensitivity, noise: float
) -> ErrorBars:
    """Bars if all noise were in the direction that is determined worst."""
    least, most = response.extremes
    total = noise * few.batches.equations**0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        heads = _MARGIN * total / (least * response.strengths)  # longest that heads may move
        inverse = np.linalg.norm(backend.to_numpy(few.inverse), 2) ** 0.5
        weights = inverse * (total + _MARGIN * most * heads)
    return _in_callers_units(fit, fitted, heads, weights, noise, least / most if most else 0.0)


def _of_low_rank(
    fit: Fit,
    fitted: WhitenedExamples,
    rank: int,
    copies: float,
    rounding: float,
    rng: np.random.Generator,
) -> ErrorBars | None:
    """The same where projections were found to have the rank of the attention matrices too.

    None if they have not. Then nothing needs the features of projections of any rank, which are
    most of the cost for large layers (see `factored/sensitivity.py`).
    """
    dim = fitted.dim
    _, pairs = _rows_and_pairs(fitted)
    unknowns = fit.heads * (rank * (3 * dim + fitted.out_dim - 2 * rank) + dim) + fitted.out_dim
    wanted = max(
        _LOW_RANK_ENOUGH * unknowns * fitted.examples / fitted.equations,
        _LOW_RANK_ENOUGH * (rank * (2 * dim - rank) + dim) / pairs,
    )
    few = fitted.sample(min(fitted.examples, int(copies * wanted) + 1))
    found = factored_sensitivity.response(fit, rank, few.parts(_PART_ROWS), rng)
    if found is None or few.equations <= unknowns:
        return None
    noise = max(found.error * (few.equations / (few.equations - unknowns)) ** 0.5, rounding)
    total = _MARGIN * noise * (copies * few.equations) ** 0.5
    with np.errstate(divide="ignore", invalid="ignore"):
        heads = total / (found.least * found.attention)
        weights = total / (found.least * found.projection)
    smallest = found.least / found.most if found.most else 0.0
    bars = _in_callers_units(fit, fitted, heads, weights, noise, smallest)
    return replace(bars, projection=bars.projection + found.truncated)


def _in_callers_units(
    fit: Fit,
    fitted: WhitenedExamples,
    heads: Values,
    weights: Values,
    noise: float,
    smallest: float,
) -> ErrorBars:
    """Bars if whitened heads move by at most `heads`, and their weights by `weights`."""
    transform = fitted.transform
    with np.errstate(divide="ignore", invalid="ignore"):
        stretch = 1 / fitted.span.deviations.min(initial=np.inf)
        attention, projection = _on_span(transform, fit.theta, fit.weights)
        sizes = [np.sum(one**2, axis=(1, 2)) ** 0.5 for one in (attention, projection)]
        mean = (1 + np.linalg.norm(fitted.span.mean) ** 2) ** 0.5
        bars = stretch * max(stretch, 1.0) * mean * heads / sizes[0], stretch * weights / sizes[1]
    attention, projection = (np.where(np.isnan(bar), np.inf, bar) for bar in bars)
    nested = np.full(fitted.span.rank, attention.max())
    return ErrorBars(attention, projection, nested, noise, smallest)


def _by_draws(
    fit: Fit,
    few: Fit,
    fitted: WhitenedExamples,
    rank: int | None,
    response: Sensitivity,
    noise: float,
    rng: np.random.Generator,
) -> ErrorBars:
    """Bars by what draws of the noise do to the heads; infinite if that was not found."""
    moved = [_step_left(fit, few, response)]
    moved += [_moved(response, _flipped(few, response, rng)) for _ in range(_DRAWS)]
    least, most = response.extremes
    smallest, directions = least / most if most > 0 else 0.0, fitted.span.rank
    found = [one for one in moved if one is not None]
    if len(found) < len(moved):
        unknown = np.full(fit.heads, np.inf)
        return ErrorBars(unknown, unknown, np.full(directions, np.inf), noise, smallest)
    # The mean of an inverse of N random equations in p unknowns is as 1 / (N - p), so that errors
    # from few examples exceed those from all.
    unknowns = fitted.unknowns(fit.heads, rank)
    counts = few.batches.equations, fit.batches.equations
    scale = 1.0 if fit is few else ((counts[0] - unknowns) / (counts[1] - unknowns)) ** 0.5
    factor = noise * scale * float(fdtri(1, _DRAWS, CONFIDENCE)) ** 0.5
    # Changes first by the step not taken, then by draws: (1 + K, m, r + 1, r) and (1 + K, m, r, e)
    changes = [_on_span(fitted.transform, *one) for one in found]
    attention, projection = (np.stack(each) for each in zip(*changes, strict=True))
    heads = _on_span(fitted.transform, fit.theta, fit.weights)

    def attention_bars(count: int) -> Values:
        """Bounds (m,) on the `count` strongest directions, relative to the heads there."""
        rows = [*range(count), directions]
        return _bound(attention[:, :, rows, :count], factor, heads[0][:, rows, :count])

    nested = np.array([attention_bars(count).max() for count in range(1, directions + 1)])
    projection_bars = _bound(projection, factor, heads[1])
    return ErrorBars(attention_bars(directions), projection_bars, nested, noise, smallest)


def _copies(fitted: WhitenedExamples) -> float:
    """How often a row occurs on average; those with equal queries and outputs have equal noise."""
    some = fitted.sample(min(max(1, _COMPARED // fitted.tokens), fitted.examples))
    rows = []
    for block in some.blocks(1):
        queries, outputs = map(backend.to_numpy, (flat_tokens(block.queries), block.outputs))
        there = slice(None) if block.counted is None else backend.to_numpy(block.counted)[:, 0] > 0
        rows += row_keys(queries[there], outputs[there], decimals=DECIMALS)
    return len(rows) / max(len(set(rows)), 1)


def _rows_and_pairs(fitted: WhitenedExamples) -> tuple[float, float]:
    """Observed rows in an example on average, and differences of scores of one head in them."""
    rows = fitted.equations / (fitted.examples * fitted.out_dim)
    return rows, rows * max(fitted.tokens - 1, 1) / (2 if fitted.causal else 1)


def _thinned(
    fit: Fit, fitted: WhitenedExamples, rank: int | None, copies: float, enough: _Enough
) -> Fit:
    """The same heads on no more examples than it takes to judge how well they are determined.

    However many outputs there are, an example with q observed outputs shows no more of a head than
    q (k - 1) differences of scores, and q rows of features.
    """
    dim = fitted.dim
    numbers = fitted.query_dim * dim if rank is None else rank * (2 * dim - rank) + dim
    rows, pairs = _rows_and_pairs(fitted)
    equations, scores, examples = enough
    wanted = max(
        equations * fitted.unknowns(fit.heads, rank) * fitted.examples / fitted.equations,
        scores * numbers / pairs,
        scores * fit.heads * dim / rows,
        examples,
    )
    if copies * wanted > 0.8 * fit.batches.examples:
        return fit
    few = fitted.sample(max(1, int(copies * wanted)))
    return varpro.fit(few.batches(fit.heads), fit.theta)


def _flipped(few: Fit, response: Sensitivity, rng: np.random.Generator) -> Rows:
    """Residuals at unit size with a random sign for every example, as precise as products are."""
    size, tokens = few.error or 1.0, few.batches.tokens

    def flipped(rows: Array) -> Array:
        rows = backend.like(rows / size, response.products.weights)
        signs = rng.integers(0, 2, (rows.shape[0] // tokens, 1, 1)) * 2.0 - 1.0
        by_example = backend.namespace(rows).reshape(rows, (-1, tokens, rows.shape[1]))
        return flat_tokens(by_example * backend.like(signs, rows))

    return InMemory(tuple(tuple(map(flipped, chunk)) for chunk in few.residuals.collect()))


def _step_left(fit: Fit, few: Fit, response: Sensitivity) -> tuple[Array, Array] | None:
    """The Gauss-Newton step that the search has not taken."""
    share = few.batches.equations / fit.batches.equations
    theta = response.solve(jacobian.gradient(fit) * share)
    if theta is None:
        return None
    products = response.products
    moved = products.jvp(backend.like(theta, products.weights))
    return theta, -(products.inverse @ products.against(moved))


def _moved(response: Sensitivity, rows: Rows) -> tuple[Array, Array] | None:
    """How noise like these rows moves theta and weights; None if that was not found."""
    products = response.products
    theta = response.solve(products.vjp(products.unexplained(rows)))
    if theta is None:
        return None
    left = map_blocks(operator.sub, rows, products.jvp(theta))
    return theta, products.inverse @ products.against(left)


def _bound(changes: Values, factor: float, heads: Values) -> Values:
    """From changes (1 + K, m, ..) and the heads (m, ..)."""
    sizes, squares = np.sum(heads**2, axis=(1, 2)), np.sum(changes**2, axis=(2, 3))
    with np.errstate(divide="ignore", invalid="ignore"):
        bars = (squares[0] ** 0.5 + factor * np.mean(squares[1:], axis=0) ** 0.5) / sizes**0.5
    return np.where(np.isfinite(bars), bars, np.inf)


def _on_span(transform: Whitening, theta: Array, weights: Array) -> tuple[Values, Values]:
    """Attention (m, r + 1, r) and projection (m, r, e), the latter for outputs at unit size."""
    attention, key_bias, projection, _ = transform.matrices(theta, weights / transform.output_scale)
    return transform.span.attention(attention, key_bias), transform.span.projection(projection)
