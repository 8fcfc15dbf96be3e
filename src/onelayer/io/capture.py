"""Inputs and outputs of an attention module of a torch model, recorded while the model runs.

What is wanted is the attention layer alone: tokens in, and what leaves the output projection.
`torch.nn.MultiheadAttention` returns just that. Other modules go on after the output projection,
with dropout, a residual connection and a norm, so their outputs are taken from the projection.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from onelayer import spelling
from onelayer.array import backend, checks
from onelayer.array.backend import NumpyArray
from onelayer.io import torch_modules
from onelayer.io.pieces import Examples, InFolder, PiecesInMemory

# Query, key and output projections by their names inside an attention module. None where one
# projection makes queries, keys and values.
_PROJECTIONS: tuple[tuple[str, str | None, str], ...] = (
    ("self.query", "self.key", "output.dense"),  # BERT, RoBERTa, ELECTRA
    ("q_proj", "k_proj", "o_proj"),  # Llama, Mistral, Qwen2, ViT
    ("q_proj", "k_proj", "out_proj"),  # BART, CLIP, OPT
    ("q_lin", "k_lin", "out_lin"),  # DistilBERT
    ("c_attn", None, "c_proj"),  # GPT-2
    ("qkv_proj", None, "o_proj"),  # Phi-3
    ("query_key_value", None, "dense"),  # GPT-NeoX
)
_CROSS_ATTENTION = "q_attn"  # GPT-2 has such queries beside keys and values of other tokens

_KINDS = (
    "torch.nn.MultiheadAttention, a module that to_torch made, or an attention module as in BERT, "
    "GPT-2 or Llama"
)
_NAMED = 3  # names of attention modules in an error message

Tensor: TypeAlias = Any  # torch is optional


def capture(
    model: Any,
    name: str,
    batches: Iterable[Any],
    *,
    to: str | os.PathLike[str] | None = None,
    limit: int | None = None,
) -> Examples:
    """Record the inputs and outputs of one attention module while a torch model runs.

    Outputs are taken after the output projection, before dropout, residual connection and norm.
    The model runs in evaluation mode and without gradients, and is left as it was.

    Parameters
    ----------
    model : torch.nn.Module
        A model with self-attention: `torch.nn.MultiheadAttention`, modules that
        `AttentionLayer.to_torch` made, or the attention modules of the package transformers for
        BERT, GPT-2, Llama and models that name their projections as these do.
    name : str
        Name of the attention module, as in `model.named_modules()`.
    batches : iterable
        What the model is called with, batch by batch: a tensor, a tuple of positional arguments,
        or a mapping of keyword arguments.
    to : path, optional
        New or empty folder to which the examples are written, as X.npy, Y.npy and, if there is
        padding, mask.npy. Only one batch is in memory at a time, and the folder appears when all
        examples are in it.
    limit : int, optional
        Number of examples after which to stop.

    Returns
    -------
    X : array (n, tokens, dim)
        Inputs of the module. Examples are padded with zeros to the longest. Half precision is
        returned as float32. With `to`, the arrays are files mapped into memory.
    Y : array (n, tokens, out_dim)
        Outputs of the output projection.
    mask : array (n, tokens) or None
        True for tokens, False for padding; None if there is none.

    Raises
    ------
    ImportError
        If torch is not installed.
    TypeError, ValueError
        If an argument is not valid, the module is no self-attention, or a batch does not run it
        exactly once.

    See Also
    --------
    recover : Find the layer behind the examples.

    Notes
    -----
    Which tokens a token attends to is not recorded, apart from padding: for a causal model, call
    `recover` with ``causal=True``.

    Examples
    --------
    >>> import onelayer as ol
    >>> import torch
    >>> torch_layer = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True)
    >>> model = torch.nn.TransformerEncoder(torch_layer, 3)
    >>> batches = (torch.randn(16, 5, 8) for _ in range(4))
    >>> X, Y, mask = ol.capture(model, "layers.1.self_attn", batches)
    >>> X.shape, Y.shape, mask
    ((64, 5, 8), (64, 5, 8), None)
    """
    torch = _torch()
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
    if limit is not None:
        limit = checks.positive_int(limit, "limit")
    recorder = _recorder(model, name)
    _check_batches(batches)
    with nullcontext(PiecesInMemory()) if to is None else InFolder(to) as pieces:
        with _evaluation(model), recorder.attached():
            for batch in batches:
                _run(model, batch)
                tokens, outputs, mask = recorder.take()
                part = slice(None if limit is None else limit - pieces.examples)
                pieces.append(tokens[part], outputs[part], None if mask is None else mask[part])
                if pieces.examples == limit:
                    break
        if not pieces.examples:
            raise ValueError("batches is empty, expected at least one batch of examples")
        return pieces.joined()


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise ImportError("capture needs torch, which is not installed: pip install torch") from (
            error
        )
    return torch


@contextmanager
def _evaluation(model: Any) -> Iterator[None]:
    """Evaluation mode, without gradients and without the fast path, which runs no hooks."""
    torch = _torch()
    training = [module for module in model.modules() if module.training]
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        model.eval()
        with torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module in training:
            module.training = True


def _check_batches(batches: Any) -> None:
    """Refuse a single batch, whose rows or keys would be taken for batches."""
    if isinstance(batches, Mapping | str) or hasattr(batches, "shape"):
        raise TypeError(
            f"batches is a {type(batches).__name__}, expected an iterable of batches: "
            "for a single batch, a list of it"
        )
    if not isinstance(batches, Iterable):
        raise TypeError(f"batches is a {type(batches).__name__}, expected an iterable of batches")


def _run(model: Any, batch: Any) -> None:
    if isinstance(batch, Mapping):
        if batch.get("past_key_values") is not None:
            raise ValueError(
                "a batch has past_key_values, expected whole sequences: "
                "the keys of earlier calls are not among the inputs of the module"
            )
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


@dataclass
class _Recorder:
    """Records the calls of a module during one batch: tokens, outputs and which tokens are there.

    Methods whose name starts with "on" are hooks.
    """

    module: Any
    name: str
    calls: int = 0
    tokens: Tensor = None
    outputs: Tensor = None
    mask: Tensor = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        handles: list[Any] = []
        try:
            handles.extend(self.hooks())
            yield
        finally:
            for handle in handles:
                handle.remove()

    def hooks(self) -> Iterator[Any]:
        """Register the hooks, one by one."""
        yield self.module.register_forward_pre_hook(self.on_call, with_kwargs=True)

    def on_call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls += 1
        arguments = _arguments(module.forward, args, kwargs)
        self.tokens, self.mask = self.inputs(arguments, next(iter(arguments.values())))

    def inputs(self, arguments: dict[str, Any], first: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (n, k, d) and the mask (n, k) or None, from the arguments of a call."""
        raise NotImplementedError

    def take(self) -> tuple[NumpyArray, NumpyArray, NumpyArray | None]:
        """What the batch has recorded, after which the next batch may come."""
        if self.calls != 1:
            times = f"{self.calls} times" if self.calls else "never"
            raise ValueError(
                f"the model called {self.name!r} {times} in one batch, expected one call: "
                "examples of one layer, each of them once"
            )
        if self.outputs is None:
            raise ValueError(f"the output projection of {self.name!r} was not called")
        found = self.tokens, self.outputs, self.mask
        self.calls, self.tokens, self.outputs, self.mask = 0, None, None, None
        return found

    def keep_tokens(self, tokens: Tensor) -> NumpyArray:
        """A copy of the tokens, since the model may change them in place."""
        if getattr(tokens, "ndim", None) != 3:
            shape = tuple(getattr(tokens, "shape", ()))
            raise ValueError(
                f"{self.name!r} was called with tokens of shape {shape}, "
                "expected (examples, tokens, dim)"
            )
        return _numpy(tokens)

    def refuse_other_keys(self, tokens: Tensor, keys: Tensor, what: str) -> None:
        if not _same(tokens, keys):
            raise ValueError(
                f"{self.name!r} was called with {what} that differ from the queries, expected "
                "self-attention: queries, keys and values of the same tokens"
            )


