"""Peers of `recover`: what a user of torch would fit to the same examples, and how long it takes.

Minibatch Adam works in float32. Full-batch Adam and L-BFGS do so where the rank of heads is known.
Where it is not, problems are small and both work in float64: float32 cannot reach 1e-10, as it ends
at an error of a head of about 1e-7.

The peers know what `recover` knows. If the rank r is known, heads are query, key, value and output
factors, scores are divided by √r, and attention is torch's own fused one. If not, they are full
matrices M and W with scores x M x / √d. Biases are those of queries and outputs, which make those
of keys and values superfluous. Entries begin with standard deviation d^-1/2, biases with zero.
Outputs are divided by their standard deviation, and centred if the layer has biases.

Adam's learning rate falls to zero as a cosine over the time it is given. That time matters: with
little the descent does not arrive, with much it arrives late. So it is tried with a short time
(0.1 s, or 1/128 of the limit if that is more), then with twice as much and so on up to the limit,
each time with three learning rates, until one run arrives. Only the time of the best run counts,
not that of the tries. L-BFGS has a line search and runs once. Time to measure errors is not
counted. Errors are measured every hundredth of a run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional

import onelayer as ol
from onelayer.array import backend

TARGETS = (1e-2, 1e-5, 1e-10)  # relative errors of the worst head
METHODS = ("minibatch Adam", "Adam", "L-BFGS")
# Learning rates relative to the size of entries, d^-1/2. Products of factors move twice as far.
RATES_FULL = (0.5, 0.2, 0.06)
RATES_FACTORED = (0.2, 0.06, 0.02)
FIRST = 0.1  # seconds of the first and shortest cosine ..
DOUBLINGS = 7  # .. and how often it is doubled at most
STEPS = 10  # between two readings of the clock
LBFGS_SCALE = 1e12  # of the loss: torch drops curvature of less than 1e-10
CHUNK = 4096  # examples whose activations are in memory at once
SAMPLE = 1000  # examples whose span heads are compared on

Times = dict[float, float]  # seconds to each target, infinite if it was not reached


@dataclass(frozen=True)
class Problem:
    """Examples, what is known about the layer, and the layer itself to measure errors."""

    X: Any
    Y: Any
    truth: ol.AttentionLayer
    rank: int | None = None  # of attention matrices, full if None
    value_rank: int | None = None  # of projections
    bias: bool = False
    seed: int = 0
    batch: int = 256  # examples of a minibatch
    rates: tuple[float, ...] = ()  # learning rates of Adam relative to d^-1/2, the usual if empty

    @property
    def learning_rates(self) -> list[float]:
        usual = RATES_FULL if self.rank is None else RATES_FACTORED
        return [rate / self.truth.dim**0.5 for rate in self.rates or usual]

    def errors(self, layer: ol.AttentionLayer) -> np.ndarray:
        """Relative errors of the heads on the span of the inputs."""
        sample = backend.to_numpy(self.X[:SAMPLE])
        return layer.distance(self.truth, inputs=sample).attention

    def error(self, layer: ol.AttentionLayer) -> float:
        """Relative error of the worst head."""
        return float(self.errors(layer).max())


def race(method: str, problem: Problem, budget: float) -> Times:
    """Seconds of one method to each target. No run takes much longer than the budget."""
    exact = problem.rank is None and method != "minibatch Adam"
    goal = TARGETS[-1] if exact else TARGETS[-2]
    data = Data(problem, torch.float64 if exact else torch.float32)
    if method == "L-BFGS":
        return descend(problem, data, lbfgs_step, goal, budget, budget)
    batch = problem.batch if method == "minibatch Adam" else None
    best = dict.fromkeys(TARGETS, np.inf)
    for horizon in horizons(budget):
        for rate in problem.learning_rates:
            step = adam_step(rate, batch)
            # A run that is slower than the best so far ends early.
            times = descend(problem, data, step, goal, horizon, min(horizon, best[goal]))
            best = {target: min(best[target], times[target]) for target in TARGETS}
        if best[goal] < np.inf:
            break
    return best


def horizons(budget: float) -> list[float]:
    """Times for a run that double up to the budget."""
    doublings = min(DOUBLINGS, max(0, math.ceil(math.log2(budget / FIRST))))
    return [budget / 2**i for i in range(doublings, -1, -1)]


def seconds_after(found: float, error: float) -> Times:
    """The times of a method whose result has this error and that has no results before its end."""
    return {target: found if error <= target else np.inf for target in TARGETS}


# The model, with outputs divided by their standard deviation


class Data:
    """Examples as torch tensors, and how to undo the scaling of outputs."""

    def __init__(self, problem: Problem, dtype: torch.dtype) -> None:
        X, Y = torch.as_tensor(problem.X), torch.as_tensor(problem.Y)
        Y = Y.reshape(-1, Y.shape[-1])
        self.mean = Y.mean(dim=0) if problem.bias else torch.zeros_like(Y[0])
        self.deviation = float(torch.sqrt(torch.mean((Y - self.mean) ** 2))) or 1.0
        self.X = X.to(dtype)
        self.Y = ((Y - self.mean) / self.deviation).to(dtype).reshape(*X.shape[:2], -1)
        self.generator = torch.Generator(self.X.device).manual_seed(problem.seed)

    def parts(self) -> list[tuple[Any, Any]]:
        """All examples, in parts whose activations fit into memory."""
        return list(zip(self.X.split(CHUNK), self.Y.split(CHUNK), strict=True))

    def minibatches(self, size: int) -> Iterator[tuple[Any, Any]]:
        """Random examples without end, in epochs."""
        size = min(size, len(self.X))
        while True:
            order = torch.randperm(len(self.X), generator=self.generator, device=self.X.device)
            for chosen in order[: len(order) // size * size].split(size):
                yield self.X[chosen], self.Y[chosen]


class Model(torch.nn.Module):
    """A layer as the peers fit it."""

    def __init__(self, problem: Problem, data: Data) -> None:
        super().__init__()
        truth, self.bias = problem.truth, problem.bias
        self.heads, self.dim = m, d = truth.heads, truth.dim
        rng = np.random.default_rng(problem.seed)

        def drawn(*shape: int) -> torch.nn.Parameter:
            entries = rng.standard_normal(shape) / d**0.5
            return torch.nn.Parameter(torch.as_tensor(entries).to(data.X))

        queries, values = (m * (rank or d) for rank in (problem.rank, problem.value_rank))
        self.query, self.output = drawn(d, queries), drawn(values, truth.out_dim)
        self.key = None if problem.rank is None else drawn(d, queries)
        self.value = None if problem.value_rank is None else drawn(d, values)
        if problem.bias:
            self.query_bias = torch.nn.Parameter(torch.zeros_like(self.query[0]))
            self.output_bias = torch.nn.Parameter(torch.zeros_like(self.output[0]))

    def forward(self, X: Any) -> Any:
        query = X.flatten(0, 1) @ self.query
        if self.bias:
            query = query + self.query_bias
        attended = self._full(query, X) if self.key is None else self._factored(query, X)
        outputs = attended @ self.output
        outputs = outputs + self.output_bias if self.bias else outputs
        return outputs.reshape(*X.shape[:2], -1)

    def _full(self, query: Any, X: Any) -> Any:
        """Attended tokens of all heads side by side, with one product per example."""
        n, tokens, dim = X.shape
        scores = query.reshape(n, -1, dim) @ X.transpose(1, 2) / dim**0.5
        return (torch.softmax(scores, dim=-1) @ X).reshape(n * tokens, -1)

    def _factored(self, query: Any, X: Any) -> Any:
        """Attended values, or tokens, of all heads side by side."""
        rows = X.flatten(0, 1)
        values = self._by_head(X, None if self.value is None else rows @ self.value)
        found = functional.scaled_dot_product_attention(
            self._by_head(X, query), self._by_head(X, rows @ self.key), values
        )
        return found.transpose(1, 2).reshape(len(rows), -1)

    def _by_head(self, X: Any, rows: Any) -> Any:
        """Rows (n·k, m·r) as (n, m, k, r), or the tokens themselves for all heads."""
        if rows is None:
            return X[:, None].expand(-1, self.heads, -1, -1)
        return rows.reshape(*X.shape[:2], self.heads, -1).transpose(1, 2)

    def layer(self, data: Data) -> ol.AttentionLayer:
        """The same layer for outputs as they were."""
        query, output = self._blocks(self.query), self._blocks(self.output.T).swapaxes(1, 2)
        key, value = (
            np.eye(self.dim) if one is None else self._blocks(one) for one in (self.key, self.value)
        )
        key = key.swapaxes(-1, -2) / query.shape[2] ** 0.5
        projection = value @ output * data.deviation
        if not self.bias:
            return ol.AttentionLayer(query @ key, projection)
        key_bias = (self._blocks(self.query_bias[None]) @ key)[:, 0]
        output_bias = numbers(self.output_bias) * data.deviation + numbers(data.mean)
        return ol.AttentionLayer(query @ key, projection, key_bias, output_bias)

    def _blocks(self, factor: Any) -> Any:
        """A factor (d, m·r) as (m, d, r)."""
        return numbers(factor).reshape(len(factor), self.heads, -1).swapaxes(0, 1)

    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(one).all()) for one in self.parameters())


def numbers(tensor: Any) -> np.ndarray:
    return tensor.detach().double().cpu().numpy()


# Descent

Step = Callable[[float], None]  # takes the share of the time that has passed


def descend(
    problem: Problem,
    data: Data,
    make_step: Callable[[Model, Data], Step],
    goal: float,
    horizon: float,
    limit: float,
) -> Times:
    """Seconds to each target. A run ends at the goal or the limit, or where it cannot move.

    It cannot move if that is so after the optimizer has begun afresh: one step of torch's line
    search that fails would be the last.
    """
    model = Model(problem, data)
    step, times = make_step(model, data), dict.fromkeys(TARGETS, np.inf)
    spent = measured = 0.0
    stuck = 0  # times in a row
    while spent < limit and times[goal] == np.inf and stuck < 2:
        before = [one.detach().clone() for one in model.parameters()]
        started = now(data)
        step(spent / horizon)
        spent += now(data) - started
        stuck = stuck + 1 if all(map(torch.equal, before, model.parameters())) else 0
        if stuck:
            step = make_step(model, data)
        if not stuck and spent < min(limit, measured + 0.01 * max(spent, horizon)):
            continue
        measured = spent
        if not model.is_finite():
            break
        reached = seconds_after(spent, problem.error(model.layer(data)))
        times = {target: min(times[target], reached[target]) for target in TARGETS}
    return times


def now(data: Data) -> float:
    """Seconds, after all work on the device is done."""
    if data.X.is_cuda:
        torch.cuda.synchronize(data.X.device)
    return time.perf_counter()


def adam_step(rate: float, batch: int | None) -> Callable[[Model, Data], Step]:
    """Steps of Adam at a rate that falls as a cosine, on minibatches or all examples."""

    def make(model: Model, data: Data) -> Step:
        optimizer = torch.optim.Adam(model.parameters(), lr=rate, fused=True)
        drawn = None if batch is None else data.minibatches(batch)

        def step(share: float) -> None:
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 + math.cos(math.pi * min(share, 1.0))) / 2
            for _ in range(STEPS):
                optimizer.zero_grad()
                add_gradient(model, data.parts() if drawn is None else [next(drawn)])
                optimizer.step()

        return step

    return make


def lbfgs_step(model: Model, data: Data) -> Step:
    """Steps of L-BFGS on all examples."""
    optimizer = torch.optim.LBFGS(
        model.parameters(),
        max_iter=STEPS,
        history_size=20,
        line_search_fn="strong_wolfe",
        tolerance_grad=0,
        tolerance_change=0,
    )

    def closure() -> Any:
        optimizer.zero_grad()
        return add_gradient(model, data.parts(), LBFGS_SCALE)

    def step(_: float) -> None:
        optimizer.step(closure)

    return step


def add_gradient(model: Model, parts: list[tuple[Any, Any]], scale: float = 1.0) -> Any:
    """The mean squared error times `scale`, whose gradient is added to that of the parameters."""
    size, total = sum(Y.numel() for _, Y in parts), 0.0
    for X, Y in parts:
        loss = torch.sum((model(X) - Y) ** 2) * (scale / size)
        loss.backward()
        total = total + loss.detach()
    return total
