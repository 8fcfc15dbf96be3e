"""From stored measurements to verdicts: one entry per claim, for tables and reports."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version

from onelayer.lab.claim import Claim, Result, Results, Settings, Verdict
from onelayer.lab.run import Plan
from onelayer.lab.store import Store, now
from onelayer.lab.values import typed

_LIBRARIES = ("onelayer", "numpy", "scipy", "scikit-learn")


@dataclass(frozen=True)
class Entry:
    """One claim at a size with some settings changed: all of its cells, and its verdict."""

    claim: Claim
    size: str
    changes: Settings
    cells: tuple[Result, ...]
    verdict: Verdict

    @cached_property
    def results(self) -> Results:
        """The cells that were measured."""
        return Results(tuple(cell for cell in self.cells if cell.status == "done"))

    @property
    def command(self) -> str:
        """The shell command that measures the claim again."""
        sizes = {"quick": ["--quick"], "paper": ["--paper"]}
        words = ["onelayer", "claims", "run", self.claim.name, *sizes.get(self.size, [])]
        for name, value in self.changes.items():
            values = value if isinstance(value, list | tuple) else [value]
            words += ["--set", f"{name}={','.join(map(typed, values))}"]
        return shlex.join(words)

    @property
    def seconds(self) -> float:
        """The time of all cells together."""
        return sum(cell.seconds for cell in self.cells)

    @property
    def findings(self) -> list[str]:
        """One line for each check, or else the reason why there is no verdict."""
        checks = self.verdict.checks
        lines = [f"{'✓' if c.holds else '✗'} {c.statement}: {c.measured}" for c in checks]
        return lines or [self.verdict.why]


def of_plans(store: Store, plans: Sequence[Plan]) -> list[Entry]:
    """Judge what the store has of the cells of each plan."""
    finished = {result.key: result for result in store.results()}
    entries = []
    for plan in plans:
        cells: tuple[Result, ...] = ()
        try:
            missing = {c.key: Result(c.parameters, status="not run") for c in plan.cells}
            cells = tuple(finished.get(key, result) for key, result in missing.items())
            verdict = plan.claim.verdict(cells)
        except (ValueError, KeyError) as error:  # an earlier version of the claim had others
            verdict = Verdict("undecided", why=f"its last run had other settings: {error}")
        entries.append(Entry(plan.claim, plan.size, dict(plan.changes), cells, verdict))
    return entries


def of_last_runs(store: Store, claims: Sequence[Claim]) -> list[Entry]:
    """Judge each of the claims that was run, as it was run last."""
    runs = store.last_runs()
    return of_plans(store, [Plan(c, *runs[c.name]) for c in claims if c.name in runs])


def about(store: Store) -> dict[str, str]:
    """Versions and machines of a report and of its measurements."""
    machines = sorted({result.machine for result in store.results()})
    return {
        "written": now(),
        "measured on": "; ".join(machines),
        "measurements": store.path.name,
        **{name: version(name) for name in _LIBRARIES},
    }
