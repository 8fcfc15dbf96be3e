"""Problems on the first s examples, for many s, as columns of one matrix.

If K + α = L Lᵀ over all examples, the leading block of L factors the problem on the first s of
them: one factorization serves every sample size. The right sides of all sizes are columns of one
matrix, those of size s zero from row s on. L⁻¹ is right in the first s rows of such a column, and
L⁻ᵀ of a column that is zero from row s on is zero there: all columns are solved together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from onelayer.array import backend, blocks, linalg
from onelayer.array.backend import Array

_PIECE = 512  # rows or columns of a panel for one thread at a time


@dataclass(frozen=True)
class Columns:
    """`targets` columns for every one of the ascending `sizes`."""

    sizes: Sequence[int]
    targets: int

    def of(self, i: int) -> slice:
        """The columns of the i-th size."""
        return slice(i * self.targets, (i + 1) * self.targets)

    def after(self, count: int) -> Columns:
        """The columns of all but the first sizes."""
        return Columns(self.sizes[count:], self.targets)

    def side_by_side(self, parts: Sequence[Array]) -> Array:
        """Parts (s, t) side by side, zeros below them."""
        matrix = backend.zeros((self.sizes[-1], len(parts) * self.targets), parts[0])
        for i, part in enumerate(parts):
            matrix[: part.shape[0], self.of(i)] = part
        return matrix

    def split(self, matrix: Array) -> list[Array]:
        """The columns of every size, (rows, t) each."""
        return [matrix[:, self.of(i)] for i in range(len(self.sizes))]

    def cleared(self, matrix: Array) -> Array:
        """The matrix itself, with zeros from row s on."""
        for i, size in enumerate(self.sizes):
            matrix[size:, self.of(i)] = 0.0
        return matrix

    def weights(self, panel: Array, dual: Array) -> Array:
        """panelᵀ @ dual, skipping zeros: rows of a panel count for the sizes beyond them."""
        few = backend.transpose(dual)  # twice as fast as a product with panelᵀ
        found = backend.zeros((few.shape[0], panel.shape[1]), panel)

        def fill(part: slice) -> None:
            for rows, its in self._segments():
                found[its, part] += few[its, rows] @ panel[rows, part]

        blocks.run_over(list(blocks.slices(panel.shape[1], 1, _PIECE)), fill, panel)
        return backend.transpose(found)

    def add_fitted(self, fitted: Array, panel: Array, weights: Array) -> None:
        """fitted + panel @ weights, in place, where rows count for the sizes beyond them."""

        def fill(piece: tuple[slice, slice]) -> None:
            rows, its = piece
            fitted[rows, its] += panel[rows, :] @ weights[:, its]

        pieces = [
            (piece, its)
            for rows, its in self._segments()
            for piece in blocks.slices(rows.stop, 1, _PIECE, rows.start)
        ]
        blocks.run_over(pieces, fill, panel)

    def _segments(self) -> list[tuple[slice, slice]]:
        """Rows between two sizes, and the columns of the sizes that these rows belong to."""
        return [
            (slice(start, stop), slice(i * self.targets, None))
            for i, (start, stop) in enumerate(pairwise([0, *self.sizes]))
        ]


def solve(lower: Array, right: Array, columns: Columns) -> Array:
    """The solutions of all sizes from the factor of the largest, zero where `right` is."""
    forward = columns.cleared(linalg.solve_lower(lower, right))
    return linalg.solve_lower(lower, forward, transposed=True)
