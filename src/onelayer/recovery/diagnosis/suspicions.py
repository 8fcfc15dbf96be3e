"""Arguments of `recover` that may be wrong, suspected from raw examples before or after a fit.

A check looks at the examples and yields a message if it suspects something. To add one, write a
function and add it to `CHECKS`. All checks are counts, or regressions on a few hundred or thousand
examples that are judged on examples they were not fitted to. A layer without positions, biases and
masks gives equal weight to all pairs of different places on average, and is odd in its inputs; see
`dependence.py` for how the weight of pairs is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from onelayer.recovery.diagnosis import dependence
from onelayer.recovery.diagnosis.copies import distinct
from onelayer.recovery.diagnosis.dependence import Energies, Values

_MOST_EXAMPLES, _MOST_ROWS = 2000, 16_000
_ENOUGH = 400  # examples that are used even if they are long
_FEWEST = 60  # examples: with fewer nothing is said about what outputs depend on
_SURE = 4.0  # standard errors from which a dependence is significant
_NONE, _HARDLY = 0.1, 0.25  # energy relative to elsewhere that counts as none: estimate, bound
_FADED = 0.35  # energy of the last token over that of the first, below which there is padding
_DISTANT = 0.5  # energy of the farthest over that of the nearest token, below which by distance
_ROWS_PER_FEATURE = 3  # fewer rows cannot show which order of the axes is right
_PREDICTED, _BETTER = 0.15, 1.4  # share of outputs another order predicts, and its ratio to this
_UNRELATED = 2.5  # Student's t below which nothing is predicted
_SYMMETRIC = 0.02  # largest squared mean and skewness of tokens that count as symmetric
_BIASED, _EVEN = 4.0, 0.001  # Student's t and squared correlation of predictions by even features
_COPIES, _ALL_SAME = 0.05, 0.5  # shares of the examples
_PADDED, _TRAILING = 0.05, 0.99  # shares of padded examples, and of padding that is at the end
_NEURONS, _PAIRS = 256, 128


@dataclass(frozen=True)
class Suspicion:
    """What may be wrong with the examples or the arguments, and what to change."""

    kind: str
    message: str


@dataclass(frozen=True)
class RawExamples:
    """Examples in random order and float64, and the arguments that came with them.

    Repetitions are left out, except from `all_X` and `all_present`: copies would let one half
    predict the noise of the other.
    """

    X: Values
    Y: Values
    present: Values  # 0 for padding, where X and Y are zero
    tokens: Values  # whitened
    all_X: Values
    all_present: Values
    masked: bool
    bias: bool
    causal: bool
    rng: np.random.Generator
    found: list[Suspicion] = field(default_factory=list)

    @cached_property
    def centred(self) -> Values:
        """Outputs without the mean over all rows."""
        rows = self.Y[self.present > 0]
        return np.asarray((self.Y - rows.mean(axis=0)) * self.present[:, :, None])

    @cached_property
    def energies(self) -> Energies:
        """How much each output row depends on each token."""
        return dependence.energies(self.tokens, self.centred, self.rng)

    def suspects(self, *kinds: str) -> bool:
        """Whether something of these kinds was found."""
        return any(one.kind in kinds for one in self.found)


@dataclass(frozen=True)
class DataCheck:
    """One check of the examples."""

    kind: str
    look: Callable[[RawExamples], Iterator[str]]  # yields a message if something is suspected
    unless: tuple[str, ...] = ()  # kinds that explain what it would see: skipped if one was found
    fewest: int = _FEWEST  # distinct examples
    final: bool = False  # nothing else is checked once this has found something


def suspicions(
    X: Values, Y: Values, mask: Values | None = None, *, bias: bool, causal: bool, seed: int = 0
) -> list[Suspicion]:
    """Evidence in numpy arrays of examples against the arguments of a recovery.

    At most 2,000 examples are used, fewer if they are long; `seed` is for their order and for
    random features.
    """
    rng = np.random.default_rng(seed)
    most = min(_MOST_EXAMPLES, max(_ENOUGH, _MOST_ROWS // X.shape[1]))
    order = rng.permutation(len(X))[:most]
    X, Y = (np.asarray(values[order], dtype=np.float64) for values in (X, Y))
    present = np.ones(X.shape[:2]) if mask is None else np.asarray(mask[order], dtype=np.float64)
    X, Y = (np.where(present[:, :, None] > 0, values, 0.0) for values in (X, Y))
    X, Y = (values / (np.abs(values).max() or 1.0) for values in (X, Y))  # squares stay finite
    tokens, unique = dependence.whitened(X, present), distinct(X)
    arrays = X[unique], Y[unique], present[unique], tokens[unique], X, present
    examples = RawExamples(*arrays, mask is not None, bias, causal, rng)
    for check in CHECKS:
        if len(examples.X) < check.fewest or examples.suspects(*check.unless):
            continue
        examples.found.extend(Suspicion(check.kind, message) for message in check.look(examples))
        if check.final and examples.suspects(check.kind):
            break
    return examples.found


def _spread(values: Values) -> float:
    return float(np.sum(values**2))


def _repeated_examples(examples: RawExamples) -> Iterator[str]:
    n, count = len(examples.all_X), len(examples.X)
    if n - count > _COPIES * n:
        yield (
            f"{1 - count / n:.0%} of the examples repeat the tokens of another one ({count} of {n} "
            "are distinct): they say more about noise, but nothing more about the layer."
        )


def _repeated_tokens(examples: RawExamples) -> Iterator[str]:
    X, present = examples.all_X, examples.all_present
    first = X[np.arange(len(X)), np.argmax(present, axis=1)]
    same = np.all((first[:, None] == X) | (present == 0)[:, :, None], axis=(1, 2))
    if X.shape[1] > 1 and np.mean(same) > _ALL_SAME:
        yield (
            f"In {np.mean(same):.0%} of the examples all tokens are the same: there outputs do not "
            "depend on attention. Use examples with different tokens."
        )


def _vocabulary(examples: RawExamples) -> Iterator[str]:
    rows = examples.all_X[examples.all_present > 0]
    count, dim = len(distinct(rows[:_MOST_ROWS])), rows.shape[1]
    if 1 < count < dim:
        yield (
            f"Only {count} different tokens occur, in {dim} dimensions: heads can only be "
            "determined on the span of these tokens."
        )


def _constant(examples: RawExamples) -> Iterator[str]:
    if not _spread(examples.centred) > 1e-12 * _spread(examples.Y):
        yield "Outputs are the same in all rows: they do not depend on the inputs."


def _axes(examples: RawExamples) -> Iterator[str]:
    """Another order of the axes in which outputs are much easier to predict.

    Exchanging tokens and dimensions takes outputs as wide as the inputs. Exchanging examples and
    tokens is for arrays with the sequence first, as in torch.
    """
    if examples.masked:
        return
    X, Y, rng = examples.X, examples.Y, examples.rng
    mine = _predicted_share(X, Y, rng)
    orders = [((1, 0, 2), "(tokens, examples, dim)"), ((0, 2, 1), "(examples, dim, tokens)")]
    for order, name in orders if X.shape == Y.shape else orders[:1]:
        other = _predicted_share(X.transpose(order), Y.transpose(order), rng)
        if mine is None or other is None or other < max(_PREDICTED, _BETTER * mine):
            continue
        yield (
            f"The axes of X and Y seem to be {name}: read so, a row's token and the mean token "
            f"predict {other:.0%} of the outputs, and {max(mine, 0.0):.0%} in the order given. "
            f"Pass X.transpose{order} and Y.transpose{order}."
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


def _unrelated(examples: RawExamples) -> Iterator[str]:
    """Neither linear nor random features of the sequence predict any of the outputs."""
    tokens, present, rng = examples.tokens, examples.present[:, :, None], examples.rng
    mean = tokens.sum(axis=1, keepdims=True) / np.maximum(present.sum(axis=1, keepdims=True), 1.0)
    linear = np.concatenate([tokens, np.broadcast_to(mean, tokens.shape)], axis=2) * present
    if size := linear.shape[2]:
        if _student(linear, examples.centred)[0] > _UNRELATED:
            return
        weights = rng.standard_normal((size, _NEURONS)) / np.sqrt(size)
        neurons = np.maximum(linear @ weights + 0.5 * rng.standard_normal(_NEURONS), 0.0) * present
        if _student(neurons, examples.centred)[0] > _UNRELATED:
            return
    yield (
        "Outputs cannot be predicted from the inputs at all, neither linearly nor by random "
        "features: check that X[i] and Y[i] belong together."
    )


def _student(features: Values, targets: Values) -> tuple[float, float]:
    """Student's t and the squared correlation of predictions (n, k, f) -> (n, k, e)."""
    predicted = np.zeros_like(targets)
    for fitted, judged in dependence.halves(len(features)):
        rows, values = (part[fitted].reshape(-1, part.shape[2]) for part in (features, targets))
        predicted[judged] = features[judged] @ dependence.ridge(rows, values)
    sums = np.sum(predicted * targets, axis=(1, 2))
    squares, total = _spread(sums), float(np.sum(sums))
    if squares == 0:
        return 0.0, 0.0
    t = total / (dependence.DEPENDENT * np.sqrt(squares))
    return t, total**2 / (_spread(predicted) * _spread(targets))


