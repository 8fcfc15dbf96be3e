"""Which token of an example is its query, and which are its keys.

- `first`: token 0 is the query, the others are keys;
- `last`: the last token that is there is the query, those before it are keys;
- `mean`: the query is the mean of all tokens, and all tokens are keys;
- `none`: there is no query. All tokens are keys, and in the place of the query stands a zero
  vector, so that with the constant 1 it is x̃_0 = [0; 1] for every example: an attention layer is
  then a function of the set of keys alone, the average of a function of each.

Tokens have their positions in them before one of them becomes the query: they are counted from 0
in the order in which they are given, whichever of them is the query.
"""

from __future__ import annotations

from typing import Any

from onelayer.array import backend
from onelayer.array.backend import Array

KINDS = ("first", "mean", "last", "none")


def checked(query: Any) -> str:
    """One of the kinds of queries."""
    if not isinstance(query, str) or query not in KINDS:
        expected = ", ".join(map(repr, KINDS))
        raise ValueError(f"query is {query!r}, expected one of {expected}")
    return query


def least_tokens(query: str) -> int:
    """How many tokens an example has at least: a query and a key, or a key."""
    return 2 if query in ("first", "last") else 1


def keys(query: str, tokens: int) -> int:
    """How many keys there are among so many tokens."""
    return tokens - 1 if query in ("first", "last") else tokens


def with_query_first(tokens: Array, mask: Array | None, query: str) -> tuple[Array, Array | None]:
    """Tokens (b, T, d) and their mask in the order that heads read: the query, then the keys."""
    if query == "first":
        return tokens, mask
    xp = backend.namespace(tokens)
    if query == "last" and mask is None:
        return xp.concat([tokens[:, -1:, :], tokens[:, :-1, :]], axis=1), None
    share = _shares(tokens, mask, query)
    found = xp.sum(tokens * share[:, :, None], axis=1, keepdims=True)
    if mask is not None:
        first = xp.ones((mask.shape[0], 1), dtype=mask.dtype, device=backend.device(mask))
        left = mask & (share == 0) if query == "last" else mask
        mask = xp.concat([first, left], axis=1)
    return xp.concat([found, tokens], axis=1), mask


def _shares(tokens: Array, mask: Array | None, query: str) -> Array:
    """How much each token adds to the query, (b, T)."""
    xp = backend.namespace(tokens)
    shape = tuple(tokens.shape[:2])
    if query == "none":
        return backend.zeros(shape, tokens)
    there = backend.ones(shape, tokens) if mask is None else xp.astype(mask, tokens.dtype)
    if query == "mean":
        return there / xp.sum(there, axis=1, keepdims=True)
    later = xp.flip(xp.cumulative_sum(xp.flip(there, axis=1), axis=1), axis=1)
    return there * xp.astype(later == 1, tokens.dtype)
