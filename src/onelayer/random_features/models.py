"""A feature map or a kernel, with what solving and predicting mean for it.

Both answer to the same two calls, so that an estimator fits one size and a learning curve many in
the same way: `solve` gives coefficients for the first s examples for every s of `sizes`, and
`predict` the predictions of several sets of coefficients from one way through new examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


class Model(Protocol):
    """What estimators and learning curves ask of a model."""

    def solve(
        self,
        sets: Sets,
        targets: Array,
        alpha: Alpha,
        sizes: Sequence[int],
        row_scale: Array | None,
        track: Track,
    ) -> list[Found]: ...

    def predict(self, sets: Sets, coefficients: Sequence[Array]) -> list[Array]: ...


@dataclass(frozen=True)
class FeatureModel:
    """Ridge regression on the features of a map; coefficients are weights (features, t)."""

    features: FeatureMap

    def solve(
        self,
        sets: Sets,
        targets: Array,
        alpha: Alpha,
        sizes: Sequence[int],
        row_scale: Array | None,
        track: Track,
    ) -> list[Found]:
        design = Design(self.features, sets, row_scale)
        return ridge.solve_features(design, targets, alpha, sizes, track)

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

    def solve(
        self,
        sets: Sets,
        targets: Array,
        alpha: Alpha,
        sizes: Sequence[int],
        row_scale: Array | None,
        track: Track,
    ) -> list[Found]:
        kernel = attention_matrix(sets, None, self.bias, track)
        if row_scale is None:
            return ridge.solve_kernel(kernel, targets, alpha, sizes)
        kernel *= row_scale[:, None] * row_scale
        found = ridge.solve_kernel(kernel, targets, alpha, sizes)
        return [(dual * row_scale[: dual.shape[0], None], alphas) for dual, alphas in found]

    def predict(self, sets: Sets, coefficients: Sequence[Array]) -> list[Array]:
        kernel = attention_matrix(sets, self.sets, self.bias)
        return [kernel[:, : dual.shape[0]] @ dual for dual in coefficients]
