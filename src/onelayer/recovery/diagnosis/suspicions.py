"""What a caller of `recover` may have forgotten, suspected from raw examples before or after a fit.

All checks are regressions on a few hundred or thousand examples, judged on examples that they were
not fitted to:

    axes        another order of the axes makes outputs much easier to predict
    causal      output rows do not depend on later tokens, or do although causal was asked for
    padding     tokens at one end repeat one vector in runs, or influence outputs less and less
    window      output rows depend on near tokens only
    positions   output rows depend on tokens the less the farther away they are
    bias        outputs have a part that is even in inputs that are symmetric about zero
    unrelated   neither linear nor random features of the sequence predict any of the outputs

and counts of what occurs more than once. A layer without positions, biases and masks gives equal
weight to all pairs of different places on average, and is odd in its inputs; see `dependence.py`
for how the weight of pairs is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from onelayer.recovery.diagnosis import dependence
from onelayer.recovery.diagnosis.dependence import Energies

Values: TypeAlias = np.ndarray[Any, Any]
Kind = Literal[
    "axes",
    "causal",
    "not causal",
    "padding",
    "window",
    "positions",
    "bias",
    "repeated tokens",
    "repeated examples",
    "vocabulary",
    "constant",
    "unrelated",
]

_MOST_EXAMPLES, _MOST_ROWS = 2000, 16_000
_ENOUGH = 400  # examples that are looked at however long they are
_FEWEST = 60  # examples: with fewer nothing is said about what outputs depend on
_SURE = 4.0  # standard errors from which a dependence is sure to be there
_NONE, _HARDLY = 0.1, 0.25  # of the energy elsewhere: its estimate, and its upper bound
_FADED = 0.35  # energy of the last token over that of the first, from which there is padding
_DISTANT = 0.5  # the same for the farthest over the nearest token, where there are positions
_ROWS_PER_FEATURE = 3  # fewer rows cannot tell which order of the axes is right
_PREDICTED, _BETTER = 0.15, 1.4  # share of outputs that another order predicts, and over this one's
_UNRELATED = 2.5  # Student's t of predictions that are none
_SYMMETRIC = 0.02  # squared mean and skewness of tokens that count as symmetric
_BIASED, _EVEN = 4.0, 0.001  # Student's t and squared correlation of what even features predict
_COPIES, _ALL_SAME = 0.05, 0.5  # shares of the examples
_PADDED, _TRAILING = 0.05, 0.99
_NEURONS, _PAIRS = 256, 128


@dataclass(frozen=True)
class Suspicion:
    """What may be wrong with the examples or the arguments, and what to change."""

    kind: Kind
    message: str


@dataclass(frozen=True)
class _Examples:
    """Examples in random order; `present` is 0 for padding, `tokens` are whitened."""

    X: Values
    Y: Values  # zero in the padding
    present: Values
    tokens: Values

    @property
    def centred(self) -> Values:
        """Outputs without the mean over all rows."""
        rows = self.Y[self.present > 0]
        centred: Values = (self.Y - rows.mean(axis=0)) * self.present[:, :, None]
        return centred


def suspicions(
    X: Values,
    Y: Values,
    mask: Values | None = None,
    *,
    bias: bool,
    causal: bool,
    seed: int = 0,
) -> list[Suspicion]:
    """What the examples say against the arguments of a recovery.

    Parameters
    ----------
    X, Y : numpy arrays (n, k, d) and (n, k, e)
        Examples. At most 2,000 of them are looked at, fewer if they are long.
    mask : numpy array (n, k), optional
        True where there is a token.
    bias, causal : bool
        As they were passed to `recover`.
    seed : int
        For the order of the examples and for random features.

    Returns
    -------
    list of Suspicion
        Empty if nothing is suspected.

    Examples
    --------
    >>> import onelayer as ol
    >>> layer = ol.AttentionLayer.random(heads=2, dim=8, seed=0)
    >>> X = ol.inputs.gaussian(400, 4, 8, seed=1)
    >>> suspicions(X, layer(X), bias=False, causal=False)
    []
    >>> [one.kind for one in suspicions(X, layer(X, causal=True), bias=False, causal=False)]
    ['causal']
    """
    rng = np.random.default_rng(seed)
    examples = _prepared(X, Y, mask, rng)
    found = list(_repetitions(examples))
    examples = _distinct(examples)  # copies would let one half predict the noise of the other
    varies = _spread(examples.centred) > 1e-12 * _spread(examples.Y)
    if not varies:
        message = "Outputs are the same in all rows: they do not depend on the inputs."
        return [*found, Suspicion("constant", message)]
    if mask is None:
        found += _other_axes(examples, rng)
    if any(one.kind == "axes" for one in found) or len(examples.X) < _FEWEST:
        return found
    if not examples.tokens.shape[2] or _is_unrelated(examples, rng):
        message = (
            "Outputs cannot be predicted from the inputs at all, neither linearly nor by random "
            "features: check that X[i] and Y[i] belong together."
        )
        return [*found, Suspicion("unrelated", message)]
    energies = dependence.energies(examples.tokens, examples.centred, rng)
    found += _places(examples, energies, causal, mask is not None)
    return found if bias else [*found, *_bias(examples, rng)]


def _prepared(X: Values, Y: Values, mask: Values | None, rng: np.random.Generator) -> _Examples:
    """A random selection of the examples in float64, scaled so that squares do not overflow."""
    most = min(_MOST_EXAMPLES, max(_ENOUGH, _MOST_ROWS // X.shape[1]))
    order = rng.permutation(len(X))[:most]
    X, Y = (np.asarray(values[order], dtype=np.float64) for values in (X, Y))
    present = np.ones(X.shape[:2]) if mask is None else np.asarray(mask[order], dtype=np.float64)
    X, Y = (np.where(present[:, :, None] > 0, values, 0.0) for values in (X, Y))
    X, Y = (values / (np.abs(values).max() or 1.0) for values in (X, Y))
    return _Examples(X, Y, present, dependence.whitened(X, present))


def _distinct(examples: _Examples) -> _Examples:
    """The examples without repetitions of their tokens, in the same order."""
    index = _first_of_each(examples.X)
    parts = (examples.X, examples.Y, examples.present, examples.tokens)
    return _Examples(*(part[index] for part in parts))


def _first_of_each(values: Values) -> list[int]:
    """The ascending positions along the first axis where something occurs for the first time."""
    found: dict[bytes, int] = {}
    for position, one in enumerate(values + 0.0):  # which turns -0 to 0
        found.setdefault(one.tobytes(), position)
    return list(found.values())


def _spread(values: Values) -> float:
    return float(np.sum(values**2))


# What occurs more than once


def _repetitions(examples: _Examples) -> Iterator[Suspicion]:
    X, present = examples.X, examples.present
    n, tokens, dim = X.shape
    distinct = len(_first_of_each(X))
    if n - distinct > _COPIES * n:
        share = 1 - distinct / n
        yield Suspicion(
            "repeated examples",
            f"{share:.0%} of the examples repeat the tokens of another one ({distinct} of {n} are "
            "distinct): they say more about noise, but nothing more about the layer.",
        )
    first = X[np.arange(n), np.argmax(present, axis=1)]
    same = np.all((first[:, None] == X) | (present == 0)[:, :, None], axis=(1, 2))
    if tokens > 1 and np.mean(same) > _ALL_SAME:
        yield Suspicion(
            "repeated tokens",
            f"In {np.mean(same):.0%} of the examples all tokens are the same: there outputs do not "
            "depend on attention. Use examples with different tokens.",
        )
    vocabulary = len(_first_of_each(X[present > 0][:_MOST_ROWS]))
    if 1 < vocabulary < dim:
        yield Suspicion(
            "vocabulary",
            f"Only {vocabulary} different tokens occur, in {dim} dimensions: heads can only be "
            "determined on the span of these tokens.",
        )


# The order of the axes


def _other_axes(examples: _Examples, rng: np.random.Generator) -> Iterator[Suspicion]:
    """Another order of the axes in which outputs are much easier to predict.

    Exchanging tokens and dimensions takes outputs as wide as the inputs. Exchanging examples and
    tokens is for arrays with the sequence first, as in torch.
    """
    X, Y = examples.X, examples.Y
    mine = _predicted_share(X, Y, rng)
    orders: list[tuple[tuple[int, int, int], str]] = [((1, 0, 2), "(tokens, examples, dim)")]
    if X.shape == Y.shape:
        orders.append(((0, 2, 1), "(examples, dim, tokens)"))
    for order, name in orders:
        other = _predicted_share(X.transpose(order), Y.transpose(order), rng)
        if mine is None or other is None or other < max(_PREDICTED, _BETTER * mine):
            continue
        yield Suspicion(
            "axes",
            f"The axes of X and Y seem to be {name}: read so, a row's token and the mean token "
            f"predict {other:.0%} of the outputs, and {max(mine, 0.0):.0%} in the order given. "
            f"Pass X.transpose{order} and Y.transpose{order}.",
        )
        return


def _predicted_share(X: Values, Y: Values, rng: np.random.Generator) -> float | None:
    """The share of outputs that the row's token and the mean token predict; None if too few rows.

    Rows, not examples, are held out: in a wrong order of the axes there may be few examples. The
    mean over examples is subtracted: means of columns are easy to predict in a wrong order.
    """
    X, Y = X - X.mean(axis=0), Y - Y.mean(axis=0)
    n, tokens, dim = X.shape
    if n * tokens < _ROWS_PER_FEATURE * 2 * (2 * dim + 1) or tokens < 2:
        return None
    mean = np.broadcast_to(X.mean(axis=1, keepdims=True), X.shape)
    features = np.concatenate([X, mean, np.ones((n, tokens, 1))], axis=2).reshape(n * tokens, -1)
    chosen = rng.permutation(n * tokens)[: _MOST_ROWS // 2]
    features, targets = features[chosen], Y.reshape(n * tokens, -1)[chosen]
    half = len(chosen) // 2
    centred = targets[half:] - targets[:half].mean(axis=0)
    weights, *_ = np.linalg.lstsq(features[:half], targets[:half], rcond=1e-8)
    left = targets[half:] - features[half:] @ weights
    return 1 - _spread(left) / max(_spread(centred), np.finfo(np.float64).tiny)


# Whether anything predicts the outputs


def _student(features: Values, targets: Values) -> tuple[float, float]:
    """Student's t and the squared correlation of predictions (n, k, f) -> (n, k, e)."""
    n = len(features)
    predicted = np.zeros_like(targets)
    for fitted, judged in dependence.halves(n):
        rows, values = (part[fitted].reshape(-1, part.shape[2]) for part in (features, targets))
        predicted[judged] = features[judged] @ dependence.ridge(rows, values)
    sums = np.sum(predicted * targets, axis=(1, 2))
    squares = _spread(sums)
    if squares == 0:
        return 0.0, 0.0
    total = float(np.sum(sums))
    t = total / (dependence.DEPENDENT * np.sqrt(squares))
    return t, total**2 / (_spread(predicted) * _spread(targets))


