"""Bounds on the excess risk in the first paper (arXiv 2307.11353), as numbers.

They are of the form √(B / n), with n examples and a norm B of the target that depends on the model,
and hold for many heads. Logarithms, and constants that depend on neither dimension, keys nor
examples, are left out. The numbers are orders: compare them with each other, across dimensions,
keys and degrees, and do not read them as the size of a training set.

Units. √(B / n) scales as the target does, so it bounds a loss that does, a Lipschitz one. The
squared error is one where values are of order one: a target is scaled to unit variance first, B
becomes B / Var, and the excess risk is a squared error relative to the variance of the target, as
in `learning_curve`. More than 1 promises nothing: the mean does as well.

For attention Var is the variance of F(x_0, x_i), of one query and one key. Averaging over N
independent keys divides the variance of the target by N, but also that of the features that have
to tell it apart, so that N drops out of the relative error. This step is an argument added here:
B over the variance of the average would grow with N, and measured errors do not. For a network on
all tokens side by side there is no such gain: B and Var are both those of the whole target.

An infinite number says that the theory promises nothing: the target is outside of the class, or
no bound is known for the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from onelayer import spelling
from onelayer.array import checks
from onelayer.theory.polynomials import Coefficients
from onelayer.theory.targets import Target, polynomial

MODELS = ("rfa", "brfa", "rfmlp")


def target_norm(
    target: Target | Coefficients, model: str = "rfa", keys: int | None = None
) -> float:
    """Squared norm B(f) of a target in the bound for a model; infinite if no bound is known.

    Parameters
    ----------
    target : Target or mapping
        A target, or the coefficients of a polynomial as in `targets.polynomial`.
    model : {"rfa", "brfa", "rfmlp"}
        The model whose bound is used.
    keys : int, optional
        Number N of keys, needed for "rfmlp".

    Returns
    -------
    float
        The squared norm, in squared units of the target.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid, or one that is needed is missing.

    Notes
    -----
    - "rfa": Σ_rs C_{max(r, s)} |f_rs|², C_k = max(1, k^4.5 4^k): the norm in the paper's bound on
      random-feature attention. The squared norm in the space of its kernel is at most 4.5 times it.
    - "brfa", with the identity as its bias: known for f_{2,q}, where |β|² takes the place of
      |f_rs|². The paper's bound does not pay the d^q that RFA's pays; C_k is kept for what it pays
      in q, so that only the comparison across dimensions has meaning.
    - "rfmlp": Σ_k max(1, k^4.5 (N+2)^k) |g_k|², for `keys` N, with g_k the tensors of the target as
      a polynomial in all N + 1 tokens side by side: so also for targets that depend on the order.
      The powers of N + 2 are the paper's. In truth odd degrees of 3 and more cost about one more,
      since the kernel of a ReLU network has no such odd powers but through its constant input.

    Examples
    --------
    >>> from onelayer.theory.targets import average_power, correlation_weighted
    >>> f = correlation_weighted(1, dim=15)
    >>> target_norm(f) / target_norm(f, "brfa")
    8.0
    >>> g = average_power(2, dim=15)
    >>> target_norm(g, "rfmlp", keys=6) / target_norm(g)  # ((6 + 2) / 4)^2 / 6
    0.66...
    """
    checked = _as_target(target)
    if _known(model) == "rfa":
        return checked.norm
    if model == "brfa":
        return checked.biased_norm
    return checked.flat_norm(_needed(keys, "keys", "the norm of 'rfmlp' grows with it"))


def excess_risk(
    model: str,
    target: Target | Coefficients | int,
    examples: int,
    dim: int | None = None,
    keys: int | None = None,
) -> float:
    """Order of the squared error relative to the target's variance, √(B / (n Var)).

    Parameters
    ----------
    model : {"rfa", "brfa", "rfmlp"}
        The model whose bound is used.
    target : Target, mapping or int
        A target, or a degree, as for `sample_size`.
    examples : int
        Number n of examples.
    dim : int, optional
        Dimension d of the tokens, needed if `target` is a degree.
    keys : int, optional
        Number N of keys, needed for "rfmlp".

    Returns
    -------
    float
        The order of the excess risk; more than 1 promises nothing.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid, or one that is needed is missing.

    Examples
    --------
    >>> excess_risk("rfa", 1, examples=6400, dim=16)
    0.1
    """
    count = checks.positive_int(examples, "examples")
    return math.sqrt(_squared_size(model, target, dim, keys) / count)


def sample_size(
    model: str,
    target: Target | Coefficients | int,
    dim: int | None = None,
    keys: int | None = None,
    error: float = 0.1,
) -> float:
    """Order of the number of examples needed for a relative error, B / (Var · error²).

    Parameters
    ----------
    model : {"rfa", "brfa", "rfmlp"}
        The model whose bound is used.
    target : Target, mapping or int
        A target, with B from `target_norm`, or a degree p. A degree stands for any function of
        degree p of one token with unit variance: the paper has (4d)^p for RFA and ((N+2)d)^p for
        RFMLP in the place of B. (A function without lower degrees has |f_p|² =
        d (d+2) ... (d+2p-2) / p!, of the order of d^p.)
    dim : int, optional
        Dimension d of the tokens, needed if `target` is a degree.
    keys : int, optional
        Number N of keys, needed for "rfmlp".
    error : float
        Squared error relative to the variance of the target.

    Returns
    -------
    float
        The order of the number of examples; infinite if the theory promises nothing.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid, or one that is needed is missing.

    Examples
    --------
    >>> sample_size("rfa", 2, dim=8, error=0.5), sample_size("rfmlp", 2, dim=8, keys=6, error=0.5)
    (4096.0, 16384.0)
    """
    relative = checks.positive_number(error, "error")
    return _squared_size(model, target, dim, keys) / relative**2


def sample_size_ratio(degree: int, keys: int) -> float:
    """Examples that RFMLP needs over those that RFA needs, ((N+2)/4)^p.

    From the paper's comparison of the two on functions of degree p of one token.

    Parameters
    ----------
    degree : int
        The degree p, at least 0.
    keys : int
        Number N of keys.

    Returns
    -------
    float
        The ratio, which is below 1 for a single key.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> sample_size_ratio(2, keys=14)
    16.0
    """
    power = checks.whole_number(degree, "degree", least=0)
    return float(((checks.positive_int(keys, "keys") + 2) / 4) ** power)


def _squared_size(
    model: str, target: Target | Coefficients | int, dim: int | None, keys: int | None
) -> float:
    """B / Var."""
    if not isinstance(target, Target | Mapping):
        return _of_degree(model, target, dim, keys)
    checked = _as_target(target)
    if dim is not None and dim != checked.dim:
        raise ValueError(f"dim is {dim!r}, expected {checked.dim} for {checked.name}, or None")
    norm = target_norm(checked, model, keys)
    if norm == math.inf:
        return math.inf
    variance = checked.variance(1 if keys is None or model != "rfmlp" else keys)
    if variance <= 0:
        raise ValueError(f"{checked.name} has variance 0, expected a target that varies")
    return norm / variance


def _of_degree(model: str, degree: int, dim: int | None, keys: int | None) -> float:
    power = checks.positive_int(degree, "the degree of the target")
    if _known(model) == "brfa":
        raise ValueError(
            "model is 'brfa' and target a degree, expected a target: its bound is known for "
            "targets.correlation_weighted alone"
        )
    base = _needed(dim, "dim", "a degree alone does not tell it")
    base *= 4 if model == "rfa" else _needed(keys, "keys", "the bound of 'rfmlp' grows with it") + 2
    try:
        return float(base**power)
    except OverflowError:
        return math.inf


def _known(model: str) -> str:
    return str(spelling.one_of(model, "model", MODELS))


def _needed(value: int | None, name: str, reason: str) -> int:
    if value is None:
        raise ValueError(f"{name} is None, expected a whole number of at least 1: {reason}")
    return checks.positive_int(value, name)


def _as_target(target: Target | Coefficients) -> Target:
    return target if isinstance(target, Target) else polynomial(target)
