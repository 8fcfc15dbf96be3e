"""How outputs answer to changes of the attention matrices: S = JᵀQJ, solved and looked through.

With noise u in the outputs the best attention matrices move by S⁻¹ JᵀQ u (see `varpro.py`). Where
S is small they are badly determined, and where it is zero, not at all. Small problems form S and
decompose it, which leaves nothing undecided. Large ones never form it: Lanczos steps give its
largest and smallest eigenvalues and the direction of the smallest, conjugate gradients solve.

A head is free if it takes part in a direction in which S is zero to rounding, or if its features
are a combination of the other heads', so that projections can be traded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.recovery.gauss_newton import jacobian, levenberg_marquardt, low_rank, varpro
from onelayer.recovery.gauss_newton.jacobian import Jacobian
from onelayer.recovery.gauss_newton.low_rank import Tangent
from onelayer.recovery.gauss_newton.varpro import Fit

_LANCZOS_STEPS = 120
_FEWEST_STEPS = 20  # before that a small value may not have shown yet
_LANCZOS_ACCURACY = 0.3
# A singular value this small relative to the largest moves outputs by less than rounding errors
# of the recovered weights: the direction cannot be told from a free one.
_UNDETERMINED = 1e-6
_SINGLE_SUFFICES = 1e-4  # eigenvalues above this, relative to the largest, are right in float32
_SHARE = 0.05  # of such a direction, from which on a head counts as taking part in it
# Operations that it takes to form S: below the first it is always formed, as Lanczos steps cost as
# much; below the second only where these leave something undecided.
_CHEAP, _BEARABLE = 2e8, 5e10
_EASY = 1e-5  # eigenvalues above this, relative to the largest, are solved for in few products
_SOLVED = 0.2  # the share of the weakest direction's part in the right side that may be left over


class Sensitivity(Protocol):
    """S at a fit, restricted to the directions that heads may take.

    `products` are as precise as S calls for. `strengths` (m,) say how strongly outputs answer to
    each head, relative to the strongest, and `extremes` are the smallest and the largest singular
    value of J with heads brought to equal strength by them. `determined` (m,) says which heads take
    part in no free direction.
    """

    @property
    def products(self) -> Jacobian: ...
    @property
    def strengths(self) -> np.ndarray[Any, Any]: ...
    @property
    def extremes(self) -> tuple[float, float]: ...
    @property
    def determined(self) -> np.ndarray[Any, Any]: ...

    def solve(self, right: Array) -> Array | None:
        """S⁻¹ times a direction (p, m·d), free directions left out; None if it was not found."""


def sensitivity(fit: Fit, rank: int | None, rng: np.random.Generator) -> Sensitivity:
    """That of a fit with attention matrices of this rank."""
    tangent = low_rank.tangent(fit.theta, fit.batches.dim, rank)
    size = math.prod(fit.theta.shape)
    operations = float(fit.batches.equations) * size**2
    if operations <= _CHEAP:
        return _dense(fit, tangent)
    found = _krylov(fit, tangent, rng)
    return found if found.easy or operations > _BEARABLE else _dense(fit, tangent)


# Formed and decomposed


@dataclass(frozen=True, eq=False)
class _Dense:
    """S by its eigenvalues and eigenvectors (p·m·d, count), without those that are zero."""

    products: Jacobian
    values: np.ndarray[Any, Any]
    vectors: np.ndarray[Any, Any]
    strengths: np.ndarray[Any, Any]
    extremes: tuple[float, float]
    determined: np.ndarray[Any, Any]

    def solve(self, right: Array) -> Array | None:
        flat = backend.to_numpy(right).reshape(-1)
        found = self.vectors @ ((flat @ self.vectors) / self.values)
        return backend.like(found.reshape(right.shape), right)


def _dense(fit: Fit, tangent: Tangent) -> _Dense:
    rows, heads, dim = fit.theta.shape[0], fit.heads, fit.batches.dim
    formed = _unexplained_jacobian(fit)
    matrix = formed.T @ formed
    # Heads are brought to equal strength: a weak one is not free for being weak.
    of_head = np.tile(np.repeat(np.arange(heads), dim), rows)
    strength = np.bincount(of_head, np.diag(matrix), heads) ** 0.5
    unheard = strength <= _UNDETERMINED * strength.max()
    strengths = np.where(unheard, 1.0, strength / (strength.max() or 1.0))
    scale = strengths[of_head]
    basis = _basis(tangent, fit.theta)
    scaled = matrix / scale / scale[:, None]
    values, vectors = np.linalg.eigh(basis.T @ scaled @ basis)
    largest = max(float(values[-1]), 0.0)
    free = values <= _UNDETERMINED**2 * largest
    shares = np.bincount(of_head, np.sum((basis @ vectors[:, free]) ** 2, axis=1), heads)
    determined = _separable(fit) & ~unheard & (shares <= _SHARE * max(shares.max(), 1e-300))
    kept = (basis @ vectors[:, ~free]) / scale[:, None]
    extremes = max(float(values[0]), 0.0) ** 0.5, largest**0.5
    products = jacobian.jacobian(fit)
    return _Dense(products, values[~free], kept, strengths, extremes, determined)


def _unexplained_jacobian(fit: Fit) -> np.ndarray[Any, Any]:
    """QJ, (n·k·e, p·m·d): row a of an example moves by q_a ⊗ Cov_a(x) W_i with head i."""
    heads, dim = fit.heads, fit.batches.dim
    blocks = [block for chunk in fit.batches.chunks.collect() for block in chunk]
    attended = [one for chunk in fit.attended.collect() for one in chunk]
    weights = backend.to_numpy(fit.weights)
    projection = weights[: heads * dim, :].reshape(heads, dim, -1)
    parts = []
    for block, one in zip(blocks, attended, strict=True):
        queries, keys = backend.to_numpy(block.queries), backend.to_numpy(block.keys)
        n, tokens, _ = keys.shape
        shares = backend.to_numpy(one.attention).reshape(n, tokens, heads, tokens)
        about = keys[:, None, None, :, :] - (shares @ keys[:, None, :, :])[..., None, :]
        moved = np.swapaxes(about * shares[..., None], -1, -2) @ (about @ projection)
        # (n, k, m, d, e) and the query (n, k, p) -> rows (n·k, e), columns (p, m·d)
        moved = np.moveaxis(moved, -1, 2).reshape(n * tokens, weights.shape[1], 1, heads * dim)
        parts.append(moved * queries.reshape(n * tokens, 1, queries.shape[2], 1))
    whole = np.concatenate(parts).reshape(sum(len(part) for part in parts), -1)
    features = np.concatenate([backend.to_numpy(one.features) for one in attended])
    inverse = backend.to_numpy(fit.inverse)
    for _ in range(2):  # once more takes away what the ridge of the inverse leaves
        whole -= features @ (inverse @ (features.T @ whole))
    return whole.reshape(-1, math.prod(fit.theta.shape))


def _basis(tangent: Tangent, theta: Array) -> np.ndarray[Any, Any]:
    """Orthonormal directions (p·m·d, count) of a tangent space."""
    size = math.prod(theta.shape)
    if tangent.left is None:
        return np.eye(size)
    one = np.eye(size).reshape(size, *theta.shape)
    columns = [backend.to_numpy(tangent.project(backend.like(each, theta))) for each in one]
    _, vectors = np.linalg.eigh(np.stack(columns).reshape(size, size))
    return np.asarray(vectors[:, size - tangent.directions(theta) :])


# Never formed


@dataclass(frozen=True, eq=False)
class _Krylov:
    """S by products alone.

    It is `easy` if its smallest eigenvalue has been found and solves will take few products.
    """

    products: Jacobian
    tangent: Tangent
    enough: float  # share of the squared right side at which a solve stops
    strengths: np.ndarray[Any, Any]
    extremes: tuple[float, float]
    determined: np.ndarray[Any, Any]
    easy: bool

    def solve(self, right: Array) -> Array | None:
        measure, right = (
            levenberg_marquardt.Measure(self.tangent, None),
            self.tangent.project(right),
        )
        path, used = levenberg_marquardt.solve(
            self.products, measure, right, 0.0, self.enough, levenberg_marquardt.never
        )
        return path[-1] if used < levenberg_marquardt.MOST_PRODUCTS else None


def _krylov(fit: Fit, tangent: Tangent, rng: np.random.Generator) -> _Krylov:
    dim = fit.batches.dim
    start = tangent.project(backend.like(rng.standard_normal(fit.theta.shape), fit.theta))
    full = jacobian.jacobian(fit)
    scale = _head_scales(full, start, dim)
    products, small = jacobian.jacobian(fit, single=True), backend.single
    values, vector, sure = _extreme_eigenvalues(products, tangent, small(start), small(scale))
    if values[0] < _SINGLE_SUFFICES * values[-1]:
        products = full
        values, vector, sure = _extreme_eigenvalues(products, tangent, start, scale)
    largest, smallest = (float(max(value, 0.0)) for value in (values[-1], values[0]))
    strengths = backend.to_numpy(scale)[0, ::dim]
    determined = _separable(fit) & (strengths > _UNDETERMINED)
    if smallest <= _UNDETERMINED**2 * largest:
        shares = _head_sums(vector, dim)
        determined &= shares < _SHARE * shares.max()
    ratio = smallest / largest if largest > 0 else 0.0
    # Noise has parts in the right side as the roots of eigenvalues: those of the weakest direction
    # of the weakest head are this small, and count the most in the solution.
    weakest = ratio * strengths[determined].min(initial=1.0) ** 2
    enough = _SOLVED**2 * max(weakest, _UNDETERMINED)
    extremes = smallest**0.5, largest**0.5
    easy = sure and weakest > _EASY and bool(determined.all())
    return _Krylov(products, tangent, enough, strengths, extremes, determined, easy)


def _head_scales(products: Jacobian, start: Array, dim: int) -> Array:
    """How strongly the outputs answer to each head, (1, m·d), relative to the strongest head.

    A small projection makes all singular values of its head small; heads are made comparable, so
    that a free direction of one does not hide among the weak directions of another.
    """
    columns = np.arange(start.shape[1]) // dim
    answers = []
    for head in range(start.shape[1] // dim):
        only = backend.like((columns == head).astype(float)[None], start)
        alone = start * only
        size = jacobian.squared_size(products.jvp(alone))
        answers.append(size / (backend.squared_norm(alone) or 1.0))
    strength = np.sqrt(np.array(answers) / (max(answers) or 1.0))
    return backend.like(strength[columns][None], start)


def _head_sums(theta: Array, dim: int) -> np.ndarray[Any, Any]:
    """The sum of squares of each head's part of a (p, m·d) array."""
    parts = backend.to_numpy(theta).reshape(theta.shape[0], -1, dim)
    return np.asarray(np.sum(parts**2, axis=(0, 2)))


