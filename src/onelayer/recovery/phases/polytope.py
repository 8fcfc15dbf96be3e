"""The polytope around the attention matrices: an intersection of slabs.

A row on which all heads agree gives lower ≤ ⟨normal, Θ⟩ ≤ upper for every head's Θ, with
normal = x_aᵀ (x_b - x_c), a d x d matrix. The intersection of many such slabs is thin in all
directions except those in which heads differ: no slab can cut between heads. Matrices are handled
as vectors of their d² entries.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import clarabel
import numpy as np
from scipy import sparse
from scipy.optimize import linprog

from onelayer.array.backend import NumpyArray

# Share of the slabs that contain the centre after `narrowed`, and their smallest half-width, in
# units of their errors.
_NEAREST, _THINNEST = 0.8, 1e-3
# Singular values below this share of the largest are zero up to rounding: they are square roots of
# eigenvalues that are accurate to machine precision.
_UNSEEN = 1e-7
CLEAR_GAP = 2.0  # smallest ratio of singular values that separates free directions from the others


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Directions in which the polytope is long, then those in which it is thin."""

    values: NumpyArray  # root mean squares of |⟨normal, v⟩| / error over the slabs, ascending
    directions: NumpyArray  # v, one row for each value

    def clear_gap(self, free: int | None = None) -> tuple[int, float]:
        """The number of free directions, and the ratio of the next singular value to theirs.

        If `free` is None, it is the number up to a quarter of the unknowns with the largest ratio,
        zero if no ratio reaches CLEAR_GAP. With no free direction the ratio is infinite.
        """
        floor = max(_UNSEEN * float(self.values[-1]), np.finfo(float).tiny)
        values = np.maximum(self.values, floor)
        gaps = values[1:] / values[:-1]
        if free is None:
            free = int(np.argmax(gaps[: max(1, len(values) // 4)])) + 1
            if gaps[free - 1] < CLEAR_GAP:
                free = 0
        return free, float(gaps[free - 1]) if free else np.inf


class Polytope(NamedTuple):
    """Slabs `lower ≤ normals @ θ ≤ upper`."""

    normals: NumpyArray
    lower: NumpyArray
    upper: NumpyArray  # infinite for one-sided slabs
    error: NumpyArray  # of the middle of a slab, zero for one-sided slabs

    @property
    def two_sided(self) -> NumpyArray:
        return np.isfinite(self.upper)

    def contains(self, point: NumpyArray, slack: float = 0.0) -> bool:
        """Whether a point is within `slack` of every slab."""
        values = self.normals @ np.ravel(point)
        return bool(np.all((values >= self.lower - slack) & (values <= self.upper + slack)))

    def support(self, direction: NumpyArray) -> float:
        """The largest ⟨direction, θ⟩; -inf if there is no θ, inf if it is unbounded or unknown."""
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

    def minimum_norm(self) -> NumpyArray | None:
        """The point of the polytope nearest to 0, None if the solver finds none.

        For a polytope that is thin around the affine hull of the heads it is near the projection of
        0 on that hull: the point G with ⟨Θ_i, G⟩ = |G|² for every head, so that a large margin
        under G is a large margin under all heads.
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
        solved = (clarabel.SolverStatus.Solved, clarabel.SolverStatus.AlmostSolved)
        return scale * np.array(solution.x) if solution.status in solved else None

    def spectrum(self) -> Spectrum:
        """Singular values and directions of the two-sided slabs, each in units of its error."""
        normals = self._scaled()
        values, vectors = np.linalg.eigh(normals.T @ normals / max(1, len(normals)))
        return Spectrum(np.sqrt(np.maximum(values, 0.0)), vectors.T)

    def centre(self, spectrum: Spectrum, free: int) -> NumpyArray:
        """The weighted least-squares centre of the slabs, zero along the first `free` directions.

        For independent errors this is the best estimate of the point of the affine hull nearest to
        0; the minimum-norm point is biased towards 0 by the width of the slabs.
        """
        thin, values = spectrum.directions[free:], spectrum.values[free:]
        middle = (self.lower + self.upper)[self.two_sided] / (2 * self.error[self.two_sided])
        projected = thin @ (self._scaled().T @ middle) / max(1, len(middle))
        seen = values > _UNSEEN * max(float(values[-1]), np.finfo(float).tiny)
        return np.asarray((projected[seen] / values[seen] ** 2) @ thin[seen])

    def distances(self, centre: NumpyArray) -> NumpyArray:
        """How far a point is from the middle of each slab, in units of their errors."""
        middle = (self.lower + self.upper) / 2
        return np.asarray(np.abs(self.normals @ centre - middle) / self.error)

    def part(self, kept: NumpyArray) -> Polytope:
        return Polytope(*(array[kept] for array in self))

    def concat(self, other: Polytope) -> Polytope:
        return Polytope(*map(np.concatenate, zip(self, other, strict=True)))

    def section(self, point: NumpyArray, basis: NumpyArray) -> Polytope:
        """The section with the affine space point + z @ basis, as a polytope of the z."""
        offset = self.normals @ point
        lower, upper = self.lower - offset, self.upper - offset
        return self._replace(normals=self.normals @ basis.T, lower=lower, upper=upper)

    def narrowed(self, centre: NumpyArray, most: int) -> Polytope:
        """At most `most` two-sided slabs nearest to a centre, just wide enough to contain it.

        While W is crude, slabs as wide as their errors allow contain 0, and the minimum-norm point
        says nothing. Most errors are smaller: slabs as wide as the distance within which _NEAREST
        of them have the centre make a thin polytope around the hull.
        """
        two_sided = self.part(self.two_sided)
        distance = two_sided.distances(centre)
        reach = max(float(np.quantile(distance, _NEAREST)), _THINNEST)
        near = np.flatnonzero(distance <= reach)
        found = two_sided.part(near[np.argsort(two_sided.error[near], kind="stable")[:most]])
        middle, width = (found.lower + found.upper) / 2, reach * found.error
        return found._replace(lower=middle - width, upper=middle + width)

    def _scaled(self) -> NumpyArray:
        above = self.two_sided
        return np.asarray(self.normals[above] / self.error[above, None])
