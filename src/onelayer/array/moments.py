"""Mean and scatter of rows, in one pass and without a loss of digits for large means."""

from __future__ import annotations

from dataclasses import dataclass

from onelayer.array import backend
from onelayer.array.backend import Array


@dataclass(frozen=True, eq=False)
class Moments:
    """The number of rows, their mean (d,), and their scatter about it, (d, d) or (d,)."""

    rows: int
    mean: Array
    scatter: Array

    def __add__(self, other: Moments) -> Moments:
        """Moments of both together (Chan, Golub and LeVeque 1983)."""
        rows = self.rows + other.rows
        if not rows:
            return self
        share = other.rows / rows
        apart = other.mean - self.mean
        square = apart * apart if self.scatter.ndim == 1 else apart[:, None] * apart[None, :]
        between = self.rows * share * square
        return Moments(rows, self.mean + share * apart, self.scatter + other.scatter + between)


def moments(tokens: Array, there: Array | None = None, by_column: bool = False) -> Moments:
    """Moments of tokens (.., d) in float64, of those that are `there` (..).

    With `by_column` the scatter has the squares of the columns only, (d,).
    """
    xp = backend.namespace(tokens)
    flat = xp.reshape(tokens, (-1, tokens.shape[-1]))
    if there is None:
        rows = int(flat.shape[0])
        mean = xp.sum(flat, axis=0) / max(rows, 1)
        centred, counted = flat - mean, None
    else:
        counted = xp.astype(xp.reshape(there, (-1, 1)), flat.dtype)
        rows = round(float(xp.sum(counted)))
        mean = xp.sum(flat * counted, axis=0) / max(rows, 1)
        centred = (flat - mean) * counted
    # Once more: rounding errors of a large mean would count as spread.
    rest = xp.sum(centred, axis=0) / max(rows, 1)
    mean, centred = mean + rest, centred - (rest if counted is None else rest * counted)
    if by_column:
        return Moments(rows, mean, xp.sum(centred * centred, axis=0))
    return Moments(rows, mean, backend.transpose(centred) @ centred)
