"""What solvers ask of a family of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, Self

from onelayer.array.backend import Array
from onelayer.data.chunks import Chunks


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


class TangentSpace(Protocol):
    """The directions in which theta may move, and how scores change along them."""

    @property
    def inputs(self) -> Chunks[Any] | None:
        """What scores are computed from, block by block; None for the blocks of examples."""

    def project(self, direction: Array) -> Array:
        """The nearest direction in the space."""

    def retract(self, theta: Array, direction: Array) -> tuple[Array, Self]:
        """Parameters of the family near theta + direction, and the tangent space there."""

    def scores_jvp(self, direction: Array) -> Callable[..., Array]:
        """A function of a block: how its scores (n, k·m, k) change along the direction."""

    def scores_vjp(self, reference: Array) -> Callable[..., Array]:
        """A function of a block and changes of its scores: the transpose, in any coordinates.

        It computes in the precision of `reference`. Its values are added up and then lifted.
        """

    def lift(self, total: Array) -> Array:
        """The direction in the space that a sum of `scores_vjp` stands for."""
