"""Norms for residuals of decoupled outputs, one for every row and head.

Where outputs are decoupled (see `decoupling.py`) each head has r outputs of its own. A change of
its query factor by dQ moves those of row a by x_a dQ M_a, with M_a = Kᵀ Z_a V (r, r) and
Z_a = diag(p_a) - p_a p_aᵀ. Where attention is mostly on one token M_a has one strong direction, and
others that are weaker by orders of magnitude. Strong ones alone do not determine a head, and
conjugate gradients need hundreds of products to see the weak ones.

On exact outputs a fit is the same whatever norms residuals are measured in. With

    B_a = (ε + M_aᵀ G⁻¹ M_a)⁻¹,

G the mean of M_a M_aᵀ, weak directions of scores count nearly as much as strong ones, as
G^(-1/2) M_a B_a M_aᵀ G^(-1/2) is near a projector. On ±1 inputs (12 heads of rank 32 in 384
dimensions, 2,042 examples) steps from an error of 2e-3 to rounding took 246 products, and 1,136
without. Values and outputs hardly notice: the trace of B_a varied by a tenth between rows.

With R = K G⁻¹ Kᵀ and T_a = Z_a R Z_a (k, k), M_aᵀ G⁻¹ M_a is Vᵀ T_a V and

    ε B_a = 1 - Vᵀ Ω_a V,    Ω_a = T_a (ε + V Vᵀ T_a)⁻¹.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.recovery.factored import model
from onelayer.recovery.factored.model import Activations

# ε, in units of the mean eigenvalue of M_aᵀ G⁻¹ M_a.
_EVENNESS = 1.0
_LEAST_TRACE = 1e-4  # of ε B_a, relative to the rank
_MOST_TOKENS = 2  # times the rank: longer examples have norms that cost more than they save


@dataclass(frozen=True, eq=False)
class RowNorms:
    """The norms of a block: ε B_a up to a factor for each head."""

    value: Array  # V (n, m, k, r)
    omega: Array  # Ω (n, m, k, k, k)
    scale: Array  # (m, 1, 1), so that ε B_a is 1 in the mean
    root: Array  # C (m, r, r) with C Cᵀ = G⁻¹

    def times(self, rows: Array) -> Array:
        """Rows (n·k, e) times their matrices; outputs that no head has stay as they are."""
        return self._of_heads(rows, self._weighted(self._by_head(rows)))

    def drawn(self, at: Activations, rng: np.random.Generator) -> Array:
        """Random rows with these matrices as their covariances.

        The covariance of √ε z + M_aᵀ C z' is ε + M_aᵀ G⁻¹ M_a, and that of B_a times it B_a.
        """
        xp = backend.namespace(at.residuals)
        rows = backend.like(rng.standard_normal(tuple(at.residuals.shape)), at.residuals)
        mine = self._by_head(rows)
        shape = (*mine.shape[:3], self.root.shape[2])
        other = backend.like(rng.standard_normal(shape), mine)
        scores = other @ backend.transpose(at.key @ self.root)
        moved = model.softmax_jvp(at.attention, scores) @ self.value
        both = self._weighted(_EVENNESS**0.5 * mine + moved)
        return self._of_heads(rows, both / xp.sqrt(_EVENNESS * self.scale))

    def _weighted(self, by_head: Array) -> Array:
        scores = by_head @ backend.transpose(backend.like(self.value, by_head))
        scores = (backend.like(self.omega, by_head) @ scores[..., None])[..., 0]
        found = by_head - scores @ backend.like(self.value, by_head)
        return backend.like(self.scale, by_head) * found

    def _by_head(self, rows: Array) -> Array:
        """The first columns of rows (n·k, e), those of heads, as (n, m, k, r)."""
        xp, (n, heads, tokens, rank) = backend.namespace(rows), self.value.shape
        found = xp.reshape(rows[:, : heads * rank], (n, tokens, heads, rank))
        return xp.permute_dims(found, (0, 2, 1, 3))

    def _of_heads(self, rows: Array, by_head: Array) -> Array:
        """Rows with their first columns from (n, m, k, r)."""
        found = model.joined(by_head)
        rest = rows[:, found.shape[1] :]
        return backend.namespace(rows).concat([found, rest], axis=1) if rest.shape[1] else found


def row_norms(activations: Sequence[Activations], inverse: Array) -> list[RowNorms] | None:
    """Norms for blocks, with G⁻¹ (m, r, r); None for examples that are too long."""
    tokens, rank = activations[0].value.shape[2:]
    if tokens > _MOST_TOKENS * rank:
        return None
    found: list[tuple[Array, Array]] = blocks.fold_over(
        activations, partial(_omega, inverse), lambda a, b: a + b, inverse
    )
    xp = backend.namespace(inverse)
    traces = sum(trace for _, trace in found) / sum(one.shape[0] * tokens for one, _ in found)
    spare = rank - traces  # positive, but for rounding
    least = _LEAST_TRACE * rank * xp.ones_like(spare)
    scale = xp.reshape(rank / xp.where(spare > least, spare, least), (-1, 1, 1))
    root = backend.single(xp.linalg.cholesky(backend.double(inverse)))
    return [
        RowNorms(at.value, omega, scale, root)
        for at, (omega, _) in zip(activations, found, strict=True)
    ]


def _omega(inverse: Array, at: Activations) -> list[tuple[Array, Array]]:
    """Ω of a block, and Σ_a tr(Ω_a V Vᵀ) for every head."""
    xp, tokens = backend.namespace(inverse), int(at.value.shape[2])
    gram = at.value @ backend.transpose(at.value)
    among = (at.key @ inverse) @ backend.transpose(at.key)
    among = _centred(at.attention, among)
    along = at.attention[..., :, None] * among * at.attention[..., None, :]
    ridge = _EVENNESS * backend.like(np.eye(tokens), inverse)
    # Ω is symmetric: T (ε + V Vᵀ T)⁻¹ = (ε + T V Vᵀ)⁻¹ T.
    omega = xp.linalg.solve(ridge + along @ gram[:, :, None, :, :], along)
    omega = 0.5 * (omega + backend.transpose(omega))
    trace = xp.sum(omega * gram[:, :, None, :, :], axis=(0, 2, 3, 4))
    return [(omega, trace)]


def _centred(attention: Array, among: Array) -> Array:
    """Products of tokens less their mean under the attention of each row: (n, m, k, k, k)."""
    xp = backend.namespace(attention)
    mean = attention @ among
    square = xp.sum(mean * attention, axis=-1)[..., None, None]
    return among[:, :, None, :, :] - mean[..., :, None] - mean[..., None, :] + square
