"""What a claim is: a prediction, cells to measure, a rule that judges, a figure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from onelayer.spelling import did_you_mean

if TYPE_CHECKING:  # drawing is optional
    from matplotlib.figure import Figure

Status = Literal["done", "failed", "not run"]
UNMEASURED: tuple[Status, ...] = ("not run", "failed")
Outcome = Literal["holds", "fails", "undecided"]
Size = Literal["quick", "default", "paper"]
SIZES: tuple[Size, ...] = ("quick", "default", "paper")

FIRST_PAPER, SECOND_PAPER = "arXiv 2307.11353", "arXiv 2402.04084"  # sources of claims
_MOST_SEEDS = 10_000

Value = bool | int | float | str | None
Settings = Mapping[str, Value | Sequence[Value]]
Parameters = Mapping[str, Value]  # of one cell, with its "seed"
Measured = Mapping[str, Any]  # numbers, text, None for values that were not reached, lists of these


@dataclass(frozen=True)
class Result:
    """What is known of one cell: its parameters and, once it is finished, values or an error."""

    parameters: Parameters
    measured: Measured = field(default_factory=dict)  # empty unless the status is "done"
    seconds: float = 0.0
    status: Status = "done"
    error: str = ""  # a traceback, where the status is "failed"
    finished: str = ""  # ISO 8601, in UTC
    machine: str = ""
    claim: str = ""
    code: str = ""  # the version of the code that measured it
    key: str = ""

    def __getitem__(self, name: str) -> Any:
        """A measured value, or else a parameter, by name."""
        return self.measured[name] if name in self.measured else self.parameters[name]


@dataclass(frozen=True)
class Results:
    """The cells of a claim that were measured, in the order of its grid.

    >>> cells = grid({"heads": [1, 2], "seeds": 2})
    >>> results = Results(tuple(Result(c, {"error": c["seed"] + 1 / c["heads"]}) for c in cells))
    >>> results.of("heads"), results.where(heads=2).numbers("error")
    ([1, 2], array([0.5, 1.5]))
    >>> results.medians("error", by="heads")
    {1: 1.5, 2: 1.0}
    """

    cells: tuple[Result, ...] = ()

    def __iter__(self) -> Iterator[Result]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def where(self, **values: Value) -> Results:
        """Select the cells whose parameters have these values."""
        wanted = values.items()
        return Results(
            tuple(c for c in self.cells if all(c.parameters.get(k) == v for k, v in wanted))
        )

    def of(self, parameter: str) -> list[Any]:
        """List the distinct values of a parameter, in the order of the grid."""
        return list(dict.fromkeys(cell.parameters[parameter] for cell in self.cells))

    def by(self, parameter: str) -> Iterator[tuple[Any, Results]]:
        """Iterate over the values of a parameter, each with the cells that have it."""
        for value in self.of(parameter):
            yield value, self.where(**{parameter: value})

    def numbers(self, name: str, missing: float = math.inf) -> np.ndarray[Any, Any]:
        """Collect a measured value of every cell as floats, with `missing` in place of None."""
        values = [cell.measured[name] for cell in self.cells]
        return np.array([missing if value is None else float(value) for value in values])

    def median(self, name: str) -> float:
        """The median of a measured value; infinite if most cells did not reach one."""
        return float(np.median(self.numbers(name)))

    def medians(self, name: str, by: str) -> dict[Any, float]:
        """The median of a measured value for every value of a parameter."""
        return {value: part.median(name) for value, part in self.by(by)}


@dataclass(frozen=True)
class Check:
    """One part of a verdict: what is asked, what was measured, whether it holds."""

    statement: str
    measured: str
    holds: bool


class Undecided(Exception):
    """Raised by a rule when the results allow no verdict; the message says what is missing."""


@dataclass(frozen=True)
class Verdict:
    """The outcome of a rule, its checks, and what is missing if it is undecided."""

    outcome: Outcome
    checks: tuple[Check, ...] = ()
    why: str = ""


def grid(settings: Settings) -> list[dict[str, Value]]:
    """List all combinations of the settings that are lists; `seeds` counts seeds from 0.

    >>> grid({"dim": 4, "heads": [1, 2], "seeds": 2})
    [{'dim': 4, 'heads': 1, 'seed': 0}, {'dim': 4, 'heads': 1, 'seed': 1},
     {'dim': 4, 'heads': 2, 'seed': 0}, {'dim': 4, 'heads': 2, 'seed': 1}]
    """
    choices: dict[str, Sequence[Any]] = {}
    for name, value in settings.items():
        if name == "seeds":
            if type(value) is not int or not 1 <= value <= _MOST_SEEDS:
                expected = f"expected a whole number from 1 to {_MOST_SEEDS}"
                raise ValueError(f"seeds is {value!r}, {expected}")
            choices["seed"] = range(value)
        else:
            choices[name] = value if isinstance(value, list | tuple) else [value]
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def by_size(**settings: Any) -> dict[Size, dict[str, Any]]:
    """The settings of all sizes: a tuple has one value for each of quick, default and paper.

    A list is one setting with several values, of which `grid` makes all combinations.

    >>> by_size(model=["rfa", "brfa"], dim=(4, 8, 16), seeds=(1, 3, 3))["default"]
    {'model': ['rfa', 'brfa'], 'dim': 8, 'seeds': 3}
    """
    return {
        size: {k: v[i] if isinstance(v, tuple) else v for k, v in settings.items()}
        for i, size in enumerate(SIZES)
    }


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, or a conjecture about what it leaves open, as an experiment.

    `rule` describes `judge`. `sizes` has settings by size: numbers, text, or lists of them (see
    `by_size`). `cells` returns the parameters of every cell for some settings. `measure` is called
    with them as keywords, in any process on any machine, and returns the same values for the same
    parameters. `judge` returns the checks of the verdict for the results of all cells, and `draw`
    draws these. A claim of the package has the `name` of its file, and `title` and `prediction`
    from its docstring.
    """

    source: str  # the paper
    rule: str
    sizes: Mapping[Size, Settings]
    measure: Callable[..., Measured] = field(repr=False)
    judge: Callable[[Results], list[Check]] = field(repr=False)
    draw: Callable[[Results, Figure], None] = field(repr=False)
    cells: Callable[[Settings], Iterable[Parameters]] = field(default=grid, repr=False)
    kind: Literal["claim", "conjecture"] = "claim"
    title: str = ""
    prediction: str = ""
    name: str = ""

    def settings(self, size: Size, changes: Settings | None = None) -> dict[str, Any]:
        """Return the settings of a size, with some of them changed."""
        settings = dict(self.sizes[size])
        for name, value in (changes or {}).items():
            if name not in settings:
                expected = f"expected one of {', '.join(settings)}{did_you_mean(name, settings)}"
                raise ValueError(f"{self.name} has no setting {name!r}, {expected}")
            settings[name] = _like(value, settings[name], f"{self.name}: {name}")
        return settings

    def verdict(self, cells: Iterable[Result]) -> Verdict:
        """Judge the results of all cells; undecided unless all of them are measured."""
        cells = tuple(cells)
        results = Results(tuple(cell for cell in cells if cell.status == "done"))
        if len(results) < len(cells):
            found = Counter(cell.status for cell in cells)
            parts = [f"{found[status]} {status}" for status in UNMEASURED if found[status]]
            return Verdict("undecided", why=f"of {len(cells)} cells {' and '.join(parts)}")
        try:
            checks = tuple(self.judge(results))
        except Undecided as reason:
            return Verdict("undecided", why=str(reason))
        except Exception as error:  # unusual settings of one claim must not stop the others
            return Verdict("undecided", why=f"the rule broke: {type(error).__name__}: {error}")
        if not checks:
            return Verdict("undecided", why="the settings leave nothing to compare")
        return Verdict("holds" if all(check.holds for check in checks) else "fails", checks)


Conjecture: partial[Claim] = partial(Claim, kind="conjecture")


def _like(value: Any, known: Any, name: str) -> Any:
    """Convert a value to the type of a known setting: a list if that is one."""
    if isinstance(known, list | tuple):
        values = value if isinstance(value, list | tuple) else [value]
        if not values:
            raise ValueError(f"{name} is [], expected at least one value")
        return [_like(one, known[0], name) for one in values]
    if isinstance(value, list | tuple):
        raise ValueError(f"{name} is {value!r}, expected one value")
    if isinstance(known, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    wrong = known is not None and type(value) is not type(known)
    if wrong or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{name} is {value!r}, expected a value like {known!r}")
    return value
