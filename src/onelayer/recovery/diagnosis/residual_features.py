"""Features of sequences and places that might predict the residuals of a fit.

Each kind is aimed at models that are close to attention but are not the fitted one:

    place       causal or padded attention, positions, a bias: the place of a row and of its keys
    restricted  the fitted heads restricted to some keys: causal, windowed, relative
    output      something behind the layer (an MLP, a normalisation) or rows that were set to zero
    keys        covariances of the keys of a row: the effect of a missing key bias
    sequence    neurons that read the row's token and summaries of the sequence: anything else

Each kind has a few hundred features for any shape of the examples: coordinates are mixed at random,
and places are grouped, where there are many. To add a kind, write a function that draws its random
numbers for samples of the shape of `like` and returns the features, and add it to `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import numpy as np

Values: TypeAlias = np.ndarray[Any, Any]

_PLACES = 16  # groups of places
_PLACE_FEATURES, _KEY_FEATURES = 280, 128
_MIXED = 32  # coordinates of a token or an output that are kept, by mixing them at random
_READ = 48  # and of what the fitted heads read
_COVARIANCES = 150
_NEURONS, _PRODUCTS = 192, 96


class ResidualSample(NamedTuple):
    """Examples with the attention, outputs and residuals of a fit."""

    tokens: Values  # (n, k, d), whitened
    counted: Values  # (n, k), 1 for rows whose outputs are observed
    read: Values  # (n, k), 1 for tokens that these rows may attend to
    keys: Values  # (n, k, k): the uniform distribution over the keys that a row may attend to
    attention: Values  # (n, k, m, k) of the fitted heads
    fitted: Values  # (n, k, e), zero in rows that do not count, as is the residual
    residual: Values

    def take(self, examples: slice | list[int]) -> ResidualSample:
        return ResidualSample(*(array[examples] for array in self))

    @property
    def groups(self) -> Values:
        """Which group of neighbouring places a place belongs to, (k, groups)."""
        tokens = self.tokens.shape[1]
        count = min(tokens, _PLACES)
        return np.asarray(np.eye(count)[np.arange(tokens) * count // tokens])

    def shifted(self, distance: int) -> Values:
        """The key at a distance from each row, less the mean of its keys, (n, k, d); 0 if none."""
        there = np.eye(self.tokens.shape[1], k=distance) * (self.keys > 0)
        centred: Values = there @ self.tokens - (self.keys @ self.tokens)
        return centred * there.any(axis=2, keepdims=True)

    def means(self, pattern: Values, values: Values) -> Values:
        """The mean of values (n, k, f) over the keys in a pattern, for every row; zero if none."""
        weights = pattern * self.read[:, None, :]
        total = weights.sum(axis=2, keepdims=True)
        return np.asarray(weights @ values / np.where(total == 0, 1.0, total))

    def group_means(self, values: Values) -> Values:
        """The means of values (n, k, f) in each group of places, for all rows: (n, k, groups·f)."""
        weights = self.groups.T * self.read[:, None, :]
        means = weights @ values / np.maximum(weights.sum(axis=2, keepdims=True), 1.0)
        n, tokens = values.shape[:2]
        return np.broadcast_to(means.reshape(n, 1, -1), (n, tokens, means[0].size))

    def by_place(self, values: Values) -> Values:
        """Values (n, k, f) in separate columns for every group of places: (n, k, groups·f)."""
        n, tokens, _ = values.shape
        return np.reshape(self.groups[None, :, :, None] * values[:, :, None, :], (n, tokens, -1))


Features: TypeAlias = Callable[[ResidualSample], Values]  # returns (n, k, features)


def _mixing(size: int, most: int, rng: np.random.Generator) -> Values:
    """A matrix that keeps all coordinates, or mixes them at random to fewer."""
    most = max(most, 1)
    return np.eye(size) if size <= most else _directions(size, most, rng)


def _directions(size: int, count: int, rng: np.random.Generator) -> Values:
    return np.asarray(rng.standard_normal((size, count)) / np.sqrt(size))


def _patterns(tokens: int) -> dict[str, Values]:
    """Which keys b a row a looks at, (k, k): the first index is the row."""
    place = np.arange(tokens)
    behind = place[:, None] - place[None, :]
    return {
        "all": np.ones((tokens, tokens)),
        "prefix": behind >= 0,
        "suffix": behind <= 0,
        "previous": behind == 1,
        "next": behind == -1,
        "window": abs(behind) <= 1,
        "early": np.broadcast_to(place < (tokens + 1) // 2, behind.shape),
        "distance": behind / tokens,
    }


def _place(like: ResidualSample, rng: np.random.Generator) -> Features:
    _, tokens, dim = like.tokens.shape
    count = like.groups.shape[1]
    own = _mixing(dim, (_PLACE_FEATURES // count - 1) // 2, rng)
    key = _mixing(dim, _KEY_FEATURES // count, rng)
    mixed = _mixing(dim, _MIXED, rng)
    patterns = _patterns(tokens)

    def features(sample: ResidualSample) -> Values:
        read = sample.tokens @ own
        parts = [np.ones((*read.shape[:2], 1)), read, sample.means(patterns["all"], read)]
        near = [
            sample.means(patterns[name], sample.tokens @ mixed)
            for name in ("prefix", "suffix", "previous", "next")
        ]
        places = sample.by_place(np.concatenate(parts, axis=2))
        return np.concatenate([places, *near, sample.group_means(sample.tokens @ key)], axis=2)

    return features


def _restricted(like: ResidualSample, rng: np.random.Generator) -> Features:
    """What the fitted heads read from some of the keys, attention renormalised on these.

    Attention times distance is the response of outputs to scores that depend on it. It is not
    renormalised, since distances have both signs.
    """
    _, tokens, heads, _ = like.attention.shape
    patterns = _patterns(tokens)
    names = ("prefix", "suffix", "window", "early", "distance")
    mixed = [_mixing(heads * like.tokens.shape[2], _READ, rng) for _ in names]

    def features(sample: ResidualSample) -> Values:
        n = len(sample.tokens)
        parts = []
        for name, mix in zip(names, mixed, strict=True):
            weights = sample.attention * patterns[name][:, None, :]
            if name != "distance":
                total = weights.sum(axis=3, keepdims=True)
                weights = weights / np.where(total == 0, 1.0, total)
            read = weights.reshape(n, tokens * heads, -1) @ sample.tokens
            parts.append(read.reshape(n, tokens, -1) @ mix)
        return np.concatenate(parts, axis=2)

    return features


def _output(like: ResidualSample, rng: np.random.Generator) -> Features:
    """Powers of the fitted outputs (Ramsey 1969), their direction, neurons of them, their place."""
    dim, out_dim = like.tokens.shape[2], like.fitted.shape[2]
    mixed = _mixing(out_dim, _MIXED, rng)
    placed = _mixing(out_dim, _KEY_FEATURES // like.groups.shape[1], rng)
    neurons = _directions(out_dim, _NEURONS, rng)
    read = 0.5 * _directions(dim, _NEURONS, rng) * (np.arange(_NEURONS) % 2)
    offsets = 0.5 * rng.standard_normal(_NEURONS)

    def features(sample: ResidualSample) -> Values:
        fitted = sample.fitted
        length = np.sqrt(np.mean(fitted**2, axis=2, keepdims=True))
        some = fitted @ mixed
        parts = [
            some**2,
            some**3,
            some / np.where(length == 0, 1.0, length),
            some * length,
            np.maximum(fitted @ neurons + sample.tokens @ read + offsets, 0.0),
            sample.by_place(fitted @ placed),
        ]
        return np.concatenate(parts, axis=2)

    return features


def _keys(like: ResidualSample, rng: np.random.Generator) -> Features:
    """Covariances of the keys that a row may attend to: all of them, or random mixtures."""
    dim = like.tokens.shape[2]
    pairs = np.triu_indices(dim)
    if len(pairs[0]) <= _COVARIANCES:
        first, second = np.eye(dim)[:, pairs[0]], np.eye(dim)[:, pairs[1]]
    else:
        first, second = (_directions(dim, _COVARIANCES, rng) for _ in range(2))

    def features(sample: ResidualSample) -> Values:
        one, other = sample.tokens @ first, sample.tokens @ second
        moments: Values = sample.keys @ (one * other)
        return moments - (sample.keys @ one) * (sample.keys @ other)

    return features


def _sequence(like: ResidualSample, rng: np.random.Generator) -> Features:
    """Neurons that read the row's token, means, the place and the keys; products of the token."""
    _, tokens, dim = like.tokens.shape
    count = like.groups.shape[1]
    key = _mixing(dim, _KEY_FEATURES // count, rng)
    size = 3 * dim + count + count * key.shape[1]
    weights = _directions(size, _NEURONS, rng) * np.sqrt(3.0)
    offsets = 0.5 * rng.standard_normal(_NEURONS)
    first, second = (_directions(dim, _PRODUCTS, rng) for _ in range(2))
    patterns = _patterns(tokens)

    def features(sample: ResidualSample) -> Values:
        own = sample.tokens
        place = np.broadcast_to(sample.groups, (len(own), tokens, count))
        means = (sample.means(patterns[name], own) for name in ("all", "prefix"))
        keys = sample.group_means(own @ key)
        read = np.concatenate([own, *means, place, keys], axis=2) @ weights
        products = (own @ first) * (own @ second)
        return np.concatenate([np.maximum(read + offsets, 0.0), products], axis=2)

    return features


KINDS: dict[str, Callable[[ResidualSample, np.random.Generator], Features]] = {
    "place": _place,
    "restricted": _restricted,
    "output": _output,
    "keys": _keys,
    "sequence": _sequence,
}
