"""Positional encodings of tokens.

Tokens are counted from 0 in the order of X. Every encoding has unit norm, as the tokens of
arXiv 2307.11353 have.

- `sinusoidal` adds sines and cosines of geometrically spaced frequencies (arXiv 1706.03762);
- `learned-random` adds a random direction for each position, as a learned table has at its start;
- `onehot` appends one coordinate for each position, and knows only the positions seen at fit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onelayer import spelling
from onelayer.array import backend
from onelayer.array.backend import Array, NumpyArray

KINDS = (None, "sinusoidal", "learned-random", "onehot")


@dataclass(frozen=True)
class PositionalEncoding:
    """An encoding for tokens of dimension `dim`, up to `longest` tokens at fit."""

    kind: str | None
    dim: int
    longest: int
    seed: int = 0

    def __post_init__(self) -> None:
        spelling.one_of(self.kind, "positions", KINDS)
        if self.kind == "sinusoidal" and self.dim < 2:
            raise ValueError(
                "positions='sinusoidal' needs sines and cosines: "
                f"got tokens of n_features = {self.dim}, expected at least 2"
            )

    @property
    def encoded_dim(self) -> int:
        """The dimension of an encoded token."""
        return self.dim + (self.longest if self.kind == "onehot" else 0)

    def used(self, varying: NumpyArray | None) -> NumpyArray:
        """Which coordinates of [encoded token; 1] may be nonzero, from those of the token."""
        used = np.ones(self.encoded_dim + 1, bool)
        if varying is not None and self.kind in (None, "onehot"):
            used[: self.dim] = varying
        return used

    def __call__(self, tokens: Array) -> Array:
        """Encoded tokens (n, T, encoded_dim) of tokens (n, T, d)."""
        if self.kind is None:
            return tokens
        count = int(tokens.shape[1])
        if self.kind != "onehot":
            return tokens + backend.like(self._table(count), tokens)
        if count > self.longest:
            raise ValueError(
                f"X has sets of {count} tokens, expected at most {self.longest}: "
                "positions='onehot' has no code for positions that fit did not see"
            )
        xp = backend.namespace(tokens)
        codes = backend.like(np.eye(count, self.longest), tokens)
        return xp.concat([tokens, xp.broadcast_to(codes, (tokens.shape[0], *codes.shape))], axis=2)

    def _table(self, count: int) -> NumpyArray:
        """Encodings of positions 0 .. count - 1, which do not depend on the count."""
        table: NumpyArray
        if self.kind == "sinusoidal":  # sines in the even and cosines in the odd coordinates
            pairs = -(-self.dim // 2)
            angles = np.arange(count)[:, None] / 10_000.0 ** (np.arange(pairs) / pairs)
            waves = np.stack([np.sin(angles), np.cos(angles)], axis=2)
            table = waves.reshape(count, 2 * pairs)[:, : self.dim]
        else:
            table = np.random.default_rng(self.seed).standard_normal((count, self.dim))
        table /= np.linalg.norm(table, axis=1, keepdims=True)
        return table
