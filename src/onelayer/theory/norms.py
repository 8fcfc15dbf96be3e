"""The norms of targets that stand in the bounds of the first paper (arXiv 2307.11353).

For an average of F(x_0, x_i) = Σ_rs <x_0^{⊗r} ⊗ x_i^{⊗s}, f_rs> over the keys, and |.| the
Frobenius norm,

    B(f) = Σ_k C_k Σ_{max(r, s) = k} |f_rs|²,        C_k = max(1, k^4.5 4^k).

The tensors f_rs are symmetric in the legs of x_0 and symmetric in those of x_i, which makes the
norm smaller. The expansion of F is still not unique, since |x| = 1 on the sphere. B is the norm of
the given one, an upper bound on the least.
"""

from __future__ import annotations

import math

import numpy as np

from onelayer.array import backend, checks
from onelayer.theory.polynomials import SquaredNorms
from onelayer.theory.sphere_moments import Numbers


def norm_constant(k: int, base: float = 4.0) -> float:
    """C_k = max(1, k^4.5 base^k), the weight of degree k in the norm of a target.

    The base is |x̃_0|² |x̃_i|² = 4 for attention, where x̃ = [x; 1], and the squared norm N + 2 of
    its whole input for a network on all tokens side by side.
    """
    degree = checks.whole_number(k, "k", least=0)
    return max(1.0, math.pow(degree, 4.5) * math.pow(base, degree))


def pair_norm(tensor_norms: SquaredNorms | None) -> float:
    """B(f) from the |f_rs|² by (r, s); infinite if there are none.

    >>> pair_norm({(0, 0): 4.0, (0, 1): 0.5}), pair_norm(None)
    (6.0, inf)
    """
    if tensor_norms is None:
        return math.inf
    return math.fsum(norm_constant(max(rs)) * square for rs, square in tensor_norms.items())


def flat_norm(tensor_norms: SquaredNorms, weights: Numbers) -> float:
    """Σ_k max(1, k^4.5 (N+2)^k) |g_k|² of Σ_i w_i F(x_0, x_i), from the |f_rs|² and the N weights.

    z = (x_0, ..., x_N) are all tokens side by side, Σ_i w_i F(x_0, x_i) = Σ_k <z^{⊗k}, g_k>, and
    the tensors g_k are symmetric. A tensor of r legs in one block of coordinates and s in another,
    symmetric in each, loses a factor (r+s)! / (r! s!) when made symmetric in all; tensors of
    different blocks are orthogonal.

    >>> flat_norm({(0, 1): 1.0}, np.ones(4) / 4)  # a quarter of each of four keys
    1.5
    """
    of_query, of_keys = float(np.sum(weights)) ** 2, backend.squared_norm(weights)
    terms = []
    for (r, s), square in tensor_norms.items():
        symmetric = norm_constant(r + s, base=weights.size + 2) * square / math.comb(r + s, r)
        terms.append(symmetric * (of_keys if s else of_query))
    return math.fsum(terms)
