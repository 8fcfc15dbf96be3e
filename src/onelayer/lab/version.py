"""The version of the code behind a cell: a digest of the sources that its value can depend on.

These are the files of the package, except the command line, what shows results, the machinery of
the lab and other claims; and, of the file with a claim's `measure`, the statements that `measure`
reaches by name. Cells are therefore measured again after an edit of a shared file, even of a
comment, but not after an edit of a rule, a figure, a size or another claim. Versions of other
libraries do not count.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import onelayer

_PACKAGE = Path(onelayer.__file__).parent
# Modules of the lab that cannot change the value of a cell. A new module counts unless it is here.
_MACHINERY = (
    "claim", "condition_margins", "export", "figures", "grids", "outcomes", "pools", "rules", "run",
    "store", "values", "version",
)  # fmt: skip
_SHOWING = (
    "layer_plot.py",
    "plotting.py",
    "spelling.py",
    "summary.py",
)  # results and errors, to people
_LEFT_OUT = ("cli/", "lab/report/", *_SHOWING, *(f"lab/{name}.py" for name in _MACHINERY))
_PARSING = Lock()  # CPython 3.11 may fail to parse in several threads at once


def code_version(measure: Callable[..., Any]) -> str:
    """Return twelve hexadecimal digits that are the same for the same code."""
    source = inspect.getsourcefile(measure)
    if source is None or not Path(source).is_file():
        raise ValueError(f"{measure!r} has no source file, expected a function of a module")
    with _PARSING:
        return _digest([_package_digest(), *_reached(Path(source), measure.__name__)])


@cache
def _package_digest() -> str:
    """Digest of all files that may matter to any claim."""
    names = sorted(file.relative_to(_PACKAGE).as_posix() for file in _PACKAGE.rglob("*.py"))
    shared = [name for name in names if _is_shared(name)]
    return _digest(f"{name} {(_PACKAGE / name).read_text('utf-8')}" for name in shared)


def _is_shared(name: str) -> bool:
    """Whether a file is part of the version of every claim."""
    folder, _, file = name.rpartition("/")
    is_claim = folder == "lab/claims" and not file.startswith("_")
    return not is_claim and not name.startswith(_LEFT_OUT)


def _reached(path: Path, name: str) -> Iterator[str]:
    """The top-level statements of a file that a definition in it depends on."""
    statements: dict[str, list[ast.stmt]] = {}
    for statement in ast.parse(path.read_text("utf-8")).body:
        nodes = [statement]  # imports are split, so that names that are not used do not count
        if isinstance(statement, ast.ImportFrom):
            module, level = statement.module, statement.level
            nodes = [ast.ImportFrom(module, [imported], level) for imported in statement.names]
        elif isinstance(statement, ast.Import):
            nodes = [ast.Import([imported]) for imported in statement.names]
        for node in nodes:
            for bound in _bound_names(node):
                statements.setdefault(bound, []).append(node)
    waiting, seen = [name], {name}
    while waiting:
        for node in statements.get(waiting.pop(), []):
            yield ast.unparse(node)
            used = _names([node]) - seen
            waiting += sorted(used)
            seen |= used


def _bound_names(node: ast.stmt) -> set[str]:
    """The names that a statement defines or, where that is not evident, all that it mentions."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return _names(node.targets)
    return _names([node.target] if isinstance(node, ast.AnnAssign) else [node])


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    parts = [part for node in nodes for part in ast.walk(node)]
    imported = [part for part in parts if isinstance(part, ast.alias)]
    return {part.id for part in parts if isinstance(part, ast.Name)} | {
        name.asname or name.name.partition(".")[0] for name in imported
    }


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
