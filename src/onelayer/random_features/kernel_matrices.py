"""Kernel matrices of infinitely many random heads or neurons, for examples of any form.

scikit-learn's `KernelRidge` and `SVR` take them with `kernel="precomputed"`; its Gaussian processes
take a `PairwiseKernel` whose metric calls `attention_kernel` on a pair of examples.
`AttentionKernelRidge` computes them itself.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import check_array

from onelayer import arrays, attention
from onelayer.random_features import kernels, validation
from onelayer.random_features.attention import bias_matrix
from onelayer.random_features.mlp import flattened
from onelayer.random_features.positions import Positions
from onelayer.random_features.progress import Track, untracked
from onelayer.random_features.sets import Sets, as_sets, is_collection_of_sets, single_tokens

Matrix = np.ndarray[Any, Any]


def attention_kernel(
    X: Any, Z: Any = None, bias: Any = 0.0, mask: Any = None, Z_mask: Any = None
) -> Matrix:
    """The kernel of infinitely many random attention heads, (n, n) or (n, examples of Z).

        K(x, x') = (1/(N N')) Σ_ij E[relu(x̃_0ᵀ W x̃_i) relu(x̃'_0ᵀ W x̃'_j)] ⟨x̃_i, x̃'_j⟩,

    the limit of Φ(x) Φ(x')ᵀ for the features of `AttentionFeatures`, exact to about 1e-15 times
    its largest entries. X and Z take any form that the estimators take, with `mask` for X and
    `Z_mask` for Z; `bias` is that of `RandomFeatureAttention`.

    >>> from sklearn.svm import SVR
    >>> from onelayer import inputs
    >>> X = inputs.sphere(60, tokens=5, dim=4)
    >>> y = X[:, 1:, 0].mean(axis=1)
    >>> machine = SVR(kernel="precomputed", epsilon=0.01).fit(attention_kernel(X[:40]), y[:40])
    >>> machine.predict(attention_kernel(X[40:], X[:40])).shape
    (20,)
    """
    sets, others = _both(X, mask, Z, Z_mask, least_tokens=2)
    matrix = attention_matrix(sets, others, kernel_bias(bias, sets))
    validation.check_no_overflow(matrix, "kernels", sets)
    return matrix


def mlp_kernel(X: Any, Z: Any = None, mask: Any = None, Z_mask: Any = None) -> Matrix:
    """The kernel of infinitely many random neurons that read all tokens in a row, (n, n').

        K(x, x') = E[relu(⟨w, z⟩) relu(⟨w, z'⟩)],    z = vec(x_0, .., x_N, 1), w from N(0, I/(N+2)),

    the limit of Φ(x) Φ(x')ᵀ for the features of `RandomFeatureMLP`. X, Z and their masks are those
    of `attention_kernel`; N is the most keys of any example, and missing tokens are zeros.

    >>> from onelayer import inputs
    >>> X = inputs.sphere(3, tokens=5, dim=4)
    >>> mlp_kernel(X).diagonal()  # half the variance, which is 1 on the unit sphere
    array([0.5, 0.5, 0.5])
    """
    sets, others = _both(X, mask, Z, Z_mask, least_tokens=1)
    columns = sets if others is None else others
    tokens = max(sets.longest, columns.longest)

    def block(down: slice, across: slice) -> Matrix:
        flat, others_flat = (
            flattened(*_plain(examples, part), tokens)
            for examples, part in ((sets, down), (columns, across))
        )
        return kernels.mlp_kernel_block(flat, others_flat, std=(tokens + 1) ** -0.5)

    matrix = kernels.gram(len(sets), None if others is None else len(others), block)
    validation.check_no_overflow(matrix, "kernels", sets)
    return matrix


def attention_matrix(
    sets: Sets, others: Sets | None, bias: Matrix | None, track: Track = untracked
) -> Matrix:
    """`attention_kernel` of checked examples; for `others` None it is (n, n) and symmetric."""
    columns = sets if others is None else others

    def block(down: slice, across: slice) -> Matrix:
        return kernels.attention_kernel_block(
            *_extended(sets, down), *_extended(columns, across), bias
        )

    return kernels.gram(len(sets), None if others is None else len(others), block, track)


def kernel_bias(bias: Any, sets: Sets) -> Matrix | None:
    """W_0 as the kernel wants it: None where it is zero, which is cheaper."""
    matrix = bias_matrix(validation.as_bias(bias), Positions(None, sets.dim, sets.longest))
    return matrix if matrix.any() else None


def _both(X: Any, mask: Any, Z: Any, Z_mask: Any, least_tokens: int) -> tuple[Sets, Sets | None]:
    sets = _checked(X, mask, least_tokens, "X")
    if Z is None:
        if Z_mask is not None:
            raise ValueError("Z_mask was given without Z, expected examples Z for a mask of theirs")
        return sets, None
    others = _checked(Z, Z_mask, least_tokens, "Z")
    if others.dim != sets.dim:
        raise ValueError(f"Z has tokens of dimension {others.dim}, expected {sets.dim} as X has")
    return sets, others


def _checked(X: Any, mask: Any, least_tokens: int, name: str) -> Sets:
    X = validation.in_numpy(X)
    if is_collection_of_sets(X):
        return as_sets(X, mask, least_tokens, name)
    validation.refuse_mask_of_rows(mask)
    return single_tokens(check_array(X, dtype=np.float64, input_name=name), least_tokens)


def _plain(sets: Sets, part: slice) -> tuple[Matrix, Matrix | None]:
    """A block of examples in numpy and float64."""
    tokens, mask = sets.block(part)
    there = None if mask is None else arrays.to_numpy(mask)
    return arrays.to_numpy(arrays.double(tokens)), there


def _extended(sets: Sets, part: slice) -> tuple[Matrix, Matrix | None]:
    """The same, with a constant 1 at the end of every token."""
    tokens, mask = _plain(sets, part)
    return attention.with_constant(tokens), mask
