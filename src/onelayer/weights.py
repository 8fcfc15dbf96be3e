"""The weights of an attention layer and methods about its heads: the base of AttentionLayer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

import numpy as np

from onelayer import canonical, comparison, layer_plot
from onelayer.array import backend, checks
from onelayer.array.backend import Array
from onelayer.comparison import HeadMatch
from onelayer.factors import HeadFactors, balanced
from onelayer.plotting import Grid
from onelayer.span import Span, span_of
from onelayer.summary import Summary, number


class LayerWeights:
    """Attention matrices, projections and biases of a layer."""

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

    def arrays(self) -> dict[str, Array]:
        """The layer's arrays by name, without those that are None.

        Returns
        -------
        dict of str to array
            Under the names that the arguments of `AttentionLayer` have.

        Examples
        --------
        >>> from onelayer import AttentionLayer
        >>> list(AttentionLayer.random(heads=2, dim=4, bias=True).arrays())
        ['attention', 'projection', 'key_bias', 'output_bias']
        """
        names = ("attention", "projection", "key_bias", "output_bias")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def to(self, reference: Array) -> Self:
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
        >>> from onelayer import AttentionLayer
        >>> layer = AttentionLayer.random(heads=2, dim=4)
        >>> layer.to(np.ones(1, dtype=np.float32)).attention.dtype
        dtype('float32')
        """
        arrays = self.arrays().items()
        return type(self)(**{name: backend.like(array, reference) for name, array in arrays})

    def distance(self, other: LayerWeights, inputs: Any = None, mask: Any = None) -> HeadMatch:
        """Compare the heads of two layers.

        The distance of matched heads does not depend on which layer is the other one. To compare
        layers whose heads may be split, or without effect, compare their canonical forms.

        Parameters
        ----------
        other : AttentionLayer
            A layer of the same `dim` and `out_dim`.
        inputs : array of shape (n, tokens, dim), optional
            Compare what heads do on the affine span of these tokens. Layers that differ only in
            directions that the tokens do not have are at distance zero.
        mask : array of shape (n, tokens), optional
            True for the tokens of `inputs` that count.

        Returns
        -------
        HeadMatch
            Distances relative to the larger norm, for the best matching of heads.

        Raises
        ------
        TypeError, ValueError
            If `other` is no layer of this shape, or the inputs do not fit.

        Examples
        --------
        >>> from onelayer import AttentionLayer
        >>> layer = AttentionLayer.random(heads=3, dim=4)
        >>> same = AttentionLayer(layer.attention[::-1], layer.projection[::-1])
        >>> same.distance(layer).permutation
        array([2, 1, 0])
        """
        self._check_kind(other)
        if (self.dim, self.out_dim) != (other.dim, other.out_dim):
            raise ValueError(
                f"the other layer maps dimension {other.dim} to {other.out_dim}, "
                f"expected {self.dim} to {self.out_dim}"
            )
        return comparison.distance(self, other, self._span(inputs, mask))

    def canonical(self, inputs: Any = None, mask: Any = None, tol: float | None = None) -> Self:
        """Compute the canonical form: a layer with the same outputs and no redundant heads.

        Heads with equal attention (matrix and key bias) become one head with the sum of their
        projections, heads without a projection are dropped, and the rest is sorted: by the norm of
        the attention, then by that of the projection, the largest first. Biases that are zero are
        left out. The order in which heads are given, and splits of a head into several, make no
        difference.

        Parameters
        ----------
        inputs : array of shape (n, tokens, dim), optional
            Remove what these tokens cannot show too: weights become zero outside of their affine
            span. Outputs then stay the same for tokens on this span, in rows that may attend to
            some token.
        mask : array of shape (n, tokens), optional
            True for the tokens of `inputs` that count.
        tol : float, optional
            Up to which distance of their attention, as `distance` measures it, heads are equal, and
            up to which share of the largest projection another is zero. If None, 100 times the
            machine epsilon of the coarsest array: 2.2e-14 in float64, 1.2e-5 in float32.

        Returns
        -------
        AttentionLayer
            In the namespace, on the device and with the dtypes of this layer. A layer without
            effect keeps one head of zeros.

        Raises
        ------
        TypeError, ValueError
            If an argument is not valid.

        Examples
        --------
        >>> from onelayer import AttentionLayer
        >>> layer = AttentionLayer.random(heads=3, dim=4, seed=0)
        >>> halves = [np.tile(layer.attention, (2, 1, 1)), np.tile(layer.projection / 2, (2, 1, 1))]
        >>> split = AttentionLayer(*halves)
        >>> split.heads, split.canonical().heads
        (6, 3)
        >>> split.canonical().distance(layer.canonical()).permutation
        array([0, 1, 2])
        """
        if tol is not None:
            tol = checks.positive_number(tol, "tol")
        layer, inside = self, self._span(inputs, mask)
        if inside is not None:
            layer = type(self)(**canonical.on_span(self, inside))
        return type(self)(**canonical.canonical(layer, tol))

    def factors(self, rank: int | None = None, value_rank: int | None = None) -> HeadFactors:
        """Compute factors of query, key, value and output, with balanced norms.

        Each attention matrix is written as Q Kᵀ and each projection as V O, by their singular value
        decompositions U S Vᵀ with √S on both sides. So the factors do not depend on those that a
        layer was made from; if singular values are equal, their columns are one choice of many.

        Parameters
        ----------
        rank : int, optional
            Columns r of Q and K. Matrices of larger rank are approximated as well as possible. If
            None, the largest numerical rank of an attention matrix: the number of its singular
            values above dim · ε times the largest, with ε the machine epsilon of its dtype.
        value_rank : int, optional
            Columns q of V, and rows of O. If None, the largest numerical rank of a projection, in
            the same way with the larger of `dim` and `out_dim`.

        Returns
        -------
        HeadFactors
            Arrays in the namespace, on the device and with the dtypes of this layer.

        Raises
        ------
        TypeError, ValueError
            If a rank is not valid.

        Examples
        --------
        >>> from onelayer import AttentionLayer
        >>> layer = AttentionLayer.random(heads=4, dim=16, rank=3)
        >>> found = layer.factors()
        >>> found.query.shape
        (4, 16, 3)
        >>> np.allclose(found.query @ found.key.swapaxes(1, 2), layer.attention)
        True
        """
        query, key = balanced(self.attention, rank, "rank")
        value, output = balanced(self.projection, value_rank, "value_rank")
        return HeadFactors(query, backend.transpose(key), value, output)

    def _span(self, inputs: Any, mask: Any) -> Span | None:
        """The affine span of tokens that this layer can read, if there are any."""
        if inputs is None:
            return None
        X = checks.token_array(inputs, "inputs")
        self._check_dim(X, "inputs")
        return span_of(X, checks.key_mask(mask, X))

    def _check_dim(self, X: Array, name: str = "X") -> None:
        if X.shape[2] != self.dim:
            raise ValueError(
                f"{name} has tokens of dimension {X.shape[2]}, expected {self.dim} as the layer has"
            )

    @staticmethod
    def _check_kind(other: object) -> None:
        if not isinstance(other, LayerWeights):
            raise TypeError(f"other is a {type(other).__name__}, expected an AttentionLayer")

    def plot(
        self,
        other: LayerWeights | None = None,
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
        >>> from onelayer import AttentionLayer
        >>> layer = AttentionLayer.random(heads=3, dim=4)
        >>> other = AttentionLayer(layer.attention[::-1], layer.projection[::-1])
        >>> axes = layer.plot(other)
        >>> axes.shape, axes[1, 0].get_title()
        ((2, 3), 'head 2')
        """
        inside = self._span(inputs, mask)
        images, matched = [layer_plot.images(self, inside)], np.arange(self.heads)
        if other is not None:
            self._check_kind(other)
            matched = other.distance(self, inputs, mask).permutation
            images.append(layer_plot.images(other, inside))
        return layer_plot.draw(images, matched, heads, axes)


def _real_or_none(value: Any, name: str) -> Array | None:
    return None if value is None else backend.as_real(value, name)
