"""Why a search ended: the reason that a recovery reports, from its outcome and certificate."""

from __future__ import annotations

from onelayer.recovery.certificate import Certificate
from onelayer.recovery.gauss_newton.stopping import Ending, StageOutcome
from onelayer.recovery.reasons import Reason
from onelayer.recovery.strategies.search import Search
from onelayer.recovery.strategies.settings import SculptSettings

# A layer is refused if its held-out error is this many times its error. Noise counts twice in the
# held-out error, so the factor is larger than that of a stage (`StageSettings.overfitted`).
_OVERFITTED = 4.0
_SMALL = 1e-7  # a smaller held-out error never refuses a layer
_RICHER = 0.5  # there are too few heads if more leave less than this share of the held-out error


def of_search(
    search: Search, outcome: StageOutcome, certificate: Certificate, head_tol: float
) -> Reason:
    """The reason of a search by Gauss-Newton steps."""
    fit, error = outcome.fit, certificate.error
    if search.problem.equations < search.problem.unknowns(fit.heads, search.rank):
        return Reason.TOO_FEW_EXAMPLES
    overfitted = error > _OVERFITTED * max(fit.error, search.tol, _SMALL)
    if not outcome.solved:
        if outcome.ending is Ending.BUDGET:
            return Reason.BUDGET_SPENT
        if search.richer_error < _RICHER * error:
            return Reason.TOO_FEW_HEADS
        if outcome.misfit:
            return Reason.WRONG_MODEL
        return Reason.TOO_FEW_EXAMPLES if overfitted else Reason.LOCAL_MINIMUM
    if overfitted:
        return Reason.TOO_FEW_EXAMPLES
    if certificate.uncertain_heads(head_tol):
        return Reason.HEADS_NOT_DETERMINED
    return Reason.EXACT if outcome.ending is Ending.REACHED else Reason.NOISE_FLOOR


def of_phases(
    hull_error: float, certificate: Certificate, head_tol: float, settings: SculptSettings
) -> Reason:
    """The reason of the six phases without polishing, by the error of the heads' affine hull."""
    if certificate.error > settings.unexplained_error:
        return Reason.NO_CANDIDATES
    if not certificate.determined.all():
        return Reason.HEADS_NOT_DETERMINED
    fine = certificate.error <= max(2 * hull_error, settings.fine_error)
    sure = not certificate.uncertain_heads(head_tol)
    accurate = fine and sure and hull_error <= settings.coarse_error
    return Reason.APPROXIMATE if accurate else Reason.COARSE
