"""Checkpoints: the best layer so far in a file, from which a search that was killed goes on.

The file is that of any layer: `AttentionLayer.load` reads it. Attention matrices are all that a
search goes on from, so that it may also go on with other examples of the same layer, such as more
of them, or on another device.
"""

from __future__ import annotations

import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onelayer.layer import AttentionLayer
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.problem import Frame

_EVERY = 10.0  # seconds from one writing to the next, at least
_OVERFITTED = 3.0  # a fit to more examples is better up to so many times the error


@dataclass
class Keeper:
    """Writes the layer of a fit if it is better than what is in the file, and not too often."""

    path: Path
    frame: Frame
    least: float = np.inf  # error of the best fit so far
    examples: int = 0  # and on how many
    waiting: AttentionLayer | None = None  # its layer, if it is not in the file yet
    written: float = -np.inf  # when the file was
    resumed: bool = False  # whether the first fit is that of the file

    def offer(self, fit: Fit) -> None:
        """Keep a fit if it is better, for now in memory if it is too soon to write it."""
        if self.resumed:
            self.least, self.examples, self.resumed = fit.error, fit.batches.examples, False
        elif self._is_better(fit):
            self._take(fit)
        if time.monotonic() - self.written >= _EVERY:
            self.flush()

    def end(self, fit: Fit, solved: bool) -> None:
        """Keep the last fit if that is the answer, or better."""
        if solved or self._is_better(fit):
            self._take(fit)

    def _is_better(self, fit: Fit) -> bool:
        """Whether a fit is; one to fewer examples fits them better than it fits others."""
        trust = 1.0
        if fit.batches.examples != self.examples:
            trust = _OVERFITTED if fit.batches.examples > self.examples else 1 / _OVERFITTED
        return fit.error < trust * self.least

    def _take(self, fit: Fit) -> None:
        self.least, self.examples = fit.error, fit.batches.examples
        self.waiting = self.frame.layer(fit.theta, fit.weights)

    def flush(self) -> None:
        """Write what is waiting; a full disk is no reason to give up a search."""
        if self.waiting is None:
            return
        try:
            self.waiting.save(self.path)
        except OSError as error:
            warnings.warn(f"checkpoint {self.path} was not written: {error}", stacklevel=2)
            return
        self.waiting, self.written = None, time.monotonic()


def path_of(checkpoint: Any, resume: Any) -> Path | None:
    """The checked path of a checkpoint, None if there is to be none."""
    if not isinstance(resume, bool):
        raise TypeError(f"resume is {resume!r}, expected True or False")
    if checkpoint is None:
        if resume:
            raise ValueError("resume is True and checkpoint None, expected a file to go on from")
        return None
    if not isinstance(checkpoint, str | os.PathLike):
        raise TypeError(f"checkpoint is {checkpoint!r}, expected a path or None")
    path = Path(checkpoint)
    if path.is_dir():
        raise ValueError(f"checkpoint {path} is a folder, expected a file")
    if not path.parent.is_dir():
        raise ValueError(f"checkpoint {path} is in no folder that exists, expected one")
    if not os.access(path.parent, os.W_OK):
        raise ValueError(f"checkpoint {path} is in a folder that cannot be written to")
    if resume and not path.exists():
        raise ValueError(f"checkpoint {path} does not exist, expected a file to go on from")
    if path.exists() and not resume:
        raise ValueError(
            f"checkpoint {path} exists, expected resume=True to go on from it, or another file"
        )
    return path


def read(path: Path, heads: int | None, shape: tuple[int, int], bias: bool) -> AttentionLayer:
    """The layer of a checkpoint, checked against so many heads (None: any), (dim, out_dim), bias.

    It may have more heads: a search adds some for a while.
    """
    layer = AttentionLayer.load(path)
    if (layer.dim, layer.out_dim) != shape:
        raise ValueError(
            f"checkpoint {path} has dim, out_dim = {(layer.dim, layer.out_dim)}, expected {shape} "
            "as the examples have"
        )
    if heads is not None and layer.heads < heads:
        raise ValueError(
            f"checkpoint {path} has {layer.heads} heads, expected {heads} as asked for, or more"
        )
    if (layer.key_bias is not None) != bias:
        has, expected = ("no biases", "biases") if bias else ("biases", "none")
        raise ValueError(f"checkpoint {path} has {has}, expected {expected} as bias={bias}")
    return layer
