import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from onelayer.lab.html import Markup, document, element, joined, table, typeset

# What has a meaning in HTML, and something else.
TEXT = st.text(st.sampled_from("<>&;#'\"`/=!-[]{}_^ \n\tabé"))


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


@given(TEXT, TEXT)
def test_text_and_attributes_stay_text(text, attribute):
    found = Parsed(element("p", {"title": attribute}, text))
    assert (found.tags, found.text) == ([("p", {"title": attribute})], text)


@given(TEXT)
def test_text_between_markup_stays_text(text):
    found = Parsed(joined(element("b", None, "a"), text, typeset(text)))
    assert [tag for tag, _ in found.tags if tag not in ("sub", "sup")] == ["b"]
    assert found.text.startswith(f"a{text}")


def test_markup_goes_in_as_it_is():
    inner = element("b", None, "a & b")
    assert element("p", None, inner, " & c") == "<p><b>a &amp; b</b> &amp; c</p>"
    assert isinstance(inner, Markup)


def test_elements_without_content_have_no_end():
    assert element("img", {"src": "data:,", "alt": ""}) == '<img src="data:," alt="">'


def test_what_cannot_be_written_is_escaped():
    assert element("p", None, "a\udcff").encode("utf-8") == b"<p>a\\udcff</p>"


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


def test_tables_say_what_they_are():
    found = Parsed(table("All cells", ["heads", "error"], [["2", "0.5"], ["4", "<0.1"]]))
    assert [tag for tag, _ in found.tags].count("tr") == 3
    assert [kind for tag, kind in found.tags if tag == "th"] == [{"scope": "col"}] * 2
    assert found.text == "All cellsheadserror20.54<0.1"
    [box] = [kind for tag, kind in found.tags if tag == "div"]
    assert (box["aria-label"], box["tabindex"]) == ("All cells", "0")  # scrolls by keyboard


def test_policy_allows_the_script_and_style_of_the_page_alone():
    page = document("a title", element("p", None, "text"))
    [policy] = [kind["content"] for _, kind in Parsed(page).tags if "Content-Security" in str(kind)]
    allowed = dict(part.split(" ", 1) for part in policy.split("; "))
    for tag in ("style", "script"):
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>", page, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert allowed.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert allowed.pop("img-src") == "data:"
    assert allowed == dict.fromkeys(("default-src", "base-uri", "form-action"), "'none'")
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_page_says_its_language_and_fits_screens():
    page = document("a < b")
    assert page.startswith('<!DOCTYPE html>\n<html lang="en">')
    assert "<title>a &lt; b</title>" in page
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in page
