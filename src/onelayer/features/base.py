"""What all estimators share: from what users give, wherever it is, to sets and coefficients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sklearn.base import BaseEstimator
from sklearn.callback import CallbackSupportMixin, with_callbacks
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.data import sources
from onelayer.data.sets import Sets
from onelayer.data.sources import Source
from onelayer.data.standardization import Moments, Standardization
from onelayer.features import progress, queries, streamed, validation
from onelayer.features.models import Model, Predictor, Problem
from onelayer.features.solvers.leave_one_out import Found
from onelayer.features.streamed import Given, Reader, Seen


def in_numpy_here(y: Any, sample_weight: Any) -> tuple[Any, Any]:
    """Targets and weights of examples in memory, for scikit-learn's scores."""
    truth, weight = validation.here(y, "y"), validation.here(sample_weight, "sample_weight")
    return validation.in_numpy(truth), weight


class SetEstimator(BaseEstimator):
    """What reads sets: X in memory or elsewhere, the query among its tokens, standardization.

    After a fit `_standard` has what standardization learned, or None.
    """

    _to_numpy = False  # whether tensors are converted
    _labels = False  # whether y are labels of classes

    @property
    def _least_tokens(self) -> int:
        """Of an example, and as how many a row of a two-dimensional X counts."""
        return queries.least_tokens(queries.checked(self.query))

    @property
    def _first(self) -> bool:
        """Whether a mask is to leave token 0."""
        return bool(self.query == "first")

    def _sets(self, X: Any, mask: Any, reset: bool, name: str = "X") -> Sets:
        """X in memory as it was given, checked."""
        X = validation.in_numpy(X) if self._to_numpy else X
        mask = validation.here(mask, "mask")
        return validation.as_sets(self, X, mask, reset, self._least_tokens, name, self._first)

    def _given(
        self,
        X: Any,
        mask: Any,
        y: Any = None,
        sample_weight: Any = None,
        reset: bool = False,
        name: str = "X",
    ) -> Given:
        """X elsewhere, of which only the form is checked."""
        standard = None if reset else self._standard
        least, first = self._least_tokens, self._first
        reader = Reader(least, self._to_numpy, self._labels, name, first=first, standard=standard)
        given = streamed.opened(X, mask, reader, self.device, y, sample_weight)
        form = given.form
        validation.check_dim(self, form.tokens, form.dim, reset, name)
        return given

    def _standardized(self, sets: Sets) -> Sets:
        """The same with the standardization that was learned."""
        return replace(sets, standard=self._standard)

    def _learn(self, sets: Sets, first: int | None, weight: Array | None = None) -> Sets:
        """The same with standardization by its first examples, by all for None."""
        self._keep_standard(None, sets.sample)
        if not self.standardize:
            return sets
        part = slice(0, first)
        seen = sets[part].moments(None if weight is None else weight[part])
        self._keep_standard(seen, sets.sample)
        return self._standardized(sets)

    def _look_and_learn(self, given: Given, first: int | None) -> tuple[Given, Seen]:
        """Examples elsewhere, checked throughout, with standardization by the first of them."""
        seen = given.look(first if self.standardize else 0)
        self._keep_standard(seen.moments, given.form.sample)
        return replace(given, reader=replace(given.reader, standard=self._standard)), seen

    def _keep_standard(self, seen: Moments | None, sample: Array) -> None:
        self._standard = None
        if seen is not None:
            standard = Standardization.learned(seen, backend.epsilon(sample))
            self._standard = standard
            self.X_offset_ = backend.as_device(standard.offset, sample)
            self.X_scale_ = backend.as_device(standard.scale, sample)

    def _forget(self) -> None:
        """Unlearn what was fitted: a fit that fails half-way is not to leave half of another."""
        learned = ("coef_", "dual_coef_", "intercept_", "classes_", "alpha_", "n_features_out_")
        for name in (*learned, "X_offset_", "X_scale_"):
            self.__dict__.pop(name, None)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.array_api_support = True
        return tags


