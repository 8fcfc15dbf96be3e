"""The solution of a ridge regression."""

from __future__ import annotations

from typing import NamedTuple

from onelayer.array import backend
from onelayer.array.backend import Array, NumpyArray

Alpha = float | None  # the penalty; None if it is chosen by leave-one-out


class RidgeSolution(NamedTuple):
    """Coefficients and intercept, one column for each target."""

    coefficients: Array  # (rows, t)
    alphas: NumpyArray  # (t,), the penalty of every target
    intercept: Array  # (t,), zeros without an intercept

    def as_device(self, reference: Array) -> RidgeSolution:
        """The same in the namespace and on the device of `reference`."""
        coefficients = backend.as_device(self.coefficients, reference)
        intercept = backend.as_device(self.intercept, reference)
        return self._replace(coefficients=coefficients, intercept=intercept)
