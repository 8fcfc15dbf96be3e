#!/usr/bin/env -S uv run --script
# /// script
# dependencies = ["nox>=2025.10.14"]
# ///
"""The targets of the Makefile as nox sessions, and the tests on every supported Python.

Make installs what its targets need, so that a command is the same from either tool.
"""

import nox

nox.needs_version = ">=2025.10.14"
nox.options.default_venv_backend = "none"

PYTHONS = ["3.11", "3.12", "3.13"]


def make(session: nox.Session, *arguments: str) -> None:
    session.run("make", *arguments, *session.posargs, external=True)


@nox.session(default=True)
def lint(session: nox.Session) -> None:
    """Check style, format, types and spelling."""
    make(session, "lint")


@nox.session(default=True)
def tests(session: nox.Session) -> None:
    """Run all tests."""
    make(session, "test")


@nox.session(default=False)
@nox.parametrize("version", PYTHONS)
def pythons(session: nox.Session, version: str) -> None:
    """Run all tests on a Python, in an environment of its own."""
    make(session, "test", f"PYTHON=python{version}", f"VENV=.nox/{version}")


@nox.session(name="lower-bounds", default=False)
def lower_bounds(session: nox.Session) -> None:
    """Run the quick tests with the oldest dependencies that pyproject.toml allows."""
    make(session, "lower-bounds")


@nox.session(default=False)
def docs(session: nox.Session) -> None:
    """Build the documentation."""
    make(session, "docs")


@nox.session(default=False)
def build(session: nox.Session) -> None:
    """Build the sdist and the wheel, and check them."""
    make(session, "dist")


if __name__ == "__main__":
    nox.main()