def _not_causal(examples: RawExamples) -> Iterator[str]:
    energies = examples.energies
    (above, error), (below, _) = (energies.mean(sign * energies.offset > 0) for sign in (1, -1))
    if examples.causal and above > _SURE * error and above > _HARDLY * below:
        yield (
            f"Output rows depend on later tokens ({above / max(below, above):.0%} as strongly as "
            "on earlier ones): pass causal=False."
        )


def _causal(examples: RawExamples) -> Iterator[str]:
    energies = examples.energies
    above, error = energies.mean(energies.offset > 0)
    below, below_error = energies.mean(energies.offset < 0)
    if not examples.causal and _only(below, below_error, above, error):
        share = max(above, 0.0) / (max(above, 0.0) + below)
        yield (
            f"Output rows do not depend on later tokens ({share:.2f} of the dependence on other "
            "tokens, expected about 0.5): pass causal=True."
        )


def _only(there: float, there_error: float, elsewhere: float, error: float) -> bool:
    """Whether rows depend on tokens there, and not on tokens elsewhere."""
    nothing = elsewhere < _NONE * there and elsewhere + 1.5 * error < _HARDLY * there
    return there > _SURE * there_error and nothing


def _padding_content(examples: RawExamples) -> Iterator[str]:
    """One vector that fills one end of the examples, in runs of different lengths."""
    X = examples.X
    if examples.masked or X.shape[1] < 2:
        return
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
        yield (
            f"At the {end}, {padded:.0%} of the examples repeat one and the same token, up to "
            f"{int(runs.max())} times, which occurs nowhere else: if that is padding, pass mask=."
        )
        return


