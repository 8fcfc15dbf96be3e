"""Checks of the arguments of `recover`, before any work is done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from onelayer import spelling
from onelayer.array import backend, checks
from onelayer.array.backend import Array
from onelayer.data import sources
from onelayer.data.chunks import Chunk
from onelayer.data.progress import Progress, no_progress
from onelayer.data.sources import Source
from onelayer.data.storage import Positions
from onelayer.recovery import ragged, roles

_LARGEST_TOL = 1e-3
_LARGEST_ENTRY = 1e100  # of X, or one over it: beyond, scores are not representable
_FEWEST_TO_SCULPT = 20
_LEAST_DIM_TO_SCULPT, _LARGEST_DIM_TO_SCULPT = 2, 48  # beyond, slabs alone take gigabytes
METHODS = ("auto", "refine", "sculpt")


@dataclass(frozen=True, eq=False)
class ValidatedExamples:
    """Checked examples: a source of chunks (X, Y, roles), and what a pass over them showed."""

    source: Source
    largest: tuple[float, float]  # absolute entries of X and of Y
    rows: int  # whose outputs are observed

    @classmethod
    def of(cls, source: Source, progress: Progress = no_progress) -> ValidatedExamples:
        """Examples of checked shapes and dtypes, from one pass that refuses infinite entries."""
        found = source.chunks.map(_summary).reduce(_EntryStatistics.merge, progress)
        for bad, name in zip(found.bad, ("X", "Y"), strict=True):
            backend.refuse_infinite(bad, name)
        alike = zip(source.samples[:2], found.single, strict=True)
        X, Y = (sample if single else backend.double(sample) for sample, single in alike)
        return cls(replace(source, samples=(X, Y, source.samples[2])), found.largest, found.rows)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Examples, tokens, dimension of a token, dimension of an output."""
        X, Y, _ = self.source.samples
        return len(self.source), int(X.shape[1]), int(X.shape[2]), int(Y.shape[2])

    @property
    def masked(self) -> bool:
        """Whether tokens may be padding, or outputs not observed."""
        return self.source.samples[2] is not None

    @property
    def partly_observed(self) -> bool:
        return roles.partly(self.source.samples[2])

    def take(self, positions: Positions) -> ValidatedExamples:
        """The examples at some positions, in memory."""
        return self.of(sources.in_memory(*self.source.rows(positions)))

    def in_pieces(self) -> ValidatedExamples:
        """The same examples, worked on piece by piece if they are in memory."""
        return replace(self, source=self.source.in_pieces())


def examples(
    X: Any,
    Y: Any,
    mask: Any,
    device: str | None = None,
    progress: Progress = no_progress,
    observed: Any = None,
) -> ValidatedExamples:
    """X, Y and the roles of tokens, checked in one pass, wherever they live.

    Integers stay integers. Outputs that are not observed become zeros.
    """
    if ragged.is_ragged(X):
        X, Y, mask, observed = ragged.padded(X, Y, mask, observed)
    given, streamed = {"X": X, "Y": Y}, sources.is_streamed(X) or sources.is_streamed(Y)
    for name, value in given.items():
        if value is None:
            raise TypeError(f"{name} is None, expected examples (n, tokens, dim)")
        sources.refuse_generator(value, name)
        _refuse_outputs_of_torch(value, name)
        if not streamed:  # dtypes and axes are named before lengths are compared
            given[name] = backend.as_array(value, name)
            backend.check_real(given[name], name)
            checks.token_shape(tuple(given[name].shape), name)
    pattern, by_example = roles.given(observed)
    source = sources.source({**given, "mask": mask, "observed": by_example})
    _check_samples(source)
    roles.check_pattern(pattern, int(source.samples[0].shape[1]))
    if source.chunks.remote and device not in (None, "cpu"):
        raise ValueError(
            f"device={device!r} was asked for, but the examples are on a Dask cluster, "
            "expected device=None: its workers compute where they are"
        )
    checked = source.chunks.map(_checked, source.lengths, source.samples[:2], pattern)
    X, Y, mask, by_example = source.samples
    if pattern is not None or by_example is not None:
        mask = roles.sample(X)
    elif mask is not None:
        mask = backend.as_boolean(mask, "mask")
    samples = (X, Y, mask)
    found = ValidatedExamples.of(replace(source, chunks=checked, samples=samples), progress)
    largest, _ = found.largest
    if not (largest == 0 or 1 / _LARGEST_ENTRY < largest < _LARGEST_ENTRY):
        raise ValueError(
            f"X has entries up to {largest:.0e}, expected between {1 / _LARGEST_ENTRY:.0e} "
            f"and {_LARGEST_ENTRY:.0e}: scale it"
        )
    return found


