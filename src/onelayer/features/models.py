"""Feature maps and kernels as models that solve ridge problems and predict.

`solve` gives coefficients for the first s examples for every s of `sizes`, and `predict` the
predictions of several sets of coefficients, without intercepts, in one pass over examples. An
estimator fits one size and a learning curve many in the same way. Models compute on the device of
the problem and return arrays of the kind and on the device of the examples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.data import sources
from onelayer.data.chunks import Chunk
from onelayer.data.sets import Sets
from onelayer.data.sources import Source
from onelayer.features import validation
from onelayer.features.kernels import base as kernels
from onelayer.features.kernels.base import Kernel
from onelayer.features.progress import Track
from onelayer.features.solvers import design, ridge
from onelayer.features.solvers.design import Design, FeatureMap, Panels
from onelayer.features.solvers.intercept import Alpha, RidgeSolution


@dataclass(frozen=True, eq=False)
class RidgeProblem:
    """Checked examples and parameters of a fit."""

    # Chunks have sets, targets (n, t) in float64, multiplied by the scale of rows already, and
    # that scale (n,) or None.
    examples: Source
    flat: bool  # whether y had one axis
    alpha: Alpha
    fit_intercept: bool
    device: str | None  # where it is solved

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def sets(self) -> Sets:
        """All examples if they are in memory, else one with their form and kind."""
        chunks = self.examples.chunks
        sets: Sets = chunks.collect()[0].arrays[0] if chunks.in_memory else self.examples.samples[0]
        return sets

    def first(self, count: int, in_memory: bool) -> RidgeProblem:
        """The same for the first examples, collected in memory if asked for."""
        part = self.examples.between(0, count)
        part = sources.in_memory(*design.collect(part)) if in_memory else part
        return replace(self, examples=part)

    def largest(self) -> float:
        """The largest absolute value of a coordinate of a token."""
        return self.examples.chunks.map(_largest).reduce(max)


def _largest(chunk: Chunk) -> float:
    return float(chunk.arrays[0].largest())


class RidgeModel(Protocol):
    """A model that estimators and learning curves fit."""

    def solve(
        self, problem: RidgeProblem, sizes: list[int], track: Track
    ) -> list[RidgeSolution]: ...

    def predict(self, sets: Sets, coefficients: list[Array], device: str | None) -> list[Array]: ...


@dataclass(frozen=True)
class FeatureModel:
    """Ridge regression on the features of a map; coefficients are weights (features, t)."""

    features: FeatureMap

    def solve(self, problem: RidgeProblem, sizes: list[int], track: Track) -> list[RidgeSolution]:
        kind = problem.sets.sample
        phi = Design(self.features, problem.examples, backend.place(kind, problem.device))
        found = ridge.solve_features(phi, problem.alpha, sizes, track, problem.fit_intercept)
        return [one.as_device(kind) for one in found]

    def predict(self, sets: Sets, coefficients: list[Array], device: str | None) -> list[Array]:
        panels = Panels(self.features, sets, sample=backend.place(sets.sample, device))
        together = backend.namespace(coefficients[0]).concat(coefficients, axis=1)
        together = panels.product(together)
        together = backend.as_device(together, sets.sample)
        count = coefficients[0].shape[1]
        return [together[:, i * count : (i + 1) * count] for i in range(len(coefficients))]


@dataclass(frozen=True)
class KernelModel:
    """Kernel ridge regression; coefficients are dual, (examples, t)."""

    sets: Sets  # the examples of the fit, in memory
    kernel: Kernel

    def solve(self, problem: RidgeProblem, sizes: list[int], track: Track) -> list[RidgeSolution]:
        sets, targets, scale = design.collect(problem.examples)
        matrix = kernels.matrix(self.kernel, sets.placed(problem.device), None, track)
        targets = backend.as_device(targets, matrix)
        ones = backend.ones((len(sets),), matrix)
        if scale is not None:
            ones = backend.like(scale, matrix)
            matrix *= ones[:, None] * ones
        border = ones if problem.fit_intercept else None
        found = ridge.solve_kernel(matrix, targets, problem.alpha, sizes, border)
        if scale is not None:
            duals = [one.coefficients * ones[: len(one.coefficients), None] for one in found]
            found = [one._replace(coefficients=c) for one, c in zip(found, duals, strict=True)]
        return [one.as_device(sets.sample) for one in found]

    def predict(self, sets: Sets, coefficients: list[Array], device: str | None) -> list[Array]:
        examples, like = self.sets.placed(device), sets.sample

        def block(part: slice) -> list[Array]:
            matrix = kernels.matrix(self.kernel, sets[part].placed(device), examples)
            duals = (backend.as_device(dual, matrix) for dual in coefficients)
            return [backend.as_device(matrix[:, : len(dual)] @ dual, like) for dual in duals]

        parts = blocks.slices(len(sets), 8 * len(examples), design.PANEL_BYTES)
        rows = blocks.map_over(parts, block)
        xp = backend.namespace(rows[0][0])
        return [xp.concat(list(one), axis=0) for one in zip(*rows, strict=True)]


@dataclass(frozen=True)
class Predictor:
    """A fitted model: predictions (n,) or (n, targets) of sets, or their labels (n,)."""

    model: RidgeModel
    coefficients: Array
    intercept: Array  # (targets,)
    flat: bool
    device: str | None
    classes: Array | None = None

    def __call__(self, sets: Sets) -> Array:
        (linear,) = self.model.predict(sets, [self.coefficients], self.device)
        constant = backend.like(self.intercept, backend.double(linear))
        predictions = backend.like(backend.double(linear) + constant, linear)  # rounded once
        validation.check_no_overflow(predictions, "predictions", sets)
        found = predictions[:, 0] if self.flat else predictions
        if self.classes is None:
            return found
        xp, classes = backend.namespace(found), self.classes
        index = xp.astype(found > 0, xp.int64) if self.flat else xp.argmax(found, axis=1)
        return backend.namespace(classes).take(classes, backend.as_device(index, classes), axis=0)


def features_of(feature_map: FeatureMap, device: str | None, sets: Sets) -> Array:
    """The features of sets, (n, features), computed on a device."""
    kind, there = sets.sample, backend.place(sets.sample, device)
    panels = Panels(feature_map, sets, sample=there)
    if backend.device(there) == backend.device(kind):
        features = panels.by_rows(slice(0, len(sets)))
    else:  # a GPU may not have memory for all of them
        features = backend.zeros((panels.rows, panels.columns), kind)
        for part in panels.row_panels():
            features[part, :] = backend.as_device(panels.by_rows(part), kind)
    validation.check_no_overflow(features, "features", sets)
    return features
