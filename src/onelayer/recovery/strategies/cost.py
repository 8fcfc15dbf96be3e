"""What a search costs: operations and memory from the sizes, time from a trial.

Memory and time are estimates, shown before a large search starts. The time is that of steps as
layers of a pretrained transformer took them (12 heads of rank 32 in 384 dimensions, six layers,
three seeds: 26 to 66 steps with 280 to 880 products), at the speed of one product of the size at
hand. Memory is that of steps on all examples, which some searches end with.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data import chunks
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.strategies.settings import Settings

_STEPS, _PRODUCTS = 50, 700
_IN_FULL = 0.3  # share of steps that are fitted in float64, at twice the cost
_IN_MIXTURES = 0.5  # relative cost of a product on a CPU, where most use fewer outputs
_TRIAL_ROWS = 2048


def examples_for(problem: WhitenedExamples, equations: float, heads: int, rank: int | None) -> int:
    """The number of examples that have this many equations per unknown."""
    per_example = problem.equations / problem.examples
    return math.ceil(equations * problem.unknowns(heads, rank) / per_example)


def product_operations(problem: WhitenedExamples, examples: int, heads: int) -> float:
    """Floating point operations of a product with the Gauss-Newton matrix."""
    dim, out_dim = problem.dim, problem.out_dim
    return 4.0 * examples * problem.tokens * heads * dim * (dim + 2 * out_dim)


def step_operations(problem: WhitenedExamples, heads: int) -> float:
    """Floating point operations of the largest matrix product in a step."""
    return 2.0 * problem.examples * problem.tokens * problem.dim * (problem.dim * heads)


def is_large(problem: WhitenedExamples, heads: int, rank: int | None, settings: Settings) -> bool:
    """Whether steps are too expensive for random starts."""
    examples = examples_for(problem, settings.small.first_equations, heads, rank)
    operations = product_operations(problem, min(examples, problem.examples), heads)
    return operations > settings.large.operations


@dataclass(frozen=True)
class CostEstimate:
    """The examples of a step, the largest memory in bytes, and the seconds of a search."""

    examples: int
    bytes: float
    seconds: float

    def __str__(self) -> str:
        time = f"{max(self.seconds, 1.0):.0f} s"
        for unit, size in (("min", 60.0), ("h", 3600.0)):
            time = f"{self.seconds / size:.2g} {unit}" if self.seconds >= 1.5 * size else time
        memory = f"{self.bytes / 1e9:.1f} GB"
        return f"steps on {self.examples:,} examples, up to {memory}, about {time}"


def plan(problem: WhitenedExamples, heads: int, examples: int) -> CostEstimate:
    """The plan of a search with this number of heads, and of examples in a step."""
    rows, features = examples * problem.tokens, heads * problem.dim
    # Beside steps: HᵀH and its inverse for two fits, and what it takes to find them; examples as
    # given, whitened, and in random order.
    size = 8 * 8.0 * features**2
    if problem.in_memory:
        size += 3 * 8.0 * problem.examples * problem.tokens * (problem.dim + problem.out_dim)
    size += max(_held_by_steps(problem, heads, count) for count in (examples, problem.examples))
    unit = 2.0 * rows * problem.dim * features  # tokens times a matrix for each head
    product = 3 * unit + 2.0 * features**2 * problem.out_dim
    if backend.gpu_memory(problem.whitening) is None:
        product *= _IN_MIXTURES
    fit = (1 + _IN_FULL) * (5 * unit + rows * features**2 + features**3)
    operations = _PRODUCTS * product + _STEPS * (fit + 3 * unit)
    per_operation = _seconds_per_operation(problem.whitening, features)
    return CostEstimate(examples, size, operations * per_operation)


def _held_by_steps(problem: WhitenedExamples, heads: int, examples: int) -> float:
    """The bytes of features and projected tokens that are held; the rest is recomputed."""
    entries = float(examples * problem.tokens * heads)
    features, tokens = entries * (problem.dim + problem.tokens), entries * problem.out_dim
    budget = chunks.memory_budget(problem.whitening)
    # Features of two fits in float64, and in float32; tokens in both.
    parts = [8 * features, 8 * features, 4 * features, 8 * tokens, 4 * tokens]
    return sum(part for part in parts if part <= budget)


def _seconds_per_operation(reference: Array, columns: int) -> float:
    """The time of a floating point operation in the products of a step, by a trial."""
    dim = int(reference.shape[0])
    tokens = backend.single(backend.ones((_TRIAL_ROWS, dim), reference))
    matrices = backend.single(backend.ones((dim, columns), reference))

    def timed() -> float:
        start = time.perf_counter()
        float((tokens @ matrices)[0, 0])  # a number on the host, so that a GPU has finished
        return time.perf_counter() - start

    timed()  # the first call of all is slower
    return min(timed() for _ in range(3)) / (2.0 * _TRIAL_ROWS * dim * columns)
