"""Attention layers from torch modules, and as torch modules."""

from __future__ import annotations

from typing import Any

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.io.multi_head import layer_arrays
from onelayer.io.safetensors_files import OPTIONAL, REQUIRED


def from_torch(module: Any) -> dict[str, Array]:
    """The arrays of a `torch.nn.MultiheadAttention`, or of a module that `to_torch` made."""
    own = getattr(module, "onelayer_arrays", None)
    if own is not None:
        return {name: _weight(array, name) for name, array in own().items()}
    _check_module(module)
    if module.in_proj_weight is not None:
        weights = np.split(_weight(module.in_proj_weight, "in_proj_weight"), 3)
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        weights = [_weight(getattr(module, name), name) for name in names]
    weights.append(_weight(module.out_proj.weight, "out_proj.weight"))
    query_bias = value_bias = None
    if module.in_proj_bias is not None:
        query_bias, _, value_bias = np.split(_weight(module.in_proj_bias, "in_proj_bias"), 3)
    bias = module.out_proj.bias
    out_bias = None if bias is None else _weight(bias, "out_proj.bias")
    return layer_arrays(module.num_heads, weights, (query_bias, value_bias, out_bias))


def _check_module(module: Any) -> None:
    needed = ("num_heads", "embed_dim", "kdim", "vdim", "out_proj", "in_proj_weight", "bias_k")
    if not all(hasattr(module, name) for name in needed):
        raise TypeError(
            f"module is a {type(module).__name__}, expected a torch.nn.MultiheadAttention "
            "or a module that to_torch made"
        )
    dims = (module.embed_dim, module.kdim, module.vdim)
    if len(set(dims)) != 1:
        raise ValueError(
            f"module has embed_dim, kdim, vdim = {dims}, expected all equal: "
            "queries, keys and values are the same tokens here"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            "module adds keys of its own (add_bias_kv or add_zero_attn), expected neither"
        )


def _weight(tensor: Any, name: str) -> np.ndarray[Any, Any]:
    """A parameter copied to numpy; half precisions become float64, for the sums ahead."""
    return backend.to_numpy(backend.as_real(tensor, name)).copy()


def to_torch(named: dict[str, Array]) -> Any:
    """A `torch.nn.Module` that computes the layer, its arrays as trainable parameters.

    It is a module of its own and not a `MultiheadAttention`, whose heads have at most
    rank embed_dim / num_heads: a general attention matrix does not fit in there.
    """
    try:
        import torch
    except ImportError as error:
        raise ImportError("to_torch needs torch: pip install onelayer[torch]") from error

    class Attention(torch.nn.Module):  # type: ignore[misc]
        """softmax(X Θ_i Xᵀ + 1 (X c_i)ᵀ) X W_i, summed over the heads i, plus b."""

        def __init__(self) -> None:
            super().__init__()
            for name in sorted(REQUIRED | OPTIONAL):
                value = named.get(name)
                if value is not None:
                    value = torch.nn.Parameter(torch.as_tensor(backend.to_numpy(value).copy()))
                self.register_parameter(name, value)

        def onelayer_arrays(self) -> dict[str, Any]:
            return dict(self.named_parameters())

        def forward(self, X: Any, mask: Any = None, causal: bool = False) -> Any:
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

    return Attention()
