"""Phases 2 and 4: sculpt a convex body around the attention matrices.

Every row on which heads agree gives slabs that contain all Θ_i and so their affine hull (see
`slabs`); their intersection is the body (see `body`). Here slabs are certified, those that do not
fit with the others are dropped, and the rest put together.

On Boolean inputs tokens may be equal: what their row says of them is not known and passed over, and
examples repeat, so copies of a slab count once. On continuous inputs (Gaussian, sphere) neither
happens and nothing else changes, since tokens are whitened.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.recovery.phases.agreement import certified
from onelayer.recovery.phases.examples import Examples
from onelayer.recovery.phases.polytope import UNSEEN, Body, Spectrum
from onelayer.recovery.phases.slabs import WIDTH, Slabs, find_slabs

# In units of a slab's error, measured on random layers: heads lie within 2 of the middle of most
# slabs. What is farther than this from the others' consensus is no agreement, and is dropped; of
# the slabs that are left, next to none has a head farther than WIDTH from its middle.
_ODD = 4.0
_ROUNDS = 8  # of dropping odd slabs
_STILL_MET = 0.9  # of the slabs that are met, when directions are left free
CLEAR_GAP = 2.0  # the next singular value over one that counts as free
_FEWEST_SLABS = 1.5  # per unknown


@dataclass(frozen=True, eq=False)
class Sculpture:
    """A body with what was learned on the way."""

    body: Body
    spectrum: Spectrum
    free: int  # directions that count as free
    centre: np.ndarray[Any, Any]  # of the slabs, zero along the free directions
    rejected: float  # share of candidates that were odd or not certified


def sculpt(
    examples: Examples, projection_sum: Array, error: float, heads: int | None
) -> Sculpture | None:
    """The body from one pass over the examples; None where too few slabs are left.

    `error` is the relative error of `projection_sum`; `heads` None means an unknown number.
    """
    slabs, one_sided = find_slabs(examples, projection_sum, error)
    found = len(slabs.key)
    slabs = slabs.take(_certified(slabs, projection_sum))
    sculpture = _consistent(slabs, None if heads is None else heads - 1)
    if sculpture is None:
        return None
    body = _with_one_sided(sculpture.body, one_sided, sculpture.centre)
    return replace(sculpture, body=body, rejected=1 - len(sculpture.body.error) / found)


def clear_gap(spectrum: Spectrum, free: int | None = None) -> tuple[int, float]:
    """The number of free directions and the gap above them: the ratio of the next singular value.

    Of all numbers up to a quarter of the unknowns the one with the largest gap, zero if no gap is
    clear; or the gap above a given number. With none free the gap is infinite.
    """
    floor = max(UNSEEN * float(spectrum.values[-1]), np.finfo(float).tiny)
    values = np.maximum(spectrum.values, floor)
    gaps = values[1:] / values[:-1]
    if free is None:
        candidates = gaps[: max(1, len(values) // 4)]
        free = int(np.argmax(candidates)) + 1
        if gaps[free - 1] < CLEAR_GAP:
            free = 0
    return free, float(gaps[free - 1]) if free else np.inf


def _clear_free(body: Body, spectrum: Spectrum, free: int | None) -> int:
    """The number of free directions if they are clear, else none.

    While W is crude no gap shows. To leave the smallest directions free all the same would drop
    good slabs and lose the hull: measured on random layers, phase 3 then fails for one in three.
    And a direction that the slabs need to be met is not free: since slabs with small log-ratios
    are known best, the direction of the heads themselves may look so.
    """
    found, gap = clear_gap(spectrum, free)
    if found == 0 or gap < CLEAR_GAP:
        return 0
    shares = [np.mean(_missed(body, body.centre(spectrum, f)) < _ODD) for f in (0, found)]
    return found if shares[1] > _STILL_MET * shares[0] else 0


def _missed(body: Body, centre: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """How far two-sided slabs are missed by a centre, in units of their errors."""
    middle = (body.lower + body.upper) / 2
    return np.asarray(np.abs(body.normals @ centre - middle) / body.error)


def _certified(slabs: Slabs, projection_sum: Array) -> np.ndarray[Any, Any]:
    """Slabs whose row some p ≥ 0 explains within its tolerance, by linear programming.

    Where the least-squares p is not negative it is such a p: its residual is within the tolerance.
    """
    good = slabs.least >= 0
    rest = slabs.take(np.flatnonzero(~good))
    if len(rest.key) > 0:
        total = backend.to_numpy(projection_sum)
        good[~good] = certified(rest.tokens, rest.output, total, rest.tolerance)
    return np.asarray(good)


def _consistent(slabs: Slabs, free: int | None) -> Sculpture | None:
    """The slabs that agree with each other; None if they are too few.

    A slab is odd if the middle of all misses it, or if it cuts the free directions: then some
    heads are beyond it, and they did not agree on its row.
    """
    body = Body(
        slabs.normals(),
        slabs.value - WIDTH * slabs.error,
        slabs.value + WIDTH * slabs.error,
        slabs.error,
    )
    kept = np.ones(len(slabs.key), dtype=bool)
    for _ in range(_ROUNDS):
        if kept.sum() < _FEWEST_SLABS * body.normals.shape[1]:
            return None
        part = body.part(kept)
        spectrum = part.spectrum()
        known = _clear_free(part, spectrum, free)
        centre = part.centre(spectrum, known)
        # Heads are about as far from the centre as it is from 0, in some free direction.
        along = body.normals @ spectrum.directions[:known].T * np.linalg.norm(centre)
        cut = np.sqrt(np.sum(along**2, axis=1)) / slabs.error
        before, kept = kept, np.maximum(_missed(body, centre), cut) < _ODD
        if np.array_equal(before, kept):
            break
    return Sculpture(part, spectrum, known, centre, rejected=0.0)


def _with_one_sided(body: Body, slabs: Slabs, centre: np.ndarray[Any, Any]) -> Body:
    """The body cut by the half-spaces of saturated rows, except those that leave its middle out."""
    normals = slabs.normals()
    inside = normals @ centre <= slabs.value
    normals, value = -normals[inside], -slabs.value[inside]
    return Body(
        np.concatenate([body.normals, normals]),
        np.concatenate([body.lower, value]),
        np.concatenate([body.upper, np.full(len(value), np.inf)]),
        np.concatenate([body.error, np.zeros(len(value))]),
    )
