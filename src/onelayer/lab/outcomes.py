"""From the store to verdicts: what was measured of a claim, judged by its rule."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

from onelayer.lab.claim import Claim, Parameters, Result, Results, Verdict
from onelayer.lab.report import Cell, Entry
from onelayer.lab.run import Plan
from onelayer.lab.store import Record, Store, now

_LIBRARIES = ("onelayer", "numpy", "scipy", "scikit-learn")


def of_plans(store: Store, plans: Sequence[Plan]) -> list[Entry]:
    """One entry a plan, with what the store has of its cells."""
    records = {record.key: record for record in store.records()}
    return [_entry(plan, records) for plan in plans]


def of_last_runs(store: Store, claims: Sequence[Claim]) -> list[Entry]:
    """One entry for each of the claims that was run, as it was run last."""
    runs = store.last_runs()
    return of_plans(store, [Plan(c, *runs[c.name]) for c in claims if c.name in runs])


def about(store: Store) -> dict[str, str]:
    """Versions and machine, of the report and of the measurements."""
    machines = sorted({record.machine for record in store.records()})
    return {
        "written": now(),
        "measured on": "; ".join(machines),
        "measurements": store.path.name,
        **{name: version(name) for name in _LIBRARIES},
    }


def _entry(plan: Plan, records: dict[str, Record]) -> Entry:
    try:
        cells = [_cell(cell.parameters, records.get(cell.key)) for cell in plan.cells]
    except (ValueError, KeyError) as error:  # settings that an earlier version of the claim had
        unknown = Verdict("undecided", why=f"its last run had other settings: {error}")
        return Entry(plan.claim, plan.size, dict(plan.changes), (), unknown, Results())
    results = Results(
        tuple(Result(c.parameters, c.measured, c.seconds) for c in cells if c.status == "done")
    )
    failed = sum(cell.status == "failed" for cell in cells)
    verdict = plan.claim.verdict(results, planned=len(cells), failed=failed)
    return Entry(plan.claim, plan.size, dict(plan.changes), tuple(cells), verdict, results)


def _cell(parameters: Parameters, record: Record | None) -> Cell:
    if record is None:
        return Cell(parameters, "not run")
    found = (record.status, record.measured, record.error, record.seconds, record.finished)
    return Cell(parameters, *found)
