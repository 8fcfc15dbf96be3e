"""One file a claim, with `CLAIM` in it: what is predicted, how it is measured, when it holds."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from onelayer.lab.claim import Claim


@cache
def known() -> dict[str, Claim]:
    """All claims by name, those of the first paper first."""
    names = [info.name for info in pkgutil.iter_modules(__path__)]
    claims = [import_module(f"{__name__}.{name}").CLAIM for name in names]
    claims.sort(key=lambda claim: (claim.source, claim.name))
    return {claim.name: claim for claim in claims}


def named(names: list[str]) -> list[Claim]:
    """The claims with these names, all of them if there are none."""
    claims = known()
    for name in names:
        if name not in claims:
            raise ValueError(f"there is no claim {name!r}, expected one of {', '.join(claims)}")
    return [claims[name] for name in dict.fromkeys(names)] or list(claims.values())
