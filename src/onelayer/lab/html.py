"""HTML in which all text is text, and the frame of a page that needs nothing but its own file.

`element` escapes whatever is not `Markup` already, so that text from anywhere, a claim's title or
the error of a cell, is shown as it is and can never become part of the page's structure.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from html import escape

_WITHOUT_END = {"img", "link", "meta"}
# After a letter alone, a digit or a bracket: anything in braces, or a letter or number alone.
_SCRIPTS = re.compile(
    r"(?<=\b[^\W\d_]|[)\]>\d])([_^])(?:\{([^{}]*)\}|(-?\d+(?:\.\d+)?|[^\W\d_])(?![a-zA-Z0-9_(]))"
)

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fff; --ink: #1c1f23; --quiet: #59616b; --line: #d9dde2; --shade: #f4f5f7;
  --link: #0b4f9e; --holds: #0b6238; --fails: #a8201a; --undecided: #705200;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --paper: #15181c; --ink: #e4e6e9; --quiet: #a3abb5; --line: #363c44; --shade: #1e2227;
    --link: #8fbcff; --holds: #74cf9b; --fails: #ff988f; --undecided: #e2bd5c;
  }
}
* { box-sizing: border-box; }
html { background: var(--paper); color: var(--ink); -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 84rem;
  font: 1rem/1.55 Charter, "Bitstream Charter", "Source Serif 4", Cambria, Georgia, serif;
  overflow-wrap: break-word;
}
h1, h2, h3 { line-height: 1.25; text-wrap: balance; }
h1 { font-size: 1.9rem; margin: 0 0 0.75rem; }
h2 { font-size: 1.35rem; margin: 0 0 0.5rem; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.25rem; }
p { margin: 0.5rem 0; }
p, pre, dl, figure { max-width: 46rem; }
sub, sup { font-size: 0.75em; line-height: 0; white-space: nowrap; }
a { color: var(--link); text-underline-offset: 0.15em; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; border-radius: 2px; }
section { border-top: 1px solid var(--line); margin-top: 3rem; padding-top: 1.75rem; }
table, summary, .meta, .verdict, figcaption { font-family: system-ui, sans-serif; }
.meta, figcaption { color: var(--quiet); font-size: 0.85rem; }
pre, code { font: 0.85rem/1.5 ui-monospace, "Liberation Mono", Menlo, monospace; }
pre { background: var(--shade); border-radius: 4px; margin: 0 0 0.75rem;
  overflow-wrap: anywhere; padding: 0.6rem 0.8rem; white-space: pre-wrap; }

table { border-collapse: collapse; font-size: 0.85rem; font-variant-numeric: tabular-nums;
  line-height: 1.45; }
caption { color: var(--quiet); padding-bottom: 0.4rem; text-align: left; }
th, td { padding: 0.4rem 1rem 0.4rem 0; text-align: left; vertical-align: top; }
thead th { border-bottom: 1.5px solid var(--ink); vertical-align: bottom; white-space: nowrap; }
tbody tr { border-bottom: 1px solid var(--line); }
.wide, .checks { overflow-x: auto; }
.wide table { width: max-content; }
.wide th, .wide td { max-width: 24rem; overflow-wrap: anywhere; white-space: normal; }
.checks { max-width: 60rem; }

.claims { margin-top: 2rem; width: 100%; }
.claims tbody th, .claims td { overflow-wrap: anywhere; }
.claims tbody th { font-weight: 600; width: 15%; }
.claims [data-label=Paper] { min-width: 6.5rem; }
.claims [data-label=Size] { min-width: 5rem; }
.claims [data-label=Prediction] { width: 27%; }
.claims [data-label=Measured] { width: 40%; }
.claims li { list-style: none; padding-left: 1.2em; text-indent: -1.2em; }
.claims ul { margin: 0; padding: 0; }
.number { text-align: right; }
th button { all: unset; cursor: pointer; }
th button:focus-visible { outline: 3px solid var(--link); outline-offset: 2px; }
th button::after { color: var(--quiet); content: " \\2195" / ""; }
[aria-sort=ascending] button::after { color: inherit; content: " \\25b2" / ""; }
[aria-sort=descending] button::after { color: inherit; content: " \\25bc" / ""; }

.verdict { font-weight: 600; white-space: nowrap; }
.holds { color: var(--holds); }
.fails { color: var(--fails); }
.undecided { color: var(--undecided); }
.counts { border-left: 4px solid var(--line); margin: 1.25rem 0; padding: 0.1rem 0 0.1rem 1rem; }
.counts ul { margin: 0.25rem 0 0.75rem; padding-left: 1.25rem; }
figure { margin: 1.5rem 0; }
figcaption { margin-top: 0.4rem; }
figure img { background: #fff; border-radius: 4px; display: block; height: auto; width: 100%; }
details { margin: 0.75rem 0; }
summary { cursor: pointer; font-size: 0.9rem; font-weight: 600; padding: 0.25rem 0; }
dt { font-weight: 600; }
dd { margin: 0 0 0.5rem; overflow-wrap: anywhere; }

@media (max-width: 60rem) {
  body { padding-top: 1.5rem; }
  h1 { font-size: 1.5rem; }
  .claims, .claims caption, .claims tbody { display: block; }
  .claims thead tr, .claims tbody tr { display: flex; flex-wrap: wrap; gap: 0.3rem 1.25rem; }
  .claims thead th { border: 0; padding: 0.2rem 0; }
  .claims tbody tr { padding: 1rem 0; }
  .claims tbody th { font-size: 1rem; order: -2; padding: 0; width: 100%; }
  .claims tbody td { padding: 0; text-align: left; }
  .claims td::before { color: var(--quiet); content: attr(data-label) ": "; }
  .claims [data-label=Verdict] { order: -1; width: 100%; }
  .claims [data-label=Prediction], .claims [data-label=Measured] { order: 1; width: 100%; }
}
@media print {
  body { font-size: 10pt; max-width: none; padding: 0; }
  section { border: 0; break-before: page; margin: 0; }
  figure, tr, pre { break-inside: avoid; }
  .wide, .checks { overflow: visible; }
  .wide table { width: auto; }
  .up { display: none; }
  th button::after { content: none; }
  a { color: inherit; }
}
@media print and (max-width: 60rem) {
  .claims thead { display: none; }
}
"""

