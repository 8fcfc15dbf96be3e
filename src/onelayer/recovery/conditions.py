"""How far a layer meets the conditions under which one can be learned from random examples.

arXiv 2402.04084 proves that layers can be learned if they are not degenerate, in the senses that
are measured here. Examples tell heads apart where their scores differ: scores must spread over many
directions, about as much in every head, and differently. They must not be so large that every row
attends to one token, nor cancel so that no row is on the side of all heads (the paper's
minimum-norm point needs it). Attention is read off an output through the sum of the projections,
which must be invertible and must not cancel, and projections must not be interchangeable.

The paper states these in orders of magnitude. The needed values here were measured as in the claim
"violated-conditions" of the lab: layers of two or three heads in 8 dimensions, one condition made
worse in steps, 100,000 Boolean examples of three tokens. Up to the needed value all six phases
succeeded on all seeds. Singular gaps never broke a phase. A layer may fail a condition and be
recovered all the same, by Gauss-Newton steps above all. Diagonal attention matrices meet all
conditions and still break phase 5 or 6 on Boolean inputs, where a token's score with itself is the
trace for every token; on Gaussian inputs they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import numpy as np

from onelayer.array import backend, checks
from onelayer.array.backend import Array, NumpyArray
from onelayer.inputs import Seed
from onelayer.layer import AttentionLayer
from onelayer.recovery.condition_results import (
    Condition,
    Conditions,
    ConditionSurvey,
    ConditionSurveys,
)

# What is needed of a layer: value, whether it is a lower bound (or an upper one), meaning.
_NEEDED = {
    "scale": (1.5, True, "norm of the weakest Θ: spread of its scores on Boolean inputs"),
    "largest scale": (10.0, False, "norm of the strongest Θ"),
    "distance": (0.08, True, "difference of the closest two Θ, over the larger norm"),
    "hull distance": (0.5, True, "distance of 0 from the affine hull of the Θ, over least norm"),
    "incoherence": (0.997, False, "cosine, without its sign, of the two most aligned Θ"),
    "norm ratio": (3.0, False, "norm of the strongest Θ over the weakest"),
    "effective rank": (1.1, True, "least (Frobenius norm / spectral norm)² of a Θ"),
    "singular gap": (0.0, True, "closest two singular values of a Θ, over its largest"),
    "sum size": (0.35, True, "norm of the sum of the W, over that of all W side by side"),
    "sum conditioning": (1e-6, True, "least singular value of the sum of the W over the largest"),
    "attention independence": (0.1, True, "least singular value of the Θ as unit vectors"),
    "projection independence": (0.12, True, "least singular value of the W as unit vectors"),
}


def conditions(layer: AttentionLayer) -> Conditions:
    """Measure how far a layer meets the conditions under which layers can be learned.

    Parameters
    ----------
    layer : AttentionLayer
        The layer. Its biases are ignored: the layers of arXiv 2402.04084 have none.

    Returns
    -------
    Conditions
        A dict of `Condition` by name, which prints as a table and has a `plot`.

    Raises
    ------
    TypeError
        If the layer is something else.

    Notes
    -----
    With m heads, Frobenius norms and inner products unless said otherwise:

    - "scale": min |Θ_i|, on Boolean inputs the standard deviation of a score;
    - "largest scale": max |Θ_i|;
    - "distance": min |Θ_i - Θ_j| / max(|Θ_i|, |Θ_j|), infinite for one head;
    - "hull distance": min |Σ z_i Θ_i| over Σ z_i = 1, over min |Θ_i|;
    - "incoherence": max |<Θ_i, Θ_j>| / (|Θ_i| |Θ_j|), 0 for one head;
    - "norm ratio": max |Θ_i| / min |Θ_i|;
    - "effective rank": min |Θ_i|² / |Θ_i|²_op;
    - "singular gap": min (σ_r - σ_{r+1}) / σ_1 over the singular values of each Θ_i;
    - "sum size": |Σ W_i| / √(Σ |W_i|²);
    - "sum conditioning": σ_min / σ_max of W = Σ W_i, of its min(d, e) singular values;
    - "attention independence": σ_min of the m x d² matrix with rows vec(Θ_i) / |Θ_i|;
    - "projection independence": the same for the W_i.

    A ratio 0/0, as of heads of norm 0, counts as a condition that fails.

    Examples
    --------
    >>> found = conditions(AttentionLayer.random(heads=4, dim=16, scale=2.0))
    >>> round(found["scale"].measured, 9), found["scale"].holds
    (2.0, True)
    """
    if not isinstance(layer, AttentionLayer):
        raise TypeError(f"layer is a {type(layer).__name__}, expected an AttentionLayer")
    measured = _measured(layer)
    return Conditions(
        {name: Condition(measured[name], *needed) for name, needed in _NEEDED.items()}
    )


def survey_conditions(
    heads: int,
    dim: int,
    rank: int | None = None,
    samples: int = 100,
    seed: Seed = 0,
    *,
    scale: float = 2.0,
    out_dim: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> ConditionSurveys:
    """Measure the conditions over random layers, all drawn from one generator.

    Parameters
    ----------
    heads, dim : int
        Number of heads and dimension of a token, as in `AttentionLayer.random`.
    rank : int, optional
        Rank of the attention matrices. Full if None.
    samples : int
        Number of layers.
    seed : int or numpy Generator
        Seed of the layers.
    scale : float
        Norm of each attention matrix.
    out_dim : int, optional
        Dimension of an output row, `dim` if None.
    progress : callable, optional
        Called after every layer with the number of layers measured so far.

    Returns
    -------
    ConditionSurveys
        A dict of `ConditionSurvey` by the names that `conditions` has, which prints as a table and
        has a `plot`.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid.

    Examples
    --------
    >>> survey = survey_conditions(heads=2, dim=8, samples=20)
    >>> survey["incoherence"].share
    1.0
    """
    samples = checks.positive_int(samples, "samples")
    if not (progress is None or callable(progress)):
        raise TypeError(f"progress is {progress!r}, expected None or a function")
    rng = np.random.default_rng(seed)
    measured = []
    for done in range(1, samples + 1):
        layer = AttentionLayer.random(heads, dim, scale, rank, out_dim, seed=rng)
        measured.append(_measured(layer))
        if progress is not None:
            progress(done)
    return ConditionSurveys(
        {
            name: ConditionSurvey(np.sort([values[name] for values in measured]), needed, at_least)
            for name, (needed, at_least, _) in _NEEDED.items()
        }
    )


def _measured(layer: AttentionLayer) -> dict[str, float]:
    attention, largest = _relative(layer.attention)
    projection, _ = _relative(layer.projection)
    norms = np.linalg.norm(attention, axis=(1, 2))
    spectra = np.linalg.svd(attention, compute_uv=False)
    top, gaps = spectra[:, 0], spectra[:, :-1] - spectra[:, 1:]
    units = _unit_rows(attention)
    total = np.linalg.svd(projection.sum(axis=0), compute_uv=False)
    return {
        "scale": largest * float(norms.min()),
        "largest scale": largest * float(norms.max()),
        "distance": _distance(attention, norms),
        "hull distance": _ratio(_hull_distance(attention), float(norms.min())),
        "incoherence": _incoherence(units),
        "norm ratio": float(norms.max() / norms.min()) if norms.all() else math.inf,
        # At least 1 up to rounding, 0 if a matrix is zero.
        "effective rank": max(1.0, float(np.min(norms / top) ** 2)) if norms.all() else 0.0,
        # Of descending singular values; infinite if there is only one.
        "singular gap": float(np.min(gaps.T / top, initial=np.inf)) if top.all() else 0.0,
        "sum size": _ratio(float(np.linalg.norm(total)), float(np.linalg.norm(projection))),
        "sum conditioning": _ratio(total[-1], total[0]),
        "attention independence": _independence(units),
        "projection independence": _independence(_unit_rows(projection)),
    }


def _relative(matrices: Array) -> tuple[NumpyArray, float]:
    """The matrices over their largest entry, so that squares do not overflow, and that entry."""
    plain = backend.to_numpy(matrices).astype(np.float64)
    largest = float(np.abs(plain).max())
    return (plain / largest if largest > 0 else plain), largest


def _unit_rows(matrices: NumpyArray) -> NumpyArray:
    """Each matrix as one row of length 1; zeros stay zeros."""
    rows = matrices.reshape(len(matrices), -1)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(np.divide(rows, norms, out=np.zeros_like(rows), where=norms > 0))


def _distance(attention: NumpyArray, norms: NumpyArray) -> float:
    apart = (
        _ratio(float(np.linalg.norm(attention[i] - attention[j])), max(norms[i], norms[j]))
        for i, j in combinations(range(len(attention)), 2)
    )
    return min(apart, default=math.inf)


def _hull_distance(attention: NumpyArray) -> float:
    """The norm of the point nearest to 0 in the affine hull of the heads."""
    first, *others = attention.reshape(len(attention), -1)
    if not others:
        return float(np.linalg.norm(first))
    directions = np.array(others) - first
    nearest = first - np.linalg.lstsq(directions.T, first, rcond=None)[0] @ directions
    return float(np.linalg.norm(nearest))


def _incoherence(units: NumpyArray) -> float:
    """The largest cosine of two rows; 1 if one is zero, a multiple of every other."""
    if len(units) > 1 and not units.any(axis=1).all():
        return 1.0
    cosines = np.abs(units @ units.T)[np.triu_indices(len(units), k=1)]
    return float(np.max(cosines, initial=0.0))


def _independence(rows: NumpyArray) -> float:
    """The smallest singular value of the rows, 0 if there are more rows than columns."""
    if len(rows) > rows.shape[1]:
        return 0.0
    return float(np.linalg.svd(rows, compute_uv=False)[-1])


def _ratio(part: float, whole: float) -> float:
    """part / whole, with 0/0 taken as 0."""
    return float(part / whole) if whole > 0 else 0.0
