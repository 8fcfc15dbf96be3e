"""What can be said of a recovered layer: its error on unseen examples, and which heads are sure.

**Error.** Each held-out example has a relative squared error, capped at 1. Their mean q̂ is below
the true mean q unless a bounded average strays: P(kl(q̂, q) > log(1/δ)/n and q > q̂) <= δ (Chernoff;
Hoeffding 1963), kl the divergence of two coins. So the largest q with n kl(q̂, q) <= log(1/δ) bounds
the true mean with probability 1 - δ, whatever the distribution of the inputs. For errors of zero it
is 1 - δ^(1/n), about 3/n at δ = 0.05: no finite sample can promise more without assumptions.

**Determined heads.** The singular values of the reduced Jacobian say how the outputs answer to a
change of the attention matrices: a direction with a singular value near zero can be moved without
being noticed. Lanczos steps on S = JᵀQJ give its largest and smallest eigenvalues and the
direction of the smallest. A head is not determined if it takes part in such a direction, or if its
features are a combination of the other heads' so that the projections can be traded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelayer import arrays
from onelayer.arrays import Array
from onelayer.recovery import derivatives, lowrank, reduced
from onelayer.recovery.cut import Block
from onelayer.recovery.derivatives import Jacobian
from onelayer.recovery.problem import AnyProblem, Problem
from onelayer.recovery.reduced import Fit

_LANCZOS_STEPS = 120
_FEWEST_STEPS = 20  # before that a small value may not have shown yet
_LANCZOS_ACCURACY = 0.3
# A singular value this small relative to the largest moves outputs by less than rounding errors
# of the recovered weights: the direction cannot be told from a free one.
_UNDETERMINED = 1e-6
_SINGLE_SUFFICES = 1e-4  # eigenvalues above this, relative to the largest, are right in float32
_ENOUGH = 8.0  # equations per unknown, to judge by
_SHARE = 0.05  # of such a direction, from which on a head counts as taking part in it


@dataclass(frozen=True, eq=False)
class Certificate:
    """`error` is the relative root mean square error on `examples` held-out examples, `worst` the
    largest of an example. With probability `confidence` the mean of the examples' relative squared
    errors (each capped at 1) is at most `error_bound`, and an unseen example exceeds `worst` with
    probability at most `exceed_probability`. `determined` says for each head whether the examples
    fix it; `smallest_singular_value` is that of the reduced Jacobian, relative to the largest, with
    tokens whitened and heads brought to equal strength (an upper bound where it is very small).
    """

    examples: int
    error: float
    worst: float
    error_bound: float
    exceed_probability: float
    confidence: float
    smallest_singular_value: float
    determined: np.ndarray[Any, Any]

    @property
    def undetermined_heads(self) -> list[int]:
        """The heads that the examples do not fix."""
        return [int(head) for head in np.flatnonzero(~self.determined)]


def certify(
    fit: Fit,
    fitted: AnyProblem,
    held_out: Problem,
    rank: int | None,
    rng: np.random.Generator,
    delta: float,
) -> Certificate:
    """The certificate of a fit: one pass over the held-out examples and some products with S."""
    wrong, size = _errors(fit, held_out)
    relative = np.divide(wrong, size, out=np.where(wrong > 0, np.inf, 0.0), where=size > 0)
    count = len(wrong)
    smallest, determined = determination(_thinned(fit, fitted, rank), rank, rng)
    return Certificate(
        examples=count,
        error=float(np.sqrt(wrong.sum() / size.sum())) if size.sum() > 0 else float(wrong.sum()),
        worst=float(np.sqrt(relative.max())),
        error_bound=mean_bound(float(np.minimum(relative, 1.0).mean()), count, delta),
        exceed_probability=float(1 - delta ** (1 / count)),
        confidence=1 - delta,
        smallest_singular_value=smallest,
        determined=determined,
    )


def _thinned(fit: Fit, fitted: AnyProblem, rank: int | None) -> Fit:
    """The same heads on no more examples than it takes to judge how well they are determined.

    A fit to fewer examples stays as it is: heads that these determine are determined by all.
    """
    wanted = _ENOUGH * fitted.unknowns(fit.heads, rank)
    if wanted > 0.8 * fit.cut.equations:
        return fit
    share = wanted / fitted.equations
    few = fitted.sample(max(1, int(share * fitted.examples)))
    return reduced.fit(few.cut(fit.heads), fit.stacked)


def _errors(fit: Fit, problem: Problem) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Squared error and squared size of the output, example by example."""
    xp = arrays.namespace(fit.stacked)
    blocks = problem.blocks(fit.heads)

    def squares(block: Block, rows: Array) -> np.ndarray[Any, Any]:
        rows = xp.reshape(rows, (block.keys.shape[0], -1))
        return arrays.to_numpy(xp.sum(rows * rows, axis=1))

    residuals = reduced.residuals_on(fit, blocks)
    wrong = [squares(*pair) for pair in zip(blocks, residuals, strict=True)]
    size = [squares(block, block.outputs) for block in blocks]
    return np.concatenate(wrong), np.concatenate(size)


def mean_bound(mean: float, count: int, delta: float) -> float:
    """The largest q with count · kl(mean, q) <= log(1/delta), by bisection.

    >>> round(mean_bound(0.0, 100, 0.05), 4)  # 1 - 0.05^(1/100)
    0.0295
    """
    allowed = np.log(1 / delta) / count
    low, high = mean, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if _divergence(mean, middle) > allowed else (middle, high)
    return high


def _divergence(p: float, q: float) -> float:
    """kl(p, q) of two coins."""
    if q >= 1.0:
        return 0.0 if p >= 1.0 else np.inf
    heads = p * np.log(p / q) if p > 0 else 0.0
    tails = (1 - p) * np.log((1 - p) / (1 - q)) if p < 1 else 0.0
    return float(heads + tails)