def _fading_end(examples: RawExamples) -> Iterator[str]:
    """Tokens that matter less towards one end of the sequence."""
    energies = examples.energies
    if examples.masked or examples.causal or energies.places < 2:
        return
    place = np.arange(energies.places)
    varying = place[energies.varying]
    for start, end, name in ((0, -1, "last"), (-1, 0, "first")):
        strong, weak = ((energies.offset != 0) & (place == varying[i]) for i in (start, end))
        if (ratio := _faded(energies, strong, weak)) is not None and ratio < _FADED:
            yield (
                f"The {name} token influences other rows {max(ratio, 0.0):.2f} times as much as "
                "the token at the other end, expected about 1: if examples are padded, pass mask=."
            )


def _window(examples: RawExamples) -> Iterator[str]:
    """Attention to near tokens only: nothing beyond some distance, something up to it."""
    if examples.masked:
        return  # distant places are rarely there together, which looks like a window
    energies = examples.energies
    places, distance = energies.places, np.abs(energies.offset)
    pairs = energies.offset != 0
    if examples.causal or examples.suspects("causal"):
        # Earlier rows have fewer keys and depend more on each of them.
        pairs = (energies.offset < 0) & (np.arange(places) >= places // 2)[:, None]
    for width in range(1, places - 1):
        near, near_error = energies.mean(pairs & (distance <= width))
        far, far_error = energies.mean(pairs & (distance > width))
        if _only(near, near_error, far, far_error):
            yield (
                f"Output rows do not depend on tokens more than {width} places away "
                f"({max(far, 0.0) / near:.2f} of the dependence on nearer ones): the layer attends "
                "within a window or by distance, which a layer without positions cannot do."
            )
            return


def _fading_distance(examples: RawExamples) -> Iterator[str]:
    """Tokens that matter less the farther away they are."""
    energies = examples.energies
    if examples.masked or examples.causal or energies.places < 2:
        return
    near, far = (np.abs(energies.offset) == apart for apart in (1, energies.places - 1))
    if (ratio := _faded(energies, near, far)) is not None and ratio < _DISTANT:
        yield (
            f"Output rows depend {max(ratio, 0.0):.2f} times as much on the farthest tokens as on "
            "their neighbours, expected about 1: the layer seems to attend by distance."
        )


def _faded(energies: Energies, strong: Values, weak: Values) -> float | None:
    """The energy of weak pairs over that of strong ones; None if they may be the same."""
    high, high_error = energies.mean(strong)
    low, low_error = energies.mean(weak)
    error = float(np.hypot(high_error, low_error))
    if high > _SURE * high_error and high - low > _SURE * error:
        return low / high
    return None


def _bias(examples: RawExamples) -> Iterator[str]:
    """A part of the outputs that is even in symmetric inputs: a layer without biases is odd.

    Even features are a constant and covariances of the tokens. Nothing is said if tokens are not
    symmetric about zero.
    """
    X, present, rng = examples.X, examples.present[:, :, None], examples.rng
    rows, outputs = X[examples.present > 0], examples.Y[examples.present > 0]
    size = float(np.mean(rows**2))
    if examples.bias or _spread(rows.mean(axis=0)) > _SYMMETRIC * size * X.shape[2]:
        return
    cubes = examples.tokens[examples.present > 0] ** 3
    if np.mean(np.mean(cubes, axis=0) ** 2 - np.var(cubes, axis=0) / len(rows)) > _SYMMETRIC:
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
        of_mean = _spread(outputs.mean(axis=0)) / np.mean(np.sum(outputs**2, axis=1))
        yield (
            f"Features that are even in the inputs predict {share:.1%} of the outputs (their mean "
            f"alone {of_mean:.1%}), expected none without biases: pass bias=True."
        )


CHECKS = (
    DataCheck("repeated examples", _repeated_examples, fewest=0),
    DataCheck("repeated tokens", _repeated_tokens, fewest=0),
    DataCheck("vocabulary", _vocabulary, fewest=0),
    DataCheck("constant", _constant, fewest=0, final=True),
    DataCheck("axes", _axes, fewest=0, final=True),
    DataCheck("unrelated", _unrelated, final=True),
    DataCheck("not causal", _not_causal),
    DataCheck("causal", _causal),
    DataCheck("padding", _padding_content),
    DataCheck("padding", _fading_end, unless=("padding", "causal")),
    DataCheck("window", _window, unless=("padding",)),
    DataCheck("positions", _fading_distance, unless=("padding", "window", "causal")),
    DataCheck("bias", _bias),
)
