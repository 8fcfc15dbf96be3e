"""An intercept that is not penalised, exactly, in every form of ridge regression.

The objective is |S (Φ v + b 1 - y)|² + α |v|², where S holds the square roots of the weights. Here
Φ and y have their rows scaled by S already, and s = S 1 stands where 1 stood.

With K = Φ Φᵀ the solution is v = Φᵀ c, where c and b solve the bordered system

    (K + α) c + b s = y,    sᵀ c = 0.

There are two ways to solve it. Eliminating c takes one more right side, for any way of solving with
K + α and for every leading block of it:

    c = z - b u,    b = sᵀ z / sᵀ u,    where (K + α) z = y and (K + α) u = s.

Eliminating the constraint leaves a problem of one unknown less. With the columns of Q an
orthonormal basis of the vectors orthogonal to s,

    c = Q (Qᵀ K Q + α)⁻¹ Qᵀ y,

in which Q comes from a Householder reflection. This way serves eigenvalues.

With G = Φᵀ Φ, features and targets less their weighted means m and μ have the same v, and
b = μ - mᵀ v. Means and products about them are merged as in `scores.py`.

Targets are always taken less a mean first, so that however large an offset they have, no digits of
their variation are lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from onelayer.array import backend, linalg
from onelayer.array.backend import Array


def mean_target(ones: Array, targets: Array) -> Array:
    """The weighted mean (t,) of targets (n, t), both with their rows scaled."""
    total = float(ones @ ones)
    return (ones @ targets) / (total if total > 0 else 1.0)


def bordered(targets: Array, ones: Array) -> tuple[Array, Array]:
    """Targets less their mean with s as one more column, (n, t + 1), and that mean (t,)."""
    xp = backend.namespace(targets)
    mean = mean_target(ones, targets)
    return xp.concat([targets - ones[:, None] * mean, ones[:, None]], axis=1), mean


def unbordered(coefficients: Array, dual: Array, ones: Array) -> tuple[Array, Array]:
    """Coefficients (rows, t) and b (t,) from those of bordered targets, (rows, t + 1).

    `dual` (n, t + 1) solves for all of these columns; coefficients may be linear in it.
    """
    projected = ones @ dual
    last = float(projected[-1])
    intercept = projected[:-1] / (last if last != 0 else 1.0)
    return coefficients[:, :-1] - coefficients[:, -1:] * intercept, intercept


@dataclass(frozen=True, eq=False)
class Reflection:
    """The basis Q (n, n - 1) of the vectors orthogonal to s, and what it makes of a kernel matrix.

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
        """sᵀ K s / sᵀ s: the size of the features' mean in K."""
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
        xp = backend.namespace(vectors)
        along = self.factor * (self.vector[1:] @ vectors)
        return xp.concat(
            [-self.vector[:1, None] * along, vectors - self.vector[1:, None] * along], axis=0
        )

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
        """The eigenvalue, or nearly, that the means add to Φᵀ Φ."""
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
        """Scaled rows of features, in their own memory, and of targets, less the means."""
        centred = linalg.less_outer(features, ones, self.features)
        return centred, targets - ones[:, None] * self.targets


def centre_of(features: Array, targets: Array, ones: Array) -> Centre:
    """The means of examples with scaled rows: features (n, p), targets (n, t), their scale (n,)."""
    weight = float(ones @ ones)
    safe = weight if weight > 0 else 1.0
    return Centre(weight, (ones @ features) / safe, (ones @ targets) / safe)
