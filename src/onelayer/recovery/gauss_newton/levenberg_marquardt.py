"""One Levenberg-Marquardt step on the reduced problem, solved by conjugate gradients.

The step solves (S + λ I) dΘ = Jᵀ r. S is well conditioned on random inputs, so that a few dozen
products suffice, and far from the solution an inexact step is as good as an exact one: the solve
stops once its residual has fallen by a factor that follows the loss, from one third at the start
to ever smaller values near an exact fit, which keeps the final convergence superlinear.

Inside the solve float32 is enough, and on a GPU the three digits of its fastest products: only the
direction comes from it. Residuals, gradient and the decision to accept a step are float64. Should
the loss fall too slowly close to an exact fit, the problem is ill conditioned and the solve is
repeated in float32, and then in float64. Large problems are fitted in float32 too while they are
far from a fit.

Block preconditioners were tried (the mean over rows of C_i W_i W_jᵀ C_j, with C the covariance of
tokens under attention, with and without the projection): on random inputs they reduce the condition
number from about 100 to 60 and cost more than they save. They pay where heads differ: large
problems use the simplest of them, see `preconditioner.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from onelayer.array import backend, threads
from onelayer.array.backend import Array
from onelayer.array.krylov import conjugate_gradients, never
from onelayer.heads.base import TangentSpace
from onelayer.heads.dense import FULL_SPACE
from onelayer.recovery.gauss_newton import jacobian, varpro
from onelayer.recovery.gauss_newton.batches import Batches
from onelayer.recovery.gauss_newton.jacobian import Jacobian
from onelayer.recovery.gauss_newton.preconditioner import Metric, preconditioner
from onelayer.recovery.gauss_newton.varpro import Fit

T = TypeVar("T")


@dataclass(frozen=True)
class SolverSettings:
    """Numbers that steer every step. Dampings are relative to the mean curvature."""

    least_damping: float = 1e-9
    most_damping: float = 1e7  # no step is tried beyond it
    most_products: int = 300  # in one solve
    last_share: float = 0.1  # of the target error, that the last solve may leave
    slow: float = 0.2  # a step near an exact fit should leave no more than this share of the loss
    near_loss: float = 1e-6  # loss below which a fit counts as near
    rough_tolerance: float = 1e-4  # the share of the squared residual that three digits can reach
    coarse_error: float = 2e-3  # error above which large problems are fitted in float32
    basin_loss: float = 1e-3  # below which a fit is in the basin of a good one


SETTINGS = SolverSettings()


@dataclass(frozen=True)
class StepPolicy:
    """Damping and stopping settings of a search.

    Short, heavily damped steps follow the loss downhill more closely and end in bad minima less
    often, at twice the cost: with two equations per unknown (16 dimensions, 8 heads, scale 2) a
    fast start succeeded on 1 of 4 seeds and a cautious one on 6 of 6; with four, both nearly
    always.
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
    """A fit, the damping for the next step, and how the last step went."""

    fit: Fit
    space: TangentSpace
    policy: StepPolicy
    damping: float
    preconditioned: bool = False
    rough: bool = False  # whether the next solve may have three digits
    single: bool = True  # or float32
    products: int = 0  # products with S that the last step took
    gain: float = 1.0  # share of the loss that the last step removed

    @property
    def current_policy(self) -> StepPolicy:
        """The policy for the next step; in the basin of a good fit always the fast one."""
        return self.policy if self.fit.loss > SETTINGS.basin_loss else FAST

    @property
    def exhausted(self) -> bool:
        """Whether no step of any length helps."""
        return self.damping > SETTINGS.most_damping


def begin(
    batches: Batches,
    theta: Array,
    space: TangentSpace = FULL_SPACE,
    policy: StepPolicy = FAST,
    preconditioned: bool = False,
    coarse: bool = False,
) -> SolverState:
    """The state at given parameters; a `coarse` search is in float32 while far from a fit."""
    fit = _fitted(batches, theta, coarse)
    rough = backend.gpu_memory(theta) is not None
    return SolverState(fit, space, policy, policy.first_damping, preconditioned, rough=rough)


def _fitted(batches: Batches, theta: Array, coarse: bool) -> Fit:
    """The fit at theta, in float32 if that may be coarse and is enough."""
    fit = varpro.fit(batches, theta, single=coarse)
    return varpro.fit(batches, theta) if coarse and fit.error < SETTINGS.coarse_error else fit


def in_full(state: SolverState) -> SolverState:
    """The same state with its fit in float64."""
    fit = state.fit
    return replace(state, fit=varpro.fit(fit.batches, fit.theta)) if fit.single else state


def damped_search(
    attempt: Callable[[float], T | None],
    damping: float,
    most: float,
    go_on: Callable[[], bool] = lambda: True,
) -> tuple[T | None, float]:
    """Attempts with growing damping until one succeeds: its result, or None, and the damping."""
    while damping <= most and go_on():
        found = attempt(damping)
        if found is not None:
            return found, damping
        damping *= 4
    return None, damping


