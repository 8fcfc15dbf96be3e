"""What a claim is: a prediction, cells to measure, a rule that judges, a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

if TYPE_CHECKING:  # drawing is optional
    from matplotlib.figure import Figure

Size = Literal["quick", "default", "paper"]
SIZES: tuple[Size, ...] = ("quick", "default", "paper")

_SEEDS = 10_000  # of a claim, at the most

Value = bool | int | float | str | None
Settings = Mapping[str, Value | Sequence[Value]]
Parameters = Mapping[str, Value]  # of one cell, "seed" among them
Measured = Mapping[str, Any]  # numbers, text, None for what was not reached, and lists of these


@dataclass(frozen=True)
class Result:
    """One cell that was measured."""

    parameters: Parameters
    measured: Measured
    seconds: float = 0.0

    def __getitem__(self, name: str) -> Any:
        """A measured value or else a parameter, by name."""
        return self.measured[name] if name in self.measured else self.parameters[name]


@dataclass(frozen=True)
class Results:
    """The cells of a claim that were measured, in the order of its grid.

    >>> cells = grid({"heads": [1, 2], "seeds": 2})
    >>> results = Results(tuple(Result(c, {"error": c["seed"] + 1 / c["heads"]}) for c in cells))
    >>> results.of("heads"), results.where(heads=2).numbers("error")
    ([1, 2], array([0.5, 1.5]))
    >>> {heads: float(np.median(part.numbers("error"))) for heads, part in results.by("heads")}
    {1: 1.5, 2: 1.0}
    """

    cells: tuple[Result, ...] = ()

    def __iter__(self) -> Iterator[Result]:
        return iter(self.cells)

    def __len__(self) -> int:
        return len(self.cells)

    def where(self, **values: Value) -> Results:
        """The cells whose parameters have these values."""
        wanted = values.items()
        return Results(
            tuple(c for c in self.cells if all(c.parameters.get(k) == v for k, v in wanted))
        )

    def of(self, parameter: str) -> list[Any]:
        """The distinct values of a parameter, in the order of the grid."""
        return list(dict.fromkeys(cell.parameters[parameter] for cell in self.cells))

    def by(self, parameter: str) -> Iterator[tuple[Any, Results]]:
        """For every value of a parameter, the cells that have it."""
        for value in self.of(parameter):
            yield value, self.where(**{parameter: value})

    def numbers(self, name: str, missing: float = math.inf) -> np.ndarray[Any, Any]:
        """A measured value of every cell, as floats, with `missing` in the place of None."""
        values = [cell.measured[name] for cell in self.cells]
        return np.array([missing if value is None else float(value) for value in values])


@dataclass(frozen=True)
class Check:
    """One part of a verdict: what is asked, what was measured, whether it holds."""

    statement: str
    measured: str
    holds: bool


class CannotJudge(Exception):
    """Raised by a rule whose results do not allow a verdict; the text says what is missing."""


Outcome = Literal["holds", "fails", "undecided"]
Kind = Literal["claim", "conjecture"]


@dataclass(frozen=True)
class Verdict:
    """`checks` are the parts of the rule; `why` says what is missing where it is undecided."""

    outcome: Outcome
    checks: tuple[Check, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Claim:
    """A claim of a paper, or a conjecture about what it leaves open, as an experiment.

    `sizes` has settings by size: numbers, text, or lists of them. `cells` makes the parameters of
    every cell from the settings; `measure` is called with those as keywords, in any process on any
    machine, and gives the same values for the same parameters. `judge` makes the verdict's parts
    from the results of all cells, and `draw` the figure. `rule` says in words what `judge` does.
    """

    name: str
    title: str
    source: str  # the paper
    prediction: str
    rule: str
    sizes: Mapping[Size, Settings]
    cells: Callable[[Settings], Iterable[Parameters]] = field(repr=False)
    measure: Callable[..., Measured] = field(repr=False)
    judge: Callable[[Results], list[Check]] = field(repr=False)
    draw: Callable[[Results, Figure], None] = field(repr=False)
    kind: Kind = "claim"

    def settings(self, size: Size, changes: Settings | None = None) -> dict[str, Any]:
        """The settings of a size with some of them changed."""
        settings, changes = dict(self.sizes[size]), changes or {}
        for name, value in changes.items():
            if name not in settings:
                raise ValueError(
                    f"{self.name} has no setting {name!r}, expected one of {', '.join(settings)}"
                )
            settings[name] = _like(value, settings[name], f"{self.name}: {name}")
        return settings

    def verdict(self, results: Results, planned: int, failed: int = 0) -> Verdict:
        """What the rule says of the results; undecided unless all planned cells are measured."""
        if len(results) < planned:
            missing = planned - len(results) - failed
            parts = [f"{missing} not run"] * (missing > 0) + [f"{failed} failed"] * (failed > 0)
            return Verdict("undecided", why=f"of {planned} cells {' and '.join(parts)}")
        try:
            checks = tuple(self.judge(results))
        except CannotJudge as reason:
            return Verdict("undecided", why=str(reason))
        except Exception as error:  # one claim with odd settings must not cost the others
            return Verdict("undecided", why=f"the rule broke: {type(error).__name__}: {error}")
        if not checks:
            return Verdict("undecided", why="the settings leave nothing to compare")
        return Verdict("holds" if all(check.holds for check in checks) else "fails", checks)


def grid(settings: Settings) -> list[dict[str, Value]]:
    """All combinations of the settings that are lists; `seeds` is the number of seeds from 0 on.

    >>> grid({"dim": 4, "heads": [1, 2], "seeds": 2})
    [{'dim': 4, 'heads': 1, 'seed': 0}, {'dim': 4, 'heads': 1, 'seed': 1},
     {'dim': 4, 'heads': 2, 'seed': 0}, {'dim': 4, 'heads': 2, 'seed': 1}]
    """
    choices: dict[str, list[Any]] = {}
    for name, value in settings.items():
        if name == "seeds":
            choices["seed"] = list(range(_count(value)))
        else:
            choices[name] = list(value) if isinstance(value, list | tuple) else [value]
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def _count(seeds: Any) -> int:
    if isinstance(seeds, bool) or not isinstance(seeds, int) or not 1 <= seeds <= _SEEDS:
        raise ValueError(f"seeds is {seeds!r}, expected a whole number from 1 to {_SEEDS}")
    return seeds


def _like(value: Any, known: Any, name: str) -> Any:
    """The value as a list if the known setting is one, with elements of its kind."""
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
