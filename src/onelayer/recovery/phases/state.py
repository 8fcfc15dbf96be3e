"""The state of the six phases, and the protocol of a phase.

A phase takes the state to the next one and measures the error of what it estimated. To add a phase,
subclass `Phase` and add an instance to `driver.PHASES`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import numpy as np

from onelayer.array.backend import Array
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.phases.polytope import CLEAR_GAP, Polytope, Spectrum
from onelayer.recovery.reasons import Reason

Numbers: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class SumEstimate:
    """An estimate of W = Σ W_i (d, e)."""

    projection_sum: Array
    error: float  # relative, as measured; infinite if the estimate is unusable
    rows: int  # output rows it was computed from


@dataclass(frozen=True, eq=False)
class Sculpture:
    """A polytope around the attention matrices, and what its construction showed."""

    polytope: Polytope
    spectrum: Spectrum
    free: int  # directions in which the polytope is long
    centre: Numbers  # of the slabs, zero along the free directions
    rejected: float  # share of candidate slabs that were inconsistent or not certified


@dataclass(frozen=True, eq=False)
class AffineHull:
    """The matrices centre + Σ_j z_j basis_j, as vectors of d² entries; the basis is orthonormal."""

    centre: Numbers  # (d²,), orthogonal to the basis
    basis: Numbers  # (m - 1, d²)
    gap: float  # ratio of the singular values on either side of the free directions
    error: float  # measured distance of a head from the hull, relative to the head

    @property
    def heads(self) -> int:
        return len(self.basis) + 1

    @property
    def clear(self) -> bool:
        """Whether the free directions stand out."""
        return self.gap >= CLEAR_GAP

    def points(self, coordinates: Numbers) -> Numbers:
        """(.., m - 1) -> (.., d²)."""
        return np.asarray(self.centre + coordinates @ self.basis)


@dataclass(frozen=True, eq=False)
class CandidateFit:
    """The best heads among the candidates."""

    coordinates: Numbers  # in the hull, (m, m - 1)
    fit: Fit
    tuples: int  # number of tuples of candidates that were tried
    held_out_error: float  # relative, on examples that were not fitted


@dataclass(frozen=True, eq=False)
class PhaseState:
    """What the phases know so far. `refusal` is set once a phase cannot continue."""

    examples: WhitenedExamples
    fitted: WhitenedExamples  # examples in memory, for the regressions of phase 6
    other: WhitenedExamples  # further examples in memory, for selection
    heads: int | None  # None while the number of heads is unknown
    sum: SumEstimate | None = None
    sculpture: Sculpture | None = None
    hull: AffineHull | None = None
    found: CandidateFit | None = None
    refusal: Reason | None = None


@dataclass(frozen=True, eq=False)
class Step:
    """The result of a phase."""

    state: PhaseState
    examples: int  # number of examples that were used
    error: float  # of its estimate, as measured; or the number that it measured
    note: str  # how it was measured
    refused: bool = False  # whether the state has only what was estimated until the phase failed


@dataclass(frozen=True)
class Phase(ABC):
    """One phase. Subclasses add their settings as fields."""

    number: int = 0
    name: str = ""
    refusal: ClassVar[Reason | None] = None  # ends the recovery if `step` refuses, if it ever does

    @property
    def stage(self) -> str:
        """The stage of the phase in the trace."""
        return f"phase {self.number}: {self.name}"

    @abstractmethod
    def step(self, state: PhaseState) -> Step:
        """The state after this phase. The given state is left unchanged."""
