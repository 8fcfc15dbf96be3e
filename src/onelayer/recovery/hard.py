"""Layers that no statistical method learns cheaply: parities written as attention."""

from __future__ import annotations

import numpy as np

from onelayer.array import checks
from onelayer.layer import AttentionLayer


def hard_instance(parity: int = 3, dim: int = 12, strength: float = 20.0) -> AttentionLayer:
    """A layer whose output rows are the parities of their tokens over S = {2, .., parity + 1}.

    With s = `parity` (odd), B = `strength`, one head for each threshold t_j = 2j + 1 - s, j < s:

        Θ_j = B (Σ_{i in S} e_i - t_j e_1) e_0ᵀ,    W_j = (-1)^j e_0    (out_dim is 1).

    For Boolean tokens among which coordinate 0 takes both signs, row a is Π_{i in S} x_ai up to
    2 s (k - 1) exp(-2B), k the number of tokens; if it takes one sign only, every row is that sign.

    Why: head j scores B (σ - t_j x_a1) x_b0, where σ = Σ_{i in S} x_ai is odd and t_j even, so the
    row attends to the tokens whose coordinate 0 has the sign of σ - t_j x_a1. If p of the x_ai are
    +1, then σ > t_j for the heads j < p, and Σ_j (-1)^j sign(σ - t_j) is 1 for odd p and -1 for
    even p: the parity, as s is odd. With x_a1 = -1 the thresholds change places, t_j with
    t_{s-1-j} = -t_j, whose signs (-1)^j agree: coordinate 1 stands in for a constant.

    Parities of s of d bits need of order d^s statistical queries, so the cost of learning by such
    queries is exponential in the number of heads (arXiv 2402.04084). `sculpt` refuses them at once,
    since a single output shows no agreement of heads; `refine` needs ever more examples as bits are
    added, and gives up when its budget is spent. Small parities it may learn, with other heads:
    where softmax is a maximum, many attend to the same tokens. (The claim `hard-instances`.)

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
        raise ValueError(
            f"dim is {dim}, expected at least {parity + 2}: the {parity} coordinates of the parity "
            "and two more"
        )
    strength = checks.positive_number(strength, "strength")
    thresholds = np.arange(1 - parity, parity, 2)
    attention = np.zeros((parity, dim, dim))
    attention[:, 2 : parity + 2, 0] = strength
    attention[:, 1, 0] = -strength * thresholds
    projection = np.zeros((parity, dim, 1))
    projection[:, 0, 0] = (-1.0) ** np.arange(parity)
    return AttentionLayer(attention, projection)
