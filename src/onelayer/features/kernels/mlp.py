"""The kernel of infinitely many random neurons that read all tokens of an example in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from onelayer.array import backend, blocks
from onelayer.array.backend import Array
from onelayer.data.sets import Sets
from onelayer.features.activations import Activation, Preactivations
from onelayer.features.kernels import base
from onelayer.features.mlp_features import flattened


@dataclass(frozen=True)
class MLPKernel:
    """K(x, x') = E[σ(<w, x>) σ(<w, x'>)], w ~ N(0, I / (tokens + 1)), for flattened examples."""

    tokens: int  # of an example after padding
    activation: Activation

    def like(self, reference: Array) -> Self:  # noqa: ARG002 - there are no arrays to convert
        return self

    def pairs(self, sets: Sets, others: Sets) -> int:  # noqa: ARG002 - one pair for any examples
        return 1

    def prepare(self, tokens: Array, mask: Array | None) -> Array:
        return flattened(tokens, mask, self.tokens)

    def block(self, rows: Array, columns: Array) -> Array:
        """The kernel between rows (n, P) and columns (n', P), none of them zero."""
        moments, std = self.activation.closed_form(), float((self.tokens + 1) ** -0.5)
        norms, other_norms = base.norms(rows), base.norms(columns)
        kernel = (rows / norms[:, None]) @ backend.transpose(columns / other_norms[:, None])
        width = max(1, kernel.shape[1])
        height = max(1, base.block_pairs(self.activation, kernel) // width)
        work = backend.empty((self.activation.work, min(height, kernel.shape[0]), width), kernel)
        across = Preactivations(std * other_norms, None)
        for part in blocks.slices(kernel.shape[0], 1, height):
            down = Preactivations(std * norms[part, None], None)
            moments(down, across, kernel[part, :], work[:, : part.stop - part.start, :])
        if self.activation.homogeneous:
            kernel *= std**2 * norms[:, None]
            kernel *= other_norms
        return kernel
