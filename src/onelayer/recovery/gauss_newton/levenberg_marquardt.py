"""One Levenberg-Marquardt step on the reduced problem, solved by conjugate gradients.

The step solves (S + λ I) dΘ = Jᵀ r. S is well conditioned on random inputs, so that a few dozen
products suffice, and far from the solution an inexact step is as good as an exact one: the solve
stops once its residual has fallen by a factor that follows the loss, from one third at the start
to ever smaller values near an exact fit, which keeps the final convergence superlinear.

Inside the solve float32 is enough, and on a GPU the three digits of its fastest products: only the
direction comes from it. Residuals, gradient and the decision to accept a step are float64.
Should the loss fall too slowly close to an exact fit, the problem is ill conditioned and the solve
goes to float32, and then to float64. Large problems are fitted in float32 too while they are far
from a fit. There, on a CPU, solves see a quarter as many random mixtures of the outputs: most of
the cost of a product goes by with outputs, and S of the mixtures is S on average. In 384 dimensions
with 12 heads of rank 32 a product took half the time, and steps gained as much as with all outputs.

Block preconditioners were tried (the mean over rows of C_i W_i W_jᵀ C_j, with C the covariance of
tokens under attention, with and without the projection): on random inputs they take the condition
number from about 100 to 60 and cost more than they save. Where heads differ they pay: large
problems use the simplest of them, see `preconditioner.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np

from onelayer.array import backend, threads
from onelayer.array.backend import Array
from onelayer.recovery.gauss_newton import jacobian, preconditioner, varpro
from onelayer.recovery.gauss_newton.batches import Batches
from onelayer.recovery.gauss_newton.jacobian import Directions, Jacobian
from onelayer.recovery.gauss_newton.low_rank import Tangent
from onelayer.recovery.gauss_newton.preconditioner import Answer
from onelayer.recovery.gauss_newton.varpro import Fit

_LEAST_DAMPING = 1e-9  # all dampings are relative to the mean curvature
_MOST_DAMPING = 1e7
MOST_PRODUCTS = 300
_SLOW = 0.2  # a step near an exact fit that gains less than a factor of five is slow
_NEAR_LOSS = 1e-6  # below which a fit counts as near
_ROUGH_ENOUGH = 1e-4  # the share of the squared residual that three digits can reach
_COARSE = 2e-3  # error above which large problems are fitted in float32
_SKETCHED = 2e-2  # error above which solves on a CPU see mixtures of the outputs
_OUTPUTS_IN_A_MIXTURE, _MANY_OUTPUTS = 4, 128
_BASIN_LOSS = 1e-3  # below which a fit is in the basin of a good one


@dataclass(frozen=True)
class StepPolicy:
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


FAST = StepPolicy(0.5, first_damping=0.1, relaxation=4.0, inexactness=0.1, patience=12)
CAUTIOUS = StepPolicy(0.2, first_damping=1.0, relaxation=1.2, inexactness=0.3, patience=60)


@dataclass(frozen=True)
class SolverState:
    """Where the search is: a fit, the damping for the next step, and how the last one went."""

    fit: Fit
    allowed: Directions
    policy: StepPolicy
    damping: float
    weighted: bool = False  # whether solves are preconditioned by how strongly outputs answer
    rough: bool = False  # whether the next solve may have three digits
    single: bool = True  # or float32
    products: int = 0  # products with S that the last step took
    gain: float = 1.0  # share of the loss that the last step removed

    @property
    def current_policy(self) -> StepPolicy:
        """The policy for the next step; in the basin of a good fit always brisk."""
        return self.policy if self.fit.loss > _BASIN_LOSS else FAST

    @property
    def exhausted(self) -> bool:
        """No step helps any more, however short."""
        return self.damping > _MOST_DAMPING


def never() -> bool:
    """There is all the time in the world."""
    return False


def begin(
    batches: Batches,
    theta: Array,
    allowed: Directions | None = None,
    policy: StepPolicy = FAST,
    weighted: bool = False,
    coarse: bool = False,
) -> SolverState:
    """The state at given attention matrices (p, m·d), which may go anywhere by default.

    Far from a fit a `coarse` search is content with float32.
    """
    fit = _fitted(batches, theta, coarse)
    rough = backend.gpu_memory(theta) is not None
    allowed = allowed or Tangent(batches.dim)
    return SolverState(fit, allowed, policy, policy.first_damping, weighted, rough=rough)


def _fitted(batches: Batches, theta: Array, coarse: bool) -> Fit:
    """The fit at given heads, in float32 if that may be coarse and is enough."""
    fit = varpro.fit(batches, theta, single=coarse)
    return varpro.fit(batches, theta) if coarse and fit.error < _COARSE else fit


def in_full(state: SolverState) -> SolverState:
    """The same state with its fit in float64."""
    fit = state.fit
    return replace(state, fit=varpro.fit(fit.batches, fit.theta)) if fit.single else state


def step(
    state: SolverState,
    rng: np.random.Generator,
    late: Callable[[], bool] = never,
    exact: float = 0.0,
) -> SolverState:
    """Try steps of growing damping until one lowers the loss, or none does, or it is too late.

    At an error of `exact` or less rounding may be all that is left: the first that fails is the
    last in its precision.
    """
    fit = state.fit
    gradient, products = _gradient_and_products(state)
    measure = Measure(
        state.allowed, preconditioner.answer(fit, products) if state.weighted else None
    )
    if _may_be_sketched(state):
        products = products.sketched(fit.batches.out_dim // _OUTPUTS_IN_A_MIXTURE, rng)
    curvature = _mean_curvature(products, measure, gradient, rng)
    policy = state.current_policy
    enough = policy.inexactness * min(1.0, 10.0 * fit.error)
    if state.rough:
        enough = max(enough, _ROUGH_ENOUGH)
    damping, spent = state.damping, 0
    while damping <= _MOST_DAMPING and curvature > 0 and not late():
        with threads.allow_tf32(gradient) if state.rough else nullcontext():
            path, used = solve(products, measure, gradient, damping * curvature, enough, late)
        spent += used
        # Where a product costs more than a fit the whole path is tried, from its end: the shorter
        # it is the closer to the gradient it stays, and no further product is needed.
        for direction in reversed(path) if state.weighted else path[-1:]:
            moved, allowed = state.allowed.retract(fit.theta, direction)
            trial = _fitted(fit.batches, moved, coarse=fit.single)
            if trial.loss < fit.loss:
                gain = 1 - trial.loss / fit.loss
                slow = fit.loss < _NEAR_LOSS and gain < 1 - _SLOW
                following = replace(
                    state,
                    fit=trial,
                    allowed=allowed,
                    damping=max(damping / policy.relaxation, _LEAST_DAMPING),
                    products=spent,
                    gain=gain,
                )
                return _finer(following) if slow else following
        if fit.error <= exact:
            break
        damping *= 4
    if late():
        return replace(state, products=spent, gain=0.0)
    if state.rough or state.single:  # the direction may have been lost in rounding
        finer = _finer(state)
        return step(finer if finer.single else in_full(finer), rng, late, exact)
    exhausted = np.inf if fit.error > exact else state.damping
    return replace(state, damping=exhausted, products=spent, gain=0.0)


def _gradient_and_products(state: SolverState) -> tuple[Array, Jacobian]:
    """The allowed part of Jᵀ r as precise as the fit, and products as precise as the solve.

    One after the other where they differ: both take memory.
    """
    fit = state.fit
    if fit.single:
        products = jacobian.jacobian(fit)
        return jacobian.gradient(fit, products, state.allowed), products
    gradient = jacobian.gradient(fit, allowed=state.allowed)
    return gradient, jacobian.jacobian(fit, single=state.single)


def _may_be_sketched(state: SolverState) -> bool:
    """Whether a solve may see mixtures of the outputs: far from a fit, on a CPU, at first."""
    fit = state.fit
    first = fit.single and state.single and backend.gpu_memory(fit.theta) is None
    return first and fit.error > _SKETCHED and fit.batches.out_dim >= _MANY_OUTPUTS


def _finer(state: SolverState) -> SolverState:
    """The same with the next precision of solves: float32 after three digits, then float64."""
    return replace(state, rough=False, single=state.rough)


@dataclass(frozen=True)
class Measure:
    """How allowed directions are measured: by |d|², or by how strongly outputs answer to them."""

    allowed: Directions
    answer: Answer | None

    def times(self, direction: Array) -> Array:
        """The matrix of the measure times an allowed direction."""
        if self.answer is None:
            return direction
        return self.allowed.project(self.answer.times(direction, 1.0))

    def over(self, direction: Array) -> Array:
        """Nearly its inverse times an allowed direction."""
        if self.answer is None:
            return direction
        return self.allowed.project(self.answer.times(direction, -1.0))


def _mean_curvature(
    products: Jacobian, measure: Measure, gradient: Array, rng: np.random.Generator
) -> float:
    """|J v|² / |v|² for one random allowed direction v: the mean eigenvalue of JᵀJ, roughly."""
    probe = backend.like(rng.standard_normal(gradient.shape), products.weights)
    probe = measure.allowed.project(probe)
    size = float(backend.namespace(probe).sum(probe * measure.times(probe)))
    return jacobian.squared_size(measure.allowed.jvp(products, probe)) / size


def solve(
    products: Jacobian,
    measure: Measure,
    gradient: Array,
    damping: float,
    enough: float,
    late: Callable[[], bool],
) -> tuple[list[Array], int]:
    """Conjugate gradients for (S + damping) d = gradient on the allowed directions.

    Damping is in units of the measure, which preconditions too. They stop when the squared
    residual, by the measure, has fallen to `enough` of what it was. The path to the solution is
    given: where it was after 1, 2, 4, .. products, and its end.
    """
    xp = backend.namespace(gradient)
    size = float(xp.sum(gradient * measure.over(gradient))) ** 0.5
    if size == 0:
        return [gradient], 0
    residual = xp.astype(gradient / size, products.weights.dtype)
    direction, solution = measure.over(residual), xp.zeros_like(residual)
    current, used, path = 1.0, 0, []
    while current > enough and used < MOST_PRODUCTS and not late():
        image = products.gauss_newton_product(direction, measure.allowed)
        image = image + damping * measure.times(direction)
        bend = float(xp.sum(direction * image))
        if not bend > 0:  # rounding errors are all that is left
            break
        if used and used & (used - 1) == 0:
            path.append(solution)
        length = current / bend
        solution = solution + length * direction
        residual = residual - length * image
        ready = measure.over(residual)
        following = float(xp.sum(residual * ready))
        direction = ready + (following / current) * direction
        current, used = following, used + 1
    return [xp.astype(one, gradient.dtype) * size for one in [*path, solution]], used
