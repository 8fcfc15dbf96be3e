"""Kernel matrices of infinitely many random heads or neurons, for examples of any form.

scikit-learn's `KernelRidge` and `SVR` take them with `kernel="precomputed"`; its Gaussian processes
take a `PairwiseKernel` whose metric calls `attention_kernel` on a pair of examples.
`AttentionKernelRidge` computes them itself.

They are computed in float64, whatever the examples are in: rounding errors of float32 would give a
kernel matrix eigenvalues below zero, of the size of small penalties. On a GPU torch computes them,
else numpy, and they come back as what the examples are.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import check_array

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.features import kernels, queries, validation
from onelayer.features.attention_features import bias_matrix
from onelayer.features.mlp_features import flattened
from onelayer.features.positions import Positions
from onelayer.features.progress import Track, untracked
from onelayer.features.sets import Sets, as_sets, is_collection_of_sets, single_tokens
from onelayer.heads import dense


def attention_kernel(
    X: Any,
    Z: Any = None,
    bias: Any = 0.0,
    mask: Any = None,
    Z_mask: Any = None,
    device: str | None = None,
    query: str = "first",
) -> Array:
    """The kernel of infinitely many random attention heads, (n, n) or (n, examples of Z).

        K(x, x') = (1/(N N')) Σ_ij E[relu(x̃_0ᵀ W x̃_i) relu(x̃'_0ᵀ W x̃'_j)] ⟨x̃_i, x̃'_j⟩,

    the limit of Φ(x) Φ(x')ᵀ for the features of `AttentionFeatures`, exact to about 1e-15 times
    its largest entries. X and Z take any form that the estimators take, with `mask` for X and
    `Z_mask` for Z; `bias` and `query` are those of `RandomFeatureAttention`. Tokens are taken as
    they are, neither centred nor scaled. It is computed where X is, or on `device`, "cpu" or
    "cuda", and comes back in float64 as what X is, a numpy array or a tensor on the device of X.

    >>> from sklearn.svm import SVR
    >>> from onelayer import inputs
    >>> X = inputs.sphere(60, tokens=5, dim=4)
    >>> y = X[:, 1:, 0].mean(axis=1)
    >>> machine = SVR(kernel="precomputed", epsilon=0.01).fit(attention_kernel(X[:40]), y[:40])
    >>> machine.predict(attention_kernel(X[40:], X[:40])).shape
    (20,)
    """
    backend.check_device(device)
    queries.checked(query)
    sets, others = _both(X, mask, Z, Z_mask, queries.least_tokens(query), query == "first")
    placed = sets.placed(device)
    placed_others = None if others is None else others.placed(device)
    matrix = attention_matrix(placed, placed_others, kernel_bias(bias, sets), query=query)
    validation.check_no_overflow(matrix, "kernels", placed)
    return backend.as_device(matrix, sets.sample)


def mlp_kernel(
    X: Any, Z: Any = None, mask: Any = None, Z_mask: Any = None, device: str | None = None
) -> Array:
    """The kernel of infinitely many random neurons that read all tokens in a row, (n, n').

        K(x, x') = E[relu(⟨w, z⟩) relu(⟨w, z'⟩)],    z = vec(x_0, .., x_N, 1), w from N(0, I/(N+2)),

    the limit of Φ(x) Φ(x')ᵀ for the features of `RandomFeatureMLP`. X, Z, their masks, the device
    and what is returned are as in `attention_kernel`; N is the most keys of any example, and
    missing tokens are zeros.

    >>> from onelayer import inputs
    >>> X = inputs.sphere(3, tokens=5, dim=4)
    >>> mlp_kernel(X).diagonal()  # half the variance, which is 1 on the unit sphere
    array([0.5, 0.5, 0.5])
    """
    backend.check_device(device)
    sets, others = _both(X, mask, Z, Z_mask, least_tokens=1)
    placed = sets.placed(device)
    matrix = _mlp_matrix(placed, None if others is None else others.placed(device))
    validation.check_no_overflow(matrix, "kernels", placed)
    return backend.as_device(matrix, sets.sample)


def attention_matrix(
    sets: Sets,
    others: Sets | None,
    bias: Array | None,
    track: Track = untracked,
    query: str = "first",
) -> Array:
    """`attention_kernel` of checked examples; for `others` None it is (n, n) and symmetric.

    It is in the namespace and on the device of `sets`; the others and the bias may be elsewhere.
    """
    columns = sets if others is None else others
    reference = _reference(sets)
    if bias is not None:
        bias = backend.like(bias, reference)

    def block(down: slice, across: slice) -> Array:
        return kernels.attention_kernel_block(
            *_extended(sets, down, reference, query),
            *_extended(columns, across, reference, query),
            bias,
        )

    count = None if others is None else len(others)
    pairs = queries.keys(query, sets.longest) * queries.keys(query, columns.longest)
    size = kernels.tile_size(reference, pairs)
    matrix = kernels.gram(len(sets), count, block, reference, size, track)
    return backend.as_device(matrix, sets.sample)


def kernel_bias(bias: Any, sets: Sets) -> np.ndarray[Any, Any] | None:
    """W_0 as the kernel wants it: None where it is zero, which is cheaper."""
    matrix = bias_matrix(validation.as_bias(bias), Positions(None, sets.dim, sets.longest))
    return matrix if matrix.any() else None


def _both(
    X: Any, mask: Any, Z: Any, Z_mask: Any, least_tokens: int, first: bool = True
) -> tuple[Sets, Sets | None]:
    sets = _checked(X, mask, least_tokens, "X", first)
    if Z is None:
        if Z_mask is not None:
            raise ValueError("Z_mask was given without Z, expected examples Z for a mask of theirs")
        return sets, None
    others = _checked(Z, Z_mask, least_tokens, "Z", first)
    if others.dim != sets.dim:
        raise ValueError(f"Z has tokens of dimension {others.dim}, expected {sets.dim} as X has")
    return sets, others


def _checked(X: Any, mask: Any, least_tokens: int, name: str, first: bool) -> Sets:
    if is_collection_of_sets(X):
        return as_sets(X, mask, least_tokens, name, first=first)
    validation.refuse_mask_of_rows(mask)
    if backend.is_foreign(X) and X.ndim == 2 and 0 not in X.shape:
        return single_tokens(backend.as_real(X, name), least_tokens)
    rows = check_array(validation.in_numpy(X), dtype=np.float64, input_name=name)
    return single_tokens(rows, least_tokens)


def _mlp_matrix(sets: Sets, others: Sets | None) -> Array:
    """`mlp_kernel` of checked examples, in the namespace and on the device of `sets`."""
    columns = sets if others is None else others
    tokens = max(sets.longest, columns.longest)
    reference = _reference(sets)

    def block(down: slice, across: slice) -> Array:
        flat, others_flat = (
            flattened(*_block(examples, part, reference), tokens)
            for examples, part in ((sets, down), (columns, across))
        )
        return kernels.mlp_kernel_block(flat, others_flat, std=(tokens + 1) ** -0.5)

    count = None if others is None else len(others)
    matrix = kernels.gram(len(sets), count, block, reference, kernels.tile_size(reference, 1))
    return backend.as_device(matrix, sets.sample)


def _reference(sets: Sets) -> Array:
    """An array of the kind in which the kernel of the examples is computed."""
    return backend.double(backend.gpu_or_numpy(sets.sample))


def _block(sets: Sets, part: slice, reference: Array) -> tuple[Array, Array | None]:
    """A block of examples and its mask, of the kind of the reference."""
    tokens, mask = sets.block(part)
    there = None if mask is None else backend.as_device(mask, reference)
    return backend.like(tokens, reference), there


def _extended(sets: Sets, part: slice, reference: Array, query: str) -> tuple[Array, Array | None]:
    """The same, the query first, with a constant 1 at the end of every token."""
    tokens, mask = queries.with_query_first(*_block(sets, part, reference), query)
    return dense.with_constant(tokens), mask
