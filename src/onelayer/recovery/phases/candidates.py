"""Phase 6: heads and projections, by regression over candidates.

The heads are points of a known affine hull of m - 1 dimensions, inside its section with the
polytope. As in the paper, the points of a grid over that section are candidates, every m of them
are tried as the heads, and for each tuple the projections are a linear regression. All regressions
use blocks of one Gram matrix, that of the features of all candidates. The number of tuples,
(points choose m), makes the cost exponential in m, so the grid has to be coarse. The best few
tuples are refined inside the hull by Levenberg-Marquardt steps on their m (m - 1) coordinates, and
the one with the smallest error on other examples is returned. Nothing here depends on the kind of
inputs.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import numpy as np

from onelayer.array import backend, threads
from onelayer.array.backend import Array
from onelayer.array.blocks import sum_over
from onelayer.heads import dense
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.gauss_newton import jacobian, varpro
from onelayer.recovery.gauss_newton.batches import Block
from onelayer.recovery.gauss_newton.levenberg_marquardt import damped_search
from onelayer.recovery.phases.polytope import Polytope
from onelayer.recovery.phases.state import (
    AffineHull,
    CandidateFit,
    Numbers,
    Phase,
    PhaseState,
    Step,
)
from onelayer.recovery.reasons import Reason

_RIDGE = 1e-8  # relative to the mean eigenvalue: neighbours on the grid have similar features
_CHUNK_BYTES = 64 * 2**20  # of regressions that are solved at a time


@dataclass(frozen=True)
class SolveCandidates(Phase):
    """Phase 6. It refuses if no grid fits into the section of hull and polytope."""

    refusal: ClassVar[Reason | None] = Reason.NO_CANDIDATES
    # A second or two of regressions. Finer grids do not improve the refined heads: 41 points for
    # two heads, 7 x 7 for three, 3 x 3 x 3 for four.
    most_tuples: int = 20_000
    most_per_axis: int = 41
    refined: int = 8  # tuples from which refinement starts
    most_steps: int = 40
    stationary: float = 1e-5  # relative decrease of the loss below which refinement stops
    first_damping: float = 0.1
    most_damping: float = 1e6

    def step(self, state: PhaseState) -> Step:
        assert state.sculpture is not None
        assert state.hull is not None
        found = self.solve(state.hull, state.sculpture.polytope, state.fitted, state.other)
        count = state.fitted.examples
        if found is None:
            return Step(state, count, math.inf, "no grid in the polytope", refused=True)
        note = f"{found.tuples} tuples of candidates, the best refined; error of held-out outputs"
        return Step(replace(state, found=found), count, found.held_out_error, note)

    def solve(
        self,
        hull: AffineHull,
        polytope: Polytope,
        fitted: WhitenedExamples,
        other: WhitenedExamples,
    ) -> CandidateFit | None:
        """The heads in the hull that fit the examples best; None if the polytope has no grid."""
        points = self.grid(hull, polytope)
        if points is None:
            return None
        tuples = list(itertools.combinations(range(len(points)), hull.heads))
        order = np.argsort(losses(hull, points, np.array(tuples), fitted), kind="stable")
        starts = [points[list(tuples[i])] for i in order[: self.refined]]
        operations = 2.0 * fitted.examples * fitted.tokens * hull.heads * fitted.dim**2
        with threads.single_threaded_blas(operations):
            refined = [self.refine(hull, start, fitted) for start in starts]
        errors = [varpro.held_out_error(fit, other) for _, fit in refined]
        best = int(np.argmin(errors))
        return CandidateFit(*refined[best], tuples=len(tuples), held_out_error=errors[best])

    def grid(self, hull: AffineHull, polytope: Polytope) -> Numbers | None:
        """The finest grid (points, m - 1) that the tuples allow; None if m points do not fit."""
        dimensions, section = len(hull.basis), polytope.section(hull.centre, hull.basis)
        if dimensions == 0:
            return np.zeros((1, 0))
        if math.comb(2**dimensions, hull.heads) > self.most_tuples:  # from six heads on
            return None
        ends = np.array([(-section.support(-v), section.support(v)) for v in np.eye(dimensions)])
        if not np.all(np.isfinite(ends)):
            return None
        finest = None
        for per_axis in range(2, self.most_per_axis + 1):
            axes = [np.linspace(low, high, per_axis) for low, high in ends]
            grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, dimensions)
            grid = np.unique(grid, axis=0)  # a section without width has one point only
            inside = grid[[section.contains(point, slack=1e-9) for point in grid]]
            if math.comb(len(inside), hull.heads) > self.most_tuples:
                break
            if len(inside) >= hull.heads:
                finest = inside
        return finest

    def refine(
        self, hull: AffineHull, coordinates: Numbers, fitted: WhitenedExamples
    ) -> tuple[Numbers, varpro.Fit]:
        """Levenberg-Marquardt steps on the coordinates (m, m - 1), projections eliminated."""
        batches = fitted.batches(hull.heads)
        directions = _directions(hull, fitted)

        def fit_at(place: Numbers) -> varpro.Fit:
            return varpro.fit(batches, stack(hull, place, fitted))

        def attempt(
            place: Numbers, fit: varpro.Fit, normal: Numbers, gradient: Numbers, damping: float
        ) -> tuple[Numbers, varpro.Fit] | None:
            ridge = damping * np.trace(normal) / len(normal) * np.eye(len(normal))
            step = np.linalg.lstsq(normal + ridge, gradient, rcond=None)[0]
            place = place + step.reshape(place.shape)
            trial = fit_at(place)
            return (place, trial) if trial.loss < fit.loss else None

        fit, damping = fit_at(coordinates), self.first_damping
        for _ in range(self.most_steps if directions else 0):
            trial = partial(attempt, coordinates, fit, *_normal_equations(fit, directions))
            improved, damping = damped_search(trial, damping, self.most_damping)
            if improved is None:
                break
            before, damping = fit.loss, damping / 4
            coordinates, fit = improved
            if fit.loss > (1 - self.stationary) * before:
                break
        return coordinates, fit


def losses(hull: AffineHull, points: Numbers, tuples: Numbers, fitted: WhitenedExamples) -> Numbers:
    """The residual sum of squares of the regression on each tuple of points.

    With H the features of a tuple it is |Y|² - tr(Yᵀ H (HᵀH)⁻¹ Hᵀ Y).
    """
    count, dim, size = len(points), fitted.dim, hull.heads * fitted.dim
    theta = stack(hull, points, fitted)

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


def stack(hull: AffineHull, coordinates: Numbers, problem: WhitenedExamples) -> Array:
    """Heads at coordinates (m, m - 1) side by side, (d, m·d), in the problem's kind of array."""
    matrices = hull.points(coordinates).reshape(-1, problem.dim, problem.dim)
    return dense.pack(backend.like(matrices, problem.X))


def _directions(hull: AffineHull, problem: WhitenedExamples) -> list[Array]:
    """One head moved along one axis of the hull, for all heads and axes."""
    heads, dim = hull.heads, problem.dim
    moves = []
    for head, axis in itertools.product(range(heads), hull.basis):
        matrices = np.zeros((heads, dim, dim))
        matrices[head] = axis.reshape(dim, dim)
        moves.append(dense.pack(backend.like(matrices, problem.X)))
    return moves


def _normal_equations(fit: varpro.Fit, directions: list[Array]) -> tuple[Numbers, Numbers]:
    """S and the gradient of the reduced problem in the given directions only."""
    products = jacobian.jacobian(fit)
    rows = np.stack([backend.to_numpy(move).ravel() for move in directions])
    images = [backend.to_numpy(products.gauss_newton_product(move)).ravel() for move in directions]
    gradient = backend.to_numpy(jacobian.gradient(fit)).ravel()
    return rows @ np.stack(images).T, rows @ gradient
