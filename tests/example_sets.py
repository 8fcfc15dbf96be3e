"""Small sets of tokens in all their forms, for the tests of random features."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from onelayer.data.sets import SetRules, as_sets

NO_MATTER = 1e30  # what padding may hold


@dataclass(frozen=True)
class Ragged:
    """The same examples as a list of arrays, and as an array with a mask."""

    examples: list[Any]
    X: Any
    mask: Any


def gaussian(*shape, seed=0, dtype="f8"):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def random_mask(rng, n, tokens):
    """A random mask that leaves every example its query and at least one key."""
    mask = rng.random((n, tokens)) < 0.6
    mask[:, 0] = True
    mask[np.arange(n), rng.integers(1, tokens, n)] = True
    return mask


def ragged(lengths, dim, seed=0, dtype="f8"):
    """Examples of these lengths."""
    X = gaussian(len(lengths), max(lengths), dim, seed=seed, dtype=dtype)
    mask = np.arange(max(lengths)) < np.array(lengths)[:, None]
    examples = [tokens[:length].copy() for tokens, length in zip(X, lengths, strict=True)]
    X[~mask] = NO_MATTER
    return Ragged(examples, X, mask)


@st.composite
def small_raggeds(draw):
    """A few short examples of different lengths."""
    lengths = draw(st.lists(st.integers(2, 5), min_size=1, max_size=5))
    return ragged(lengths, dim=draw(st.integers(1, 3)), seed=draw(st.integers(0, 2**32 - 1)))


def all_features(feature_map, X, mask=None, least_tokens=2):
    """All features of X, in any form, at once."""
    sets = as_sets(X, mask, SetRules(least_tokens))
    tokens, there = sets.block(slice(0, len(sets)))
    feature_map = feature_map.like(tokens)
    return feature_map.features(feature_map.prepare(tokens, there), slice(0, feature_map.size))
