"""scikit-learn estimators for sets and sequences, trained in closed form.

X is an array (n, tokens, dim) whose token 0 is the query and whose other tokens are the keys; or a
list of arrays (tokens, dim) of different lengths; or an array (n, tokens, dim) with a mask (n,
tokens) that is True where a token is there; or an array (n, dim) of single tokens, each its own
query. Numpy arrays and torch tensors are taken, and predictions are of the kind that X is.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin, TransformerMixin
from sklearn.callback import CallbackSupportMixin, with_callbacks
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import Tags
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted

from onelayer import arrays, checks
from onelayer.arrays import Array
from onelayer.random_features import attention, mlp, progress, validation
from onelayer.random_features.design import Design
from onelayer.random_features.kernel_matrices import kernel_bias
from onelayer.random_features.leave_one_out import Found
from onelayer.random_features.models import FeatureModel, KernelModel, Model, Problem
from onelayer.random_features.positions import Positions
from onelayer.random_features.sets import Sets


def _draw_attention(estimator: Any, sets: Sets) -> attention.AttentionMap:
    """The random heads that an estimator's parameters describe."""
    heads = checks.positive_int(estimator.heads, "heads")
    depth = checks.positive_int(estimator.depth, "depth")
    bias = validation.as_bias(estimator.bias)
    rng = validation.generator(estimator.random_state)
    seed = int(rng.integers(2**63))
    encoding = Positions(estimator.positions, sets.dim, sets.longest, seed)
    return attention.draw(heads, bias, encoding, depth, rng).like(sets.sample)


class _Ridge(CallbackSupportMixin, BaseEstimator):
    """What all ridge estimators share; each supplies `_draw`.

    Coefficients are kept in `coef_`, (targets, features) as in scikit-learn, unless `_keep` and
    `_kept` say otherwise.
    """

    _single = 2  # a row of a two-dimensional X is a token that counts as query and as key

    def _draw(self, sets: Sets) -> Model:
        raise NotImplementedError

    def _sets(self, X: Any, mask: Any, reset: bool, name: str = "X") -> Sets:
        """X as it is to be fitted or predicted, checked."""
        return validation.as_sets(self, X, mask, reset, single=self._single, name=name)

    def _targets(self, y: Any, sets: Sets) -> Array:
        """y as numbers, (n,) or (n, t)."""
        return validation.as_targets(y, sets)

    def _forget(self) -> None:
        """Unlearn what was fitted: a fit that fails half-way is not to leave half of another."""
        for name in ("coef_", "dual_coef_", "classes_", "alpha_"):
            self.__dict__.pop(name, None)

    def _problem(self, X: Any, y: Any, mask: Any, sample_weight: Any = None) -> Problem:
        alpha = validation.as_alpha(self.alpha)
        sets = self._sets(X, mask, reset=True)
        targets = self._targets(y, sets)
        scale = validation.as_row_scale(sample_weight, sets)
        columns = targets if targets.ndim == 2 else targets[:, None]
        if scale is not None:
            columns = columns * scale[:, None]
        return Problem(sets, columns, targets.ndim == 1, scale, alpha)

    @with_callbacks
    def _solve(self, problem: Problem, sizes: list[int], task: str) -> list[Found]:
        """Coefficients for the first examples, as many as each of the sizes says."""
        problem = problem.first(sizes[-1])
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
        ((coefficients, alphas),) = self._solve(problem, [len(problem.sets)], "fit")
        validation.check_no_overflow(coefficients, "features", problem.sets)
        self._flat = problem.flat
        self.alpha_ = float(alphas[0]) if problem.flat else alphas
        self._keep(coefficients, problem.flat)

    def _predict(self, X: Any, mask: Any, method: str) -> Array:
        coefficients = self._kept()
        sets = self._sets(X, mask, reset=False)
        validation.check_same_place(self, method, sets, coefficients)
        (predictions,) = self._model.predict(sets, [coefficients])
        validation.check_no_overflow(predictions, "predictions", sets)
        return predictions[:, 0] if self._flat else predictions

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.array_api_support = True
        return tags


