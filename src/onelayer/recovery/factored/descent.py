"""Minibatch descent on the factors of a layer: a start for large problems.

A step of Gauss-Newton sees all equations, and far from a fit most of what it learns of them is
lost. Descent takes a thousand steps in the time of ten. Its steps are orthogonalised: with M the
running mean of the gradient of one head's factor (d, r), the step is the nearest matrix with
orthonormal columns, found by five Newton-Schulz iterations (Bernstein and Newhouse 2024; Jordan et
al. 2024, "Muon"). It is the same for every choice of the factors of a head, as Q_i G turns with an
orthogonal G, and moves along the weak directions of a gradient as far as along the strong ones.
That matters on natural inputs, whose few strong directions carry most of the gradient. On hidden
states of text (layer 5 of a sentence encoder, 4,000 windows), 90 s on one core led to a squared
error of 2e-3 on other windows, and Adam with the best of its rates to 7e-2. On ±1 inputs (layer 2)
it led to 7e-6, Adam to 3e-3.

The length of a step is relative to the size of random factors, so that there is no rate to tune:
the same for all sizes until the error falls below a tenth or stands still, then falling linearly to
zero over as many steps as were taken before. At a constant rate the error is mostly noise of the
steps; as the rate falls it goes down by orders of magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.recovery.examples import WhitenedExamples, block
from onelayer.recovery.factored import model
from onelayer.recovery.factored.model import Factors
from onelayer.recovery.gauss_newton.batches import Block, in_single


@dataclass(frozen=True)
class DescentSettings:
    """Numbers that steer descent. Rates are relative to the size of random factors."""

    rate: float = 0.04
    momentum: float = 0.9
    warm_up: int = 50  # steps over which the rate grows to its full size
    memory: float = 0.95  # of the running mean of the loss
    # Of a minibatch. On hidden states of text 1,000 steps on as many led to a fifth of the loss
    # that 3,000 steps on 2,048 led to, in the same time.
    rows: int = 8192
    part_rows: int = 1024  # of a minibatch, worked on by one thread
    fallen: float = 0.1  # loss from which the rate falls..
    fewest: int = 500  # ..after so many steps: with less, text was left above the basin
    first_check: int = (
        1600  # steps before the loss may stand still; later checks after twice as many
    )
    still: float = 0.97  # the share of the loss of half the steps ago that counts as standing still
    goal: float = 3e-5  # loss at which descent ends early: Gauss-Newton is faster from there
    short_rate: float = 0.02  # of a short descent, from which..
    short_steps: int = 450  # ..the rate falls over as many steps


SETTINGS = DescentSettings()


@dataclass
class Descent:
    """Factors on their way down, and the schedule so far."""

    name: str  # of the stage
    factors: Factors
    examples: WhitenedExamples  # in memory
    rng: np.random.Generator
    settings: DescentSettings = SETTINGS
    steps: int = 0
    loss: float = 1.0  # running mean over minibatches
    falling_from: int = 0  # the step from which the rate falls; 0 before
    momentum: Factors | None = None
    _order: np.ndarray[tuple[int], np.dtype[np.int64]] = field(default_factory=lambda: np.arange(0))
    _at_check: float = math.inf  # the loss at the last check

    def run(self, report: Callable[[Descent], None], stop: Callable[[], bool]) -> Factors:
        """Take steps until the loss is at its goal, the rate has fallen to zero, or `stop()`.

        `report` is called now and then.
        """
        every = self.settings.warm_up
        while self.rate > 0 and self.loss > self.settings.goal and not stop():
            self.step()
            if self.steps % every == 0:
                report(self)
        return self.factors

    @property
    def rate(self) -> float:
        """The length of the next step; zero once the loss is not finite."""
        if not math.isfinite(self.loss):
            return 0.0
        rate = self.settings.rate * min(1.0, (self.steps + 1) / self.settings.warm_up)
        if self.falling_from:
            rate *= max(0.0, 2.0 - self.steps / self.falling_from)
        return rate

    def step(self) -> None:
        """One step on a minibatch."""
        total, gradient = self._loss_and_gradient(self._batch())
        if not math.isfinite(total):
            self.loss = math.inf
            return
        keep, memory = self.settings.momentum, self.settings.memory
        if self.momentum is None:
            self.momentum = gradient.map(lambda one: 0.0 * one)
        self.momentum = self.momentum.map(lambda m, g: keep * m + (1 - keep) * g, gradient)
        ahead = self.momentum.map(lambda m, g: keep * m + (1 - keep) * g, gradient)  # Nesterov
        self.factors = _moved(self.factors, ahead, self.rate)
        self.steps += 1
        self.loss = memory * self.loss + (1 - memory) * total
        self._schedule()

    def _schedule(self) -> None:
        """Let the rate fall once the loss has fallen, or stands still."""
        numbers = self.settings
        if self.falling_from:
            return
        if self.loss < numbers.fallen and self.steps >= numbers.fewest:
            self.falling_from = self.steps
        elif self.steps >= numbers.first_check // 2 and _is_doubling(self.steps, numbers):
            if self.steps >= numbers.first_check and self.loss > numbers.still * self._at_check:
                self.falling_from = self.steps
            self._at_check = self.loss

    def _batch(self) -> list[Block]:
        """A minibatch, in parts; every example comes once before any comes again."""
        X, Y, mask = self.examples.arrays
        tokens, numbers = int(X.shape[1]), self.settings
        count = min(max(1, numbers.rows // tokens), int(X.shape[0]))
        if len(self._order) < count:
            self._order = self.rng.permutation(int(X.shape[0]))
        chosen, self._order = self._order[:count], self._order[count:]
        size = max(1, blocks.block_rows(numbers.part_rows, X) // tokens)
        parts = [chosen[start : start + size] for start in range(0, count, size)]
        return [
            in_single(
                block(
                    self.examples.transform,
                    backend.rows(X, part),
                    backend.rows(Y, part),
                    None if mask is None else backend.rows(mask, part),
                )
            )
            for part in parts
        ]

    def _loss_and_gradient(self, parts: list[Block]) -> tuple[float, Factors]:
        """The mean square of the residuals of a minibatch, and its gradient up to a factor."""
        factors = self.factors

        def work(part: Block) -> tuple[float, int, Factors]:
            at = model.forward(factors, part)
            size = backend.squared_norm(at.residuals)
            return size, model.equations([part]), model.vjp(factors, part, at, at.residuals)

        def merge(
            one: tuple[float, int, Factors], other: tuple[float, int, Factors]
        ) -> tuple[float, int, Factors]:
            gradient = one[2].map(lambda a, b: a + b, other[2])
            return one[0] + other[0], one[1] + other[1], gradient

        size, count, gradient = blocks.fold_over(parts, work, merge, self.examples.X)
        return size / count, gradient


def short(
    name: str, factors: Factors, examples: WhitenedExamples, rng: np.random.Generator
) -> Descent:
    """A short descent, from factors of which most are good."""
    numbers = replace(SETTINGS, rate=SETTINGS.short_rate)
    steps = numbers.short_steps
    return Descent(name, factors, examples, rng, numbers, steps=steps, falling_from=steps)


def _is_doubling(steps: int, numbers: DescentSettings) -> bool:
    """Whether this many steps are half the first check times a power of two."""
    ratio = steps / (numbers.first_check // 2)
    return ratio >= 1 and math.log2(ratio).is_integer()


def _moved(factors: Factors, ahead: Factors, rate: float) -> Factors:
    """The factors after an orthogonalised step up the residuals."""
    dim, inner = int(factors.query.shape[0]), int(factors.output.shape[0])
    rank = None if factors.key is None else int(factors.key.shape[1]) // factors.heads
    sizes = model.deviations(dim, rank, inner)
    found = {}
    for (name, array), (_, direction) in zip(factors.arrays(), ahead.arrays(), strict=True):
        tall, undo = model.by_head(name, direction, factors.heads)
        step = undo(orthogonalised(tall))
        length = rate * sizes[name] * float(max(tall.shape[1:])) ** 0.5
        found[name] = array + backend.like(np.asarray(length), array) * step
    return Factors(**{**vars(factors), **found})


def orthogonalised(matrices: Array) -> Array:
    """Nearly the nearest matrices (m, d, r) with orthonormal columns, by Newton-Schulz iterations.

    The coefficients are those of Jordan et al.: singular values come to lie between 0.7 and 1.2
    within five iterations, however small they were.
    """
    xp, turned = backend.namespace(matrices), backend.transpose
    largest = xp.max(xp.abs(matrices), axis=(1, 2), keepdims=True)  # or small squares would vanish
    found = matrices / xp.where(largest > 0, largest, xp.ones_like(largest))
    size = xp.sqrt(xp.sum(found * found, axis=(1, 2), keepdims=True))
    found = found / xp.where(size > 0, size, xp.ones_like(size))
    one = backend.like(np.eye(int(matrices.shape[2])), matrices)
    for _ in range(5):
        gram = turned(found) @ found
        found = found @ (3.4445 * one - 4.7750 * gram + 2.0315 * (gram @ gram))
    return found


def redrawn(factors: Factors, parts: list[Block], rng: np.random.Generator) -> Factors:
    """The factors with the head that explains least replaced by a random one.

    By how much the squares of the residuals grow if head i is left out, and the outputs of the
    others are fitted again: tr(O_iᵀ B⁻¹ O_i), with B the head's block of the inverse of the Gram
    matrix of attended values. It is small for a head that does next to nothing and for one of two
    that do the same.
    """

    def work(part: Block) -> Array:
        attended = model.forward(factors, in_single(part)).attended
        return backend.double(backend.transpose(attended) @ attended)

    gram = blocks.fold_over(parts, work, lambda a, b: a + b, parts[0].keys)
    xp, size = backend.namespace(gram), int(gram.shape[0])
    mean = float(xp.linalg.trace(gram)) / size
    inverse = xp.linalg.inv(gram + 1e-6 * mean * backend.like(np.eye(size), gram))
    outputs = backend.double(factors.output)
    each = size // factors.heads
    costs = []
    for head in range(factors.heads):
        part = slice(head * each, (head + 1) * each)
        own = outputs[part, :]
        costs.append(float(xp.sum(own * xp.linalg.solve(inverse[part, part], own))))
    return _with_random_head(factors, int(np.argmin(costs)), rng)


def _with_random_head(factors: Factors, head: int, rng: np.random.Generator) -> Factors:
    """The factors with one head drawn again."""
    rank = None if factors.key is None else int(factors.key.shape[1]) // factors.heads
    dim, inner = int(factors.query.shape[0]), int(factors.output.shape[0])
    value_rank = None if factors.value is None else inner // factors.heads
    shape = 1, dim, int(factors.output.shape[1])
    drawn = model.random(shape, rank, value_rank, factors.key_bias is not None, rng, factors.query)
    alike = model.deviations(dim, rank, inner)["output"]
    one = model.deviations(dim, rank, inner // factors.heads)["output"]
    drawn = Factors(**{**vars(drawn), "output": drawn.output * (alike / one)})
    return model.with_head(factors, head, drawn)