def _separable(fit: Fit) -> np.ndarray[Any, Any]:
    """Heads whose features are no combination of the other heads' features.

    The head's block of (HᵀH)⁻¹ is the inverse of the part of its features that the others do not
    explain: large where next to nothing is left.
    """
    dim = fit.batches.dim
    inverse = backend.to_numpy(varpro.ridged_inverse(fit))
    left = [
        1 / np.linalg.norm(inverse[i * dim : (i + 1) * dim, i * dim : (i + 1) * dim], 2)
        for i in range(fit.heads)
    ]
    # Whitened tokens: features that nothing else explains have mean squares of about 1/tokens.
    return np.array(left) / fit.batches.rows > 10 * varpro.SINGULAR_RIDGE


def _extreme_eigenvalues(
    products: Jacobian, tangent: low_rank.Tangent, start: Array, scale: Array
) -> tuple[np.ndarray[Any, Any], Array, bool]:
    """Ritz values of S in ascending order, the vector of the smallest, and whether it is sure.

    Directions are measured in units of 1/scale, head by head; one that is not heard at all counts
    in units of its own. The smallest value is an upper bound of the true one.

    New vectors are made orthogonal to all before, twice over, and kept in the tangent space: what
    rounding adds outside of it would grow to a vector that S sends to zero. The steps end when the
    residual of the smallest value is below a third of that value, or of what counts as zero.
    """
    xp = backend.namespace(start)
    shape, size = start.shape, math.prod(start.shape)
    units = 1 / xp.where(scale > _UNDETERMINED, scale, xp.ones_like(scale))
    basis = xp.reshape(start / backend.squared_norm(start) ** 0.5, (1, size))
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        image = products.gauss_newton_product(xp.reshape(basis[-1, :], shape) * units, tangent)
        image = xp.reshape(image * units, (size,))  # units are alike for all of a head
        diagonal.append(float(xp.sum(image * basis[-1, :])))
        for _ in range(2):
            image = image - (basis @ image) @ basis
        image = xp.reshape(tangent.project(xp.reshape(image, shape)), (size,))
        length = backend.squared_norm(image) ** 0.5
        matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        values, vectors = np.linalg.eigh(matrix)
        largest = max(float(values[-1]), 0.0)
        enough = _LANCZOS_ACCURACY * max(values[0], _UNDETERMINED**2 * largest)
        exhausted = length <= 10 * backend.epsilon(start) * largest
        sure = len(diagonal) >= _FEWEST_STEPS and length * abs(vectors[-1, 0]) < enough
        if exhausted or sure or len(diagonal) >= min(_LANCZOS_STEPS, tangent.directions(start)):
            vector = xp.reshape(backend.like(vectors[:, 0], start) @ basis, shape)
            return values, vector, exhausted or sure or len(diagonal) >= tangent.directions(start)
        beside.append(length)
        basis = xp.concat([basis, xp.reshape(image / length, (1, size))], axis=0)
