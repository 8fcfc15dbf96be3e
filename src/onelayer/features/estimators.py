"""scikit-learn estimators for sets and sequences, trained in closed form.

`RandomFeatureAttention` describes the forms and places of examples that all of them take.
Estimators are dataclasses of their parameters: scikit-learn reads them from `__init__`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin, TransformerMixin
from sklearn.utils import Tags
from sklearn.utils.validation import _check_feature_names_in, check_is_fitted

from onelayer.array import backend, checks
from onelayer.array.backend import Array, NumpyArray
from onelayer.data.sets import SetRules, Sets
from onelayer.features import (
    activations,
    attention_features,
    mlp_features,
    queries,
    scores,
    validation,
)
from onelayer.features.base import RidgeEstimator, SetEstimator
from onelayer.features.kernels.functions import attention_kernel_for
from onelayer.features.models import FeatureModel, KernelModel, RidgeModel, features_of
from onelayer.features.positions import PositionalEncoding


def _draw_attention(estimator: Any, sets: Sets) -> attention_features.AttentionMap:
    """The random heads that an estimator's parameters describe, for tokens like those of `sets`."""
    heads = checks.positive_int(estimator.heads, "heads")
    depth = checks.positive_int(estimator.depth, "depth")
    bias = validation.as_bias(estimator.bias)
    rng = validation.generator(estimator.random_state)
    seed = int(rng.integers(2**63))
    encoding = PositionalEncoding(estimator.positions, sets.dim, sets.longest, seed)
    query = queries.checked(estimator.query)
    relu = activations.get("relu")
    drawn = attention_features.draw(heads, bias, encoding, depth, rng, query, sets.varying, relu)
    return drawn.like(sets.sample)


