"""An oracle: a function that is asked, checked and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from onelayer.array import backend
from onelayer.array.rounding import rounding

Matrix: TypeAlias = np.ndarray[Any, Any]

# Two answers to one question may differ by noise up to this share of their size. Dropout differs by
# far more.
_MOST_NOISE = 0.05


class QueriesSpentError(Exception):
    """The next inputs would exceed `max_queries`."""


@dataclass(eq=False)
class Oracle:
    """A function from inputs (n, k, d) to outputs (n, k, e), with what it was asked so far."""

    function: Callable[[Any], Any]
    max_queries: int | None = None
    queries: int = 0  # inputs that were asked
    scalars: int = 0  # entries of the outputs that were used
    returned: int = 0  # entries of the outputs
    out_dim: int | None = None
    noise: float = 2.0**-53  # relative error of outputs, from their rounding and repetitions
    checked: bool = field(default=False)

    def ask(self, X: Matrix, rows: int | None = None) -> Matrix:
        """The outputs of inputs, in float64; only the first `rows` rows count as used."""
        if not self.checked:
            self.checked = True
            self._compare(X[:1])
        Y = self._called(X)
        self.noise = max(self.noise, _relative_rounding(Y))
        kept = backend.double(Y)[:, :rows]
        self.scalars += int(kept.size)
        return np.asarray(kept)

    def allows(self, queries: int) -> bool:
        """Whether so many further inputs are within `max_queries`."""
        return self.max_queries is None or self.queries + queries <= self.max_queries

    def _compare(self, X: Matrix) -> None:
        """Ask one input twice, and refuse an oracle with two different answers."""
        first, second = (backend.double(self._called(X)) for _ in range(2))
        size = float(np.linalg.norm(first)) or 1.0
        difference = float(np.linalg.norm(first - second)) / size
        if difference > _MOST_NOISE:
            raise ValueError(
                f"oracle gave two outputs for the same input that differ by {difference:.1%}, "
                "expected a deterministic function: a torch module wants .eval()"
            )
        self.noise = max(self.noise, difference)

    def _called(self, X: Matrix) -> Matrix:
        """The outputs of the function, refused if they are none."""
        if not self.allows(len(X)):
            raise QueriesSpentError
        try:
            answer = self.function(X.copy())  # the caller may overwrite them
        except Exception as error:
            raise ValueError(
                f"oracle raised {type(error).__name__}: {error}; it was called with an array of "
                f"shape {X.shape} and dtype {X.dtype}, expected outputs (n, tokens, out_dim)"
            ) from error
        Y = self._checked(answer, X)
        self.queries += len(X)
        self.returned += int(Y.size)
        return Y

    def _checked(self, answer: Any, X: Matrix) -> Matrix:
        if not backend.is_array(answer):
            raise TypeError(
                f"oracle returned {type(answer).__name__}, expected an array (n, tokens, out_dim)"
            )
        Y = backend.to_numpy(answer)
        if not np.issubdtype(Y.dtype, np.floating):
            raise TypeError(
                f"oracle returned an array of dtype {Y.dtype}, expected real floating-point numbers"
            )
        out_dim = "out_dim" if self.out_dim is None else self.out_dim
        right = Y.ndim == 3 and Y.shape[:2] == X.shape[:2] and Y.shape[2] > 0
        if not right or self.out_dim not in (None, Y.shape[2]):
            expected = f"({X.shape[0]}, {X.shape[1]}, {out_dim})"
            raise ValueError(
                f"oracle returned an array of shape {Y.shape} for inputs of shape {X.shape}, "
                f"expected {expected}"
            )
        if bad := int((~np.isfinite(Y)).sum()):
            raise ValueError(
                f"oracle returned {bad} infinite or missing values (NaN) of {Y.size} for inputs "
                f"with entries up to {np.abs(X).max():.3g}, expected finite numbers"
            )
        self.out_dim = Y.shape[2]
        return Y


def _relative_rounding(Y: Matrix) -> float:
    """Rounding error of outputs relative to their size: what was stored, or computed with."""
    size = float(np.sqrt(np.mean(np.square(Y, dtype=float))))
    stored = float(np.finfo(Y.dtype).eps) / 2
    return max(stored, rounding(Y).error / size if size > 0 else 0.0)
