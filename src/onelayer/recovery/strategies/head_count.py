"""Strategy for an unknown number of heads, and the choice of strategy for a known number."""

from __future__ import annotations

from dataclasses import dataclass

from onelayer.array.backend import Array
from onelayer.recovery.gauss_newton.levenberg_marquardt import FAST
from onelayer.recovery.gauss_newton.stopping import Ending, StageOutcome
from onelayer.recovery.strategies import cost, pruning
from onelayer.recovery.strategies.large import Large
from onelayer.recovery.strategies.search import Search
from onelayer.recovery.strategies.small import Review, Small


def for_heads(search: Search, heads: int, restarts: int = 0, review: Review | None = None) -> Small:
    """The strategy for a known number of heads, by the size of the problem."""
    large = cost.is_large(search.problem, heads, search.rank, search.settings)
    return Large(search, restarts, review) if large else Small(search, restarts, review)


@dataclass
class HeadCount:
    """Finds the smallest number of heads that explains the examples.

    Heads are added, one and then half as many again, until the examples are explained or the
    held-out error no longer falls. Then heads are dropped, the cheapest first, as long as the rest
    explains the examples as well. Each decision writes its held-out error to the trace.
    """

    search: Search
    restarts: int
    review: Review | None = None

    def run(self, resumed: Array | None = None) -> StageOutcome:
        """The outcome with the smallest number of heads, from one head or resumed heads."""
        search = self.search
        theta = Small(search).start(1, FAST) if resumed is None else resumed
        heads = search.heads_in(theta)
        name = "1 head" if resumed is None else f"resumed with {_counted(heads)}"
        best = self._for_heads(heads).fit(name, theta, heads, FAST)
        best, error = self._more_heads(best, search.validate(name, best))
        best = self._fewer_heads(best, error)
        return best if best.solved else self._for_heads(best.fit.heads).escape(best)

    def _for_heads(self, heads: int) -> Small:
        return for_heads(self.search, heads, self.restarts, self.review)

    def _more_heads(self, best: StageOutcome, best_error: float) -> tuple[StageOutcome, float]:
        """Add heads until the examples are explained or the held-out error no longer falls."""
        search, numbers = self.search, self.search.settings
        failures = 0
        while not (best.solved or search.log.spent) and failures < numbers.head_count.failures:
            fit = best.fit
            heads = fit.heads + max(1, fit.heads // 2) + failures
            if search.equations_per_unknown(heads) < numbers.escape.fewest_equations:
                break
            name = f"{heads} heads"
            theta = self._for_heads(fit.heads).grow(fit, heads - fit.heads)
            outcome = self._for_heads(heads).fit(name, theta, heads, FAST, attempt=failures)
            error = search.validate(name, outcome)
            if outcome.solved or error < numbers.head_count.gain * best_error:
                best, best_error, failures = outcome, error, 0
            else:
                failures += 1
        return best, best_error

    def _fewer_heads(self, best: StageOutcome, best_error: float) -> StageOutcome:
        """Drop heads as long as the examples stay explained."""
        while best.fit.heads > 1 and not self.search.log.spent:
            heads = best.fit.heads - 1
            name = f"without one: {_counted(heads)}"
            outcome = self._for_heads(heads).stage(name, pruning.prune(best.fit, heads))
            error = self.search.validate(name, outcome)
            as_good = error < self.search.settings.head_count.as_good * best_error
            reached = outcome.ending is Ending.REACHED
            if not (reached if best.ending is Ending.REACHED else as_good):
                break
            best, best_error = outcome, error
        return best


def _counted(heads: int) -> str:
    return f"{heads} head{'s' * (heads > 1)}"
