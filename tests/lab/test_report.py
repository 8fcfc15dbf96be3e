import base64
import hashlib
import html
import re
import sys
import warnings
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lab.browser import NAMES, Browser, installed

from onelayer.lab import claims, figures, report
from onelayer.lab.claim import Check, Claim, Result, Undecided, Verdict, grid
from onelayer.lab.outcomes import Entry
from onelayer.lab.report import typeset

ABOUT = {"onelayer": "0.1.0", "machine": "a machine with two cores"}
ATTACKS = (
    "<script>document.title='owned'</script>",
    "\"><img src=x onerror=document.title='owned'>",
    "' onfocus=document.title='owned' autofocus x='",
    "</style></title></pre></table><svg onload=document.title='owned'>",
    "]]><!-- --><b>owned</b>",
    "javascript:document.title='owned'",
    "&lt;b&gt;owned&#60;/b&#62;",
)
LONG = "unbroken" * 60
# Characters that have a meaning in HTML, and some that do not.
TEXT = st.text(st.sampled_from("<>&;#'\"`/=!-[]{}_^ \n\tabé"))


def judge(results):
    errors = results.where(heads=max(results.of("heads"))).numbers("error")
    return [
        Check("f_{1,2} is learned", f"{errors.max():.2g} | *at most*", errors.max() <= 0.5),
        Check("there are cells", f"{len(results)}", len(results) > 0),
    ]


def draw(results, figure):
    axes = figure.subplots()
    figures.curve(axes, results, "heads", "error", "measured")
    axes.set(xlabel="heads", ylabel="error")


SETTINGS = {"heads": [2, 8], "dim": 4, "seeds": 3}
CLAIM = Claim(
    name="few-heads",
    title="Few heads are enough",
    source="arXiv 2307.11353",
    prediction="The error falls as heads are added.",
    rule="With the most heads the error is at most 0.5.",
    sizes={"quick": SETTINGS, "default": SETTINGS, "paper": SETTINGS},
    cells=grid,
    measure=lambda heads, seed, dim: {"error": (seed + 1) / heads},
    judge=judge,
    draw=draw,
)


def entry(claim=CLAIM, size="quick", failed=(), missing=(), seconds=1.0, changes=None, **replaced):
    """A claim of which some cells, by number, failed or were not run."""
    claim, changes = replace(claim, **replaced), changes or {}
    cells = []
    for number, parameters in enumerate(claim.cells(claim.settings(size, changes))):
        if number in missing:
            cells.append(Result(parameters, status="not run"))
        elif number in failed:
            error = "ValueError: 1 < 2"
            cells.append(Result(parameters, {}, seconds, "failed", error))
        else:
            measured = claim.measure(**parameters)
            cells.append(Result(parameters, measured, seconds, finished="2026-01-02T03:04:05Z"))
    return Entry(claim, size, changes, tuple(cells), claim.verdict(cells))


def measuring(**values):
    """A claim that measures this too: a value, or a function of the seed."""

    def measure(heads, seed, dim):
        told = {name: v(seed) if callable(v) else v for name, v in values.items()}
        return {"error": (seed + 1) / heads} | told

    return entry(measure=measure)


def refuse(_):
    raise Undecided("there is one size only")


def several():
    """Claims of all kinds, in no order by title, seconds or verdict."""
    return [
        entry(title="Middle", seconds=1.55),
        entry(title="Zero", seconds=20.0, measure=lambda **_: {"error": 0.9}),
        entry(title="Alpha", seconds=2.3125, failed=[1], missing=[3, 4]),
        entry(title="Never", missing=range(6), seconds=0.0, source="arXiv 2402.04084"),
    ]


def shown(page):
    """The text of a page, as a reader would have it, without its style and script."""
    bare = re.sub(r"<(style|script)>.*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"<[^>]*>", " ", bare))


def table(page, caption):
    """The rows of the table with this caption, each as a list of texts."""
    found = re.search(f"<caption>{re.escape(caption)}.*?</table>", page, flags=re.DOTALL)[0]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", found, flags=re.DOTALL)
    return [
        [
            html.unescape(re.sub("<[^>]*>", "", cell))
            for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, flags=re.DOTALL)
        ]
        for row in rows
    ]


@pytest.fixture(scope="module")
def page():
    return report.page(several(), ABOUT)


