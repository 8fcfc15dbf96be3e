"""What all estimators share: from what users give, wherever it lives, to sets and coefficients.

`ridge_problem`, `examples_to_test` and `solve` are what learning curves use of an estimator.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.callback import with_callbacks
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted, validate_data

from onelayer.array import backend
from onelayer.array.backend import Array, NumpyArray
from onelayer.data import sources
from onelayer.data.sets import SetRules, Sets
from onelayer.data.sources import Source
from onelayer.data.standardization import Standardization
from onelayer.features import examples, progress, queries, validation
from onelayer.features.examples import ChunkReader, ExamplesSummary, GivenExamples, OfSets
from onelayer.features.models import Predictor, RidgeModel, RidgeProblem
from onelayer.features.solvers.intercept import RidgeSolution

if TYPE_CHECKING:

    class CallbackSupportMixin:
        """What callbacks add to an estimator; type information for scikit-learn lacks it."""

        def set_callbacks(self, *callbacks: Any) -> Self: ...

else:
    from sklearn.callback import CallbackSupportMixin


class SetEstimator(BaseEstimator):
    """An estimator that reads sets of tokens; `_standard` is their standardization, or None."""

    _to_numpy = False  # whether tensors are converted
    _labels = False  # whether y are labels of classes

    n_features_in_: int

    def _rules(self, name: str) -> SetRules:
        return queries.rules(self.query, name)

    def _given(
        self,
        X: Any,
        mask: Any,
        y: Any = None,
        sample_weight: Any = None,
        reset: bool = False,
        name: str = "X",
    ) -> GivenExamples:
        """What users give; in memory X is checked, else its form."""
        reader = ChunkReader(self._rules(name), self._to_numpy, self._labels)
        if sources.is_streamed(X):
            given = examples.streamed(X, mask, y, sample_weight, reader, self.device)
            validation.check_dim(self, given.form.tokens, given.form.dim, reset, name)
            return given
        X, mask = validation.in_numpy(X) if self._to_numpy else X, validation.here(mask, "mask")
        check_rows = partial(validate_data, self, reset=reset, dtype=[np.float64, np.float32])
        sets = validation.as_sets(X, mask, reader.rules, check_rows)
        validation.check_dim(self, X, sets.dim, reset, name)
        return examples.in_memory(sets, y, sample_weight, reader)

    def _learn(self, given: GivenExamples, first: int | None) -> ExamplesSummary:
        """Check all examples, and learn standardization from the first ones, from all for None."""
        seen, sample = given.summarize(first if self.standardize else 0), given.form.sample
        self._standard = None
        if seen.moments is not None:
            self._standard = Standardization.learned(seen.moments, backend.epsilon(sample))
            self.X_offset_: Array = backend.as_device(self._standard.offset, sample)
            self.X_scale_: Array = backend.as_device(self._standard.scale, sample)
        return seen

    def _apply(self, work: OfSets, fitted: Array, X: Any, mask: Any, method: str) -> Any:
        """`work` of X, wherever X lives; X must be of the kind of the fitted array."""
        given = self._given(X, mask)
        validation.check_same_place(self, method, given.form, fitted)
        return given.apply(work, self._standard)

    def _forget(self) -> None:
        """Drop fitted attributes, which a fit that fails would otherwise keep."""
        learned = ("coef_", "dual_coef_", "intercept_", "classes_", "alpha_", "n_features_out_")
        for name in (*learned, "X_offset_", "X_scale_"):
            self.__dict__.pop(name, None)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.array_api_support = True
        return tags


class RidgeEstimator(CallbackSupportMixin, SetEstimator, ABC):
    """An estimator fitted by ridge regression; subclasses define `_draw`.

    `_keep` stores coefficients (rows, targets) as a public attribute, and `_kept` returns them.
    """

    _all_in_memory = False  # whether the model needs all examples at once

    classes_: Array  # of classifiers

    @abstractmethod
    def _draw(self, sets: Sets) -> RidgeModel:
        """The model that the parameters describe, for examples like `sets`."""

    def _keep(self, coefficients: Array, flat: bool) -> None:
        self.coef_: Array = coefficients[:, 0] if flat else coefficients.T

    def _kept(self) -> Array:
        check_is_fitted(self, "coef_")
        return self.coef_[:, None] if self.coef_.ndim == 1 else self.coef_.T

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> Self:
        """Fit the model.

        Parameters
        ----------
        X : array (n, tokens, dim), list of arrays (tokens, dim), or array (n, dim)
            Examples, in any form and place that `RandomFeatureAttention` takes.
        y : array of shape (n,) or (n, targets)
            The targets; for a classifier labels of shape (n,).
        sample_weight : float or array of shape (n,), optional
            Weights of the examples.
        mask : array of shape (n, tokens), optional
            True for the tokens of X that exist.

        Returns
        -------
        self
            The estimator, fitted.

        Raises
        ------
        TypeError, ValueError
            If a parameter of the estimator, the examples or the targets are not valid.

        Examples
        --------
        >>> import onelayer as ol
        >>> X = ol.inputs.sphere(300, tokens=5, dim=4)
        >>> y = X[:, 1:, 0].mean(axis=1)
        >>> model = ol.RandomFeatureAttention(heads=100, random_state=0).fit(X[:200], y[:200])
        >>> model.coef_.shape
        (500,)
        """
        self._forget()
        problem = ridge_problem(self, X, y, mask, sample_weight, first=None)
        self._model, (found,) = solve(self, problem, [len(problem)], "fit")
        coefficients = found.coefficients
        validation.check_no_overflow(coefficients, "features", problem.sets, problem.largest)
        self._flat = problem.flat
        alpha = float(found.alphas[0]) if problem.flat else found.alphas
        self.alpha_: float | NumpyArray = alpha
        intercept = float(found.intercept[0]) if problem.flat else found.intercept
        self.intercept_: float | Array = intercept
        self._keep(coefficients, problem.flat)
        return self

    def predict(self, X: Any, mask: Any = None) -> Array:
        """Predict the targets of examples; for a classifier their labels.

        Parameters
        ----------
        X : array (n, tokens, dim), list of arrays (tokens, dim), or array (n, dim)
            Examples, in any form and place that `RandomFeatureAttention` takes.
        mask : array of shape (n, tokens), optional
            True for the tokens of X that exist.

        Returns
        -------
        array of shape (n,) or (n, targets)
            Predictions, of the kind and in the place of X; for a classifier labels of shape (n,).

        Raises
        ------
        NotFittedError
            If `fit` was not called.
        TypeError, ValueError
            If the examples are not valid, or not of the kind that the estimator was fitted to.

        Examples
        --------
        >>> import onelayer as ol
        >>> X = ol.inputs.sphere(300, tokens=5, dim=4)
        >>> y = X[:, 1:, 0].mean(axis=1)
        >>> model = ol.RandomFeatureAttention(heads=100, random_state=0).fit(X[:200], y[:200])
        >>> bool(abs(model.predict(X[200:]) - y[200:]).max() < 0.1)
        True
        """
        predictor = self._predictor()
        return self._apply(predictor, predictor.coefficients, X, mask, "predict")

    def _predictor(self) -> Predictor:
        """What was fitted, as a function of sets."""
        coefficients = self._kept()  # raises if the estimator is not fitted
        intercept = self.intercept_
        intercept = intercept * backend.ones((1,), coefficients) if self._flat else intercept
        classes = self.classes_ if self._labels else None
        return Predictor(self._model, coefficients, intercept, self._flat, self.device, classes)

    def _score(
        self, metric: Callable[..., float], X: Any, y: Any, sample_weight: Any, mask: Any
    ) -> float:
        predictor = self._predictor()
        validation.refuse_none(y, "y")
        given = self._given(X, mask, y, sample_weight)
        validation.check_same_place(self, "score", given.form, predictor.coefficients)
        return metric(given, predictor, self._standard)


def ridge_problem(
    estimator: RidgeEstimator, X: Any, y: Any, mask: Any, sample_weight: Any, first: int | None
) -> RidgeProblem:
    """Checked parameters and examples of a fit; tokens are standardized by the first examples."""
    alpha = validation.as_alpha(estimator.alpha)
    fit_intercept = validation.as_flag(estimator.fit_intercept, "fit_intercept")
    validation.as_flag(estimator.standardize, "standardize")
    backend.check_device(estimator.device)
    validation.refuse_none(y, "y")
    given = estimator._given(X, mask, y, sample_weight, reset=True)
    seen = estimator._learn(given, first)
    if estimator._labels:
        if len(seen.labels) < 2:
            raise ValueError(
                f"y has one class, {seen.labels.tolist()[0]!r}, "
                "expected a number of classes greater than one"
            )
        numeric = np.issubdtype(seen.labels.dtype, np.number)  # other labels stay in numpy
        sample = given.form.sample
        estimator.classes_ = backend.as_device(seen.labels, sample) if numeric else seen.labels
    rows, flat = given.rows(seen, estimator._standard), seen.target_shape == ()
    return RidgeProblem(rows, flat, alpha, fit_intercept, estimator.device)


def examples_to_test(estimator: RidgeEstimator, X: Any, y: Any, mask: Any, name: str) -> Source:
    """Checked examples in the form of `RidgeProblem.examples`, standardized as at fit."""
    validation.refuse_none(y, name.replace("X", "y"))
    given = estimator._given(X, mask, y, name=name)
    return given.rows(given.summarize(), estimator._standard)


@with_callbacks
def solve(
    estimator: RidgeEstimator, problem: RidgeProblem, sizes: list[int], task: str
) -> tuple[RidgeModel, list[RidgeSolution]]:
    """Draw the model, and fit it to the first examples of every sample size."""
    problem = problem.first(sizes[-1], in_memory=estimator._all_in_memory)
    model = estimator._draw(problem.sets)
    with progress.reporting(estimator, task) as track:
        return model, model.solve(problem, sizes, track)
