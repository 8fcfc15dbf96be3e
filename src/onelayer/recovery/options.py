"""The options of a recovery, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from onelayer.array import backend, checks
from onelayer.recovery import validation


@dataclass(frozen=True)
class Options:
    """Options of `recover`; see there for their meaning."""

    heads: int | Literal["auto"]
    rank: int | None = None  # None for full rank
    bias: bool = False
    causal: bool = False
    tol: float = 1e-12
    head_tol: float = 0.1
    device: str | None = None
    restarts: int = 20
    polish: bool = True
    checkpoint: Path | None = None
    resume: bool = False

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            "heads": validation.number_of_heads(self.heads),
            "tol": validation.tolerance(self.tol),
            "head_tol": checks.positive_number(self.head_tol, "head_tol"),
            "restarts": checks.whole_number(self.restarts, "restarts", least=0),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)  # since options are frozen
        for name in ("bias", "causal", "polish"):
            if not isinstance(getattr(self, name), bool | np.bool_):
                raise TypeError(f"{name} is {getattr(self, name)!r}, expected True or False")
        backend.check_device(self.device)

    @property
    def known_heads(self) -> int | None:
        """The number of heads, None if it is to be found."""
        return None if self.heads == "auto" else self.heads
