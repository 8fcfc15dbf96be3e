"""Read pages of the documentation and run their code.

Blocks of one page run in order and share their names, like cells of a notebook:

- A block of "python" is run. If a block of "text" is next, with nothing in between, it shows what
  is printed; three dots stand for anything. Blocks may also be doctests, with >>>.
- A directive "{code-block} python" with ":class: no-run" is shown only. It is for code that needs a
  GPU, a cluster or a pretrained model, and `test_docs.py` counts these blocks.
- Blocks of "sh" and "console" are not run, but the `onelayer` commands in them must exist.
"""

import contextlib
import doctest
import io
import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
GENERATED = ("gallery", "reference/generated")  # by the build, from what has its own tests
DIRECTIVE = "{code-block} "
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MARKDOWN = MarkdownIt().enable("table")


@dataclass(frozen=True)
class Block:
    """A block of code, the line of the page where its code starts, and what it should print."""

    language: str
    code: str
    line: int = 1
    shown: str | None = None
    runs: bool = True


def all_pages():
    """Return the pages of the documentation and those in the root, by path from the root."""
    inner = [
        page
        for page in DOCS.rglob("*.md")
        if not page.relative_to(DOCS).as_posix().startswith(GENERATED)
    ]
    found = [*ROOT.glob("*.md"), *inner]
    return {page.relative_to(ROOT).as_posix(): page.read_text("utf-8") for page in sorted(found)}


def blocks(text):
    """Return the blocks of code on a page."""
    found = []
    tokens = MARKDOWN.parse(text)
    for before, token in pairwise([None, *tokens]):
        if token.type != "fence":
            continue
        is_output = token.info == "text" and before is not None and before.type == "fence"
        if is_output and found and found[-1].language == "python" and found[-1].runs:
            found[-1] = Block(**{**vars(found[-1]), "shown": token.content})
        else:
            found.append(block(token.info.strip(), token.content, token.map[0] + 2))
    return found


def block(info, content, line):
    """Return a block, without the options of the directive if it is one."""
    if not info.startswith(DIRECTIVE):
        return Block(info, content, line)
    options = re.match(r"(:[\w-]+:.*\n)*\n?", content)[0]
    code, line = content[len(options) :], line + options.count("\n")
    return Block(info.removeprefix(DIRECTIVE), code, line, runs=":class: no-run" not in options)


def run(page, text):
    """Run the python blocks of a page, and compare what they print with what is shown."""
    names = {"__name__": "__main__"}
    for one in blocks(text):
        if one.language == "python" and one.runs:
            run_block(one, names, page)


def run_block(one, names, page):
    place = f"{page}, line {one.line}"
    if one.code.startswith(">>> "):
        check_doctest(one, names, place)
        return
    printed = io.StringIO()
    # Empty lines above the code, so that errors name lines of the page.
    code = compile("\n" * (one.line - 1) + one.code, page, "exec")
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    if one.shown is not None:
        matches = doctest.OutputChecker().check_output(one.shown, printed.getvalue(), FLAGS)
        assert matches, f"{place} shows\n{one.shown}but prints\n{printed.getvalue()}"


def check_doctest(one, names, place):
    test = doctest.DocTestParser().get_doctest(one.code, names, place, place, 0)
    said = io.StringIO()
    doctest.DocTestRunner(optionflags=FLAGS).run(test, out=said.write, clear_globs=False)
    assert not said.getvalue(), said.getvalue()
    names.update(test.globs)


def commands(text):
    """Return the arguments of every call of `onelayer` in blocks of shell commands."""
    found = []
    for one in blocks(text):
        if one.language in ("", "sh", "bash", "console"):
            for line in one.code.replace("\\\n", " ").splitlines():
                words = shlex.split(line.removeprefix("$ "), comments=True)
                if words[:1] == ["onelayer"]:
                    found.append(words[1:])
    return found


def links(text):
    """Return the targets of all links and images of a page."""
    inline = (token.children for token in MARKDOWN.parse(text) if token.type == "inline")
    found = [token.attrs for tokens in inline for token in tokens]
    return [one[key] for one in found for key in ("href", "src") if key in one]


def anchors(text):
    """Return the anchors of the headings of a page, as GitHub and the documentation form them."""
    tokens = MARKDOWN.parse(text)
    titles = [
        "".join(part.content for part in inline.children)
        for token, inline in pairwise(tokens)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
