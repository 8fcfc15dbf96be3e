"""Layers that are hard to learn: parities written as attention."""

from __future__ import annotations

import numpy as np

from onelayer.array import checks
from onelayer.layer import AttentionLayer


def hard_instance(parity: int = 3, dim: int = 12, strength: float = 20.0) -> AttentionLayer:
    """Write a parity as an attention layer, which is hard to learn for statistical methods.

    Every output row is the parity of its token over the coordinates S = {2, .., parity + 1}.

    Parameters
    ----------
    parity : int
        Number s of coordinates of the parity, which is odd; also the number of heads.
    dim : int
        Dimension of the tokens, at least ``parity + 2``.
    strength : float
        Scale B of the scores.

    Returns
    -------
    AttentionLayer
        A layer with ``out_dim`` 1.

    Raises
    ------
    TypeError, ValueError
        If the parity is even, the dimension too small, or a number not valid.

    Notes
    -----
    There is one head for each threshold t_j = 2j + 1 - s, j < s:

        Θ_j = B (Σ_{i in S} e_i - t_j e_1) e_0ᵀ,    W_j = (-1)^j e_0.

    For Boolean tokens among which coordinate 0 takes both signs, row a is Π_{i in S} x_ai up to
    2 s (k - 1) exp(-2B), k the number of tokens; if it takes one sign only, every row is that sign.
    Head j scores B (σ - t_j x_a1) x_b0, where σ = Σ_{i in S} x_ai is odd and t_j even, so the row
    attends to the tokens whose coordinate 0 has the sign of σ - t_j x_a1. If p of the x_ai are +1,
    then σ > t_j for the heads j < p, and Σ_j (-1)^j sign(σ - t_j) is 1 for odd p and -1 for even p:
    the parity, as s is odd. With x_a1 = -1 the thresholds t_j and t_{s-1-j} = -t_j are exchanged,
    whose signs (-1)^j agree: coordinate 1 stands in for a constant.

    Parities of s of d bits need of order d^s statistical queries, so the cost of learning by such
    queries is exponential in the number of heads (arXiv 2402.04084). `sculpt` refuses them at once,
    since a single output shows no agreement of heads. `refine` may learn small parities, with other
    heads that attend to the same tokens (see the claim `hard-instances`).

    Examples
    --------
    >>> layer = hard_instance(parity=3, dim=5)
    >>> X = np.array([[[1.0, 1, -1, 1, 1], [-1, 1, -1, -1, 1]]])
    >>> layer(X).round(9)
    array([[[-1.],
            [ 1.]]])
    """
    parity = checks.positive_int(parity, "parity")
    if parity % 2 == 0:
        raise ValueError(f"parity is {parity}, expected an odd number of coordinates")
    dim = checks.positive_int(dim, "dim")
    if dim < parity + 2:
        why = f"the {parity} coordinates of the parity and two more"
        raise ValueError(f"dim is {dim}, expected at least {parity + 2}: {why}")
    strength = checks.positive_number(strength, "strength")
    attention = np.zeros((parity, dim, dim))
    attention[:, 2 : parity + 2, 0] = strength
    attention[:, 1, 0] = -strength * np.arange(1 - parity, parity, 2)  # -B t_j
    projection = np.zeros((parity, dim, 1))
    projection[:, 0, 0] = (-1.0) ** np.arange(parity)
    return AttentionLayer(attention, projection)
