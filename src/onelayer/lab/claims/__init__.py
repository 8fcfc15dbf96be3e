"""The claims, one file each.

To add a claim, add a file here with

- a docstring: its first line is the title of the claim, the rest is the prediction;
- `SETTINGS`, made by `by_size`: the parameters of the cells at the sizes quick, default and paper;
- `measure`, which returns the measured values of one cell for its parameters;
- `RULE`, a text that describes `judge`;
- `judge`, which returns the checks of the verdict for the results of all cells;
- `draw`, which draws the results into a figure;
- `CLAIM`, a `Claim` or `Conjecture` of these.

The name of the claim is that of the file. It is then listed, run, judged, drawn and reported. Its
test goes to `tests/lab/claims`. `rules`, `figures`, `learning_setup` and `recovery_setup` in
`onelayer.lab` have parts that several claims use.
"""

import pkgutil
from dataclasses import replace
from functools import cache
from importlib import import_module

from onelayer.lab.claim import Claim
from onelayer.spelling import did_you_mean


@cache
def known() -> dict[str, Claim]:
    """All claims by the name of their file, those of the first paper first."""
    claims = [_load(file.name) for file in pkgutil.iter_modules(__path__)]
    claims.sort(key=lambda claim: (claim.source, claim.name))
    return {claim.name: claim for claim in claims}


def _load(file: str) -> Claim:
    module = import_module(f"{__name__}.{file}")
    title, _, prediction = (module.__doc__ or "").partition(".\n")
    texts = {"title": title, "prediction": prediction, "rule": module.CLAIM.rule}
    lines = {name: " ".join(text.split()) for name, text in texts.items()}
    claim: Claim = replace(module.CLAIM, name=file.replace("_", "-"), **lines)
    return claim


def named(names: list[str]) -> list[Claim]:
    """The claims with these names, or all of them if `names` is empty."""
    claims = known()
    for name in names:
        if name not in claims:
            hint = did_you_mean(name, claims)
            raise ValueError(
                f"there is no claim {name!r}, expected one of {', '.join(claims)}{hint}"
            )
    return [claims[name] for name in dict.fromkeys(names)] or list(claims.values())