class Parsed(HTMLParser):
    """What a parser finds in HTML: start tags with attributes, and the text."""

    def __init__(self, markup):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(markup)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += data


# Text


@given(TEXT)
@example("<b>&amp;</b>'\" x=")
def test_typeset_text_stays_text(text):
    found = Parsed(str(typeset(text)))
    assert [tag for tag, _ in found.tags if tag not in ("sub", "sup")] == []
    if not found.tags:
        assert found.text == text


@given(TEXT)
@example("<b>&amp;</b>'\" x=")
def test_text_in_the_page_stays_text(text):
    def parsed(value):
        failed = (Result({"seed": 0}, status="failed", error=value),)
        named = replace(CLAIM, source=value, prediction=value)
        shown = Entry(named, value, {}, failed, Verdict("undecided", why=value))
        return Parsed(report.page([shown], {"name": value}))

    plain, found = parsed("plain"), parsed(text)
    assert [tag for tag in found.tags if tag[0] not in ("sub", "sup")] == plain.tags
    for shown in (f"name{text}", f"undecided: {text}", f"Failed: {text}"):
        assert "".join(shown.split()) in "".join(found.text.split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f_{1,2} and x^{-1}", "f<sub>1,2</sub> and x<sup>-1</sup>"),
        (
            "Σ_i w_i, (N+2)^p, <x_0>^q",
            "Σ<sub>i</sub> w<sub>i</sub>, (N+2)<sup>p</sup>, &lt;x<sub>0</sub>&gt;<sup>q</sup>",
        ),
        ("10^6, M^-2.52, w_i².", "10<sup>6</sup>, M<sup>-2.52</sup>, w<sub>i</sub>²."),
        (
            "max_steps, a_bc, test_a, {c}, d^O(2), _{e}",
            "max_steps, a_bc, test_a, {c}, d^O(2), _{e}",
        ),
        ("x_{<b>}", "x<sub>&lt;b&gt;</sub>"),
        ("x_{}", "x<sub></sub>"),
        ("a_{b", "a_{b"),
    ],
)
def test_indices_are_typeset(text, expected):
    assert typeset(text) == expected


def test_text_that_utf8_cannot_encode_is_escaped():
    assert b"<dd>a\\udcff</dd>" in report.page([], {"name": "a\udcff"}).encode("utf-8")


# The whole


def test_policy_allows_the_script_and_style_of_the_page_alone(page):
    [policy] = [kind["content"] for _, kind in Parsed(page).tags if "Content-Security" in str(kind)]
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    for tag in ("style", "script"):
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert allowed.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert allowed.pop("img-src") == "data:"
    assert allowed == dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_page_says_its_language_and_fits_screens(page):
    assert page.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert f"<title>{report.TITLE}</title>" in page
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in page


def test_tables_say_what_they_are(page):
    boxes = [kind for tag, kind in Parsed(page).tags if kind.get("role") == "region"]
    assert {box["aria-label"] for box in boxes} >= {"All cells", "What the rule asks"}
    assert {box["tabindex"] for box in boxes} == {"0"}  # they scroll by keyboard
    heads = [kind for tag, kind in Parsed(page).tags if tag == "th"]
    assert {head["scope"] for head in heads} == {"col", "row"}


def test_the_same_entries_give_the_same_page(page):
    assert report.page(several(), ABOUT) == page


def test_counts_and_what_does_not_hold_are_said_at_the_top(page):
    top = " ".join(shown(page[: page.index("<main>")]).split())
    assert "4 claims: 1 held, 1 did not hold, 2 undecided." in top
    assert "These claims did not hold: Zero These claims are undecided: Alpha" in top
    assert "Alpha : of 6 cells 2 not run and 1 failed" in top
    assert "Middle" not in top


def test_where_all_hold_no_other_is_listed():
    assert "These claims" not in report.page([entry()], ABOUT)


def test_a_page_without_claims_says_so():
    found = report.page([], ABOUT)
    assert "No claim was run yet." in found
    assert re.search(r"<main>\s*</main>", found)


