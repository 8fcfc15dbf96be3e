"""Numbers that steer the strategies, each with its reason.

`recover` uses `DEFAULT`. A script or a test changes numbers by `dataclasses.replace`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class StageSettings:
    """When a fit counts as exact, overfitted or hopeless."""

    # Outputs computed in float32 have larger errors than outputs rounded to it once; coarser ones
    # were only rounded. So a fit is exact at `arithmetic_factor` times the rounding error, or at
    # `rounding_factor` times a rounding error of more than `coarse_rounding`..
    arithmetic_factor: float = 5e2
    rounding_factor: float = 1.3
    coarse_rounding: float = 1e-6
    largest_rounding: float = 0.1  # ..but no more than this, which says too little..
    elimination_error: float = 1e-10  # ..nor less: eliminating projections of equal heads loses it.
    overfitted: float = 3.0  # ratio of the errors on other examples and on those of a fit
    # Searches that end well take less time and fewer products with the Gauss-Newton matrix. Time
    # is counted in operations, so that results do not depend on the machine.
    hopeless_seconds: float = 25.0
    hopeless_products: int = 3000
    seconds_per_operation: float = 1 / 2e10
    seconds_per_call: float = 3e-4
    residual_examples: int = 20_000  # streamed examples that are loaded to test for noise
    richer_factor: float = 1.1  # residuals are no noise if more heads reduce the error by this


@dataclass(frozen=True)
class EscapeSettings:
    """Stages on subsets, and restarts after a bad minimum."""

    fewest_equations: float = 1.2  # with fewer per unknown a fit proves nothing
    worthwhile: float = 1.5  # a stage on a subset pays if all are this many times as many
    subset_precision: float = 3.0  # it aims at `tol` over this, so that all examples fit as well
    same_loss: float = 1e-3  # two minima are the same within these relative differences
    same_heads: float = 1e-2
    good_error: float = 0.1  # bad minima have larger errors
    suspicious_restarts: int = 2  # suffice if the examples look like those of another model


@dataclass(frozen=True)
class SmallSettings:
    """Strategy for small problems."""

    first_equations: float = 6.0  # per unknown in a first stage: enough to find the basin
    scarce_equations: float = 3.5  # with fewer per unknown the first start is cautious


@dataclass(frozen=True)
class LargeSettings:
    """Strategy for large problems."""

    # Floating point operations of a product with the Gauss-Newton matrix from which a problem is
    # large: a step then takes seconds.
    operations: float = 2e10
    first_equations: float = 4.0  # per unknown in a first stage: fewer, since steps are expensive
    exact_factor: float = 10.0  # largest ratio of the held-out error of an exact fit to its error
    # Equations per unknown if projections have the rank of the attention matrices: of descent, to
    # which more examples cost nothing but memory, and of steps on all factors.
    descent_equations: float = 400.0
    joint_equations: float = 11.0
    # Descent that ends above `basin_loss` lacks heads. Above `narrow_loss` it rather lacks rank.
    basin_loss: float = 5e-3
    narrow_loss: float = 0.3
    redrawn_share: float = 0.8  # drawing a head again helps if it leaves less of the loss
    redrawn_examples: int = 400  # by which the head that explains least is found
    part_rows: int = 1024  # of blocks in such steps: their arrays fit in a cache
    # Error bars up to this may be those that the smallest singular value allows at most. Sharper
    # ones need a solve for each of many draws, which takes longer than the search.
    sharp_bars: float = 1e-3


@dataclass(frozen=True)
class HeadCountSettings:
    """Strategy for an unknown number of heads."""

    gain: float = 0.95  # more heads explain more if they leave less of the held-out error
    as_good: float = 1.02  # fewer heads explain noisy examples as well up to this factor of it
    failures: int = 2  # attempts with more heads that may fail in a row


@dataclass(frozen=True)
class SculptSettings:
    """Strategy of the six phases."""

    fitted_examples: int = 3000  # of phase 6 and polishing..
    fitted_equations: float = 30.0  # ..or equations per unknown, if that is more
    # Without polishing a layer is accepted up to `coarse_error` of the affine hull of its heads,
    # and a held-out error of twice the hull's or of `fine_error`. What remains beyond may be noise
    # or a head with a small projection, which only polishing can tell apart.
    coarse_error: float = 0.06
    fine_error: float = 1e-3
    unexplained_error: float = 0.3  # held-out error of heads that are not even roughly right


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
