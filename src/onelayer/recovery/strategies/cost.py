"""What a search costs: operations and memory from the sizes, time from a trial.

Memory and time are estimates, shown before a large search starts. The time is that of descent and
steps as layers of a pretrained transformer took them (12 heads of rank 32 in 384 dimensions), at
the speed of one product of the size at hand. Memory is that of fits to all examples, which some
searches end with.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data import chunks
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.factored import descent
from onelayer.recovery.factored.model import Factors
from onelayer.recovery.strategies.settings import Settings

_DESCENT_STEPS = 1500
_PRODUCTS = 500  # with all factors
_FITS = 4  # with eliminated projections, in float64 as two
_STEPS, _PRODUCTS_OF_A_STEP = 8, 30  # with eliminated projections, if ranks are not known
_TRIAL_ROWS = 2048


def examples_for(problem: WhitenedExamples, equations: float, heads: int, rank: int | None) -> int:
    """The number of examples that have this many equations per unknown."""
    per_example = problem.equations / problem.examples
    return math.ceil(equations * problem.unknowns(heads, rank) / per_example)


def product_operations(problem: WhitenedExamples, examples: int, heads: int) -> float:
    """Floating point operations of a product with the Gauss-Newton matrix."""
    dim, out_dim = problem.dim, problem.out_dim
    return 4.0 * examples * problem.tokens * heads * dim * (dim + 2 * out_dim)


def factored_unknowns(problem: WhitenedExamples, heads: int, rank: int | None) -> int:
    """The number of unknowns if projections have the rank of the attention matrices."""
    attention = problem.unknowns(heads, rank) - heads * problem.dim * problem.out_dim
    inner = min(problem.dim, problem.out_dim, rank or problem.dim)
    return attention + heads * inner * (problem.dim + problem.out_dim - inner)


def factored_examples(
    problem: WhitenedExamples, equations: float, heads: int, rank: int | None
) -> int:
    """The number of examples that have this many equations for each of these unknowns."""
    per_example = problem.equations / problem.examples
    return math.ceil(equations * factored_unknowns(problem, heads, rank) / per_example)


def row_operations(factors: Factors) -> float:
    """Floating point operations of a row in a forward pass, without those between tokens."""
    return 2.0 * sum(int(math.prod(array.shape)) for _, array in factors.arrays())


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


def plan(
    problem: WhitenedExamples, heads: int, examples: int, rank: int | None, settings: Settings
) -> CostEstimate:
    """The plan of a search with heads of this number and rank, and of examples in a fit."""
    rows, features = examples * problem.tokens, heads * problem.dim
    # Beside steps: HᵀH and its inverse for two fits, and what it takes to find them; examples as
    # given, whitened, and in random order.
    size = 8 * 8.0 * features**2
    if problem.in_memory:
        size += 3 * 8.0 * problem.examples * problem.tokens * (problem.dim + problem.out_dim)
    size += max(_held_by_steps(problem, heads, count) for count in (examples, problem.examples))
    unit = 2.0 * rows * problem.dim * features  # tokens times a matrix for each head
    fit = 5 * unit + rows * features**2 + features**3
    inner = problem.dim if rank is None else rank
    row = 2.0 * heads * inner * (3 * problem.dim + problem.out_dim)  # a forward pass of factors
    operations = _DESCENT_STEPS * descent.SETTINGS.rows * 3 * row
    if rank is None:
        operations += _STEPS * (fit + _PRODUCTS_OF_A_STEP * 3 * unit)
    else:
        few = factored_examples(problem, settings.large.joint_equations, heads, rank)
        joint = min(few, problem.examples) * problem.tokens
        operations += _PRODUCTS * 3 * row * joint + _FITS * fit
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
