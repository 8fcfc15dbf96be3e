"""Progress of a fit, told to the callbacks that scikit-learn's users set on an estimator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from onelayer.random_features.design import Part, Track


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
