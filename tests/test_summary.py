"""Results on a screen, as text and as HTML."""

from html.parser import HTMLParser

import numpy as np
import pytest

from onelayer.summary import Summary, number

TAGS = "<script>alert('&')</script>"


class Page(HTMLParser):
    """The texts of a page, tag by tag, and tags that are left open."""

    def __init__(self, text):
        super().__init__()
        self.open, self.texts = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if data.strip() and self.open[-1] != "style":
            self.texts.append((self.open[-1], data.strip()))


def rows(count):
    return [(str(i), f"{i}.5") for i in range(count)]


def test_text_has_the_title_facts_and_a_table_with_aligned_columns():
    found = Summary("Title", {"a": "one", "long": "two"}, ("head", "size"), rows(2)).text()
    assert found.split("\n") == [
        "Title",
        "  a     one",
        "  long  two",
        "",
        "  head  size",
        "     0   0.5",
        "     1   1.5",
    ]


def test_columns_of_words_are_aligned_on_the_left():
    found = Summary("T", {}, ("name", "x"), [("a", "1"), ("bcdef", "22")], frozenset({0})).text()
    assert found.split("\n")[1:] == ["  name    x", "  a       1", "  bcdef  22"]


def test_long_facts_are_wrapped_below_each_other():
    lines = Summary("T", {"advice": "word " * 40}).text().split("\n")
    assert len(lines) > 3
    assert all(len(line) <= 88 for line in lines)
    assert all(line.startswith(" " * 10 + "word") for line in lines[2:])


def test_a_long_table_is_cut_and_says_so():
    lines = Summary("T", {}, ("i", "x"), rows(100)).text().split("\n")
    assert lines[-1] == "  ... and 88 more"
    assert len(lines) == 1 + 1 + 12 + 1
    assert Summary("T", {}, ("i", "x"), rows(12)).text().split("\n")[-1] == "  11  11.5"


def test_html_has_the_same_and_escapes_every_text():
    summary = Summary(f"T {TAGS}", {f"f {TAGS}": f"v {TAGS}"}, (f"h {TAGS}",), [(f"c {TAGS}",)])
    found = summary.html()
    assert "<script" not in found
    page = Page(found)
    assert page.open == []
    assert [text for tag, text in page.texts] == [f"{one} {TAGS}" for one in "Tfvhc"]
    assert [tag for tag, text in page.texts] == ["p", "th", "td", "th", "td"]


def test_html_of_a_long_table_is_cut_and_says_so():
    texts = [text for _, text in Page(Summary("T", {}, ("i", "x"), rows(203)).html()).texts]
    assert texts[-1] == "... and 3 more"
    assert "199.5" in texts
    assert "200.5" not in texts


def test_html_without_a_table_has_none():
    assert "<table" not in Summary("T").html()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1"),
        (-0.25, "-0.25"),
        (123.456, "123"),
        (9999.0, "1e+04"),
        (1.26e-5, "1.3e-05"),
        (1e-3, "0.001"),
        (np.float64(2e7), "2.0e+07"),
        (np.inf, "inf"),
        (-np.inf, "-inf"),
        (np.nan, "nan"),
    ],
)
def test_numbers_have_few_digits(value, text):
    assert number(value) == text
