"""query(): find a layer that can be asked, from inputs that are chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from onelayer import inputs
from onelayer.array import checks
from onelayer.inputs import Seed
from onelayer.layer import AttentionLayer
from onelayer.recovery import validation
from onelayer.recovery.api import Listener, open_log
from onelayer.recovery.options import Options
from onelayer.recovery.queries.closed_form import ClosedForm, NotApplicableError
from onelayer.recovery.queries.oracle import Matrix, Oracle, QueriesSpentError
from onelayer.recovery.reasons import Reason
from onelayer.recovery.result import Recovery
from onelayer.recovery.run import RecoveryRun
from onelayer.recovery.strategies.refine import refine
from onelayer.recovery.trace import Log
from onelayer.recovery.whitening import unknowns


@dataclass(frozen=True)
class QuerySettings:
    """Numbers of random inputs that are asked, each with its reason."""

    tokens: int = 3  # of a random input: scores of a row then have more than one difference
    # Equations per unknown. A known layer is checked, and its error bars computed, with few; from
    # a random start the first number succeeds for most layers.
    check_equations: float = 1.6
    search_equations: float = 4.5
    fewest_checks: int = 20
    fewest_searched: int = 100  # enough to tell noise from a wrong model
    growth: float = 1.8  # of the number of random inputs from one round to the next..
    rounds: int = 4  # ..of which there are so many
    restarts: int = 5  # in one round: more inputs help better than more restarts
    right_error: float = 1e-2  # of a layer in closed form on random inputs: refined, not searched


DEFAULT = QuerySettings()


def query(
    oracle: Callable[[Any], Any],
    dim: int,
    heads: int | Literal["auto"] = "auto",
    *,
    rank: int | None = None,
    bias: bool = False,
    max_queries: int | None = None,
    tol: float = 1e-12,
    head_tol: float = 0.1,
    seed: Seed = 0,
    progress: bool | Listener | None = None,
    max_steps: int = 3000,
    max_seconds: float | None = None,
) -> Recovery:
    """Find an attention layer that can be asked for the outputs of chosen inputs.

    Inputs of one, two and more tokens give the layer in closed form, with about as many output
    entries as it has unknowns. Random inputs, on a scale at which attention is neither uniform nor
    saturated, then check the layer, refine it, and give its error bars. If the closed form does not
    apply (more heads than dimensions of a token or an output, or outputs that are too noisy), the
    layer is searched from random inputs as by `recover`, and more are asked until it is found.

    Parameters
    ----------
    oracle : callable
        Function from inputs (n, tokens, dim), a float64 array, to outputs (n, tokens, out_dim).
        It is called with any n, and with 1 to dim + 2 tokens.
    dim : int
        Dimension of a token.
    heads : int or "auto"
        Number of heads; "auto" finds it.
    rank : int, optional
        Rank of the attention matrices where it is known (the head size).
    bias : bool
        Whether the layer has key biases and an output bias.
    max_queries : int, optional
        Largest number of inputs to ask for.
    tol, head_tol : float
        As in `recover`.
    seed : int, SeedSequence, BitGenerator or Generator
        The same seed asks the same inputs of the same oracle, and gives the same bits.
    progress : bool or callable, optional
        True shows a live display. A function is called with every `TraceRow`.
    max_steps, max_seconds : int and float, optional
        Budget of the refinement or search, as in `recover`.

    Returns
    -------
    Recovery
        As from `recover`. Its `queries` is the number of inputs asked, `scalars` the number of
        output entries from which the layer was found, and `scalars_returned` that of all.

    Raises
    ------
    TypeError, ValueError
        If an argument is not valid, or the oracle raises, returns something else than finite
        outputs, or answers the same input differently; and if `max_queries` is too small to find
        any layer.

    Examples
    --------
    >>> import onelayer as ol
    >>> layer = ol.AttentionLayer.random(heads=3, dim=4, seed=0)
    >>> found = ol.query(layer, dim=4)
    >>> found.layer.heads, bool(found.layer.distance(layer).attention.max() < 1e-9)
    (3, True)
    """
    if not callable(oracle):
        raise TypeError(f"oracle is {type(oracle).__name__}, expected a function")
    dim = checks.positive_int(dim, "dim")
    if max_queries is not None:
        max_queries = checks.positive_int(max_queries, "max_queries")
    rank = validation.known_rank(rank, dim)
    options = Options(heads, rank, bias, tol=tol, head_tol=head_tol, restarts=DEFAULT.restarts)
    asked = Oracle(oracle, max_queries)
    with open_log(max_steps, max_seconds, progress) as log:
        return _Queries(asked, dim, options, log, np.random.default_rng(seed)).run()


@dataclass(eq=False)
class _Queries:
    """One call of `query`."""

    oracle: Oracle
    dim: int
    options: Options
    log: Log
    rng: np.random.Generator
    settings: QuerySettings = field(default_factory=lambda: DEFAULT)

    def run(self) -> Recovery:
        """The layer in closed form, checked and refined, or searched from random inputs."""
        form = ClosedForm(
            self.oracle, self.dim, self.options.known_heads, self.options.bias, self.rng
        )
        try:
            initial = self._closed_form(form)
            scalars = self.oracle.scalars
            return self._from_random(form, initial, scalars)
        except QueriesSpentError:
            raise ValueError(
                f"max_queries is {self.oracle.max_queries}, and {self.oracle.queries} queries were "
                "not enough to find any layer, expected more"
            ) from None

    def _closed_form(self, form: ClosedForm) -> AttentionLayer | None:
        """The layer in closed form, None if there is none."""
        try:
            form.measure()
            self._note("scale of the inputs", f"standard deviation {form.scale:.2g}")
            layer = form.layer()
        except NotApplicableError as why:
            self._note("closed form", f"not found: {why}")
            return None
        self._note("closed form", f"{layer.heads} heads from {self.oracle.scalars} output entries")
        return layer

    def _from_random(
        self, form: ClosedForm, initial: AttentionLayer | None, scalars: int
    ) -> Recovery:
        """Check and refine a layer on random inputs, or search for one, with ever more of them."""
        known = self.options.known_heads
        X = np.empty((0, self.settings.tokens, self.dim))
        Y = np.empty((0, self.settings.tokens, self.oracle.out_dim or 1))
        found = None
        for _ in range(self.settings.rounds):
            heads = initial.heads if initial is not None else known or max(1, form.rank)
            count = self._affordable(self._count(initial, heads, len(X)), len(X))
            if found is not None and count <= len(X):
                break
            new = self._random_inputs(count - len(X), form.scale)
            X, Y = np.concatenate([X, new]), np.concatenate([Y, self.oracle.ask(new)])
            if initial is not None and self._error(initial, X, Y) > self.settings.right_error:
                self._note("closed form", "dropped: it does not explain random inputs")
                initial = None
                continue
            self._note("random inputs", f"{len(X)} of {X.shape[1]} tokens")
            found = self._refined(initial, X, Y)
            if found.converged or self.log.spent or found.reason is Reason.WRONG_MODEL:
                break
        found = found or self._refined(initial, X, Y)
        return replace(
            found,
            queries=self.oracle.queries,
            scalars=self.oracle.scalars if initial is None else scalars,
            scalars_returned=self.oracle.returned,
            seconds=self.log.seconds,
        )

    def _random_inputs(self, count: int, scale: float) -> Matrix:
        return scale * inputs.gaussian(count, self.settings.tokens, self.dim, self.rng)

    def _count(self, initial: AttentionLayer | None, heads: int, have: int) -> int:
        """The number of random inputs of a round, if so many were asked before."""
        numbers, out_dim = self.settings, self.oracle.out_dim or 1
        ratio, fewest = numbers.check_equations, numbers.fewest_checks
        if initial is None:
            ratio, fewest = numbers.search_equations, numbers.fewest_searched
        entries = unknowns(self.dim, out_dim, heads, self.options.rank, self.options.bias)
        enough = ratio * entries / (numbers.tokens * out_dim)
        return int(np.ceil(max(enough, fewest, numbers.growth * have)))

    def _affordable(self, count: int, have: int) -> int:
        """As many inputs as `max_queries` allows, those already asked among them."""
        if self.oracle.max_queries is None:
            return count
        most = self.oracle.max_queries - self.oracle.queries + have
        if most < 2:
            raise QueriesSpentError
        return min(count, most)

    def _error(self, layer: AttentionLayer, X: Matrix, Y: Matrix) -> float:
        """The relative error of a layer."""
        return float(np.linalg.norm(layer(X) - Y) / (np.linalg.norm(Y) or 1.0))

    def _refined(self, initial: AttentionLayer | None, X: Matrix, Y: Matrix) -> Recovery:
        """What Gauss-Newton steps find from a layer, or from random starts."""
        examples = validation.examples(X, Y, None, None, self.log.progress)
        options = self.options
        if initial is not None:
            options = replace(options, heads=initial.heads)
        return refine(RecoveryRun(examples, options, self.log, self.rng), initial)

    def _note(self, stage: str, note: str) -> None:
        """Write a decision to the trace, as an error of 1: that of no layer at all."""
        self.log.write(stage, 0, self.oracle.queries, 1.0, note=note)
