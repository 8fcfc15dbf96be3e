"""Layers in and out: safetensors files and torch modules.

Files that travel are safetensors, never pickle: reading one cannot run code. A layer's file holds
the arrays `attention`, `projection` and, where there are any, `key_bias` and `output_bias`.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from onelayer.array import backend
from onelayer.array.backend import Array

_REQUIRED = {"attention", "projection"}
_OPTIONAL = {"key_bias", "output_bias"}


def save(named: dict[str, Array], path: str | os.PathLike[str]) -> None:
    """Write arrays to a safetensors file, in one move once all bytes are on disk."""
    tensors = {name: np.ascontiguousarray(backend.to_numpy(a)) for name, a in named.items()}
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
        raise _foreign_dtype(path, str(error)) from error
    except (safetensors.SafetensorError, ValueError, TypeError) as error:
        raise _not_whole(path, error) from error


@contextmanager
def opened_safetensors(path: str | os.PathLike[str]) -> Iterator[Any]:
    """A safetensors file from which arrays are read one by one; a damaged one is refused."""
    Path(path).open("rb").close()  # what is no file at all is refused in the words of the system
    try:
        with safetensors.safe_open(path, framework="np") as file:
            yield file
    except safetensors.SafetensorError as error:
        raise _not_whole(path, error) from error


def read_one(file: Any, name: str, path: str | os.PathLike[str]) -> Array:
    """An array of an opened file."""
    try:
        return file.get_tensor(name)
    except TypeError as error:
        raise _foreign_dtype(path, repr(file.get_slice(name).get_dtype())) from error


def _not_whole(path: str | os.PathLike[str], error: Exception) -> ValueError:
    return ValueError(
        f"{os.fspath(path)} is not a whole safetensors file (damaged, cut short or of another "
        f"format): {error}"
    )


def _foreign_dtype(path: str | os.PathLike[str], name: str) -> ValueError:
    return ValueError(
        f"{os.fspath(path)} holds arrays of dtype {name}, expected one that numpy has"
    )


@dataclass(frozen=True, eq=False)
class MultiHead:
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

    def reduced(self) -> dict[str, Array]:
        """The arrays of the layer that it is.

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


def from_torch(module: Any) -> dict[str, Array]:
    """The arrays of a `torch.nn.MultiheadAttention`, or of a module that `to_torch` made."""
    own = getattr(module, "onelayer_arrays", None)
    if own is not None:
        return {name: _weight(array, name) for name, array in own().items()}
    query, key, value, query_bias, value_bias = _input_projections(module)
    out = _weight(module.out_proj.weight, "out_proj.weight")
    bias = module.out_proj.bias
    out_bias = None if bias is None else _weight(bias, "out_proj.bias")
    heads = module.num_heads
    return MultiHead(heads, query, key, value, out, query_bias, value_bias, out_bias).reduced()


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
            for name in sorted(_REQUIRED | _OPTIONAL):
                parameter = None
                if name in named:
                    tensor = torch.as_tensor(backend.to_numpy(named[name]).copy())
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