def _refuse_outputs_of_torch(value: Any, name: str) -> None:
    """Refuse a tuple of arrays of examples, as modules of torch return with attention weights."""
    if not isinstance(value, tuple) or not value or len(getattr(value[0], "shape", ())) != 3:
        return
    shapes = ", ".join(
        str(tuple(one.shape)) if hasattr(one, "shape") else type(one).__name__ for one in value
    )
    raise TypeError(
        f"{name} is a tuple of {shapes}, expected one array (examples, tokens, dim); "
        f"torch.nn.MultiheadAttention returns (outputs, weights): give {name}[0]"
    )


def _check_samples(source: Source) -> None:
    """Refuse examples by the shape and dtype of one of them."""
    n, (X, Y, mask, observed) = len(source), source.samples
    for sample, name in ((X, "X"), (Y, "Y")):
        backend.check_real(sample, name)
        checks.token_shape((n, *sample.shape[1:]), name)
    if Y.shape[1] != X.shape[1]:
        raise ValueError(
            f"X has {X.shape[1]} tokens of dimension {X.shape[2]}, but Y has {Y.shape[1]} rows: "
            "expected one output row per token"
        )
    if n < 2:
        raise ValueError(
            "X has 1 example, expected at least 2: one is held out for the certificate"
        )
    if mask is not None and mask.shape[1:] != X.shape[1:2]:
        raise ValueError(
            f"mask has shape {(n, *mask.shape[1:])}, expected {(n, int(X.shape[1]))}: "
            "one entry per token of X"
        )
    if observed is not None and observed.shape[1:] != X.shape[1:2]:
        raise ValueError(
            f"observed has shape {(n, *observed.shape[1:])}, expected {(n, int(X.shape[1]))}, "
            f"({int(X.shape[1])},), 'first' or 'last': one entry per token of X"
        )


@dataclass(frozen=True)
class _EntryStatistics:
    """What some chunks showed."""

    bad: tuple[int, int]  # entries of X and Y that are not finite
    largest: tuple[float, float]
    single: tuple[bool, bool]  # whether all are float32
    rows: int

    def merge(self, other: _EntryStatistics) -> _EntryStatistics:
        return _EntryStatistics(
            (self.bad[0] + other.bad[0], self.bad[1] + other.bad[1]),
            (max(self.largest[0], other.largest[0]), max(self.largest[1], other.largest[1])),
            (self.single[0] and other.single[0], self.single[1] and other.single[1]),
            self.rows + other.rows,
        )


def _checked(
    chunk: Chunk, length: int, samples: tuple[Array, Array], pattern: roles.Pattern
) -> Chunk:
    """A chunk with X, Y and roles in the kind of the first X, refused if they cannot be."""
    X, Y, mask, by_example = chunk.arrays
    for array, sample, name in zip((X, Y), samples, ("X", "Y"), strict=True):
        backend.check_real(array, name)
        expected = (length, *sample.shape[1:])
        if tuple(array.shape) != expected:  # a Dask array may have other chunks than it says
            raise ValueError(
                f"{name} has a chunk of shape {tuple(array.shape)} at example {chunk.start}, "
                f"expected {expected}"
            )
    X, Y = backend.as_device(X, samples[0]), backend.as_device(Y, samples[0])
    mask = checks.key_mask(mask, X, start=chunk.start)
    found = roles.of(mask, by_example, pattern, X, chunk.start)
    if roles.partly(found):
        _, Y = without_padding(X, Y, found)  # an unknown output may be anything, NaN too
    return Chunk(chunk.start, (X, Y, found))


