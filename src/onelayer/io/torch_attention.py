"""An attention layer as a torch module. Only importing this file imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.io.safetensors_files import OPTIONAL, REQUIRED


class Attention(torch.nn.Module):  # type: ignore[misc]
    """softmax(X Θ_i Xᵀ + 1 (X c_i)ᵀ) X W_i, summed over the heads i, plus b.

    It is a module of its own and not a `MultiheadAttention`, whose heads have at most
    rank embed_dim / num_heads: a general attention matrix does not fit in there. It is defined at
    the top of a file so that pickle finds its class.
    """

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        super().__init__()
        for name in sorted(REQUIRED | OPTIONAL):
            value = arrays.get(name)
            if value is not None:
                value = torch.nn.Parameter(torch.as_tensor(backend.to_numpy(value).copy()))
            self.register_parameter(name, value)

    def onelayer_arrays(self) -> dict[str, Any]:
        """The parameters by the names that a layer has for them."""
        return dict(self.named_parameters())

    def forward(self, X: Any, mask: Any = None, causal: bool = False) -> Any:
        """The outputs (n, tokens, out_dim) of examples (n, tokens, dim)."""
        tokens = X[:, None]
        scores = tokens @ self.attention @ tokens.mT
        if self.key_bias is not None:
            scores = scores + (X @ self.key_bias.mT).mT[:, :, None, :]
        allowed = torch.ones(X.shape[1], X.shape[1], dtype=torch.bool, device=X.device)
        if causal:
            allowed = allowed.tril()
        if mask is not None:
            allowed = allowed & mask[:, None, None, :]
        # A row with nothing to attend to would be NaN: it attends to nothing.
        weights = torch.softmax(scores.masked_fill(~allowed, -torch.inf), dim=-1)
        weights = torch.where(allowed.any(-1, keepdim=True), weights, 0.0)
        outputs = (weights @ tokens @ self.projection).sum(1)
        return outputs if self.output_bias is None else outputs + self.output_bias
