"""Phases 2 and 4: sculpt a polytope around the attention matrices.

Every row on which heads agree gives slabs that contain all Θ_i and so their affine hull (see
`slabs`); their intersection is the polytope. Here slabs are certified, and those that are
inconsistent with the others are dropped.

On Boolean inputs tokens may be equal: their pairs say nothing and are skipped. Examples also
repeat, so copies of a slab count once. Neither occurs on continuous inputs (Gaussian, sphere), and
nothing else differs, since tokens are whitened.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from onelayer.array import backend
from onelayer.array.backend import Array
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.phases.affine_hull import distance_of_halves
from onelayer.recovery.phases.agreement import certified
from onelayer.recovery.phases.polytope import CLEAR_GAP, Polytope, Spectrum
from onelayer.recovery.phases.slabs import WIDTH, Slabs, find_slabs
from onelayer.recovery.phases.state import Phase, PhaseState, Sculpture, Step
from onelayer.recovery.reasons import Reason


@dataclass(frozen=True)
class Sculpt(Phase):
    """Phases 2 and 4. They refuse if too few consistent slabs are found."""

    refusal: ClassVar[Reason | None] = Reason.TOO_FEW_AGREEMENTS
    # In units of a slab's error, measured on random layers: heads lie within 2 of the middle of
    # most slabs. A slab farther than this from the common centre shows no agreement and is dropped;
    # of the others, almost none has a head farther than WIDTH from its middle.
    inconsistent: float = 4.0
    rounds: int = 8  # of dropping inconsistent slabs
    still_met: float = 0.9  # share of slabs that must stay consistent when directions are free
    slabs_per_unknown: float = 1.5  # fewest

    def step(self, state: PhaseState) -> Step:
        assert state.sum is not None
        estimate, count = state.sum, state.examples.examples
        found = self.sculpt(state.examples, estimate.projection_sum, estimate.error, state.heads)
        if found is None:
            return Step(state, count, math.inf, "too few narrow and consistent slabs", refused=True)
        two_sided = found.polytope.two_sided
        note = (
            f"{int(two_sided.sum())} slabs, {int((~two_sided).sum())} one-sided, "
            f"{found.rejected:.0%} rejected; distance of two halves of them"
        )
        error = distance_of_halves(found.polytope, found.free)
        return Step(replace(state, sculpture=found), count, error, note)

    def sculpt(
        self, examples: WhitenedExamples, projection_sum: Array, error: float, heads: int | None
    ) -> Sculpture | None:
        """The polytope, from `projection_sum` with a relative error; None if few slabs remain."""
        slabs, one_sided = find_slabs(examples, projection_sum, error)
        # Some p ≥ 0 has to explain the row of a slab within its tolerance. A least-squares p
        # without negative entries is such a p: its residual is within the tolerance.
        good = slabs.least >= 0
        rest = slabs.take(~good)
        if len(rest.key) > 0:
            total = backend.to_numpy(projection_sum)
            good[~good] = certified(rest.tokens, rest.output, total, rest.tolerance)
        found = self._consistent(slabs.take(good), None if heads is None else heads - 1)
        if found is None:
            return None
        # Half-spaces of saturated rows are added if they contain the centre.
        normals = one_sided.normals()
        inside = normals @ found.centre <= one_sided.value
        lower = -one_sided.value[inside]
        upper, errors = np.full(len(lower), np.inf), np.zeros(len(lower))
        polytope = found.polytope.concat(Polytope(-normals[inside], lower, upper, errors))
        rejected = 1 - len(found.polytope.error) / len(slabs.key)
        return replace(found, polytope=polytope, rejected=rejected)

    def _consistent(self, slabs: Slabs, free: int | None) -> Sculpture | None:
        """The slabs that are consistent with each other; None if they are too few.

        A slab is inconsistent if it is far from the common centre, or if it cuts the free
        directions: then some heads are outside of it, and they did not agree on its row.
        """
        reach = WIDTH * slabs.error
        polytope = Polytope(slabs.normals(), slabs.value - reach, slabs.value + reach, slabs.error)
        kept = np.ones(len(slabs.key), dtype=bool)
        for _ in range(self.rounds):
            if kept.sum() < self.slabs_per_unknown * polytope.normals.shape[1]:
                return None
            part = polytope.part(kept)
            spectrum = part.spectrum()
            known = self._clear_free(part, spectrum, free)
            centre = part.centre(spectrum, known)
            # Heads are about as far from the centre as it is from 0, in some free direction.
            along = polytope.normals @ spectrum.directions[:known].T * np.linalg.norm(centre)
            cut = np.sqrt(np.sum(along**2, axis=1)) / slabs.error
            distance = np.maximum(polytope.distances(centre), cut)
            before, kept = kept, distance < self.inconsistent
            if np.array_equal(before, kept):
                break
        return Sculpture(part, spectrum, known, centre, rejected=0.0)

    def _clear_free(self, polytope: Polytope, spectrum: Spectrum, free: int | None) -> int:
        """The number of free directions if they are clear, else zero.

        While W is crude no gap shows. Leaving the smallest directions free all the same would drop
        good slabs and lose the hull: measured on random layers, phase 3 then fails for one in
        three. A direction is not free either if slabs are only met along it: slabs with small
        log-ratios are the most accurate, so the direction of the heads themselves may look free.
        """
        found, gap = spectrum.clear_gap(free)
        if found == 0 or gap < CLEAR_GAP:
            return 0
        without, with_free = (
            np.mean(polytope.distances(polytope.centre(spectrum, f)) < self.inconsistent)
            for f in (0, found)
        )
        return found if with_free > self.still_met * without else 0
