"""Which token of an example is its query, and which are its keys: see `RandomFeatureAttention`.

Positions are encoded before a token becomes the query: they count tokens in the order of X.
"""

from __future__ import annotations

from typing import Any

from onelayer import spelling
from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data.sets import SetRules

KINDS = ("first", "mean", "last", "none")


def checked(query: Any) -> str:
    return str(spelling.one_of(query, "query", KINDS))


def rules(query: Any, name: str) -> SetRules:
    """What examples must have for a kind of query: a query and a key, or a key."""
    return SetRules(2 if checked(query) in ("first", "last") else 1, query == "first", name)


def keys(query: str, tokens: int) -> int:
    """The number of keys among tokens."""
    return tokens - 1 if query in ("first", "last") else tokens


def with_query_first(tokens: Array, mask: Array | None, query: str) -> tuple[Array, Array | None]:
    """Tokens (b, T, d) and their mask with the query first, then the keys."""
    if query == "first":
        return tokens, mask
    xp = backend.namespace(tokens)
    if query == "last" and mask is None:
        return xp.concat([tokens[:, -1:, :], tokens[:, :-1, :]], axis=1), None
    shape = tuple(tokens.shape[:2])
    there = backend.ones(shape, tokens) if mask is None else xp.astype(mask, tokens.dtype)
    if query == "none":
        share = backend.zeros(shape, tokens)
    elif query == "mean":
        share = there / xp.sum(there, axis=1, keepdims=True)
    else:
        later = xp.flip(xp.cumulative_sum(xp.flip(there, axis=1), axis=1), axis=1)
        share = there * xp.astype(later == 1, tokens.dtype)
    found = xp.sum(tokens * share[:, :, None], axis=1, keepdims=True)
    if mask is not None:
        first = xp.ones((mask.shape[0], 1), dtype=mask.dtype, device=backend.device(mask))
        mask = xp.concat([first, mask & (share == 0) if query == "last" else mask], axis=1)
    return xp.concat([found, tokens], axis=1), mask
