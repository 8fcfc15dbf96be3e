"""Sets of tokens: the forms in which examples may be given, read in blocks of one form.

Blocks are tokens (b, T, d) with a mask (b, T) or None, standardized if the fit asks for it, from

- an array (n, T, d), on disk or in memory;
- the same with a mask (n, T);
- a list of arrays (T_i, d) of different lengths, padded block by block;
- an array (n, d) of single tokens (`single_tokens`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from onelayer.array import backend, blocks, checks
from onelayer.array.backend import Array, NumpyArray
from onelayer.data import standardization
from onelayer.data.standardization import Standardization, TokenMoments


@dataclass(frozen=True)
class SetRules:
    """What examples must have."""

    least_tokens: int = 2
    first: bool = True  # whether a mask must keep token 0
    name: str = "X"

    def refuse_masked(self, X: Any) -> None:
        backend.refuse_masked(X, self.name, ", with mask= for tokens that do not exist")

    def check_shape(self, shape: tuple[int, ...], described: str) -> None:
        """Refuse an example that is not (tokens, dim) with enough tokens."""
        if len(shape) != 2 or shape[1] == 0:
            raise ValueError(f"{described}, expected two axes (tokens, dim)")
        if shape[0] < self.least_tokens:
            enough = "a query and at least one key" if self.least_tokens > 1 else "a token"
            raise ValueError(f"{described}, expected {enough}")


_RULES = SetRules()


@dataclass(frozen=True)
class Sets:
    """Checked examples; `tokens` is an array (n, T, d) or a list of arrays (T_i, d)."""

    tokens: Array | list[Array]
    mask: Array | None
    dim: int
    longest: int
    standard: Standardization | None = None  # applied by `block`

    def __len__(self) -> int:
        return len(self.tokens) if isinstance(self.tokens, list) else int(self.tokens.shape[0])

    @property
    def sample(self) -> Array:
        """One example of `block`, with the namespace, device and dtype of all."""
        return self.block(slice(0, 1))[0]

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape (n, tokens, dim) of an array that holds all examples."""
        return len(self), self.longest, self.dim

    @property
    def varying(self) -> NumpyArray:
        """Which coordinates of a token may be nonzero, (dim,)."""
        return np.ones(self.dim, bool) if self.standard is None else self.standard.factor > 0

    def __getitem__(self, part: slice | tuple[slice, Any]) -> Sets:
        """Some of the examples; `sets[part, ...]` is `sets[part]`, as for arrays in a chunk."""
        rows = part[0] if isinstance(part, tuple) else part
        if isinstance(self.tokens, list):
            return replace(self, tokens=self.tokens[rows])
        mask = None if self.mask is None else self.mask[rows, :]
        return replace(self, tokens=self.tokens[rows, ...], mask=mask)

    def placed(self, device: str | None) -> Sets:
        """The same on a device; None leaves them where they are."""
        if isinstance(self.tokens, list):
            return replace(self, tokens=[backend.place(one, device) for one in self.tokens])
        mask = None if self.mask is None else backend.place(self.mask, device)
        return replace(self, tokens=backend.place(self.tokens, device), mask=mask)

    def block(self, part: slice) -> tuple[Array, Array | None]:
        """Tokens (b, T, d) in floating point, zero if missing, and their mask (b, T) or None."""
        tokens, mask = self._as_given(part)
        if self.standard is None:
            return tokens, mask
        tokens = self.standard(tokens)
        return (tokens, None) if mask is None else (_zeroed(tokens, mask), mask)

    def moments(self, weights: Array | None = None) -> TokenMoments:
        """Moments of all existing tokens before standardization, with weights (n,) of examples."""
        found = []
        for part in blocks.slices(len(self), 8 * self.longest * self.dim):
            tokens, mask = self._as_given(part)
            there = np.ones(tokens.shape[:2], bool) if mask is None else backend.to_numpy(mask)
            own = None if weights is None else backend.to_numpy(weights)[part]
            repeated = None if own is None else np.repeat(own, there.sum(axis=1))
            found.append(standardization.moments(backend.to_numpy(tokens)[there], repeated))
        return reduce(operator.add, found)

    def largest(self) -> float:
        """The largest absolute value of a coordinate before standardization."""
        parts = blocks.slices(len(self), 8 * self.longest * self.dim)
        return max(backend.largest(self._as_given(part)[0]) for part in parts)

    def _as_given(self, part: slice) -> tuple[Array, Array | None]:
        if isinstance(self.tokens, list):
            return _padded(self.tokens[part])
        tokens = backend.detached(backend.floating(self.tokens[part, ...]))
        if self.mask is None:
            return tokens, None
        mask = self.mask[part, ...]
        return _zeroed(tokens, mask), mask  # padding may hold anything


def _zeroed(tokens: Array, mask: Array) -> Array:

    xp = backend.namespace(tokens)
    return xp.where(mask[:, :, None], tokens, backend.zeros((1, 1, 1), tokens))


