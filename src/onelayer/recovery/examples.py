"""The examples of the six phases: read block by block, wherever they are, never held at once.

As in `problem`, tokens are whitened and outputs divided by their root mean square. On Boolean and
Gaussian inputs that changes next to nothing; tokens on the unit sphere grow to length √d, so that
the phases meet all three kinds of input in the same units.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from onelayer import arrays, blocks
from onelayer.arrays import Array
from onelayer.recovery.problem import Problem, inverse_root

Result = TypeVar("Result")


def _untold(_share: float) -> None:
    """Nobody wants to know how far a pass is."""


@dataclass(frozen=True)
class Examples:
    """Inputs (n, k, d) and outputs (n, k, e) as they were given, and how to read them."""

    X: Any
    Y: Any
    held_out: np.ndarray[Any, Any]  # ascending positions that no block shows
    device: str | None
    whitening: Array
    output_scale: float
    passing: Callable[[float], None] = _untold  # told how far a pass is

    @property
    def count(self) -> int:
        return int(self.X.shape[0]) - len(self.held_out)

    @property
    def tokens(self) -> int:
        return int(self.X.shape[1])

    @property
    def rows(self) -> int:
        return self.count * self.tokens

    @property
    def dim(self) -> int:
        return int(self.X.shape[2])

    @property
    def out_dim(self) -> int:
        return int(self.Y.shape[2])

    def fold(
        self,
        work: Callable[[Array, Array], Result],
        merge: Callable[[Result, Result], Result],
        most: int | None = None,
    ) -> Result:
        """`work(X, Y)` of every block, merged in their order; of about `most` examples if given."""
        parts = self._parts()
        if most is not None and most < self.X.shape[0]:  # whole blocks, evenly spread
            size = parts[0].stop - parts[0].start
            wanted = max(1, -(-most // size))
            parts = [parts[i * len(parts) // wanted] for i in range(min(wanted, len(parts)))]
        done = 0

        def merge_and_tell(total: Result, result: Result) -> Result:
            nonlocal done
            done += 1
            self.passing((done + 1) / len(parts))
            return merge(total, result)

        self.passing(0.0)
        return blocks.fold_over(
            parts, lambda part: work(*self._read(part)), merge_and_tell, self.whitening
        )

    def problem(self, index: np.ndarray[Any, Any]) -> Problem:
        """Some examples, by their positions, held in memory for Gauss-Newton steps."""
        X, Y = (arrays.rows(array, index) for array in (self.X, self.Y))
        tokens, outputs = self._whitened(X, Y)
        whitening, scale = self.whitening, self.output_scale
        return Problem(tokens, outputs, None, False, False, whitening, scale)

    def positions(self, most: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
        """Random examples that are not held out, at most so many, ascending."""
        drawn = min(most + len(self.held_out), int(self.X.shape[0]))
        positions = rng.choice(int(self.X.shape[0]), drawn, replace=False)
        return np.sort(positions[~np.isin(positions, self.held_out)][:most])

    def _parts(self) -> list[slice]:
        # Tokens, outputs, their images and centred images, and the k x k matrices of a row.
        tokens, dim, out_dim = self.tokens, self.dim, self.out_dim
        per_example = 8 * tokens * (2 * dim + 4 * out_dim + 6 * tokens)
        return list(blocks.slices(int(self.X.shape[0]), per_example))

    def _read(self, part: slice) -> tuple[Array, Array]:
        first, last = np.searchsorted(self.held_out, [part.start, part.stop])
        X, Y = self.X[part, ...], self.Y[part, ...]
        if first < last:
            size = part.stop - part.start
            kept = np.setdiff1d(np.arange(size), self.held_out[first:last] - part.start)
            X, Y = arrays.rows(X, kept), arrays.rows(Y, kept)
        return self._whitened(X, Y)

    def _whitened(self, X: Array, Y: Array) -> tuple[Array, Array]:
        X, Y = (arrays.double(arrays.place(array, self.device)) for array in (X, Y))
        return X @ self.whitening, Y / self.output_scale


def gather(
    X: Any,
    Y: Any,
    held_out: np.ndarray[Any, Any],
    device: str | None = None,
    passing: Callable[[float], None] = _untold,
) -> Examples:
    """The examples with their whitening, from one pass over those that are not held out."""
    dim = X.shape[2]
    token_scale, output_scale = (arrays.largest(array) or 1.0 for array in (X, Y))
    # As they are but for the largest entries brought to 1, so that squares do not overflow.
    reference = arrays.double(arrays.place(X[:1, ...], device))
    identity = arrays.like(np.eye(dim) / token_scale, reference)
    plain = Examples(X, Y, held_out, device, identity, output_scale, passing)

    def squares(tokens: Array, outputs: Array) -> tuple[Array, float]:
        flat = arrays.namespace(tokens).reshape(tokens, (-1, dim))
        return arrays.transpose(flat) @ flat, arrays.squared_norm(outputs)

    moments, size = plain.fold(squares, lambda a, b: (a[0] + b[0], a[1] + b[1]))
    root_mean_square = (size / (plain.rows * plain.out_dim)) ** 0.5 or 1.0
    return Examples(
        X,
        Y,
        held_out,
        device,
        inverse_root(moments / plain.rows) / token_scale,
        output_scale * root_mean_square,
        passing,
    )
