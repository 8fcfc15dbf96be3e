"""Test whether the residuals of a fit are only noise.

At the right minimum the residuals are the noise and independent of the inputs. If the model is
wrong (causal attention fitted without `causal`, padding without its mask, a missing head) they are
a function of the sequence and of places in it, and that function can be learned. So for each kind
of features φ (see `residual_features.py`) ridge regressions from φ to the residuals of training
examples predict residuals r̂ of held-out examples, and

    s_j = Σ_rows <r_j, r̂_j>,        t = Σ_j s_j / √(Σ_j s_j²)

is compared with its distribution for noise. Given the training examples, the s_j of noise are
independent with mean zero, also if the rows of one example are dependent; then
t √((h - 1) / (h - t²)) is about Student's with h - 1 degrees of freedom, h the number of held-out
examples. Weak structure shows with a strong ridge, strong structure with a weak one: each kind is
tested with several. Two more kinds are the limit of an infinite ridge, for features that are too
many for a regression but have cheap inner products: "head" has x_a ⊗ Cov(keys), the first-order
change of outputs with a missing head, and "position" x_a ⊗ x_b ⊗ x_b for keys b at each small
distance from a, the same for heads that depend on relative positions. The level is divided among
all tests (Bonferroni).

The same is done within the training examples, of which one half predicts the other: these are more,
and fitting only makes the residuals of both halves less alike (the part of the noise that is fitted
is missing from both, so s_j is below zero on average). Copies of an example share its noise and are
left out where they are judged. Inputs that occur again with other outputs show the noise itself, by
their scatter.

Measured with 16 dimensions, 2 heads of scale 2, 4 to 8 tokens, Gaussian and Boolean, 400 and 1,000
examples of which a tenth is held out, noise of 0, 0.1 and 0.3 of the output; the threshold is 3.6
to 3.7:

    model behind the examples          relative error    found       smallest t
    causal                             0.52 to 0.74      24 of 24    22
    padded, lengths at random          0.50 to 0.69      24 of 24    9.3
    padded, padded rows are zero       0.60 to 0.76      24 of 24    10
    key and output bias                0.57 to 0.75      24 of 24    19
    key bias                           0.16 to 0.39      24 of 24    10
    two tokens to either side          0.56 to 0.71      24 of 24    16
    rotary positions                   0.33 to 0.59      22 of 24    2.9
    a GELU MLP behind the layer        0.57 to 0.70      24 of 24    25
    0.3 times that, added              0.10 to 0.31      24 of 24    13
    layer norm behind the layer        0.20 to 0.39      24 of 24    13
    one head more                      0.42 to 0.57      24 of 24    9.8
    a random MLP of the sequence       0.91 to 0.97      24 of 24    45

Of 200 correct fits (plain, causal, masked, biased; 1 to 3 heads, 8 and 16 dimensions, noise of 1e-6
to 0.3) none was rejected. The thresholds were set on other draws than these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import scipy.linalg
import scipy.stats

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.recovery.diagnosis import residual_features
from onelayer.recovery.diagnosis.copies import DECIMALS, row_keys
from onelayer.recovery.diagnosis.residual_features import Features, ResidualSample, Values
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.gauss_newton.batches import Block
from onelayer.recovery.gauss_newton.varpro import Fit

_LEVEL = 0.01  # probability of a false alarm over all tests
_RIDGES = (1e-3, 0.1, 10.0)  # relative to the mean eigenvalue of the features' Gram matrix
_MOST_EXAMPLES, _MOST_ROWS = 3000, 16_000  # in the regressions
_HELD_OUT_ROWS = 8000
_COMPARED = 2_000_000  # inner products in memory at a time
_NEAR = 2  # largest distance of relative positions
_ROUNDING = 1e-12  # errors below this are rounding, which may depend on inputs
# With fewer held-out examples the test has no power. A wrong model or a bad minimum leaves a far
# larger relative error than `_TINY`, so only smaller errors pass then.
FEWEST, _TINY = 8, 1e-3
# Above this relative error a fit explains so little that passing a test is no evidence for it: only
# repeated inputs can show that the residuals are noise.
_LARGE = 0.35
_FEWEST_PAIRS = 20
_EXPLAINED = 0.7  # share of the squared residuals that the scatter of repeated inputs has to reach


def is_noise(
    fit: Fit, training: Sequence[Block], held_out: Sequence[Block], rng: np.random.Generator
) -> bool:
    """Whether residuals pass as noise: by repeated inputs, and by all kinds of features."""
    if fit.error < _ROUNDING:
        return True
    pairs, variance = scatter([*training, *held_out])
    enough = pairs >= _FEWEST_PAIRS
    if fit.error > _LARGE and not (enough and variance >= _EXPLAINED * fit.loss):
        return False
    # Noise may have one size for each example: pairs count, not entries.
    highest = variance * (1 + 3 * np.sqrt(2 / max(pairs, 1)))
    if enough and highest < _EXPLAINED * fit.loss:
        return False
    found, examples = evidence(fit, training, held_out, rng)
    if examples < FEWEST:
        return fit.error < _TINY
    return max(found.values(), default=0.0) < threshold(examples)


def threshold(examples: int) -> float:
    """The largest t that counts as noise, for a number of held-out examples."""
    tests = len(residual_features.KINDS) * len(_RIDGES) + 2
    return float(scipy.stats.t.isf(_LEVEL / (2 * tests), examples - 1))


def evidence(
    fit: Fit, training: Sequence[Block], held_out: Sequence[Block], rng: np.random.Generator
) -> tuple[dict[str, float], int]:
    """The largest t of each kind of features, and the number of held-out examples it is from."""
    seen = _sample(fit, training, _MOST_ROWS)
    other = _without_copies(_sample(fit, held_out, _HELD_OUT_ROWS), seen)
    size = float(np.sqrt(np.mean(seen.residual**2)))
    if size == 0:
        return {}, len(other.tokens)
    seen, other = (one._replace(residual=one.residual / size) for one in (seen, other))
    kinds = {name: kind(seen, rng) for name, kind in residual_features.KINDS.items()}
    half = len(seen.tokens) // 2
    first = seen.take(slice(0, half))
    second = _without_copies(seen.take(slice(half, None)), first)
    pairs = [pair for pair in ((seen, other), (first, second)) if len(pair[1].tokens) > 1]
    strongest: dict[str, float] = {}
    for one, judged in pairs:
        for kind, predicted in _predictions(kinds, one, judged):
            t = _student(predicted, judged.residual)
            strongest[kind] = max(t, strongest.get(kind, t))
    return strongest, len(other.tokens)


def _student(predicted: Values, residual: Values) -> float:
    """Student's t of one prediction, examples being independent of each other."""
    sums = np.sum(predicted * residual, axis=(1, 2))
    squares = float(np.sum(sums**2))
    if squares == 0:
        return 0.0
    total, count = float(np.sum(sums)), len(sums)
    t = total / np.sqrt(squares)
    return float(t * np.sqrt((count - 1) / max(count - t * t, 1e-9)))


