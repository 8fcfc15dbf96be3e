"""Attention layers from torch modules, and as torch modules."""

from __future__ import annotations

from typing import Any

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.io.multi_head import layer_arrays


def from_torch(module: Any) -> dict[str, Array]:
    """The arrays of a `torch.nn.MultiheadAttention`, or of a module that `to_torch` made."""
    own = getattr(module, "onelayer_arrays", None)
    if own is not None:
        return {name: _weight(array, name) for name, array in own().items()}
    check_multihead(module)
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


def check_multihead(module: Any) -> None:
    """Refuse what is not attention of tokens to themselves and to nothing else."""
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


def to_torch(arrays: dict[str, Array]) -> Any:
    """A `torch.nn.Module` that computes the layer, its arrays as trainable parameters."""
    try:
        from onelayer.io.torch_attention import Attention
    except ImportError as error:
        raise ImportError(
            "to_torch needs torch, which is not installed: pip install torch"
        ) from error
    return Attention(arrays)
