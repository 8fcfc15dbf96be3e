"""Weights of multi-head attention as libraries store them, reduced to attention and projections."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onelayer.array.backend import Array


def layer_arrays(
    heads: int, weights: Sequence[Array], biases: Sequence[Array | None]
) -> dict[str, Array]:
    """Arrays of the `AttentionLayer` that equals a multi-head layer, by name.

    `weights` are those of query, key and value (heads · size, dim) and of the output
    (out_dim, heads · size), as y = x Aᵀ + b uses them, heads below each other. `biases` are those
    of query, value and output.

    With head size h, q = x Qᵀ + q_0 and so on, a score is (x_a Qᵀ + q_0)(K x_b + k_0) / √h.
    What does not depend on b is dropped by the softmax, which leaves Θ = Qᵀ K / √h and the key
    bias c = Kᵀ q_0 / √h. Rows of attention sum to 1, so the value bias adds v_0 Oᵀ to all rows.
    """
    query, key, value = (a.reshape(heads, -1, a.shape[1]) for a in weights[:3])
    out = weights[3].reshape(weights[3].shape[0], heads, -1).transpose(1, 2, 0)
    root = np.sqrt(query.shape[1])
    named = {
        "attention": query.transpose(0, 2, 1) @ key / root,
        "projection": value.transpose(0, 2, 1) @ out,
    }
    query_bias, value_bias, out_bias = biases
    if query_bias is not None:
        per_head = query_bias.reshape(heads, -1)
        named["key_bias"] = np.einsum("hs,hsd->hd", per_head, key) / root
    if value_bias is not None:
        named["output_bias"] = np.einsum("hs,hse->e", value_bias.reshape(heads, -1), out)
    if out_bias is not None:
        named["output_bias"] = named.get("output_bias", 0) + out_bias
    return named
