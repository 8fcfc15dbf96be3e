"""The checked options of a recovery."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class Options:
    """Options of `recover`, checked; see there for their meaning."""

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

    @property
    def known_heads(self) -> int | None:
        """The number of heads, None if it is to be found."""
        return None if self.heads == "auto" else self.heads
