"""The report: every claim with prediction, measurements, figure and verdict, as one HTML page.

The templates escape all text. Text from anywhere, a title or the error of a cell, is shown as it is
and cannot become markup. The page's content security policy allows its own style and script only.
"""

from __future__ import annotations

import base64
import hashlib
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from itertools import count
from json import dumps
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from onelayer.lab import claims, figures
from onelayer.lab.claim import Outcome, Parameters, Result
from onelayer.lab.outcomes import Entry
from onelayer.lab.values import counted, encodable, seconds, show, spread

if TYPE_CHECKING:
    from jinja2 import Template

TITLE = "What one attention layer can learn, and how it is learned"
_REFERENCES = {
    "arXiv 2307.11353": "H. Fu, T. Guo, Y. Bai, S. Mei: What can a single attention layer learn? "
    "A study through the random features lens",
    "arXiv 2402.04084": "S. Chen, Y. Li: Provably learning a multi-head attention layer",
}
_OUTCOMES: dict[Outcome, str] = {  # in the order in which the table sorts them
    "fails": "✗ does not hold",
    "undecided": "? undecided",
    "holds": "✓ holds",
}
_FEW_ROWS = 24  # a table of numbers with more rows is collapsed
# After a single letter, a digit or a bracket: anything in braces, or a single letter or number.
_SCRIPTS = re.compile(
    r"(?<=\b[^\W\d_]|[)\]>\d])([_^])(?:\{([^{}]*)\}|(-?\d+(?:\.\d+)?|[^\W\d_])(?![a-zA-Z0-9_(]))"
)


def page(entries: Sequence[Entry], about: Mapping[str, str]) -> str:
    """Render one HTML file that needs neither network nor JavaScript.

    `about` has versions, machine, file and time by name. The same input gives the same bytes.
    """
    style, script = (
        files(__name__).joinpath(name).read_text("utf-8") for name in ("style.css", "script.js")
    )
    anchors: list[str] = []
    for entry in entries:
        name = "claim-" + re.sub(r"[^a-z0-9]+", "-", entry.claim.name.lower())
        options = (name if number == 1 else f"{name}-{number}" for number in count(1))
        anchors.append(next(option for option in options if option not in anchors))
    text = _template("page.html.j2").render(
        title=TITLE,
        style=Markup(style),
        script=Markup(script),
        sections=[_section(e, anchor) for e, anchor in zip(entries, anchors, strict=True)],
        found=Counter(entry.verdict.outcome for entry in entries),
        about=list(about.items()),
    )
    return encodable(text)


def markdown(entries: Iterable[Entry]) -> str:
    """Render a Markdown table of claims, predictions, measurements and verdicts."""
    return _template("table.md.j2").render(entries=list(entries))