# Headers become buttons here and not in the page itself: without JavaScript they would do nothing.
SCRIPT = """
"use strict";
const text = new Intl.Collator("en", {numeric: true});
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
      const value = row => row.cells[column].dataset.value ?? row.cells[column].textContent;
      const order = (a, b) => (a - b) || text.compare(a, b);
      body.append(...[...body.rows].sort((a, b) => sign * order(value(a), value(b))));
    });
  });
}
"""


class Markup(str):
    """HTML that goes into a page as it is."""

    __slots__ = ()


def element(name: str, attributes: Mapping[str, str] | None, *children: str) -> Markup:
    """An element with its children; text in it and in its attributes is escaped.

    >>> element("p", {"title": 'a "b"'}, "1 < 2, ", element("b", None, "really"))
    '<p title="a &quot;b&quot;">1 &lt; 2, <b>really</b></p>'
    """
    start = "".join(f' {key}="{_escaped(value)}"' for key, value in (attributes or {}).items())
    if name in _WITHOUT_END:
        return Markup(f"<{name}{start}>")
    return Markup(f"<{name}{start}>{joined(*children)}</{name}>")


def joined(*parts: str) -> Markup:
    """One after the other; text among them is escaped."""
    return Markup("".join(p if isinstance(p, Markup) else _escaped(p) for p in parts))


def typeset(text: str) -> Markup:
    """Text with indices and powers set as such: `x_i`, `f_{1,2}`, `10^-6`, `(N+2)^p`.

    >>> typeset("f_{1,2} in R^d, max_steps")
    'f<sub>1,2</sub> in R<sup>d</sup>, max_steps'
    """
    parts = _SCRIPTS.split(text)
    found = [joined(parts[0])]
    for sign, braced, bare, after in zip(*(parts[i::4] for i in (1, 2, 3, 4)), strict=True):
        inside = bare if braced is None else braced
        found += [element("sub" if sign == "_" else "sup", None, inside), joined(after)]
    return joined(*found)


def table(
    caption: str, heads: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "wide"
) -> Markup:
    """A table in a box that scrolls, also by keyboard, where the table is wider than the page."""
    head = element("tr", None, *(element("th", {"scope": "col"}, typeset(name)) for name in heads))
    body = [element("tr", None, *(element("td", None, _content(c)) for c in row)) for row in rows]
    whole = element(
        "table",
        None,
        element("caption", None, caption),
        element("thead", None, head),
        element("tbody", None, *body),
    )
    box = {"class": kind, "role": "region", "aria-label": caption, "tabindex": "0"}
    return element("div", box, whole)


def _content(text: str) -> Markup:
    return text if isinstance(text, Markup) else typeset(text)


def document(title: str, *body: str) -> str:
    """A whole page, whose policy allows its own style and script, by digest, and data: images."""
    policy = {
        "default-src": "'none'",
        "style-src": _digest(STYLE),
        "script-src": _digest(SCRIPT),
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    content = "; ".join(f"{kind} {allowed}" for kind, allowed in policy.items())
    head = [
        element("meta", {"charset": "utf-8"}),
        element("meta", {"http-equiv": "Content-Security-Policy", "content": content}),
        element("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}),
        element("meta", {"name": "color-scheme", "content": "light dark"}),
        element("meta", {"name": "referrer", "content": "no-referrer"}),
        element("link", {"rel": "icon", "href": "data:,"}),  # or else browsers ask a server for one
        element("title", None, title),
        element("style", None, Markup(STYLE)),
    ]
    script = element("script", None, Markup(SCRIPT))
    page = element(
        "html", {"lang": "en"}, element("head", None, *head), element("body", None, *body, script)
    )
    return f"<!DOCTYPE html>\n{page}\n"


def _escaped(text: str) -> str:
    # Half a surrogate pair, as in names of files that are no UTF-8, cannot be written to a file.
    return escape(text.encode("utf-8", "backslashreplace").decode("utf-8"))


def _digest(content: str) -> str:
    digest = hashlib.sha256(content.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
