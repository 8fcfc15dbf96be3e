"""Examples as users give them to estimators, read and checked chunk by chunk.

X, its mask, y and the sample weights become chunks; examples in memory are one chunk. All are
checked by `validation.py`, so that results and messages are the same wherever examples live.
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
from onelayer.array.backend import Array, NumpyArray
from onelayer.data import sources
from onelayer.data.chunks import Chunk, Chunks, InMemory
from onelayer.data.dask import is_dask
from onelayer.data.sets import SetRules, Sets, as_sets
from onelayer.data.sources import Source
from onelayer.data.standardization import Standardization, TokenMoments
from onelayer.features import validation

OfSets = Callable[[Sets], Array]  # from sets (n, ..) to an array (n, ..)


class CheckedChunk(NamedTuple):
    """A chunk of examples that passed all checks."""

    start: int
    sets: Sets
    targets: Array | None  # numbers (n,) or (n, t), or labels (n,)
    weights: Array | None  # (n,)

    @property
    def scale(self) -> Array | None:
        """The root of the weights: rows times it turn weighted least squares into plain ones."""
        if self.weights is None:
            return None
        xp = backend.namespace(self.weights)
        return xp.astype(xp.sqrt(self.weights), self.sets.sample.dtype, copy=False)


@dataclass(frozen=True)
class ChunkReader:
    """How to read chunks of X, mask, y and weights; it is sent to where the chunks are."""

    rules: SetRules
    to_numpy: bool = False  # whether tensors are converted
    labels: bool = False  # whether y are labels of classes
    weight: float | None = None  # of every example

    @property
    def names(self) -> tuple[str, str, str, str]:  # in messages
        return self.rules.name, "mask", self.rules.name.replace("X", "y"), "sample_weight"

    def sets(self, chunk: Chunk) -> Sets:
        X, mask, *_ = chunk.arrays
        if isinstance(X, Sets):  # in memory they are checked before anything else
            return X
        X = validation.in_numpy(X) if self.to_numpy else X
        return as_sets(X, mask, self.rules, chunk.start)


class ExamplesSummary(NamedTuple):
    """What one pass over all examples shows."""

    error: Exception | None
    target_shape: tuple[int, ...] = ()  # of one example
    largest_weight: float = 1.0
    labels: NumpyArray = np.empty(0)  # the classes, in ascending order
    moments: TokenMoments | None = None  # of the tokens of the first examples


@dataclass(frozen=True, eq=False)
class GivenExamples:
    """What a user gave, and how it is read."""

    named: Mapping[str, Any]  # X, mask, y and weights; all but X may be None
    reader: ChunkReader
    form: Sets  # one example of zeros, in the form of all; in memory the checked examples
    streamed: bool

    @cached_property
    def source(self) -> Source:
        """All of it in chunks, unchecked."""
        if not self.streamed:
            chunk = Chunk(0, tuple(self.named.values()))
            return Source(InMemory((chunk,)), np.array([0, len(self.form)]), chunk.arrays)
        found = sources.source(self.named)
        if len(found) == 0:
            raise ValueError(f"{self.reader.names[0]} has no examples, expected at least one")
        return found

    @cached_property
    def checked(self) -> Chunks[CheckedChunk | Exception]:
        """All of it, checked; a refused chunk is its exception, so that the first one is raised."""
        lengths = self.source.lengths if self.streamed else None
        return self.source.chunks.map(_read, self.reader, lengths)

    def summarize(self, first: int | None = 0) -> ExamplesSummary:
        """Check all chunks; moments are those of the first examples, of all for None."""
        first = len(self.source) if first is None else first
        found = self.checked.map(_summarize, self.reader.labels, first).reduce(_merge)
        if found.error is not None:
            raise found.error
        validation.check_some_weight(found.largest_weight)
        if not self.reader.labels:
            return found
        count = len(found.labels)
        # As many of each class as there are on average: scikit-learn warns of too many classes.
        check_classification_targets(np.repeat(found.labels, max(1, len(self.source) // count)))
        return found._replace(target_shape=() if count == 2 else (count,))

    def rows(self, seen: ExamplesSummary, standard: Standardization | None) -> Source:
        """Chunks of sets, targets (n, t) times the scale of rows, and that scale (n,) or None."""
        found = self.checked.map(_rows, standard, seen.labels if self.reader.labels else None)
        targets = np.empty((1, *(seen.target_shape or (1,))))
        form = replace(self.form, standard=standard)
        return Source(found, self.source.starts, (form, targets, None))

    def apply(self, work: OfSets, standard: Standardization | None) -> Any:
        """`work` of all examples, in the kind that was given: see `sources.mapped`."""
        found = work(replace(self.form, standard=standard))
        if not self.streamed:
            return found
        there = partial(_apply, self.reader, work, standard)
        return sources.mapped(there, self.named, tuple(found.shape[1:]), found.dtype)


def in_memory(sets: Sets, y: Any, sample_weight: Any, reader: ChunkReader) -> GivenExamples:
    """Checked sets with their targets and weights, which may be streamed."""
    y, weight = validation.here(y, reader.names[2]), validation.here(sample_weight, "sample_weight")
    named = dict(zip(reader.names, (sets, None, y, weight), strict=True))
    return GivenExamples(named, reader, sets, streamed=False)


def streamed(
    X: Any, mask: Any, y: Any, sample_weight: Any, reader: ChunkReader, device: str | None
) -> GivenExamples:
    """Examples that are read chunk by chunk, of which only the form is checked."""
    if isinstance(sample_weight, numbers.Real):
        reader, sample_weight = replace(reader, weight=float(sample_weight)), None
    named = dict(zip(reader.names, (X, mask, y, sample_weight), strict=True))
    sample, name = sources.sample(named)[0], reader.rules.name
    sample = validation.in_numpy(sample) if reader.to_numpy else sample
    shape = tuple(map(int, sample.shape[1:]))
    reader.rules.check_shape(shape, f"{name} has examples of shape {shape}")
    backend.check_real(sample, name)
    zeros = Sets(backend.namespace(sample).zeros_like(sample), None, shape[1], shape[0])
    given = GivenExamples(named, reader, zeros, streamed=True)
    on_gpu = device not in (None, "cpu") and any(map(is_dask, named.values()))
    if on_gpu and given.source.chunks.remote:
        raise ValueError(
            f"device={device!r} was asked for, but {name} is on a Dask cluster, "
            "expected device=None: its workers compute where the examples are"
        )
    return given


def valid(checked: CheckedChunk | Exception) -> CheckedChunk:
    """A checked chunk; what was refused is raised."""
    if isinstance(checked, Exception):
        raise checked
    return checked


def _read(chunk: Chunk, reader: ChunkReader, length: int | None) -> CheckedChunk | Exception:
    for name, array in zip(reader.names, chunk.arrays, strict=True):
        # A Dask array may have chunks of another length than announced.
        if not (length is None or array is None or array.shape[0] == length):
            return ValueError(
                f"{name} has a chunk of {array.shape[0]} rows at example {chunk.start}, "
                f"expected {length} as it says itself"
            )
    *_, y, weights = chunk.arrays
    weights = reader.weight if weights is None else weights
    try:
        sets = reader.sets(chunk)
        if weights is not None:
            weights = validation.as_weights(weights, sets)
        if y is not None:
            as_targets = validation.as_labels if reader.labels else validation.as_targets
            y = as_targets(y, sets, reader.names[2])
        return CheckedChunk(chunk.start, sets, y, weights)
    except (TypeError, ValueError) as error:
        return error


def _summarize(checked: CheckedChunk | Exception, labels: bool, first: int) -> ExamplesSummary:
    if isinstance(checked, Exception):
        return ExamplesSummary(checked)
    start, sets, targets, weights = checked
    seen = ExamplesSummary(None)
    if weights is not None:
        seen = seen._replace(largest_weight=backend.largest(weights))
    if start < first:
        counted, scale = slice(0, first - start), checked.scale
        own = None if scale is None else scale[counted] ** 2
        seen = seen._replace(moments=sets[counted].moments(own))
    if targets is None:
        return seen
    if not labels:
        return seen._replace(target_shape=tuple(targets.shape[1:]))
    return seen._replace(labels=np.unique(targets))


def _merge(one: ExamplesSummary, other: ExamplesSummary) -> ExamplesSummary:
    """The summary of the chunks of two; of two errors the first counts."""
    if one.error or other.error:
        return ExamplesSummary(one.error or other.error)
    weight = max(one.largest_weight, other.largest_weight)
    moments = [seen.moments for seen in (one, other) if seen.moments is not None]
    together = reduce(operator.add, moments) if moments else None
    labels = np.union1d(one.labels, other.labels)
    return ExamplesSummary(None, one.target_shape, weight, labels, together)


def _rows(
    checked: CheckedChunk | Exception, standard: Standardization | None, classes: NumpyArray | None
) -> Chunk:
    start, sets, targets, _ = chunk = valid(checked)
    if classes is not None:  # +1 for the class of an example, -1 for others; one column for two
        hot = 2.0 * np.eye(len(classes))[np.searchsorted(classes, np.asarray(targets))] - 1.0
        hot = hot[:, 1] if len(classes) == 2 else hot
        targets = backend.like(hot, backend.double(sets.sample))
    scale = chunk.scale
    columns: Array = targets
    columns = columns if columns.ndim == 2 else columns[:, None]
    columns = columns if scale is None else columns * scale[:, None]
    return Chunk(start, (replace(sets, standard=standard), columns, scale))


def _apply(
    reader: ChunkReader, work: OfSets, standard: Standardization | None, chunk: Chunk
) -> Array:
    return work(replace(reader.sets(chunk), standard=standard))