@cache
def _template(name: str) -> Template:
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    environment = Environment(
        loader=PackageLoader(__name__),
        autoescape=select_autoescape(disabled_extensions=("md.j2",), default=True),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    filters = {"digest": _digest, "plain_markdown": _plain_markdown, "assigned": _assigned}
    environment.filters |= {"typeset": typeset, "seconds": seconds, **filters}
    environment.globals |= {"OUTCOMES": _OUTCOMES, "counted": counted}
    return environment.get_template(name)


def typeset(text: str) -> Markup:
    """Escape text, and set its indices and powers: `x_i`, `f_{1,2}`, `10^-6`, `(N+2)^p`.

    >>> print(typeset("f_{1,2} in R^d, max_steps"))
    f<sub>1,2</sub> in R<sup>d</sup>, max_steps
    """
    parts = _SCRIPTS.split(text)
    found = escape(parts[0])
    for sign, braced, bare, after in zip(*(parts[i::4] for i in (1, 2, 3, 4)), strict=True):
        tag, inside = "sub" if sign == "_" else "sup", bare if braced is None else braced
        found += Markup("<{0}>{1}</{0}>{2}").format(tag, inside, after)
    return found


def _plain_markdown(text: str) -> str:
    """Text on one line in which Markdown finds no markup."""
    return re.sub(r"([\\`*_~<$|\[])", r"\\\1", " ".join(text.split()))


def _digest(content: str) -> str:
    """Digest of a style sheet or a script, as a content security policy names it."""
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"


# One section per claim


def _section(entry: Entry, anchor: str) -> dict[str, Any]:
    """What the template shows of a claim."""
    source, parameters = entry.claim.source, [cell.parameters for cell in entry.cells]
    varying = _varying(parameters)
    number = re.fullmatch(r"arXiv (\d{4}\.\d{5})", source)
    return {
        "entry": entry,
        "anchor": anchor,
        "sort_value": list(_OUTCOMES).index(entry.verdict.outcome),
        "arxiv": number[1] if number else None,
        "reference": _REFERENCES.get(source),
        "shared": {k: v for k, v in (parameters or [{}])[0].items() if k not in varying},
        "finished": max((cell.finished for cell in entry.cells), default=""),
        "figure": _figure(entry),
        "numbers": _numbers(entry.results.cells),
        "cells": _cells(entry.cells, varying),
        "is_known": entry.claim.name in claims.known(),
    }


def _figure(entry: Entry) -> dict[str, str]:
    """The figure as a data: address, or the reason why there is none."""
    if not entry.results:
        return {"missing": "nothing was measured"}
    try:
        with warnings.catch_warnings():
            if entry.verdict.outcome == "undecided":  # a figure may warn about missing cells
                warnings.simplefilter("ignore")
            content = figures.render(entry.claim, entry.results)
    except ImportError as error:
        return {"missing": str(error)}
    except Exception as error:  # unusual settings of one claim must not stop the others
        return {"missing": f"{type(error).__name__}: {error}"}
    return {"source": f"data:image/svg+xml;base64,{base64.b64encode(content).decode('ascii')}"}


def _numbers(cells: Sequence[Result]) -> dict[str, Any] | None:
    """Statistics over seeds for every combination of the other parameters that vary."""
    lists = {n for c in cells for n, v in c.measured.items() if isinstance(v, list | tuple)}
    names = [name for name in _names(c.measured for c in cells) if name not in lists]
    if not names:
        return None
    varying = [name for name in _varying([c.parameters for c in cells]) if name != "seed"]
    groups: dict[str, list[Result]] = {}
    for cell in cells:
        key = dumps([cell.parameters.get(name) for name in varying])
        groups.setdefault(key, []).append(cell)
    rows = [
        [_value(group[0].parameters, name) for name in varying]
        + [spread([cell.measured.get(name) for cell in group]) for name in names]
        for group in groups.values()
    ]
    most = max(map(len, groups.values()))
    caption = f"Median (least – largest) over {most} seeds" if most > 1 else "One seed each"
    heads, is_open = [*varying, *names], len(rows) <= _FEW_ROWS
    return {"caption": caption, "heads": heads, "rows": rows, "open": is_open}


def _cells(cells: Sequence[Result], varying: Sequence[str]) -> dict[str, Any]:
    """A row for every cell, and the errors of those that failed."""
    names = _names(cell.measured for cell in cells)
    rows, errors = [], []
    for cell in cells:
        parameters = [_value(cell.parameters, name) for name in varying]
        measured = [_value(cell.measured, name) for name in names]
        time = "" if cell.status == "not run" else f"{cell.seconds:.2f}"
        rows.append([*parameters, cell.status, *measured, time])
        if cell.status == "failed":
            which = {name: v for name, v in cell.parameters.items() if name in varying}
            errors.append((which, cell.error))
    found = Counter(cell.status for cell in cells)
    others = [f"{found[status]} {status}" for status in ("failed", "not run") if found[status]]
    title = ", ".join([counted(len(rows), "cell"), *others])
    heads = [*varying, "status", *names, "seconds"]
    return {"title": title, "heads": heads, "rows": rows, "errors": errors}


def _assigned(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {show(value)}" for name, value in values.items())


def _value(values: Mapping[str, Any], name: str) -> str:
    return show(values[name]) if name in values else ""


def _names(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _varying(parameters: Sequence[Parameters]) -> list[str]:
    """The parameters that are not the same in all cells."""
    return [
        name
        for name in _names(parameters)
        if len({dumps(cell[name]) if name in cell else "" for cell in parameters}) > 1
    ]
