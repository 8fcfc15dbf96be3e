"""How outputs respond to changes of theta: S = JᵀQJ, solved and analysed.

With noise u in the outputs the best theta moves by S⁻¹ JᵀQ u (see `varpro.py`). Where S is small
the heads are badly determined, and where it is zero, not at all. Small problems form S and
decompose it, which leaves nothing undecided. Large ones never form it: Lanczos steps give its
largest and smallest eigenvalues and the direction of the smallest, conjugate gradients solve.

A head is free if it takes part in a direction in which S is zero to rounding, or if its features
are a combination of the other heads', so that projections can be traded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.array.krylov import Ritz, conjugate_gradients, lanczos
from onelayer.heads import dense, low_rank
from onelayer.heads.low_rank import Tangent
from onelayer.recovery.gauss_newton import jacobian, varpro
from onelayer.recovery.gauss_newton.jacobian import Jacobian
from onelayer.recovery.gauss_newton.levenberg_marquardt import SETTINGS
from onelayer.recovery.gauss_newton.varpro import Fit

Values: TypeAlias = np.ndarray[Any, Any]

_MOST_LANCZOS_STEPS = 120
_FEWEST_LANCZOS_STEPS = 20  # before that a small value may not have shown yet
_LANCZOS_ACCURACY = 0.3
# A singular value this small relative to the largest moves outputs by less than rounding errors
# of the recovered weights: the direction cannot be distinguished from a free one.
_UNDETERMINED = 1e-6
_SINGLE_SUFFICES = 1e-4  # eigenvalues above this, relative to the largest, are right in float32
_SHARE = 0.05  # of such a direction, from which on a head counts as taking part in it
# Operations that it takes to form S: below the first it is always formed, as Lanczos steps cost as
# much; below the second only where these leave something undecided.
_CHEAP, _BEARABLE = 2e8, 5e10
_EASY = 1e-5  # eigenvalues above this, relative to the largest, are solved for in few products
_SOLVED = 0.2  # the share of the weakest direction's part in the right side that may be left over


@dataclass(frozen=True, eq=False)
class Sensitivity:
    """S at a fit, restricted to the tangent space of the heads."""

    products: Jacobian  # as precise as S requires
    strengths: Values  # (m,), how strongly outputs respond to each head, relative to the strongest
    extremes: tuple[float, float]  # singular values of J with heads brought to equal strength
    determined: Values  # (m,), which heads take part in no free direction
    solve: Callable[[Array], Array | None]  # S⁻¹ times a direction, free ones left out
    formed: bool  # whether S was formed and decomposed
    easy: bool = True  # whether the extremes are certain and solves take few products


def sensitivity(fit: Fit, rank: int | None, rng: np.random.Generator) -> Sensitivity:
    """The sensitivity of a fit with attention matrices of this rank."""
    tangent = low_rank.tangent(fit.theta, fit.batches.dim, rank)
    operations = float(fit.batches.equations) * math.prod(fit.theta.shape) ** 2
    if operations <= _CHEAP:
        return _dense(fit, tangent)
    found = _krylov(fit, tangent, rng)
    return found if found.easy or operations > _BEARABLE else _dense(fit, tangent)


def _dense(fit: Fit, tangent: Tangent) -> Sensitivity:
    """S formed and decomposed."""
    heads, formed = fit.heads, _unexplained_jacobian(fit)
    matrix = formed.T @ formed
    # Heads are brought to equal strength: a weak one is not free for being weak.
    of_head = dense.head_index(fit.theta, fit.batches.dim).reshape(-1)
    strength = np.bincount(of_head, np.diag(matrix), heads) ** 0.5
    idle = strength <= _UNDETERMINED * strength.max()
    strengths = np.where(idle, 1.0, strength / (strength.max() or 1.0))
    scale = strengths[of_head]
    basis = _basis(tangent, fit.theta)
    scaled = matrix / scale / scale[:, None]
    values, vectors = np.linalg.eigh(basis.T @ scaled @ basis)
    largest = max(float(values[-1]), 0.0)
    free = values <= _UNDETERMINED**2 * largest
    shares = np.bincount(of_head, np.sum((basis @ vectors[:, free]) ** 2, axis=1), heads)
    determined = _separable(fit) & ~idle & (shares <= _SHARE * max(shares.max(), 1e-300))
    kept = (basis @ vectors[:, ~free]) / scale[:, None]
    extremes = max(float(values[0]), 0.0) ** 0.5, largest**0.5

    def solve(right: Array) -> Array:
        flat = backend.to_numpy(right).reshape(-1)
        found = kept @ ((flat @ kept) / values[~free])
        return backend.like(found.reshape(right.shape), right)

    products = jacobian.jacobian(fit)
    return Sensitivity(products, strengths, extremes, determined, solve, formed=True)


def _unexplained_jacobian(fit: Fit) -> Values:
    """QJ, (n·k·e, numbers in theta): row a moves by q_a ⊗ Cov_a(x) W_i with head i."""
    blocks = [block for chunk in fit.batches.chunks.collect() for block in chunk]
    attended = [one for chunk in fit.attended.collect() for one in chunk]
    projection = backend.to_numpy(fit.projection)
    parts = []
    for block, one in zip(blocks, attended, strict=True):
        queries, keys = backend.to_numpy(block.queries), backend.to_numpy(block.keys)
        n, tokens, _ = keys.shape
        shares = backend.to_numpy(one.attention).reshape(n, tokens, fit.heads, tokens)
        about = keys[:, None, None, :, :] - (shares @ keys[:, None, :, :])[..., None, :]
        moved = np.swapaxes(about * shares[..., None], -1, -2) @ (about @ projection)
        parts.append(dense.outer(queries, moved))
    whole = np.concatenate(parts)
    shape, whole = whole.shape, whole.reshape(len(whole), -1)
    features = np.concatenate([backend.to_numpy(one.features) for one in attended])
    inverse = backend.to_numpy(fit.inverse)
    for _ in range(2):  # once more takes away what the ridge of the inverse leaves
        whole -= features @ (inverse @ (features.T @ whole))
    return whole.reshape(-1, shape[2])


def _basis(tangent: Tangent, theta: Array) -> Values:
    """Orthonormal directions (numbers in theta, count) of a tangent space."""
    size, count = math.prod(theta.shape), tangent.dimension(theta)
    if count == size:
        return np.eye(size)
    one = np.eye(size).reshape(size, *theta.shape)
    columns = [backend.to_numpy(tangent.project(backend.like(each, theta))) for each in one]
    _, vectors = np.linalg.eigh(np.stack(columns).reshape(size, size))
    return np.asarray(vectors[:, size - count :])


def _krylov(fit: Fit, tangent: Tangent, rng: np.random.Generator) -> Sensitivity:
    """S by products alone."""
    of_head = dense.head_index(fit.theta, fit.batches.dim)
    start = tangent.project(backend.like(rng.standard_normal(fit.theta.shape), fit.theta))
    full = jacobian.jacobian(fit)
    strengths = _strengths(full, start, of_head)
    scale = backend.like(strengths[of_head], start)
    products, small = jacobian.jacobian(fit, single=True), backend.single
    values, vector, sure = _extreme_eigenvalues(products, tangent, small(start), small(scale))
    if values[0] < _SINGLE_SUFFICES * values[-1]:
        products = full
        values, vector, sure = _extreme_eigenvalues(products, tangent, start, scale)
    largest, smallest = (float(max(value, 0.0)) for value in (values[-1], values[0]))
    determined = _separable(fit) & (strengths > _UNDETERMINED)
    if smallest <= _UNDETERMINED**2 * largest:
        shares = np.bincount(of_head.ravel(), backend.to_numpy(vector).ravel() ** 2)
        determined &= shares < _SHARE * shares.max()
    ratio = smallest / largest if largest > 0 else 0.0
    # Noise has parts in the right side as the roots of eigenvalues: those of the weakest direction
    # of the weakest head are this small, and count the most in the solution.
    weakest = ratio * strengths[determined].min(initial=1.0) ** 2
    tolerance = _SOLVED**2 * max(weakest, _UNDETERMINED)
    extremes = smallest**0.5, largest**0.5
    easy = sure and weakest > _EASY and bool(determined.all())
    product, most = partial(products.gauss_newton_product, space=tangent), SETTINGS.most_products

    def solve(right: Array) -> Array | None:
        right, reference = tangent.project(right), products.weights
        path, used = conjugate_gradients(product, right, tolerance, most, reference=reference)
        return path[-1] if used < most else None

    return Sensitivity(products, strengths, extremes, determined, solve, formed=False, easy=easy)


def _strengths(products: Jacobian, start: Array, of_head: Values) -> Values:
    """How strongly the outputs respond to each head (m,), relative to the strongest head.

    A small projection makes all singular values of its head small; heads are made comparable, so
    that a free direction of one does not hide among the weak directions of another.
    """
    responses = []
    for head in range(int(of_head.max()) + 1):
        alone = start * backend.like((of_head == head).astype(float), start)
        size = varpro.squared_size(products.jvp(alone))
        responses.append(size / (backend.squared_norm(alone) or 1.0))
    return np.sqrt(np.array(responses) / (max(responses) or 1.0))


def _separable(fit: Fit) -> Values:
    """Heads whose features are no combination of the other heads' features.

    The head's block of (HᵀH)⁻¹ is the inverse of the part of its features that the others do not
    explain: large where next to nothing is left.
    """
    blocks = map(backend.to_numpy, varpro.inverse_blocks(fit))
    left = np.array([1 / np.linalg.norm(block, 2) for block in blocks])
    # Whitened tokens: features that nothing else explains have mean squares of about 1/tokens.
    return np.asarray(left / fit.batches.rows > 10 * varpro.SINGULAR_RIDGE)


def _extreme_eigenvalues(products: Jacobian, tangent: Tangent, start: Array, scale: Array) -> Ritz:
    """Ritz values of S with directions in units of 1/scale, head by head.

    A head to which outputs do not respond at all has units of its own. Lanczos steps end when the
    residual of the smallest value is below a third of that value, or of what counts as zero.
    """
    xp = backend.namespace(start)
    units = 1 / xp.where(scale > _UNDETERMINED, scale, xp.ones_like(scale))

    def product(direction: Array) -> Array:
        return products.gauss_newton_product(direction * units, tangent) * units

    def accurate(values: Values, residual: float) -> bool:
        zero = _UNDETERMINED**2 * max(float(values[-1]), 0.0)
        return bool(residual < _LANCZOS_ACCURACY * max(values[0], zero))

    steps = (_FEWEST_LANCZOS_STEPS, _MOST_LANCZOS_STEPS)
    return lanczos(product, start, tangent.dimension(start), accurate, steps, tangent.project)
