"""The checked options of a recovery."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from onelayer.array import backend, checks
from onelayer.recovery import validation
from onelayer.recovery.strategies.checkpoint import checked_path
from onelayer.recovery.validation import ValidatedExamples


@dataclass(frozen=True)
class Options:
    """Options of `recover`, checked; see there for their meaning."""

    heads: int | Literal["auto"]
    method: str = "auto"
    rank: int | None = None  # None for full rank
    bias: bool = False
    causal: bool = False
    tol: float = 1e-12
    head_tol: float = 0.1
    device: str | None = None
    restarts: int = 20
    max_steps: int = 3000
    max_seconds: float | None = None
    polish: bool = True
    checkpoint: Path | None = None
    resume: bool = False

    @property
    def known_heads(self) -> int | None:
        """The number of heads, None if it is to be found."""
        return None if self.heads == "auto" else self.heads

    @classmethod
    def checked(cls, *, checkpoint: Any, resume: Any, **given: Any) -> Options:
        """The options as given to `recover`; the rank is checked once the examples are known."""
        options = cls(**given)
        validation.method(options.method)
        heads = validation.number_of_heads(options.heads)
        tol = validation.tolerance(options.tol)
        head_tol = checks.positive_number(options.head_tol, "head_tol")
        restarts = checks.whole_number(options.restarts, "restarts", least=0)
        max_steps = checks.positive_int(options.max_steps, "max_steps")
        max_seconds = options.max_seconds
        if max_seconds is not None:
            max_seconds = checks.positive_number(max_seconds, "max_seconds")
        if not isinstance(options.polish, bool):
            raise TypeError(f"polish is {options.polish!r}, expected True or False")
        path = checked_path(checkpoint, resume)
        if path is not None and options.method == "sculpt":
            raise ValueError("checkpoint is given with method 'sculpt', which writes none")
        backend.check_device(options.device)
        return replace(
            options,
            heads=heads,
            tol=tol,
            head_tol=head_tol,
            restarts=restarts,
            max_steps=max_steps,
            max_seconds=max_seconds,
            checkpoint=path,
            resume=resume,
        )

    def for_examples(self, examples: ValidatedExamples) -> Options:
        """The options checked against the examples."""
        if self.method == "sculpt":
            validation.sculpting(examples, self.heads, bias=self.bias, causal=self.causal)
        return replace(self, rank=validation.known_rank(self.rank, examples.shape[2]))
