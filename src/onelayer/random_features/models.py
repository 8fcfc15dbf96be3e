"""A feature map or a kernel, with what solving and predicting mean for it.

Both answer to the same two calls, so that an estimator fits one size and a learning curve many in
the same way: `solve` gives coefficients for the first s examples for every s of `sizes`, and
`predict` the predictions of several sets of coefficients from one way through new examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from onelayer import arrays
from onelayer.arrays import Array
from onelayer.random_features import ridge
from onelayer.random_features.design import Design, FeatureMap
from onelayer.random_features.kernel_matrices import attention_matrix
from onelayer.random_features.leave_one_out import Found
from onelayer.random_features.progress import Track
from onelayer.random_features.ridge import Alpha
from onelayer.random_features.sets import Sets


@dataclass(frozen=True)
class Problem:
    """What a fit was asked for, checked: rows of targets and features are times `row_scale`."""

    sets: Sets
    targets: Array  # (n, t) in float64
    flat: bool  # whether y had one axis
    row_scale: Array | None
    alpha: Alpha

    def first(self, count: int) -> Problem:
        """The same for the first examples."""
        scale = None if self.row_scale is None else self.row_scale[:count]
        first, targets = self.sets.first(count), self.targets[:count, :]
        return replace(self, sets=first, targets=targets, row_scale=scale)


class Model(Protocol):
    """What estimators and learning curves ask of a model."""

    def solve(self, problem: Problem, sizes: Sequence[int], track: Track) -> list[Found]: ...

    def predict(self, sets: Sets, coefficients: Sequence[Array]) -> list[Array]: ...


@dataclass(frozen=True)
class FeatureModel:
    """Ridge regression on the features of a map; coefficients are weights (features, t)."""

    features: FeatureMap

    def solve(self, problem: Problem, sizes: Sequence[int], track: Track) -> list[Found]:
        design = Design(self.features, problem.sets, problem.row_scale)
        return ridge.solve_features(design, problem.targets, problem.alpha, sizes, track)

    def predict(self, sets: Sets, coefficients: Sequence[Array]) -> list[Array]:
        xp = arrays.namespace(coefficients[0])
        together = Design(self.features, sets).product(xp.concat(list(coefficients), axis=1))
        count = coefficients[0].shape[1]
        return [together[:, i * count : (i + 1) * count] for i in range(len(coefficients))]


@dataclass(frozen=True)
class KernelModel:
    """Ridge regression with infinitely many heads; coefficients are dual, (examples, t).

    `bias` (D, D) is W_0, or None for none, and `sets` are the examples of the fit.
    """

    sets: Sets
    bias: np.ndarray[Any, Any] | None

    def solve(self, problem: Problem, sizes: Sequence[int], track: Track) -> list[Found]:
        kernel = attention_matrix(problem.sets, None, self.bias, track)
        scale = problem.row_scale
        if scale is not None:
            kernel *= scale[:, None] * scale
        found = ridge.solve_kernel(kernel, problem.targets, problem.alpha, sizes)
        if scale is None:
            return found
        return [(dual * scale[: dual.shape[0], None], alphas) for dual, alphas in found]

    def predict(self, sets: Sets, coefficients: Sequence[Array]) -> list[Array]:
        kernel = attention_matrix(sets, self.sets, self.bias)
        return [kernel[:, : dual.shape[0]] @ dual for dual in coefficients]
