"""Layers in and out: safetensors files and torch modules.

Files that travel are safetensors, never pickle: reading one cannot run code. A layer's file holds
the arrays `attention`, `projection` and, where there are any, `key_bias` and `output_bias`.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from onelayer import arrays
from onelayer.arrays import Array

_REQUIRED = {"attention", "projection"}
_OPTIONAL = {"key_bias", "output_bias"}


def save(named: dict[str, Array], path: str | os.PathLike[str]) -> None:
    """Write arrays to a safetensors file, in one move once all bytes are on disk."""
    tensors = {name: np.ascontiguousarray(arrays.to_numpy(a)) for name, a in named.items()}
    data = safetensors.numpy.save(tensors, metadata={"format": "onelayer.AttentionLayer"})
    write_whole(Path(path), data)


def write_whole(path: Path, data: bytes) -> None:
    """Write beside the target and rename: a full disk or Ctrl-C never leaves half a file."""
    temporary = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def load(path: str | os.PathLike[str]) -> dict[str, Array]:
    """The arrays of a layer file."""
    tensors = read_safetensors(path)
    missing = sorted(_REQUIRED - tensors.keys())
    foreign = sorted(tensors.keys() - _REQUIRED - _OPTIONAL)
    if missing or foreign:
        raise ValueError(
            f"{os.fspath(path)} is no onelayer file: it holds {sorted(tensors)}, expected "
            "'attention' and 'projection', and 'key_bias' and 'output_bias' at the most"
        )
    return tensors


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Array]:
    """All arrays of a safetensors file; a damaged file is refused with one ValueError."""
    data = Path(path).read_bytes()
    try:
        return dict(safetensors.numpy.load(data))
    except KeyError as error:  # the name of a dtype
        raise ValueError(
            f"{os.fspath(path)} holds arrays of dtype {error}, expected one that numpy has"
        ) from error
    except (safetensors.SafetensorError, ValueError, TypeError) as error:
        raise ValueError(
            f"{os.fspath(path)} is not a whole safetensors file (damaged, cut short or of another "
            f"format): {error}"
        ) from error


def from_torch(module: Any) -> dict[str, Array]:
    """The arrays of a `torch.nn.MultiheadAttention`, or of a module that `to_torch` made.

    With head size h, q = x Qᵀ + q_0 and so on, a head's score is (x_a Qᵀ + q_0)(K x_b + k_0)/√h.
    What does not depend on b is dropped by the softmax, which leaves Θ = Qᵀ K / √h and the key
    bias c = Kᵀ q_0 / √h. Rows of attention sum to 1, so the value bias adds v_0 Oᵀ to the output.
    """
    own = getattr(module, "onelayer_arrays", None)
    if own is not None:
        return {name: _weight(array, name) for name, array in own().items()}
    query, key, value, query_bias, value_bias = _input_projections(module)
    heads, dim = module.num_heads, module.embed_dim
    size = dim // heads
    query, key, value = (a.reshape(heads, size, dim) for a in (query, key, value))
    out = _weight(module.out_proj.weight, "out_proj.weight").reshape(dim, heads, size)
    root = np.sqrt(size)
    named = {
        "attention": np.einsum("hsd,hse->hde", query, key) / root,
        "projection": np.einsum("hsd,ehs->hde", value, out),
    }
    if query_bias is not None and value_bias is not None:
        named["key_bias"] = np.einsum("hs,hsd->hd", query_bias.reshape(heads, size), key) / root
        named["output_bias"] = np.einsum("hs,ehs->e", value_bias.reshape(heads, size), out)
    if module.out_proj.bias is not None:
        output_bias = _weight(module.out_proj.bias, "out_proj.bias")
        named["output_bias"] = named.get("output_bias", 0) + output_bias
    return named


def _input_projections(module: Any) -> tuple[Any, ...]:
    """Query, key and value weights, query and value bias, of a packed or a separate module."""
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
    if module.in_proj_weight is not None:
        weights = np.split(_weight(module.in_proj_weight, "in_proj_weight"), 3)
    else:
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        weights = [_weight(getattr(module, name), name) for name in names]
    if module.in_proj_bias is None:
        return (*weights, None, None)
    query_bias, _, value_bias = np.split(_weight(module.in_proj_bias, "in_proj_bias"), 3)
    return (*weights, query_bias, value_bias)


def _weight(tensor: Any, name: str) -> np.ndarray[Any, Any]:
    """A parameter copied to numpy; half precisions become float64, for the sums ahead."""
    return arrays.to_numpy(arrays.as_real(tensor, name)).copy()


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
            for name in sorted(_REQUIRED | _OPTIONAL):
                parameter = None
                if name in named:
                    tensor = torch.as_tensor(arrays.to_numpy(named[name]).copy())
                    parameter = torch.nn.Parameter(tensor)
                self.register_parameter(name, parameter)

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
