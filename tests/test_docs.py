"""The documentation: its code runs, its links lead somewhere, its reference is complete.

`pages.py` says how a page marks what is run and what is printed.
"""

import inspect
import os
import re
import sys

import pages
import pytest
import sklearn
from typer.main import get_command

import onelayer as ol
from onelayer.cli import app
from onelayer.lab.claims import known

PAGES = pages.all_pages()
EXAMPLES = {path.stem for path in (pages.ROOT / "examples").glob("*.py")}
# Blocks of python that need a GPU, a cluster, a pretrained model or large files.
NOT_RUN = {
    "docs/howto/add-a-claim.md": 1,
    "docs/howto/cluster.md": 2,
    "docs/howto/gpu.md": 1,
    "docs/howto/query-a-layer.md": 1,
    "docs/howto/recover-from-text.md": 1,
    "docs/results/scaling.md": 1,
}


def with_python():
    return [name for name, text in PAGES.items() if "```python" in text]


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """An empty folder, in which figures are not shown and options of libraries are set back."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pyplot, "show", lambda: None)
    pyplot.switch_backend("agg")
    with sklearn.config_context():
        yield tmp_path
    pyplot.close("all")


# Code


@pytest.mark.slow
@pytest.mark.parametrize("page", with_python())
def test_code_of_a_page_runs_and_prints_what_is_shown(page, workplace, capfd):
    pages.run(page, PAGES[page])
    assert capfd.readouterr().err == ""


def test_the_code_of_the_main_pages_is_run():
    assert {"README.md", "docs/install.md"} <= set(with_python())


def test_blocks_that_are_not_run_are_counted():
    found = {
        name: sum(not block.runs for block in pages.blocks(text)) for name, text in PAGES.items()
    }
    assert {name: number for name, number in found.items() if number} == NOT_RUN


@pytest.mark.parametrize("page", [name for name, text in PAGES.items() if pages.commands(text)])
def test_commands_of_a_page_exist(page):
    for arguments in pages.commands(PAGES[page]):
        parse(arguments)


def parse(arguments):
    """Parse the arguments of `onelayer` without running the command that they name."""
    command = get_command(app)
    while hasattr(command, "commands"):
        context = command.make_context("onelayer", list(arguments))
        rest = [*context._protected_args, *context.args]
        if not rest:  # of `onelayer --version`
            return
        _, command, arguments = command.resolve_command(context, rest)
    command.make_context(command.name, list(arguments))


# Links


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_to_files_and_headings(page):
    for link in pages.links(PAGES[page]):
        if not re.match(r"\w+:", link):  # https: or mailto:
            check_link(page, link)


def check_link(page, link):
    path, _, anchor = link.partition("#")
    example = re.fullmatch(r"sphx_glr_gallery_(\w+)\.py", anchor)
    if not path and example:
        assert example[1] in EXAMPLES, f"{page} links to {link}, which is no example"
        return
    target = page
    if path:
        target = os.path.normpath(os.path.join(os.path.dirname(page), path))
        assert (pages.ROOT / target).exists(), f"{page} links to {link}, which does not exist"
    if anchor:
        assert anchor in pages.anchors(PAGES[target]), f"{page} links to {link}: no such heading"


def test_figures_have_a_description():
    for name, text in PAGES.items():
        assert not re.search(r"!\[\]\(", text), f"{name} has an image without a description"
        for figure in re.findall(r"^```\{figure\}.*?^```", text, re.DOTALL | re.MULTILINE):
            assert re.search(r"^:alt: .", figure, re.MULTILINE), f"{name}: {figure}"


# Reference and gallery


def public_names():
    """Yield public names, with the members of public modules."""
    for name in ol.__all__:
        value = getattr(ol, name)
        if not inspect.ismodule(value):
            yield name
            continue
        for member, what in vars(value).items():
            public = getattr(value, "__all__", None)
            own = getattr(what, "__module__", None) == value.__name__ and callable(what)
            if member in public if public else own and not member.startswith("_"):
                yield f"{name}.{member}"


def test_every_public_name_is_in_the_reference():
    page = PAGES["docs/reference/index.md"]
    listed = re.findall(r"^   ([\w.]+)$", page, re.MULTILINE)
    listed += re.findall(r"^\.\. py:data:: onelayer\.([\w.]+)$", page, re.MULTILINE)
    assert sorted(listed) == sorted(public_names())


@pytest.fixture
def extension(monkeypatch):
    """A function that imports a module of docs/_ext."""
    monkeypatch.syspath_prepend(str(pages.DOCS / "_ext"))
    found = []

    def load(name):
        found.append(name)
        return __import__(name)

    yield load
    for name in found:
        del sys.modules[name]


def test_the_gallery_runs_what_does_not_need_a_pretrained_model(extension):
    gallery = extension("gallery_arguments")
    assert {*gallery.SHOWN_ONLY} < EXAMPLES
    assert {name.removesuffix(".py") for name in gallery.ARGUMENTS} < EXAMPLES
    for name in gallery.SHOWN_ONLY:
        source = (pages.ROOT / "examples" / f"{name}.py").read_text("utf-8")
        figure = re.search(r'^# sphinx_gallery_thumbnail_path = "(.*)"$', source, re.MULTILINE)[1]
        assert (pages.DOCS / figure).exists()


def test_the_gallery_passes_arguments_to_examples(extension):
    gallery = extension("gallery_arguments")
    folder = str(pages.ROOT / "build")
    script = {"src_file": str(pages.ROOT / "examples" / "own_claim.py")}
    assert gallery.arguments({}, script)[-2:] == ["--folder", folder]
    assert gallery.arguments({}, {"src_file": "examples/recovered_heads.py"}) == []


def test_the_page_of_the_command_line_has_every_command(extension):
    page = extension("command_line_page").page()
    headings = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    assert headings[0] == "Command line"
    found = {heading.strip("`") for heading in headings[1:]}
    commands = {"demo", "recover", "conditions", "claims", "report", "export"}
    assert {f"onelayer {command}" for command in commands} <= found
    assert {f"onelayer claims {command}" for command in ("run", "list", "show")} <= found
    assert "`-o, --output" in page
    assert not re.search(r"\w\.\.\.$", page, re.MULTILINE)  # nothing is cut off


def test_docstrings_keep_bars_and_final_underscores(extension):
    lines = ["|f|² of coef_ and snake_case, ``|a|`` and `b_`", ">>> a | b_", "c | d_", "", "|e|"]
    extension("docstrings").escape(None, "", "", None, None, lines)
    assert lines == [
        r"\|f\|² of coef\_ and snake_case, ``|a|`` and `b_`",
        ">>> a | b_",
        "c | d_",
        "",
        r"\|e\|",
    ]


def test_members_from_other_packages_are_left_out(extension):
    skip = extension("docstrings").skip_foreign
    model = ol.RandomFeatureAttention
    assert skip(None, "class", "get_params", model.get_params, False, None)
    assert skip(None, "class", "clear", dict.clear, False, None)
    assert skip(None, "class", "fromkeys", dict.fromkeys, False, None)
    assert not skip(None, "class", "fit", model.fit, False, None)
    assert skip(None, "class", "fit", model.fit, True, None)
    assert not skip(None, "class", "heads", ol.AttentionLayer.heads, False, None)


def test_formulas_are_written_as_mathml(extension):
    nodes = pytest.importorskip("docutils.nodes")
    pytest.importorskip("sphinx")
    mathml = extension("mathml").mathml
    text = mathml(nodes.math("", r"\big(\Theta_i \dots\big)"), as_block=False)
    assert text.startswith("<math")
    assert "Θ" in text
    assert "…" in text
    lines = mathml(nodes.math_block("", r"a &= b \\ c &= d"), as_block=True)
    assert lines.count("<mtr>") == 2


# The table of claims


def test_the_table_of_claims_has_every_claim():
    page = PAGES["docs/results/claims.md"]
    table = page[page.index("| Claim | Prediction | Measured | Verdict |") :]
    titles = [claim.title for claim in known().values()]
    rows = table.strip().splitlines()[2:]
    assert len(rows) == len(titles)
    for title, row in zip(titles, rows, strict=True):
        text = row.replace("\\", "").removeprefix("| ")
        assert text.startswith(title), f"{title} is not where it should be"
    assert "undecided" not in table


# How pages are read


PAGE = """# A *page* of `code`, 2nd

