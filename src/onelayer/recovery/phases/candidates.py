"""Phase 6: heads and projections, by regression over candidates.

The heads are points of a known affine space of m - 1 dimensions, inside its section with the body.
As in the paper, the points of a net over that section are candidates, every m of them are tried
as the heads, and for each the projections are a linear regression. All regressions share one Gram
matrix, that of the features of all candidates, of which each takes its blocks. The net has to be
coarse, since tuples are many: (points choose m) is what makes the cost exponential in m. So the
best few are refined inside the space by Levenberg-Marquardt steps on their m (m - 1) coordinates,
and the best of these on other examples is the answer. Nothing here depends on the kind of inputs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelayer.array import backend, threads
from onelayer.array.backend import Array
from onelayer.array.blocks import sum_over
from onelayer.heads import dense
from onelayer.recovery.gauss_newton import jacobian, varpro
from onelayer.recovery.gauss_newton.batches import Block
from onelayer.recovery.phases.affine_hull import Space
from onelayer.recovery.phases.polytope import Body
from onelayer.recovery.whitening import WhitenedExamples

Matrix = np.ndarray[Any, Any]

# A second or two of regressions; nets as fine as this are refined from with no loss: 41 points for
# two heads, 7 x 7 for three, 3 x 3 x 3 for four.
_MOST_TUPLES, _MOST_PER_AXIS = 20_000, 41
_RIDGE = 1e-8  # relative to the mean eigenvalue: neighbours on the net have like features
_REFINED = 8  # tuples from which refinement starts
_STEPS, _STATIONARY = 40, 1e-5  # most of them, and the gain below which they end
_FIRST_DAMPING, _MOST_DAMPING = 0.1, 1e6
_CHUNK_BYTES = 64 * 2**20


@dataclass(frozen=True, eq=False)
class Found:
    """The best heads: their coordinates (m, m - 1), their fit, and how many tuples were tried."""

    coordinates: Matrix
    fit: varpro.Fit
    tuples: int
    held_out_error: float  # relative, on the other examples


def solve(
    space: Space, body: Body, fitted: WhitenedExamples, other: WhitenedExamples
) -> Found | None:
    """The heads in the space that explain the examples best; None if no net lies in the body."""
    points = net(space, body)
    if points is None:
        return None
    tuples = list(itertools.combinations(range(len(points)), space.heads))
    order = np.argsort(losses(space, points, np.array(tuples), fitted), kind="stable")
    starts = [points[list(tuples[i])] for i in order[:_REFINED]]
    operations = 2.0 * fitted.examples * fitted.tokens * space.heads * fitted.dim**2
    with threads.single_threaded_blas(operations):
        refined = [refine_inside(space, start, fitted) for start in starts]
    errors = [varpro.held_out_error(fit, other) for _, fit in refined]
    best = int(np.argmin(errors))
    return Found(*refined[best], tuples=len(tuples), held_out_error=errors[best])


def net(space: Space, body: Body) -> Matrix | None:
    """A grid over the section of the body (points, m - 1), as fine as the tuples allow.

    None if the section is empty, endless, or too small for m points of it.
    """
    dimensions = len(space.basis)
    if dimensions == 0:
        return np.zeros((1, 0))
    section = body.section(space.centre, space.basis)
    if math.comb(2**dimensions, space.heads) > _MOST_TUPLES:  # from six heads on
        return None
    ends = np.array(
        [(-section.support(-axis), section.support(axis)) for axis in np.eye(dimensions)]
    )
    if not np.all(np.isfinite(ends)):
        return None
    finest = None
    for per_axis in range(2, _MOST_PER_AXIS + 1):
        axes = [np.linspace(low, high, per_axis) for low, high in ends]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, dimensions)
        grid = np.unique(grid, axis=0)  # a section without width has one point only
        inside = grid[[section.contains(point, slack=1e-9) for point in grid]]
        if math.comb(len(inside), space.heads) > _MOST_TUPLES:
            break
        if len(inside) >= space.heads:
            finest = inside
    return finest


def losses(space: Space, points: Matrix, tuples: Matrix, fitted: WhitenedExamples) -> Matrix:
    """What the regression on each tuple of points leaves over of the outputs' squares.

    With H the features of a tuple that is |Y|² - tr(Yᵀ H (HᵀH)⁻¹ Hᵀ Y).
    """
    count, dim, size = len(points), fitted.dim, space.heads * fitted.dim
    theta = stack(space, points, fitted)

    def products(block: Block) -> Array:
        features = varpro.attend(block, theta, output_bias=False).features
        both = backend.namespace(features).concat([features, block.outputs], axis=1)
        return backend.transpose(both) @ both

    total = backend.to_numpy(sum_over(fitted.blocks(count), products))
    gram = total[: count * dim, : count * dim].reshape(count, dim, count, dim)
    against = total[: count * dim, count * dim :].reshape(count, dim, -1)
    squares = float(np.trace(total[count * dim :, count * dim :]))
    ridge = _RIDGE * np.einsum("iaia->", gram) / (count * dim) * np.eye(size)
    left = np.empty(len(tuples))
    step = max(1, _CHUNK_BYTES // (8 * size * size))
    for start in range(0, len(tuples), step):
        chosen = tuples[start : start + step]
        blocks = gram[chosen[:, :, None], :, chosen[:, None, :], :]  # (tuples, m, m, d, d)
        matrices = blocks.transpose(0, 1, 3, 2, 4).reshape(-1, size, size) + ridge
        right = against[chosen].reshape(len(chosen), size, -1)
        explained = np.sum(right * np.linalg.solve(matrices, right), axis=(1, 2))
        left[start : start + step] = squares - explained
    return left


def refine_inside(
    space: Space, coordinates: Matrix, fitted: WhitenedExamples
) -> tuple[Matrix, varpro.Fit]:
    """Levenberg-Marquardt steps on the coordinates (m, m - 1), projections eliminated."""
    batches = fitted.batches(space.heads)
    directions = _directions(space, fitted)

    def fit_at(place: Matrix) -> varpro.Fit:
        return varpro.fit(batches, stack(space, place, fitted))

    fit, damping = fit_at(coordinates), _FIRST_DAMPING
    for _ in range(_STEPS if directions else 0):
        normal, gradient = _normal_equations(fit, directions)
        before = fit.loss
        while damping < _MOST_DAMPING:
            ridge = damping * np.trace(normal) / len(normal) * np.eye(len(normal))
            step = np.linalg.lstsq(normal + ridge, gradient, rcond=None)[0]
            trial = fit_at(coordinates + step.reshape(coordinates.shape))
            if trial.loss < fit.loss:
                coordinates, fit = coordinates + step.reshape(coordinates.shape), trial
                damping /= 4
                break
            damping *= 4
        if fit.loss > (1 - _STATIONARY) * before:
            break
    return coordinates, fit


def stack(space: Space, coordinates: Matrix, problem: WhitenedExamples) -> Array:
    """Heads at coordinates (m, m - 1) side by side, (d, m·d), in the problem's kind of array."""
    matrices = space.points(coordinates).reshape(-1, problem.dim, problem.dim)
    return dense.pack(backend.like(matrices, problem.X))


def _directions(space: Space, problem: WhitenedExamples) -> list[Array]:
    """One head moved along one axis of the space, for all heads and axes."""
    heads, dim = space.heads, problem.dim
    moves = []
    for head, axis in itertools.product(range(heads), space.basis):
        matrices = np.zeros((heads, dim, dim))
        matrices[head] = axis.reshape(dim, dim)
        moves.append(dense.pack(backend.like(matrices, problem.X)))
    return moves


def _normal_equations(fit: varpro.Fit, directions: list[Array]) -> tuple[Matrix, Matrix]:
    """S and the gradient of the reduced problem in the given directions only."""
    products = jacobian.jacobian(fit)
    rows = np.stack([backend.to_numpy(move).ravel() for move in directions])
    images = [backend.to_numpy(products.gauss_newton_product(move)).ravel() for move in directions]
    gradient = backend.to_numpy(jacobian.gradient(fit)).ravel()
    return rows @ np.stack(images).T, rows @ gradient