def _predictions(
    kinds: dict[str, Features], seen: ResidualSample, other: ResidualSample
) -> Iterator[tuple[str, Values]]:
    """All predictions of residuals (n, k, e) of other examples, with their kinds of features."""
    for name, features in kinds.items():
        rows, scale = _rows(features, seen, None)
        elsewhere, _ = _rows(features, other, scale)
        gram, against = rows.T @ rows, rows.T @ _flat(seen.residual)
        mean_eigenvalue = float(np.trace(gram)) / len(gram) or 1.0
        for ridge in _RIDGES:
            ridged = gram + ridge * mean_eigenvalue * np.eye(len(gram))
            weights = scipy.linalg.solve(ridged, against, assume_a="pos")
            yield name, (elsewhere @ weights).reshape(other.residual.shape)
    # Covariances are centred: their mean gives what is linear in x_a, no head.
    mine, scale = _rows(kinds["keys"], seen, None)
    mean = np.mean(mine, axis=0)
    mine, theirs = mine - mean, _rows(kinds["keys"], other, scale)[0] - mean
    yield "head", _gradient_step(lambda part: theirs[part] @ mine.T, seen, other)
    yield "position", _gradient_step(_neighbour_products(seen, other), seen, other)


def _rows(
    features: Features, sample: ResidualSample, scale: Values | None
) -> tuple[Values, Values]:
    """Features of all rows (n·k, f), zero where they do not count, over their root mean squares."""
    rows = _flat(features(sample) * sample.counted[:, :, None])
    if scale is None:
        scale = np.sqrt(np.mean(rows**2, axis=0))
        scale[scale == 0] = 1.0
    return rows / scale, scale


