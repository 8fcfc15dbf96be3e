"""Phase 5: the affine hull of the attention matrices.

No slab can cut between heads, so the polytope is thin in all directions except the Θ_i - Θ_j. The
paper finds these with a membership oracle. The singular values of the slabs show them too: m - 1
small ones, then a gap. The gap also counts the heads if their number is not known. Nothing here
depends on the kind of inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from onelayer.recovery.phases.polytope import Polytope
from onelayer.recovery.phases.state import AffineHull, Phase, PhaseState, Sculpture, Step
from onelayer.recovery.reasons import Reason


@dataclass(frozen=True)
class ExtractHull(Phase):
    """Phase 5. It refuses if the free directions do not stand out."""

    refusal: ClassVar[Reason | None] = Reason.SPAN_NOT_FOUND

    def step(self, state: PhaseState) -> Step:
        assert state.sculpture is not None
        hull = extract(state.sculpture, state.heads)
        note = f"{len(hull.basis)} free directions, gap {hull.gap:.3g}; distance of two halves"
        state = replace(state, hull=hull, heads=hull.heads)
        return Step(state, state.examples.examples, hull.error, note, refused=not hull.clear)


def extract(sculpture: Sculpture, heads: int | None) -> AffineHull:
    """The hull of `heads` heads, or of as many as the sculpture shows if None."""
    spectrum, polytope = sculpture.spectrum, sculpture.polytope
    free, gap = spectrum.clear_gap(sculpture.free if heads is None else heads - 1)
    centre = polytope.centre(spectrum, free)
    return AffineHull(centre, spectrum.directions[:free], gap, distance_of_halves(polytope, free))


def distance_of_halves(polytope: Polytope, free: int) -> float:
    """The distance between the hulls of two halves of the slabs, as an error relative to a head.

    Each half has twice the variance, and the difference of both four times that of all slabs: the
    distance is about two standard deviations of the error. With c the distance of the centres and s
    the sine of the largest angle between the hulls, orthogonal heads of equal norm, which have
    |Θ|² = m |centre|² and |Θ - centre|² = (m - 1) |centre|², are off by

        √((c/|centre|)² + (m - 1) s²) / √m  ≤  √((c/|centre|)² + s²).

    Errors that both halves share do not show: while W is crude the true error is up to three times
    larger.
    """
    order = np.argsort(polytope.error[polytope.two_sided], kind="stable")
    two_sided = np.flatnonzero(polytope.two_sided)[order]
    halves = [polytope.part(two_sided[start::2]) for start in (0, 1)]
    spectra = [half.spectrum() for half in halves]
    centres = [half.centre(spectrum, free) for half, spectrum in zip(halves, spectra, strict=True)]
    bases = [spectrum.directions[:free] for spectrum in spectra]
    size = float(np.linalg.norm(centres[0])) or 1.0
    apart = centres[0] - centres[1]
    apart = apart - (apart @ bases[1].T) @ bases[1]
    # Singular values of the product of two orthonormal bases are cosines of the angles between.
    cosine = float(np.linalg.svd(bases[0] @ bases[1].T, compute_uv=False)[-1]) if free else 1.0
    squared_sine = 1 - min(cosine, 1.0) ** 2
    return float(np.sqrt((np.linalg.norm(apart) / size) ** 2 + squared_sine))
