"""Small recovery problems in all their variants, for the tests of the recovery half."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import oracles
from hypothesis import strategies as st

from onelayer import AttentionLayer, inputs
from onelayer.array import blocks
from onelayer.array.backend import double, like, to_numpy
from onelayer.data import sources
from onelayer.data.chunks import InMemory, Streamed
from onelayer.heads import dense
from onelayer.recovery.examples import block, bytes_in_block, hold, whiten
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.validation import ValidatedExamples
from onelayer.recovery.whitening import Whitening
from onelayer.span import Span


@dataclass(frozen=True)
class Case:
    """Examples as numpy arrays with their options, and attention matrices to look at them with.

    `attention` (m, d, d) and `key_bias` (m, d) or None are in whitened coordinates.
    """

    X: Any
    Y: Any
    attention: Any
    key_bias: Any = None
    mask: Any = None
    causal: bool = False

    @property
    def bias(self):
        return self.key_bias is not None

    @property
    def heads(self):
        return len(self.attention)

    @property
    def equations(self):
        """How many numbers are observed."""
        n, tokens, out_dim = self.Y.shape
        return len(oracles.present_rows(n, tokens, self.mask)) * out_dim

    def problem(self, xp_array=np.asarray):
        """The problem of tokens that count as whitened already, outputs at unit mean square."""
        mask = None if self.mask is None else xp_array(self.mask)
        there = np.ones(self.X.shape[:2], dtype=bool) if self.mask is None else self.mask
        scale = float(np.mean(self.Y[there] ** 2)) ** 0.5 or 1.0
        X, Y = (like(xp_array(one), double(xp_array(self.X))) for one in (self.X, self.Y))
        frame = frame_as_it_is(X, Y, scale, self.causal, self.bias)
        return hold(frame, *frame.apply(X, Y, mask))

    def fit(self, xp_array=np.asarray, per_block=1000, memory_budget=None):
        """The reduced fit at the attention matrices, so many examples to a block.

        All blocks are one chunk in memory; with a `memory_budget` in bytes each is a chunk that is
        read again in every pass.
        """
        posed = self.problem(xp_array)
        theta = like(dense.pack(self.attention, self.key_bias), posed.X)
        n = posed.examples
        cuts = [slice(start, min(n, start + per_block)) for start in range(0, n, per_block)]
        parts = tuple(block_of(posed, cut) for cut in cuts)
        spread = (
            InMemory((parts,)) if memory_budget is None else read_anew([(part,) for part in parts])
        )
        batches = replace(
            posed.batches(self.heads), chunks=spread, memory_budget=memory_budget or 0
        )
        return varpro.fit(batches, theta)

    def options(self):
        """What the oracles take beside the attention matrices."""
        return {"key_bias": self.key_bias, "mask": self.mask, "causal": self.causal}

    def whitened(self):
        """Tokens and outputs as the reduced problem sees them."""
        posed = self.problem()
        return posed.X, posed.Y

    def features(self):
        """H by loops."""
        X, _ = self.whitened()
        return oracles.attended_tokens(X, self.attention, **self.options(), constant=self.bias)

    def loss(self):
        """The reduced loss by loops and plain least squares."""
        X, Y = self.whitened()
        return oracles.reduced_loss(X, Y, self.attention, **self.options(), output_bias=self.bias)

    def moved(self, direction, length):
        """The case at attention matrices moved along a theta direction."""
        change, bias_change = unpacked(direction, self.attention.shape[1])
        key_bias = self.key_bias if bias_change is None else self.key_bias + length * bias_change
        return replace(self, attention=self.attention + length * change, key_bias=key_bias)

    def push(self, direction, weights):
        """J times a theta direction by loops, with the projections of a fit."""
        X, _ = self.whitened()
        change, bias_change = unpacked(direction, X.shape[2])
        heads, dim, _ = self.attention.shape
        projection = to_numpy(weights)[: heads * dim].reshape(heads, dim, -1)
        return oracles.output_change(
            X, self.attention, projection, change, bias_change=bias_change, **self.options()
        )

    def reduced_jacobian(self, weights):
        """The dense (I - H H⁺) J, one column per entry of the theta attention matrices."""
        heads, dim, _ = self.attention.shape
        shape = (dim + int(self.bias), heads * dim)
        columns = []
        for entry in range(shape[0] * shape[1]):
            direction = np.zeros(shape[0] * shape[1])
            direction[entry] = 1.0
            columns.append(np.ravel(self.push(direction.reshape(shape), weights)))
        J = np.stack(columns, axis=1)
        H = np.kron(self.features(), np.eye(self.Y.shape[2]))
        return J - H @ (np.linalg.pinv(H, rcond=1e-10) @ J)


def read_anew(values):
    """Chunks of these values that are gone through one by one."""
    return Streamed(lambda positions: (values[i] for i in positions), tuple(range(len(values))))


def flat(spread):
    """The blocks, or what belongs to them, of all chunks."""
    return [one for chunk in spread.collect() for one in chunk]


def unpacked(direction, dim):
    """(change of the attention matrices, change of the key biases or None)."""
    parts = to_numpy(dense.by_head(direction, dim))
    return parts[:, :dim], (parts[:, dim] if parts.shape[1] > dim else None)


def random_mask(rng, n, tokens):
    """A random mask that leaves every example at least one token."""
    mask = rng.random((n, tokens)) < 0.6
    mask[np.arange(n), rng.integers(0, tokens, n)] = True
    return mask


def random_case(
    seed, n=6, tokens=3, heads=2, dim=2, out_dim=2, bias=False, masked=False, causal=False
):
    """A case with random everything; outputs are noise, so that residuals are large."""
    rng = np.random.default_rng(seed)
    case = Case(
        X=rng.standard_normal((n, tokens, dim)) @ rng.standard_normal((dim, dim)),
        Y=3.0 * rng.standard_normal((n, tokens, out_dim)),
        attention=rng.standard_normal((heads, dim, dim)),
        key_bias=rng.standard_normal((heads, dim)) if bias else None,
        mask=random_mask(rng, n, tokens) if masked else None,
        causal=causal,
    )
    return replace(case, X=evened(case.X, case.mask))


def evened(X, mask=None):
    """Tokens brought to unit second moments along the directions that they have."""
    rows = X.reshape(-1, X.shape[2]) if mask is None else X[mask]
    values, vectors = np.linalg.eigh(rows.T @ rows / len(rows))
    values = np.where(values > 1e-12 * values[-1], values, values[-1])
    return X @ (vectors / np.sqrt(values)) @ vectors.T


@st.composite
def small_cases(draw, most_examples=8, least_examples=1, least_tokens=1):
    """Cases of all shapes and options, with more or fewer equations than unknowns."""
    return random_case(
        seed=draw(st.integers(0, 2**32 - 1)),
        n=draw(st.integers(least_examples, most_examples)),
        tokens=draw(st.integers(least_tokens, 3)),
        heads=draw(st.integers(1, 3)),
        dim=draw(st.integers(1, 3)),
        out_dim=draw(st.integers(1, 4)),
        bias=draw(st.booleans()),
        masked=draw(st.booleans()),
        causal=draw(st.booleans()),
    )


def well_posed_cases():
    """Cases with far more equations than unknowns, so that the least squares are determined."""
    return small_cases(most_examples=30, least_examples=25, least_tokens=2)


def solved_case(layer, X, mask=None, causal=False):
    """A layer's own outputs, looked at with the layer's own attention matrices: nothing is left."""
    weights = {name: to_numpy(array) for name, array in layer.arrays().items()}
    Y = to_numpy(layer(X, mask=mask, causal=causal))
    bias = weights.get("key_bias")
    return Case(X, Y, attention=weights["attention"], key_bias=bias, mask=mask, causal=causal)


def frame_as_it_is(X, Y, scale=1.0, causal=False, bias=False):
    """The frame of tokens that are taken as they are given, on all directions."""
    (_, tokens, dim), out_dim = X.shape, int(Y.shape[2])
    whole = Span(np.zeros(dim), np.eye(dim), np.ones(dim), np.zeros(dim), np.eye(dim))
    origin, matrix, mean = (
        like(value, Y) for value in (np.zeros(dim), np.eye(dim), np.zeros(out_dim))
    )
    shape = (int(tokens), int(dim), out_dim, causal, bias)
    return Whitening(*shape, whole, bias, origin, matrix, None, mean, scale)


def given(X, Y, mask=None, source=sources.in_memory):
    """Examples as `recover` has them after validation; `source` says where they live."""
    return ValidatedExamples.of(source(X, Y, mask))


def whitened(X, Y, mask=None, causal=False, bias=False):
    """Whitened examples in memory."""
    return whiten(given(X, Y, mask), causal, bias, hold_all=True)


def block_of(posed, part):
    """Some of whitened examples in memory, as one block."""
    return block(posed, *(None if one is None else one[part, ...] for one in posed.arrays))


def with_outputs(posed, Y):
    """Whitened examples in memory with other outputs."""
    return hold(posed, posed.X, Y, posed.mask)


def gathered(X, Y, held_out=(), source=sources.in_memory, **options):
    """Examples for the phases, which find their whitening; `source` says where they live."""
    held_out = np.array(held_out, dtype=int)
    return whiten(given(X, Y, None, source), linear=True, held_out=held_out, **options)


def as_they_are(X, Y, held_out=()):
    """Examples for the phases in the coordinates in which they are given."""
    spread = hold(frame_as_it_is(X, Y), X, Y, None)
    held_out = np.array(held_out, dtype=int)
    equations = (X.shape[0] - len(held_out)) * X.shape[1] * Y.shape[2]
    return replace(spread, held_out=held_out, equations=equations)


def tokens_and_outputs(source):
    """The arrays that examples in memory were given as."""
    (chunk,) = source.source.chunks.collect()
    return chunk.arrays[:2]


def in_small_blocks(monkeypatch, block_bytes):
    """Let a block be of so many bytes."""
    monkeypatch.setattr(blocks, "BLOCK_BYTES", block_bytes)


def in_blocks_of(monkeypatch, count, source):
    """Let a block of some examples for the phases be of so many of them."""
    per_example = bytes_in_block(source.tokens, source.dim, source.out_dim)
    in_small_blocks(monkeypatch, count * per_example)


def solved(heads=3, masked=False, **options):
    """A layer's own outputs seen with its own attention matrices."""
    layer = AttentionLayer.random(heads=heads, dim=3, seed=1, **options)
    mask = random_mask(np.random.default_rng(3), 60, 3) if masked else None
    return solved_case(layer, inputs.gaussian(60, 3, 3, seed=2), mask)


def missing_one(xp_array=np.asarray, n=4000, **options):
    """A problem, a fit with the true heads but for a random one in the place of one, and these."""
    layer = AttentionLayer.random(heads=3, dim=8, scale=2.0, seed=1, **options)
    case = solved_case(layer, inputs.boolean(n, 4, 8, seed=2))
    posed = case.problem(xp_array)
    true = dense.pack(case.attention, case.key_bias)
    found = true.copy()
    found[:, 8:16] = np.random.default_rng(5).standard_normal(found[:, 8:16].shape) / 8
    return posed, varpro.fit(posed.batches(3), xp_array(found)), true
