"""Whitened coordinates: how examples get into them, and how heads get back.

Recovery works in coordinates of the affine span of the tokens (see `onelayer.span`) in which they
have mean zero and unit covariance: z = (x - μ) A, A = V diag(1/s). The least-squares problem then
neither inherits the conditioning of the inputs nor has directions in which nothing can be learned.
In these coordinates scores are those of attention matrices Θ' with a key bias c', and outputs have
a constant b', whether or not the layer has biases:

    x_a Θ x_b + c x_b  =  z_a Θ' z_b + c' z_b + ..,     Θ' = B Θ Bᵀ,  c' = B (Θᵀ μ + c),  B = A⁺.

So Θ', c', W' = B W and b' are found, with queries [z, 1], if the layer may have biases, or if the
span does not contain the origin: then any c' and b' come from some Θ and W without biases.

Where the span contains the origin and the layer has no biases, c' and b' follow from Θ' and W':
with ν = μ A scores are (z_a + ν) Θ' z_b, and features P z + ν. Queries z + ν = x A are brought to
unit second moments as well, by M = (I + ννᵀ)^(-1/2). If the mean is small compared with the spread
nothing is gained by subtracting it, and z = x A with A made from second moments does for all.

Outputs are divided by their root mean square, so that all errors are relative; about their mean,
which is subtracted, where there is a constant.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.array.moments import Moments
from onelayer.heads import dense
from onelayer.layer import AttentionLayer
from onelayer.recovery.validation import without_padding
from onelayer.span import Matrix, Span

_ALIKE = 1e-3  # least deviation, relative to the largest, of columns of similar size
_LARGE_MEAN = 1.0  # in standard deviations of tokens: a larger mean is subtracted


@dataclass(frozen=True)
class Whitening:
    """Whitened coordinates of examples, and the options of the layer that is recovered in them."""

    tokens: int
    dim: int  # of whitened tokens
    out_dim: int
    causal: bool
    bias: bool  # whether the layer may have biases
    span: Span
    constant: bool  # whether there are a key bias and an output bias in whitened coordinates
    origin: Array  # (d,), subtracted from tokens before they are whitened
    whitening: Array  # A (d, dim)
    offset: Array | None  # ν (dim,), where queries and features have one
    output_mean: Array  # (out_dim,)
    output_scale: float

    @property
    def query_dim(self) -> int:
        """Rows of an attention matrix, the key bias counted as one."""
        return self.dim + int(self.constant)

    @property
    def transform(self) -> Whitening:
        """The whitening alone, without the examples of a subclass."""
        return Whitening(*(getattr(self, field.name) for field in fields(Whitening)))

    def rank(self, rank: int | None) -> int | None:
        """The rank of attention matrices on the span; None where any matrix has it."""
        return None if rank is None or rank >= self.dim else rank

    def unknowns(self, heads: int, rank: int | None) -> int:
        """The number of free numbers in a layer of this shape."""
        return unknowns(self.dim, self.out_dim, heads, rank, self.constant)

    def apply(
        self, X: Array, Y: Array, mask: Array | None, device: str | None = None
    ) -> tuple[Array, Array, Array | None]:
        """Examples as given, moved to a device, in whitened coordinates; padding becomes zeros."""
        X, Y, mask = (None if one is None else backend.place(one, device) for one in (X, Y, mask))
        X, Y = backend.double(X), backend.double(Y)
        X, Y = (X - self.origin) @ self.whitening, (Y - self.output_mean) / self.output_scale
        return *without_padding(X, Y, mask), mask

    def queries(self, keys: Array) -> Array:
        """The queries (n, k, p) of whitened tokens: with a constant 1, or (z + ν) M."""
        if self.constant:
            return dense.with_constant(keys)
        return keys if self.offset is None else (keys + self.offset) @ self._evened()

    def _evened(self, power: float = -0.5) -> Array:
        """(I + ννᵀ)^power."""
        assert self.offset is not None
        nu, square = self.offset, backend.squared_norm(self.offset)
        one = backend.like(np.eye(self.dim), nu)
        return one + ((1 + square) ** power - 1) / (square or 1.0) * (nu[:, None] * nu[None, :])

    def layer(self, theta: Array, weights: Array) -> AttentionLayer:
        """The layer of least norm that computes on the span what these heads and weights do."""
        attention, key_bias, projection, output_bias = self.matrices(theta, weights)
        constant = backend.to_numpy(self.output_mean)
        if self.bias:
            return AttentionLayer(attention, projection, key_bias, output_bias + constant)
        if self.constant:
            # n x = 1 for all tokens x: n cᵀ in Θ is a key bias, and n bᵀ in W an output bias.
            normal = self.span.outside / (self.span.outside @ self.span.outside)
            shared = (output_bias + constant) / attention.shape[0]
            attention = attention + normal[None, :, None] * key_bias[:, None, :]
            projection = projection + normal[None, :, None] * shared[None, None, :]
        return AttentionLayer(attention, projection)

    def matrices(self, theta: Array, weights: Array) -> tuple[Any, Any, Any, Any]:
        """Θ (m, d, d), c (m, d), W (m, d, e) and b (e,) of heads and weights, or of their changes.

        All four are linear in both, and zero outside of the span. Without a constant c and b are
        zero. In numpy.
        """
        A, mean = backend.to_numpy(self.whitening), backend.to_numpy(self.origin)
        inside, key_bias = dense.unpack(backend.to_numpy(theta), self.dim)
        values = backend.to_numpy(weights) * self.output_scale
        values, output_bias = dense.unpack_weights(values, len(inside), self.dim)
        if self.offset is not None:
            inside = backend.to_numpy(self._evened()) @ inside
        attention, projection = A @ inside @ A.T, A @ values
        if key_bias is None or output_bias is None:
            return attention, np.zeros(attention.shape[:2]), projection, np.zeros(self.out_dim)
        key_bias = key_bias @ A.T - mean @ attention
        return attention, key_bias, projection, output_bias - (mean @ projection).sum(axis=0)

    def in_whitened_coordinates(self, theta: Array, weights: Array) -> AttentionLayer:
        """Heads and weights as a layer of whitened tokens, without biases."""
        attention, _ = dense.unpack(theta, self.dim)
        projection, _ = dense.unpack_weights(weights, attention.shape[0], self.dim)
        return AttentionLayer(attention, projection)

    def heads_of(self, layer: AttentionLayer) -> Array:
        """The attention matrices (p, m·dim) of a layer in whitened coordinates."""
        attention = backend.to_numpy(layer.attention)
        back = np.linalg.pinv(backend.to_numpy(self.whitening))
        inside = back @ attention @ back.T
        if self.offset is not None:
            inside = backend.to_numpy(self._evened(0.5)) @ inside
        bias = None
        if self.constant:
            bias = backend.to_numpy(self.origin) @ attention
            if layer.key_bias is not None:
                bias = bias + backend.to_numpy(layer.key_bias)
            bias = bias @ back.T
        return backend.like(dense.pack(inside, bias), self.whitening)


def unknowns(dim: int, out_dim: int, heads: int, rank: int | None, bias: bool) -> int:
    """The number of free numbers in a layer, heads being determined up to their order."""
    free = dim * dim if rank is None or rank > dim else rank * (2 * dim - rank)
    return heads * (free + dim * out_dim + dim * int(bias)) + out_dim * int(bias)


def fit(
    inputs: Span,
    outputs: Moments,
    scale: float,
    tokens: int,
    causal: bool,
    bias: bool,
    linear: bool = False,  # subtract nothing: queries, keys and values are the same
) -> Whitening:
    """The whitening of examples, from the span of tokens and moments of outputs over `scale`."""
    constant = not linear and (bias or bool(inputs.outside.any()))
    origin, whitening = _origin_and_matrix(inputs, constant, linear)
    offset = None if constant or not origin.any() else origin @ whitening
    mean, squares = outputs.mean, backend.to_numpy(outputs.scatter) / max(outputs.rows, 1)
    if not constant:
        squares = squares + backend.to_numpy(mean) ** 2
        mean = backend.zeros(mean.shape, mean)
    return Whitening(
        tokens=tokens,
        dim=int(whitening.shape[1]),
        out_dim=int(mean.shape[0]),
        causal=causal,
        bias=bias,
        span=inputs,
        constant=constant,
        origin=backend.like(origin, mean),
        whitening=backend.like(whitening, mean),
        offset=None if offset is None else backend.like(offset, mean),
        output_mean=mean * scale,
        output_scale=(float(squares.mean()) ** 0.5 or 1.0) * scale,
    )


def _origin_and_matrix(inputs: Span, constant: bool, linear: bool) -> tuple[Matrix, Matrix]:
    """What is subtracted from tokens, and the matrix A (d, r) that they are then multiplied by."""
    A = inputs.whitening
    if not inputs.rank:  # nothing varies: one direction is kept, since attention needs one
        A = np.eye(inputs.mean.size, 1)
    mean = inputs.mean @ A
    if not linear and (constant or np.linalg.norm(mean) > _LARGE_MEAN):
        return inputs.mean, A
    whole = inputs.rank == inputs.mean.size
    # With all directions, and columns of similar size, coordinates stay close to those given.
    alike = whole and inputs.deviations[-1] > _ALIKE * inputs.deviations[0]
    if inputs.outside.any() or alike:
        return np.zeros_like(inputs.mean), _second_moments_root(inputs)
    square = float(mean @ mean)
    factor = ((1 + square) ** -0.5 - 1) / (square or 1.0)
    return np.zeros_like(inputs.mean), A + factor * np.outer(A @ mean, mean)


def _second_moments_root(inputs: Span) -> Matrix:
    """(E xᵀx)^(-1/2), symmetric if tokens have all directions, else (d, r)."""
    basis, deviations = inputs.basis, inputs.deviations
    if inputs.outside.any():
        basis = np.column_stack([basis, inputs.outside / np.linalg.norm(inputs.outside)])
        deviations = np.append(deviations, 0.0)
    mean = basis.T @ inputs.mean
    values, vectors = np.linalg.eigh(np.diag(deviations**2) + np.outer(mean, mean))
    vectors = basis @ vectors
    A = vectors / np.sqrt(values)
    return np.asarray(A @ vectors.T if A.shape[0] == A.shape[1] else A)
