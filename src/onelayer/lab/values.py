"""Values as text, for tables and command lines."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from json import dumps, loads
from typing import Any

_SHORT = 6  # longest list that is shown whole


def typed(value: Any) -> str:
    """Format a setting for the command line: JSON, but text that is no JSON without quotes."""
    if isinstance(value, str):
        try:
            loads(value)
        except ValueError:
            return value
    return dumps(value)


def encodable(text: str) -> str:
    """Escape lone surrogates, which file names may contain and UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def counted(number: int, of: str) -> str:
    return f"{number} {of}" if number == 1 else f"{number} {of}s"


def seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds < 100 else f"{seconds:.0f}"


def show(value: Any, digits: int = 4) -> str:
    """Format a value in short: long lists by their ends, nested lists by their shape."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.{digits}g}"
    if isinstance(value, list | tuple):
        if any(isinstance(inner, list | tuple) for inner in value):
            shape = []
            while isinstance(value, list | tuple) and value:
                shape.append(str(len(value)))
                value = value[0]
            return f"{' × '.join(shape)} values"
        if len(value) <= _SHORT:
            return f"[{', '.join(map(show, value))}]"
        first = ", ".join(map(show, value[:3]))
        return f"[{first}, …, {show(value[-1])}] ({len(value)} values)"
    return "none" if value is None else str(value)


def spread(values: Sequence[Any]) -> str:
    """Summarise numbers by median, least and largest, other values by their counts."""
    known = [value for value in values if value is not None]
    if known and all(isinstance(v, int | float) and not isinstance(v, bool) for v in known):
        parts = [show(v, digits=3) for v in (statistics.median(known), min(known), max(known))]
        text = parts[0] if parts[1] == parts[2] else "{} ({} – {})".format(*parts)
        missing = len(values) - len(known)
        return f"{text}, {missing} of {len(values)} none" if missing else text
    found = Counter(map(show, values))
    if len(found) == 1:
        return next(iter(found))
    return ", ".join(f"{text} ({times} of {len(values)})" for text, times in found.items())
