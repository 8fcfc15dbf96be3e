"""Coordinates of the outputs in which heads do not mix.

Outputs are y = Σ_i h_i O_i + b, with r values h_i of every head. The rows of all O_i together are
often nearly dependent: in a sentence encoder with 12 heads of size 32 and 384 outputs their
singular values range over four orders of magnitude. Then changes of different heads nearly cancel
in y, and conjugate gradients take hundreds of products to tell them apart.

If there are at least as many outputs as values, y M with M = O⁺ are the values themselves, and each
head has outputs of its own. On exact outputs the fit of y M is that of y, so M may be chosen for
speed. Values are brought to unit covariance head by head first, so that an error counts as much in
all of them. What of O lies below the error of the fit is not known yet, and not inverted: with
O = U S Vᵀ and ε the square of that error, M = V (S² + ε)^(-1/2) Uᵀ.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.recovery.factored import model
from onelayer.recovery.factored.model import Factors
from onelayer.recovery.gauss_newton.batches import Block, in_single

_EXACT = 1e-15  # an error that is rounding alone
_LEAST = 1e-12  # eigenvalue of the covariance of the values of a head, relative to the mean


@dataclass(frozen=True, eq=False)
class Decoupling:
    """Outputs y M, and values h_i R_i of all heads."""

    outputs: Array  # M (e, e)
    outputs_back: Array
    values: Array  # R (m, q, q)
    values_back: Array

    @classmethod
    def of(cls, factors: Factors, parts: Sequence[Block], error: float) -> Decoupling | None:
        """Those of a layer with this relative error; None if there are too few outputs."""
        inner, out_dim = factors.output.shape
        if factors.value is None or inner > out_dim:
            return None
        xp = backend.namespace(factors.output)
        values, values_back = _roots(_covariances(factors, parts))
        output = values_back @ model.output_by_head(factors)
        output = xp.reshape(output, (inner, out_dim))
        left, sizes, right = xp.linalg.svd(output, full_matrices=True)
        typical = float(xp.mean(sizes * sizes)) ** 0.5 or 1.0
        sizes = xp.sqrt(sizes * sizes + (max(error, _EXACT) * typical) ** 2)
        own, rest = right[:inner, :], typical * right[inner:, :]  # outputs that no head has
        matrix = [(backend.transpose(own) / sizes) @ backend.transpose(left)]
        matrix.append(backend.transpose(rest) / typical**2)
        inverse = [(left * sizes) @ own, rest]
        matrix, inverse = xp.concat(matrix, axis=1), xp.concat(inverse, axis=0)
        return cls(matrix, inverse, values, values_back)

    def enter(self, factors: Factors) -> Factors:
        """Factors of y as factors of y M."""
        return _turned(factors, self.values, self.values_back, self.outputs)

    def leave(self, factors: Factors) -> Factors:
        """Factors of y M as factors of y."""
        return _turned(factors, self.values_back, self.values, self.outputs_back)

    def parts(self, parts: Sequence[Block]) -> list[Block]:
        """Blocks with outputs y M."""
        return [replace(part, outputs=part.outputs @ self.outputs) for part in parts]


def _covariances(factors: Factors, parts: Sequence[Block]) -> Array:
    """Of the values of each head, (m, q, q)."""
    single = factors.map(backend.single)

    def work(part: Block) -> Array:
        part = in_single(part)
        attended = model.counted(model.forward(single, part).attended, part)
        by_head = model.split_heads(attended, factors.heads)
        return backend.transpose(by_head) @ by_head

    rows = sum(int(part.outputs.shape[0]) for part in parts)
    found = blocks.fold_over(parts, work, lambda a, b: a + b, factors.query)
    return backend.double(found) / rows


def _roots(covariances: Array) -> tuple[Array, Array]:
    """Their inverse square roots, and their square roots."""
    xp = backend.namespace(covariances)
    values, vectors = xp.linalg.eigh(covariances)
    mean = xp.mean(values, axis=-1, keepdims=True)
    floor = xp.where(mean > 0, _LEAST * mean, xp.ones_like(mean))
    roots = xp.sqrt(xp.where(values > floor, values, floor))[:, None, :]
    back = backend.transpose(vectors)
    return (vectors / roots) @ back, (vectors * roots) @ back


def _turned(factors: Factors, values: Array, back: Array, outputs: Array) -> Factors:
    value, output = model.split_heads(factors.value, factors.heads), model.output_by_head(factors)
    rows = backend.namespace(output).reshape(back @ output, factors.output.shape)
    bias = factors.output_bias
    return replace(
        factors,
        value=model.join_heads(value @ values),
        output=rows @ outputs,
        output_bias=None if bias is None else bias @ outputs,
    )
