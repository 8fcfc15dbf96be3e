"""AttentionLayer: the softmax multi-head attention layer that both halves of the package share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from onelayer import layer_plot
from onelayer.array import backend, blocks, checks
from onelayer.array.backend import Array
from onelayer.data import sources
from onelayer.data.chunks import Chunk
from onelayer.heads import dense
from onelayer.heads.base import Tokens
from onelayer.heads.softmax import allowed_pairs
from onelayer.inputs import Seed
from onelayer.io import pretrained, safetensors_files, torch_modules
from onelayer.plotting import Grid
from onelayer.weights import LayerWeights


class AttentionLayer(LayerWeights):
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
        given = {"X": X, "mask": mask}
        return self._computed(self._outputs, given, causal, lambda k: (k, self.out_dim))

    def attention_weights(self, X: Any, mask: Any = None, causal: bool = False) -> Array:
        """Compute how much every token attends to every other, head by head.

        Parameters
        ----------
        X : array of shape (n, tokens, dim), Dask array or function
            As when the layer is called.
        mask : array of shape (n, tokens), optional
            True for the tokens that may be attended to.
        causal : bool
            Whether a token attends only to itself and the tokens before it.

        Returns
        -------
        array of shape (n, heads, tokens, tokens)
            Entry (i, h, a, b) is the weight of token b in row a of head h: a row sums to 1, or is
            zero where it may attend to nothing. In the storage of X as outputs are. The array is
            heads · tokens / out_dim times as large as the outputs.

        Raises
        ------
        TypeError, ValueError
            If X or the mask has another shape, or entries that are not real and finite.

        Examples
        --------
        >>> layer = AttentionLayer.random(heads=2, dim=4)
        >>> layer.attention_weights(np.ones((1, 3, 4)), causal=True)[0, 0].round(2)
        array([[1.  , 0.  , 0.  ],
               [0.5 , 0.5 , 0.  ],
               [0.33, 0.33, 0.33]])
        """
        given = {"X": X, "mask": mask}
        return self._computed(self._weights, given, causal, lambda k: (self.heads, k, k))

    def plot_attention(
        self,
        X: Any,
        tokens: Sequence[str] | None = None,
        other: AttentionLayer | None = None,
        heads: Iterable[int] | None = None,
        causal: bool = False,
        axes: Any = None,
    ) -> Grid:
        """Draw the attention weights of one example, an image for every head.

        Rows of an image are tokens that attend, columns those that are attended to.

        Parameters
        ----------
        X : array of shape (tokens, dim) or (1, tokens, dim)
            The example.
        tokens : sequence of str, optional
            Labels of the tokens.
        other : AttentionLayer, optional
            A second layer to compare with, such as a recovered one. Below every head is the one of
            `other` that `distance` matches with it on the span of these tokens.
        heads : iterable of int, optional
            The heads to draw, from 0; all if None.
        causal : bool
            Whether a token attends only to itself and the tokens before it.
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
        >>> X = np.random.default_rng(0).standard_normal((5, 4))
        >>> layer.plot_attention(X, tokens="a b c d e".split(), causal=True).shape
        (1, 3)
        """
        example = backend.as_array(X, "X")
        if example.ndim == 2:
            example = example[None, ...]
        if example.ndim != 3 or example.shape[0] != 1:
            raise ValueError(
                f"X has shape {tuple(example.shape)}, expected one example: (tokens, dim)"
            )
        if tokens is not None and len(tokens) != example.shape[1]:
            raise ValueError(
                f"tokens has {len(tokens)} labels, expected {example.shape[1]}: one for each of X"
            )
        layers, matched = [self], np.arange(self.heads)
        if other is not None:
            self._check_kind(other)
            layers, matched = [self, other], other.distance(self, example).permutation
        found = [layer.attention_weights(example, causal=causal)[0, ...] for layer in layers]
        images = [backend.to_numpy(weights).astype(float) for weights in found]
        return layer_plot.draw(images, matched, heads, axes, signed=False, tokens=tokens)

    def _computed(
        self,
        work: Callable[..., Array],
        given: dict[str, Any],
        causal: bool,
        row_shape: Callable[[int], tuple[int, ...]],
    ) -> Any:
        """`work` of all examples, wherever they are; `row_shape` is that of k tokens.

        Of streamed examples shapes are checked at once, entries when a chunk is read.
        """
        for name, value in given.items():
            sources.refuse_generator(value, name)
        if not any(map(sources.is_streamed, given.values())):
            return work(Chunk(0, tuple(given.values())), causal)
        X, mask = sources.sample(given)
        backend.check_real(X, "X")
        checks.token_shape(tuple(getattr(given["X"], "shape", X.shape)))
        self._check_dim(X)
        if mask is not None and mask.shape[1:] != X.shape[1:2]:
            raise ValueError(
                f"mask has rows of shape {tuple(mask.shape[1:])}, "
                f"expected {tuple(X.shape[1:2])}: one entry per token of X"
            )
        of_chunk, shape = partial(work, causal=causal), row_shape(int(X.shape[1]))
        return sources.mapped(of_chunk, given, shape, backend.floating(X).dtype)

    def _outputs(self, chunk: Chunk, causal: bool) -> Array:
        layer, X, mask = self._checked(chunk)
        xp, (n, length, _) = backend.namespace(X), X.shape
        projection = xp.reshape(layer.projection, (-1, self.out_dim))
        outputs = backend.zeros((n, length, self.out_dim), X)
        for part, keys, attention in layer._attention(X, mask, causal):
            found = dense.features(attention, keys) @ projection
            if layer.output_bias is not None:
                found = found + layer.output_bias
            outputs[part, ...] = xp.reshape(found, (*keys.shape[:2], self.out_dim))
        return outputs

    def _weights(self, chunk: Chunk, causal: bool) -> Array:
        layer, X, mask = self._checked(chunk)
        xp, (n, length, _) = backend.namespace(X), X.shape
        weights = backend.zeros((n, self.heads, length, length), X)
        for part, keys, attention in layer._attention(X, mask, causal):
            by_row = xp.reshape(attention, (keys.shape[0], length, self.heads, length))
            weights[part, ...] = xp.permute_dims(by_row, (0, 2, 1, 3))
        return weights

    def _checked(self, chunk: Chunk) -> tuple[AttentionLayer, Array, Array | None]:
        """The layer where the examples are, and the examples with their mask."""
        X, mask = chunk.arrays
        X = checks.token_array(X)
        self._check_dim(X)
        return self.to(X), X, checks.key_mask(mask, X, start=chunk.start)

    def _attention(
        self, X: Array, mask: Array | None, causal: bool
    ) -> Iterator[tuple[slice, Array, Array]]:
        """Slices of the examples, with their keys and the attention (n, k·m, k) of all rows."""
        theta, length = dense.pack(self.attention, self.key_bias), X.shape[1]
        for part in blocks.slices(X.shape[0], 8 * length * self.heads * 2 * (self.dim + length)):
            keys = X[part, ...]
            tokens = Tokens(keys if self.key_bias is None else dense.with_constant(keys), keys)
            allowed = allowed_pairs(None if mask is None else mask[part, ...], causal, keys)
            yield part, keys, dense.attention(tokens, theta, allowed)

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