class _WholeModule(_Recorder):
    """A module whose output is that of the output projection: MultiheadAttention, or our own."""

    def hooks(self) -> Iterator[Any]:
        yield from super().hooks()
        yield self.module.register_forward_hook(self.on_output)

    def on_output(self, _module: Any, _args: Any, outputs: Any) -> None:
        outputs = outputs[0] if isinstance(outputs, tuple) else outputs
        self.outputs = _numpy(self.batch_first(outputs))

    def batch_first(self, tensor: Tensor) -> Tensor:
        if not hasattr(self.module, "batch_first"):
            return tensor
        if tensor.ndim == 2:  # a single example
            return tensor[None]
        return tensor if self.module.batch_first else tensor.swapaxes(0, 1)

    def inputs(self, arguments: dict[str, Any], first: Tensor) -> tuple[Tensor, Tensor]:
        for other in ("key", "value"):
            if other in arguments:
                self.refuse_other_keys(first, arguments[other], f"{other}s")
        tokens = self.batch_first(first)
        mask = arguments.get("mask")  # that of our own modules
        padding = arguments.get("key_padding_mask")
        if padding is not None:
            mask = self.no_padding(padding).reshape(tokens.shape[:2])
        return self.keep_tokens(tokens), None if mask is None else backend.to_numpy(mask) != 0

    def no_padding(self, padding: Tensor) -> Tensor:
        """Where a key_padding_mask has tokens: False, or 0 where it is added to the scores."""
        there = padding == 0
        if padding.is_floating_point() and not bool((there | (padding == -float("inf"))).all()):
            raise ValueError(
                f"{self.name!r} was called with a key_padding_mask that has entries other than 0 "
                "and -inf, expected tokens or padding"
            )
        return there


