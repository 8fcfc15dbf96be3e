"""Claims of the lab for tests: measured at a tiny size, or with made-up measurements."""

import json

from onelayer.lab import figures
from onelayer.lab.claim import Result, Results
from onelayer.lab.claims import known


def made_up(name, measured, size="quick", **changes):
    """The cells of a claim with `measured(**parameters)` in the place of its own measurement."""
    return _results(known()[name], measured, size, changes)


def judged(name, measured, size="quick", **changes):
    """The verdict on made-up measurements: its outcome and the statements that do not hold."""
    results = made_up(name, measured, size, **changes)
    verdict = known()[name].verdict(results)
    return verdict.outcome, [check.statement for check in verdict.checks if not check.holds]


def measured(name, size="quick", **changes):
    """The claim measured with some of its settings changed; its verdict and figure are made too."""
    claim = known()[name]
    results = _results(claim, claim.measure, size, changes)
    verdict = claim.verdict(results)
    assert verdict.checks or verdict.why
    assert figures.render(claim, results).startswith(b"<?xml")
    return results


def _results(claim, measure, size, changes):
    cells = claim.cells(claim.settings(size, changes))
    # Measurements travel as JSON: what it cannot say is no measurement.
    return Results(
        tuple(Result(p, json.loads(json.dumps(measure(**p), allow_nan=False))) for p in cells)
    )