def test_overview_has_a_row_for_each_claim(page):
    heads, *rows = table(page, "All claims")
    assert heads == [
        "Claim", "Paper", "Prediction", "Measured", "Verdict", "Size", "Cells", "Seconds"
    ]  # fmt: skip
    assert rows[1] == [
        "Zero",
        "arXiv 2307.11353",
        "The error falls as heads are added.",
        "✗ f1,2 is learned: 0.9 | *at most*✓ there are cells: 6",
        "✗ does not hold",
        "quick",
        "6",
        "120",
    ]
    assert [row[4] for row in rows] == ["✓ holds", "✗ does not hold", "? undecided", "? undecided"]
    assert rows[2][6:] == ["3 of 6", "9.2"]


def test_versions_and_machine_are_at_the_end(page):
    told = " ".join(shown(page).split())
    assert told.endswith("Versions and machine onelayer 0.1.0 machine a machine with two cores")


def test_a_claim_may_come_twice():
    ids = re.findall(r' id="([^"]*)"', report.page([entry(), entry(size="paper")], ABOUT))
    assert len(set(ids)) == len(ids)
    assert {"claim-few-heads", "claim-few-heads-2"} <= set(ids)


# One claim


def test_section_has_prediction_rule_and_every_check(page):
    found = shown(page)
    for text in (CLAIM.prediction, CLAIM.rule, "All cells: dim = 4.", "H. Fu, T. Guo, Y. Bai"):
        assert text in found
    assert table(page, "What the rule asks") == [
        ["Asked", "Measured", "Verdict"],
        ["f1,2 is learned", "0.38 | *at most*", "✓ holds"],
        ["there are cells", "6", "✓ holds"],
    ]


def test_a_rule_that_cannot_judge_says_why():
    found = report.page([entry(judge=refuse)], ABOUT)
    assert "? undecided : there is one size only" in shown(found)
    assert found.count("<img") == 1


def test_every_figure_has_a_text_in_its_place(page):
    images = re.findall(r"<img [^>]*>", page)
    assert len(images) == 3  # of the last claim nothing was measured
    for image in images:
        assert re.search('src="data:image/svg[+]xml;base64,[^"]+" alt="[^"]{40,}"', image)
    assert "No figure: nothing was measured." in page
    assert "Alpha. Drawn from 3 of 6 cells." in shown(page)


def test_a_figure_that_breaks_does_not_cost_the_page():
    def fail(results, figure):
        raise KeyError("heads 8")

    def warn(results, figure):
        warnings.warn("nothing to draw", UserWarning, stacklevel=1)

    for missing in ([], [5]):
        found = shown(report.page([entry(draw=fail, missing=missing)], ABOUT))
        assert "No figure: KeyError: 'heads 8'." in found
    assert "<img" in report.page([entry(draw=warn, missing=[5])], ABOUT)


def test_without_matplotlib_the_page_has_all_but_figures(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = report.page([entry()], ABOUT)
    assert "pip install matplotlib." in shown(found)
    assert table(found, "Median")[0] == ["heads", "error"]


def test_numbers_are_over_seeds():
    assert table(report.page([entry()], ABOUT), "Median (least – largest) over 3 seeds") == [
        ["heads", "error"],
        ["2", "1 (0.5 – 1.5)"],
        ["8", "0.25 (0.125 – 0.375)"],
    ]


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (7, "7"),
        (lambda seed: [9, None, 5][seed], "7 (5 – 9), 1 of 3 none"),
        (None, "none"),
        (True, "yes"),
        (lambda seed: seed == 1, "no (2 of 3), yes (1 of 3)"),
        (lambda seed: "ab"[seed // 2], "a (2 of 3), b (1 of 3)"),
        (lambda seed: 10.0**-seed / 3, "0.0333 (0.00333 – 0.333)"),
    ],
)
def test_spread_of_every_kind_of_value(value, told):
    rows = table(report.page([measuring(value=value)], ABOUT), "Median")
    assert [row[-1] for row in rows] == ["value", told, told]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ([1, 0.123456, None, True], "[1, 0.1235, none, yes]"),
        (list(range(40)), "[0, 1, 2, …, 39] (40 values)"),
        ([[0.5] * 8] * 3, "3 × 8 values"),
        ([], "[]"),
        ([[], []], "2 values"),
    ],
)
def test_lists_are_short_in_cells_and_no_numbers(values, told):
    found = report.page([measuring(values=values)], ABOUT)
    assert table(found, "All cells")[1] == ["2", "0", "done", "0.5", told, "1.00"]
    assert table(found, "Median")[0] == ["heads", "error"]