@dataclass
class _Projected(_Recorder):
    """A module with an output projection inside, as in the package transformers."""

    key: Any = None
    output: Any = None
    first: Tensor = field(default=None, repr=False)

    def hooks(self) -> Iterator[Any]:
        yield from super().hooks()
        yield self.output.register_forward_hook(self.on_output)
        if self.key is not None:
            yield self.key.register_forward_pre_hook(self.on_keys)

    def on_keys(self, _module: Any, args: tuple[Any, ...]) -> None:
        self.refuse_other_keys(self.first, args[0], "keys")

    def on_output(self, _module: Any, _args: Any, outputs: Tensor) -> None:
        self.outputs, self.first = _numpy(outputs), None

    def inputs(self, arguments: dict[str, Any], first: Tensor) -> tuple[Tensor, Tensor]:
        self.first, tokens = first, self.keep_tokens(first)
        for other in ("encoder_hidden_states", "key_value_states"):
            if arguments.get(other) is not None:
                self.refuse_other_keys(first, arguments[other], other)
        mask = arguments.get("attention_mask")
        return tokens, None if mask is None else self.there(mask, *tokens.shape[:2])

    def there(self, mask: Any, n: int, tokens: int) -> NumpyArray:
        """Tokens that are there, by a mask (n, tokens), or one over pairs of tokens."""
        shape = tuple(getattr(mask, "shape", ()))
        if shape == (n, tokens):
            return np.not_equal(_numpy(mask), 0)
        if len(shape) != 4 or shape[2:] != (tokens, tokens):
            raise ValueError(
                f"{self.name!r} was called with an attention_mask of type {type(mask).__name__} "
                f"and shape {shape}, expected a tensor {(n, tokens)} or "
                f"{(n, 1, tokens, tokens)}: load the model with attn_implementation='sdpa'"
            )
        if mask.is_floating_point():  # added to scores: the most negative number for padding
            mask = mask > _torch().finfo(mask.dtype).min / 2
        allowed = (_numpy(mask[:, :1]) != 0).any(1)
        # A token that is there attends to itself. Rows of padding that would attend to nothing are
        # opened to all keys by some implementations, which no row of a masked example is, apart
        # from the last row of a causal mask.
        opened = allowed.all(2) & ~allowed.all((1, 2))[:, None]
        opened[:, -1] = False
        found = allowed.diagonal(axis1=1, axis2=2) & ~opened
        return np.broadcast_to(found, (n, tokens))


def _recorder(model: Any, name: str) -> _Recorder:
    """The recorder for the module of this name, if it is an attention module."""
    modules = dict(model.named_modules())
    if name not in modules:
        hint = spelling.did_you_mean(name, modules)
        raise ValueError(
            f"name is {name!r}, expected the name of a module of the model{_such_as(modules)}{hint}"
        )
    module = modules[name]
    if _returns_projection(module):
        if not hasattr(module, "onelayer_arrays"):
            torch_modules.check_multihead(module)
        return _WholeModule(module, name)
    if (found := _projections(module)) is not None:
        key, output = found
        return _Projected(module, name, key=key, output=output)
    inside = {one: part for one, part in modules.items() if one.startswith(f"{name}.")}
    outside = {one: part for one, part in modules.items() if name.startswith(f"{one}.")}
    near = _such_as(inside) or _such_as(outside) or _such_as(modules)
    raise ValueError(f"{name!r} is a {type(module).__name__}, expected {_KINDS}{near}")


def _such_as(modules: Mapping[str, Any]) -> str:
    """End an error message with the names of some attention modules, if there are any."""
    names = [name for name, module in modules.items() if _is_attention(module)]
    if not names:
        return ""
    more = ", ..." if len(names) > _NAMED else ""
    return f", such as {', '.join(map(repr, names[:_NAMED]))}{more}"


def _is_attention(module: Any) -> bool:
    return _returns_projection(module) or _projections(module) is not None


def _returns_projection(module: Any) -> bool:
    ours = hasattr(module, "onelayer_arrays")
    return ours or isinstance(module, _torch().nn.MultiheadAttention)


def _projections(module: Any) -> tuple[Any, Any] | None:
    """The key projection or None, and the output projection of an attention module."""
    if _part(module, _CROSS_ATTENTION) is not None:
        return None
    for query, key, output in _PROJECTIONS:
        parts = [_part(module, name) for name in (query, key, output) if name is not None]
        if all(part is not None for part in parts):
            return (parts[1] if key is not None else None), parts[-1]
    return None


def _part(module: Any, name: str) -> Any:
    """The submodule of this name, None if there is none."""
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def _arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names, in the order of the function's parameters."""
    signature = inspect.signature(function)
    found: dict[str, Any] = {}
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        further = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        found.update(value if further else {name: value})
    return found


def _same(first: Tensor, other: Tensor) -> bool:
    return first is other or (first.shape == other.shape and _torch().equal(first, other))


def _numpy(tensor: Tensor) -> NumpyArray:
    """A copy of a tensor in numpy, half precision in float32, which holds it exactly."""
    tensor = tensor.detach()
    if tensor.is_floating_point() and tensor.itemsize < 4:
        tensor = tensor.float()
    return np.array(tensor.cpu().numpy())
