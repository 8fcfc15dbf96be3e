"""Progress of long work: a stage by name, and the share of it that is done.

Work that goes through examples takes a `Progress` and calls it with the share of the pass that is
done. A display takes a `StageProgress`, which also has the name of the stage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[float], None]  # called with the share of a pass that is done
StageProgress: TypeAlias = Callable[[str, float], None]  # called with a stage and its share done


def no_progress(_share: float) -> None:
    """Report nothing."""


def no_stage_progress(_stage: str, _share: float) -> None:
    """Report nothing."""