def test_all_cells_are_there_with_their_status_and_errors():
    found = report.page([entry(failed=[1], missing=[4])], ABOUT)
    assert "6 cells, 1 failed, 1 not run" in found
    rows = table(found, "All cells")
    assert rows[0] == ["heads", "seed", "status", "error", "seconds"]
    assert rows[2] == ["2", "1", "failed", "", "1.00"]
    assert rows[5] == ["8", "1", "not run", "", ""]
    assert "Failed: heads = 2, seed = 1" in found
    assert "<pre>ValueError: 1 &lt; 2</pre>" in found


def test_cells_may_differ_in_what_they_have():
    cells = [{"heads": 2, "seed": 0}, {"scale": None, "heads": 2, "seed": 0}, {"seed": 0}]
    found = entry(
        cells=lambda _: cells,
        measure=lambda **given: {"error": 0.1, f"of {len(given)}": "x"},
        failed=[2],
    )
    assert table(report.page([found], ABOUT), "All cells") == [
        ["heads", "scale", "status", "error", "of 2", "of 3", "seconds"],
        ["2", "", "done", "0.1", "x", "", "1.00"],
        ["2", "none", "done", "0.1", "", "x", "1.00"],
        ["", "", "failed", "", "", "", "1.00"],
    ]


def test_settings_that_look_alike_are_kept_apart():
    scales = [{"heads": 8, "scale": scale, "seed": 0} for scale in (0.5, 0.5000001)]
    found = entry(cells=lambda _: scales, measure=lambda **_: {"error": 0.1})
    assert table(report.page([found], ABOUT), "One seed each")[1:] == [["0.5", "0.1"]] * 2


def test_a_long_table_of_numbers_is_folded():
    long = entry(changes={"heads": list(range(1, 50))}, judge=refuse)
    assert "<details><summary>Numbers" in report.page([long], ABOUT)
    assert "<details open><summary>Numbers" in report.page([entry()], ABOUT)


@pytest.mark.parametrize(
    ("size", "changes", "typed"),
    [
        ("quick", {}, "--quick"),
        ("default", {}, ""),
        ("paper", {"dim": 8}, "--paper --set dim=8"),
        ("default", {"heads": [2, 4], "dim": 3}, "--set heads=2,4 --set dim=3"),
        (
            "quick",
            {"a": 0.5, "b": True, "c": None},
            "--quick --set a=0.5 --set b=true --set c=null",
        ),
        ("default", {"target": ["f_{1,1}", "a; b"]}, "--set 'target=f_{1,1},a; b'"),
        ("default", {"target": ["1", "true"]}, """--set 'target="1","true"'"""),
    ],
)
def test_command_can_be_typed(size, changes, typed):
    command = replace(entry(), size=size, changes=changes).command
    assert command == f"onelayer claims run few-heads {typed}".strip()


def test_command_is_on_the_page(monkeypatch):
    assert "claims run" not in report.page([entry()], ABOUT)  # it is not known there
    monkeypatch.setattr(claims, "known", lambda: {CLAIM.name: CLAIM})
    found = report.page([entry(changes={"heads": [4, 16]})], ABOUT)
    assert "<pre><code>onelayer claims run few-heads --quick --set heads=4,16</code></pre>" in found
    assert "Size: quick with heads = [4, 16] changed." in shown(found)


# Markdown


def test_markdown_is_a_table_of_all_claims():
    head, line, *rows = report.markdown(several()).splitlines()
    assert (head, line) == (
        "| Claim | Prediction | Measured | Verdict |",
        "| --- | --- | --- | --- |",
    )
    assert [row.rsplit(" | ", 1)[1] for row in rows] == [
        "holds |",
        "**does not hold** |",
        "undecided |",
        "undecided |",
    ]
    assert rows[1].startswith("| Zero | The error falls as heads are added. | ✗ f\\_{1,2} is ")
    assert "learned: 0.9 \\| \\*at most\\*<br>✓ there are cells: 6 |" in rows[1]


def test_markdown_keeps_text_in_its_cell():
    text = "a|b\n\nc `d` <b>e</b> [f](g) $h$ \\| ~i~"
    [row] = report.markdown([entry(title=text, prediction=text)]).splitlines()[2:]
    plain = "a\\|b c \\`d\\` \\<b>e\\</b> \\[f](g) \\$h\\$ \\\\\\| \\~i\\~"
    assert row.startswith(f"| {plain} | {plain} | ✓")


