"""The report: every claim with prediction, measurement, figure and verdict, as one HTML page."""

from __future__ import annotations

import base64
import re
import shlex
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from json import dumps
from typing import Any, Literal

from onelayer.lab import claims, figures, learning, recovering
from onelayer.lab.claim import (
    Claim,
    Measured,
    Outcome,
    Parameters,
    Result,
    Results,
    Settings,
    Verdict,
)
from onelayer.lab.html import Markup, document, element, joined, table, typeset
from onelayer.lab.values import counted, seconds, show, spread, typed

Status = Literal["done", "failed", "not run"]

TITLE = "What one attention layer can learn, and how it is learned"
_INTRODUCTION = (
    "Each claim of two papers on one attention layer, and our conjectures about questions that "
    "they leave open, as experiments of the library onelayer: what is predicted, what was "
    "measured, and the verdict, which follows from the measurements by a stated rule that can "
    "fail. A conjecture that does not hold says nothing against a paper."
)
_REFERENCES = {
    learning.FIRST_PAPER: "H. Fu, T. Guo, Y. Bai, S. Mei: What can a single attention layer learn? "
    "A study through the random features lens",
    recovering.SECOND_PAPER: "S. Chen, Y. Li: Provably learning a multi-head attention layer",
}
_OUTCOMES: dict[Outcome, str] = {  # in the order in which the table sorts them
    "fails": "✗ does not hold",
    "undecided": "? undecided",
    "holds": "✓ holds",
}
_FEW = 24  # rows of a table that is open from the start


@dataclass(frozen=True)
class Cell:
    """One cell as it is on record; one that is not run has parameters only."""

    parameters: Parameters
    status: Status
    measured: Measured = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    finished: str = ""  # ISO 8601, in UTC


@dataclass(frozen=True)
class Entry:
    """One claim in the report: its cells at a size with some settings changed, and its verdict."""

    claim: Claim
    size: str
    changes: Settings
    cells: tuple[Cell, ...]
    verdict: Verdict
    results: Results

    @property
    def command(self) -> str:
        """What to type to measure it again."""
        sizes = {"quick": ["--quick"], "paper": ["--paper"]}
        words = ["onelayer", "claims", "run", self.claim.name, *sizes.get(self.size, [])]
        for name, value in self.changes.items():
            values = value if isinstance(value, list | tuple) else [value]
            words += ["--set", f"{name}={','.join(map(typed, values))}"]
        return shlex.join(words)

    @property
    def seconds(self) -> float:
        """What all of its cells took together."""
        return sum(cell.seconds for cell in self.cells)

    @property
    def findings(self) -> list[str]:
        """What was measured, a line a check; without any, why there is no verdict."""
        marks = {True: "✓", False: "✗"}
        told = [f"{marks[c.holds]} {c.statement}: {c.measured}" for c in self.verdict.checks]
        return told or [self.verdict.why]


def page(entries: Sequence[Entry], about: Mapping[str, str]) -> str:
    """One HTML file that needs neither network nor JavaScript; the same bytes for the same data.

    `about` has what the page tells of versions, machine, file and time, by name.
    """
    anchors = _anchors(entries)
    sections = [_section(entry, anchor) for entry, anchor in zip(entries, anchors, strict=True)]
    top = [element("h1", None, TITLE), element("p", None, _INTRODUCTION)]
    return document(
        TITLE,
        element("header", None, *top, _counts(entries, anchors)),
        element("main", None, _overview(entries, anchors), *sections),
        element("footer", None, _about(about)),
    )


