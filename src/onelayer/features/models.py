"""A feature map or a kernel, with what solving and predicting mean for it.

Both answer to the same two calls, so that an estimator fits one size and a learning curve many in
the same way: `solve` gives coefficients for the first s examples for every s of `sizes`, and
`predict` the predictions of several sets of coefficients from one way through new examples.

Both compute on the device that they are told, and give what they find in the kind and on the device
of the examples.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from onelayer.features.solvers import design as design_module
from onelayer.features.solvers import ridge
from onelayer.features.solvers.design import Design, FeatureMap, SpreadDesign
from onelayer.features.solvers.leave_one_out import Found
from onelayer.features.solvers.ridge import Alpha


@dataclass(frozen=True, eq=False)
class Problem:
    """What a fit was asked for, checked: examples wherever they live, in chunks.

    A chunk has sets, targets (n, t) in float64 and the scale (n,) of rows, or None, by which
    targets are multiplied already.
    """

    examples: Source
    flat: bool  # whether y had one axis
    alpha: Alpha
    fit_intercept: bool
    device: str | None  # where it is solved

    def __len__(self) -> int:
        return len(self.examples)

    @property
    def sets(self) -> Sets:
        """All examples where they are in memory, else one, of which only form and kind count."""
        there = self.examples.chunks
        sets: Sets = self.examples.samples[0]
        if there.in_memory:
            sets = there.collect()[0].arrays[0]
        return sets

    @property
    def targets(self) -> int:
        """The number of targets."""
        return int(self.examples.samples[1].shape[1])

    def first(self, count: int) -> Problem:
        """The same for the first examples."""
        return replace(self, examples=self.examples.between(0, count))

    def here(self) -> Problem:
        """The same with all examples in memory."""
        brought = sources.in_memory(*design_module.brought(self.examples))
        return replace(self, examples=brought)

    def check_no_overflow(self, coefficients: Array) -> None:
        """Refuse tokens so large that their features have no place in their dtype."""
        if not backend.is_finite(coefficients):
            largest = self.examples.chunks.map(_largest).reduce(max)
            raise validation.overflow("features", self.sets, largest)


def _largest(chunk: Chunk) -> float:
    sets: Sets = chunk.arrays[0]
    return sets.largest()


class Model(Protocol):
    """What estimators and learning curves ask of a model."""

    def solve(self, problem: Problem, sizes: Sequence[int], track: Track) -> list[Found]: ...

    def predict(
        self, sets: Sets, coefficients: Sequence[Array], device: str | None
    ) -> list[Array]: ...


@dataclass(frozen=True)
class FeatureModel:
    """Ridge regression on the features of a map; coefficients are weights (features, t).

    What is predicted is Φ v: whoever asks adds the intercept.
    """

    features: FeatureMap

    def solve(self, problem: Problem, sizes: Sequence[int], track: Track) -> list[Found]:
        kind = problem.sets.sample
        design = SpreadDesign(self.features, problem.examples, backend.place(kind, problem.device))
        found = ridge.solve_features(design, problem.alpha, sizes, track, problem.fit_intercept)
        return [one.beside(kind) for one in found]

    def predict(self, sets: Sets, coefficients: Sequence[Array], device: str | None) -> list[Array]:
        xp = backend.namespace(coefficients[0])
        design = Design(self.features, sets, sample=backend.place(sets.sample, device))
        together = design.product(xp.concat(list(coefficients), axis=1))
        together = backend.as_device(together, sets.sample)
        count = coefficients[0].shape[1]
        return [together[:, i * count : (i + 1) * count] for i in range(len(coefficients))]


@dataclass(frozen=True)
class KernelModel:
    """Kernel ridge regression; coefficients are dual, (examples, t)."""

    sets: Sets  # the examples of the fit, in memory
    kernel: Kernel

    def solve(self, problem: Problem, sizes: Sequence[int], track: Track) -> list[Found]:
        sets, targets, scale = design_module.brought(problem.examples)
        kernel = kernels.matrix(self.kernel, sets.placed(problem.device), None, track)
        targets = backend.as_device(targets, kernel)
        ones = backend.ones((len(sets),), kernel)
        if scale is not None:
            ones = backend.like(scale, kernel)
            kernel *= ones[:, None] * ones
        border = ones if problem.fit_intercept else None
        found = ridge.solve_kernel(kernel, targets, problem.alpha, sizes, border)
        if scale is not None:
            found = [one.scaled(ones) for one in found]
        return [one.beside(sets.sample) for one in found]

    def predict(self, sets: Sets, coefficients: Sequence[Array], device: str | None) -> list[Array]:
        examples = self.sets.placed(device)

        def block(part: slice) -> list[Array]:
            kernel = kernels.matrix(self.kernel, sets[part].placed(device), examples)
            return [
                backend.as_device(
                    kernel[:, : dual.shape[0]] @ backend.as_device(dual, kernel), sets.sample
                )
                for dual in coefficients
            ]

        parts = blocks.slices(len(sets), 8 * len(examples), design_module.PANEL_BYTES)
        rows = blocks.map_over(parts, block)
        xp = backend.namespace(rows[0][0])
        return [xp.concat(list(one), axis=0) for one in zip(*rows, strict=True)]


@dataclass(frozen=True)
class Predictor:
    """A fitted model: predictions (n,) or (n, targets) of sets, or their labels (n,)."""

    model: Model
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
        return found if self.classes is None else _labels(found, self.classes)


@dataclass(frozen=True)
class Transformer:
    """A feature map: the features of sets, (n, features)."""

    features: FeatureMap
    device: str | None

    def __call__(self, sets: Sets) -> Array:
        kind, there = sets.sample, backend.place(sets.sample, self.device)
        design = Design(self.features, sets, sample=there)
        if backend.device(there) == backend.device(kind):
            features = design.by_rows(slice(0, len(sets)))
        else:  # there may be no room for all of them there
            features = backend.zeros((design.rows, design.columns), kind)
            for part in design.row_panels():
                features[part, :] = backend.as_device(design.by_rows(part), kind)
        validation.check_no_overflow(features, "features", sets)
        return features


def _labels(scores: Array, classes: Array) -> Array:
    """The class of the highest score."""
    xp = backend.namespace(scores)
    positive = xp.astype(scores > 0, xp.int64)
    index = positive if scores.ndim == 1 else xp.argmax(scores, axis=1)
    return backend.namespace(classes).take(classes, backend.as_device(index, classes), axis=0)
