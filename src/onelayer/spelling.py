"""Names that users type: what they may have meant by a name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def did_you_mean(got: object, known: Iterable[object]) -> str:
    """End an error message with the known name nearest to a misspelt one; empty if none is near.

    >>> did_you_mean("expresivity", ["depth", "expressivity"])
    "; did you mean 'expressivity'?"
    >>> did_you_mean("nonsense", ["depth", "expressivity"])
    ''
    """
    if not isinstance(got, str):
        return ""
    from difflib import get_close_matches  # errors alone need it

    # Case is no difference: names that differ in it alone are meant to be the same.
    names = {name.casefold(): name for name in known if isinstance(name, str)}
    near = get_close_matches(got.casefold(), names, n=1)
    return f"; did you mean {names[near[0]]!r}?" if near else ""


def one_of(value: Any, name: str, known: Iterable[object]) -> Any:
    """Return `value`, which has to be one of the known ones.

    >>> one_of("refin", "method", ["auto", "refine"])
    Traceback (most recent call last):
    ValueError: method is 'refin', expected one of 'auto', 'refine'; did you mean 'refine'?
    """
    choices = list(known)
    if isinstance(value, str | None) and value in choices:
        return value
    expected = ", ".join(map(repr, choices))
    raise ValueError(
        f"{name} is {value!r}, expected one of {expected}{did_you_mean(value, choices)}"
    )
