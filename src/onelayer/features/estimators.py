"""scikit-learn estimators for sets and sequences, trained in closed form.

X is an array (n, tokens, dim); or a list of arrays (tokens, dim) of different lengths; or an array
(n, tokens, dim) with a mask (n, tokens) that is True where a token is there; or an array (n, dim)
of single tokens. Token 0 is the query and the others are the keys, unless `query` says otherwise.
Numpy arrays and torch tensors are taken, and predictions are of the kind that X is.

An array (n, tokens, dim) may also be elsewhere: in a large file mapped into memory, given by a
function that returns an iterator over blocks of examples, or a Dask array, on a cluster if one is
in use. Examples are then read chunk by chunk, and on a cluster where they are; y, the mask and the
weights may be elsewhere in the same way, or arrays. Predictions for a Dask array are a Dask array,
those for a function a function that gives blocks, those for a file an array.

With `device="cuda"` all blocks are moved to a GPU, through torch, and computed there; coefficients
and predictions come back in the kind and to the place of X. Features on a Dask cluster are computed
by its workers, for now without a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin, TransformerMixin
from sklearn.metrics import accuracy_score, r2_score
from sklearn.utils import Tags
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted

from onelayer.array import backend, checks
from onelayer.array.backend import Array
from onelayer.data import sources
from onelayer.data.sets import Sets
from onelayer.features import attention_features, mlp_features, queries, scores, validation
from onelayer.features.base import RidgeEstimator, SetEstimator, in_numpy_here
from onelayer.features.kernels.functions import attention_kernel_for
from onelayer.features.models import (
    FeatureModel,
    KernelModel,
    Model,
    Predictor,
    Problem,
    Transformer,
)
from onelayer.features.positions import Positions
from onelayer.features.streamed import Given, Seen


def _draw_attention(estimator: Any, sets: Sets) -> attention_features.AttentionMap:
    """The random heads that an estimator's parameters describe."""
    heads = checks.positive_int(estimator.heads, "heads")
    depth = checks.positive_int(estimator.depth, "depth")
    bias = validation.as_bias(estimator.bias)
    rng = validation.generator(estimator.random_state)
    seed = int(rng.integers(2**63))
    encoding = Positions(estimator.positions, sets.dim, sets.longest, seed)
    query = queries.checked(estimator.query)
    drawn = attention_features.draw(heads, bias, encoding, depth, rng, query, sets.varying)
    return drawn.like(sets.sample)


