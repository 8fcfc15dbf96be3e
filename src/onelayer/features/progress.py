"""Progress of a fit, told to the callbacks that scikit-learn's users set on an estimator.

Whoever works through many parts takes a `Track` and lets the parts pass through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from onelayer.data.chunks import Progress

Part = TypeVar("Part")


class Track(Protocol):
    """Passes on the parts of a stage of the work one by one, and may tell somebody of them."""

    def __call__(self, parts: Sequence[Part], stage: str) -> Iterator[Part]: ...


def untracked(parts: Sequence[Part], stage: str) -> Iterator[Part]:  # noqa: ARG001
    """The parts, with nobody watching."""
    return iter(parts)


def ticking(track: Track, steps: int, stage: str) -> Progress:
    """A function that tells the track, whenever it is called, that one more of the steps is done.

    >>> told = ticking(lambda parts, stage: map(print, parts), 2, "stage")
    0
    >>> told(0.5)
    1
    """
    parts = track(range(steps), stage)

    def told(_share: float) -> None:
        next(parts, None)

    told(0.0)  # the first step begins
    return told


@contextmanager
def reporting(estimator: Any, task: str) -> Iterator[Track]:
    """A `Track` that tells the callbacks of the estimator of every stage and part of the task.

    For use in a method under `sklearn.callback.with_callbacks`, which tears the callbacks down,
    also after an error; the task itself is told to have ended only where there was none.
    """
    root = estimator._init_callback_context(task_name=task, max_subtasks=None)
    root.call_on_fit_task_begin(estimator=estimator)

    def track(parts: Sequence[Part], stage: str) -> Iterator[Part]:
        context = root.subcontext(task_name=stage, max_subtasks=len(parts))
        context.call_on_fit_task_begin(estimator=estimator)
        for part in parts:
            step = context.subcontext(task_name="part").call_on_fit_task_begin(estimator=estimator)
            yield part
            step.call_on_fit_task_end(estimator=estimator)
        context.call_on_fit_task_end(estimator=estimator)

    yield track
    root.call_on_fit_task_end(estimator=estimator)
