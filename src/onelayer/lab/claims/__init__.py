"""The claims, one file each.

To add a claim, add a file here with

- `SETTINGS`, made by `by_size`: the parameters of the cells at the sizes quick, default and paper;
- `measure`, which returns the measured values of one cell for its parameters;
- `judge`, which returns the checks of the verdict for the results of all cells;
- `draw`, which draws the results into a figure;
- `CLAIM`, a `Claim` or `Conjecture` with these and with the texts of the report.

The name of the claim is that of the file. It is then listed, run, judged, drawn and reported. Its
test goes to `tests/lab/claims`. `rules`, `figures`, `learning_setup` and `recovery_setup` in
`onelayer.lab` have parts that several claims use.
"""

from __future__ import annotations

import pkgutil
from dataclasses import replace
from functools import cache
from importlib import import_module

from onelayer.lab.claim import Claim


@cache
def known() -> dict[str, Claim]:
    """All claims by the name of their file, those of the first paper first."""
    claims = [
        replace(import_module(f"{__name__}.{file.name}").CLAIM, name=file.name.replace("_", "-"))
        for file in pkgutil.iter_modules(__path__)
    ]
    claims.sort(key=lambda claim: (claim.source, claim.name))
    return {claim.name: claim for claim in claims}


def named(names: list[str]) -> list[Claim]:
    """The claims with these names, or all of them if `names` is empty."""
    claims = known()
    for name in names:
        if name not in claims:
            raise ValueError(f"there is no claim {name!r}, expected one of {', '.join(claims)}")
    return [claims[name] for name in dict.fromkeys(names)] or list(claims.values())
