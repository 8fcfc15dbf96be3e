"""One Levenberg-Marquardt step on the reduced problem, solved by conjugate gradients.

The step solves (S + λ I) dΘ = Jᵀ r. S is well conditioned on random inputs, so that a few dozen
products suffice, and far from the solution an inexact step is as good as an exact one: the solve
stops once its residual has fallen by a factor that follows the loss, from one third at the start
to ever smaller values near an exact fit, which keeps the final convergence superlinear.

Inside the solve float32 is enough: only the direction comes from it. Residuals, gradient and the
decision to accept a step are always float64. Should the loss fall too slowly close to an exact fit,
the problem is ill conditioned and the solve goes to float64 as well.

Block preconditioners were tried (the mean over rows of C_i W_i W_jᵀ C_j, with C the covariance of
tokens under attention, with and without the projection): on random inputs they take the condition
number from about 100 to 60 and cost more than they save.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onelayer import arrays
from onelayer.arrays import Array
from onelayer.recovery import lowrank, reduced
from onelayer.recovery.problem import AnyProblem
from onelayer.recovery.reduced import Fit, Jacobian

_LEAST_DAMPING = 1e-9  # all dampings are relative to the mean curvature
_MOST_DAMPING = 1e7
_MOST_PRODUCTS = 300
_SLOW = 0.2  # a step near an exact fit that gains less than a factor of five is slow
_NEAR = 1e-6  # loss below which a fit counts as near
_IN_BASIN = 1e-3  # loss below which a fit is in the basin of a good one


@dataclass(frozen=True)
class Gait:
    """How boldly a search moves.

    Short, heavily damped steps follow the loss downhill more closely and end in bad minima less
    often, at twice the cost: with two equations per unknown (16 dimensions, 8 heads, scale 2) a
    brisk start succeeded on 1 of 4 seeds and a gentle one on 6 of 6; with four, both nearly always.
    """

    start_score: float  # standard deviation of the scores at a random start
    first_damping: float
    relaxation: float  # the damping is divided by this after a step that helps
    inexactness: float  # the share of the squared residual at which a solve may stop
    patience: int  # steps in which the loss has to fall by the share that the search expects


BRISK = Gait(0.5, first_damping=0.1, relaxation=4.0, inexactness=0.1, patience=12)
GENTLE = Gait(0.2, first_damping=1.0, relaxation=1.2, inexactness=0.3, patience=60)


@dataclass(frozen=True)
class State:
    """Where the search is: a fit, the damping for the next step, and how the last one went."""

    fit: Fit
    rank: int | None
    gait: Gait
    damping: float
    single: bool = True
    products: int = 0  # products with S that the last step took
    gain: float = 1.0  # share of the loss that the last step removed

    @property
    def current_gait(self) -> Gait:
        """The gait for the next step; in the basin of a good fit always brisk."""
        return self.gait if self.fit.loss > _IN_BASIN else BRISK

    @property
    def exhausted(self) -> bool:
        """No step helps any more, however short."""
        return self.damping > _MOST_DAMPING


def begin(problem: AnyProblem, stacked: Array, rank: int | None, gait: Gait = BRISK) -> State:
    """The state at given attention matrices (p, m·d)."""
    fit = reduced.fit(problem.cut(stacked.shape[1] // problem.dim), stacked)
    return State(fit, rank, gait, gait.first_damping)


def step(state: State, rng: np.random.Generator) -> State:
    """Try steps of growing damping until one lowers the loss, or none does."""
    fit = state.fit
    dim = fit.cut.dim
    tangent = lowrank.tangent(fit.stacked, dim, state.rank)
    gradient = tangent.project(reduced.gradient(fit))
    products = reduced.jacobian(fit, single=state.single)
    curvature = _mean_curvature(products, tangent, gradient, rng)
    gait = state.current_gait
    damping, spent = state.damping, 0
    while damping <= _MOST_DAMPING and curvature > 0:
        enough = gait.inexactness * min(1.0, 10.0 * fit.error)
        direction, used = _solve(products, tangent, gradient, damping * curvature, enough)
        spent += used
        moved = lowrank.nearest(fit.stacked + direction, dim, state.rank)
        trial = reduced.fit(fit.cut, moved)
        if trial.loss < fit.loss:
            gain = 1 - trial.loss / fit.loss
            slow = fit.loss < _NEAR and gain < 1 - _SLOW
            return replace(
                state,
                fit=trial,
                damping=max(damping / gait.relaxation, _LEAST_DAMPING),
                single=state.single and not slow,
                products=spent,
                gain=gain,
            )
        damping *= 4
    if state.single:  # the direction may have been lost in rounding
        return step(replace(state, single=False), rng)
    return replace(state, damping=np.inf, products=spent, gain=0.0)


def _mean_curvature(
    products: Jacobian, tangent: lowrank.Tangent, gradient: Array, rng: np.random.Generator
) -> float:
    """|J v|² / |v|² for one random allowed direction v: the mean eigenvalue of JᵀJ, roughly."""
    probe = arrays.like(rng.standard_normal(gradient.shape), products.weights)
    probe = tangent.project(probe)
    return products.squared_size(probe) / arrays.squared_norm(probe)


def _solve(
    products: Jacobian, tangent: lowrank.Tangent, gradient: Array, damping: float, enough: float
) -> tuple[Array, int]:
    """Conjugate gradients for (S + damping) d = gradient on the tangent space.

    They stop when the squared residual has fallen to `enough` of what it was.
    """
    xp = arrays.namespace(gradient)
    size = arrays.squared_norm(gradient) ** 0.5
    if size == 0:
        return gradient, 0
    residual = xp.astype(gradient / size, products.weights.dtype)
    direction, solution = residual, xp.zeros_like(residual)
    current, used = 1.0, 0
    while current > enough and used < _MOST_PRODUCTS:
        image = tangent.project(products.normal(direction)) + damping * direction
        bend = float(xp.sum(direction * image))
        if not bend > 0:  # rounding errors are all that is left
            break
        length = current / bend
        solution = solution + length * direction
        residual = residual - length * image
        following = arrays.squared_norm(residual)
        direction = residual + (following / current) * direction
        current, used = following, used + 1
    return xp.astype(solution, gradient.dtype) * size, used
