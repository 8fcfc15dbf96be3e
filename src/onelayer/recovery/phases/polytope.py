"""The convex body around the attention matrices: an intersection of slabs.

A row on which all heads agree says lower ≤ ⟨normal, Θ⟩ ≤ upper for every head's Θ, with
normal = x_aᵀ (x_b - x_c), a d x d matrix. The intersection of many such slabs is thin in all
directions but those in which heads differ: no slab can cut between heads. Matrices are handled as
vectors of their d² entries throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import clarabel
import numpy as np
from scipy import sparse
from scipy.optimize import linprog

Vector = np.ndarray[Any, Any]
Matrix = np.ndarray[Any, Any]

_NEAREST = 0.8
_THINNEST = 1e-3  # of its error: half the width that a slab always has
# Singular values below this share of the largest are rounding errors of zero: they are square
# roots of eigenvalues that are right to the spacing of numbers.
UNSEEN = 1e-7


@dataclass(frozen=True, eq=False)
class Spectrum:
    """How thin a body is: root mean square of |⟨normal, v⟩| / error over the slabs, ascending.

    `values[j]` belongs to the direction `directions[j]`; a small value is a direction in which the
    body is long.
    """

    values: Vector
    directions: Matrix


@dataclass(frozen=True, eq=False)
class Body:
    """Slabs `lower ≤ normals @ θ ≤ upper`; `upper` is infinite where a row was saturated.

    `error` (s,) is the error that the middle of a slab may have, zero for one-sided ones.
    """

    normals: Matrix
    lower: Vector
    upper: Vector
    error: Vector

    @property
    def two_sided(self) -> np.ndarray[Any, Any]:
        return np.isfinite(self.upper)

    def contains(self, point: Vector, slack: float = 0.0) -> bool:
        """Whether a point is in every slab, or beyond it by `slack` at the most.

        >>> cube = Body(np.eye(3), -np.ones(3), np.ones(3), np.ones(3))
        >>> cube.contains(np.array([0.0, 0.5, 1.0])), cube.contains(np.array([0.0, 0.5, 1.1]))
        (True, False)
        """
        values = self.normals @ np.ravel(point)
        return bool(np.all((values >= self.lower - slack) & (values <= self.upper + slack)))

    def support(self, direction: Vector) -> float:
        """The largest ⟨direction, θ⟩ in the body, -infinite if it is empty.

        Infinite if the body has no end that way, or if the solver cannot tell.
        """
        above = self.two_sided
        found = linprog(
            -np.ravel(direction),
            A_ub=np.concatenate([self.normals[above], -self.normals]),
            b_ub=np.concatenate([self.upper[above], -self.lower]),
            bounds=(None, None),
            method="highs",
        )
        if found.status == 0:
            return float(-found.fun)
        return -np.inf if found.status == 2 else np.inf

    def minimum_norm(self) -> Vector | None:
        """The point of the body nearest to 0, None if the body is empty.

        It is the projection of 0 on the body, and for a body that is thin around the affine hull of
        the heads it is near the projection of 0 on that hull: the point G with ⟨Θ_i, G⟩ = |G|² for
        every head, so that a large margin under G is a large margin under all heads.
        """
        above = self.two_sided
        # Slabs in units of their widths: the solver's tolerance is then the same for all.
        width = np.where(above, self.upper - self.lower, 1.0)
        unit = np.where(width > 0, width, 1.0)
        normals, lower = self.normals / unit[:, None], self.lower / unit
        constraints = np.concatenate([normals[above], -normals])
        limits = np.concatenate([self.upper[above] / unit[above], -lower])
        # And θ in units of its likely size: the solver's tolerance of the objective is absolute.
        longest = float(np.max(np.linalg.norm(constraints, axis=1), initial=0.0))
        scale = float(np.max(np.abs(limits), initial=0.0)) / longest if longest > 0 else 1.0
        scale = scale or 1.0
        size = self.normals.shape[1]
        settings = clarabel.DefaultSettings()
        settings.verbose = False
        solution = clarabel.DefaultSolver(
            sparse.eye(size, format="csc"),
            np.zeros(size),
            sparse.csc_matrix(constraints),
            limits / scale,
            [clarabel.NonnegativeConeT(len(limits))],
            settings,
        ).solve()
        return scale * np.array(solution.x) if _solved(solution.status) else None

    def spectrum(self) -> Spectrum:
        """Singular values and directions of the two-sided slabs, each in units of its error."""
        normals = self._scaled()
        values, vectors = np.linalg.eigh(normals.T @ normals / max(1, len(normals)))
        return Spectrum(np.sqrt(np.maximum(values, 0.0)), vectors.T)

    def centre(self, spectrum: Spectrum, free: int) -> Vector:
        """The weighted least-squares middle of the slabs, zero along the `free` first directions.

        Where errors are independent this is the best estimate of the affine hull's point nearest
        to 0; the minimum-norm point leans towards 0 by the width of the slabs.
        """
        thin = spectrum.directions[free:]
        values = spectrum.values[free:]
        middle = (self.lower + self.upper)[self.two_sided] / (2 * self.error[self.two_sided])
        pulled = thin @ (self._scaled().T @ middle) / max(1, len(middle))
        seen = values > UNSEEN * max(float(values[-1]), np.finfo(float).tiny)
        return np.asarray((pulled[seen] / values[seen] ** 2) @ thin[seen])

    def part(self, kept: np.ndarray[Any, Any]) -> Body:
        """The body of some of the slabs."""
        return Body(self.normals[kept], self.lower[kept], self.upper[kept], self.error[kept])

    def section(self, point: Vector, basis: Matrix) -> Body:
        """The part of the body in the affine space point + z @ basis, as a body of the z.

        >>> cube = Body(np.eye(3), -np.ones(3), np.ones(3), np.ones(3))
        >>> cube.section(np.array([0.5, 0, 0]), np.eye(3)[:1]).support(np.ones(1))
        0.5
        """
        offset = self.normals @ point
        return Body(self.normals @ basis.T, self.lower - offset, self.upper - offset, self.error)

    def narrowed(self, centre: Vector, most: int) -> Body:
        """The two-sided slabs nearest to a centre, just wide enough for it, at most so many.

        Slabs as wide as their errors may be large contain 0 while W is crude, and then the
        minimum-norm point says nothing. Errors are mostly smaller: slabs as wide as the distance
        within which _NEAREST of them have the centre make a thin body around the hull.
        """
        two_sided = self.part(self.two_sided)
        middle = (two_sided.lower + two_sided.upper) / 2
        distance = np.abs(two_sided.normals @ centre - middle) / two_sided.error
        reach = max(float(np.quantile(distance, _NEAREST)), _THINNEST)
        near = np.flatnonzero(distance <= reach)
        near = near[np.argsort(two_sided.error[near], kind="stable")[:most]]
        error = two_sided.error[near]
        lower, upper = middle[near] - reach * error, middle[near] + reach * error
        return Body(two_sided.normals[near], lower, upper, error)

    def _scaled(self) -> Matrix:
        above = self.two_sided
        return np.asarray(self.normals[above] / self.error[above, None])


def _solved(status: Any) -> bool:
    return status in (clarabel.SolverStatus.Solved, clarabel.SolverStatus.AlmostSolved)
