"""Write formulas as MathML, which browsers show without a script from another site."""

import re

from docutils import nodes
from docutils.utils.math import pick_math_environment
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.errors import SphinxError
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
# Commands that docutils knows under another name.
SYNONYMS = ((r"\\dots\b", r"\\ldots"), (r"\\([bB]igg?)(?![a-zA-Z])", r"\\\1l"))


def mathml(node: nodes.Element, *, as_block: bool) -> str:
    """Convert the formula of a node, or warn about what cannot be converted."""
    tex = node.astext()
    for command, known in SYNONYMS:
        tex = re.sub(command, known, tex)
    if as_block and pick_math_environment(tex) == "align*":
        tex = rf"\begin{{aligned}}{tex}\end{{aligned}}"
    try:
        return tex2mathml(tex, as_block=as_block)
    except Exception as error:  # of kinds that differ between versions of docutils
        LOGGER.warning("formula %r cannot be written as MathML: %s", tex, error, location=node)
        return f"<code>{tex}</code>"


def visit_inline(translator: nodes.NodeVisitor, node: nodes.math) -> None:
    translator.body.append(mathml(node, as_block=False))
    raise nodes.SkipNode


def visit_block(translator: nodes.NodeVisitor, node: nodes.math_block) -> None:
    translator.body.append(translator.starttag(node, "div", CLASS="math", tabindex="0"))
    if node["number"]:
        translator.body.append(f'<span class="eqno">({node["number"]})</span>')
    translator.body.append(mathml(node, as_block=True) + "</div>\n")
    raise nodes.SkipNode


def depart(*_: object) -> None:
    raise SphinxError("a formula is written when it is visited")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (visit_inline, depart), (visit_block, depart))
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
