"""Weights of multi-head attention as libraries store them, reduced to attention and projections."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onelayer.array.backend import Array


@dataclass(frozen=True, eq=False)
class MultiHeadWeights:
    """Weights of a multi-head layer, as y = x Aᵀ + b uses them, heads below each other.

    `query`, `key` and `value` have shape (heads · size, dim), `out` (out_dim, heads · size).
    """

    heads: int
    query: Array
    key: Array
    value: Array
    out: Array
    query_bias: Array | None = None
    value_bias: Array | None = None
    out_bias: Array | None = None

    def to_layer(self) -> dict[str, Array]:
        """Arrays of the equivalent `AttentionLayer`, by name.

        With head size h, q = x Qᵀ + q_0 and so on, a score is (x_a Qᵀ + q_0)(K x_b + k_0) / √h.
        What does not depend on b is dropped by the softmax, which leaves Θ = Qᵀ K / √h and the key
        bias c = Kᵀ q_0 / √h. Rows of attention sum to 1, so the value bias adds v_0 Oᵀ to all rows.
        """
        query, key, value = (
            a.reshape(self.heads, -1, a.shape[1]) for a in (self.query, self.key, self.value)
        )
        out = self.out.reshape(self.out.shape[0], self.heads, -1).transpose(1, 2, 0)
        root = np.sqrt(query.shape[1])
        named = {
            "attention": query.transpose(0, 2, 1) @ key / root,
            "projection": value.transpose(0, 2, 1) @ out,
        }
        if self.query_bias is not None:
            query_bias = self.query_bias.reshape(self.heads, -1)
            named["key_bias"] = np.einsum("hs,hsd->hd", query_bias, key) / root
        if self.value_bias is not None:
            value_bias = self.value_bias.reshape(self.heads, -1)
            named["output_bias"] = np.einsum("hs,hse->e", value_bias, out)
        if self.out_bias is not None:
            named["output_bias"] = named.get("output_bias", 0) + self.out_bias
        return named