class Regressor(RegressorMixin, RidgeEstimator):
    """Ridge regression on numbers, one or many for each example."""

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> Self:
        """Fit y, (n,) or (n, targets); `sample_weight` is a number or (n,)."""
        self._fit(X, y, sample_weight, mask)
        return self

    def predict(self, X: Any, mask: Any = None) -> Array:
        """Predictions (n,) or (n, targets)."""
        return self._answer(self._predictor(), X, mask, "predict")

    def score(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> float:
        """The coefficient of determination R² of the predictions."""
        if sources.is_streamed(X):
            predictor = self._predictor()
            return scores.r_squared(self._to_score(X, y, sample_weight, mask), predictor)
        predicted = backend.to_numpy(self.predict(X, mask=mask))
        truth, weight = in_numpy_here(y, sample_weight)
        return float(r2_score(truth, predicted, sample_weight=weight))

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class _AttentionRidge(RidgeEstimator):
    """The parameters of random-feature attention, for regression and classification."""

    def __init__(
        self,
        heads: int = 1000,
        bias: Any = 0.0,
        alpha: float | str = "loo",
        fit_intercept: bool = True,
        query: str = "first",
        positions: str | None = None,
        standardize: bool = True,
        random_state: Any = None,
        depth: int = 1,
        device: str | None = None,
    ) -> None:
        self.heads = heads
        self.bias = bias
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.query = query
        self.positions = positions
        self.standardize = standardize
        self.random_state = random_state
        self.depth = depth
        self.device = device

    def _draw(self, sets: Sets) -> Model:
        return FeatureModel(_draw_attention(self, sets))


class RandomFeatureAttention(Regressor, _AttentionRidge):
    """Random-feature attention: random frozen heads, values trained by ridge regression.

    With x̃ = [x; 1], a query x_0 and keys x_1 .. x_N,

        f(x) = M^{-1/2} Σ_m (1/N) Σ_i relu(x̃_0ᵀ W_m x̃_i) ⟨v_m, x̃_i⟩,

    W_m = W_0 + a Gaussian matrix with entries of variance 1/4 (arXiv 2307.11353). With f = Φ v + b
    the objective is |Φ v + b - y|² + alpha |v|²: the intercept b is not penalised. The paper's own
    model has `fit_intercept=False` and `standardize=False`.

    Parameters
    ----------
    heads : int
        The number M of random heads.
    bias : float or array of shape (dim + 1, dim + 1)
        W_0: a number times the identity on the token's coordinates (1.0 is the paper's BRFA), or a
        full matrix (with "onehot" positions of size dim + tokens + 1).
    alpha : float or "loo"
        The penalty, or the one of least leave-one-out error for each target.
    fit_intercept : bool
        Whether to fit b; without it targets are expected to be centred.
    query : {"first", "mean", "last", "none"}
        Which token is the query x_0. With "first" it is token 0 and with "last" the last token that
        is there; the others are keys. With "mean" it is the mean of all tokens, and all of them are
        keys. "none" is for sets: all tokens are keys, x_0 is a zero vector for every example, and f
        is an average of a function of each token, whatever their order. Sets may then have a single
        token, as they may with "mean"; `bias` has no query to compare keys with.
    positions : None or {"sinusoidal", "learned-random", "onehot"}
        What tells tokens apart by their place, counted from 0 in the order of X whichever token is
        the query; with None keys are a set.
    standardize : bool
        Whether to centre and scale every coordinate of the tokens, by its mean and standard
        deviation over all tokens of the fit (with their sample weights) and so that tokens have
        about unit norm, which suits the scale of W_m. Coordinates that do not vary are ignored, and
        heads are drawn as if they were not there.
    random_state : None, int, numpy Generator or RandomState
        What the heads are drawn from.
    depth : int
        The number of layers; all but the last are frozen.
    device : None, "cpu" or "cuda"
        Where to compute: where X is for None; a GPU is not for X on a Dask cluster. Coefficients
        and predictions are of the kind that X is, and come back to where it is.

    Attributes
    ----------
    coef_ : array of shape (features,) or (targets, features)
        v.
    intercept_ : float or array of shape (targets,)
        b; zero without `fit_intercept`.
    alpha_ : float or array of shape (targets,)
        The penalty that was used.
    X_offset_, X_scale_ : arrays of shape (dim,)
        What tokens lose and are then divided by, with `standardize`; the scale of a coordinate that
        does not vary is 1.
    n_features_in_ : int
        The dimension of a token.

    Notes
    -----
    X is an array (n, tokens, dim); the same with a `mask` (n, tokens), True where a token is there;
    a list of arrays (tokens, dim) of any lengths; or an array (n, dim) of single tokens, each query
    and key at once. An array of three axes may also be a large file mapped into memory, a function
    that returns an iterator over blocks of it, or a Dask array, on a cluster or not: it is then
    read chunk by chunk where it is. y is (n,) or (n, targets).

    Examples
    --------
    >>> from onelayer import inputs
    >>> X = inputs.sphere(300, tokens=5, dim=4)
    >>> y = X[:, 1:, 0].mean(axis=1)
    >>> model = RandomFeatureAttention(heads=100, random_state=0).fit(X[:200], y[:200])
    >>> model.score(X[200:], y[200:]) > 0.99
    True
    >>> celsius = RandomFeatureAttention(heads=100, random_state=0).fit(1e4 * X[:200], y[:200] + 20)
    >>> abs(celsius.score(1e4 * X[200:], y[200:] + 20) - model.score(X[200:], y[200:])) < 1e-6
    True
    """


class RandomFeatureMLP(Regressor):
    """A random-feature network that reads all tokens in a row, trained by ridge regression.

        f(x) = M^{-1/2} Σ_m v_m relu(⟨w_m, vec(x_0, .., x_N, 1)⟩),    w_m from N(0, I/(N+2)),

    the model that the first paper compares attention with (arXiv 2307.11353): with heads·(dim + 1)
    features it has as many trained parameters. Sets with fewer tokens than the longest at fit are
    filled up with zeros; longer ones are refused.

    `features` is the number M of random neurons; `alpha`, `fit_intercept`, `standardize`,
    `random_state`, `device`, the forms of X and y and the attributes are those of
    `RandomFeatureAttention`. There is no query: all tokens are read in their order, and a single
    one is enough.

    >>> from onelayer import inputs
    >>> X = inputs.sphere(300, tokens=3, dim=4)
    >>> y = X[:, 1, 0]
    >>> model = RandomFeatureMLP(features=500, random_state=0).fit(X[:200], y[:200])
    >>> model.score(X[200:], y[200:]) > 0.9
    True
    """

    _least_tokens = 1  # and a row of a two-dimensional X is read once
    _first = True

    def __init__(
        self,
        features: int = 17000,
        alpha: float | str = "loo",
        fit_intercept: bool = True,
        standardize: bool = True,
        random_state: Any = None,
        device: str | None = None,
    ) -> None:
        self.features = features
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.standardize = standardize
        self.random_state = random_state
        self.device = device

    def _draw(self, sets: Sets) -> Model:
        features = checks.positive_int(self.features, "features")
        rng = validation.generator(self.random_state)
        drawn = mlp_features.draw(features, sets.longest, sets.dim, rng, sets.varying)
        return FeatureModel(drawn.like(sets.sample))


class AttentionKernelRidge(Regressor):
    """Random-feature attention with infinitely many heads: kernel ridge regression.

    The kernel is the limit of the features of `RandomFeatureAttention` as the heads grow, in
    closed form (`attention_kernel`), so there is no randomness and no number of heads to choose.
    Time grows with the square of the examples times that of the keys: for some thousands of
    examples; those of a fit that are elsewhere are brought here. Computed in numpy, or on a GPU
    with device="cuda"; tensors are converted, and predictions are in numpy. `bias`, `alpha`,
    `fit_intercept`, `query`, `standardize`, `device` and the forms of X and y are those of
    `RandomFeatureAttention`. With f(x) = Σ_i K(x, x_i) c_i + b over the examples x_i of the fit,
    (K + alpha) c = y - b and Σ_i c_i = 0; without an intercept b = 0 and c has any sum. After
    `fit`: `dual_coef_`, c ((n,) or (n, targets)), and the attributes of `RandomFeatureAttention`
    other than `coef_`.

    >>> from onelayer import inputs
    >>> X = inputs.sphere(300, tokens=5, dim=4)
    >>> y = X[:, 1:, 0].mean(axis=1)
    >>> model = AttentionKernelRidge().fit(X[:200], y[:200])
    >>> model.score(X[200:], y[200:]) > 0.99
    True
    """

    _to_numpy = True

    def __init__(
        self,
        bias: Any = 0.0,
        alpha: float | str = "loo",
        fit_intercept: bool = True,
        query: str = "first",
        standardize: bool = True,
        device: str | None = None,
    ) -> None:
        self.bias = bias
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.query = query
        self.standardize = standardize
        self.device = device

    def _in_reach(self, problem: Problem) -> Problem:
        return problem.here()  # where the n x n numbers of the kernel are, there is room for X

    def _draw(self, sets: Sets) -> Model:
        return KernelModel(sets, attention_kernel_for(self.bias, self.query, sets))

    def _keep(self, coefficients: Array, flat: bool) -> None:
        self.dual_coef_ = coefficients[:, 0] if flat else coefficients

    def _kept(self) -> Array:
        check_is_fitted(self, "dual_coef_")
        return self.dual_coef_[:, None] if self.dual_coef_.ndim == 1 else self.dual_coef_

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.array_api_support = False
        return tags


class RandomFeatureAttentionClassifier(ClassifierMixin, _AttentionRidge):
    """Classification of sets by random-feature attention: ridge regression on one-hot targets.

    Targets are +1 for an example's own class and -1 for the others, as in scikit-learn's
    `RidgeClassifier`; parameters, attributes and forms of X are those of `RandomFeatureAttention`.
    After `fit` there are also `classes_`, and `coef_` is (features,) and `intercept_` a number for
    two classes, else (classes, features) and (classes,).

    >>> from onelayer import inputs
    >>> X = inputs.sphere(300, tokens=5, dim=4)
    >>> y = np.where(X[:, 1:, 0].mean(axis=1) > 0, "right", "left")
    >>> model = RandomFeatureAttentionClassifier(heads=100, random_state=0)
    >>> model.fit(X[:200], y[:200]).score(X[200:], y[200:]) > 0.9
    True
    """

    _labels = True

    def _targets(self, y: Any, sets: Sets, name: str) -> Array:  # noqa: ARG002 - it is y
        self.classes_, index = validation.as_classes(y, sets)
        return validation.one_hot(index, self.classes_.shape[0], sets)

    def _with_labels(self, given: Given, seen: Seen) -> Given:
        self.classes_ = validation.several_classes(seen.labels, given.form)
        return replace(given, reader=replace(given.reader, classes=seen.labels))

    def fit(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> Self:
        """Fit the values of the frozen heads to the classes y (n,)."""
        self._fit(X, y, sample_weight, mask)
        return self

    def decision_function(self, X: Any, mask: Any = None) -> Array:
        """Scores, (n,) for two classes (positive: the second), else (n, classes)."""
        return self._answer(self._predictor(), X, mask, "decision_function")

    def predict(self, X: Any, mask: Any = None) -> Array:
        """The class of the highest score, (n,)."""
        return self._answer(self._classifying(), X, mask, "predict")

    def score(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> float:
        """The share of right predictions."""
        if sources.is_streamed(X):
            predictor = self._classifying()
            return scores.accuracy(self._to_score(X, y, sample_weight, mask), predictor)
        predicted = backend.to_numpy(self.predict(X, mask=mask))
        truth, weight = in_numpy_here(y, sample_weight)
        return float(accuracy_score(truth, predicted, sample_weight=weight))

    def _classifying(self) -> Predictor:
        return replace(self._predictor(), classes=self.classes_)


class AttentionFeatures(TransformerMixin, SetEstimator):
    """The features of random-feature attention, (n, heads·(dim + 1)), for use in pipelines.

        φ_m(x) = M^{-1/2} (1/N) Σ_i relu(x̃_0ᵀ W_m x̃_i) x̃_i,    x̃ = [x; 1],

    for head m. Parameters and forms of X are those of `RandomFeatureAttention`, of which this is
    the first half: with the same `random_state`, scikit-learn's `Ridge(alpha)` on these features is
    the same model (but for sample weights, which standardization does not see here).
    `RandomFeatureAttention` never holds all features and is the one for many heads. With "onehot"
    positions there is one more feature for each head and position.

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
        query: str = "first",
        positions: str | None = None,
        standardize: bool = True,
        random_state: Any = None,
        depth: int = 1,
        device: str | None = None,
    ) -> None:
        self.heads = heads
        self.bias = bias
        self.query = query
        self.positions = positions
        self.standardize = standardize
        self.random_state = random_state
        self.depth = depth
        self.device = device

    def fit(self, X: Any, y: Any = None, mask: Any = None) -> Self:  # noqa: ARG002
        """Learn the standardization of tokens, and draw heads for tokens like those of X."""
        self._forget()
        validation.as_flag(self.standardize, "standardize")
        backend.check_device(self.device)
        if sources.is_streamed(X):
            given, _ = self._look_and_learn(self._given(X, mask, reset=True), first=None)
            sets = given.form
        else:
            sets = self._learn(self._sets(X, mask, reset=True), first=None)
        self._map = _draw_attention(self, sets)
        self.n_features_out_ = self._map.size
        return self

    def fit_transform(self, X: Any, y: Any = None, mask: Any = None) -> Array:
        """`fit`, then `transform`, with the same mask."""
        return self.fit(X, y, mask=mask).transform(X, mask=mask)

    def transform(self, X: Any, mask: Any = None) -> Array:
        """The features of every example, (n, n_features_out_)."""
        check_is_fitted(self, "n_features_out_")
        transformer = Transformer(self._map, self.device)
        if sources.is_streamed(X):
            given = self._given(X, mask)
            validation.check_same_place(self, "transform", given.form, self._map.weights)
            return given.answers(transformer)
        sets = self._standardized(self._sets(X, mask, reset=False))
        validation.check_same_place(self, "transform", sets, self._map.weights)
        return transformer(sets)

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
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
