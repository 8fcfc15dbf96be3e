"""The door for examples that are elsewhere, and the way back of what is predicted for them.

What `validation.py` does at once with examples in memory is done here with every chunk, where it
is: by the same functions, and so in the same words.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from typing import Any, NamedTuple

import numpy as np
from sklearn.utils.multiclass import check_classification_targets

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data import sets as sets_module
from onelayer.data import sources
from onelayer.data.chunks import Chunk
from onelayer.data.dask import is_dask
from onelayer.data.sets import Sets
from onelayer.data.sources import Source
from onelayer.data.standardization import Moments, Standardization
from onelayer.features import validation

Answer = Callable[[Sets], Array]  # from sets (n, ..) to an array (n, ..)


@dataclass(frozen=True)
class Reader:
    """How a chunk of what was given, (X, mask, y, weights), is to be read; sent to where it is."""

    least_tokens: int
    to_numpy: bool = False  # whether tensors are converted
    labels: bool = False  # whether y are labels of classes
    name: str = "X"
    weight: float | None = None  # of every example
    classes: np.ndarray[Any, Any] | None = None  # in ascending order, where they are known
    first: bool = True  # whether a mask is to leave token 0
    standard: Standardization | None = None  # of all tokens, where it is known

    @property
    def y_name(self) -> str:
        """The name of the targets of examples of this name."""
        return self.name.replace("X", "y")

    def check_length(self, chunk: Chunk, expected: int) -> None:
        """Refuse other than so many examples: a Dask array may be wrong about its chunks."""
        names = (self.name, "mask", self.y_name, "sample_weight")
        for name, array in zip(names, chunk.arrays, strict=True):
            if array is not None and array.shape[0] != expected:
                raise ValueError(
                    f"{name} has a chunk of {array.shape[0]} rows at example {chunk.start}, "
                    f"expected {expected} as it says itself"
                )

    def sets(self, chunk: Chunk) -> Sets:
        """The examples of a chunk, checked."""
        X, mask, *_ = chunk.arrays
        X = validation.in_numpy(X) if self.to_numpy else X
        sets = sets_module.as_sets(
            X, mask, self.least_tokens, self.name, start=chunk.start, first=self.first
        )
        return replace(sets, standard=self.standard)

    def targets(self, chunk: Chunk, sets: Sets) -> Array:
        """What there is to learn of them, (n,) or (n, t) in float64."""
        y = chunk.arrays[2]
        if self.classes is None:
            return validation.as_targets(y, sets, self.y_name)
        index = np.searchsorted(self.classes, validation.as_labels(y, sets))
        return validation.one_hot(index, len(self.classes), sets)

    def weights(self, chunk: Chunk, sets: Sets) -> Array | None:
        """Their weights (n,), or None."""
        given = chunk.arrays[3] if self.weight is None else self.weight
        return None if given is None else validation.as_weights(given, sets)

    def rows(self, chunk: Chunk) -> Chunk:
        """Sets, targets (n, t) times the scale of rows, and that scale (n,) or None."""
        sets = self.sets(chunk)
        weights = self.weights(chunk, sets)
        scale = None if weights is None else validation.row_scale(weights, sets)
        columns = validation.columns(self.targets(chunk, sets), scale)
        return Chunk(chunk.start, (sets, columns, scale))


@dataclass(frozen=True, eq=False)
class Given:
    """What was given and nobody has looked at, by its names, and how it is to be read."""

    named: Mapping[str, Any]  # X, mask, y and weights, of which all but X may be None
    reader: Reader
    samples: tuple[Array, ...]  # one example each, of which only form and kind are to be read

    @property
    def form(self) -> Sets:
        """An example of zeros, by which the form and kind of all are known."""
        X = validation.in_numpy(self.samples[0]) if self.reader.to_numpy else self.samples[0]
        zeros, (_, tokens, dim) = backend.namespace(X).zeros_like(X), map(int, X.shape)
        return Sets(zeros, None, dim, tokens, self.reader.standard)

    @property
    def flat(self) -> bool:
        """Whether targets have one axis."""
        classes = self.reader.classes
        return self.samples[2].ndim == 1 if classes is None else len(classes) == 2

    @property
    def targets(self) -> int:
        """The number of targets."""
        if self.flat:
            return 1
        classes = self.reader.classes
        return int(self.samples[2].shape[1]) if classes is None else len(classes)

    @cached_property
    def source(self) -> Source:
        """All of it in chunks."""
        found = sources.source(self.named)
        if len(found) == 0:
            raise ValueError(f"{self.reader.name} has no examples, expected at least one")
        return found

    def look(self, first: int | None = 0) -> Seen:
        """One way through all chunks, which refuses what is wrong with any of them.

        It has the moments of the tokens of the first examples, of all for None.
        """
        first = len(self.source) if first is None else first
        seen = self.source.chunks.map(_look, self.reader, self.source.lengths, first)
        found: Seen = seen.reduce(_both)
        if found.objection is not None:
            raise found.objection
        validation.check_some_weight(found.largest_weight)
        return found

    def examples(self) -> Source:
        """Sets, targets (n, t) and the scale of rows (n,) or None, in chunks."""
        ready = self.source.chunks.map(_rows, self.reader)
        return Source(ready, self.source.starts, (self.form, np.empty((1, self.targets)), None))

    def answers(self, work: Answer) -> Any:
        """`work` of all examples, in the kind that was given: see `sources.mapped`."""
        like = work(self.form)
        there = partial(_answer, self.reader, work)
        return sources.mapped(there, self.named, tuple(like.shape[1:]), like.dtype)


class Seen(NamedTuple):
    """What a look at examples has shown."""

    objection: Exception | None
    largest_weight: float = 1.0
    labels: np.ndarray[Any, Any] = np.empty(0)  # of classes: all different, in ascending order
    moments: Moments | None = None  # of the tokens of the first examples, where it has some


def opened(
    X: Any,
    mask: Any,
    reader: Reader,
    device: str | None,
    y: Any = None,
    sample_weight: Any = None,
) -> Given:
    """Examples that are elsewhere, with what belongs to them, cut alike."""
    if isinstance(sample_weight, numbers.Real):
        reader, sample_weight = replace(reader, weight=float(sample_weight)), None
    named = {reader.name: X, "mask": mask, reader.y_name: y, "sample_weight": sample_weight}
    samples = sources.sample(named)
    sets_module.check_example(tuple(samples[0].shape[1:]), reader.least_tokens, reader.name)
    backend.check_real(samples[0], reader.name)
    given = Given(named, reader, samples)
    on_gpu = device not in (None, "cpu") and any(map(is_dask, named.values()))
    if on_gpu and given.source.chunks.remote:
        raise ValueError(
            f"device={device!r} was asked for, but {reader.name} is on a Dask cluster, "
            "expected device=None: its workers compute where the examples are"
        )
    return given


def _answer(reader: Reader, work: Answer, chunk: Chunk) -> Array:
    return work(reader.sets(chunk))


def _look(chunk: Chunk, reader: Reader, length: int, first: int) -> Seen:
    try:
        reader.check_length(chunk, length)
        sets = reader.sets(chunk)
        weights = reader.weights(chunk, sets)
        seen = Seen(None) if weights is None else Seen(None, backend.largest(weights))
        if chunk.start < first:
            counted = slice(0, first - chunk.start)
            own = None if weights is None else weights[counted]
            seen = seen._replace(moments=sets[counted].moments(own))
        if reader.labels:
            return seen._replace(labels=_labels(chunk, sets))
        if chunk.arrays[2] is not None:
            reader.targets(chunk, sets)
    except (TypeError, ValueError) as error:  # the first chunk's is raised, wherever chunks are
        return Seen(error)
    return seen


def _labels(chunk: Chunk, sets: Sets) -> np.ndarray[Any, Any]:
    labels: np.ndarray[Any, Any] = np.unique(validation.as_labels(chunk.arrays[2], sets))
    check_classification_targets(np.repeat(labels, 2))  # few examples of a class are no objection
    return labels


def _both(one: Seen, other: Seen) -> Seen:
    """What two looks have shown; of two objections the first counts."""
    if one.objection or other.objection:
        return Seen(one.objection or other.objection)
    weight = max(one.largest_weight, other.largest_weight)
    moments = [seen.moments for seen in (one, other) if seen.moments is not None]
    together = reduce(operator.add, moments) if moments else None
    return Seen(None, weight, np.union1d(one.labels, other.labels), together)


def _rows(chunk: Chunk, reader: Reader) -> Chunk:
    return reader.rows(chunk)
