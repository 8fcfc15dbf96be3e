"""Levenberg-Marquardt on the factors of all heads at once, from a basin to rounding.

A step solves (JᵀBJ + λ M) δ = JᵀB r by conjugate gradients. J is that of all factors, projections
included: eliminating them would need the Gram matrix of m·d features, which in 384 dimensions with
12 heads costs as much as a hundred products here. A product is a sum over blocks of `model.jvp`
followed by `model.vjp`, 20 d m r operations for a row where the products of `jacobian.py` take
several times as many.

Three changes make solves short, and none of them moves an exact fit: outputs in which heads do not
mix (`decoupling.py`), residuals in norms B of their own for every row (`row_norms.py`), and a
metric M near JᵀBJ (`metric.py`) as preconditioner and as the matrix of damping. Factors that leave
a head as it is have zero JᵀBJ; damping keeps steps out of them. If such a step does not lower the
loss, one on the outputs as they are is tried.

The damping follows the ratio of the actual to the predicted fall of the loss. A solve gives the
iterates after 1, 2, 4, .. products too: where the last one goes too far an earlier one is taken.
Solves, and residuals far from a fit, are float32; gradients and the final residuals are float64.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.array.krylov import conjugate_gradients
from onelayer.recovery.factored import model
from onelayer.recovery.factored.decoupling import Decoupling
from onelayer.recovery.factored.metric import JointMetric, metric
from onelayer.recovery.factored.metric import norms as row_norms
from onelayer.recovery.factored.model import Activations, Factors
from onelayer.recovery.factored.row_norms import RowNorms
from onelayer.recovery.gauss_newton.batches import Block, in_single


@dataclass(frozen=True)
class JointSettings:
    """Numbers that steer the steps."""

    first_damping: float = 1e-4
    least_damping: float = 1e-10
    most_damping: float = 1e4
    inexactness: float = 0.1  # share of the squared residual at which a solve may stop..
    # ..and at most the square of so many errors: the problem is linear up to about the error.
    forcing: float = 10.0
    least_inexactness: float = 1e-10  # what float32 reaches
    last_share: float = 0.1  # of the target error, that the last solve may leave
    # Products in one solve. Above an error of `far` long ones go too far.
    most_far: int = 64
    far: float = 2e-3
    most_products: int = 400
    single_loss: float = 1e-8  # above it losses are right in float32
    good_ratio: float = 0.75  # of actual and predicted gain: damping falls above it..
    bad_ratio: float = 0.25  # ..and grows below this one
    relaxation: float = 4.0
    tightening: float = 8.0
    slow: float = 0.9  # steps that leave more than this share of the loss are slow..
    slow_steps: int = 3  # ..and as many in a row are the last
    rounding_left: float = (
        0.5  # near rounding the first step that leaves more than this is the last
    )


SETTINGS = JointSettings()
_ROUNDING_ERROR = 1e-11  # an error near that of float64 rounding


class JointStep(NamedTuple):
    """Factors after a step, and how it went."""

    factors: Factors
    loss: float  # mean square of the residuals
    damping: float
    products: int


def run(
    factors: Factors,
    parts: Sequence[Block],
    target: float,
    rng: np.random.Generator,
    report: Callable[[JointStep], None],
    stop: Callable[[], bool],
    exact: float = 0.0,
) -> Factors:
    """Steps until the root mean square of the residuals is at `target`, or no step helps.

    At an error of `exact` only rounding may be left. The blocks are float64; the factors returned
    are too.
    """
    factors = factors.map(backend.double)
    state = JointStep(factors, loss(factors, parts), SETTINGS.first_damping, 0)
    report(state)
    slow, rounding = 0, max(exact, _ROUNDING_ERROR)
    while state.loss > target**2 and slow < SETTINGS.slow_steps and not stop():
        found = _improved(state, parts, rng, stop, target, rounding)
        if found is None:
            break
        left = found.loss / state.loss
        slow = slow + 1 if left > SETTINGS.slow else 0
        state = found
        report(state)
        if state.loss < rounding**2 and left > SETTINGS.rounding_left:
            break
    return state.factors


def _improved(
    state: JointStep,
    parts: Sequence[Block],
    rng: np.random.Generator,
    stop: Callable[[], bool],
    target: float,
    rounding: float,
) -> JointStep | None:
    """The state after a step on decoupled outputs, or on outputs as they are; None if none helps.

    At an error of `rounding` or below a step on decoupled outputs is all that is tried.
    """
    used, error = 0, state.loss**0.5
    share = SETTINGS.last_share * target / error
    decoupling = Decoupling.of(state.factors, parts, error)
    if decoupling is not None:
        inside, entered = decoupling.parts(parts), decoupling.enter(state.factors)
        start = JointStep(entered, loss(entered, inside), state.damping, 0)
        found = step(start, inside, rng, stop, share, by_head=True)
        if found is not None:
            factors, used = decoupling.leave(found.factors), found.products
            lost = loss(factors, parts)
            if lost < state.loss:
                return found._replace(factors=factors, loss=lost)
        if error <= rounding or stop():
            return None
    found = step(state, parts, rng, stop, share)
    return None if found is None else found._replace(products=found.products + used)


def step(
    state: JointStep,
    parts: Sequence[Block],
    rng: np.random.Generator,
    stop: Callable[[], bool],
    share: float = 0.0,
    by_head: bool = False,
) -> JointStep | None:
    """The state after a step that lowers the loss; None if none does.

    Solves are no finer than it takes to leave a `share` of the error. With `by_head` the outputs
    are decoupled, and residuals are measured in the norms of `row_norms.py`.
    """
    factors, damping, used = state.factors, state.damping, 0
    products = _Products.at(factors, parts, rng, by_head)
    first, right = products.loss_and_gradient(factors, parts)
    error = state.loss**0.5
    tolerance = min(SETTINGS.inexactness, (SETTINGS.forcing * error) ** 2)
    tolerance = max(tolerance, SETTINGS.least_inexactness, share**2)
    most = SETTINGS.most_far if error > SETTINGS.far else SETTINGS.most_products
    while damping <= SETTINGS.most_damping and not stop():
        path, count = conjugate_gradients(
            partial(products.damped, damping=damping),
            right,
            tolerance,
            most,
            products.precondition,
            stop,
            reference=products.reference,
        )
        used += count
        first_ratio, best = 0.0, None
        for number, direction in enumerate(reversed(path)):
            trial = factors.map(lambda a, b: a + b, factors.unflat(direction))
            lost = products.loss(trial, parts, single=state.loss > SETTINGS.single_loss)
            gain = float(backend.namespace(right).sum(right * direction))
            gain += damping * products.size(direction)
            ratio = (first - lost) / gain if gain > 0 else 0.0
            first_ratio = ratio if number == 0 else first_ratio
            if best is not None and not lost < best.loss:
                break
            if lost < first:
                best = JointStep(trial, lost, damping, used)
            if ratio > SETTINGS.good_ratio:
                break
        if first_ratio > SETTINGS.good_ratio:
            damping = max(damping / SETTINGS.relaxation, SETTINGS.least_damping)
        elif first_ratio < SETTINGS.bad_ratio:
            damping *= SETTINGS.tightening
        if best is not None:
            return best._replace(damping=damping, loss=best.loss / products.equations)
        damping = max(damping, state.damping * SETTINGS.tightening)
    return None


def loss(factors: Factors, parts: Sequence[Block], single: bool = False) -> float:
    """The mean square of the residuals."""
    if single:
        factors = factors.map(backend.single)

    def work(part: Block) -> float:
        part = in_single(part) if single else part
        return backend.squared_norm(model.forward(factors, part).residuals)

    total: float = blocks.fold_over(parts, work, operator.add, parts[0].keys)
    return total / model.equations(parts)


@dataclass(frozen=True, eq=False)
class _Products:
    """Products with JᵀBJ at some factors, in float32, and their metric.

    B is the identity, or has the norms of rows.
    """

    factors: Factors
    blocks: list[Block]
    activations: list[Activations]
    norms: list[RowNorms | None]
    metric: JointMetric
    equations: int

    @classmethod
    def at(
        cls,
        factors: Factors,
        parts: Sequence[Block],
        rng: np.random.Generator,
        by_head: bool = False,
    ) -> _Products:
        factors = factors.map(backend.single)
        found: list[tuple[Block, Activations]] = blocks.fold_over(
            parts, partial(_activated, factors), operator.add, parts[0].keys
        )
        singles, activations = [one for one, _ in found], [at for _, at in found]
        norms = row_norms(factors, found, rng) if by_head else None
        return cls(
            factors,
            singles,
            activations,
            [None] * len(found) if norms is None else list(norms),
            metric(factors, found, rng, by_head, norms),
            model.equations(parts),
        )

    @property
    def reference(self) -> Array:
        return self.factors.query

    def damped(self, flat: Array, damping: float) -> Array:
        """(JᵀBJ + damping M) times a direction."""
        direction = self.factors.unflat(flat)

        def work(place: tuple[Block, Activations, RowNorms | None]) -> Factors:
            part, at, norms = place
            rows = model.jvp(self.factors, part, at, direction)
            return model.vjp(self.factors, part, at, _measured(rows, part, norms))

        places = list(zip(self.blocks, self.activations, self.norms, strict=True))
        total = blocks.fold_over(places, work, _added, self.reference)
        return total.flat() + damping * self.metric.times(direction).flat()

    def loss(self, factors: Factors, parts: Sequence[Block], single: bool = False) -> float:
        """The sum of the squares of residuals in these norms."""
        if single:
            factors = factors.map(backend.single)

        def work(place: tuple[Block, RowNorms | None]) -> float:
            part = in_single(place[0]) if single else place[0]
            rows = model.forward(factors, part).residuals
            return _square(rows, _measured(rows, part, place[1]))

        places = list(zip(parts, self.norms, strict=True))
        total: float = blocks.fold_over(places, work, operator.add, parts[0].keys)
        return total

    def loss_and_gradient(self, factors: Factors, parts: Sequence[Block]) -> tuple[float, Array]:
        """rᵀBr and JᵀBr, in the precision of the blocks."""

        def work(place: tuple[Block, RowNorms | None]) -> tuple[float, Factors]:
            part, norms = place
            at = model.forward(factors, part)
            rows = _measured(at.residuals, part, norms)
            return _square(at.residuals, rows), model.vjp(factors, part, at, rows)

        def merge(
            one: tuple[float, Factors], other: tuple[float, Factors]
        ) -> tuple[float, Factors]:
            return one[0] + other[0], _added(one[1], other[1])

        places = list(zip(parts, self.norms, strict=True))
        total, gradient = blocks.fold_over(places, work, merge, parts[0].keys)
        return total, gradient.flat()

    def precondition(self, flat: Array) -> Array:
        direction = self.factors.unflat(backend.single(flat))
        return backend.like(self.metric.times(direction, inverse=True).flat(), flat)

    def size(self, flat: Array) -> float:
        """The squared length of a direction in the metric."""
        single = backend.single(flat)
        image = self.metric.times(self.factors.unflat(single)).flat()
        return float(backend.namespace(flat).sum(flat * backend.like(image, flat)))


def _measured(rows: Array, part: Block, norms: RowNorms | None) -> Array:
    """Rows times the matrices of their norms; those of padding stay zero."""
    return rows if norms is None else model.counted(norms.times(rows), part)


def _square(rows: Array, measured: Array) -> float:
    return float(backend.namespace(rows).sum(rows * measured))


def _activated(factors: Factors, part: Block) -> list[tuple[Block, Activations]]:
    part = in_single(part)
    return [(part, model.forward(factors, part))]


def _added(first: Factors, second: Factors) -> Factors:
    return first.map(lambda a, b: a + b, second)
