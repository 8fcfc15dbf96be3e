"""The door of the estimators: what X, y, weights and parameters may be."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d, validate_data

from onelayer import arrays, blocks, checks
from onelayer.arrays import Array
from onelayer.random_features import sets as sets_module
from onelayer.random_features.ridge import Alpha
from onelayer.random_features.sets import Sets


def as_sets(
    estimator: Any, X: Any, mask: Any, reset: bool, single: int = 2, name: str = "X"
) -> Sets:
    """X in any of its forms, checked against what the estimator was fitted on unless `reset`.

    A row of a two-dimensional X is one token and counts as `single` tokens.
    """
    sets_module.refuse_masked_array(X, name)
    if sets_module.is_collection_of_sets(X):
        found = sets_module.as_sets(X, mask, least_tokens=single, name=name)
    else:
        refuse_mask_of_rows(mask)
        if not arrays.is_foreign(X) or X.ndim != 2 or 0 in X.shape:
            rows = validate_data(estimator, X, reset=reset, dtype=[np.float64, np.float32])
            return sets_module.single_tokens(rows, single)
        found = sets_module.single_tokens(arrays.as_real(X, name), single)
    # What scikit-learn would refuse or convert is checked already: this keeps names of features.
    validate_data(estimator, X, reset=reset, skip_check_array=True, ensure_2d=False)
    if reset:
        estimator.n_features_in_ = found.dim
    elif found.dim != estimator.n_features_in_:
        expected = estimator.n_features_in_
        raise ValueError(
            f"{name} has tokens of dimension {found.dim}, expected {expected} as at fit"
        )
    return found


def refuse_mask_of_rows(mask: Any) -> None:
    """A row of a two-dimensional X is one token: it has nothing to leave out."""
    if mask is not None:
        raise ValueError("mask was given with two-dimensional X, expected X of three axes")


def in_numpy(X: Any) -> Any:
    """X with all its arrays in numpy."""
    if isinstance(X, list | tuple):
        return [arrays.to_numpy(x) if arrays.is_foreign(x) else x for x in X]
    return arrays.to_numpy(X) if arrays.is_foreign(X) else X


def check_same_place(estimator: Any, method: str, examples: Sets, fitted: Array) -> None:
    """Refuse examples of another kind or device than at fit, as scikit-learn does."""
    got, expected = [
        (arrays.namespace(array).__name__.rpartition(".")[2], arrays.device(array))
        for array in (examples.sample, fitted)
    ]
    if got != expected:
        raise ValueError(
            f"Inputs passed to {type(estimator).__name__}.{method}() must use the same namespace "
            f"and device as those passed to fit(): got {got[0]} on {got[1]}, "
            f"expected {expected[0]} on {expected[1]}"
        )


def as_targets(y: Any, examples: Sets, name: str = "y") -> Array:
    """y (n,) or (n, t) in float64, in the namespace of the examples."""
    _refuse_none(y, name)
    if arrays.is_foreign(y):
        targets = arrays.as_real(y, name)
    else:
        targets = check_array(y, dtype=np.float64, ensure_2d=False, input_name=name)
    if targets.ndim not in (1, 2):
        raise ValueError(f"{name} has shape {tuple(targets.shape)}, expected (n,) or (n, targets)")
    _check_rows(targets, examples, name)
    return arrays.double(arrays.beside(arrays.detached(targets), examples.sample))


def as_classes(y: Any, examples: Sets) -> tuple[Array, np.ndarray[Any, Any]]:
    """The classes of y (n,), and the index of every example's class.

    Numbers follow X into its namespace; labels of other kinds stay in numpy.
    """
    _refuse_none(y, "y")
    labels = column_or_1d(arrays.to_numpy(y) if arrays.is_array(y) else y, warn=True)
    _check_rows(labels, examples, "y")
    if labels.dtype.kind == "f":
        arrays.check_finite(labels, "y")
    check_classification_targets(labels)
    classes, index = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(
            f"y has one class, {classes.tolist()[0]!r}, "
            "expected a number of classes greater than one"
        )
    if not np.issubdtype(classes.dtype, np.number):
        return classes, index
    return arrays.beside(classes, examples.sample), index


def _refuse_none(y: Any, name: str) -> None:
    if y is None:  # in scikit-learn's words
        raise ValueError(
            f"This estimator requires {name} to be passed, but the target {name} is None."
        )


def _check_rows(y: Array, examples: Sets, name: str) -> None:
    if y.shape[0] != len(examples):
        raise ValueError(
            f"{name} has {y.shape[0]} rows, expected {len(examples)}: one for each example"
        )


def check_no_overflow(values: Array, what: str, examples: Sets) -> None:
    """Refuse tokens so large that what is computed from them has no place in its dtype."""
    if arrays.is_finite(values):
        return
    xp = arrays.namespace(values)
    parts = blocks.slices(len(examples), 8 * examples.longest * examples.dim)
    largest = max(float(xp.max(xp.abs(examples.block(part)[0]))) for part in parts)
    raise ValueError(
        f"{what} overflow in {examples.sample.dtype}: X has entries up to {largest:.3g}, "
        "expected tokens of about unit norm"
    )


def as_row_scale(sample_weight: Any, examples: Sets) -> Array | None:
    """The root of the weights: rows times it make weighted least squares plain ones."""
    if sample_weight is None:
        return None
    n = len(examples)
    if isinstance(sample_weight, numbers.Real):
        sample_weight = np.full(n, float(sample_weight))
    weight = arrays.detached(arrays.as_real(sample_weight, "sample_weight"))
    weight = arrays.beside(weight, examples.sample)
    xp = arrays.namespace(weight)
    if tuple(weight.shape) != (n,):
        raise ValueError(f"sample_weight has shape {tuple(weight.shape)}, expected {(n,)}")
    if float(xp.min(weight)) < 0:
        raise ValueError(
            f"sample_weight has entries down to {float(xp.min(weight)):g}, expected none below 0"
        )
    if float(xp.max(weight)) == 0:
        raise ValueError("sample_weight is zero throughout, expected a positive weight")
    return xp.astype(xp.sqrt(weight), examples.sample.dtype, copy=False)


def as_alpha(alpha: Any) -> Alpha:
    """A penalty of at least 0, or None for "loo"."""
    if isinstance(alpha, str) and alpha == "loo":
        return None
    message = f"alpha is {alpha!r}, expected a finite number of at least 0, or 'loo'"
    if isinstance(alpha, bool) or not isinstance(alpha, numbers.Real | str):
        raise TypeError(message)
    if isinstance(alpha, str) or not 0 <= float(alpha) < math.inf:
        raise ValueError(message)
    return float(alpha)


def as_bias(bias: Any) -> Any:
    """W_0: a finite number, or a square matrix of them."""
    if bias is None or isinstance(bias, str):
        raise TypeError(f"bias is {bias!r}, expected a number or a square matrix")
    if isinstance(bias, numbers.Real):
        if not math.isfinite(bias):
            raise ValueError(f"bias is {bias!r}, expected a finite number or a matrix")
        return float(bias)
    matrix = arrays.to_numpy(arrays.as_real(bias, "bias"))
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"bias has shape {matrix.shape}, expected a number or a square matrix")
    return matrix


def as_sizes(sizes: Any, examples: Sets) -> list[int]:
    """Sample sizes, which ascend from at least 1 to at most the number of examples."""
    if not isinstance(sizes, Iterable) or isinstance(sizes, str):
        raise TypeError(f"sizes is {sizes!r}, expected a list of whole numbers")
    whole = [checks.positive_int(size, "a size") for size in sizes]
    if not whole or any(a >= b for a, b in pairwise(whole)):
        raise ValueError(f"sizes are {whole}, expected at least one, in ascending order")
    if whole[-1] > len(examples):
        raise ValueError(
            f"sizes go up to {whole[-1]}, expected at most {len(examples)}, the examples of X"
        )
    return whole


def generator(random_state: Any) -> np.random.Generator:
    """The generator behind a scikit-learn `random_state`, or a generator itself."""
    if isinstance(random_state, np.random.RandomState):
        return np.random.default_rng(random_state.randint(2**31))
    try:
        return np.random.default_rng(random_state)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"random_state is {random_state!r}, expected None, a whole number of at least 0, "
            "or a numpy Generator or RandomState"
        ) from error