def step(
    state: SolverState,
    rng: np.random.Generator,
    stop: Callable[[], bool] = never,
    exact: float = 0.0,
    target: float = 0.0,
) -> SolverState:
    """Try steps of growing damping until one lowers the loss, none does, or `stop()` is true.

    Solves are no finer than it takes to reach an error of `target`.

    At an error of `exact` or less only rounding may be left: the first failed attempt is the last
    in its precision.
    """
    fit, policy = state.fit, state.current_policy
    gradient, products = _gradient_and_products(state)
    metric = Metric(state.space, preconditioner(fit, products) if state.preconditioned else None)
    curvature = _mean_curvature(products, metric, gradient, rng)
    tolerance = policy.inexactness * min(1.0, 10.0 * fit.error)
    if fit.error > target:
        tolerance = max(tolerance, (SETTINGS.last_share * target / fit.error) ** 2)
    if state.rough:
        tolerance = max(tolerance, SETTINGS.rough_tolerance)
    used: list[int] = []  # products of each attempt

    def attempt(damping: float) -> tuple[Fit, TangentSpace] | None:
        with threads.allow_tf32(gradient) if state.rough else nullcontext():
            path, count = solve(products, metric, gradient, damping * curvature, tolerance, stop)
        used.append(count)
        # Where a product costs more than a fit the whole path is tried, from its end: the shorter
        # it is the closer to the gradient it stays, and no further product is needed.
        for direction in reversed(path) if state.preconditioned else path[-1:]:
            theta, space = state.space.retract(fit.theta, direction)
            trial = _fitted(fit.batches, theta, coarse=fit.single)
            if trial.loss < fit.loss:
                return trial, space
        return None

    def go_on() -> bool:
        return curvature > 0 and not (used and fit.error <= exact) and not stop()

    found, damping = damped_search(attempt, state.damping, SETTINGS.most_damping, go_on)
    if found is not None:
        damping = max(damping / policy.relaxation, SETTINGS.least_damping)
        return _accepted(state, *found, damping, sum(used))
    if stop():
        return replace(state, products=sum(used), gain=0.0)
    if state.rough or state.single:  # the direction may have been lost in rounding
        finer = _finer(state)
        return step(finer if finer.single else in_full(finer), rng, stop, exact, target)
    exhausted = np.inf if fit.error > exact else state.damping
    return replace(state, damping=exhausted, products=sum(used), gain=0.0)


def _accepted(
    state: SolverState, trial: Fit, space: TangentSpace, damping: float, products: int
) -> SolverState:
    """The state after a step that lowered the loss; solves become finer if it gained too little."""
    gain = 1 - trial.loss / state.fit.loss
    slow = state.fit.loss < SETTINGS.near_loss and gain < 1 - SETTINGS.slow
    state = _finer(state) if slow else state
    return replace(state, fit=trial, space=space, damping=damping, products=products, gain=gain)


def _gradient_and_products(state: SolverState) -> tuple[Array, Jacobian]:
    """Jᵀ r on the space, as precise as the fit, and products as precise as the solve."""
    fit, space = state.fit, state.space
    if fit.single:
        products = jacobian.jacobian(fit)
        return jacobian.gradient(fit, products, space), products
    # One after the other: both take memory.
    return jacobian.gradient(fit, space=space), jacobian.jacobian(fit, single=state.single)


def _finer(state: SolverState) -> SolverState:
    """The same with the next precision of solves: float32 after three digits, then float64."""
    return replace(state, rough=False, single=state.rough)


def _mean_curvature(
    products: Jacobian, metric: Metric, gradient: Array, rng: np.random.Generator
) -> float:
    """|J v|² / |v|² for one random direction v: a rough mean eigenvalue of JᵀJ in the metric."""
    drawn = backend.like(rng.standard_normal(gradient.shape), products.weights)
    probe = metric.space.project(drawn)
    size = float(backend.namespace(probe).sum(probe * metric.times(probe)))
    return varpro.squared_size(products.jvp(probe, metric.space)) / size


def solve(
    products: Jacobian,
    metric: Metric,
    gradient: Array,
    damping: float,
    tolerance: float,
    stop: Callable[[], bool],
) -> tuple[list[Array], int]:
    """Conjugate gradients for (S + damping) d = gradient on the space of the metric.

    Damping is in units of the metric, which preconditions too. Gives the path to the solution (see
    `conjugate_gradients`) and the number of products.
    """

    def product(direction: Array) -> Array:
        image = products.gauss_newton_product(direction, metric.space)
        return image + damping * metric.times(direction)

    precondition, most = partial(metric.times, power=-1.0), SETTINGS.most_products
    return conjugate_gradients(
        product, gradient, tolerance, most, precondition, stop, products.weights
    )
