"""Numbers that steer the strategies, each with its reason.

`DEFAULT` is what `recover` uses. A script or a test changes a number with `dataclasses.replace`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StageSettings:
    """When a stage of steps counts as exact, overfitted or hopeless."""

    # Outputs computed in float32 have larger errors than outputs that were rounded to it once,
    # while coarser outputs were only rounded. So a fit is exact at this many rounding errors..
    arithmetic_factor: float = 5e2
    # ..or at this many where the rounding error is coarser than `coarse_rounding`..
    rounding_factor: float = 1.3
    coarse_rounding: float = 1e-6
    # ..but outputs that are rounded more than this say too little..
    largest_rounding: float = 0.1
    # ..and the elimination of the projections loses this much where heads coincide.
    elimination_error: float = 1e-10
    # A fit is overfitted if the error on other examples is larger by this factor..
    overfitted: float = 3.0
    # ..unless its error is below this: then it is in the basin of the exact fit.
    basin_error: float = 1e-3
    # Held-out examples that suffice to detect it.
    overfitting_examples: int = 250
    # A search that ends well takes less time, counted in operations so that results do not depend
    # on the machine, and fewer products with the Gauss-Newton matrix.
    hopeless_seconds: float = 25.0
    hopeless_products: int = 3000
    seconds_per_operation: float = 1 / 2e10
    seconds_per_call: float = 3e-4
    # Examples that are loaded to test residuals for noise, of those that are not in memory.
    residual_examples: int = 20_000
    # Noise is all that is left if more heads do not improve the held-out error by this factor.
    richer_factor: float = 1.1


@dataclass(frozen=True)
class EscapeSettings:
    """Restarts after a stage that ended in a bad minimum."""

    # With fewer equations per unknown a fit proves nothing.
    fewest_equations: float = 1.2
    # A stage on a subset pays if there are at least this many times as many examples in all.
    worthwhile: float = 1.5
    # It aims at `tol` over this, which without noise leaves nothing to do for all examples.
    subset_precision: float = 3.0
    # Two minima are the same within these relative differences of loss and heads.
    same_loss: float = 1e-3
    same_heads: float = 1e-2
    # Bad minima have larger errors than this.
    good_error: float = 0.1
    # Restarts that suffice where the examples look like those of another model.
    suspicious_restarts: int = 2


@dataclass(frozen=True)
class SmallSettings:
    """Strategy for small problems."""

    # Equations per unknown in the first stage: enough to find the basin, and cheap.
    first_equations: float = 6.0
    # With fewer equations per unknown than this the first start is cautious.
    scarce_equations: float = 3.5


@dataclass(frozen=True)
class LargeSettings:
    """Strategy for large problems."""

    # A problem is large if a product with the Gauss-Newton matrix takes more floating point
    # operations: a step then takes seconds.
    operations: float = 2e10
    # Equations per unknown in the first stage: fewer, since steps are expensive.
    first_equations: float = 4.0
    # The held-out error of an exact fit is at most this many times its error.
    exact_factor: float = 10.0
    # Heads are located in their span once a step gains less than this share of the loss..
    located_gain: float = 3e-2
    # ..on this many rows per feature.
    located_rows: float = 4.0
    # Replacing a missing head leaves less than this share of the loss.
    replaced_share: float = 0.95


@dataclass(frozen=True)
class HeadCountSettings:
    """Strategy for an unknown number of heads."""

    # More heads explain more if they leave less than this share of the held-out error.
    gain: float = 0.95
    # Fewer heads explain noisy examples as well up to this factor of the held-out error.
    as_good: float = 1.02
    # Attempts with more heads that may fail in a row.
    failures: int = 2


@dataclass(frozen=True)
class SculptSettings:
    """Strategy of the six phases."""

    # Phase 6 and polishing use this many examples, or equations per unknown if that is more.
    fitted_examples: int = 3000
    fitted_equations: float = 30.0
    # Without polishing a layer is accepted up to this error of the affine hull of its heads, and a
    # held-out error of twice that or of `fine_error`. What remains beyond may be noise or a head
    # with a small projection, which only polishing can tell apart.
    coarse_error: float = 0.06
    fine_error: float = 1e-3
    # Held-out error from which the heads are not even roughly right.
    unexplained_error: float = 0.3


@dataclass(frozen=True)
class Settings:
    """Settings of all strategies."""

    stage: StageSettings = field(default_factory=StageSettings)
    escape: EscapeSettings = field(default_factory=EscapeSettings)
    small: SmallSettings = field(default_factory=SmallSettings)
    large: LargeSettings = field(default_factory=LargeSettings)
    head_count: HeadCountSettings = field(default_factory=HeadCountSettings)
    sculpt: SculptSettings = field(default_factory=SculptSettings)


DEFAULT = Settings()


def default() -> Settings:
    """The settings that `recover` uses."""
    return DEFAULT
