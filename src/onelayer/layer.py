"""AttentionLayer: the softmax multi-head attention layer that both halves of the package share."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from scipy.optimize import linear_sum_assignment

from onelayer import layer_plot
from onelayer.array import backend, blocks, checks
from onelayer.array.backend import Array, NumpyArray
from onelayer.data import sources
from onelayer.data.chunks import Chunk
from onelayer.heads import dense
from onelayer.heads.base import Tokens
from onelayer.heads.softmax import allowed_pairs
from onelayer.inputs import Seed
from onelayer.io import pretrained, safetensors_files, torch_modules
from onelayer.plotting import Grid
from onelayer.span import Span, span_of
from onelayer.summary import Summary, number


@dataclass(frozen=True, eq=False)
class HeadMatch:
    """Distance between two layers, head by head, under the best matching of heads.

    Attributes
    ----------
    permutation : ndarray of shape (m,)
        The head that was matched with head i of the other layer, or -1 if none was left.
    attention, projection : ndarray of shape (m,)
        Relative Frobenius errors, infinite for unmatched heads. The key bias counts as a row of
        the attention matrix.
    output_bias : float
        Relative error of the output bias.

    Examples
    --------
    >>> layer = AttentionLayer.random(heads=2, dim=4)
    >>> match = layer.distance(layer)
    >>> match.permutation, match.attention
    (array([0, 1]), array([0., 0.]))
    """

    permutation: NumpyArray
    attention: NumpyArray
    projection: NumpyArray
    output_bias: float


class AttentionLayer:
    """Softmax multi-head attention, F(X) = Σ_i softmax(X Θ_i Xᵀ + 1 (X c_i)ᵀ) X W_i + b.

    Rows of X are tokens. Every multi-head layer with query, key, value and output biases has this
    form: what is constant along a row of scores does not change a softmax, and the value bias
    passes through to the output.

    Parameters
    ----------
    attention : array of shape (m, d, d)
        The attention matrices Θ_i.
    projection : array of shape (m, d, e)
        The projections W_i.
    key_bias : array of shape (m, d), optional
        The key biases c_i.
    output_bias : array of shape (e,), optional
        The output bias b.

    Raises
    ------
    TypeError, ValueError
        If arrays are not real and finite, or their shapes do not fit together.

    Examples
    --------
    >>> layer = AttentionLayer.random(heads=2, dim=4, seed=0)
    >>> layer(np.ones((5, 3, 4))).shape
    (5, 3, 4)
    """

    def __init__(
        self, attention: Any, projection: Any, key_bias: Any = None, output_bias: Any = None
    ) -> None:
        self.attention: Array = backend.as_real(attention, "attention")
        self.projection: Array = backend.as_real(projection, "projection")
        self.key_bias: Array | None = _real_or_none(key_bias, "key_bias")
        self.output_bias: Array | None = _real_or_none(output_bias, "output_bias")
        shape = tuple(self.attention.shape)
        if len(shape) != 3 or shape[1] != shape[2] or 0 in shape:
            raise ValueError(f"attention has shape {shape}, expected (heads, dim, dim)")
        heads, dim, _ = shape
        shape = tuple(self.projection.shape)
        if len(shape) != 3 or shape[:2] != (heads, dim) or 0 in shape:
            raise ValueError(f"projection has shape {shape}, expected ({heads}, {dim}, out_dim)")
        expected = {"key_bias": (heads, dim), "output_bias": (shape[2],)}
        for name, array in self.arrays().items():
            if name in expected and tuple(array.shape) != expected[name]:
                raise ValueError(
                    f"{name} has shape {tuple(array.shape)}, expected {expected[name]}"
                )

    @classmethod
    def random(
        cls,
        heads: int,
        dim: int,
        scale: float = 2.0,
        rank: int | None = None,
        out_dim: int | None = None,
        seed: Seed = 0,
        bias: bool = False,
    ) -> AttentionLayer:
        """Draw a layer with Gaussian attention matrices of Frobenius norm `scale`.

        Entries of the projections have variance 1/dim.

        Parameters
        ----------
        heads, dim : int
            Number of heads m and dimension d of a token.
        scale : float
            Norm of each attention matrix. On Boolean and Gaussian inputs it is the standard
            deviation of a score.
        rank : int, optional
            Rank of the attention matrices, each a product of two (dim, rank) factors. Full if None.
        out_dim : int, optional
            Dimension of an output row, `dim` if None.
        seed : int or numpy.random.Generator
            The same seed gives the same layer.
        bias : bool
            Whether to add a key bias of norm `scale`/√dim and a standard normal output bias.

        Returns
        -------
        AttentionLayer
            A layer in float64.

        Raises
        ------
        TypeError, ValueError
            If a number is not valid.

        Examples
        --------
        >>> AttentionLayer.random(heads=3, dim=8, rank=2).attention.shape
        (3, 8, 8)
        """
        heads, dim = checks.positive_int(heads, "heads"), checks.positive_int(dim, "dim")
        scale = checks.positive_number(scale, "scale")
        out_dim = dim if out_dim is None else checks.positive_int(out_dim, "out_dim")
        rng = np.random.default_rng(seed)
        if rank is None:
            theta = rng.standard_normal((heads, dim, dim))
        else:
            factors = rng.standard_normal((2, heads, dim, checks.positive_int(rank, "rank")))
            theta = factors[0] @ np.swapaxes(factors[1], 1, 2)
        theta *= scale / np.linalg.norm(theta, axis=(1, 2), keepdims=True)
        projection = rng.standard_normal((heads, dim, out_dim)) / np.sqrt(dim)
        if not bias:
            return cls(theta, projection)
        key_bias = rng.standard_normal((heads, dim)) * (scale / dim)
        return cls(theta, projection, key_bias, rng.standard_normal(out_dim))

    @property
    def heads(self) -> int:
        """The number of heads m."""
        return int(self.attention.shape[0])

    @property
    def dim(self) -> int:
        """The dimension d of a token."""
        return int(self.attention.shape[1])

    @property
    def out_dim(self) -> int:
        """The dimension e of an output row."""
        return int(self.projection.shape[2])

    def __repr__(self) -> str:
        bias = self.key_bias is not None or self.output_bias is not None
        return (
            f"AttentionLayer(heads={self.heads}, dim={self.dim}, out_dim={self.out_dim}"
            f"{', with biases' if bias else ''})"
        )

    def _repr_html_(self) -> str:
        sizes = [
            [float(np.linalg.norm(head)) for head in backend.to_numpy(array).astype(float)]
            for array in (self.attention, self.projection)
        ]
        rows = [(str(i), *map(number, both)) for i, both in enumerate(zip(*sizes, strict=True))]
        biases = [name.replace("_", " ") for name in self.arrays() if name.endswith("bias")]
        shape = f"{self.heads} heads, tokens of dimension {self.dim}, outputs of {self.out_dim}"
        facts = {"shape": shape, "biases": ", ".join(biases) or "none"}
        facts["numbers"] = str(self.attention.dtype)
        headings = ("head", "norm of Θ", "norm of W")
        return Summary("AttentionLayer", facts, headings, rows).html()

    def __call__(self, X: Any, mask: Any = None, causal: bool = False) -> Array:
        """Compute the outputs of examples.

        Parameters
        ----------
        X : array of shape (n, tokens, dim), Dask array or function
            X may be larger than memory: a Dask array, a memory-mapped file, or a function that
            returns an iterator over blocks of examples.
        mask : array of shape (n, tokens), optional
            True for the tokens that may be attended to.
        causal : bool
            Whether a token attends only to itself and the tokens before it.

        Returns
        -------
        array of shape (n, tokens, out_dim)
            In the namespace, on the device and with the dtype of X. A row that may attend to
            nothing is the output bias alone. A Dask array for a Dask array, computed lazily; a
            function over blocks for a function.

        Raises
        ------
        TypeError, ValueError
            If X or the mask has another shape, or entries that are not real and finite.

        Examples
        --------
        >>> layer = AttentionLayer.random(heads=2, dim=4)
        >>> layer(np.ones((1, 2, 4)), mask=[[True, False]]).shape
        (1, 2, 4)
        >>> outputs = layer(lambda: (np.full((5, 2, 4), i) for i in range(3)))
        >>> sum(len(block) for block in outputs())
        15
        """
        for value, name in ((X, "X"), (mask, "mask")):
            sources.refuse_generator(value, name)
        if sources.is_streamed(X) or sources.is_streamed(mask):
            return self._streamed_outputs({"X": X, "mask": mask}, causal)
        return self._outputs(Chunk(0, (X, mask)), causal)

    def _streamed_outputs(self, given: dict[str, Any], causal: bool) -> Any:
        """Outputs chunk by chunk. Shapes are checked at once, values when a chunk is read."""
        X, mask = sources.sample(given)
        backend.check_real(X, "X")
        checks.token_shape(tuple(getattr(given["X"], "shape", X.shape)))
        self._check_dim(X)
        if mask is not None and mask.shape[1:] != X.shape[1:2]:
            raise ValueError(
                f"mask has rows of shape {tuple(mask.shape[1:])}, "
                f"expected {tuple(X.shape[1:2])}: one entry per token of X"
            )
        work, row_shape = partial(self._outputs, causal=causal), (int(X.shape[1]), self.out_dim)
        return sources.mapped(work, given, row_shape, backend.floating(X).dtype)

    def _outputs(self, chunk: Chunk, causal: bool) -> Array:
        X, mask = chunk.arrays
        X = checks.token_array(X)
        self._check_dim(X)
        mask = checks.key_mask(mask, X, start=chunk.start)
        layer, xp = self.to(X), backend.namespace(X)
        theta = dense.pack(layer.attention, layer.key_bias)
        projection = xp.reshape(layer.projection, (-1, self.out_dim))
        n, length, _ = X.shape
        outputs = backend.zeros((n, length, self.out_dim), X)
        for part in blocks.slices(n, 8 * length * self.heads * (2 * self.dim + 2 * length)):
            keys = X[part, ...]
            tokens = Tokens(keys if layer.key_bias is None else dense.with_constant(keys), keys)
            allowed = allowed_pairs(None if mask is None else mask[part, ...], causal, keys)
            found = dense.features(dense.attention(tokens, theta, allowed), keys) @ projection
            if layer.output_bias is not None:
                found = found + layer.output_bias
            outputs[part, ...] = xp.reshape(found, (*keys.shape[:2], self.out_dim))
        return outputs

    def _check_dim(self, X: Array, name: str = "X") -> None:
        if X.shape[2] != self.dim:
            raise ValueError(
                f"{name} has tokens of dimension {X.shape[2]}, expected {self.dim} as the layer has"
            )

    def to(self, reference: Array) -> AttentionLayer:
        """The same layer in the namespace, on the device and with the dtype of an array.

        Parameters
        ----------
        reference : array
            A numpy array, torch tensor or another array that follows the array API standard.

        Returns
        -------
        AttentionLayer
            Shares memory with this layer where nothing has to be converted.

        Examples
        --------
        >>> layer = AttentionLayer.random(heads=2, dim=4)
        >>> layer.to(np.ones(1, dtype=np.float32)).attention.dtype
        dtype('float32')
        """
        arrays = self.arrays().items()
        return AttentionLayer(**{name: backend.like(array, reference) for name, array in arrays})

    def distance(self, other: AttentionLayer, inputs: Any = None, mask: Any = None) -> HeadMatch:
        """Compare this layer's heads, as estimates, with the heads of another layer.

        Parameters
        ----------
        other : AttentionLayer
            The reference, of the same `dim` and `out_dim`.
        inputs : array of shape (n, tokens, dim), optional
            Compare what heads do on the affine span of these tokens. Layers that differ only in
            directions that the tokens do not have are at distance zero.
        mask : array of shape (n, tokens), optional
            True for the tokens of `inputs` that count.

        Returns
        -------
        HeadMatch
            Relative errors, for the best matching of heads.

        Raises
        ------
        TypeError, ValueError
            If `other` is no layer of this shape, or the inputs do not fit.

        Examples
        --------
        >>> layer = AttentionLayer.random(heads=3, dim=4)
        >>> same = AttentionLayer(layer.attention[::-1], layer.projection[::-1])
        >>> same.distance(layer).permutation
        array([2, 1, 0])
        """
        if not isinstance(other, AttentionLayer):
            raise TypeError(f"other is a {type(other).__name__}, expected an AttentionLayer")
        if (self.dim, self.out_dim) != (other.dim, other.out_dim):
            raise ValueError(
                f"the other layer maps dimension {other.dim} to {other.out_dim}, "
                f"expected {self.dim} to {self.out_dim}"
            )
        inside = self._span(inputs, mask)
        mine, theirs = _as_points(self, inside), _as_points(other, inside)
        errors = [_relative_errors(a, b) for a, b in zip(mine, theirs, strict=True)]
        # Errors are capped, so that a matching of exact heads outweighs any number of wrong ones.
        cost = sum(np.minimum(error, 10.0) ** 2 for error in errors)
        chosen, matched = linear_sum_assignment(cost)
        permutation = np.full(other.heads, -1)
        permutation[matched] = chosen
        attention, projection = np.full((2, other.heads), np.inf)
        attention[matched], projection[matched] = (error[chosen, matched] for error in errors)
        bias = _relative_errors(_constant(self, inside), _constant(other, inside))
        return HeadMatch(permutation, attention, projection, float(bias[0, 0]))

    def _span(self, inputs: Any, mask: Any) -> Span | None:
        """The affine span of tokens that this layer can read, if there are any."""
        if inputs is None:
            return None
        X = checks.token_array(inputs, "inputs")
        self._check_dim(X, "inputs")
        return span_of(X, checks.key_mask(mask, X))

    def plot(
        self,
        other: AttentionLayer | None = None,
        inputs: Any = None,
        mask: Any = None,
        heads: Iterable[int] | None = None,
        axes: Any = None,
    ) -> Grid:
        """Draw the attention matrix of every head, all on one scale of colours about 0.

        Parameters
        ----------
        other : AttentionLayer, optional
            A second layer to compare with, such as a recovered one. Below every head is the one of
            `other` that `distance` matches with it.
        inputs : array of shape (n, tokens, dim), optional
            Show what heads do on the span of these tokens, VᵀΘV with the strongest directions
            first. Two layers that agree on the tokens then look the same.
        mask : array of shape (n, tokens), optional
            True for the tokens of `inputs` that count.
        heads : iterable of int, optional
            The heads to draw, from 0; all if None.
        axes : array of matplotlib axes, optional
            Where to draw: one for each head, and with `other` as many again. Axes of a new figure
            if None.

        Returns
        -------
        ndarray of matplotlib axes
            Of shape (1, heads), or (2, heads) with `other`.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        TypeError, ValueError
            If an argument is not valid.

        Examples
        --------
        >>> layer = AttentionLayer.random(heads=3, dim=4)
        >>> other = AttentionLayer(layer.attention[::-1], layer.projection[::-1])
        >>> axes = layer.plot(other)
        >>> axes.shape, axes[1, 0].get_title()
        ((2, 3), 'head 2')
        """
        inside = self._span(inputs, mask)
        matched = np.arange(self.heads)
        if other is not None:
            if not isinstance(other, AttentionLayer):
                raise TypeError(f"other is a {type(other).__name__}, expected an AttentionLayer")
            matched = other.distance(self, inputs, mask).permutation
        return layer_plot.draw(self, other, matched, inside, heads, axes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the layer to a safetensors file. An interrupted write keeps the old file.

        Parameters
        ----------
        path : path-like
            The file, with any suffix; ".safetensors" is customary.

        Raises
        ------
        OSError
            If the file cannot be written.

        Examples
        --------
        >>> from tempfile import TemporaryDirectory
        >>> layer = AttentionLayer.random(heads=2, dim=4)
        >>> with TemporaryDirectory() as folder:
        ...     layer.save(f"{folder}/layer.safetensors")
        ...     AttentionLayer.load(f"{folder}/layer.safetensors")
        AttentionLayer(heads=2, dim=4, out_dim=4)
        """
        safetensors_files.save(self.arrays(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> AttentionLayer:
        """Read a layer that `save` wrote.

        Parameters
        ----------
        path : path-like
            The file.

        Returns
        -------
        AttentionLayer
            The layer in numpy, with the dtypes it had.

        Raises
        ------
        OSError
            If the file cannot be read.
        ValueError
            If the file holds something else. Reading a file never runs code from it.

        Examples
        --------
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     AttentionLayer.random(heads=3, dim=4).save(f"{folder}/layer.safetensors")
        ...     AttentionLayer.load(f"{folder}/layer.safetensors").heads
        3
        """
        named = safetensors_files.load(path)
        try:
            return cls(**named)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{os.fspath(path)} does not hold a valid layer: {error}") from error

    def arrays(self) -> dict[str, Array]:
        """The layer's arrays by name, without those that are None.

        Returns
        -------
        dict of str to array
            Under the names that the arguments of `AttentionLayer` have.

        Examples
        --------
        >>> list(AttentionLayer.random(heads=2, dim=4, bias=True).arrays())
        ['attention', 'projection', 'key_bias', 'output_bias']
        """
        names = ("attention", "projection", "key_bias", "output_bias")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @classmethod
    def from_torch(cls, module: Any) -> AttentionLayer:
        """Read the layer that a torch module computes, biases included.

        Parameters
        ----------
        module : torch.nn.MultiheadAttention
            Or a module that `to_torch` made. Queries, keys and values have one dimension.

        Returns
        -------
        AttentionLayer
            A copy of the weights in numpy; half precisions become float64.

        Raises
        ------
        TypeError, ValueError
            If the module is another one, or adds keys of its own.

        Examples
        --------
        >>> import torch
        >>> AttentionLayer.from_torch(torch.nn.MultiheadAttention(8, num_heads=2))
        AttentionLayer(heads=2, dim=8, out_dim=8, with biases)
        """
        return cls(**torch_modules.from_torch(module))

    @classmethod
    def from_safetensors(
        cls,
        path: str | os.PathLike[str],
        layer: int = 0,
        family: str = "bert",
        heads: int | None = None,
    ) -> AttentionLayer:
        """Read an attention layer of a pretrained transformer, with its biases, in float64.

        What the transformer does around the layer (normalisation, residual sum, dropout) is not
        part of it. Layers of GPT-2 are causal: call them with `causal=True`. Models with rotary or
        relative positions, or with grouped queries, are refused.

        Parameters
        ----------
        path : path-like
            A safetensors file with the model's weights.
        layer : int
            Number of the layer, from 0.
        family : {"bert", "gpt2"}
            How the weights are named.
        heads : int, optional
            Number of heads. If None, it is read from the `config.json` beside the file.

        Returns
        -------
        AttentionLayer
            The layer in numpy.

        Raises
        ------
        OSError
            If the file cannot be read.
        TypeError, ValueError
            If the file holds no such layer, or an argument is not valid.

        Examples
        --------
        ::

            layer = AttentionLayer.from_safetensors("model.safetensors", layer=3, family="gpt2")
        """
        return cls(**pretrained.load(path, layer, family, heads))

    def to_torch(self) -> Any:
        """Make a torch module of this layer, with its weights as trainable parameters.

        Returns
        -------
        torch.nn.Module
            Called as `module(X, mask=None, causal=False)`, with the arguments of this layer. It can
            be copied, pickled and saved as any other; `from_torch` reads it back.

        Raises
        ------
        ImportError
            If torch is not installed.

        Examples
        --------
        >>> import torch
        >>> module = AttentionLayer.random(heads=2, dim=4).to_torch()
        >>> module(torch.ones((5, 3, 4), dtype=torch.float64)).shape
        torch.Size([5, 3, 4])
        """
        return torch_modules.to_torch(self.arrays())


def _real_or_none(value: Any, name: str) -> Array | None:
    return None if value is None else backend.as_real(value, name)


def _as_points(layer: AttentionLayer, inside: Span | None) -> list[NumpyArray]:
    """Attention (with the key bias) and projection as one row of numbers a head."""
    heads = layer.heads
    theta, projection = backend.to_numpy(layer.attention), backend.to_numpy(layer.projection)
    bias = _flat(layer.key_bias, heads * layer.dim).reshape(heads, 1, -1)
    if inside is None:
        points = np.concatenate([theta, bias], axis=1)
    else:
        points, projection = inside.attention(theta, bias[:, 0, :]), inside.projection(projection)
    return [points.reshape(heads, -1), projection.reshape(heads, -1)]


def _constant(layer: AttentionLayer, inside: Span | None) -> NumpyArray:
    """The output bias (1, e), with what it gets from the mean token on the span of inputs."""
    bias = _flat(layer.output_bias, layer.out_dim)
    return bias if inside is None else inside.output_bias(backend.to_numpy(layer.projection), bias)


def _flat(array: Array | None, size: int) -> NumpyArray:
    return np.zeros((1, size)) if array is None else backend.to_numpy(array).reshape(1, -1)


def _relative_errors(mine: NumpyArray, theirs: NumpyArray) -> NumpyArray:
    """|mine_i - theirs_j| / |theirs_j| for all pairs, 0/0 taken as 0."""
    # Largest entries at about 1, so that squares neither overflow nor vanish, by a power of two.
    largest = max(np.abs(mine).max(initial=0.0), np.abs(theirs).max(initial=0.0))
    mine, theirs = (np.ldexp(one.astype(float), -np.frexp(largest)[1]) for one in (mine, theirs))
    gap = np.stack([np.linalg.norm(row - theirs, axis=1) for row in mine])
    size = np.broadcast_to(np.linalg.norm(theirs, axis=1), gap.shape)
    relative = np.full(gap.shape, np.inf)
    np.divide(gap, size, out=relative, where=size > 0)
    return np.where(gap == 0, 0.0, relative)
