"""A layer in closed form, from chosen inputs.

    1. One token x has the output xW + b with W = ΣW_i: d inputs, and a zero for b.
    2. Two tokens u and u - w, for one fixed w: the scores a_i and values g_i of all heads along w
       (`one_direction`). Their number is the number of heads.
    3. Each head j alone. With u·a_j >= L and u·a_i <= -L for the others, the other heads attend to
       u - w, whatever further tokens u - v with moderate scores there are; head j does not. Then
       the row of u is (u - w)W + g_j + b - Σ_b p_b v_b W_j, with p the softmax of head j's scores
       over u (0) and u - v_b (-s_b), where s_b = uΘ_j v_b. Errors are of order exp(-L).
       a. One v at a time gives M_b = v_b W_j E_b / (1 + E_b), E_b = exp(-s_b): d rows. All of them
          at once give Σ_b ρ_b M_b with ρ_b = (1 + E_b) / S, S = 1 + Σ E_b, so that
          S = (q - 1) / (Σρ_b - 1) for q tokens: one more row gives every E_b, and so W_j.
       b. With W_j known, each further u has all its d scores from one row. p rows give Θ_j.

The last projection is what the others leave of W. Rows of q tokens want q independent v_b W_j. With
q = 1 the token is there twice: the same formula, for q = 2. So a head of a layer with e >= d takes
(d + p) rows of e numbers: as many as it has entries, where p is d, or d + 1 with a key bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from onelayer.layer import AttentionLayer
from onelayer.recovery.queries import one_direction
from onelayer.recovery.queries.one_direction import Guide
from onelayer.recovery.queries.oracle import Oracle

Matrix: TypeAlias = np.ndarray[Any, Any]

_PROBES = 2  # inputs of two tokens at each scale
_LINEAR, _SATURATED = 1.93, 1.04  # doubled queries move outputs by more, or less, than this factor
_MOST_SCALES = 40
_LEAST_SPAN = 1e-6  # smallest singular value of points that span all directions, to the largest
_ROWS = 2.5  # of the first direction, per number of a hidden unit and head
_SCORE = 0.7  # standard deviation of moderate scores
_MOST_SCORE, _GOOD_SCORE, _MOST_TRIES = 3.5, 2.0, 3  # larger ones: keys are asked again, smaller
_LEAST_MARGIN, _SPARE_MARGIN = 8.0, 4.0
_MIDDLE = 1.75  # of the scores along the guide, in margins: they go from one up to 2.5
_RANK_FACTOR = 1e3  # singular values of a projection above so many times the noise count


class NotApplicableError(Exception):
    """The layer is not one that the closed form finds; the message says why."""


@dataclass(eq=False)
class ClosedForm:
    """Finds a layer by chosen queries."""

    oracle: Oracle
    dim: int
    heads: int | None
    bias: bool
    rng: np.random.Generator
    scale: float = 1.0  # standard deviation of entries at which scores are of order one
    rank: int = 0  # of outputs along one direction: a lower bound on the number of heads

    def measure(self) -> None:
        """Find the sum of the projections, the output bias and the scale of the inputs."""
        zero = self.oracle.ask(np.zeros((1, 1, self.dim)))[0, 0] if self.bias else None
        rows = self.oracle.ask(np.eye(self.dim)[:, None, :])[:, 0]
        self.output_bias = np.zeros(rows.shape[1]) if zero is None else zero
        self.total = rows - self.output_bias
        direction = self.rng.standard_normal(self.dim)
        self.direction = direction / np.linalg.norm(direction)
        self.points = np.zeros((0, self.query_dim))
        self.outputs = np.zeros((0, rows.shape[1]))
        self._find_scale()

    @property
    def query_dim(self) -> int:
        return self.dim + int(self.bias)

    def layer(self) -> AttentionLayer:
        """The layer, if its heads can be told apart along one direction."""
        if self._single:
            length, guide = 0.0, None
        else:
            length, guide = self._length(self.scale), self._guide()
        heads = 1 if guide is None else guide.heads
        found: list[tuple[Matrix, Matrix]] = []
        for head in range(heads):
            # The last projection is what the others leave of the sum.
            last = head == heads - 1
            rest = self.total - sum(projection for _, projection in found) if last else None
            found.append(_Head(self, guide, length, head, rest).solve())
        attention = np.stack([theta[: self.dim] for theta, _ in found])
        projection = np.stack([projection for _, projection in found])
        if not self.bias:
            return AttentionLayer(attention, projection)
        key_bias = np.stack([theta[self.dim] for theta, _ in found])
        return AttentionLayer(attention, projection, key_bias, self.output_bias)

    @property
    def _single(self) -> bool:
        """Whether there is one head. A layer of more that looks so does not explain the check."""
        rank = one_direction.count(self.outputs, self._noise)
        return self.heads == 1 or (self.heads is None and rank == 1)

    @property
    def out_dim(self) -> int:
        return int(self.total.shape[1])

    @property
    def _noise(self) -> float:
        """Absolute errors of the outputs of the first direction, at unit length of it."""
        return self.oracle.noise * self._size * 4

    # The first direction

    def _length(self, scale: float) -> float:
        return float(scale * self.dim**0.5)

    def _find_scale(self) -> None:
        """Inputs such that twice the query moves the outputs, but not twice as far."""
        self._size = 0.0
        low, high = 0.0, np.inf
        for _ in range(_MOST_SCALES):
            queries = self.rng.standard_normal((_PROBES, self.dim))
            once = self._along(queries * self.scale)
            twice = self._along(2 * queries * self.scale)
            noise = 30 * self.oracle.noise * self._size
            ratio = np.linalg.norm(twice) / max(float(np.linalg.norm(once)), noise, 1e-300)
            if _SATURATED < ratio < _LINEAR and np.linalg.norm(once) > noise:
                return
            if ratio <= _SATURATED and np.linalg.norm(twice) > noise:
                high = self.scale
            else:
                low = self.scale
            if low > 0 and np.isfinite(high):
                self.scale = (low * high) ** 0.5
            else:
                self.scale *= 3.0 if low > 0 else 1 / 3
            if high / max(low, 1e-300) < 1.2:
                return
        self.scale = 1.0
        raise NotApplicableError("outputs do not depend on attention at any scale of the inputs")

    def _span_size(self) -> float:
        """The largest singular value of the points."""
        return float(np.linalg.norm(self.points, 2))

    def _along(self, queries: Matrix) -> Matrix:
        """Outputs z of rows u for tokens u and u - w; those of both rows are kept."""
        length = self._length(self.scale)
        step = length * self.direction
        X = np.stack([queries, queries - step], axis=1)
        middle = queries - step / 2
        Y = self.oracle.ask(X)
        z = (Y - self.output_bias - (middle @ self.total)[:, None]) / length
        rows = X.transpose(1, 0, 2).reshape(-1, self.dim)
        if self.bias:
            rows = np.concatenate([rows, np.ones((len(rows), 1))], axis=1)
        self.points = np.concatenate([self.points, rows * length])
        self.outputs = np.concatenate([self.outputs, z.transpose(1, 0, 2).reshape(len(rows), -1)])
        self._size = max(self._size, float(np.abs(Y).max()) / length)
        return np.asarray(z[:, 0])

    def _guide(self) -> Guide:
        """Scores and values of all heads along the direction."""
        while True:
            self.rank = one_direction.count(self.outputs, self._noise)
            likely = max(self.rank, self.heads or 1)
            missing = int(np.ceil(_ROWS * (likely + self.query_dim))) - len(self.points)
            spanned = np.linalg.matrix_rank(self.points, tol=_LEAST_SPAN * self._span_size())
            count = max((missing + 1) // 2, self.query_dim - int(spanned))
            if count <= 0:
                break
            size = np.where(np.arange(count) % 2, 1.0, 2.0)[:, None] * self.scale
            self._along(self.rng.standard_normal((count, self.dim)) * size)
        rank = self.rank
        if rank == 0 or rank != (self.heads or rank):
            raise NotApplicableError(f"outputs along one direction have rank {rank}")
        if rank > self.dim:
            raise NotApplicableError(f"there are {rank} heads, more than dimensions")
        total = self.direction @ self.total
        given = (self.points, self.outputs, total, rank, self._noise)
        guide = one_direction.find(*given, self.rng)
        if guide is None:
            raise NotApplicableError("heads were not told apart along one direction")
        return guide


@dataclass(eq=False)
class _Head:
    """One head, isolated from the others by a token along the guiding direction."""

    form: ClosedForm
    guide: Guide | None
    length: float
    head: int
    projection: Matrix | None  # if it is known

    def __post_init__(self) -> None:
        form, dim = self.form, self.form.dim
        self.queries = self._queries(form.query_dim)
        typical = float(np.sqrt(np.mean(self.queries**2)))
        if self.guide is None:
            size = form.scale**2 * dim**0.5 / typical
        else:
            along = np.linalg.norm(self.guide.scores[self.head, :dim])
            size = _SCORE * dim**0.5 / max(float(along) * typical * dim**0.5, 1e-300)
        self.keys = np.linalg.qr(form.rng.standard_normal((dim, dim)))[0] * size
        self.size = size

    def _scale_keys(self, factor: float) -> None:
        self.size *= factor
        self.keys = self.keys * factor

    def solve(self) -> tuple[Matrix, Matrix]:
        """Attention matrix with its key bias (p, d), and projection (d, e)."""
        values, first = self._values()
        for _ in range(_MOST_TRIES):
            largest = float(np.abs(first).max())
            if largest <= _MOST_SCORE:
                break
            self._scale_keys(_GOOD_SCORE / largest)
            values, first = self._values()
        groups = self._groups(values)
        rest = [self._scores(query, values, groups) for query in self.queries[1:]]
        scores = np.stack([first, *rest])
        points = self.queries
        if self.form.bias:
            points = np.concatenate([points, np.ones((len(points), 1))], axis=1)
        back = self.keys / self.size**2  # the inverse of the keys, transposed
        return np.linalg.solve(points, scores) @ back, back.T @ values

    def _queries(self, count: int) -> Matrix:
        """Queries for which this head alone does not attend to the guiding token.

        Their coordinates along the scores of the heads lie in an interval. They vary there, and
        elsewhere, like columns of an orthogonal matrix, so that queries are well conditioned.
        """
        form = self.form
        if self.guide is None:
            return _spread(count, form.dim, form.rng) * form.scale
        scores = self.guide.scores * self.length
        among, constant = scores[:, : form.dim], scores[:, form.dim :].sum(axis=1)
        heads = len(scores)
        columns = _spread(count, form.dim, form.rng)
        margin = max(_LEAST_MARGIN, _SPARE_MARGIN - np.log(form.oracle.noise))
        sign = np.where(np.arange(heads) == self.head, 1.0, -1.0)
        varied = columns[:, :heads] / np.abs(columns[:, :heads]).max()
        target = sign * margin * (_MIDDLE + (_MIDDLE - 1) * varied)
        inverse = np.linalg.pinv(among)
        inside = (target - constant) @ inverse.T
        free = np.linalg.svd(among)[2][heads:]
        outside = columns[:, heads:] @ free
        return np.asarray(inside + outside * np.sqrt(np.mean(inside**2)))

    def _rest(self, queries: Matrix, keys: Matrix) -> Matrix:
        """Σ p_b v_b W_j of rows u with tokens u - v_b, for queries (n, d) and keys (n, q, d)."""
        form = self.form
        tokens, known = [queries], queries
        value = np.zeros(form.out_dim)
        if self.guide is not None:
            known = queries - self.length * form.direction
            tokens.append(known)
            value = self.length * self.guide.values[self.head]
        X = np.concatenate([np.stack(tokens, axis=1), queries[:, None] - keys], axis=1)
        Y = form.oracle.ask(X, rows=1)[:, 0]
        return np.asarray(known @ form.total + value + form.output_bias - Y)

    def _values(self) -> tuple[Matrix, Matrix]:
        """Values v_b W_j (d, e) of all keys, and the scores s_b of the first query."""
        first = np.broadcast_to(self.queries[:1], self.keys.shape)
        if self.projection is not None:
            values = self.keys @ self.projection
            return values, self._scores(self.queries[0], values, self._groups(values))
        single = self._rest(first, self.keys[:, None, :])
        exponentials = np.zeros(len(self.keys))
        for group in self._groups(single):
            twice = np.repeat(group, 2) if len(group) == 1 else group
            together = self._rest(self.queries[:1], self.keys[None, twice])[0]
            shares = np.linalg.lstsq(single[group].T, together, rcond=None)[0]
            if len(group) == 1:
                shares = np.repeat(shares / 2, 2)
            total = (len(twice) - 1) / (shares.sum() - 1)
            exponentials[group] = (shares * total - 1)[: len(group)]
        if not (exponentials > 0).all():
            raise NotApplicableError(f"attention of head {self.head} is not a softmax")
        weights = (1 + exponentials) / exponentials
        return single * weights[:, None], -np.log(exponentials)

    def _groups(self, values: Matrix) -> list[Matrix]:
        """Keys whose values are independent, so that a row tells their shares apart."""
        form = self.form
        spread = np.linalg.svd(values, compute_uv=False)
        noise = form.oracle.noise * np.abs(self.queries @ form.total).max()
        rank = max(1, int((spread > max(_RANK_FACTOR * noise, 1e-9 * spread[0])).sum()))
        return np.array_split(np.arange(form.dim), -(-form.dim // rank))

    def _scores(self, query: Matrix, values: Matrix, groups: list[Matrix]) -> Matrix:
        """The scores of a query with all keys."""
        scores = np.empty(len(self.keys))
        for group in groups:
            row = self._rest(query[None], self.keys[None, group])[0]
            shares = np.linalg.lstsq(values[group].T, row, rcond=None)[0]
            own = 1 - shares.sum()
            if not (shares > 0).all() or not own > 0:
                raise NotApplicableError(f"attention of head {self.head} is not a softmax")
            scores[group] = np.log(own / shares)
        return scores


def _spread(rows: int, columns: int, rng: np.random.Generator) -> Matrix:
    """Columns of mean square 1, orthogonal, and as far as possible orthogonal to a constant."""
    basis = rng.standard_normal((rows, rows))
    basis[:, 0] = 1.0
    orthogonal = np.linalg.qr(basis)[0] * rows**0.5
    return np.asarray(np.roll(orthogonal, -1, axis=1)[:, :columns])
