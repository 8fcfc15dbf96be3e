"""Whether another model explains examples that a fit explains too little of.

Cheap checks of the raw examples raise suspicions (see `suspicions.py`). Then the same search is
tried with a bias or a causal mask, on few examples. If that leaves a clearly smaller held-out error
its heads are tried without it. Either they do as well, and the first search was only stuck, or the
model that was asked for is wrong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onelayer.array import backend
from onelayer.data.storage import Positions
from onelayer.recovery import whitening
from onelayer.recovery.diagnosis import suspicions
from onelayer.recovery.diagnosis.suspicions import Suspicion
from onelayer.recovery.examples import WhitenedExamples, whiten
from onelayer.recovery.gauss_newton import varpro
from onelayer.recovery.gauss_newton.levenberg_marquardt import FAST
from onelayer.recovery.gauss_newton.stopping import StageOutcome
from onelayer.recovery.gauss_newton.varpro import Fit
from onelayer.recovery.strategies.search import Search
from onelayer.recovery.strategies.small import Small
from onelayer.recovery.validation import ValidatedExamples

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
_CHECKED = 2000  # examples that suspicions are based on
_EQUATIONS = 8.0  # per unknown, of a trial
_HELD_OUT = 0.15  # share of its examples
_STARTS = 2
_CLEARLY = 0.6  # a model that leaves at most this share of the error is the better one
_EXACT = 1e-6  # an error below this is exact, for a trial
_FEWEST, _FEWEST_EQUATIONS = 8, 2.0  # of held-out examples, and per unknown: fewer prove nothing


@dataclass
class SecondOpinion:
    """Suspicions about the examples, and trials of what they suggest."""

    examples: ValidatedExamples
    bias: bool
    causal: bool
    device: str | None
    suspicions: list[Suspicion] | None = None  # None before the examples were checked
    better: str = ""  # the model that explains the examples, in words
    left_over: str = ""  # what predicts the residuals of a fit, in words

    @property
    def suspicious(self) -> bool:
        """Whether the examples look like those of another model."""
        return any(one.kind in _ANOTHER_MODEL for one in self.suspicions or [])

    def review(self, strategy: Small, outcome: StageOutcome) -> tuple[StageOutcome, bool]:
        """The outcome, a better one, or a misfit; and whether the examples are suspicious."""
        if strategy.search.noise_remains(outcome.fit):
            return outcome, self.suspicious
        self.suspect()
        on_axes = any(one.kind == "axes" for one in self.suspicions or [])
        if strategy.tries_other_models and not on_axes:
            for bias, causal in ((True, False), (False, True), (True, True)):
                more = (bias, causal) != (self.bias, self.causal)
                if more and bias >= self.bias and causal >= self.causal:
                    found = self._trial(strategy, outcome, bias, causal)
                    if found is not outcome:
                        return found, self.suspicious
        return outcome, self.suspicious

    def look_at(self, search: Search, fit: Fit) -> None:
        """Find what predicts most of the residuals of the last fit, if anything does."""
        t, kind = max(((t, kind) for kind, t in search.evidence(fit).items()), default=(0.0, ""))
        if t > _SURE:
            self.left_over = (
                f"What the best fit leaves over (relative error {fit.error:.1e}) can be predicted "
                f"{_PREDICTED_BY[kind]}."
            )

    def suspect(self) -> None:
        """Check the raw examples, once; the checks need the outputs of all tokens."""
        if self.suspicions is None and self.examples.partly_observed:
            self.suspicions = []
        elif self.suspicions is None:
            rows = self.examples.source.rows(self._positions(_CHECKED))
            X, Y, *mask = (backend.to_numpy(array) for array in rows if array is not None)
            self.suspicions = suspicions.suspicions(X, Y, *mask, bias=self.bias, causal=self.causal)

    def _positions(self, count: int) -> Positions:
        """Positions of about `count` examples, evenly spaced."""
        return np.unique(np.linspace(0, len(self.examples.source) - 1, count).astype(int))

    def _trial(
        self, strategy: Small, outcome: StageOutcome, bias: bool, causal: bool
    ) -> StageOutcome:
        """The heads of a better trial, tried without its options; the outcome if none is better."""
        search, heads = strategy.search, outcome.fit.heads
        added = {"bias": bias and not self.bias, "causal": causal and not self.causal}
        name = " and ".join(f"{option}=True" for option, on in added.items() if on)
        training, held_out = self._split(search, heads, bias, causal)
        given = search.rank, search.tol, search.rounding, search.rng, search.log
        trial = Small(Search(training, held_out, *given))
        equations = trial.search.equations_per_unknown(heads)
        if held_out.examples < _FEWEST or equations < _FEWEST_EQUATIONS:
            return outcome
        before = varpro.held_out_error(outcome.fit, search.held_out)
        for _ in range(_STARTS):
            found = trial.fit(f"trial with {name}", trial.start(heads, FAST), heads, FAST)
            fit = found.fit
            left = varpro.held_out_error(fit, held_out)
            after = left * training.output_scale / search.problem.output_scale
            trusted = left < search.settings.stage.overfitted * max(fit.error, _EXACT)
            explained = found.solved or trial.search.noise_remains(fit)
            if not (trusted and after < _CLEARLY * before and explained):
                continue
            theta = search.problem.heads_of(training.layer(fit.theta, fit.weights))
            without = strategy.stage(f"heads of the trial with {name}", theta)
            left = varpro.held_out_error(without.fit, search.held_out)
            if without.solved or left < max(after / _CLEARLY, _EXACT):
                return without
            self.better = (
                f"With {name} a fit leaves a relative error of {after:.1e} on held-out "
                f"examples, without it {min(before, left):.1e}: pass {name}."
            )
            return replace(outcome, misfit=True)
        return outcome

    def _split(
        self, search: Search, heads: int, bias: bool, causal: bool
    ) -> tuple[WhitenedExamples, WhitenedExamples]:
        """Training and held-out examples of a trial with these options."""
        problem = search.problem
        unknowns = whitening.unknowns(problem.dim, problem.out_dim, heads, search.rank, bias)
        count = int(_EQUATIONS * unknowns * problem.examples / problem.equations) + 20
        some = self.examples.take(self._positions(count))
        whole = whiten(some, causal, bias, device=self.device, hold_all=True)
        order = search.rng.permutation(whole.examples)
        out = max(1, int(_HELD_OUT * whole.examples))
        return whole.take(order[out:]), whole.take(order[:out])