```python
x = 1
print(x + 1)
```

```text
2
```

```python
print(1 / x)
```

Prose.

```text
not an output
```

```{code-block} python
:class: no-run

x = missing
```

```python
>>> x
1
```

```sh
onelayer recover a.npz \\
    -o b.safetensors   # a comment
```
"""


def test_blocks_of_a_page_are_found():
    found = pages.blocks(PAGE)
    assert [(one.language, one.line, one.shown, one.runs) for one in found] == [
        ("python", 4, "2\n", True),
        ("python", 13, None, True),
        ("text", 19, None, True),
        ("python", 25, None, False),
        ("python", 29, None, True),
        ("sh", 34, None, True),
    ]
    assert found[3].code == "x = missing\n"
    assert pages.commands(PAGE) == [["recover", "a.npz", "-o", "b.safetensors"]]
    assert pages.anchors(PAGE) == {"a-page-of-code-2nd"}
    assert pages.links("[a](b.md#c) ![d](e.png)") == ["b.md#c", "e.png"]


def test_a_page_that_is_right_passes():
    pages.run("page.md", PAGE)


def test_another_output_than_shown_is_an_error():
    with pytest.raises(AssertionError, match=r"page.md, line 4 shows\n2\nbut prints\n3"):
        pages.run("page.md", PAGE.replace("x + 1", "x + 2"))
    with pytest.raises(AssertionError, match=r"Expected:\n +2\nGot:\n +1"):
        pages.run("page.md", PAGE.replace(">>> x\n1", ">>> x\n2"))


def test_errors_name_the_line_of_the_page():
    with pytest.raises(ZeroDivisionError) as error:
        pages.run("page.md", PAGE.replace("1 / x", "1 / 0"))
    assert error.traceback[-1].lineno + 1 == 13


def test_commands_that_do_not_exist_are_errors():
    parse(["recover", "a.npz", "-o", "b.safetensors"])
    parse(["--version"])
    with pytest.raises(Exception, match="No such option: --nothing"):
        parse(["recover", "a.npz", "-o", "b.safetensors", "--nothing"])
    with pytest.raises(Exception, match="No such command 'nothing'"):
        parse(["claims", "nothing"])


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("nowhere.md", "which does not exist"),
        ("install.md#nothing", "no such heading"),
        ("#sphx_glr_gallery_nothing.py", "which is no example"),
    ],
)
def test_dead_links_are_errors(link, said):
    with pytest.raises(AssertionError, match=said):
        check_link("docs/index.md", link)