class Regressor(RegressorMixin, _Ridge):
    """Ridge regression on numbers, one or many for each example."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> Self:
        """Fit y, (n,) or (n, targets); `sample_weight` is a number or (n,)."""
        self._fit(X, y, sample_weight, mask)
        return self

    def predict(self, X: Any, mask: Any = None) -> Array:
        """Predictions (n,) or (n, targets)."""
        return self._predict(X, mask, "predict")

    def score(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> float:
        """The coefficient of determination R² of the predictions."""
        predicted = arrays.to_numpy(self.predict(X, mask=mask))
        return float(r2_score(validation.in_numpy(y), predicted, sample_weight=sample_weight))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class _AttentionRidge(_Ridge):
    """The parameters of random-feature attention, for regression and classification."""

    def __init__(
        self,
        heads: int = 1000,
        bias: Any = 0.0,
        alpha: float | str = 1e-3,
        positions: str | None = None,
        depth: int = 1,
        random_state: Any = None,
    ) -> None:
        self.heads = heads
        self.bias = bias
        self.alpha = alpha
        self.positions = positions
        self.depth = depth
        self.random_state = random_state

    def _draw(self, sets: Sets) -> Model:
        return FeatureModel(_draw_attention(self, sets))


class RandomFeatureAttention(Regressor, _AttentionRidge):
    """Random-feature attention: random frozen heads, values trained by ridge regression.

    With x̃ = [x; 1], a query x_0 and keys x_1 .. x_N,

        f(x) = M^{-1/2} Σ_m (1/N) Σ_i relu(x̃_0ᵀ W_m x̃_i) ⟨v_m, x̃_i⟩,

    W_m = W_0 + a Gaussian matrix with entries of variance 1/4 (arXiv 2307.11353). With f = Φ v the
    objective is |Φ v - y|² + alpha |v|². There is no intercept: the constant in x̃ stands for it.
    Tokens of about unit norm suit the scale of the weights.

    X is an array (n, tokens, dim), the query first; the same with a `mask` (n, tokens), True where
    a token is there; a list of arrays (tokens, dim) of any lengths; or an array (n, dim) of single
    tokens, each its own query. y is (n,) or (n, targets).

    - `heads`: the number M of random heads.
    - `bias`: W_0, a number times the identity on the token's coordinates (1.0 is the paper's BRFA)
      or a full (dim + 1, dim + 1) matrix (with "onehot" positions, dim + tokens + 1).
    - `alpha`: the penalty, or "loo" for the one of least leave-one-out error for each target.
    - `positions`: None (keys are a set), "sinusoidal", "learned-random" or "onehot".
    - `depth`: the number of layers; all but the last are frozen.
    - `random_state`: None, a whole number, a numpy Generator or RandomState.

    After `fit`: `coef_` ((features,) or (targets, features)), `alpha_`, `n_features_in_` (the
    dimension of a token).

    >>> from onelayer import inputs
    >>> X = inputs.sphere(300, tokens=5, dim=4)
    >>> y = X[:, 1:, 0].mean(axis=1)
    >>> model = RandomFeatureAttention(heads=100, random_state=0).fit(X[:200], y[:200])
    >>> model.score(X[200:], y[200:]) > 0.99
    True
    """


class RandomFeatureMLP(Regressor):
    """A random-feature network that reads all tokens in a row, trained by ridge regression.

        f(x) = M^{-1/2} Σ_m v_m relu(⟨w_m, vec(x_0, .., x_N, 1)⟩),    w_m from N(0, I/(N+2)),

    the model that the first paper compares attention with (arXiv 2307.11353): with heads·(dim + 1)
    features it has as many trained parameters. Sets with fewer tokens than the longest at fit are
    filled up with zeros; longer ones are refused.

    `features` is the number M of random neurons; `alpha`, `random_state`, the forms of X and y and
    the attributes are those of `RandomFeatureAttention`.

    >>> from onelayer import inputs
    >>> X = inputs.sphere(300, tokens=3, dim=4)
    >>> y = X[:, 1, 0]
    >>> model = RandomFeatureMLP(features=500, random_state=0).fit(X[:200], y[:200])
    >>> model.score(X[200:], y[200:]) > 0.9
    True
    """

    _single = 1  # a row of a two-dimensional X is read once

    def __init__(
        self, features: int = 17000, alpha: float | str = 1e-3, random_state: Any = None
    ) -> None:
        self.features = features
        self.alpha = alpha
        self.random_state = random_state

    def _draw(self, sets: Sets) -> Model:
        features = checks.positive_int(self.features, "features")
        rng = validation.generator(self.random_state)
        return FeatureModel(mlp.draw(features, sets.longest, sets.dim, rng).like(sets.sample))


class AttentionKernelRidge(Regressor):
    """Random-feature attention with infinitely many heads: kernel ridge regression.

    The kernel is the limit of the features of `RandomFeatureAttention` as the heads grow, in
    closed form (`attention_kernel`), so there is no randomness and no number of heads to choose.
    Time grows with the square of the examples times that of the keys: for some thousands of
    examples. Computed in numpy; tensors are converted. `bias`, `alpha` and the forms of X and y are
    those of `RandomFeatureAttention`. With f(x) = Σ_i K(x, x_i) c_i over the examples x_i of the
    fit, (K + alpha) c = y. After `fit`: `dual_coef_`, c ((n,) or (n, targets)), `alpha_`.

    >>> from onelayer import inputs
    >>> X = inputs.sphere(300, tokens=5, dim=4)
    >>> y = X[:, 1:, 0].mean(axis=1)
    >>> model = AttentionKernelRidge().fit(X[:200], y[:200])
    >>> model.score(X[200:], y[200:]) > 0.99
    True
    """

    def __init__(self, bias: Any = 0.0, alpha: float | str = 1e-3) -> None:
        self.bias = bias
        self.alpha = alpha

    def _draw(self, sets: Sets) -> Model:
        return KernelModel(sets, kernel_bias(self.bias, sets))

    def _keep(self, coefficients: Array, flat: bool) -> None:
        self.dual_coef_ = coefficients[:, 0] if flat else coefficients

    def _kept(self) -> Array:
        check_is_fitted(self, "dual_coef_")
        return self.dual_coef_[:, None] if self.dual_coef_.ndim == 1 else self.dual_coef_

    def _sets(self, X: Any, mask: Any, reset: bool, name: str = "X") -> Sets:
        return super()._sets(validation.in_numpy(X), mask, reset, name)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.array_api_support = False
        return tags


class RandomFeatureAttentionClassifier(ClassifierMixin, _AttentionRidge):
    """Classification of sets by random-feature attention: ridge regression on one-hot targets.

    Targets are +1 for an example's own class and -1 for the others, as in scikit-learn's
    `RidgeClassifier`; parameters and forms of X are those of `RandomFeatureAttention`. After `fit`:
    `classes_`, and `coef_` ((features,) for two classes, else (classes, features)).

    >>> from onelayer import inputs
    >>> X = inputs.sphere(300, tokens=5, dim=4)
    >>> y = np.where(X[:, 1:, 0].mean(axis=1) > 0, "right", "left")
    >>> model = RandomFeatureAttentionClassifier(heads=100, alpha="loo", random_state=0)
    >>> model.fit(X[:200], y[:200]).score(X[200:], y[200:]) > 0.9
    True
    """

    def _targets(self, y: Any, sets: Sets) -> Array:
        self.classes_, index = validation.as_classes(y, sets)
        count = self.classes_.shape[0]
        hot = 2.0 * np.eye(count)[index] - 1.0
        return arrays.like(hot[:, 1] if count == 2 else hot, arrays.double(sets.sample))

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> Self:
        """Fit the values of the frozen heads to the classes y (n,)."""
        self._fit(X, y, sample_weight, mask)
        return self

    def decision_function(self, X: Any, mask: Any = None) -> Array:
        """Scores, (n,) for two classes (positive: the second), else (n, classes)."""
        return self._predict(X, mask, "decision_function")

    def predict(self, X: Any, mask: Any = None) -> Array:
        """The class of the highest score, (n,)."""
        scores = self._predict(X, mask, "predict")
        xp = arrays.namespace(scores)
        positive = xp.astype(scores > 0, xp.int64)
        index = positive if scores.ndim == 1 else xp.argmax(scores, axis=1)
        return arrays.namespace(self.classes_).take(
            self.classes_, arrays.beside(index, self.classes_), axis=0
        )

    def score(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> float:
        """The share of right predictions."""
        predicted = arrays.to_numpy(self.predict(X, mask=mask))
        return float(accuracy_score(validation.in_numpy(y), predicted, sample_weight=sample_weight))


class AttentionFeatures(TransformerMixin, BaseEstimator):
    """The features of random-feature attention, (n, heads·(dim + 1)), for use in pipelines.

        φ_m(x) = M^{-1/2} (1/N) Σ_i relu(x̃_0ᵀ W_m x̃_i) x̃_i,    x̃ = [x; 1],

    for head m. Parameters and forms of X are those of `RandomFeatureAttention`, of which this is
    the first half: with the same `random_state`, `Ridge(alpha, fit_intercept=False)` on these
    features is the same model. `RandomFeatureAttention` never holds all features and is the one for
    many heads. With "onehot" positions there is one more feature for each head and position.

    >>> from onelayer import inputs
    >>> features = AttentionFeatures(heads=2, random_state=0)
    >>> features.fit_transform(inputs.sphere(5, tokens=3, dim=2)).shape
    (5, 6)
    >>> list(features.get_feature_names_out())
    ['head0_x0', 'head0_x1', 'head0_one', 'head1_x0', 'head1_x1', 'head1_one']
    """

    def __init__(
        self,
        heads: int = 100,
        bias: Any = 0.0,
        positions: str | None = None,
        depth: int = 1,
        random_state: Any = None,
    ) -> None:
        self.heads = heads
        self.bias = bias
        self.positions = positions
        self.depth = depth
        self.random_state = random_state

    def fit(self, X: Any, y: Any = None, mask: Any = None) -> Self:  # noqa: ARG002
        """Draw the heads for tokens like those of X."""
        self.__dict__.pop("n_features_out_", None)  # a fit that fails leaves nothing fitted
        sets = validation.as_sets(self, X, mask, reset=True)
        self._map = _draw_attention(self, sets)
        self.n_features_out_ = self._map.size
        return self

    def fit_transform(self, X: Any, y: Any = None, mask: Any = None) -> Array:
        """`fit`, then `transform`, with the same mask."""
        return self.fit(X, y, mask=mask).transform(X, mask=mask)

    def transform(self, X: Any, mask: Any = None) -> Array:
        """The features of every example, (n, n_features_out_)."""
        check_is_fitted(self, "n_features_out_")
        sets = validation.as_sets(self, X, mask, reset=False)
        validation.check_same_place(self, "transform", sets, self._map.weights)
        features = Design(self._map, sets).by_rows(slice(0, len(sets)))
        validation.check_no_overflow(features, "features", sets)
        return features

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray[Any, Any]:
        """A name for every feature: its head, and the coordinate of the token that it weighs."""
        check_is_fitted(self)
        tokens = [str(name) for name in _check_feature_names_in(self, input_features)]
        codes = [f"position{i}" for i in range(self._map.unit - 1 - len(tokens))]
        names = [
            f"head{head}_{name}"
            for head in range(self._map.size // self._map.unit)
            for name in [*tokens, *codes, "one"]
        ]
        return np.asarray(names, dtype=object)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        tags.array_api_support = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
