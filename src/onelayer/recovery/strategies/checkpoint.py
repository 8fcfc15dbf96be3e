"""Checkpoints: the best layer so far in a file, from which an interrupted search resumes.

The file is that of any layer: `AttentionLayer.load` reads it. A search needs the attention matrices
only, so it can also resume with other examples of the same layer, or on another device.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onelayer.array.backend import Array
from onelayer.layer import AttentionLayer
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.strategies.settings import StageSettings
from onelayer.recovery.whitening import Whitening

_SECONDS_BETWEEN_WRITES = 10.0


@dataclass
class Checkpointer:
    """Writes the layer of the best fit so far to a file, but not too often."""

    path: Path
    transform: Whitening
    overfitted: float = StageSettings.overfitted  # error ratio of fits to more and fewer examples
    least: float = np.inf  # error of the best fit so far
    examples: int = 0  # number of examples of that fit
    waiting: AttentionLayer | None = None  # its layer, if it is not in the file yet
    written: float = -np.inf  # time of the last write
    resumed: bool = False  # whether the first fit is that of the file

    def offer(self, fit: Fit) -> None:
        """Take a fit if it is better, and write it unless the last write was too recent."""
        self.offer_layer(fit.error, fit.batches.examples, lambda: (fit.theta, fit.weights))

    def offer_layer(
        self, error: float, examples: int, layer: Callable[[], tuple[Array, Array]]
    ) -> None:
        """The same for theta and weights with some error on some number of examples."""
        if self.resumed:
            self.least, self.examples, self.resumed = error, examples, False
        elif self._is_better(error, examples):
            self._take(error, examples, *layer())
        if time.monotonic() - self.written >= _SECONDS_BETWEEN_WRITES:
            self.flush()

    def finish(self, fit: Fit, solved: bool) -> None:
        """Take the last fit if it is solved or better than any before."""
        error, examples = fit.error, fit.batches.examples
        if solved or self._is_better(error, examples):
            self._take(error, examples, fit.theta, fit.weights)

    def _is_better(self, error: float, examples: int) -> bool:
        """Whether a fit is better; one to fewer examples has a smaller error on them."""
        trust = 1.0
        if examples != self.examples:
            trust = self.overfitted if examples > self.examples else 1 / self.overfitted
        return error < trust * self.least

    def _take(self, error: float, examples: int, theta: Array, weights: Array) -> None:
        self.least, self.examples = error, examples
        self.waiting = self.transform.layer(theta, weights)

    def flush(self) -> None:
        """Write the waiting layer; the search continues if the disk is full."""
        if self.waiting is None:
            return
        try:
            self.waiting.save(self.path)
            self.waiting, self.written = None, time.monotonic()
        except OSError as error:
            warnings.warn(f"checkpoint {self.path} was not written: {error}", stacklevel=2)


def checked_path(checkpoint: Any, resume: Any, method: str) -> Path | None:
    """The path of the checkpoint, None if none is asked for."""
    if not isinstance(resume, bool):
        raise TypeError(f"resume is {resume!r}, expected True or False")
    if checkpoint is None:
        if resume:
            raise ValueError("resume is True and checkpoint None, expected a file to resume from")
        return None
    if not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(f"checkpoint is {checkpoint!r}, expected a path or None")
    if method == "sculpt":
        raise ValueError("checkpoint is given with method 'sculpt', which writes none")
    path = Path(checkpoint)
    if path.is_dir():
        raise ValueError(f"checkpoint {path} is a folder, expected a file")
    if not path.parent.is_dir():
        raise ValueError(f"checkpoint {path} is in a folder that does not exist")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"checkpoint {path} is in a folder that cannot be written to")
    if resume and not path.exists():
        raise ValueError(f"checkpoint {path} does not exist, expected a file to resume from")
    if path.exists() and not resume:
        raise ValueError(
            f"checkpoint {path} exists, expected resume=True to resume from it, or another file"
        )
    return path


def load(path: Path, heads: int | None, shape: tuple[int, int], bias: bool) -> AttentionLayer:
    """The layer of a checkpoint, checked against the heads (None: any), (dim, out_dim) and bias."""
    layer = AttentionLayer.load(path)
    if (layer.dim, layer.out_dim) != shape:
        raise ValueError(
            f"checkpoint {path} has dim, out_dim = {(layer.dim, layer.out_dim)}, expected {shape} "
            "as the examples have"
        )
    if heads is not None and layer.heads < heads:  # more may be spare ones of a search
        raise ValueError(f"checkpoint {path} has {layer.heads} heads, expected at least {heads}")
    if (layer.key_bias is not None) != bias:
        has, expected = ("no biases", "biases") if bias else ("biases", "none")
        raise ValueError(f"checkpoint {path} has {has}, expected {expected} as bias={bias}")
    return layer
