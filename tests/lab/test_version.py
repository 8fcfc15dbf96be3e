import ast
import inspect
import textwrap
from pathlib import Path

import lab_fakes
import pytest

from onelayer.lab import version
from onelayer.lab.claims import known
from onelayer.lab.version import code_version

SOURCE = '''
"""A claim."""
import math as numbers
from math import sin as wave
from onelayer.lab.seeds import generator
from onelayer.lab import learning_setup
from onelayer.lab.claim import Check, Measured

LEVEL = 3
RULE = 0.1
TABLE = {}
TABLE.update(x=1)


def helper(x):
    return x * LEVEL + TABLE["x"] + wave(x) + numbers.pi


def measure(x: int, seed: int) -> Measured:
    """What is measured."""
    return {"value": helper(x) + generator(seed, "noise").random()}  # a comment


def judge(results):
    return [Check("small", "", learning_setup.sizes_up_to(RULE) < 1)]
'''


@pytest.fixture
def digest(tmp_path):
    """The code version of `measure` in a text."""
    made = iter(range(100))

    def digest(source):
        file = tmp_path / f"claim{next(made)}.py"
        file.write_text(source)
        return version._digest(version._reached(file, "measure"))

    return digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("LEVEL = 3", "LEVEL = 4"),
        ("x * LEVEL +", "x + LEVEL +"),
        ('"noise"', '"inputs"'),
        ("def helper(x):", "def helper(x, y=0):"),
        ("from onelayer.lab.seeds import generator", "from numpy.random import generator"),
        ("LEVEL = 3", "LEVEL = 3\nLEVEL += 1"),
        ("TABLE.update(x=1)", "TABLE.update(x=2)"),
        ("import sin as wave", "import cos as wave"),
        ("import math as numbers", "import cmath as numbers"),
    ],
)
def test_what_changes_a_value_changes_the_version(digest, old, new):
    assert old in SOURCE
    assert digest(SOURCE) != digest(SOURCE.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("RULE = 0.1", "RULE = 0.2"),
        ('"small"', '"tiny"'),
        ("import Check, Measured", "import Check, Measured, grid"),
        ("import math as numbers", "import math as numbers, os"),
        ("a comment", "another"),
        ("LEVEL = 3\n", "LEVEL = 3\nOTHER = 5\n"),
    ],
)
def test_rules_figures_and_comments_do_not_change_the_version(digest, old, new):
    assert old in SOURCE
    assert digest(SOURCE) == digest(SOURCE.replace(old, new))


def test_the_shared_files_count(monkeypatch):
    measure = known()["expressivity"].measure
    before = code_version(measure)
    assert before == code_version(measure)
    monkeypatch.setattr(version, "_package_digest", lambda: "another")
    assert code_version(measure) != before


def test_a_change_of_a_shared_file_changes_the_digest(tmp_path, monkeypatch):
    def digest():
        return version._package_digest.__wrapped__()

    monkeypatch.setattr(version, "_PACKAGE", tmp_path)
    (tmp_path / "lab" / "claims").mkdir(parents=True)
    shared, claim = tmp_path / "lab" / "seeds.py", tmp_path / "lab" / "claims" / "noise.py"
    shared.write_text("SEED = 1")
    claim.write_text("LEVEL = 1")
    before = digest()
    claim.write_text("LEVEL = 2")
    assert digest() == before
    shared.write_text("SEED = 2")
    assert digest() != before


def test_helpers_are_shared_but_claims_and_machinery_are_not():
    shared = ["layer.py", "recovery/api.py", "lab/seeds.py", "lab/new.py", "lab/claims/_more.py"]
    others = ["cli/lab.py", "lab/report/__init__.py", "lab/claims/noise.py", "lab/store.py"]
    assert all(map(version._is_shared, shared))
    assert not any(map(version._is_shared, others))
    for name in others:
        assert (version._PACKAGE / name).is_file()
    assert all((version._PACKAGE / f"lab/{name}.py").is_file() for name in version._MACHINERY)


@pytest.mark.parametrize("name", known())
def test_no_measurement_uses_the_machinery(name):
    """The modules that are left out of a version, but for the types in `claim`."""
    measure = known()[name].measure
    file = Path(inspect.getsourcefile(measure))
    nodes = [ast.parse(text).body[0] for text in version._reached(file, measure.__name__)]
    imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    used = version._names(node for node in nodes if node not in imports)
    modules = {
        f"{getattr(node, 'module', '')}.{alias.name}"
        for node in imports
        for alias in node.names
        if (alias.asname or alias.name) in used
    }
    machinery = [f"onelayer.lab.{part}" for part in version._MACHINERY if part != "claim"]
    assert not [module for module in modules if module.startswith(tuple(machinery))]


def test_constants_behind_helpers_count():
    assert code_version(lab_fakes.double) != code_version(lab_fakes.falter)


def test_a_function_without_a_file_is_refused():
    space = {}
    exec(textwrap.dedent("def measure(): return {}"), space)
    with pytest.raises(ValueError, match="has no source file, expected a function of a module"):
        code_version(space["measure"])
