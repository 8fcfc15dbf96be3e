"""Results on a screen: a title, facts and a table, as text for `repr` and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from typing import Any

_WIDTH = 88  # characters of a line of text
_ROWS = 12  # of a table in text: a result is to fit on a screen
_HTML_ROWS = 200

# Colours and fonts are those of the page, so that summaries are legible on dark pages too.
_TEMPLATE = """\
<div class="onelayer-summary">
<style>
.onelayer-summary { max-width: 50rem; margin: 0.3rem 0; overflow-x: auto; }
.onelayer-summary .onelayer-title { font-weight: bold; margin: 0 0 0.3rem; }
.onelayer-summary table { border-collapse: collapse; margin: 0 0 0.6rem; font-size: 0.9em; }
.onelayer-summary th, .onelayer-summary td {
  border: 0; border-bottom: 1px solid rgba(128, 128, 128, 0.35); padding: 0.15rem 0.8rem 0.15rem 0;
  text-align: left; vertical-align: top; background: none; white-space: normal;
}
.onelayer-summary th { font-weight: normal; opacity: 0.8; white-space: nowrap; }
.onelayer-summary .onelayer-rows td, .onelayer-summary .onelayer-rows th {
  text-align: right; white-space: nowrap;
}
.onelayer-summary .onelayer-rows .onelayer-words { text-align: left; }
.onelayer-summary .onelayer-rows .onelayer-words:last-child { white-space: normal; }
</style>
<p class="onelayer-title">{{ title }}</p>
{% if facts %}
<table>
{% for name, value in facts.items() %}
<tr><th scope="row">{{ name }}</th><td>{{ value }}</td></tr>
{% endfor %}
</table>
{% endif %}
{% if rows %}
<table class="onelayer-rows">
<tr>
{% for heading in headings %}
<th scope="col"{% if loop.index0 in words %} class="onelayer-words"{% endif %}>{{ heading }}</th>
{% endfor %}
</tr>
{% for row in rows %}
<tr>
{% for cell in row %}
<td{% if loop.index0 in words %} class="onelayer-words"{% endif %}>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</table>
{% endif %}
{% if more %}<p>{{ more }}</p>{% endif %}
</div>
"""


@dataclass(frozen=True)
class Summary:
    """A title, facts by name, and a table; `words` are the columns of text rather than numbers."""

    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    headings: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    words: frozenset[int] = frozenset()

    def text(self) -> str:
        """The summary as lines of text.

        >>> print(Summary("Two heads", {"error": "0.1"}, ("head", "bar"), [("0", "1e-3")]).text())
        Two heads
          error  0.1
        <BLANKLINE>
          head   bar
             0  1e-3
        """
        width = max(map(len, self.facts), default=0)
        lines = [self.title]
        for name, value in self.facts.items():
            first, *others = wrap(value, _WIDTH - width - 4) or [""]
            lines += [f"  {name:<{width}}  {first}"]
            lines += [" " * (width + 4) + line for line in others]
        if self.rows:
            lines += [""] * bool(self.facts) + self._table(self.rows[:_ROWS])
        return "\n".join(line.rstrip() for line in [*lines, *self._more(_ROWS)])

    def html(self) -> str:
        """The summary as HTML that stands on its own; all its texts are escaped."""
        return _rendered(
            title=self.title,
            facts=self.facts,
            headings=self.headings,
            rows=self.rows[:_HTML_ROWS],
            words=self.words,
            more="".join(self._more(_HTML_ROWS)),
        )

    def _table(self, rows: Sequence[Sequence[str]]) -> list[str]:
        table = [self.headings, *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        return ["  " + "  ".join(self._cells(row, widths)) for row in table]

    def _cells(self, row: Sequence[str], widths: Sequence[int]) -> list[str]:
        padded = zip(row, widths, strict=True)
        return [
            f"{cell:<{width}}" if column in self.words else f"{cell:>{width}}"
            for column, (cell, width) in enumerate(padded)
        ]

    def _more(self, shown: int) -> list[str]:
        rest = len(self.rows) - shown
        return [f"  ... and {rest} more"] if rest > 0 else []


def number(value: float) -> str:
    """A number in few digits.

    >>> number(0.0), number(2.5), number(1.234e-12), number(float("inf"))
    ('0', '2.5', '1.2e-12', 'inf')
    """
    small = value != 0 and not 1e-3 <= abs(value) < 1e4
    return f"{value:.1e}" if small and abs(value) != float("inf") else f"{value:.3g}"


def _rendered(**values: Any) -> str:
    from jinja2 import Environment  # notebooks alone need it

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE).render(values)
