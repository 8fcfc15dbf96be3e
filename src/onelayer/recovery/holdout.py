"""Training and held-out examples of a recovery."""

from __future__ import annotations

import numpy as np

from onelayer.array import backend
from onelayer.data import chunks
from onelayer.data.progress import Progress
from onelayer.recovery import whitening
from onelayer.recovery.diagnosis import copies, noise
from onelayer.recovery.examples import WhitenedExamples, whiten
from onelayer.recovery.options import Options
from onelayer.recovery.validation import ValidatedExamples

# A twentieth of the examples is held out, or a fifth where examples are plenty, up to this many.
MOST_HELD_OUT = 2000
_PLENTY = 6.0  # equations per unknown
_MOST_DRAWN = 4_000_000  # streamed examples: at most this many are ever sampled from


def split(
    examples: ValidatedExamples, options: Options, progress: Progress, rng: np.random.Generator
) -> tuple[WhitenedExamples, WhitenedExamples]:
    """Training examples and held-out examples, whitened and in random order.

    Held-out examples are in memory. So are training examples that were given in memory and fit
    into the memory budget. Others stay where they are: one pass over them finds their whitening,
    and each further pass reads them again.
    """
    n, tokens, dim, out_dim = examples.shape
    source, device, heads = examples.source, options.device, options.known_heads or 1
    unknowns = whitening.unknowns(dim, out_dim, heads, options.rank, options.bias)
    plenty = examples.rows * out_dim > _PLENTY * unknowns
    # Of few examples that are plenty a larger share, so that they suffice to test for noise.
    share = max(n // 5, min(n // 3, 2 * noise.FEWEST)) if plenty else n // 20
    count = min(max(share, 1), MOST_HELD_OUT)
    budget = chunks.memory_budget(backend.place(source.samples[0], device))
    fits = 8 * n * tokens * (dim + out_dim) <= budget
    if source.chunks.in_memory and fits:
        (chunk,) = source.chunks.collect()
        training_at, held_out_at = copies.split(chunk, count, rng)
        whole = whiten(examples, options.causal, options.bias, device=device, hold_all=True)
        return whole.take(training_at), whole.take(held_out_at)
    order = rng.permutation(n) if n <= _MOST_DRAWN else rng.choice(n, _MOST_DRAWN, replace=False)
    asked = (examples.in_pieces(), options.causal, options.bias)
    streamed = whiten(*asked, order=order, device=device, progress=progress)
    return streamed.split(count)
