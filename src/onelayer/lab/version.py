"""The version of the code behind a cell: a digest of everything its value can depend on.

That is the numerics of the package, what the claim's `measure` reaches in its own file, and the
files of the lab that this in turn imports. Rules, figures, comments, docstrings and annotations are
no part of it, so that a better figure does not cost a new measurement. It is the package's own code
alone: a new version of numpy is no new version of it. (Another version of Python may be, where it
reads the same code differently.)
"""

from __future__ import annotations

import ast
import hashlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import onelayer

_LAB = "onelayer.lab"
_PARSING = Lock()  # Python 3.11 counts the depth of all threads' syntax trees together, and fails
_PACKAGE = Path(onelayer.__file__).parent


def code_version(measure: Callable[..., Any]) -> str:
    """Twelve hexadecimal digits; the same for the same code."""
    source = inspect.getsourcefile(measure)
    if source is None or not Path(source).is_file():
        raise ValueError(f"{measure!r} has no source file, expected a function of a module")
    with _PARSING:
        return _digest([_numerics(), *_reached(Path(source), measure.__name__)])


@cache
def _numerics() -> str:
    """A digest of the package but for the lab and the command line."""
    files = {f.relative_to(_PACKAGE).as_posix(): f for f in sorted(_PACKAGE.rglob("*.py"))}
    counted = {name: f for name, f in files.items() if not name.startswith(("cli/", "lab/"))}
    return _digest([f"{name} {_digest(_plain(file))}" for name, file in counted.items()])


def _reached(path: Path, name: str) -> Iterator[str]:
    """What a definition reaches: others of its file, and whole files of the lab it imports from."""
    definitions, imported = _definitions(path), _imported(path)
    waiting, seen = [name], {name}
    files: set[Path] = set()
    while waiting:
        found = waiting.pop()
        if found in imported:
            yield imported[found].statement
            files |= _with_imports(imported[found].file)
        for node in definitions.get(found, []):
            yield ast.dump(node)
            used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
            waiting += sorted(used - seen)
            seen |= used
    for file in sorted(files):
        yield from _plain(file)


def _definitions(path: Path) -> dict[str, list[ast.stmt]]:
    """The statements of a file that may give a name its value, by the name."""
    found: dict[str, list[ast.stmt]] = {}
    for node in _tree(path).body:
        for name in _given(node):
            found.setdefault(name, []).append(node)
    return found


def _given(node: ast.stmt) -> set[str]:
    """The names that a statement defines or, where that is not plain to see, mentions."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    parts: list[ast.AST] = [node]
    if isinstance(node, ast.Assign):
        parts = [*node.targets]
    elif isinstance(node, ast.AnnAssign):
        parts = [node.target]
    return {n.id for part in parts for n in ast.walk(part) if isinstance(n, ast.Name)}


@dataclass(frozen=True)
class _Import:
    """Where a name comes from, in words and, if it is of the lab, as a file."""

    statement: str
    file: Path | None


def _imported(path: Path) -> dict[str, _Import]:
    """The names that a file imports."""
    found = {}
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            for name in node.names:
                bound = name.asname or name.name.partition(".")[0]
                found[bound] = _Import(f"import {name.name} as {bound}", _file(name.name))
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                file = _file(f"{node.module}.{name.name}") or _file(str(node.module))
                bound = name.asname or name.name
                found[bound] = _Import(f"from {node.module} import {name.name} as {bound}", file)
    return found


def _with_imports(path: Path | None) -> set[Path]:
    """A file of the lab with all files of the lab that it needs."""
    found: set[Path] = set()
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file is not None and file not in found:
            found.add(file)
            waiting += [name.file for name in _imported(file).values()]
    return found


def _file(module: str) -> Path | None:
    """The file of a module of the lab; what else there is in the package counts in any case."""
    if not module.startswith(_LAB):
        return None
    path = _PACKAGE.joinpath(*module.split(".")[1:]).with_suffix(".py")
    return path if path.is_file() else None


def _plain(path: Path) -> list[str]:
    """The statements of a file as text that changes only if what they do may change."""
    return [ast.dump(node) for node in _tree(path).body]


@cache
def _tree(path: Path) -> ast.Module:
    return _Bare().visit(ast.parse(path.read_text("utf-8")))  # type: ignore[no-any-return]


class _Bare(ast.NodeTransformer):
    """Takes docstrings and annotations out: neither changes a value."""

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return ast.Pass() if text else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        node.returns = None
        return self.generic_visit(node)  # type: ignore[return-value]

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt:
        node.annotation = ast.Constant(None)
        return node


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
