"""The distributions, and what several files say about versions and commands."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
PROJECT = PYPROJECT["project"]


def text_of(name):
    """The text of a file of the checkout, some of which an sdist does not have."""
    if name.startswith(".") and (ROOT / "PKG-INFO").exists():
        pytest.skip("not in the sdist")
    return (ROOT / name).read_text("utf-8")


def run(*command, **options):
    result = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# The sdist and the wheel


@dataclass
class Distributions:
    sdist: set[str]  # files, relative to the root of the project
    wheel: set[str]
    metadata: Message
    installed: Path  # a folder with the files of the wheel


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """An sdist built from a copy of the sources, and a wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("distributions")
    sources = folder / "sources"
    for name in files_of_the_project():
        target = sources / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, sources)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        sdist = {
            str(PurePosixPath(*PurePosixPath(member.name).parts[1:]))
            for member in tar
            if member.isfile()
        }
    (archive,) = folder.glob("*.whl")
    with zipfile.ZipFile(archive) as wheel:
        names = set(wheel.namelist())
        wheel.extractall(folder / "installed")
    (name,) = (name for name in names if name.endswith(".dist-info/METADATA"))
    metadata = Parser().parsestr((folder / "installed" / name).read_text("utf-8"))
    return Distributions(sdist, names, metadata, folder / "installed")


def files_of_the_project():
    """All files that git tracks or would add: without git, there is nothing to compare with."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.slow
def test_sdist_has_all_files_that_a_packager_needs(distributions):
    tracked = {name for name in files_of_the_project() if not name.startswith(".")}
    made = {"PKG-INFO", "setup.cfg"}
    found = {name for name in distributions.sdist if ".egg-info/" not in name}
    assert found == tracked | made
    assert "tests/test_packaging.py" in found
    assert "docs/architecture.md" in found


@pytest.mark.slow
def test_wheel_has_all_files_of_the_package_and_no_other(distributions):
    package = {
        name.removeprefix("src/")
        for name in distributions.sdist
        if name.startswith("src/onelayer/")
    }
    assert {name for name in distributions.wheel if ".dist-info/" not in name} == package
    assert "onelayer/py.typed" in package
    assert {PurePosixPath(name).suffix for name in package} >= {".py", ".css", ".js", ".j2"}


@pytest.mark.slow
def test_metadata_names_the_version_the_license_and_what_is_required(distributions):
    metadata = distributions.metadata
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert set(metadata.get_all("Provides-Extra")) == {"all", "cluster", "plot", "table", "torch"}
    required = {Requirement(text) for text in metadata.get_all("Requires-Dist")}
    assert {need for need in required if need.marker is None} == {
        Requirement(text) for text in PROJECT["dependencies"]
    }


@pytest.mark.slow
def test_wheel_runs_away_from_the_checkout(distributions, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(distributions.installed)}
    code = "import onelayer; print(onelayer.__file__, onelayer.__version__)"
    file, version = run(sys.executable, "-c", code, cwd=tmp_path, env=environment).split()
    assert Path(file).is_relative_to(distributions.installed)
    assert version == PROJECT["version"]
    claims = run(
        sys.executable, "-m", "onelayer.cli", "claims", "list", cwd=tmp_path, env=environment
    )
    assert "six-phases" in claims


# Versions


def requirements(*, groups):
    """Direct dependencies by canonical name, of all extras and of some dependency groups."""
    listed = list(PROJECT["dependencies"])
    for extra in PROJECT["optional-dependencies"].values():
        listed += extra
    for group in groups:
        listed += members(group)
    needs = [Requirement(text) for text in listed]
    return {canonicalize_name(need.name): need for need in needs if need.name != "onelayer"}


def members(group):
    for entry in PYPROJECT["dependency-groups"][group]:
        if isinstance(entry, str):
            yield entry
        else:
            yield from members(entry["include-group"])


def pins(name):
    lines = text_of(name).splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def test_every_dependency_is_pinned_to_a_version_it_allows():
    pinned = pins("constraints.txt")
    for name, need in requirements(groups=["dev", "docs", "models", "release"]).items():
        assert name in pinned, f"constraints.txt does not pin {name}"
        assert need.specifier.contains(pinned[name]), f"constraints.txt pins {name} below {need}"


def test_lower_bounds_are_the_oldest_versions_that_the_project_allows():
    pinned = pins("constraints-lower-bounds.txt")
    for name, need in requirements(groups=["dev"]).items():
        (bound,) = need.specifier
        assert bound.operator == ">="
        assert pinned[name] == Version(bound.version), f"{need} is tested as {pinned[name]}"


def test_changelog_and_citation_have_the_version_of_the_project():
    changelog = text_of("CHANGELOG.md")
    version, date = re.search(r"^## \[(\d\S*)\] - (\S+)$", changelog, re.MULTILINE).groups()
    assert version == PROJECT["version"]
    citation = text_of("CITATION.cff")
    assert f"\nversion: {version}\n" in citation
    assert f"\ndate-released: {date}\n" in citation


def test_hooks_use_the_versions_of_the_checks():
    hooks = text_of(".pre-commit-config.yaml")
    pinned = pins("constraints.txt")
    revisions = dict(re.findall(r"repo: \S+/(\S+)\n +rev: v?(\S+)", hooks))
    assert Version(revisions["ruff-pre-commit"]) == pinned["ruff"]
    assert Version(revisions["mirrors-mypy"]) == pinned["mypy"]
    assert Version(revisions["codespell"]) == pinned["codespell"]
    read_by_mypy = re.findall(r"- ([a-z0-9-]+)==(\S+)", hooks)
    assert {"numpy", "typer"} <= {name for name, _ in read_by_mypy}
    for name, version in read_by_mypy:
        assert Version(version) == pinned[canonicalize_name(name)], name


# Commands

MENTIONS = {  # files, and what comes before a target in them
    ".ci/run": r"^make ",
    ".github/workflows/ci.yml": r"run: make ",
    ".readthedocs.yaml": r"- make ",
    "CONTRIBUTING.md": r"`make ",
    "noxfile.py": r'make\(session, "',
}


@pytest.mark.parametrize("name", MENTIONS)
def test_targets_that_files_mention_are_in_the_makefile(name):
    makefile = text_of("Makefile")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    targets |= {f".venv/{name}" for name in re.findall(r"^\$\(VENV\)/(\w+):", makefile, re.M)}
    mentioned = re.findall(MENTIONS[name] + r"([a-z./-]+)", text_of(name), re.M)
    assert mentioned
    assert set(mentioned) <= targets


def test_the_same_pythons_are_tested_and_announced():
    announced = [
        text.removeprefix("Programming Language :: Python :: ")
        for text in PROJECT["classifiers"]
        if re.search(r":: 3\.\d+$", text)
    ]
    assert PROJECT["requires-python"] == f">={announced[0]}"
    quoted = ", ".join(f'"{version}"' for version in announced)
    assert f"PYTHONS = [{quoted}]" in text_of("noxfile.py")
    assert f"python: [{quoted}]" in text_of(".github/workflows/ci.yml")
