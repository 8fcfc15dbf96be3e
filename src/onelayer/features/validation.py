"""The door of the estimators: what X, y, weights and parameters may be."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sized
from itertools import pairwise
from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d, validate_data

from onelayer.array import backend, checks
from onelayer.array.backend import Array
from onelayer.data import sets as sets_module
from onelayer.data import sources
from onelayer.data.sets import Sets
from onelayer.features.solvers.ridge import Alpha


def as_sets(
    estimator: Any,
    X: Any,
    mask: Any,
    reset: bool,
    single: int = 2,
    name: str = "X",
    first: bool = True,
) -> Sets:
    """X in any of its forms, checked against what the estimator was fitted on unless `reset`.

    A row of a two-dimensional X is one token and counts as `single` tokens. With `first` a mask is
    to leave token 0.
    """
    sets_module.refuse_masked_array(X, name)
    sources.refuse_generator(X, name)
    if sets_module.is_collection_of_sets(X):
        found = sets_module.as_sets(X, mask, least_tokens=single, name=name, first=first)
    else:
        refuse_mask_of_rows(mask)
        if not backend.is_foreign(X) or X.ndim != 2 or 0 in X.shape:
            rows = validate_data(estimator, X, reset=reset, dtype=[np.float64, np.float32])
            return sets_module.single_tokens(rows, single)
        found = sets_module.single_tokens(backend.as_real(X, name), single)
    check_dim(estimator, X, found.dim, reset, name)
    return found


def check_dim(estimator: Any, X: Any, dim: int, reset: bool, name: str) -> None:
    """Keep the dimension of tokens if `reset`, else refuse another than at fit."""
    # What scikit-learn would refuse or convert is checked already: this keeps names of features.
    validate_data(estimator, X, reset=reset, skip_check_array=True, ensure_2d=False)
    if reset:
        estimator.n_features_in_ = dim
    elif dim != estimator.n_features_in_:
        expected = estimator.n_features_in_
        raise ValueError(f"{name} has tokens of dimension {dim}, expected {expected} as at fit")


def here(value: Any, name: str) -> Any:
    """What belongs to examples in memory, brought here if it is elsewhere."""
    if not sources.is_streamed(value):
        return value
    found = sources.source({name: value})
    return found.first(len(found))[0]


def refuse_mask_of_rows(mask: Any) -> None:
    """A row of a two-dimensional X is one token: it has nothing to leave out."""
    if mask is not None:
        raise ValueError("mask was given with two-dimensional X, expected X of three axes")


def in_numpy(X: Any) -> Any:
    """X with all its arrays in numpy."""
    if isinstance(X, list | tuple):
        return [backend.to_numpy(x) if backend.is_foreign(x) else x for x in X]
    return backend.to_numpy(X) if backend.is_foreign(X) else X


def check_same_place(estimator: Any, method: str, examples: Sets, fitted: Array) -> None:
    """Refuse examples of another kind or device than at fit, as scikit-learn does."""
    got, expected = [
        (backend.namespace(array).__name__.rpartition(".")[2], backend.device(array))
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
    refuse_none(y, name)
    backend.refuse_masked(y, name)
    if backend.is_foreign(y):
        targets = backend.as_real(y, name)
    else:
        targets = check_array(y, dtype=np.float64, ensure_2d=False, input_name=name)
    if targets.ndim not in (1, 2):
        raise ValueError(f"{name} has shape {tuple(targets.shape)}, expected (n,) or (n, targets)")
    _check_rows(targets, examples, name)
    return backend.double(backend.as_device(backend.detached(targets), examples.sample))


def columns(targets: Array, row_scale: Array | None) -> Array:
    """Targets (n,) or (n, t) as (n, t), rows times their scale."""
    found = targets if targets.ndim == 2 else targets[:, None]
    return found if row_scale is None else found * row_scale[:, None]


def as_classes(y: Any, examples: Sets) -> tuple[Array, np.ndarray[Any, Any]]:
    """The classes of y (n,), and the index of every example's class."""
    labels = as_labels(y, examples)
    check_classification_targets(labels)
    classes, index = np.unique(labels, return_inverse=True)
    return several_classes(classes, examples), index


def as_labels(y: Any, examples: Sets) -> np.ndarray[Any, Any]:
    """y (n,) in numpy, one label of any kind for each example."""
    refuse_none(y, "y")
    labels = column_or_1d(backend.to_numpy(y) if backend.is_array(y) else y, warn=True)
    _check_rows(labels, examples, "y")
    if labels.dtype.kind == "f":
        backend.check_finite(labels, "y")
    found: np.ndarray[Any, Any] = labels
    return found


