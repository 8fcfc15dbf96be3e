"""Parts that the rules of several claims share."""

from collections.abc import Mapping, Sequence

import numpy as np

from onelayer.lab.claim import Check, Result, Results, Undecided
from onelayer.lab.recovery_setup import CLAIMED


def at_least_two(results: Results, parameter: str) -> list[int]:
    """The values of a parameter in ascending order; no verdict if there is only one."""
    values = sorted(results.of(parameter))
    if len(values) < 2:
        raise Undecided(f"{parameter} has one value, {values[0]}: nothing to compare it with")
    return values


def require(results: Results, parameter: str, values: Sequence[object]) -> None:
    """No verdict where one of these values of a parameter was not measured."""
    missing = [str(value) for value in values if value not in results.of(parameter)]
    if missing:
        raise Undecided(f"the rule needs {parameter} = {', '.join(missing)}, not measured here")


def no_wrong_claims(results: Results) -> Check:
    """Check that no cell reports convergence with a large error."""
    wrong = sum(cell["converged"] and cell["error"] > CLAIMED for cell in results)
    statement = f"no result that is said to be right is off by more than {CLAIMED:.0%}"
    return Check(statement, f"{wrong} of {len(results)}", wrong == 0)


def by_tokens(values: Mapping[int, Mapping[int, float]]) -> str:
    """List values by the number of tokens and of heads."""
    heads = ", ".join(map(str, next(iter(values.values()))))
    parts = (
        f"{tokens} tokens: {', '.join(f'{value:.2g}' for value in some.values())}"
        for tokens, some in values.items()
    )
    return f"{'; '.join(parts)} for {heads} heads"


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The a of the power law c x^a that fits y best, in logarithms.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def curve_points(results: Results) -> Results:
    """The points of learning curves as results of their own, with their size as `examples`.

    A cell has measured its "sizes", and lists with one value for each of them.

    >>> curve = Result({"seed": 0}, {"sizes": [8, 16], "error": [0.5, 0.25]})
    >>> [(point["examples"], point["error"]) for point in curve_points(Results((curve,)))]
    [(8, 0.5), (16, 0.25)]
    """
    points = []
    for cell in results:
        lists = {k: v for k, v in cell.measured.items() if isinstance(v, list) and k != "sizes"}
        points += [
            Result({**cell.parameters, "examples": size}, {k: v[i] for k, v in lists.items()})
            for i, size in enumerate(cell["sizes"])
        ]
    return Results(tuple(points))