def test_markdown_without_claims_is_a_header():
    assert report.markdown([]).count("\n") == 2


# In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    if installed() is None:
        pytest.skip(f"there is no Chromium on the PATH: none of {', '.join(NAMES)}")
    with Browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def visit(browser, tmp_path):
    """A function that opens a page; in the end nothing may have been complained of or fetched."""
    pages = []

    def visit(content, **options):
        file = tmp_path / f"{len(pages)}.html"
        file.write_text(content, "utf-8")
        pages.append(browser.open(file.as_uri(), **options))
        return pages[-1]

    yield visit
    for page in pages:
        assert page.complaints() == []
        assert page.requests()
        assert [url for url in page.requests() if not url.startswith(("file:", "data:"))] == []


def titles(visited):
    return visited.evaluate(
        "[...document.querySelectorAll('.claims tbody th')].map(e => e.innerText)"
    )


def widths(visited):
    """The width of all content when everything is unfolded, and that of the screen."""
    visited.evaluate("document.querySelectorAll('details').forEach(e => e.open = true)")
    return visited.evaluate("[document.documentElement.scrollWidth, innerWidth]")


def colour(visited, selector, what="color"):
    """Red, green and blue of the first element that is selected."""
    style = f"getComputedStyle(document.querySelector('{selector}'))['{what}']"
    return [int(part) for part in re.findall(r"\d+", visited.evaluate(style))[:3]]


def contrast(one, other):
    """The contrast of two colours by the rule of WCAG 2: from 1 to 21."""

    def luminance(rgb):
        parts = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]

    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("column", "order"),
    [
        (1, ["Alpha", "Middle", "Never", "Zero"]),
        (5, ["Zero", "Alpha", "Never", "Middle"]),  # those that do not hold first
        (7, ["Never", "Alpha", "Middle", "Zero"]),
        (8, ["Never", "Alpha", "Middle", "Zero"]),  # as numbers: 0, 9.25, 9.3, 120
    ],
)
def test_table_is_sorted_by_a_click(visit, page, column, order):
    visited = visit(page)
    head = f".claims th:nth-child({column})"
    state = f"document.querySelector('{head}').getAttribute('aria-sort')"
    assert titles(visited) == ["Middle", "Zero", "Alpha", "Never"]
    assert visited.evaluate(state) is None
    visited.click(f"{head} button")
    assert (titles(visited), visited.evaluate(state)) == (order, "ascending")
    visited.click(f"{head} button")
    assert visited.evaluate(state) == "descending"
    ties = {5: ["Middle", "Alpha", "Never", "Zero"], 7: ["Middle", "Zero", "Alpha", "Never"]}
    assert titles(visited) == ties.get(column, order[::-1])


@pytest.mark.slow
def test_table_is_sorted_by_keyboard(visit, page):
    visited = visit(page)
    visited.evaluate("document.querySelector('#claims a').focus()")
    visited.evaluate("document.querySelector('.claims th:nth-child(4) button').focus()")
    visited.press("Tab", 9)
    visited.press("Enter", 13, "\r")
    assert titles(visited) == ["Zero", "Alpha", "Never", "Middle"]
    sorted_by = "[...document.querySelectorAll('[aria-sort]')].map(e => e.innerText)"
    assert visited.evaluate(sorted_by) == ["Verdict"]
    outline = visited.evaluate("getComputedStyle(document.activeElement).outline")
    assert "solid 3px" in outline


@pytest.mark.slow
def test_figures_are_seen(visit, page):
    visited = visit(page)
    sizes = visited.evaluate("[...document.images].map(i => [i.naturalWidth, i.clientWidth])")
    assert len(sizes) == 3
    assert all(natural > 0 and 500 < width < 800 for natural, width in sizes)


@pytest.mark.slow
def test_page_is_whole_without_scripts(visit, page):
    visited = visit(page, scripts=False)
    assert titles(visited) == ["Middle", "Zero", "Alpha", "Never"]
    assert visited.evaluate("[...document.images].every(i => i.naturalWidth > 0)")
    assert visited.evaluate("document.querySelectorAll('button').length") == 0  # none that is dead
    assert visited.evaluate("document.querySelectorAll('section details table').length") == 7


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 800, 1300])
def test_page_is_never_wider_than_the_screen(visit, width):
    far = dict.fromkeys((f"value {number}" for number in range(40)), 0.123456)
    wide = measuring(text="words " * 30, list=[0.123456] * 6, **far, word=LONG)
    endless = replace(entry(title=LONG, prediction=LONG, source=LONG), changes={"dim": LONG})
    visited = visit(report.page([*several(), wide, endless], {LONG: LONG}), width=width)
    assert widths(visited) == [width, width]