def several_classes(classes: np.ndarray[Any, Any], examples: Sets) -> Array:
    """The classes, two at least: numbers follow X into its namespace, others stay in numpy."""
    if len(classes) < 2:
        raise ValueError(
            f"y has one class, {classes.tolist()[0]!r}, "
            "expected a number of classes greater than one"
        )
    if not np.issubdtype(classes.dtype, np.number):
        return classes
    return backend.as_device(classes, examples.sample)


def one_hot(index: np.ndarray[Any, Any], count: int, examples: Sets) -> Array:
    """+1 for the class of an example and -1 for others, (n, count), or (n,) for two classes."""
    hot = 2.0 * np.eye(count)[index] - 1.0
    return backend.like(hot[:, 1] if count == 2 else hot, backend.double(examples.sample))


def refuse_none(y: Any, name: str) -> None:
    """An estimator wants to know what to learn."""
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
    if not backend.is_finite(values):
        raise overflow(what, examples, examples.largest())


def overflow(what: str, examples: Sets, largest: float) -> ValueError:
    """The complaint that something overflows on examples with entries up to `largest`."""
    return ValueError(
        f"{what} overflow in {examples.sample.dtype}: X has entries up to {largest:.3g}, "
        "expected tokens of about unit norm"
    )


def as_row_scale(sample_weight: Any, examples: Sets) -> Array | None:
    """The root of the weights: rows times it make weighted least squares plain ones."""
    if sample_weight is None:
        return None
    weights = as_weights(sample_weight, examples)
    check_some_weight(backend.largest(weights))
    return row_scale(weights, examples)


def as_weights(sample_weight: Any, examples: Sets) -> Array:
    """Weights (n,) of at least 0, from a number or an array, in the namespace of the examples."""
    n = len(examples)
    if isinstance(sample_weight, numbers.Real):
        sample_weight = np.full(n, float(sample_weight))
    weight = backend.detached(backend.as_real(sample_weight, "sample_weight"))
    weight = backend.as_device(weight, examples.sample)
    xp = backend.namespace(weight)
    if tuple(weight.shape) != (n,):
        raise ValueError(f"sample_weight has shape {tuple(weight.shape)}, expected {(n,)}")
    if float(xp.min(weight)) < 0:
        raise ValueError(
            f"sample_weight has entries down to {float(xp.min(weight)):g}, expected none below 0"
        )
    return weight


def check_some_weight(largest: float) -> None:
    """Refuse weights that leave no example."""
    if largest == 0:
        raise ValueError("sample_weight is zero throughout, expected a positive weight")


def row_scale(weights: Array, examples: Sets) -> Array:
    """The root of the weights (n,), in the dtype of the examples."""
    xp = backend.namespace(weights)
    return xp.astype(xp.sqrt(weights), examples.sample.dtype, copy=False)


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


def as_flag(value: Any, name: str) -> bool:
    """True or False, of Python or numpy."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}, expected True or False")
    return bool(value)


def as_bias(bias: Any) -> Any:
    """W_0: a finite number, or a square matrix of them."""
    if bias is None or isinstance(bias, str):
        raise TypeError(f"bias is {bias!r}, expected a number or a square matrix")
    if isinstance(bias, numbers.Real):
        if not math.isfinite(bias):
            raise ValueError(f"bias is {bias!r}, expected a finite number or a matrix")
        return float(bias)
    matrix = backend.to_numpy(backend.as_real(bias, "bias"))
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"bias has shape {matrix.shape}, expected a number or a square matrix")
    return matrix


def as_sizes(sizes: Any) -> list[int]:
    """Sample sizes, which ascend from at least 1."""
    if not isinstance(sizes, Iterable) or isinstance(sizes, str):
        raise TypeError(f"sizes is {sizes!r}, expected a list of whole numbers")
    whole = [checks.positive_int(size, "a size") for size in sizes]
    if not whole or any(a >= b for a, b in pairwise(whole)):
        raise ValueError(f"sizes are {whole}, expected at least one, in ascending order")
    return whole


def check_enough(sizes: list[int], examples: Sized) -> None:
    """Refuse sample sizes beyond the number of examples."""
    if sizes[-1] > len(examples):
        raise ValueError(
            f"sizes go up to {sizes[-1]}, expected at most {len(examples)}, the examples of X"
        )


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
