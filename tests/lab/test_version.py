import textwrap

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
from onelayer.lab import learning
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
    return [Check("small", "", learning.reached(RULE) < 1)]
'''


@pytest.fixture
def digest(tmp_path):
    """The code version of `measure` in a text."""
    made = iter(range(100))

    def digest(source):
        file = tmp_path / f"claim{next(made)}.py"
        file.write_text(source)
        version._tree.cache_clear()
        return version._digest(list(version._reached(file, "measure")))

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
        ("What is measured.", "A number."),
        ("a comment", "another"),
        ("x: int", "x: float"),
        ("-> Measured", "-> dict"),
        ("LEVEL = 3\n", "LEVEL = 3\nOTHER = 5\n"),
    ],
)
def test_rules_figures_and_prose_do_not_change_the_version(digest, old, new):
    assert old in SOURCE
    assert digest(SOURCE) == digest(SOURCE.replace(old, new))


def test_files_of_the_lab_count_with_what_they_import(digest, monkeypatch):
    source = SOURCE.replace("helper(x) +", "learning.reached(x) +")
    before = digest(source)
    original = version._plain

    def changed(path):
        return [*original(path), "more"] if path.name == "seeds.py" else original(path)

    assert digest(source) == before
    monkeypatch.setattr(version, "_plain", changed)  # learning.py imports it
    assert digest(source) != before


def test_the_numerics_count(monkeypatch):
    measure = known()["expressivity"].measure
    before = code_version(measure)
    assert before == code_version(measure)
    monkeypatch.setattr(version, "_numerics", lambda: "another")
    assert code_version(measure) != before


def test_lab_and_command_line_are_no_numerics(monkeypatch):
    seen = []
    monkeypatch.setattr(version, "_plain", lambda path: seen.append(path.as_posix()) or [])
    version._numerics.__wrapped__()
    assert any(path.endswith("onelayer/layer.py") for path in seen)
    assert any(path.endswith("gauss_newton/levenberg_marquardt.py") for path in seen)
    assert not [path for path in seen if "onelayer/lab/" in path or "onelayer/cli/" in path]


def test_constants_behind_helpers_count():
    assert code_version(lab_fakes.double) != code_version(lab_fakes.falter)


def test_a_function_without_a_file_is_refused():
    space = {}
    exec(textwrap.dedent("def measure(): return {}"), space)
    with pytest.raises(ValueError, match="has no source file, expected a function of a module"):
        code_version(space["measure"])