@pytest.mark.slow
def test_table_is_still_a_table_on_a_phone(visit, page):
    visited = visit(page, width=360)
    nodes = visited.call("Accessibility.getFullAXTree")["nodes"]
    roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
    assert (roles.count("rowheader"), roles.count("image")) == (4, 3)
    assert roles.count("columnheader") >= 8
    # Some browsers forget what a table is that is laid out as blocks, unless it is said.
    parts = ".claims, .claims :is(thead, tbody, tr, th, td)"
    assert visited.evaluate(f"document.querySelectorAll('{parts}').length") == 48
    silent = f":is({parts}):not([role])"
    assert visited.evaluate(f"document.querySelectorAll('{silent}').length") == 0


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_colours_can_be_read(visit, page, dark):
    visited = visit(page, dark=dark)
    paper = colour(visited, "html", "backgroundColor")
    assert (max(paper) < 64) == dark
    for selector in ("p", "td", ".meta", "a", "caption", ".holds", ".fails", ".undecided"):
        assert contrast(colour(visited, selector), paper) >= 4.5, selector
    # Paper is white.
    visited.call("Emulation.setEmulatedMedia", media="print")
    assert colour(visited, "html", "backgroundColor") == [255, 255, 255]


@pytest.mark.slow
@pytest.mark.parametrize("scripts", [True, False])
def test_text_from_anywhere_is_shown_as_text(visit, scripts):
    """Also where nothing would stop a script but that it is text: the policy is taken out."""
    attack = " ".join(ATTACKS)

    def fail(results, figure):
        raise ValueError(attack)

    def doubt(results):
        raise Undecided(attack)

    def measure(**_):
        return {attack: attack, "list": [attack], "matrix": [[attack]]}

    claim = Claim(
        name=attack,
        title=attack,
        source=attack,
        prediction=attack,
        rule=attack,
        sizes={"default": {"dim": 1, "seeds": 2}},
        cells=lambda _: [{attack: attack, "seed": seed} for seed in range(3)],
        measure=measure,
        judge=lambda _: [Check(attack, attack, False)],
        draw=draw,
    )
    held = entry(replace(claim, draw=lambda *_: None), "default")
    undecided = entry(replace(claim, draw=fail, judge=doubt), "default")
    broken = Result({attack: attack, "seed": 3}, {}, 0.0, "failed", attack, finished=attack)
    changed = replace(held, size=attack, changes={attack: attack}, cells=(*held.cells, broken))
    content = report.page([changed, undecided], {attack: attack})
    policy = re.compile("<meta http-equiv=[^>]*>")
    assert len(policy.findall(content)) == 1

    for unguarded in (content, policy.sub("", content)):
        visited = visit(unguarded, scripts=scripts)
        assert visited.evaluate("document.title") == report.TITLE
        found = visited.evaluate(
            "({scripts: document.scripts.length, images: document.images.length,"
            " bold: document.querySelectorAll('b, svg').length,"
            " links: [...document.links].map(e => e.getAttribute('href')),"
            " handlers: [...document.querySelectorAll('*')].flatMap(e => e.getAttributeNames())"
            ".filter(name => name.startsWith('on')), text: document.body.innerText})"
        )
        assert (found["scripts"], found["images"], found["bold"]) == (1, 1, 0)
        assert all(re.fullmatch("#[a-z0-9-]+", link) for link in found["links"])
        assert found["handlers"] == []
        assert found["text"].count(attack) >= 30


@pytest.mark.slow
def test_policy_stops_what_is_not_the_pages_own(browser, tmp_path):
    """The second line of defence: a script that did get in is not run."""
    file = tmp_path / "page.html"
    content = report.page([], ABOUT)
    bad = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"
    file.write_text(content.replace("</header>", f"{bad}</header>"), "utf-8")
    visited = browser.open(file.as_uri())
    assert visited.evaluate("document.title") == report.TITLE
    assert len(visited.complaints()) >= 2