def is_collection_of_sets(X: Any) -> bool:
    """Whether X is an array of three or more axes, or a list with an array of two."""
    if isinstance(X, list | tuple) or (_holds_objects(X) and X.ndim == 1):
        return any(_axes(example) == 2 for example in X)
    return _axes(X) >= 3


def joined(parts: Sequence[Sets]) -> Sets:
    """Examples of several arrays in one."""
    xp = backend.namespace(parts[0].tokens)
    masks = [part.mask for part in parts if part.mask is not None]
    mask = xp.concat(masks, axis=0) if masks else None
    return replace(parts[0], tokens=xp.concat([part.tokens for part in parts], axis=0), mask=mask)


def as_sets(X: Any, mask: Any = None, rules: SetRules = _RULES, start: int = 0) -> Sets:
    """Check X (n, T, d), or a list of arrays (T_i, d); errors of a mask count from `start` on."""
    rules.refuse_masked(X)
    if not backend.is_array(X) or _holds_objects(X):
        if mask is not None:
            raise ValueError("mask was given with a list of arrays, expected an array for a mask")
        return _from_list(X, rules)
    shape, name = tuple(X.shape), rules.name
    if len(shape) != 3:
        raise ValueError(f"{name} has shape {shape}, expected three axes (examples, tokens, dim)")
    if shape[0] == 0 or shape[2] == 0:
        raise ValueError(
            f"{name} has shape {shape}, expected at least one example and one dimension"
        )
    rules.check_shape(shape[1:], f"{name} has shape {shape}")
    backend.check_real(X, name)
    for part in blocks.slices(shape[0], shape[1] * shape[2] * 8):  # a file is never loaded whole
        backend.check_finite(X[part, ...], name)
    return Sets(X, _checked_mask(mask, X, rules, start), shape[2], shape[1])


def single_tokens(X: Array, tokens: int = 2) -> Sets:
    """Rows of X (n, d) as examples of one token, repeated to be both query and key."""
    n, dim = X.shape
    repeated = backend.namespace(X).broadcast_to(X[:, None, :], (n, tokens, dim))
    return Sets(repeated, None, dim, tokens)


def _checked_mask(mask: Any, X: Array, rules: SetRules, start: int) -> Array | None:
    if mask is None:
        return None
    checked = checks.key_mask(mask, X, start=start)
    xp = backend.namespace(checked)
    there = xp.astype(checked, xp.int64)
    few = xp.sum(there, axis=1) < rules.least_tokens
    refused = [(few, "with one token, expected at least a key and a query after it")]
    if rules.first:
        refused = [
            (there[:, 0] == 0, "without its query, expected True for token 0"),
            (few, "without a key, expected at least one True after the query"),
        ]
    for bad, message in refused:
        if bool(xp.any(bad)):
            example = start + int(xp.argmax(xp.astype(bad, xp.int64)))
            raise ValueError(f"mask leaves example {example} {message}")
    return checked


def _from_list(X: Iterable[Any], rules: SetRules) -> Sets:
    name = rules.name
    examples = [backend.as_real(example, f"{name}[{i}]") for i, example in enumerate(X)]
    if not examples:
        raise ValueError(f"{name} is an empty list, expected at least one example")
    for i, example in enumerate(examples):
        shape = tuple(example.shape)
        rules.check_shape(shape, f"{name}[{i}] has shape {shape}")
        if shape[1] != examples[0].shape[1]:
            raise ValueError(
                f"{name}[{i}] has tokens of dimension {shape[1]}, "
                f"expected {examples[0].shape[1]} as {name}[0] has"
            )
    examples = [backend.detached(example) for example in backend.alike(examples)]
    longest = max(example.shape[0] for example in examples)
    return Sets(examples, None, int(examples[0].shape[1]), int(longest))


def _padded(examples: Sequence[Array]) -> tuple[Array, Array | None]:
    """Arrays (T_i, d) padded to one of shape (b, T, d), and its mask."""
    xp, lengths = backend.namespace(examples[0]), [int(example.shape[0]) for example in examples]
    longest = max(lengths)
    if min(lengths) == longest:
        return xp.stack(examples), None
    tokens = backend.zeros((len(examples), longest, examples[0].shape[1]), examples[0])
    for i, example in enumerate(examples):
        tokens[i, : lengths[i], :] = example
    count = xp.asarray(lengths, device=backend.device(tokens))
    position = xp.arange(longest, device=backend.device(tokens))
    return tokens, position[None, :] < count[:, None]


def _holds_objects(value: Any) -> bool:
    """Whether the value is an array or a data frame column of Python objects."""
    dtype = getattr(value, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.hasobject


def _axes(value: Any) -> int:
    """The number of axes of an array, of nested lists, or of anything else."""
    axes = 0
    while isinstance(value, list | tuple):
        axes += 1
        value = value[0] if value else None
    return axes + len(getattr(value, "shape", ()))