class Regressor(RegressorMixin, RidgeEstimator):
    """Ridge regression on one or many numbers for each example."""

    def score(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> float:
        """Compute the coefficient of determination R² of the predictions.

        Parameters
        ----------
        X : array (n, tokens, dim), list of arrays (tokens, dim), or array (n, dim)
            Examples, in any form and place that `RandomFeatureAttention` takes.
        y : array of shape (n,) or (n, targets)
            The true targets.
        sample_weight : float or array of shape (n,), optional
            Weights of the examples.
        mask : array of shape (n, tokens), optional
            True for the tokens of X that exist.

        Returns
        -------
        float
            1 if all predictions are exact, 0 for the mean of y; averaged over targets.

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
        >>> model.score(X[200:], y[200:]) > 0.99
        True
        """
        return self._score(scores.r_squared, X, y, sample_weight, mask)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


@dataclass(eq=False, repr=False)
class _AttentionRidge(RidgeEstimator):
    """The parameters of random-feature attention, for regression and classification."""

    heads: int = 1000
    bias: Any = 0.0
    alpha: float | str = "loo"
    fit_intercept: bool = True
    query: str = "first"
    positions: str | None = None
    standardize: bool = True
    random_state: Any = None
    depth: int = 1
    device: str | None = None

    def _draw(self, sets: Sets) -> RidgeModel:
        return FeatureModel(_draw_attention(self, sets))


class RandomFeatureAttention(Regressor, _AttentionRidge):
    """Random-feature attention: random frozen heads, values trained by ridge regression.

    With x̃ = [x; 1], a query x_0 and keys x_1 .. x_N,

        f(x) = M^{-1/2} Σ_m (1/N) Σ_i relu(x̃_0ᵀ W_m x̃_i) ⟨v_m, x̃_i⟩,

    W_m = W_0 + a Gaussian matrix with entries of variance 1/4 (arXiv 2307.11353). With f = Φ v + b
    the objective is |Φ v + b - y|² + alpha |v|²: the intercept b is not penalised. The paper's
    model has `fit_intercept=False` and `standardize=False`.

    Parameters
    ----------
    heads : int
        The number M of random heads.
    bias : float or array of shape (dim + 1, dim + 1)
        W_0: a number times the identity on the token's coordinates (1.0 is the paper's BRFA), or a
        full matrix (with "onehot" positions of size dim + tokens + 1).
    alpha : float or "loo"
        The penalty; "loo" chooses the one of least leave-one-out error for each target.
    fit_intercept : bool
        Whether to fit b; without it targets are expected to be centred.
    query : {"first", "mean", "last", "none"}
        Which token is the query x_0: token 0, or the last token that exists, the others being keys.
        With "mean" it is the mean of all tokens, which are all keys. With "none" all are keys and
        x_0 = 0, so that f is an average of a function of each token, for sets without order; `bias`
        then has no effect. With "mean" and "none" sets may have a single token.
    positions : None or {"sinusoidal", "learned-random", "onehot"}
        The encoding of the position of a token, counted from 0 in the order of X for any `query`;
        with None keys are a set.
    standardize : bool
        Whether to centre and scale coordinates by their mean and deviation over all tokens of the
        fit (with sample weights), so that tokens have about unit norm, as the scale of W_m assumes.
        Coordinates that do not vary are ignored.
    random_state : None, int, numpy Generator or RandomState
        The source of randomness for the heads.
    depth : int
        The number of layers; all but the last are frozen.
    device : None, "cpu" or "cuda"
        Where to compute; None computes where X is. A GPU is refused for X on a Dask cluster.

    Attributes
    ----------
    coef_ : array of shape (features,) or (targets, features)
        v.
    intercept_ : float or array of shape (targets,)
        b; zero without `fit_intercept`.
    alpha_ : float or array of shape (targets,)
        The penalty that was used.
    X_offset_, X_scale_ : arrays of shape (dim,)
        With `standardize`, what is subtracted from tokens and what they are divided by.
    n_features_in_ : int
        The dimension of a token.

    Notes
    -----
    X is an array (n, tokens, dim); the same with a `mask` (n, tokens), True for tokens that exist;
    a list of arrays (tokens, dim) of any lengths; or an array (n, dim) of single tokens, each query
    and key at once. Numpy arrays and torch tensors are taken. Coefficients and predictions are of
    the kind and on the device of X, also with `device="cuda"`.

    X may also be a large file mapped into memory, a function that returns an iterator over blocks
    of examples, or a Dask array, as may y, the mask and the weights. It is read chunk by chunk, on
    a cluster where the chunks are. Predictions are an array, such a function, or a Dask array.

    Examples
    --------
    >>> from onelayer import inputs
    >>> X = inputs.sphere(300, tokens=5, dim=4)
    >>> y = X[:, 1:, 0].mean(axis=1)
    >>> model = RandomFeatureAttention(heads=100, random_state=0).fit(X[:200], y[:200])
    >>> model.score(X[200:], y[200:]) > 0.99
    True
    """


@dataclass(eq=False, repr=False)
class RandomFeatureMLP(Regressor):
    """A random-feature network that reads all tokens in a row, trained by ridge regression.

        f(x) = M^{-1/2} Σ_m v_m relu(⟨w_m, vec(x_0, .., x_N, 1)⟩),    w_m from N(0, I/(N+2)),

    is the model that arXiv 2307.11353 compares attention with; with heads·(dim + 1) features it has
    as many trained parameters. Sets with fewer tokens than the longest at fit are padded with
    zeros; longer ones are refused. All tokens are read in their order; one is enough.

    Parameters
    ----------
    features : int
        The number M of random neurons.
    alpha, fit_intercept, standardize, random_state, device
        As in `RandomFeatureAttention`.

    Attributes
    ----------
    coef_, intercept_, alpha_, X_offset_, X_scale_, n_features_in_
        As in `RandomFeatureAttention`.

    Examples
    --------
    >>> from onelayer import inputs
    >>> X = inputs.sphere(300, tokens=3, dim=4)
    >>> y = X[:, 1, 0]
    >>> model = RandomFeatureMLP(features=500, random_state=0).fit(X[:200], y[:200])
    >>> model.score(X[200:], y[200:]) > 0.9
    True
    """

    features: int = 17000
    alpha: float | str = "loo"
    fit_intercept: bool = True
    standardize: bool = True
    random_state: Any = None
    device: str | None = None

    def _rules(self, name: str) -> SetRules:
        return SetRules(1, True, name)

    def _draw(self, sets: Sets) -> RidgeModel:
        features = checks.positive_int(self.features, "features")
        rng, relu = validation.generator(self.random_state), activations.get("relu")
        drawn = mlp_features.draw(features, sets.longest, sets.dim, rng, sets.varying, relu)
        return FeatureModel(drawn.like(sets.sample))


@dataclass(eq=False, repr=False)
class AttentionKernelRidge(Regressor):
    """Random-feature attention with infinitely many heads: kernel ridge regression.

    The kernel, `attention_kernel`, is the limit of the features of `RandomFeatureAttention` as the
    number of heads grows. With f(x) = Σ_i K(x, x_i) c_i + b over the examples x_i of the fit,
    (K + alpha) c = y - b and Σ_i c_i = 0; without an intercept b = 0 and c has any sum.

    Time grows with the square of the number of examples times that of keys: this suits thousands of
    examples. Those of a fit are collected in memory; tensors are converted to numpy.

    Parameters
    ----------
    bias, alpha, fit_intercept, query, standardize, device
        As in `RandomFeatureAttention`.

    Attributes
    ----------
    dual_coef_ : array of shape (n,) or (n, targets)
        c.
    intercept_, alpha_, X_offset_, X_scale_, n_features_in_
        As in `RandomFeatureAttention`.

    Examples
    --------
    >>> from onelayer import inputs
    >>> X = inputs.sphere(300, tokens=5, dim=4)
    >>> y = X[:, 1:, 0].mean(axis=1)
    >>> model = AttentionKernelRidge().fit(X[:200], y[:200])
    >>> model.score(X[200:], y[200:]) > 0.99
    True
    """

    bias: Any = 0.0
    alpha: float | str = "loo"
    fit_intercept: bool = True
    query: str = "first"
    standardize: bool = True
    device: str | None = None

    _to_numpy = True
    _all_in_memory = True

    def _draw(self, sets: Sets) -> RidgeModel:
        return KernelModel(sets, attention_kernel_for(self.bias, self.query, sets))

    def _keep(self, coefficients: Array, flat: bool) -> None:
        self.dual_coef_: Array = coefficients[:, 0] if flat else coefficients

    def _kept(self) -> Array:
        check_is_fitted(self, "dual_coef_")
        return self.dual_coef_[:, None] if self.dual_coef_.ndim == 1 else self.dual_coef_

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.array_api_support = False
        return tags


class RandomFeatureAttentionClassifier(ClassifierMixin, _AttentionRidge):
    """Classification of sets by random-feature attention: ridge regression on one-hot targets.

    Targets are +1 for the class of an example and -1 for the others, as in scikit-learn's
    `RidgeClassifier`.

    Parameters
    ----------
    heads, bias, alpha, fit_intercept, query, positions, standardize, random_state, depth, device
        As in `RandomFeatureAttention`.

    Attributes
    ----------
    classes_ : array of shape (classes,)
        The labels, in ascending order.
    coef_ : array of shape (features,) for two classes, else (classes, features)
        The trained values.
    intercept_ : float for two classes, else array of shape (classes,)
        The intercepts.
    alpha_, X_offset_, X_scale_, n_features_in_
        As in `RandomFeatureAttention`.

    Examples
    --------
    >>> from onelayer import inputs
    >>> X = inputs.sphere(300, tokens=5, dim=4)
    >>> y = np.where(X[:, 1:, 0].mean(axis=1) > 0, "right", "left")
    >>> model = RandomFeatureAttentionClassifier(heads=100, random_state=0)
    >>> model.fit(X[:200], y[:200]).score(X[200:], y[200:]) > 0.9
    True
    """

    _labels = True

    def decision_function(self, X: Any, mask: Any = None) -> Array:
        """Compute a score for every class; the largest is predicted.

        Parameters
        ----------
        X : array (n, tokens, dim), list of arrays (tokens, dim), or array (n, dim)
            Examples, in any form and place that `RandomFeatureAttention` takes.
        mask : array of shape (n, tokens), optional
            True for the tokens of X that exist.

        Returns
        -------
        array of shape (n,) or (n, classes)
            For two classes one score, positive for the second class, else one for every class.

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
        >>> y = np.where(X[:, 1:, 0].mean(axis=1) > 0, "right", "left")
        >>> model = ol.RandomFeatureAttentionClassifier(heads=100, random_state=0)
        >>> model = model.fit(X[:200], y[:200])
        >>> right = model.decision_function(X[200:]) > 0
        >>> bool(np.all((model.predict(X[200:]) == "right") == right))
        True
        """
        predictor = replace(self._predictor(), classes=None)
        return self._apply(predictor, predictor.coefficients, X, mask, "decision_function")

    def score(self, X: Any, y: Any, sample_weight: Any = None, mask: Any = None) -> float:
        """Compute the share of right predictions, the accuracy.

        Parameters
        ----------
        X : array (n, tokens, dim), list of arrays (tokens, dim), or array (n, dim)
            Examples, in any form and place that `RandomFeatureAttention` takes.
        y : array of shape (n,)
            The true labels.
        sample_weight : float or array of shape (n,), optional
            Weights of the examples.
        mask : array of shape (n, tokens), optional
            True for the tokens of X that exist.

        Returns
        -------
        float
            From 0 to 1.

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
        >>> y = np.where(X[:, 1:, 0].mean(axis=1) > 0, "right", "left")
        >>> model = ol.RandomFeatureAttentionClassifier(heads=100, random_state=0)
        >>> model = model.fit(X[:200], y[:200])
        >>> model.score(X[200:], y[200:]) > 0.9
        True
        """
        return self._score(scores.accuracy, X, y, sample_weight, mask)


@dataclass(eq=False, repr=False)
class AttentionFeatures(TransformerMixin, SetEstimator):
    """The features of random-feature attention, for use in pipelines.

        φ_m(x) = M^{-1/2} (1/N) Σ_i relu(x̃_0ᵀ W_m x̃_i) x̃_i,    x̃ = [x; 1],

    for head m: (n, heads·(dim + 1)) features, and with "onehot" positions one more for each head
    and position. With the same `random_state`, scikit-learn's `Ridge(alpha)` on these features is
    the same model as `RandomFeatureAttention` (without sample weights, which standardization does
    not see here); that estimator never holds all features and suits many heads.

    Parameters
    ----------
    heads, bias, query, positions, standardize, random_state, depth, device
        As in `RandomFeatureAttention`.

    Attributes
    ----------
    n_features_out_ : int
        The number of features.
    X_offset_, X_scale_, n_features_in_
        As in `RandomFeatureAttention`.

    Examples
    --------
    >>> from onelayer import inputs
    >>> features = AttentionFeatures(heads=2, random_state=0)
    >>> features.fit_transform(inputs.sphere(5, tokens=3, dim=2)).shape
    (5, 6)
    >>> list(features.get_feature_names_out())
    ['head0_x0', 'head0_x1', 'head0_one', 'head1_x0', 'head1_x1', 'head1_one']
    """

    heads: int = 100
    bias: Any = 0.0
    query: str = "first"
    positions: str | None = None
    standardize: bool = True
    random_state: Any = None
    depth: int = 1
    device: str | None = None

    def fit(self, X: Any, y: Any = None, mask: Any = None) -> Self:  # noqa: ARG002
        """Learn the standardization of tokens, and draw heads for tokens like those of X.

        Parameters
        ----------
        X : array (n, tokens, dim), list of arrays (tokens, dim), or array (n, dim)
            Examples, in any form and place that `RandomFeatureAttention` takes.
        y : None
            Not used; pipelines pass it.
        mask : array of shape (n, tokens), optional
            True for the tokens of X that exist.

        Returns
        -------
        self
            The transformer, fitted.

        Raises
        ------
        TypeError, ValueError
            If a parameter of the estimator, the examples or the targets are not valid.

        Examples
        --------
        >>> import onelayer as ol
        >>> X = ol.inputs.sphere(5, tokens=3, dim=2)
        >>> ol.AttentionFeatures(heads=2, random_state=0).fit(X).n_features_out_
        6
        """
        self._forget()
        validation.as_flag(self.standardize, "standardize")
        backend.check_device(self.device)
        given = self._given(X, mask, reset=True)
        self._learn(given, first=None)
        self._map = _draw_attention(self, replace(given.form, standard=self._standard))
        self.n_features_out_: int = self._map.size
        return self

    def fit_transform(self, X: Any, y: Any = None, mask: Any = None) -> Array:
        """Fit to examples, then compute their features.

        Parameters
        ----------
        X : array (n, tokens, dim), list of arrays (tokens, dim), or array (n, dim)
            Examples, in any form and place that `RandomFeatureAttention` takes.
        y : None
            Not used; pipelines pass it.
        mask : array of shape (n, tokens), optional
            True for the tokens of X that exist.

        Returns
        -------
        array of shape (n, n_features_out_)
            What `transform` returns after `fit`.

        Raises
        ------
        TypeError, ValueError
            If a parameter of the estimator, the examples or the targets are not valid.

        Examples
        --------
        >>> import onelayer as ol
        >>> X = ol.inputs.sphere(5, tokens=3, dim=2)
        >>> ol.AttentionFeatures(heads=2, random_state=0).fit_transform(X).shape
        (5, 6)
        """
        return self.fit(X, y, mask=mask).transform(X, mask=mask)

    def transform(self, X: Any, mask: Any = None) -> Array:
        """Compute the features of examples.

        Parameters
        ----------
        X : array (n, tokens, dim), list of arrays (tokens, dim), or array (n, dim)
            Examples, in any form and place that `RandomFeatureAttention` takes.
        mask : array of shape (n, tokens), optional
            True for the tokens of X that exist.

        Returns
        -------
        array of shape (n, n_features_out_)
            The features, of the kind and in the place of X.

        Raises
        ------
        NotFittedError
            If `fit` was not called.
        TypeError, ValueError
            If the examples are not valid, or not of the kind that the estimator was fitted to.

        Examples
        --------
        >>> import onelayer as ol
        >>> X = ol.inputs.sphere(5, tokens=3, dim=2)
        >>> ol.AttentionFeatures(heads=2, random_state=0).fit(X).transform(X[:3]).shape
        (3, 6)
        """
        check_is_fitted(self, "n_features_out_")
        work = partial(features_of, self._map, self.device)
        return self._apply(work, self._map.weights, X, mask, "transform")

    def get_feature_names_out(self, input_features: Any = None) -> NumpyArray:
        """Name every feature: its head, and the coordinate of the token that it weighs.

        Parameters
        ----------
        input_features : list of str, optional
            Names of the coordinates of a token; x0, x1, .. if None and X had no names at fit.

        Returns
        -------
        ndarray of str objects
            Such as "head0_x1"; the constant coordinate of a token is called "one".

        Raises
        ------
        NotFittedError
            If `fit` was not called.
        ValueError
            If the names are not those at fit, or not as many as the coordinates.

        Examples
        --------
        >>> import onelayer as ol
        >>> features = ol.AttentionFeatures(heads=1, random_state=0)
        >>> list(features.fit(ol.inputs.sphere(5, tokens=3, dim=2)).get_feature_names_out())
        ['head0_x0', 'head0_x1', 'head0_one']
        """
        check_is_fitted(self)
        tokens = [str(name) for name in _check_feature_names_in(self, input_features)]
        codes = [f"position{i}" for i in range(self._map.unit - 1 - len(tokens))]
        heads = range(self._map.size // self._map.unit)
        names = [f"head{head}_{name}" for head in heads for name in [*tokens, *codes, "one"]]
        return np.asarray(names, dtype=object)

    def __sklearn_tags__(self) -> Tags:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
