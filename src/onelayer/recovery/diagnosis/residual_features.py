"""Features of sequences and places that might predict what a fit leaves over.

Each kind is aimed at models that are close to attention but are not the one that was fitted:

    place       causal or padded attention, positions, a bias: the place of a row and of its keys
    restricted  the fitted heads where they may see only some keys: causal, windowed, relative
    output      something behind the layer (an MLP, a normalisation) or rows that were set to zero
    keys        covariances of the keys of a row: what a forgotten key bias changes
    sequence    neurons that read the row's token and summaries of the sequence: anything else

The sizes are such that each kind has a few hundred features, whatever the shape of the examples:
coordinates are mixed at random and places are grouped where there are many of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Values: TypeAlias = np.ndarray[Any, Any]

_PLACES = 16  # places are told apart up to this many, and grouped beyond
_PLACE_FEATURES, _KEY_FEATURES = 280, 128
_MIXED = 32  # coordinates of a token or an output that are kept, by mixing them at random
_READ = 48  # and of what the fitted heads read
_COVARIANCES = 150
_NEURONS, _PRODUCTS = 192, 96


@dataclass(frozen=True)
class Sample:
    """Examples, and what a fit makes of them.

    tokens (n, k, d) in whitened coordinates, counted (n, k) 0 for padding, keys (n, k, k) the
    uniform distribution over the keys that a row may attend to, attention (n, k, m, k) of the
    fitted heads, fitted and residual (n, k, e), both zero in the padding.
    """

    tokens: Values
    counted: Values
    keys: Values
    attention: Values
    fitted: Values
    residual: Values


Features: TypeAlias = Callable[[Sample], Values]
NAMES = ("place", "restricted", "output", "keys", "sequence")


def kinds(like: Sample, rng: np.random.Generator) -> dict[str, Features]:
    """The kinds of features by name: functions from a sample to an array (n, k, features).

    What is random in them is drawn once, for samples of the shape of `like`.
    """
    _, tokens, dim = like.tokens.shape
    groups = _groups(tokens)
    found = (
        _place(groups, dim, rng),
        _restricted(like.attention.shape[2] * dim, tokens, rng),
        _output(groups, dim, like.fitted.shape[2], rng),
        _covariances(dim, rng),
        _sequence(groups, dim, rng),
    )
    return dict(zip(NAMES, found, strict=True))


def _groups(tokens: int) -> Values:
    """Which of the groups of neighbouring places a place belongs to, (k, groups)."""
    count = min(tokens, _PLACES)
    groups: Values = np.eye(count)[np.arange(tokens) * count // tokens]
    return groups


def _mixing(size: int, most: int, rng: np.random.Generator) -> Values:
    """A matrix that keeps all coordinates, or mixes them at random to fewer."""
    most = max(most, 1)
    return np.eye(size) if size <= most else _directions(size, most, rng)


def _directions(size: int, count: int, rng: np.random.Generator) -> Values:
    drawn: Values = rng.standard_normal((size, count)) / np.sqrt(size)
    return drawn


# Means over some of the keys


def _patterns(tokens: int) -> dict[str, Values]:
    """Which keys b a row a looks at, (k, k): the first index is the row."""
    place = np.arange(tokens)
    behind = place[:, None] - place[None, :]
    return {
        "prefix": behind >= 0,
        "suffix": behind <= 0,
        "previous": behind == 1,
        "next": behind == -1,
        "window": abs(behind) <= 1,
        "early": np.broadcast_to(place < (tokens + 1) // 2, behind.shape),
        "distance": behind / tokens,
    }


def _means(sample: Sample, pattern: Values, values: Values) -> Values:
    """The mean of some values (n, k, f) of the keys in a pattern, for every row; zero if none."""
    weights = pattern * sample.counted[:, None, :]
    total = weights.sum(axis=2, keepdims=True)
    means: Values = weights @ values / np.where(total == 0, 1.0, total)
    return means


def shifted(sample: Sample, distance: int) -> Values:
    """The key at a distance from each row, less the mean of the row's keys; zero if there is none.

    The result has the shape (n, k, d) of the tokens.
    """
    tokens = sample.tokens.shape[1]
    there = np.eye(tokens, k=distance) * (sample.keys > 0)
    centred: Values = there @ sample.tokens - (sample.keys @ sample.tokens)
    return centred * there.any(axis=2, keepdims=True)


def _per_group(sample: Sample, groups: Values, values: Values) -> Values:
    """The mean of values (n, k, f) in each group of places, side by side: (n, groups·f)."""
    weights = groups.T * sample.counted[:, None, :]
    means = weights @ values / np.maximum(weights.sum(axis=2, keepdims=True), 1.0)
    return np.reshape(means, (len(values), -1))


def _by_place(groups: Values, values: Values) -> Values:
    """Values (n, k, f) in columns of their own for every group of places: (n, k, groups·f)."""
    n, tokens, _ = values.shape
    return np.reshape(groups[None, :, :, None] * values[:, :, None, :], (n, tokens, -1))


def _for_all_rows(values: Values, tokens: int) -> Values:
    """Values (n, f) of an example, for each of its rows."""
    return np.broadcast_to(values[:, None, :], (len(values), tokens, values.shape[1]))


# The kinds


def _place(groups: Values, dim: int, rng: np.random.Generator) -> Features:
    tokens, count = groups.shape
    own = _mixing(dim, (_PLACE_FEATURES // count - 1) // 2, rng)
    key = _mixing(dim, _KEY_FEATURES // count, rng)
    mixed = _mixing(dim, _MIXED, rng)
    patterns = _patterns(tokens)
    everything = np.ones((tokens, tokens))

    def features(sample: Sample) -> Values:
        read = sample.tokens @ own
        parts = [np.ones((*read.shape[:2], 1)), read, _means(sample, everything, read)]
        near = [
            _means(sample, patterns[name], sample.tokens @ mixed)
            for name in ("prefix", "suffix", "previous", "next")
        ]
        keys = _per_group(sample, groups, sample.tokens @ key)
        places = _by_place(groups, np.concatenate(parts, axis=2))
        return np.concatenate([places, *near, _for_all_rows(keys, tokens)], axis=2)

    return features


def _restricted(size: int, tokens: int, rng: np.random.Generator) -> Features:
    """What the fitted heads read from some of the keys, attention renormalised on these.

    Attention times distance is how outputs answer to scores that depend on it; it is not
    renormalised, since distances have both signs.
    """
    patterns = _patterns(tokens)
    names = ("prefix", "suffix", "window", "early", "distance")
    mixed = [_mixing(size, _READ, rng) for _ in names]

    def features(sample: Sample) -> Values:
        n, count, heads, _ = sample.attention.shape
        parts = []
        for name, mix in zip(names, mixed, strict=True):
            weights = sample.attention * patterns[name][:, None, :]
            if name != "distance":
                total = weights.sum(axis=3, keepdims=True)
                weights = weights / np.where(total == 0, 1.0, total)
            read = weights.reshape(n, count * heads, -1) @ sample.tokens
            parts.append(read.reshape(n, count, -1) @ mix)
        return np.concatenate(parts, axis=2)

    return features


def _output(groups: Values, dim: int, out_dim: int, rng: np.random.Generator) -> Features:
    """Powers of what was fitted (Ramsey 1969), its direction, neurons that read it, its place."""
    mixed = _mixing(out_dim, _MIXED, rng)
    placed = _mixing(out_dim, _KEY_FEATURES // groups.shape[1], rng)
    neurons = _directions(out_dim, _NEURONS, rng)
    read = 0.5 * _directions(dim, _NEURONS, rng) * (np.arange(_NEURONS) % 2)
    offsets = 0.5 * rng.standard_normal(_NEURONS)

    def features(sample: Sample) -> Values:
        fitted = sample.fitted
        length = np.sqrt(np.mean(fitted**2, axis=2, keepdims=True))
        some = fitted @ mixed
        parts = [
            some**2,
            some**3,
            some / np.where(length == 0, 1.0, length),
            some * length,
            np.maximum(fitted @ neurons + sample.tokens @ read + offsets, 0.0),
            _by_place(groups, fitted @ placed),
        ]
        return np.concatenate(parts, axis=2)

    return features


def _covariances(dim: int, rng: np.random.Generator) -> Features:
    """Covariances of the keys that a row may attend to: all of them, or random mixtures."""
    pairs = np.triu_indices(dim)
    if len(pairs[0]) <= _COVARIANCES:
        first, second = np.eye(dim)[:, pairs[0]], np.eye(dim)[:, pairs[1]]
    else:
        first, second = (_directions(dim, _COVARIANCES, rng) for _ in range(2))

    def features(sample: Sample) -> Values:
        one, other = sample.tokens @ first, sample.tokens @ second
        moments: Values = sample.keys @ (one * other)
        return moments - (sample.keys @ one) * (sample.keys @ other)

    return features


def _sequence(groups: Values, dim: int, rng: np.random.Generator) -> Features:
    """Neurons that read the row's token, means, the place and the keys; products of the token."""
    tokens, count = groups.shape
    key = _mixing(dim, _KEY_FEATURES // count, rng)
    size = 3 * dim + count + count * key.shape[1]
    weights = _directions(size, _NEURONS, rng) * np.sqrt(3.0)
    offsets = 0.5 * rng.standard_normal(_NEURONS)
    first, second = (_directions(dim, _PRODUCTS, rng) for _ in range(2))
    everything, prefix = np.ones((tokens, tokens)), _patterns(tokens)["prefix"]

    def features(sample: Sample) -> Values:
        own = sample.tokens
        place = np.broadcast_to(groups, (len(own), tokens, count))
        keys = _for_all_rows(_per_group(sample, groups, own @ key), tokens)
        means = (_means(sample, pattern, own) for pattern in (everything, prefix))
        read = np.concatenate([own, *means, place, keys], axis=2) @ weights
        products = (own @ first) * (own @ second)
        return np.concatenate([np.maximum(read + offsets, 0.0), products], axis=2)

    return features
