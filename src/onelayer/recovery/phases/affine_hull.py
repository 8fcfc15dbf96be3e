"""Phase 5: the affine space of the attention matrices.

The body is thin but for the directions Θ_i - Θ_j, since no slab can cut between heads. The paper
finds them with a membership oracle; the singular values of the slabs show the same: m - 1 small
ones, then a gap. That also counts the heads where their number is not known. Nothing here depends
on the kind of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from onelayer.recovery.phases.polytope import Body
from onelayer.recovery.phases.sculpt import CLEAR_GAP, Sculpture, clear_gap


@dataclass(frozen=True, eq=False)
class Space:
    """The matrices centre + Σ_j z_j basis_j, as vectors of d² entries; the basis is orthonormal."""

    centre: np.ndarray[Any, Any]  # (d²,), orthogonal to the basis
    basis: np.ndarray[Any, Any]  # (m - 1, d²)
    gap: float  # of the singular values above the free directions
    error: float  # distance of a head from the space, relative to its size, as measured

    @property
    def heads(self) -> int:
        return len(self.basis) + 1

    def points(self, coordinates: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """(.., m - 1) -> (.., d²)."""
        return np.asarray(self.centre + coordinates @ self.basis)


def extract(sculpture: Sculpture, heads: int | None) -> Space:
    """The space of `heads` heads, or of as many as the sculpture shows."""
    spectrum, body = sculpture.spectrum, sculpture.body
    free, gap = clear_gap(spectrum, sculpture.free if heads is None else heads - 1)
    centre = body.centre(spectrum, free)
    return Space(centre, spectrum.directions[:free], gap, distance_of_halves(body, free))


def has_clear_gap(space: Space) -> bool:
    """Whether the free directions stand out."""
    return space.gap >= CLEAR_GAP


def distance_of_halves(body: Body, free: int) -> float:
    """How far the spaces of two halves of the slabs are apart, as an error relative to a head.

    Each half has twice the variance, the difference of two of them four times that of all slabs:
    the distance is about two standard deviations of the error. With c the distance of the centres
    and s the sine of the largest angle between the spaces, orthogonal heads of equal norm, which
    have |Θ|² = m |centre|² and |Θ - centre|² = (m - 1) |centre|², are off by

        √((c/|centre|)² + (m - 1) s²) / √m  ≤  √((c/|centre|)² + s²).

    What both halves share does not show: while W is crude the true error is up to three times that.
    """
    order = np.argsort(body.error[body.two_sided], kind="stable")
    two_sided = np.flatnonzero(body.two_sided)[order]
    halves = [body.part(two_sided[start::2]) for start in (0, 1)]
    spectra = [half.spectrum() for half in halves]
    centres = [half.centre(spectrum, free) for half, spectrum in zip(halves, spectra, strict=True)]
    bases = [spectrum.directions[:free] for spectrum in spectra]
    size = float(np.linalg.norm(centres[0])) or 1.0
    apart = centres[0] - centres[1]
    apart = apart - (apart @ bases[1].T) @ bases[1]
    # Singular values of the product of two orthonormal bases are cosines of the angles between.
    cosine = float(np.linalg.svd(bases[0] @ bases[1].T, compute_uv=False)[-1]) if free else 1.0
    turned = 1 - min(cosine, 1.0) ** 2
    return float(np.sqrt((np.linalg.norm(apart) / size) ** 2 + turned))
