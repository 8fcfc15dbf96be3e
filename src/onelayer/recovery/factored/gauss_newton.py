"""Levenberg-Marquardt on the factors of all heads at once, from a basin to rounding.

A step solves (JᵀJ + λ M) δ = Jᵀ r by conjugate gradients. J is that of all factors, projections
included: eliminating them would need the Gram matrix of m·d features, which in 384 dimensions with
12 heads costs as much as a hundred products here. A product is a sum over blocks of `model.jvp`
followed by `model.vjp`, 20 d m r operations for a row where the products of `jacobian.py` take
several times as many.

The metric M of damping and preconditioner has one matrix for each head: for queries, keys and
values the second moments (r, r) of what flows back to them from random outputs (tokens are
whitened, so that 1 ⊗ G is near that block of JᵀJ), for outputs the Gram matrix of attended values.
Factors that leave a head as it is have zero JᵀJ; damping keeps steps out of them. Metrics that
mix heads, and covariances of tokens weighted by head, took as many products on hidden states of
text.

The damping follows the ratio of the actual to the predicted fall of the loss. A solve gives the
iterates after 1, 2, 4, .. products too: where the last one goes too far an earlier one is taken.
Solves, and residuals far from a fit, are float32; gradients and the final residuals are float64.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.array.krylov import conjugate_gradients
from onelayer.recovery.factored import model
from onelayer.recovery.factored.model import Activations, Factors
from onelayer.recovery.gauss_newton.batches import Block, in_single


@dataclass(frozen=True)
class JointSettings:
    """Numbers that steer the steps."""

    first_damping: float = 1e-4
    least_damping: float = 1e-10
    most_damping: float = 1e4
    inexactness: float = 0.1  # share of the squared residual at which a solve may stop, at most
    least_inexactness: float = 1e-10  # what float32 reaches
    # Products in one solve. Above an error of `far` long ones go too far. Below `near` the problem
    # is linear, and one long solve takes fewer products than two.
    most_far: int = 64
    far: float = 2e-3
    most_products: int = 200
    near: float = 1e-5
    most_near: int = 400
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
    metric_share: int = 4  # the metric is that of every fourth block
    ridge: float = 1e-3  # of its matrices, relative to their mean eigenvalue


SETTINGS = JointSettings()
_ROUNDING_ERROR = 1e-11  # an error near that of float64 rounding


class JointStep(NamedTuple):
    """Factors after a step, and how it went."""

    factors: Factors
    loss: float  # mean square of the residuals
    damping: float
    products: int


@dataclass(frozen=True, eq=False)
class Metric:
    """A matrix for every head and kind of factor."""

    matrices: dict[str, Array]  # (m, r, r), for outputs (m·q, m·q)
    inverses: dict[str, Array]

    def times(self, direction: Factors, inverse: bool = False) -> Factors:
        chosen = self.inverses if inverse else self.matrices
        found = {}
        for name, array in direction.arrays():
            matrix = chosen[name]
            if name == "output":
                found[name] = matrix @ array
            elif matrix.ndim == 3:
                tall = model.split_heads(array, direction.heads) @ matrix
                found[name] = model.join_heads(tall)
            else:
                found[name] = array * matrix
        return replace(direction, **found)


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
    slow = 0
    while state.loss > target**2 and slow < SETTINGS.slow_steps and not stop():
        found = step(state, parts, rng, stop)
        if found is None:
            break
        left = found.loss / state.loss
        slow = slow + 1 if left > SETTINGS.slow else 0
        state = found
        report(state)
        if state.loss < max(exact, _ROUNDING_ERROR) ** 2 and left > SETTINGS.rounding_left:
            break
    return state.factors


def step(
    state: JointStep,
    parts: Sequence[Block],
    rng: np.random.Generator,
    stop: Callable[[], bool],
) -> JointStep | None:
    """The state after a step that lowers the loss; None if none does."""
    factors, damping, used = state.factors, state.damping, 0
    right = _gradient(factors, parts).flat()
    products = _Products.at(factors, parts, rng)
    rows = products.equations
    error = state.loss**0.5
    tolerance = SETTINGS.inexactness * min(1.0, 10.0 * error)
    tolerance = max(tolerance, SETTINGS.least_inexactness)
    most = SETTINGS.most_far if error > SETTINGS.far else SETTINGS.most_products
    most = SETTINGS.most_near if error < SETTINGS.near else most
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
            lost = loss(trial, parts, single=state.loss > SETTINGS.single_loss)
            gain = float(backend.namespace(right).sum(right * direction))
            gain += damping * products.size(direction)
            ratio = (state.loss - lost) * rows / gain if gain > 0 else 0.0
            first_ratio = ratio if number == 0 else first_ratio
            if best is not None and not lost < best.loss:
                break
            if lost < state.loss:
                best = JointStep(trial, lost, damping, used)
            if ratio > SETTINGS.good_ratio:
                break
        if first_ratio > SETTINGS.good_ratio:
            damping = max(damping / SETTINGS.relaxation, SETTINGS.least_damping)
        elif first_ratio < SETTINGS.bad_ratio:
            damping *= SETTINGS.tightening
        if best is not None:
            return best._replace(damping=damping)
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


def _gradient(factors: Factors, parts: Sequence[Block]) -> Factors:
    """Jᵀ r."""

    def work(part: Block) -> Factors:
        at = model.forward(factors, part)
        return model.vjp(factors, part, at, at.residuals)

    return blocks.fold_over(parts, work, _added, parts[0].keys)


@dataclass(frozen=True, eq=False)
class _Products:
    """Products with JᵀJ at some factors, in float32, and their metric."""

    factors: Factors
    blocks: list[Block]
    activations: list[Activations]
    metric: Metric
    equations: int

    @classmethod
    def at(cls, factors: Factors, parts: Sequence[Block], rng: np.random.Generator) -> _Products:
        factors = factors.map(backend.single)
        found: list[tuple[Block, Activations]] = blocks.fold_over(
            parts, partial(_activated, factors), operator.add, parts[0].keys
        )
        singles, activations = [one for one, _ in found], [at for _, at in found]
        metric = _metric(factors, activations, rng)
        return cls(factors, singles, activations, metric, model.equations(parts))

    @property
    def reference(self) -> Array:
        return self.factors.query

    def damped(self, flat: Array, damping: float) -> Array:
        """(JᵀJ + damping M) times a direction."""
        direction = self.factors.unflat(flat)

        def work(pair: tuple[Block, Activations]) -> Factors:
            part, at = pair
            rows = model.jvp(self.factors, part, at, direction)
            return model.vjp(self.factors, part, at, rows)

        pairs = list(zip(self.blocks, self.activations, strict=True))
        total = blocks.fold_over(pairs, work, _added, self.reference)
        return total.flat() + damping * self.metric.times(direction).flat()

    def precondition(self, flat: Array) -> Array:
        direction = self.factors.unflat(backend.single(flat))
        return backend.like(self.metric.times(direction, inverse=True).flat(), flat)

    def size(self, flat: Array) -> float:
        """The squared length of a direction in the metric."""
        single = backend.single(flat)
        image = self.metric.times(self.factors.unflat(single)).flat()
        return float(backend.namespace(flat).sum(flat * backend.like(image, flat)))


def _activated(factors: Factors, part: Block) -> list[tuple[Block, Activations]]:
    part = in_single(part)
    return [(part, model.forward(factors, part))]


def _metric(
    factors: Factors, activations: Sequence[Activations], rng: np.random.Generator
) -> Metric:
    """The metric, from random outputs on some of the blocks."""
    share = SETTINGS.metric_share
    activations = activations[::share]
    moments: dict[str, Array] = {}
    rows = 0
    for at in activations:
        drawn = backend.like(rng.standard_normal(tuple(at.residuals.shape)), at.residuals)
        back = model.backward(factors, at, drawn)
        rows += int(drawn.shape[0])
        found = {name: _second_moments(name, one, factors.heads) for name, one in back.named()}
        found["output"] = backend.transpose(at.attended) @ at.attended
        moments = {k: v if k not in moments else moments[k] + v for k, v in found.items()}
    everything = share * rows
    matrices, inverses = {}, {}
    for name, moment in moments.items():
        moment = backend.double(moment) * float(share)
        if name == "key_bias":
            matrices[name] = moment + SETTINGS.ridge * (_mean(moment) or 1.0)
            inverses[name] = 1 / matrices[name]
            continue
        matrices[name] = _ridged(moment)
        inverses[name] = backend.namespace(moment).linalg.inv(matrices[name])
    if factors.output_bias is not None:
        one = backend.ones(tuple(factors.output_bias.shape), backend.double(factors.output_bias))
        matrices["output_bias"], inverses["output_bias"] = one * everything, one / everything
    as_single = backend.single
    return Metric(
        {name: as_single(one) for name, one in matrices.items()},
        {name: as_single(one) for name, one in inverses.items()},
    )


def _second_moments(name: str, rows: Array, heads: int) -> Array:
    """Of rows (n·k, m·r), head by head: (m, r, r); of those of key biases (m,)."""
    xp = backend.namespace(rows)
    if name == "key_bias":
        return xp.sum(rows * rows, axis=0)
    by_head = model.split_heads(rows, heads)
    return backend.transpose(by_head) @ by_head


def _mean(array: Array) -> float:
    return float(backend.namespace(array).mean(array))


def _ridged(moment: Array) -> Array:
    """Matrices with a part of their mean eigenvalue added to all eigenvalues."""
    xp, size = backend.namespace(moment), int(moment.shape[-1])
    one = backend.like(np.eye(size), moment)
    mean = xp.sum(moment * one, axis=(-2, -1), keepdims=True) / size
    least = (float(xp.max(mean)) or 1.0) * SETTINGS.ridge
    return moment + (SETTINGS.ridge * mean + SETTINGS.ridge * least) * one


def _added(first: Factors, second: Factors) -> Factors:
    return first.map(lambda a, b: a + b, second)