class RidgeEstimator(CallbackSupportMixin, SetEstimator):
    """What all ridge estimators share; each supplies `_draw`.

    Coefficients are kept in `coef_`, (targets, features) as in scikit-learn, unless `_keep` and
    `_kept` say otherwise.
    """

    def _draw(self, sets: Sets) -> Model:
        raise NotImplementedError

    def _targets(self, y: Any, sets: Sets, name: str) -> Array:
        """y as numbers, (n,) or (n, t)."""
        return validation.as_targets(y, sets, name)

    def _with_labels(self, given: Given, seen: Seen) -> Given:  # noqa: ARG002 - classifiers do
        """Examples elsewhere whose targets can be read, after a look at all of them."""
        return given

    def _in_reach(self, problem: Problem) -> Problem:
        """The same with its examples where the model can solve it."""
        return problem

    def _examples(
        self,
        X: Any,
        y: Any,
        mask: Any,
        sample_weight: Any,
        reset: bool,
        name: str = "X",
        first: int | None = None,
    ) -> tuple[Source, bool]:
        """Checked examples in chunks, see `Problem`, and whether y had one axis.

        With `reset` standardization is learned from the first of them, from all for None.
        """
        y_name = name.replace("X", "y")
        if sources.is_streamed(X):
            validation.refuse_none(y, y_name)
            given = self._given(X, mask, y, sample_weight, reset, name)
            if reset:
                given, seen = self._look_and_learn(given, first)
            else:
                seen = given.look()
            given = self._with_labels(given, seen)
            return given.examples(), given.flat
        sets = self._sets(X, mask, reset, name)
        targets = self._targets(validation.here(y, y_name), sets, y_name)
        weight = validation.here(sample_weight, "sample_weight")
        scale = validation.as_row_scale(weight, sets)
        if reset:
            sets = self._learn(sets, first, None if scale is None else scale**2)
        else:
            sets = self._standardized(sets)
        return sources.in_memory(sets, validation.columns(targets, scale), scale), targets.ndim == 1

    def _problem(
        self, X: Any, y: Any, mask: Any, sample_weight: Any = None, first: int | None = None
    ) -> Problem:
        alpha = validation.as_alpha(self.alpha)
        fit_intercept = validation.as_flag(self.fit_intercept, "fit_intercept")
        validation.as_flag(self.standardize, "standardize")
        backend.check_device(self.device)
        examples, flat = self._examples(X, y, mask, sample_weight, reset=True, first=first)
        return Problem(examples, flat, alpha, fit_intercept, self.device)

    @with_callbacks
    def _solve(self, problem: Problem, sizes: list[int], task: str) -> list[Found]:
        """Coefficients for the first examples, as many as each of the sizes says."""
        problem = self._in_reach(problem.first(sizes[-1]))
        self._model = self._draw(problem.sets)
        with progress.reporting(self, task) as track:
            return self._model.solve(problem, sizes, track)

    def _keep(self, coefficients: Array, flat: bool) -> None:
        """Keep coefficients (rows, targets) for prediction and for the eyes of users."""
        self.coef_ = coefficients[:, 0] if flat else coefficients.T

    def _kept(self) -> Array:
        """What `_keep` was given."""
        check_is_fitted(self, "coef_")
        return self.coef_[:, None] if self.coef_.ndim == 1 else self.coef_.T

    def _fit(self, X: Any, y: Any, sample_weight: Any, mask: Any) -> None:
        self._forget()
        problem = self._problem(X, y, mask, sample_weight)
        (found,) = self._solve(problem, [len(problem)], "fit")
        problem.check_no_overflow(found.coefficients)
        self._flat = problem.flat
        self.alpha_ = float(found.alphas[0]) if problem.flat else found.alphas
        self.intercept_ = float(found.intercept[0]) if problem.flat else found.intercept
        self._keep(found.coefficients, problem.flat)

    def _predictor(self) -> Predictor:
        """What was fitted, as a function of sets that knows nothing of this estimator."""
        coefficients = self._kept()  # which refuses an estimator that is not fitted
        intercept = self.intercept_
        if self._flat:
            intercept = intercept * backend.ones((1,), coefficients)
        return Predictor(self._model, coefficients, intercept, self._flat, self.device)

    def _answer(self, predictor: Predictor, X: Any, mask: Any, method: str) -> Any:
        """What the predictor says of X, wherever X is."""
        if sources.is_streamed(X):
            given = self._given(X, mask)
            validation.check_same_place(self, method, given.form, predictor.coefficients)
            return given.answers(predictor)
        sets = self._standardized(self._sets(X, mask, reset=False))
        validation.check_same_place(self, method, sets, predictor.coefficients)
        return predictor(sets)

    def _to_score(self, X: Any, y: Any, sample_weight: Any, mask: Any) -> Given:
        """Examples elsewhere with their targets, to compare predictions with."""
        validation.refuse_none(y, "y")
        given = self._given(X, mask, y, sample_weight)
        validation.check_same_place(self, "score", given.form, self._kept())
        return given
