"""What solvers ask of a family of heads, and what a family may ask of a solver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

from onelayer.array.backend import Array
from onelayer.data.chunks import Chunks

Rows: TypeAlias = Chunks[tuple[Array, ...]]  # arrays (n·k, e), one per block of examples


class Inputs(Protocol):
    """A block of examples: queries (n, k, p) and keys (n, k, d)."""

    @property
    def queries(self) -> Array: ...
    @property
    def keys(self) -> Array: ...


class Tokens(NamedTuple):
    """Queries and keys alone, as `Inputs`."""

    queries: Array
    keys: Array


class ScoreProducts(Protocol):
    """Products with the Jacobian of the outputs, composed with a map from parameters to scores.

    The map is applied block by block: `scores(block, *parameters)` gives changes of the scores
    (n, k·m, k), and `scores_vjp(block, change, *parameters)` what such changes mean for the
    parameters. Blocks are those of the examples unless other `inputs` are given.
    """

    @property
    def weights(self) -> Array:
        """An array of the kind and precision in which products are computed."""

    def through_scores(
        self, scores: Callable[..., Array], *parameters: object, inputs: Chunks[Any] | None = None
    ) -> Rows:
        """J times a direction that changes scores as `scores(block, *parameters)`."""

    def back_through_scores(
        self,
        scores_vjp: Callable[..., Array],
        rows: Rows,
        *parameters: object,
        inputs: Chunks[Any] | None = None,
    ) -> Array:
        """The sum over blocks of `scores_vjp` at the changes of scores that rows call for."""


class TangentSpace(Protocol):
    """The directions in which theta may move."""

    def project(self, direction: Array) -> Array:
        """The nearest direction in the space."""

    def retract(self, theta: Array, direction: Array) -> tuple[Array, Self]:
        """Parameters of the family near theta + direction, and the tangent space there."""

    def jvp(self, products: ScoreProducts, direction: Array) -> Rows:
        """J times a direction in the space."""

    def vjp(self, products: ScoreProducts, rows: Rows) -> Array:
        """Jᵀ times rows, projected on the space."""
