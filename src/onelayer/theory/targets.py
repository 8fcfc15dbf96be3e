"""Target functions of a query and its keys, with their exact means, variances and norms.

Most are averages over the keys of a function of two tokens, the class that random-feature
attention can learn (arXiv 2307.11353):

    f(x) = (1/N) Σ_i F(x_0, x_i),        F(x_0, x_i) = Σ_rs <x_0^{⊗r} ⊗ x_i^{⊗s}, f_rs>.

`one_position`, `ordered_sum` and `three_token` are outside of the class: functions of a position,
sums that depend on the order of the keys, and averages of functions of three tokens.

Means and variances are for tokens that are independent and uniform on the unit sphere
(`sphere_moments`); norms are those in the bounds of the paper (`norms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from onelayer import spelling
from onelayer.array import backend, blocks, checks
from onelayer.array.backend import Array
from onelayer.data.sets import as_sets
from onelayer.inputs import Seed
from onelayer.theory import norms, polynomials, sphere_moments, target_values
from onelayer.theory.polynomials import Coefficients, SquaredNorms
from onelayer.theory.sphere_moments import Numbers, PairMoments
from onelayer.theory.target_values import PairFunction, Weights

_ORTHOGONAL = 1e-5  # how far SᵀS may be from the identity: what float32 leaves, and some more


@dataclass(frozen=True, eq=False)
class Target:
    """A function of a query and its keys. Call it on examples to get their values.

    Attributes
    ----------
    name : str
        The name of the target, a formula.
    dim : int
        Dimension of the tokens.
    degree : int
        Largest power of one token, the max(r, s) of the norm.
    tensor_norms : mapping or None
        The |f_rs|² by (r, s). None for a target outside of the class, whose `norm` is infinite.

    Examples
    --------
    >>> f = average_power(2, dim=3)
    >>> f.name, f.degree, f.norm == 2**4.5 * 4**2
    ('f_{1,2}', 2, True)
    >>> f([[[1, 0, 0], [0, 1, 0], [1, 0, 0]]])  # one example: a query and two keys
    array([0.5])
    """

    name: str
    dim: int
    degree: int
    evaluate: Callable[[Array, Array | None], Array] = field(repr=False)
    moments: Callable[[int], tuple[float, float]] = field(repr=False)  # of N: mean and variance
    tensor_norms: SquaredNorms | None = field(default=None, repr=False)
    biased_tensor_norms: SquaredNorms | None = field(default=None, repr=False)
    flat_norms: Callable[[int], float] | None = field(default=None, repr=False)  # of N
    least_keys: int = field(default=1, repr=False)

    def __call__(self, X: Any, mask: Any = None) -> Array:
        """Values (n,) of the examples, in the namespace and dtype of X.

        Parameters
        ----------
        X : array of shape (n, N + 1, d), or a list of arrays (N_i + 1, d)
            Token 0 is the query, the others are the keys.
        mask : array of shape (n, N + 1), optional
            True for the tokens that exist. Averages are over the keys that exist.

        Returns
        -------
        array of shape (n,)
            One value for each example.

        Raises
        ------
        TypeError, ValueError
            If X or the mask is not valid, or has tokens of another dimension or too few keys.

        Examples
        --------
        >>> average_power(1, dim=2)([[[0, 1], [1, 0], [0.5, 0]]])
        array([0.75])
        """
        sets = as_sets(X, mask)
        if sets.dim != self.dim:
            raise ValueError(
                f"X has tokens of dimension {sets.dim}, expected {self.dim} for {self.name}"
            )
        self._enough(sets.longest - 1, f"X has {sets.longest - 1} keys")
        parts = blocks.slices(len(sets), 8 * sets.longest * self.dim)
        values = [self.evaluate(*sets.block(part)) for part in parts]
        return backend.namespace(values[0]).concat(values)

    def mean(self, keys: int) -> float:
        """E f(x) for a query and keys that are independent and uniform on the unit sphere.

        Parameters
        ----------
        keys : int
            The number N of keys.

        Returns
        -------
        float
            The exact mean.

        Examples
        --------
        >>> average_power(2, dim=4).mean(keys=8)
        0.25
        """
        return self.moments(self._checked(keys))[0]

    def variance(self, keys: int) -> float:
        """Var f(x) for a query and keys that are independent and uniform on the unit sphere.

        Parameters
        ----------
        keys : int
            The number N of keys.

        Returns
        -------
        float
            The exact variance.

        Examples
        --------
        >>> average_power(1, dim=4).variance(keys=8)
        0.03125
        """
        return self.moments(self._checked(keys))[1]

    @property
    def norm(self) -> float:
        """B(f) of the given expansion; infinite for a target outside of the class."""
        return norms.pair_norm(self.tensor_norms)

    @property
    def biased_norm(self) -> float:
        """Norm in the bound for BRFA with the identity as its bias, known for f_{2,q}, else inf."""
        return norms.pair_norm(self.biased_tensor_norms)

    def flat_norm(self, keys: int) -> float:
        """Norm in the bound for a network on the concatenated tokens; infinite if unknown.

        Parameters
        ----------
        keys : int
            The number N of keys.

        Returns
        -------
        float
            The squared norm, as `theory.target_norm` returns it for "rfmlp".

        Examples
        --------
        >>> average_power(1, dim=4).flat_norm(keys=4)
        1.5
        """
        count = self._checked(keys)
        return math.inf if self.flat_norms is None else self.flat_norms(count)

    def _checked(self, keys: Any) -> int:
        return self._enough(checks.positive_int(keys, "keys"), f"keys is {keys}")

    def _enough(self, keys: int, got: str) -> int:
        if keys < self.least_keys:
            raise ValueError(f"{got}, expected at least {self.least_keys} for {self.name}")
        return keys


def average_power(p: int, dim: int, beta: Any = None) -> Target:
    """f_{1,p} = (1/N) Σ_i <β, x_i>^p: an average of a function of one key.

    B(f) = C_p |β|^2p.

    Parameters
    ----------
    p : int
        The power, at least 1.
    dim : int
        Dimension d of the tokens.
    beta : array of shape (dim,), optional
        The vector β; the first unit vector if None.

    Returns
    -------
    Target
        The function, with its mean, variance and norms.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> f = average_power(1, dim=4)
    >>> f.mean(keys=8), f.variance(keys=8)
    (0.0, 0.03125)
    """
    power, direction = checks.positive_int(p, "p"), _direction(beta, dim)
    return _sum_of_powers(f"f_{{1,{power}}}", power, direction, target_values.equal)


def correlation_weighted(q: int, dim: int, beta: Any = None) -> Target:
    """f_{2,q} = (1/N) Σ_i <x_0, x_i>^q <β, x_i>: keys count as they correlate with the query.

    The tensor is the product of q identities and β, made symmetric. Of its (q+1)! permutations of
    the legs of x_i one with c cycles contributes d^(c-1) |β|², so that |f_rs|² is

        (d+1)(d+2)···(d+q) / (q+1)! · |β|²,

    and RFA pays for its growth as d^q. The bias of BRFA brings the identities along: |β|² alone is
    left there (see `theory.target_norm`).

    Parameters
    ----------
    q : int
        The power of the correlation, at least 0.
    dim : int
        Dimension d of the tokens.
    beta : array of shape (dim,), optional
        The vector β; the first unit vector if None.

    Returns
    -------
    Target
        The function, with its mean, variance and norms.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> f = correlation_weighted(1, dim=16)
    >>> f.tensor_norms
    {(1, 2): 8.5}
    """
    power, direction = checks.whole_number(q, "q", least=0), _direction(beta, dim)
    biased = {(power, power + 1): backend.squared_norm(direction)}
    return _correlation(f"f_{{2,{power}}}", power, direction, np.eye(len(direction)), biased)


def rotated_correlation(
    q: int, dim: int, rotation: Any = None, beta: Any = None, seed: Seed = 0
) -> Target:
    """f_{3,q} = (1/N) Σ_i <x_0, S x_i>^q <β, x_i>: the correlation after a rotation.

    Mean, variance and norm are those of `correlation_weighted`, but the identity is the wrong bias
    for it: no bound for BRFA.

    Parameters
    ----------
    q : int
        The power of the correlation, at least 0.
    dim : int
        Dimension d of the tokens.
    rotation : array of shape (dim, dim), optional
        The orthogonal matrix S; a random one if None.
    beta : array of shape (dim,), optional
        The vector β; the first unit vector if None.
    seed : int or numpy.random.Generator
        Seed of the random rotation.

    Returns
    -------
    Target
        The function, with its mean, variance and norms.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> f, g = rotated_correlation(2, dim=5), correlation_weighted(2, dim=5)
    >>> f.norm == g.norm, f.variance(3) == g.variance(3)
    (True, True)
    """
    power, direction = checks.whole_number(q, "q", least=0), _direction(beta, dim)
    matrix = _orthogonal(rotation, len(direction), seed)
    return _correlation(f"f_{{3,{power}}}", power, direction, matrix)


def query_only(p: int, dim: int, beta: Any = None) -> Target:
    """<β, x_0>^p, a function of the query alone. B(f) = C_p |β|^2p.

    Parameters
    ----------
    p : int
        The power, at least 1.
    dim : int
        Dimension d of the tokens.
    beta : array of shape (dim,), optional
        The vector β; the first unit vector if None.

    Returns
    -------
    Target
        The function, with its mean, variance and norms.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> query_only(2, dim=4)([[[0.5, 0, 0, 0], [1, 0, 0, 0]]])
    array([0.25])
    """
    power, direction = checks.positive_int(p, "p"), _direction(beta, dim)
    mean, variance = sphere_moments.linear_power(power, direction)
    return _weighted_sum(
        name=f"<beta, x_0>^{power}",
        dim=len(direction),
        values=partial(target_values.query_power, power=power, beta=direction),
        moments=PairMoments(mean, within=0.0, between=variance),
        tensor_norms={(power, 0): backend.squared_norm(direction) ** power},
    )


def polynomial(coefficients: Coefficients, name: str = "polynomial") -> Target:
    """(1/N) Σ_i Σ_rs <x_0^{⊗r} ⊗ x_i^{⊗s}, f_rs> for tensors f_rs of shape (d,) * (r + s).

    The legs of the query come first. Moments are exact for all r and s; the only limit is that
    each tensor of d^(r+s) numbers, and a few copies of it, fit in memory.

    Parameters
    ----------
    coefficients : mapping of (int, int) to array
        The tensors by (r, s), the powers of the query and of the key. Each has r + s axes of size
        d; at least one has an axis.
    name : str
        The name of the target.

    Returns
    -------
    Target
        The function, with its mean, variance and norms.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> f = polynomial({(0, 0): 2.0, (1, 1): np.eye(3)})  # 2 + <x_0, x_i>
    >>> f.mean(keys=4), round(f.variance(keys=4) * 12, 9), f.norm
    (2.0, 1.0, 16.0)
    """
    tensors, dim = polynomials.checked(coefficients)
    return _weighted_sum(
        name=name,
        dim=dim,
        values=partial(polynomials.values, tensors=tensors),
        moments=polynomials.moments(tensors, dim),
        tensor_norms={rs: backend.squared_norm(tensor) for rs, tensor in tensors.items()},
    )


def one_position(position: int, p: int, dim: int, beta: Any = None) -> Target:
    """<β, x_position>^p: a function of the key at one position, 1 for the first key.

    An example whose mask has no such key has the value 0. The order of the keys matters: the norm
    is infinite.

    Parameters
    ----------
    position : int
        The position of the key, from 1.
    p : int
        The power, at least 1.
    dim : int
        Dimension d of the tokens.
    beta : array of shape (dim,), optional
        The vector β; the first unit vector if None.

    Returns
    -------
    Target
        The function, with its mean, variance and norms.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> f = one_position(2, p=1, dim=2)
    >>> f([[[1, 0], [0, 1], [0.5, 0]]]), f.norm
    (array([0.5]), inf)
    """
    place = checks.positive_int(position, "position")
    power, direction = checks.positive_int(p, "p"), _direction(beta, dim)
    name, weights = f"<beta, x_{place}>^{power}", partial(target_values.only, position=place)
    return _sum_of_powers(name, power, direction, weights, least_keys=place)


def ordered_sum(
    dim: int,
    p: int = 1,
    weights: Literal["alternating", "increasing"] = "alternating",
    beta: Any = None,
) -> Target:
    """(1/N) Σ_i w_i <β, x_i>^p with weights by position: the order of the keys matters.

    w_i is 1, -1, 1, ... if alternating and 1, 2, 3, ... if increasing. The best approximation that
    ignores the order is Σ_i w_i / N times `average_power`, zero for alternating weights and even N.
    The norm is infinite. Positions count masked keys, N does not.

    Parameters
    ----------
    dim : int
        Dimension d of the tokens.
    p : int
        The power, at least 1.
    weights : {"alternating", "increasing"}
        The weights w_i.
    beta : array of shape (dim,), optional
        The vector β; the first unit vector if None.

    Returns
    -------
    Target
        The function, with its mean, variance and norms.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> f = ordered_sum(dim=2)
    >>> f([[[1, 0], [0.5, 0], [0.25, 0]]]), f.norm
    (array([0.125]), inf)
    """
    spelling.one_of(weights, "weights", ("alternating", "increasing"))
    power, direction = checks.positive_int(p, "p"), _direction(beta, dim)
    name, by_position = f"{weights} sum of <beta, x_i>^{power}", getattr(target_values, weights)
    return _sum_of_powers(name, power, direction, by_position)


def three_token(dim: int, beta: Any = None) -> Target:
    """(1/N²) Σ_ij <x_0, x_i> <x_i, x_j> <β, x_j>: two hops, from the query over a key to a key.

    It is no average of a function of two tokens: the norm is infinite.

    Parameters
    ----------
    dim : int
        Dimension d of the tokens.
    beta : array of shape (dim,), optional
        The vector β; the first unit vector if None.

    Returns
    -------
    Target
        The function, with its mean, variance and norms.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> f = three_token(dim=4)
    >>> f.mean(keys=1), f.variance(keys=1) == correlation_weighted(1, dim=4).variance(keys=1)
    (0.0, True)
    """
    direction = _direction(beta, dim)
    return Target(
        name="three tokens",
        dim=len(direction),
        degree=2,
        evaluate=partial(target_values.two_hops, beta=direction),
        moments=partial(sphere_moments.two_hops, beta=direction),
    )


def _weighted_sum(
    name: str,
    dim: int,
    values: PairFunction,
    moments: PairMoments,
    tensor_norms: SquaredNorms,
    biased_tensor_norms: SquaredNorms | None = None,
    weights: Weights = target_values.equal,
    least_keys: int = 1,
) -> Target:
    """Σ_i w_i F(x_0, x_i), F given by `values`: of the class if all weights are the same."""
    flat_norm = partial(norms.flat_norm, tensor_norms)
    return Target(
        name=name,
        dim=dim,
        degree=max(map(max, tensor_norms)),
        evaluate=partial(target_values.weighted_sum, values=values, weights=weights),
        moments=partial(_of_weights, compute=moments.of_sum, weights=weights),
        tensor_norms=tensor_norms if weights is target_values.equal else None,
        biased_tensor_norms=biased_tensor_norms,
        flat_norms=partial(_of_weights, compute=flat_norm, weights=weights),
        least_keys=least_keys,
    )


def _sum_of_powers(
    name: str, power: int, beta: Numbers, weights: Weights, least_keys: int = 1
) -> Target:
    """Σ_i w_i <β, x_i>^p."""
    mean, variance = sphere_moments.linear_power(power, beta)
    return _weighted_sum(
        name=name,
        dim=len(beta),
        values=partial(target_values.key_power, power=power, beta=beta),
        moments=PairMoments(mean, within=variance, between=0.0),
        tensor_norms={(0, power): backend.squared_norm(beta) ** power},
        weights=weights,
        least_keys=least_keys,
    )


def _correlation(
    name: str, power: int, beta: Numbers, rotation: Numbers, biased: SquaredNorms | None = None
) -> Target:
    """(1/N) Σ_i <x_0, S x_i>^q <β, x_i>."""
    dim = len(beta)
    growth = math.prod(dim + i for i in range(1, power + 1)) / math.factorial(power + 1)
    return _weighted_sum(
        name=name,
        dim=dim,
        values=partial(target_values.correlation, power=power, rotation=rotation, beta=beta),
        moments=sphere_moments.weighted_correlation(power, beta),
        tensor_norms={(power, power + 1): growth * backend.squared_norm(beta)},
        biased_tensor_norms=biased,
    )


def _of_weights(keys: int, compute: Callable[[Numbers], Any], weights: Weights) -> Any:
    return compute(weights(np.ones((1, keys))))


def _direction(beta: Any, dim: int) -> Numbers:
    """β as a vector (dim,) of float64: the first unit vector if None."""
    size = checks.positive_int(dim, "dim")
    vector = np.eye(1, size)[0] if beta is None else checks.numbers_of(beta, "beta")
    if vector.shape != (size,):
        raise ValueError(f"beta has shape {vector.shape}, expected ({size},)")
    if not np.any(vector):
        raise ValueError("beta is zero, expected a vector of positive length")
    return vector


def _orthogonal(rotation: Any, dim: int, seed: Seed) -> Numbers:
    if rotation is None:
        factor, triangle = np.linalg.qr(np.random.default_rng(seed).standard_normal((dim, dim)))
        return np.asarray(factor * np.sign(np.diag(triangle)))  # uniform among orthogonal ones
    matrix = checks.numbers_of(rotation, "rotation")
    if matrix.shape != (dim, dim):
        raise ValueError(f"rotation has shape {matrix.shape}, expected {(dim, dim)}")
    gap = float(np.max(np.abs(matrix.T @ matrix - np.eye(dim))))
    if gap > _ORTHOGONAL:
        raise ValueError(
            f"rotation times its transpose is off the identity by {gap:.2g}, "
            "expected an orthogonal matrix"
        )
    return matrix