def markdown(entries: Iterable[Entry]) -> str:
    """A table in Markdown: claim, prediction, what was measured, verdict (bold if it fails)."""
    rows = [("Claim", "Prediction", "Measured", "Verdict"), ("---",) * 4]
    for entry in entries:
        title, prediction = map(_plain_markdown, (entry.claim.title, entry.claim.prediction))
        title += " (conjecture)" * (entry.claim.kind == "conjecture")
        found = "<br>".join(map(_plain_markdown, entry.findings))
        verdict = _OUTCOMES[entry.verdict.outcome].split(" ", 1)[1]
        if entry.verdict.outcome == "fails":
            verdict = f"**{verdict}**"
        rows.append((title, prediction, found, verdict))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _plain_markdown(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    return re.sub(r"([\\`*_~<$|\[])", r"\\\1", " ".join(text.split()))


# The top: counts, and the table of all claims


def _anchors(entries: Sequence[Entry]) -> list[str]:
    """The id of every entry's section, by the name of the claim."""
    anchors: list[str] = []
    for entry in entries:
        name = "claim-" + re.sub(r"[^a-z0-9]+", "-", entry.claim.name.lower())
        options = (name if number == 1 else f"{name}-{number}" for number in count(1))
        anchors.append(next(option for option in options if option not in anchors))
    return anchors


def _counts(entries: Sequence[Entry], anchors: Sequence[str]) -> Markup:
    """How many claims hold; by name those that do not, and those that are undecided."""
    if not entries:
        return element("p", None, "No claim was run yet.")
    found = Counter(entry.verdict.outcome for entry in entries)
    told = (
        f"{counted(len(entries), 'claim')}: {found['holds']} held, {found['fails']} did not hold, "
        f"{found['undecided']} undecided."
    )
    parts = [element("p", None, element("strong", None, told))]
    for outcome, text in (("fails", "did not hold"), ("undecided", "are undecided")):
        items = [
            element("li", None, _link(entry, anchor), _conjectured(entry.claim), _reason(entry))
            for entry, anchor in zip(entries, anchors, strict=True)
            if entry.verdict.outcome == outcome
        ]
        if items:
            parts += [element("p", None, f"These claims {text}:"), element("ul", None, *items)]
    return element("div", {"class": "counts"}, *parts)


def _reason(entry: Entry) -> str:
    return f": {entry.verdict.why}" if entry.verdict.why else ""


def _link(entry: Entry, anchor: str) -> Markup:
    return element("a", {"href": f"#{anchor}"}, typeset(entry.claim.title))


def _overview(entries: Sequence[Entry], anchors: Sequence[str]) -> Markup:
    """The table of all claims; a script makes it sortable."""
    if not entries:
        return joined()
    names = ("Claim", "Paper", "Prediction", "Measured", "Verdict", "Size", "Cells", "Seconds")
    # On narrow screens its rows are blocks, which would lose their roles if these were not said.
    heads = [element("th", {"scope": "col", "role": "columnheader"}, name) for name in names]
    rows = [_overview_row(e, anchor) for e, anchor in zip(entries, anchors, strict=True)]
    return element(
        "table",
        {"class": "claims sortable", "role": "table", "id": "claims"},
        element("caption", None, "All claims; a title leads to its figure, numbers and cells"),
        element("thead", {"role": "rowgroup"}, element("tr", {"role": "row"}, *heads)),
        element("tbody", {"role": "rowgroup"}, *rows),
    )


def _overview_row(entry: Entry, anchor: str) -> Markup:
    outcome, done = entry.verdict.outcome, len(entry.results)
    findings = [element("li", None, typeset(line)) for line in entry.findings]
    cells = str(done) if done == len(entry.cells) else f"{done} of {len(entry.cells)}"
    size = f"{entry.size}, changed" if entry.changes else entry.size
    contents: list[tuple[str, str, dict[str, str]]] = [
        ("Paper", entry.claim.source + _conjectured(entry.claim), {}),
        ("Prediction", typeset(entry.claim.prediction), {}),
        ("Measured", element("ul", None, *findings), {}),
        ("Verdict", _verdict(outcome), {"data-value": str(list(_OUTCOMES).index(outcome))}),
        ("Size", size, {}),
        ("Cells", cells, {"class": "number", "data-value": str(done)}),
        ("Seconds", seconds(entry.seconds), {"class": "number", "data-value": f"{entry.seconds}"}),
    ]
    return element(
        "tr",
        {"role": "row"},
        element("th", {"scope": "row", "role": "rowheader"}, _link(entry, anchor)),
        *(
            element("td", {"role": "cell", "data-label": label, **more}, content)
            for label, content, more in contents
        ),
    )


def _conjectured(claim: Claim) -> str:
    """What is to be said of a claim that is not the paper's own."""
    return " (our conjecture)" if claim.kind == "conjecture" else ""


def _verdict(outcome: Outcome) -> Markup:
    return element("span", {"class": f"verdict {outcome}"}, _OUTCOMES[outcome])


# One section a claim


def _section(entry: Entry, anchor: str) -> Markup:
    claim, title = entry.claim, f"title-of-{anchor}"
    return element(
        "section",
        {"id": anchor, "aria-labelledby": title},
        element("h2", {"id": title}, typeset(claim.title)),
        element("p", {"class": "meta"}, *_origin(entry)),
        element("h3", None, "Prediction"),
        element("p", None, typeset(claim.prediction)),
        element("h3", None, "Rule"),
        element("p", None, typeset(claim.rule)),
        element("h3", None, "Verdict"),
        element("p", None, _verdict(entry.verdict.outcome), _reason(entry)),
        _checks(entry.verdict),
        _figure(entry),
        _numbers(entry),
        _cells(entry),
        _again(entry),
        element("p", {"class": "meta up"}, element("a", {"href": "#claims"}, "All claims")),
    )


def _again(entry: Entry) -> Markup:
    """The command that measures it; for a claim that it does not know there is none."""
    if entry.claim.name not in claims.known():
        return joined()
    command = element("pre", None, element("code", None, entry.command))
    return joined(element("h3", None, "To measure it again"), command)


def _origin(entry: Entry) -> list[str]:
    """The paper, with a link where it is on arXiv, the size, and what all cells have in common."""
    source = entry.claim.source
    number = re.fullmatch(r"arXiv (\d{4}\.\d{5})", source)
    link = (
        element("a", {"href": f"https://arxiv.org/abs/{number[1]}"}, source) if number else source
    )
    reference = f"{_REFERENCES[source]}. " if source in _REFERENCES else ""
    changed = f" with {_assigned(entry.changes)} changed" if entry.changes else ""
    parameters = [cell.parameters for cell in entry.cells]
    varying = _varying(parameters)
    shared = {k: v for k, v in (parameters or [{}])[0].items() if k not in varying}
    common = f" All cells: {_assigned(shared)}." if shared else ""
    last = max((cell.finished for cell in entry.cells), default="")
    finished = f" Finished: {last}." if last else ""
    return [reference, link, typeset(f". Size: {entry.size}{changed}.{common}{finished}")]


def _assigned(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} = {show(value)}" for name, value in values.items())


def _checks(verdict: Verdict) -> Markup:
    if not verdict.checks:
        return joined()
    rows = [
        [check.statement, check.measured, _verdict("holds" if check.holds else "fails")]
        for check in verdict.checks
    ]
    return table("What the rule asks", ["Asked", "Measured", "Verdict"], rows, "checks")


def _figure(entry: Entry) -> Markup:
    """The figure, or a sentence that says why there is none."""
    if not entry.results:
        return element("p", None, "No figure: nothing was measured.")
    try:
        with warnings.catch_warnings():
            if entry.verdict.outcome == "undecided":  # where cells are missing, a figure may warn
                warnings.simplefilter("ignore")
            content = figures.render(entry.claim, entry.results)
    except ImportError as error:
        return element("p", None, f"No figure: {error}.")
    except Exception as error:  # one claim with odd settings must not cost the others
        return element("p", None, f"No figure: {type(error).__name__}: {error}.")
    source = f"data:image/svg+xml;base64,{base64.b64encode(content).decode('ascii')}"
    shown = f"Measurement and prediction: {entry.claim.title}"
    drawn = len(entry.results), len(entry.cells)
    some = f" Drawn from {drawn[0]} of {drawn[1]} cells." if drawn[0] < drawn[1] else ""
    image = element("img", {"src": source, "alt": f"{shown}. The tables below have the numbers."})
    caption = element("figcaption", None, typeset(f"{shown}.{some}"))
    return element("figure", None, image, caption)


def _numbers(entry: Entry) -> Markup:
    """What was measured, over seeds, for every combination of the other parameters that vary."""
    cells = entry.results.cells
    names = [name for name in _names(c.measured for c in cells) if not _is_list(name, entry)]
    if not names:
        return joined()
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
    return _folded("Numbers", table(caption, [*varying, *names], rows), unfolded=len(rows) <= _FEW)


def _cells(entry: Entry) -> Markup:
    """All cells, those that failed with their errors; what they have in common is said above."""
    varying = _varying([cell.parameters for cell in entry.cells])
    names = _names(cell.measured for cell in entry.cells)
    rows = [
        [
            *(_value(cell.parameters, name) for name in varying),
            cell.status,
            *(_value(cell.measured, name) for name in names),
            "" if cell.status == "not run" else f"{cell.seconds:.2f}",
        ]
        for cell in entry.cells
    ]
    errors = []
    for cell in entry.cells:
        if cell.status == "failed":
            which = {name: v for name, v in cell.parameters.items() if name in varying}
            told = element("p", None, typeset(f"Failed: {_assigned(which)}"))
            errors += [told, element("pre", None, cell.error)]
    found = Counter(cell.status for cell in entry.cells)
    others = [f"{found[status]} {status}" for status in ("failed", "not run") if found[status]]
    title = ", ".join([counted(len(rows), "cell"), *others])
    heads = [*varying, "status", *names, "seconds"]
    return _folded(title, joined(*errors, table("All cells", heads, rows)))


def _folded(title: str, content: Markup, unfolded: bool = False) -> Markup:
    state = {"open": ""} if unfolded else None
    return element("details", state, element("summary", None, title), content)


def _about(about: Mapping[str, str]) -> Markup:
    items = [(element("dt", None, name), element("dd", None, text)) for name, text in about.items()]
    return element(
        "section",
        {"aria-labelledby": "about"},
        element("h2", {"id": "about"}, "Versions and machine"),
        element("dl", None, *(part for item in items for part in item)),
    )


# Names and values


def _value(values: Mapping[str, Any], name: str) -> str:
    """A value of a table, empty where there is none."""
    return show(values[name]) if name in values else ""


def _names(mappings: Iterable[Mapping[str, Any]]) -> list[str]:
    """All names that occur, in the order in which they do."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _varying(parameters: Sequence[Parameters]) -> list[str]:
    """The parameters that are not the same in all cells."""
    return [
        name
        for name in _names(parameters)
        if len({dumps(cell[name]) if name in cell else "" for cell in parameters}) > 1
    ]


def _is_list(name: str, entry: Entry) -> bool:
    return any(isinstance(cell.measured.get(name), list | tuple) for cell in entry.results)
