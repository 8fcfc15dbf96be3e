"""One run of `recover`: what all methods need, and the steps from a fit to the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from onelayer.array import backend
from onelayer.array.rounding import Rounding, rounding
from onelayer.recovery.certificate import Certificate, certify
from onelayer.recovery.diagnosis.advice import advice
from onelayer.recovery.diagnosis.second_opinion import SecondOpinion
from onelayer.recovery.examples import WhitenedExamples
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.options import Options
from onelayer.recovery.reasons import Reason
from onelayer.recovery.result import Recovery
from onelayer.recovery.strategies import cost, settings
from onelayer.recovery.strategies.search import Search
from onelayer.recovery.strategies.settings import Settings
from onelayer.recovery.trace import Log
from onelayer.recovery.validation import ValidatedExamples, without_padding
from onelayer.recovery.whitening import Whitening

_SHARP, _SHARP_TOLS = 1e-9, 1e3  # error bars below this, or this many times `tol`, are small enough
_ROUNDED = 1000  # examples from which the rounding of the outputs is estimated


@dataclass(frozen=True, eq=False)
class RecoveryRun:
    """Validated examples and options, with the log and the random numbers of a run."""

    examples: ValidatedExamples
    options: Options
    log: Log
    rng: np.random.Generator
    settings: Settings = field(default_factory=lambda: settings.DEFAULT)

    @cached_property
    def rounding(self) -> Rounding:
        """How the outputs were rounded before they were given."""
        source = self.examples.source
        X, Y, mask = source.first(min(_ROUNDED, len(source)))
        return rounding(without_padding(X, Y, mask)[1])

    def note(self, stage: str, note: str) -> None:
        """Write a row without a fit to the trace; an error of 1 is that of no layer at all."""
        heads = self.options.known_heads or 0
        self.log.write(stage, heads, self.examples.shape[0], 1.0, note=note)

    def search(
        self, training: WhitenedExamples, held_out: WhitenedExamples, **extra: Any
    ) -> Search:
        """A search for the heads that explain the training examples."""
        rank, error = training.rank(self.options.rank), self.rounding.error / training.output_scale
        given = (training, held_out, rank, self.options.tol, error, self.rng, self.log)
        patient = self.log.max_seconds is not None
        return Search(*given, patient=patient, settings=self.settings, **extra)

    def certify(self, fit: Fit, search: Search, held_out: WhitenedExamples) -> Certificate:
        """The certificate of the last fit of a search."""
        sharp = max(_SHARP, _SHARP_TOLS * self.options.tol)
        if cost.is_large(search.problem, fit.heads, search.rank, self.settings):
            sharp = max(sharp, self.settings.large.sharp_bars)
        stored = backend.epsilon(backend.floating(self.examples.source.samples[0]))
        given = (search.problem, held_out, search.rank, search.rounding)
        return certify(fit, *given, self.rng, sharp, stored)

    def result(
        self,
        transform: Whitening,
        fit: Fit,
        reason: Reason,
        certificate: Certificate,
        opinion: SecondOpinion | None = None,
    ) -> Recovery:
        """The result in the caller's coordinates and kind of array."""
        sample = backend.floating(self.examples.source.samples[0])
        dim, scale, tol = self.examples.shape[2], transform.output_scale, self.options.head_tol
        return Recovery(
            layer=transform.layer(fit.theta, fit.weights).to(sample),
            converged=reason.good,
            reason=reason,
            advice=advice(reason, certificate, dim, tol, self.rounding, scale, opinion),
            relative_error=fit.error,
            trace=self.log.rows,
            certificate=certificate,
            seconds=self.log.seconds,
        )
