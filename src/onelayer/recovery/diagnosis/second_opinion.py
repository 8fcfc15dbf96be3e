"""What else the examples may come from, asked where a fit explains too little of them.

Cheap checks of the raw examples raise suspicions (see `suspicions.py`). Whether a bias or a causal
mask was forgotten is then tried out: the same search with it, on few examples. If that leaves over
clearly less on held-out examples, its heads are tried without it: either they do as well, and the
first search was only stuck, or the model that was asked for is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onelayer.array import backend
from onelayer.recovery import whitening
from onelayer.recovery.diagnosis import suspicions
from onelayer.recovery.diagnosis.suspicions import Suspicion
from onelayer.recovery.gauss_newton import levenberg_marquardt, varpro
from onelayer.recovery.gauss_newton.stopping import StageOutcome
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.strategies.search import Search
from onelayer.recovery.validation import ValidatedExamples
from onelayer.recovery.whitening import WhitenedExamples

_ANOTHER_MODEL = {"axes", "not causal", "padding", "window", "positions", "unrelated"}
_PREDICTED_BY = {
    "place": "from a row's place and tokens: positions, a causal mask or padding may be missing",
    "restricted": "from what heads read before, after or near a row: a causal mask, a sliding "
    "window or padding may be missing",
    "output": "from the fitted outputs: something seems to follow the layer, such as a "
    "normalisation or an MLP",
    "keys": "from the spread of the tokens: biases or heads may be missing",
    "sequence": "from the sequence: the outputs are no attention, or heads or biases are missing",
    "head": "by one more head: heads may be missing",
    "position": "from tokens near a row: relative positions may be missing",
}
_SURE = 4.0  # Student's t
_CHECKED = 2000  # examples that suspicions rest on
_EQUATIONS = 8.0  # per unknown, of a trial
_HELD_OUT = 0.15  # share of its examples
_STARTS = 2
_CLEARLY = 0.6  # a model that leaves this share of the error, or less, is the better one
# Trials with fewer held-out examples or equations per unknown, or with so many times the error on
# held-out examples (if they are not exact), prove nothing.
_FEWEST, _FEWEST_EQUATIONS, _OVERFITTED, _EXACT = 8, 2.0, 3.0, 1e-6


@dataclass
class SecondOpinion:
    """Suspicions about the examples, and trials of what they suggest."""

    given: ValidatedExamples
    bias: bool
    causal: bool
    device: str | None
    suspicions: list[Suspicion] | None = None  # None before they were looked for
    better: str = ""  # what explains the examples, in words
    left_over: str = ""  # and what predicts the rest of a fit that does not

    @property
    def suspicious(self) -> bool:
        """Whether the examples look like those of another model than was asked for."""
        return any(one.kind in _ANOTHER_MODEL for one in self.suspicions or [])

    def improved(self, search: Search, outcome: StageOutcome) -> StageOutcome:
        """The outcome, a better one of the same model, or that it is a misfit."""
        fit = outcome.state.fit
        if search.noise_remains(fit):
            return outcome
        self.suspect()
        if search.is_large(fit.heads) or any(one.kind == "axes" for one in self.suspicions or []):
            return outcome
        for bias, causal in ((True, False), (False, True), (True, True)):
            more = (bias, causal) != (self.bias, self.causal)
            if more and bias >= self.bias and causal >= self.causal:
                found = self._tried(search, outcome, bias, causal)
                if found is not outcome:
                    return found
        return outcome

    def look_at(self, search: Search, fit: Fit) -> None:
        """Say what predicts most of what the last fit leaves over, if anything does."""
        found = search.evidence(fit)
        best = max(found, key=lambda one: one.t, default=None)
        if best is not None and best.t > _SURE:
            self.left_over = (
                f"What the best fit leaves over (relative error {fit.error:.1e}) can be predicted "
                f"{_PREDICTED_BY[best.kind]}."
            )

    def suspect(self) -> None:
        """Look at the raw examples, once."""
        if self.suspicions is None:
            self.suspicions = self._suspicions()

    def _suspicions(self) -> list[Suspicion]:
        X, Y, mask = (
            None if one is None else backend.to_numpy(one) for one in self._some(_CHECKED)
        )
        assert X is not None
        assert Y is not None
        X, Y = X.astype(float), Y.astype(float)
        return suspicions.suspicions(X, Y, mask, bias=self.bias, causal=self.causal)

    def _some(self, count: int) -> tuple[backend.Array | None, ...]:
        """About so many examples, evenly spread."""
        n = len(self.given.source)
        return self.given.source.rows(np.unique(np.linspace(0, n - 1, count).astype(int)))

    def _tried(
        self, search: Search, outcome: StageOutcome, bias: bool, causal: bool
    ) -> StageOutcome:
        """What comes of a trial with these options; the outcome itself if it is no better."""
        heads = outcome.state.fit.heads
        added = {"bias": bias and not self.bias, "causal": causal and not self.causal}
        name = " and ".join(f"{option}=True" for option, on in added.items() if on)
        fitted, held_out = self._posed(search, heads, bias, causal)
        trial = Search(
            fitted, held_out, search.rank, search.tol, search.rounding, 0, search.rng, search.log
        )
        if held_out.examples < _FEWEST or trial.equations_per_unknown(heads) < _FEWEST_EQUATIONS:
            return outcome
        before = varpro.held_out_error(outcome.state.fit, search.held_out)
        for _ in range(_STARTS):
            policy = levenberg_marquardt.FAST
            found = trial.run(f"trial with {name}", trial.start(heads, policy), heads, policy)
            left = varpro.held_out_error(found.state.fit, held_out)
            after = left * fitted.output_scale / search.problem.output_scale
            trusted = left < _OVERFITTED * max(found.state.fit.error, _EXACT)
            explained = found.solved or trial.noise_remains(found.state.fit)
            if trusted and after < _CLEARLY * before and explained:
                return self._compared(search, outcome, found, fitted, name, (before, after))
        return outcome

    def _compared(
        self,
        search: Search,
        outcome: StageOutcome,
        found: StageOutcome,
        fitted: WhitenedExamples,
        name: str,
        errors: tuple[float, float],
    ) -> StageOutcome:
        """The heads of a trial tried without its options: as good as with them, or a misfit."""
        fit, (before, after) = found.state.fit, errors
        theta = search.problem.heads_of(fitted.layer(fit.theta, fit.weights))
        without = search.stage(f"heads of the trial with {name}", theta)
        left = varpro.held_out_error(without.state.fit, search.held_out)
        if without.solved or left < max(after / _CLEARLY, _EXACT):
            return without
        self.better = (
            f"With {name} a fit leaves a relative error of {after:.1e} on held-out "
            f"examples, without it {min(before, left):.1e}: pass {name}."
        )
        return replace(outcome, misfit=True)

    def _posed(
        self, search: Search, heads: int, bias: bool, causal: bool
    ) -> tuple[WhitenedExamples, WhitenedExamples]:
        """Examples to fit and to hold out, of a layer with these options."""
        posed = search.problem
        unknowns = whitening.unknowns(posed.dim, posed.out_dim, heads, search.rank, bias)
        count = int(_EQUATIONS * unknowns * posed.examples / posed.equations) + 20
        X, Y, mask = (whitening.place_or_none(one, self.device) for one in self._some(count))
        whole = whitening.whiten(X, Y, mask, causal, bias)
        order = search.rng.permutation(whole.examples)
        out = max(1, int(_HELD_OUT * whole.examples))
        return whole.take(order[out:]), whole.take(order[:out])
