"""Ridge regression with an intercept that is not penalised, exactly, in every form of the solver.

The objective is |S (Φ v + b 1 - y)|² + α |v|², where S holds the square roots of the weights. Here
the rows of Φ and y are multiplied by S already, and s = S 1 takes the place of 1.

With K = Φ Φᵀ the solution is v = Φᵀ c, where c and b solve the bordered system

    (K + α) c + b s = y,    sᵀ c = 0.

Eliminating c takes one more right side, for any way of solving with K + α and for every leading
block of it (`BorderedTargets`):

    c = z - b u,    b = sᵀ z / sᵀ u,    where (K + α) z = y and (K + α) u = s.

Eliminating the constraint leaves a problem with one unknown less, for eigendecompositions
(`Reflection`). With the columns of Q an orthonormal basis of the vectors orthogonal to s,

    c = Q (Qᵀ K Q + α)⁻¹ Qᵀ y.

With G = Φᵀ Φ, features and targets minus their weighted means m and μ have the same v, and
b = μ - mᵀ v (`Centre`). Means and products about them are merged as in `scores.py`.

A mean is always subtracted from the targets first, so that a large offset costs no digits of their
variation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from onelayer.array import backend, linalg
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


def mean_target(ones: Array, targets: Array) -> Array:
    """The weighted mean (t,) of targets (n, t), both with their rows scaled."""
    total = float(ones @ ones)
    return (ones @ targets) / (total if total > 0 else 1.0)


class BorderedTargets(NamedTuple):
    """Right sides to solve for; without an intercept they are the targets."""

    right: Array  # targets minus their mean, with s as one more column: (n, t + 1)
    mean: Array  # (t,)
    ones: Array | None  # s (n,); None without an intercept

    @classmethod
    def of(cls, targets: Array, ones: Array | None) -> BorderedTargets:
        if ones is None:
            return cls(targets, backend.zeros((targets.shape[1],), targets), None)
        mean = mean_target(ones, targets)
        columns = [targets - ones[:, None] * mean, ones[:, None]]
        return cls(backend.namespace(targets).concat(columns, axis=1), mean, ones)

    def solution(self, coefficients: Array, dual: Array, alpha: float) -> RidgeSolution:
        """From coefficients (rows, t + 1), linear in the dual (s, t + 1), of s examples."""
        alphas = np.full(self.mean.shape[0], alpha)
        if self.ones is None:
            return RidgeSolution(coefficients, alphas, self.mean)
        projected = self.ones[: dual.shape[0]] @ dual
        last = float(projected[-1])
        intercept = projected[:-1] / (last if last != 0 else 1.0)
        coefficients = coefficients[:, :-1] - coefficients[:, -1:] * intercept
        return RidgeSolution(coefficients, alphas, self.mean + intercept)


@dataclass(frozen=True, eq=False)
class Reflection:
    """The basis Q (n, n - 1) of the vectors orthogonal to s, and its products with K.

    The Householder matrix H = 1 - β v vᵀ with v = s/|s| + e_0 maps s to a multiple of e_0: Q is H
    without its first column.
    """

    ones: Array  # s (n,), not all zero
    image: Array  # K s (n,)
    vector: Array  # v (n,)
    factor: float  # β

    @classmethod
    def of(cls, kernel: Array, ones: Array) -> Reflection:
        """For a kernel matrix (n, n) given by its lower triangle."""
        length = float(ones @ ones) ** 0.5
        vector = ones / length
        vector[0] += 1.0  # no entry of s is negative: nothing cancels
        return cls(ones, linalg.symmetric_product(kernel, ones), vector, 1.0 / float(vector[0]))

    @property
    def mean(self) -> float:
        """sᵀ K s / sᵀ s: the part of K that the mean of the features has."""
        return float(self.ones @ self.image) / float(self.ones @ self.ones)

    def reduced(self, kernel: Array) -> Array:
        """The lower triangle of Qᵀ K Q, (n - 1, n - 1)."""
        length = float(self.ones @ self.ones) ** 0.5
        image = self.factor * (self.image / length + kernel[:, 0])  # β K v
        shift = image - (self.factor / 2 * float(image @ self.vector)) * self.vector
        left, right = self.vector[1:], shift[1:]
        reduced = linalg.less_outer(backend.copied(kernel[1:, 1:]), left, right)
        return linalg.less_outer(reduced, right, left)

    def project(self, right: Array) -> Array:
        """Qᵀ right, (n - 1, t)."""
        return right[1:, :] - self.vector[1:, None] * (self.factor * (self.vector @ right))

    def expand(self, vectors: Array) -> Array:
        """Q vectors, (n, r)."""
        along = self.factor * (self.vector[1:] @ vectors)
        rows = [-self.vector[:1, None] * along, vectors - self.vector[1:, None] * along]
        return backend.namespace(vectors).concat(rows, axis=0)

    def intercept(self, targets: Array, dual: Array) -> Array:
        """b (t,) = sᵀ (y - K c) / sᵀ s, as sᵀ c = 0."""
        return (self.ones @ targets - self.image @ dual) / float(self.ones @ self.ones)


class Centre(NamedTuple):
    """The weighted means of the features and targets of some examples."""

    weight: float
    features: Array  # (p,)
    targets: Array  # (t,)

    @property
    def size(self) -> float:
        """About the eigenvalue that the means add to Φᵀ Φ."""
        return self.weight * float(self.features @ self.features)

    def merged(self, other: Centre) -> tuple[Centre, Array, Array]:
        """The means of both, and the gaps g (p,) and h (t,) between them.

        The sums of products about the means of both are those about either mean, and g gᵀ and g hᵀ.
        """
        weight = self.weight + other.weight
        share = other.weight / weight if weight > 0 else 0.0
        features, targets = other.features - self.features, other.targets - self.targets
        size = (self.weight * share) ** 0.5
        both = Centre(weight, self.features + share * features, self.targets + share * targets)
        return both, size * features, size * targets

    def centred(self, features: Array, targets: Array, ones: Array) -> tuple[Array, Array]:
        """Scaled rows of features, in their own memory, and of targets, minus the means."""
        centred = linalg.less_outer(features, ones, self.features)
        return centred, targets - ones[:, None] * self.targets


@dataclass(frozen=True)
class FeatureSums:
    """Sums over examples that regression on features needs, about their means for an intercept."""

    gram: Array  # Φᵀ Φ (p, p), of which only the triangle on and below the diagonal is to be read
    moments: Array  # Φᵀ y (p, t)
    largest: Array  # the largest |y| of every target, (t,)
    centre: Centre | None

    def __add__(self, other: FeatureSums) -> FeatureSums:
        largest = backend.namespace(self.gram).maximum(self.largest, other.largest)
        gram, moments = self.gram + other.gram, self.moments + other.moments
        sums = FeatureSums(gram, moments, largest, self.centre or other.centre)
        if self.centre is None or other.centre is None:
            return sums
        return sums.about(*self.centre.merged(other.centre))

    def about(self, centre: Centre, gap: Array, target_gap: Array) -> FeatureSums:
        """Sums about two means as sums about the mean of both, see `Centre.merged`."""
        gram = linalg.add_gram(self.gram, gap[:, None])
        return FeatureSums(gram, self.moments + gap[:, None] * target_gap, self.largest, centre)


def centre_of(features: Array, targets: Array, ones: Array) -> Centre:
    """The means of examples with scaled rows: features (n, p), targets (n, t), their scale (n,)."""
    weight = float(ones @ ones)
    safe = weight if weight > 0 else 1.0
    return Centre(weight, (ones @ features) / safe, (ones @ targets) / safe)