def _summary(chunk: Chunk) -> _EntryStatistics:
    X, Y, kinds = chunk.arrays
    float32 = backend.namespace(X).float32
    single = bool(X.dtype == float32), bool(Y.dtype == float32)
    bad = backend.count_infinite(X), backend.count_infinite(Y)
    if any(bad):
        return _EntryStatistics(bad, (0.0, 0.0), single, 0)
    X, Y = without_padding(X, Y, kinds)
    largest = backend.largest(X), backend.largest(Y)
    return _EntryStatistics(bad, largest, single, counted(X, kinds))


def without_padding(X: Array, Y: Array, kinds: Array | None) -> tuple[Array, Array]:
    """X and Y with zeros in place of padding and of outputs that are not observed, by roles."""
    there, observed = roles.there(kinds), roles.observed(kinds)
    if there is None or observed is None:
        return X, Y
    xp = backend.namespace(X)
    X = xp.where(there[:, :, None], X, xp.zeros_like(X))
    return X, xp.where(observed[:, :, None], Y, xp.zeros_like(Y))


def counted(X: Array, kinds: Array | None) -> int:
    """The number of rows whose outputs are observed, by roles."""
    observed = roles.observed(kinds)
    if observed is None:
        return int(X.shape[0] * X.shape[1])
    xp = backend.namespace(observed)
    return int(xp.sum(xp.astype(observed, xp.int64)))


def number_of_heads(heads: Any) -> int | Literal["auto"]:
    if isinstance(heads, str):
        if heads != "auto":
            hint = spelling.did_you_mean(heads, ["auto"])
            raise ValueError(f"heads is {heads!r}, expected a whole number or 'auto'{hint}")
        return "auto"
    return checks.positive_int(heads, "heads")


def tolerance(tol: Any) -> float:
    number = checks.positive_number(tol, "tol")
    if number > _LARGEST_TOL:
        raise ValueError(
            f"tol is {number:g}, expected at most {_LARGEST_TOL:g}: a looser fit is no recovery"
        )
    return number


def known_rank(rank: Any, dim: int) -> int | None:
    """None for full rank, which a rank of the whole dimension is too."""
    if rank is None:
        return None
    rank = checks.positive_int(rank, "rank")
    if rank > dim:
        raise ValueError(f"rank is {rank}, expected at most {dim}, the dimension of a token")
    return None if rank == dim else rank


def method(method: Any) -> None:
    spelling.one_of(method, "method", METHODS)


def why_not_sculpt(
    given: ValidatedExamples, heads: int | Literal["auto"], bias: bool = False, causal: bool = False
) -> str | None:
    """What is in the way of method='sculpt', None if nothing is."""
    n, _, dim, _ = given.shape
    if given.partly_observed:
        return (
            "method='sculpt' was asked for with observed, expected outputs of all tokens: "
            "method='refine' finds layers from some of them"
        )
    for name, value in (("mask", given.masked), ("bias", bias), ("causal", causal)):
        if value:
            return (
                f"method='sculpt' was asked for with {name}, expected neither biases nor masks: "
                "method='refine' finds such layers"
            )
    if n < _FEWEST_TO_SCULPT:
        return f"X has {n} examples, expected at least {_FEWEST_TO_SCULPT} for method='sculpt'"
    if dim < _LEAST_DIM_TO_SCULPT:
        return (
            f"X has tokens of dimension {dim}, expected at least {_LEAST_DIM_TO_SCULPT} for "
            "method='sculpt'"
        )
    if dim > _LARGEST_DIM_TO_SCULPT:
        return (
            f"X has tokens of dimension {dim}, expected at most {_LARGEST_DIM_TO_SCULPT} for "
            "method='sculpt', which works with dim² x dim² matrices: method='refine' does not"
        )
    if heads != "auto" and heads > dim * dim // 4:
        return (
            f"heads is {heads}, expected at most {dim * dim // 4} for method='sculpt' with tokens "
            f"of dimension {dim}"
        )
    return None