def determination(
    fit: Fit, rank: int | None, rng: np.random.Generator
) -> tuple[float, np.ndarray[Any, Any]]:
    """The smallest singular value relative to the largest, and which heads are determined."""
    dim = fit.cut.dim
    tangent = lowrank.tangent(fit.stacked, dim, rank)
    start = tangent.project(arrays.like(rng.standard_normal(fit.stacked.shape), fit.stacked))
    scale = _head_scales(derivatives.jacobian(fit), start, dim)
    single, small = derivatives.jacobian(fit, single=True), arrays.single
    values, vector = _extreme_eigenvalues(single, tangent, small(start), small(scale))
    if values[0] < _SINGLE_SUFFICES * values[-1]:
        values, vector = _extreme_eigenvalues(derivatives.jacobian(fit), tangent, start, scale)
    largest, smallest = (float(max(value, 0.0)) ** 0.5 for value in (values[-1], values[0]))
    unheard = arrays.to_numpy(scale)[0, ::dim] <= _UNDETERMINED
    determined = _separable(fit) & ~unheard
    # With noise of this error an estimate strays by error / singular value along the weakest
    # direction: by half the size of a head or more, and the head is anybody's guess.
    sizes = _head_sums(fit.stacked * scale, dim) ** 0.5
    free = smallest <= _UNDETERMINED * largest or smallest * sizes.min() < 2 * fit.error
    if free:
        shares = _head_sums(vector, dim)
        determined &= shares < _SHARE * shares.max()
    return smallest / largest if largest > 0 else 0.0, determined


def _head_scales(products: Jacobian, start: Array, dim: int) -> Array:
    """How strongly the outputs answer to each head, (1, m·d), relative to the strongest head.

    A small projection makes all singular values of its head small; heads are made comparable, so
    that a free direction of one does not hide among the weak directions of another.
    """
    columns = np.arange(start.shape[1]) // dim
    answers = []
    for head in range(start.shape[1] // dim):
        only = arrays.like((columns == head).astype(float)[None], start)
        alone = start * only
        size = derivatives.squared_size(products.pushed(alone))
        answers.append(size / (arrays.squared_norm(alone) or 1.0))
    strength = np.sqrt(np.array(answers) / (max(answers) or 1.0))
    return arrays.like(strength[columns][None], start)


def _head_sums(stacked: Array, dim: int) -> np.ndarray[Any, Any]:
    """The sum of squares of each head's part of a (p, m·d) array."""
    parts = arrays.to_numpy(stacked).reshape(stacked.shape[0], -1, dim)
    return np.asarray(np.sum(parts**2, axis=(0, 2)))


def _separable(fit: Fit) -> np.ndarray[Any, Any]:
    """Heads whose features are no combination of the other heads' features.

    The head's block of (HᵀH)⁻¹ is the inverse of the part of its features that the others do not
    explain: large where next to nothing is left.
    """
    dim = fit.cut.dim
    inverse = arrays.to_numpy(reduced.ridged_inverse(fit))
    left = [
        1 / np.linalg.norm(inverse[i * dim : (i + 1) * dim, i * dim : (i + 1) * dim], 2)
        for i in range(fit.heads)
    ]
    # Whitened tokens: features that nothing else explains have mean squares of about 1/tokens.
    return np.array(left) / fit.cut.rows > 10 * reduced.SINGULAR_RIDGE


def _extreme_eigenvalues(
    products: Jacobian, tangent: lowrank.Tangent, start: Array, scale: Array
) -> tuple[np.ndarray[Any, Any], Array]:
    """Ritz values of S in ascending order and the vector of the smallest (Lanczos).

    Directions are measured in units of 1/scale, head by head; one that is not heard at all counts
    in units of its own. The smallest value is an upper bound of the true one.

    New vectors are made orthogonal to all before, twice over, and kept in the tangent space: what
    rounding adds outside of it would grow to a vector that S sends to zero. The steps end when the
    residual of the smallest value is below a third of that value, or of what counts as zero.
    """
    xp = arrays.namespace(start)
    shape, size = start.shape, math.prod(start.shape)
    units = 1 / xp.where(scale > _UNDETERMINED, scale, xp.ones_like(scale))
    basis = xp.reshape(start / arrays.squared_norm(start) ** 0.5, (1, size))
    diagonal: list[float] = []
    beside: list[float] = []
    while True:
        image = products.curved(tangent, xp.reshape(basis[-1, :], shape) * units)
        image = xp.reshape(image * units, (size,))  # units are alike for all of a head
        diagonal.append(float(xp.sum(image * basis[-1, :])))
        for _ in range(2):
            image = image - (basis @ image) @ basis
        image = xp.reshape(tangent.project(xp.reshape(image, shape)), (size,))
        length = arrays.squared_norm(image) ** 0.5
        matrix = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
        values, vectors = np.linalg.eigh(matrix)
        largest = max(float(values[-1]), 0.0)
        enough = _LANCZOS_ACCURACY * max(values[0], _UNDETERMINED**2 * largest)
        exhausted = length <= 10 * arrays.epsilon(start) * largest
        sure = len(diagonal) >= _FEWEST_STEPS and length * abs(vectors[-1, 0]) < enough
        if exhausted or sure or len(diagonal) >= min(_LANCZOS_STEPS, tangent.directions(start)):
            return values, xp.reshape(arrays.like(vectors[:, 0], start) @ basis, shape)
        beside.append(length)
        basis = xp.concat([basis, xp.reshape(image / length, (1, size))], axis=0)
