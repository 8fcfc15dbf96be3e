"""What an activation defines: its values, and the moments that kernels in closed form need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from onelayer.array.backend import Array


class Preactivations(NamedTuple):
    """Gaussian inputs of an activation, one for each key, in shapes that broadcast to all pairs."""

    deviations: Array
    means: Array | None  # over the deviations; None on both sides of a pair without a bias W_0

    def map(self, change: Callable[[Array], Array]) -> Preactivations:
        """The same with both arrays changed alike."""
        return Preactivations(
            change(self.deviations), None if self.means is None else change(self.means)
        )


Moments: TypeAlias = Callable[[Preactivations, Preactivations, Array, Array], None]


@dataclass(frozen=True)
class Activation:
    """An activation σ for random features."""

    name: str
    apply: Callable[[Array], Array]  # σ of every entry, in the memory of the array if possible
    homogeneous: bool  # whether σ(c x) = c σ(x) for c > 0: scales then move out of sums
    # `moments(rows, columns, rho, work)` replaces, in place, the correlations `rho` of pairs (u, v)
    # by E[σ(u) σ(v)], for a homogeneous σ divided by the standard deviations of u and v. Arrays are
    # float64, of numpy or torch. `rho` is contiguous and may exceed ±1 by rounding; the arrays of
    # `rows` and `columns` broadcast to its shape, and their deviations are positive. `work` has
    # shape (self.work, *rho.shape) and any contents. None if there is no closed form: features are
    # available, kernels are refused.
    moments: Moments | None = None
    # Arrays of the shape of `rho` that `moments` needs, as its argument or as temporaries: blocks
    # of pairs are cut so that these stay in cache.
    work: int = 0

    def closed_form(self) -> Moments:
        """`moments`, refused if there are none."""
        if self.moments is None:
            raise ValueError(
                f"activation {self.name!r} has no kernel in closed form, "
                "expected one that defines `moments`"
            )
        return self.moments
