"""Learning curves: test errors at many sample sizes, from one factorization where possible."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from sklearn.base import clone

from onelayer import plotting
from onelayer.array import backend, checks
from onelayer.array.backend import NumpyArray
from onelayer.data.chunks import Chunk
from onelayer.data.sources import Source
from onelayer.features import base, scores, validation
from onelayer.features.estimators import Regressor
from onelayer.features.models import RidgeModel
from onelayer.features.scores import TargetSpread
from onelayer.features.solvers.intercept import RidgeSolution
from onelayer.plotting import Axes
from onelayer.summary import Summary, number


@dataclass(frozen=True, repr=False)
class LearningCurve:
    """Test errors of an estimator at several sample sizes, from `learning_curve`.

    `print(curve)` shows a table; a notebook shows the same.

    Attributes
    ----------
    sizes : array of shape (sizes,)
        The sample sizes.
    test_error : array of shape (sizes, targets)
        Mean squared errors relative to the variance of each target.
    alpha : array of shape (sizes, targets)
        The penalties used.

    Examples
    --------
    >>> curve = LearningCurve(np.array([10, 100]), np.array([[1.0], [0.01]]), np.ones((2, 1)))
    >>> curve
    LearningCurve: 1 target, errors relative to its variance
      examples  test error  alpha
            10           1      1
           100        0.01      1
    """

    sizes: NumpyArray
    test_error: NumpyArray
    alpha: NumpyArray

    def samples_needed(self, error: float) -> NumpyArray:
        """Sample size at which the error of each target first falls to `error`.

        Parameters
        ----------
        error : float
            The error to reach.

        Returns
        -------
        array of shape (targets,)
            Sizes, by interpolation as a power of the size; infinity if the error stays above.

        Raises
        ------
        TypeError, ValueError
            If the error is not a finite number above 0.

        Examples
        --------
        >>> curve = LearningCurve(np.array([10, 100]), np.array([[1.0], [0.01]]), np.ones((2, 1)))
        >>> curve.samples_needed(0.1).round(6)
        array([31.622777])
        """
        level = checks.positive_number(error, "error")
        sizes, needed = self.sizes, np.full(self.test_error.shape[1], np.inf)
        for target, errors in enumerate(self.test_error.T):
            below = np.flatnonzero(errors <= level)
            if below.size > 0:
                i = below[0]
                needed[target] = sizes[i]
                if i > 0 and errors[i] > 0:
                    steepness = np.log(errors[i - 1] / level) / np.log(errors[i - 1] / errors[i])
                    needed[target] = sizes[i - 1] * (sizes[i] / sizes[i - 1]) ** steepness
        return needed

    def __repr__(self) -> str:
        return self._summary().text()

    def _repr_html_(self) -> str:
        return self._summary().html()

    def _summary(self) -> Summary:
        targets = self.test_error.shape[1]
        title = "1 target, errors relative to its variance"
        columns = ["examples", "test error", "alpha"]
        if targets > 1:
            title = f"{targets} targets, errors relative to their variance"
            columns = ["examples", *(f"error {i}" for i in range(targets))]
        values = np.hstack([self.test_error, self.alpha][: 1 if targets > 1 else 2])
        rows = [
            (str(size), *map(number, row))
            for size, row in zip(self.sizes.tolist(), values.tolist(), strict=True)
        ]
        return Summary(f"LearningCurve: {title}", {}, columns, rows)

    def plot(self, ax: Axes | None = None, label: str | None = None) -> Axes:
        """Draw the test error of every target against the sample size, on logarithmic scales.

        Parameters
        ----------
        ax : matplotlib axes, optional
            Where to draw; axes of a new figure if None. Curves in axes that have curves already
            get other colours and markers.
        label : str, optional
            Name of the curve in the legend, such as that of the estimator. Several targets are
            numbered. Without a label, one target has no legend.

        Returns
        -------
        matplotlib axes

        Raises
        ------
        ImportError
            If matplotlib is not installed.

        Examples
        --------
        >>> curve = LearningCurve(np.array([10, 100]), np.array([[1.0], [0.01]]), np.ones((2, 1)))
        >>> ax = curve.plot(label="attention")
        >>> ax.get_xlabel(), ax.get_xscale()
        ('examples', 'log')
        """
        ax = plotting.axes_or_new(ax)
        several, first = self.test_error.shape[1] > 1, len(ax.lines)
        for target, errors in enumerate(self.test_error.T):
            colour, marker = plotting.style(first + target)
            name = " ".join([label or ""] + [f"target {target}"] * several).strip() or None
            ax.plot(self.sizes, errors, color=colour, marker=marker, ms=4, label=name)
        ax.set(xscale="log", yscale="log", xlabel="examples", ylabel="test error / variance")
        if ax.get_legend_handles_labels()[1]:
            plotting.legend_beside(ax)
        return ax


def learning_curve(
    estimator: Regressor,
    X: Any,
    y: Any,
    X_test: Any,
    y_test: Any,
    sizes: Sequence[int],
    *,
    mask: Any = None,
    mask_test: Any = None,
) -> LearningCurve:
    """Test errors of an estimator fitted to the first s examples, for many sample sizes s.

    The error is the mean squared error over the variance of the target on the test set: the best
    constant has error 1. Features are drawn once, so the result is that of fitting at every size
    with the same `random_state` (if the longest set is among the first examples, where features
    depend on it).

    Parameters
    ----------
    estimator : RandomFeatureAttention, RandomFeatureMLP or AttentionKernelRidge
        It is cloned, not changed; its callbacks report progress. With `standardize=True` tokens
        are centred and scaled once, by the examples of the largest size.
    X, y, X_test, y_test : examples and targets
        In any form and place that the estimator takes; y is (n,) or (n, targets).
    sizes : list of int
        The sample sizes, in ascending order, each at least 1 and at most that of X.
    mask, mask_test : arrays of shape (n, tokens), optional
        True for tokens that exist.

    Returns
    -------
    LearningCurve
        Sizes, test errors and penalties.

    Raises
    ------
    TypeError, ValueError
        If the estimator is another one, an argument is not valid, or a target of the test set does
        not vary.

    Examples
    --------
    >>> import onelayer as ol
    >>> X = ol.inputs.sphere(400, tokens=5, dim=4)
    >>> y = X[:, 1:, 0].mean(axis=1)
    >>> model = ol.RandomFeatureAttention(heads=100, random_state=0)
    >>> learning_curve(model, X[:200], y[:200], X[200:], y[200:], sizes=[25, 200]).test_error.shape
    (2, 1)
    """
    if not isinstance(estimator, Regressor):
        raise TypeError(
            f"estimator is a {type(estimator).__name__}, expected RandomFeatureAttention, "
            "RandomFeatureMLP or AttentionKernelRidge"
        )
    model = clone(estimator)
    checked = validation.as_sizes(sizes)
    problem = base.ridge_problem(model, X, y, mask, None, first=checked[-1])
    if checked[-1] > len(problem):
        raise ValueError(
            f"sizes go up to {checked[-1]}, expected at most {len(problem)}, the examples of X"
        )
    test = base.examples_to_test(model, X_test, y_test, mask_test, "X_test")
    variance = _variance(test, problem.examples.samples[1].shape[1])
    fitted, solutions = base.solve(model, problem, checked, "learning curve")
    errors = test.chunks.map(_squared_errors, fitted, solutions, problem.device)
    test_error = errors.reduce(operator.add) / len(test) / variance
    return LearningCurve(np.array(checked), test_error, np.stack([one.alphas for one in solutions]))


def _variance(test: Source, expected: int) -> NumpyArray:
    """The variance of each target, refused if it is zero or there are other targets than in y."""
    targets = test.samples[1].shape[1]
    if targets != expected:
        raise ValueError(f"y_test has {targets} targets, expected {expected} as y has")
    spread = test.chunks.map(_spread).reduce(operator.add)
    constant = (spread.most == spread.least) | (spread.squares == 0)  # either may underflow
    if constant.any():
        raise ValueError(
            f"y_test is constant in target {int(np.argmax(constant))}, expected targets that vary: "
            "errors are relative to their variance"
        )
    variance: NumpyArray = spread.squares / spread.weight
    return variance


def _spread(chunk: Chunk) -> TargetSpread:
    return scores.spread(backend.to_numpy(chunk.arrays[1]), np.ones(len(chunk)))


def _squared_errors(
    chunk: Chunk, model: RidgeModel, solutions: list[RidgeSolution], device: str | None
) -> NumpyArray:
    """The sums of squared errors over the test examples of a chunk, (sizes, targets)."""
    sets, targets, _ = chunk.arrays
    predictions = model.predict(sets, [one.coefficients for one in solutions], device)
    truth = backend.to_numpy(targets)
    squares = []
    for one, linear in zip(solutions, predictions, strict=True):
        wanted = truth - backend.to_numpy(one.intercept)
        squares.append(np.sum((backend.to_numpy(linear) - wanted) ** 2, axis=0))
    return np.stack(squares)
