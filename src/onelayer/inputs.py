"""Random inputs: arrays of examples with shape (n, tokens, dim).

Each function takes a seed (or a `numpy.random.Generator`) and gives the same numbers for the same
seed. The second paper (arXiv 2402.04084) draws Boolean tokens, the first (arXiv 2307.11353) tokens
on the unit sphere.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from onelayer.array.checks import positive_int

Seed = int | np.random.Generator


def boolean(n: int, tokens: int, dim: int, seed: Seed = 0) -> np.ndarray[Any, Any]:
    """Draw entries +1 and -1 with equal chances.

    Parameters
    ----------
    n, tokens, dim : int
        Number of examples, tokens of an example, and dimension of a token.
    seed : int or numpy.random.Generator
        The same seed gives the same numbers; a generator goes on from where it is.

    Returns
    -------
    ndarray of shape (n, tokens, dim)
        The examples in float64.

    Raises
    ------
    TypeError, ValueError
        If a number is not a whole number of at least 1.

    Examples
    --------
    >>> boolean(1, 2, 3, seed=0)
    array([[[ 1.,  1.,  1.],
            [-1., -1., -1.]]])
    """
    shape = _shape(n, tokens, dim)
    return np.random.default_rng(seed).integers(0, 2, size=shape) * 2.0 - 1.0


def gaussian(n: int, tokens: int, dim: int, seed: Seed = 0) -> np.ndarray[Any, Any]:
    """Draw independent standard normal entries.

    Parameters
    ----------
    n, tokens, dim : int
        Number of examples, tokens of an example, and dimension of a token.
    seed : int or numpy.random.Generator
        The same seed gives the same numbers; a generator goes on from where it is.

    Returns
    -------
    ndarray of shape (n, tokens, dim)
        The examples in float64.

    Raises
    ------
    TypeError, ValueError
        If a number is not a whole number of at least 1.

    Examples
    --------
    >>> gaussian(2, 3, 4).shape
    (2, 3, 4)
    """
    return np.random.default_rng(seed).standard_normal(_shape(n, tokens, dim))


def sphere(n: int, tokens: int, dim: int, seed: Seed = 0) -> np.ndarray[Any, Any]:
    """Draw tokens uniformly on the unit sphere.

    Parameters
    ----------
    n, tokens, dim : int
        Number of examples, tokens of an example, and dimension of a token.
    seed : int or numpy.random.Generator
        The same seed gives the same numbers; a generator goes on from where it is.

    Returns
    -------
    ndarray of shape (n, tokens, dim)
        The examples in float64.

    Raises
    ------
    TypeError, ValueError
        If a number is not a whole number of at least 1.

    Examples
    --------
    >>> bool(np.allclose(np.linalg.norm(sphere(2, 3, 4), axis=-1), 1.0))
    True
    """
    directions = gaussian(n, tokens, dim, seed)
    directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
    return directions


def _shape(n: int, tokens: int, dim: int) -> tuple[int, int, int]:
    return positive_int(n, "n"), positive_int(tokens, "tokens"), positive_int(dim, "dim")