def _gradient_step(
    products: Callable[[slice], Values], seen: ResidualSample, other: ResidualSample
) -> Values:
    """Σ_i <x_a, x_i> K(a, i) r_i over rows i of training examples, for all other rows a: (n, k, e).

    With K = <φ_a, φ_i> these are the residuals that one small gradient step for the features
    x_a ⊗ φ_a predicts, up to a factor. `products` gives K for some of the other rows.
    """
    own, residual, others = _flat(seen.tokens), _flat(seen.residual), _flat(other.tokens)
    step = max(1, _COMPARED // len(own))
    slices = [slice(start, start + step) for start in range(0, len(others), step)]
    parts = [((others[part] @ own.T) * products(part)) @ residual for part in slices]
    found = np.concatenate(parts).reshape(other.residual.shape)
    largest = float(np.abs(found).max()) or 1.0
    return np.asarray(found / largest * other.counted[:, :, None])


def _neighbour_products(seen: ResidualSample, other: ResidualSample) -> Callable[[slice], Values]:
    """Σ_δ <x_{a+δ} x_{a+δ}ᵀ - cI, x_{i+δ} x_{i+δ}ᵀ - cI> over distances δ, c their mean square."""
    dim, tokens = seen.tokens.shape[2], seen.tokens.shape[1]
    distances = [delta for delta in range(-_NEAR, _NEAR + 1) if abs(delta) < tokens]
    mine, theirs = ([_flat(one.shifted(delta)) for delta in distances] for one in (seen, other))
    # Existing keys are never exactly the mean, for which a zero stands.
    present, their_present = ([np.any(one != 0, axis=1) for one in part] for part in (mine, theirs))
    centre = [
        float(np.sum(one**2)) / max(np.count_nonzero(there) * dim, 1)
        for one, there in zip(mine, present, strict=True)
    ]

    def products(part: slice) -> Values:
        total = np.zeros((len(theirs[0][part]), len(mine[0])))
        for i, c in enumerate(centre):
            rows, one = theirs[i][part], mine[i]
            lengths = np.sum(rows**2, axis=1)[:, None] + np.sum(one**2, axis=1)
            there = np.outer(their_present[i][part], present[i])
            total += there * ((rows @ one.T) ** 2 - c * lengths + c * c * dim)
        return total

    return products


def _flat(values: Values) -> Values:
    return values.reshape(-1, values.shape[-1])


def _sample(fit: Fit, blocks: Sequence[Block], most_rows: int) -> ResidualSample:
    """The first examples of some blocks with their residuals, in numpy."""
    left = min(_MOST_EXAMPLES, max(1, most_rows // int(blocks[0].keys.shape[1])))
    parts = []
    for block in blocks:
        count = min(left, int(block.keys.shape[0]))
        left -= count
        if count:
            parts.append(_part(fit, _first(block, count)))
    parts = parts or [_part(fit, blocks[0])]
    return ResidualSample(*map(np.concatenate, zip(*parts, strict=True)))


def _first(block: Block, count: int) -> Block:
    rows = count * int(block.keys.shape[1])
    lengths = {"queries": count, "keys": count, "allowed": count, "outputs": rows, "counted": rows}
    arrays = {name: getattr(block, name) for name in lengths}
    given = {name: array for name, array in arrays.items() if array is not None}
    return replace(block, **{name: array[: lengths[name], ...] for name, array in given.items()})


def _part(fit: Fit, block: Block) -> ResidualSample:
    n, tokens, _ = block.keys.shape
    shape = (n, tokens, block.outputs.shape[1])
    (residual,) = varpro.residuals_on(fit, [block])
    attention = varpro.attend(block, fit.theta, fit.batches.output_bias).attention
    allowed = np.ones((1, tokens, tokens))
    if block.allowed is not None:
        allowed = backend.to_numpy(block.allowed).astype(np.float64)
    keys = allowed / np.maximum(allowed.sum(axis=2, keepdims=True), 1.0)
    return ResidualSample(
        tokens=_numbers(block.keys),
        counted=_counted(block),
        read=_read(block),
        keys=np.broadcast_to(keys, (n, tokens, tokens)),
        attention=_numbers(attention).reshape(n, tokens, fit.heads, tokens),
        fitted=_numbers(block.outputs - residual).reshape(shape),
        residual=_numbers(residual).reshape(shape),
    )


def _numbers(array: Array) -> Values:
    return backend.to_numpy(backend.double(array))


def _counted(block: Block) -> Values:
    n, tokens, _ = block.keys.shape
    if block.counted is None:
        return np.ones((n, tokens))
    return _numbers(block.counted).reshape(n, tokens)


def _read(block: Block) -> Values:
    """1 for tokens that some counted row may attend to, (n, k)."""
    n, tokens, _ = block.keys.shape
    if block.allowed is None:
        return np.ones((n, tokens))
    return np.broadcast_to(backend.to_numpy(block.allowed).any(axis=1), (n, tokens)) * 1.0


def scatter(blocks: Sequence[Block]) -> tuple[int, float]:
    """The number of repetitions, all but one of each repeated input, and the variance over them.

    Inputs are the tokens that are read, and which rows count. Variances are of outputs of unit mean
    square, averaged over entries of rows that count. Exact copies count once: they may be one
    example that was stored twice.
    """
    groups: dict[bytes, dict[bytes, Values]] = {}
    rows: dict[bytes, float] = {}
    for block in blocks:
        outputs = _numbers(block.outputs).reshape(*block.keys.shape[:2], block.outputs.shape[1])
        counted = _counted(block)
        inputs = _input_keys(_numbers(block.keys), _read(block), counted)
        copies = row_keys(outputs, decimals=DECIMALS)
        rows.update(zip(inputs, counted.sum(axis=1).tolist(), strict=True))
        for key, copy, output in zip(inputs, copies, outputs, strict=True):
            groups.setdefault(key, {})[copy] = output
    pairs, squares, entries = 0, 0.0, 0.0
    for key, group in groups.items():
        if len(group) > 1:
            together = np.stack(list(group.values()))
            pairs += len(group) - 1
            squares += float(np.sum((together - together.mean(axis=0)) ** 2))
            entries += (len(group) - 1) * rows[key] * together.shape[2]
    return pairs, squares / (entries or 1.0)


def _input_keys(tokens: Values, read: Values, counted: Values, *outputs: Values) -> list[bytes]:
    """Keys that are equal for examples with the same tokens that are read, rows and outputs."""
    return row_keys(tokens * read[:, :, None], read, counted, *outputs, decimals=DECIMALS)


def _without_copies(other: ResidualSample, seen: ResidualSample) -> ResidualSample:
    """The examples whose tokens and outputs occur neither among the seen ones nor earlier."""
    before, keys = (
        _input_keys(one.tokens, one.read, one.counted, one.fitted + one.residual)
        for one in (seen, other)
    )
    known, kept = set(before), []
    for position, key in enumerate(keys):
        if key not in known:
            kept.append(position)
        known.add(key)
    return other.take(kept)
