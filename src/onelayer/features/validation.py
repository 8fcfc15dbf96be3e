"""Checks of X, y, weights and parameters of the estimators, for arrays in memory or one chunk."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import numpy as np
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, column_or_1d, validate_data

from onelayer import spelling
from onelayer.array import backend, checks
from onelayer.array.backend import Array, NumpyArray
from onelayer.data import sets as sets_module
from onelayer.data import sources
from onelayer.data.sets import SetRules, Sets


def as_sets(X: Any, mask: Any, rules: SetRules, check_rows: Callable[[Any], Any]) -> Sets:
    """X in memory, in any form; `check_rows` checks a two-dimensional X of single tokens."""
    rules.refuse_masked(X)
    sources.refuse_generator(X, rules.name)
    if sets_module.is_collection_of_sets(X):
        return sets_module.as_sets(X, mask, rules)
    if mask is not None:
        raise ValueError("mask was given with two-dimensional X, expected X of three axes")
    in_place = backend.is_foreign(X) and X.ndim == 2 and 0 not in X.shape
    rows = backend.as_real(X, rules.name) if in_place else check_rows(X)
    return sets_module.single_tokens(rows, rules.least_tokens)


def check_dim(estimator: Any, X: Any, dim: int, reset: bool, name: str) -> None:
    """Remember the dimension of tokens if `reset`, else refuse another than at fit."""
    # The entries of X are checked elsewhere; this checks and keeps the names of features.
    validate_data(estimator, X, reset=reset, skip_check_array=True, ensure_2d=False)
    if reset:
        estimator.n_features_in_ = dim
    elif dim != estimator.n_features_in_:
        expected = estimator.n_features_in_
        raise ValueError(f"{name} has tokens of dimension {dim}, expected {expected} as at fit")


def here(value: Any, name: str) -> Any:
    """A mask, targets or weights of examples in memory, collected if they are streamed."""
    if not sources.is_streamed(value):
        return value
    found = sources.source({name: value})
    return found.first(len(found))[0]


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
    backend.refuse_masked(y, name)
    if backend.is_foreign(y):
        targets = backend.as_real(y, name)
    else:
        targets = check_array(y, dtype=np.float64, ensure_2d=False, input_name=name)
    if targets.ndim not in (1, 2):
        raise ValueError(f"{name} has shape {tuple(targets.shape)}, expected (n,) or (n, targets)")
    _check_rows(targets, examples, name)
    return backend.double(backend.as_device(backend.detached(targets), examples.sample))


def as_labels(y: Any, examples: Sets, name: str = "y") -> NumpyArray:
    """y (n,) in numpy, one label of any kind for each example."""
    labels: NumpyArray = column_or_1d(backend.to_numpy(y) if backend.is_array(y) else y, warn=True)
    _check_rows(labels, examples, name)
    if labels.dtype.kind == "f":
        backend.check_finite(labels, name)
    check_classification_targets(np.repeat(np.unique(labels), 2))  # a chunk may have one of a class
    return labels


def refuse_none(y: Any, name: str) -> None:
    """Refuse missing targets, with the message of scikit-learn."""
    if y is None:
        raise ValueError(
            f"This estimator requires {name} to be passed, but the target {name} is None."
        )


def _check_rows(y: Array, examples: Sets, name: str) -> None:
    if y.shape[0] != len(examples):
        raise ValueError(
            f"{name} has {y.shape[0]} rows, expected {len(examples)}: one for each example"
        )


def check_no_overflow(
    values: Array, what: str, examples: Sets, largest: Callable[[], float] | None = None
) -> None:
    """Refuse tokens so large that values overflow; `largest` finds the largest entry of all."""
    if not backend.is_finite(values):
        entry = (largest or examples.largest)()
        raise ValueError(
            f"{what} overflow in {examples.sample.dtype}: X has entries up to {entry:.3g}, "
            "expected tokens of about unit norm"
        )


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
    """Refuse weights that are all zero."""
    if largest == 0:
        raise ValueError("sample_weight is zero throughout, expected a positive weight")


def as_alpha(alpha: Any) -> float | None:
    """A penalty of at least 0, or None for "loo"."""
    if isinstance(alpha, str) and alpha == "loo":
        return None
    message = f"alpha is {alpha!r}, expected a finite number of at least 0, or 'loo'"
    message += spelling.did_you_mean(alpha, ["loo"])
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
