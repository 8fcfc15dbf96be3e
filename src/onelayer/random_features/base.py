"""What all ridge estimators share: from what users give, wherever it is, to coefficients."""

from __future__ import annotations

from typing import Any

from sklearn.base import BaseEstimator
from sklearn.callback import CallbackSupportMixin, with_callbacks
from sklearn.utils import Tags
from sklearn.utils.validation import check_is_fitted

from onelayer import arrays, sources
from onelayer.arrays import Array
from onelayer.random_features import elsewhere, progress, validation
from onelayer.random_features.elsewhere import Given, Reader
from onelayer.random_features.leave_one_out import Found
from onelayer.random_features.models import Model, Predictor, Problem
from onelayer.random_features.sets import Sets
from onelayer.sources import Source


def in_numpy_here(y: Any, sample_weight: Any) -> tuple[Any, Any]:
    """Targets and weights of examples in memory, for scikit-learn's scores."""
    truth, weight = validation.here(y, "y"), validation.here(sample_weight, "sample_weight")
    return validation.in_numpy(truth), weight


class RidgeEstimator(CallbackSupportMixin, BaseEstimator):
    """What all ridge estimators share; each supplies `_draw`.

    Coefficients are kept in `coef_`, (targets, features) as in scikit-learn, unless `_keep` and
    `_kept` say otherwise.
    """

    _single = 2  # a row of a two-dimensional X is a token that counts as query and as key
    _to_numpy = False  # whether tensors are converted
    _labels = False  # whether y are labels of classes

    def _draw(self, sets: Sets) -> Model:
        raise NotImplementedError

    def _sets(self, X: Any, mask: Any, reset: bool, name: str = "X") -> Sets:
        """X in memory as it is to be fitted or predicted, checked."""
        X = validation.in_numpy(X) if self._to_numpy else X
        mask = validation.here(mask, "mask")
        return validation.as_sets(self, X, mask, reset, single=self._single, name=name)

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
        reader = Reader(self._single, self._to_numpy, self._labels, name)
        given = elsewhere.opened(X, mask, reader, self.device, y, sample_weight)
        form = given.form
        validation.check_dim(self, form.tokens, form.dim, reset, name)
        return given

    def _targets(self, y: Any, sets: Sets, name: str) -> Array:
        """y as numbers, (n,) or (n, t)."""
        return validation.as_targets(y, sets, name)

    def _looked_through(self, given: Given) -> Given:
        """The same, checked throughout."""
        given.look()
        return given

    def _in_reach(self, problem: Problem) -> Problem:
        """The same with its examples where the model can solve it."""
        return problem

    def _forget(self) -> None:
        """Unlearn what was fitted: a fit that fails half-way is not to leave half of another."""
        for name in ("coef_", "dual_coef_", "classes_", "alpha_"):
            self.__dict__.pop(name, None)

    def _examples(
        self, X: Any, y: Any, mask: Any, sample_weight: Any, reset: bool, name: str = "X"
    ) -> tuple[Source, bool]:
        """Checked examples in chunks, see `Problem`, and whether y had one axis."""
        y_name = name.replace("X", "y")
        if sources.is_elsewhere(X):
            validation.refuse_none(y, y_name)
            given = self._given(X, mask, y, sample_weight, reset, name)
            given = self._looked_through(given)
            return given.examples(), given.flat
        sets = self._sets(X, mask, reset, name)
        targets = self._targets(validation.here(y, y_name), sets, y_name)
        weight = validation.here(sample_weight, "sample_weight")
        scale = validation.as_row_scale(weight, sets)
        return sources.here(sets, validation.columns(targets, scale), scale), targets.ndim == 1

    def _problem(self, X: Any, y: Any, mask: Any, sample_weight: Any = None) -> Problem:
        alpha = validation.as_alpha(self.alpha)
        arrays.check_device(self.device)
        examples, flat = self._examples(X, y, mask, sample_weight, reset=True)
        return Problem(examples, flat, alpha, self.device)

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
        ((coefficients, alphas),) = self._solve(problem, [len(problem)], "fit")
        problem.check_no_overflow(coefficients)
        self._flat = problem.flat
        self.alpha_ = float(alphas[0]) if problem.flat else alphas
        self._keep(coefficients, problem.flat)

    def _predictor(self) -> Predictor:
        """What was fitted, as a function of sets that knows nothing of this estimator."""
        coefficients = self._kept()  # which refuses an estimator that is not fitted
        return Predictor(self._model, coefficients, self._flat, self.device)

    def _answer(self, predictor: Predictor, X: Any, mask: Any, method: str) -> Any:
        """What the predictor says of X, wherever X is."""
        if sources.is_elsewhere(X):
            given = self._given(X, mask)
            validation.check_same_place(self, method, given.form, predictor.coefficients)
            return given.answers(predictor)
        sets = self._sets(X, mask, reset=False)
        validation.check_same_place(self, method, sets, predictor.coefficients)
        return predictor(sets)

    def _to_score(self, X: Any, y: Any, sample_weight: Any, mask: Any) -> Given:
        """Examples elsewhere with their targets, to compare predictions with."""
        validation.refuse_none(y, "y")
        given = self._given(X, mask, y, sample_weight)
        validation.check_same_place(self, "score", given.form, self._kept())
        return given

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.array_api_support = True
        return tags
