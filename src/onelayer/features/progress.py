"""Progress of a fit, reported to the callbacks of scikit-learn.

These callbacks count the parts of a stage, so work with many parts passes them through a `Track`
instead of reporting the share that is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from onelayer.data.progress import Progress

Part = TypeVar("Part")


class Track(Protocol):
    """Yields the parts of a stage one by one and reports each."""

    def __call__(self, parts: Sequence[Part], stage: str) -> Iterator[Part]: ...


def untracked(parts: Sequence[Part], stage: str) -> Iterator[Part]:  # noqa: ARG001
    """The parts, without a report."""
    return iter(parts)


def ticking(track: Track, steps: int, stage: str) -> Progress:
    """A `Progress` that reports one more of the steps to the track at every call."""
    parts = track(range(steps), stage)
    next(parts, None)  # the first step begins

    def tick(_share: float) -> None:
        next(parts, None)

    return tick


@contextmanager
def reporting(estimator: Any, task: str) -> Iterator[Track]:
    """A `Track` that reports every stage and part of a task to the callbacks of the estimator.

    It is for functions under `sklearn.callback.with_callbacks`, which tears the callbacks down.
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