def _is_unrelated(examples: _Examples, rng: np.random.Generator) -> bool:
    tokens, present = examples.tokens, examples.present[:, :, None]
    mean = tokens.sum(axis=1, keepdims=True) / np.maximum(present.sum(axis=1, keepdims=True), 1.0)
    linear = np.concatenate([tokens, np.broadcast_to(mean, tokens.shape)], axis=2) * present
    if _student(linear, examples.centred)[0] > _UNRELATED:
        return False
    weights = rng.standard_normal((linear.shape[2], _NEURONS)) / np.sqrt(linear.shape[2])
    neurons = np.maximum(linear @ weights + 0.5 * rng.standard_normal(_NEURONS), 0.0) * present
    return _student(neurons, examples.centred)[0] <= _UNRELATED


# What rows depend on


def _places(
    examples: _Examples, energies: Energies, causal: bool, masked: bool
) -> Iterator[Suspicion]:
    places = energies.places
    if places < 2:
        return
    later = np.triu(np.ones((places, places)), 1)
    found = list(_causality(energies, later, causal))
    yield from found
    if not masked and (content := _padding_content(examples.X)) is not None:
        yield content
        return
    if masked:
        return  # distant places are rarely there together, which looks like a window
    if causal or any(one.kind == "causal" for one in found):
        # Earlier rows have fewer keys and depend more on each of them.
        pairs = later.T * (np.arange(places) >= places // 2)[:, None]
        yield from _window(energies, pairs)
        return
    pairs = later + later.T
    # The first of these that speaks explains what the others would see.
    for check in (_fading_end, _window, _fading_distance):
        if seen := list(check(energies, pairs)):
            yield from seen
            return


def _causality(energies: Energies, later: Values, causal: bool) -> Iterator[Suspicion]:
    above, error = energies.mean(later)
    below, below_error = energies.mean(later.T)
    if causal:
        if above > _SURE * error and above > _HARDLY * below:
            yield Suspicion(
                "not causal",
                f"Output rows depend on later tokens ({above / max(below, above):.0%} as strongly "
                "as on earlier ones): pass causal=False.",
            )
    elif below > _SURE * below_error and _is_nothing(above, error, below):
        share = max(above, 0.0) / (max(above, 0.0) + below)
        yield Suspicion(
            "causal",
            f"Output rows do not depend on later tokens ({share:.2f} of the dependence on other "
            "tokens, expected about 0.5): pass causal=True.",
        )


def _is_nothing(energy: float, error: float, elsewhere: float) -> bool:
    return energy < _NONE * elsewhere and energy + 1.5 * error < _HARDLY * elsewhere


def _window(energies: Energies, pairs: Values) -> Iterator[Suspicion]:
    """Attention to near tokens only: nothing beyond some distance, something up to it."""
    place = np.arange(energies.places)
    distance = abs(place[:, None] - place[None, :])
    for width in range(1, energies.places - 1):
        near, near_error = energies.mean(pairs * (distance <= width))
        far, far_error = energies.mean(pairs * (distance > width))
        if near > _SURE * near_error and _is_nothing(far, far_error, near):
            yield Suspicion(
                "window",
                f"Output rows do not depend on tokens more than {width} places away "
                f"({max(far, 0.0) / near:.2f} of the dependence on nearer ones): the layer attends "
                "within a window or by distance, which a layer without positions cannot do.",
            )
            return


def _fading_end(energies: Energies, pairs: Values) -> Iterator[Suspicion]:
    """Tokens that matter less towards one end of the sequence."""
    place = np.arange(energies.places)
    varying = place[energies.varying]
    for start, end, name in ((0, -1, "last"), (-1, 0, "first")):
        strong, weak = (pairs * (place == varying[i]) for i in (start, end))
        if (ratio := _faded(energies, strong, weak)) is not None and ratio < _FADED:
            yield Suspicion(
                "padding",
                f"The {name} token influences other rows {max(ratio, 0.0):.2f} times as much as "
                "the token at the other end, expected about 1: if examples are padded, pass mask=.",
            )


def _fading_distance(energies: Energies, pairs: Values) -> Iterator[Suspicion]:
    """Tokens that matter less the farther away they are."""
    place = np.arange(energies.places)
    distance = abs(place[:, None] - place[None, :])
    near, far = pairs * (distance == 1), pairs * (distance == energies.places - 1)
    if (ratio := _faded(energies, near, far)) is not None and ratio < _DISTANT:
        yield Suspicion(
            "positions",
            f"Output rows depend {max(ratio, 0.0):.2f} times as much on the farthest tokens as on "
            "their neighbours, expected about 1: the layer seems to attend by distance.",
        )


def _faded(energies: Energies, strong: Values, weak: Values) -> float | None:
    """The energy of weak pairs over that of strong ones; None if they may be the same."""
    high, high_error = energies.mean(strong)
    low, low_error = energies.mean(weak)
    error = float(np.hypot(high_error, low_error))
    if high > _SURE * high_error and high - low > _SURE * error:
        return low / high
    return None


def _padding_content(X: Values) -> Suspicion | None:
    """One vector that fills one end of the examples, in runs of different lengths."""
    for tokens, end in ((X[:, ::-1], "end"), (X, "beginning")):
        vectors, counts = np.unique(tokens[:, 0], axis=0, return_counts=True)
        content = vectors[np.argmax(counts)]
        same = np.all(tokens == content, axis=2)
        runs = np.sum(np.cumprod(same, axis=1), axis=1)
        padded = float(np.mean(runs > 0))
        lengths = np.unique(runs[runs < X.shape[1]])
        if padded < _PADDED or runs.sum() < _TRAILING * same.sum() or len(lengths) < 2:
            continue
        if runs.max() < 2 and np.any(content != 0):
            continue  # one token that many examples end with is no padding
        return Suspicion(
            "padding",
            f"At the {end}, {padded:.0%} of the examples repeat one and the same token, up to "
            f"{int(runs.max())} times, which occurs nowhere else: if that is padding, pass mask=.",
        )
    return None


# Biases


def _bias(examples: _Examples, rng: np.random.Generator) -> Iterator[Suspicion]:
    """A part of the outputs that is even in symmetric inputs: a layer without biases is odd.

    Even features are a constant and covariances of the tokens. Where tokens are not symmetric about
    zero nothing is said.
    """
    X, present = examples.X, examples.present[:, :, None]
    rows = X[examples.present > 0]
    size = float(np.mean(rows**2))
    if _spread(rows.mean(axis=0)) > _SYMMETRIC * size * X.shape[2] or _is_skew(examples):
        return
    dim = examples.tokens.shape[2]
    first, second = (rng.standard_normal((dim, _PAIRS)) / np.sqrt(dim) for _ in range(2))
    one, other = examples.tokens @ first, examples.tokens @ second
    count = np.maximum(present.sum(axis=1, keepdims=True), 1.0)
    pairs = np.sum(one * other, axis=1, keepdims=True) / count
    pairs = pairs - one.sum(axis=1, keepdims=True) * other.sum(axis=1, keepdims=True) / count**2
    even = np.concatenate([np.ones((len(X), 1, 1)), pairs - pairs.mean(axis=0)], axis=2)
    t, share = _student(even * present, examples.Y)
    if t > _BIASED and share > _EVEN:
        mean = examples.Y[examples.present > 0].mean(axis=0)
        of_mean = _spread(mean) / np.mean(np.sum(examples.Y[examples.present > 0] ** 2, axis=1))
        yield Suspicion(
            "bias",
            f"Features that are even in the inputs predict {share:.1%} of the outputs (their mean "
            f"alone {of_mean:.1%}), expected none without biases: pass bias=True.",
        )


def _is_skew(examples: _Examples) -> bool:
    """Whether third moments of whitened tokens are clearly not zero."""
    rows = examples.tokens[examples.present > 0]
    cubes = rows**3
    skewness = np.mean(np.mean(cubes, axis=0) ** 2 - np.var(cubes, axis=0) / len(rows))
    return bool(skewness > _SYMMETRIC)
