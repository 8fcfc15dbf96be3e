"""`attention_kernel` and `mlp_kernel`: kernel matrices for examples in any form.

scikit-learn's `KernelRidge` and `SVR` take them with `kernel="precomputed"`; its Gaussian processes
take a `PairwiseKernel` whose metric calls `attention_kernel` on a pair of examples.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from sklearn.utils.validation import check_array

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data.sets import SetRules, Sets
from onelayer.features import activations, queries, validation
from onelayer.features.attention_features import bias_matrix
from onelayer.features.kernels import base
from onelayer.features.kernels.attention import AttentionKernel
from onelayer.features.kernels.base import Kernel
from onelayer.features.kernels.mlp import MLPKernel
from onelayer.features.positions import PositionalEncoding


def attention_kernel(
    X: Any,
    Z: Any = None,
    bias: Any = 0.0,
    mask: Any = None,
    Z_mask: Any = None,
    device: str | None = None,
    query: str = "first",
) -> Array:
    """Kernel of infinitely many random attention heads.

        K(x, x') = (1/(N N')) Σ_ij E[relu(x̃_0ᵀ W x̃_i) relu(x̃'_0ᵀ W x̃'_j)] ⟨x̃_i, x̃'_j⟩

    is the limit of Φ(x) Φ(x')ᵀ for the features of `AttentionFeatures`. Entries are exact to about
    1e-15 times the largest. Tokens are neither centred nor scaled.

    Parameters
    ----------
    X, Z : examples, in any form that `RandomFeatureAttention` takes
        Without Z the kernel is between the examples of X.
    bias : float or array of shape (dim + 1, dim + 1)
        The mean W_0 of W, as in `RandomFeatureAttention`.
    mask, Z_mask : arrays of shape (n, tokens), optional
        True for tokens of X and of Z that exist.
    device : None, "cpu" or "cuda"
        Where to compute; None computes where X is.
    query : {"first", "mean", "last", "none"}
        Which token is the query, as in `RandomFeatureAttention`.

    Returns
    -------
    array of shape (n, n) or (n, examples of Z)
        The kernel matrix in float64, of the kind and on the device of X.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid, or X and Z do not fit together.

    Examples
    --------
    >>> from sklearn.svm import SVR
    >>> from onelayer import inputs
    >>> X = inputs.sphere(60, tokens=5, dim=4)
    >>> y = X[:, 1:, 0].mean(axis=1)
    >>> machine = SVR(kernel="precomputed", epsilon=0.01).fit(attention_kernel(X[:40]), y[:40])
    >>> machine.predict(attention_kernel(X[40:], X[:40])).shape
    (20,)
    """
    backend.check_device(device)
    sets, others = _checked_sides(X, mask, Z, Z_mask, queries.rules(query, "X"))
    return _matrix(attention_kernel_for(bias, query, sets), sets, others, device)


def mlp_kernel(
    X: Any, Z: Any = None, mask: Any = None, Z_mask: Any = None, device: str | None = None
) -> Array:
    """Kernel of infinitely many random neurons that read all tokens in a row.

        K(x, x') = E[relu(⟨w, z⟩) relu(⟨w, z'⟩)],    z = vec(x_0, .., x_N, 1), w from N(0, I/(N+2))

    is the limit of Φ(x) Φ(x')ᵀ for the features of `RandomFeatureMLP`. N is the largest number of
    keys of an example; missing tokens are zeros.

    Parameters
    ----------
    X, Z, mask, Z_mask, device
        As in `attention_kernel`.

    Returns
    -------
    array of shape (n, n) or (n, examples of Z)
        As for `attention_kernel`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid, or X and Z do not fit together.

    Examples
    --------
    >>> from onelayer import inputs
    >>> X = inputs.sphere(3, tokens=5, dim=4)
    >>> mlp_kernel(X).diagonal()  # half the variance, which is 1 on the unit sphere
    array([0.5, 0.5, 0.5])
    """
    backend.check_device(device)
    sets, others = _checked_sides(X, mask, Z, Z_mask, SetRules(least_tokens=1))
    tokens = sets.longest if others is None else max(sets.longest, others.longest)
    return _matrix(MLPKernel(tokens, activations.get("relu")), sets, others, device)


def attention_kernel_for(bias: Any, query: Any, sets: Sets) -> AttentionKernel:
    """The kernel that a user's parameters describe, for examples like `sets`."""
    matrix = bias_matrix(validation.as_bias(bias), PositionalEncoding(None, sets.dim, sets.longest))
    relu = activations.get("relu")
    return AttentionKernel(matrix if matrix.any() else None, queries.checked(query), relu)


def _matrix(kernel: Kernel, sets: Sets, others: Sets | None, device: str | None) -> Array:
    placed = sets.placed(device)
    matrix = base.matrix(kernel, placed, None if others is None else others.placed(device))
    validation.check_no_overflow(matrix, "kernels", placed)
    return backend.as_device(matrix, sets.sample)


def _checked_sides(
    X: Any, mask: Any, Z: Any, Z_mask: Any, rules: SetRules
) -> tuple[Sets, Sets | None]:
    sets = _checked(X, mask, rules)
    if Z is None:
        if Z_mask is not None:
            raise ValueError("Z_mask was given without Z, expected examples Z for a mask of theirs")
        return sets, None
    others = _checked(Z, Z_mask, replace(rules, name="Z"))
    if others.dim != sets.dim:
        raise ValueError(f"Z has tokens of dimension {others.dim}, expected {sets.dim} as X has")
    return sets, others


def _checked(X: Any, mask: Any, rules: SetRules) -> Sets:
    check = partial(check_array, dtype=np.float64, input_name=rules.name)
    return validation.as_sets(X, mask, rules, lambda rows: check(validation.in_numpy(rows)))
