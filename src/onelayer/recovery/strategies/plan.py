"""What a search on a large problem will take: memory from the sizes alone, time from a trial.

Both are estimates, shown before the search begins. The time is that of steps as layers of a
pretrained transformer took them (12 heads of rank 32 in 384 dimensions, six layers, three seeds:
26 to 66 steps with 280 to 880 products), at the speed of one product of the size at hand. Memory is
that of steps on all examples, which some searches end with.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data import chunks
from onelayer.recovery.whitening import AnyExamples, WhitenedExamples

_STEPS, _PRODUCTS = 50, 700
_IN_FULL = 0.3  # the share of steps that are fitted in float64, at twice the cost
_IN_MIXTURES = 0.5  # the share of its cost that a product has on a CPU: most see fewer outputs
_TRIAL_ROWS = 2048


@dataclass(frozen=True)
class Plan:
    """The examples of a step, the bytes at the most, and the seconds of a search, roughly."""

    examples: int
    bytes: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"steps on {self.examples:,} examples, up to {self.bytes / 1e9:.1f} GB, "
            f"about {_duration(self.seconds)}"
        )


def plan(problem: AnyExamples, heads: int, examples: int) -> Plan:
    """That of a search with so many heads whose steps see so many examples."""
    rows, features = examples * problem.tokens, heads * problem.dim
    # Beside steps: HᵀH and its inverse for two fits, and what it takes to find them; examples as
    # given, whitened, and in random order.
    size = 8 * 8.0 * features**2
    if isinstance(problem, WhitenedExamples):
        size += 3 * 8.0 * problem.examples * problem.tokens * (problem.dim + problem.out_dim)
    size += max(_held_by_steps(problem, heads, count) for count in (examples, problem.examples))
    unit = 2.0 * rows * problem.dim * features  # tokens times a matrix for each head
    product = 3 * unit + 2.0 * features**2 * problem.out_dim
    if backend.gpu_memory(problem.whitening) is None:
        product *= _IN_MIXTURES
    fit = (1 + _IN_FULL) * (5 * unit + rows * features**2 + features**3)
    operations = _PRODUCTS * product + _STEPS * (fit + 3 * unit)
    return Plan(examples, size, operations * _seconds_per_operation(problem.whitening, features))


def _held_by_steps(problem: AnyExamples, heads: int, examples: int) -> float:
    """The bytes of features and projected tokens; what has no room is computed anew, and not held.

    Features of two fits in float64, and in float32; tokens in both.
    """
    entries = float(examples * problem.tokens * heads)
    features, tokens = entries * (problem.dim + problem.tokens), entries * problem.out_dim
    room = chunks.memory_budget(problem.whitening)
    parts = [8 * features, 8 * features, 4 * features, 8 * tokens, 4 * tokens]
    return sum(part for part in parts if part <= room)


def _seconds_per_operation(reference: Array, columns: int) -> float:
    """How long a floating point operation takes in the products of a step, by a trial."""
    dim = int(reference.shape[0])
    tokens = backend.single(backend.ones((_TRIAL_ROWS, dim), reference))
    matrices = backend.single(backend.ones((dim, columns), reference))

    def timed() -> float:
        begun = time.perf_counter()
        float((tokens @ matrices)[0, 0])  # a number on this side: a GPU has to be done
        return time.perf_counter() - begun

    timed()  # the first call of all takes its time for other reasons
    return min(timed() for _ in range(3)) / (2.0 * _TRIAL_ROWS * dim * columns)


def _duration(seconds: float) -> str:
    """A time in words, to one digit or two."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:.2g} {unit}"
    return f"{max(seconds, 1.0):.0f} s"
