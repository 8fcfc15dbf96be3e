"""Docstrings of all public names: numpydoc sections, and parameters as in the signature."""

import ast
import dataclasses
import enum
import inspect
import re
import textwrap
import types

import pytest

import onelayer

SECTION = re.compile(r"^([A-Z][A-Za-z ]+)\n-+$", re.MULTILINE)


def sections(documented):
    """The sections of a docstring by name; the text before them under an empty name."""
    first, *rest = SECTION.split(inspect.getdoc(documented) or "")
    return {"": first, **dict(zip(rest[::2], rest[1::2], strict=True))}


def entries(section):
    """The names that a section of parameters or attributes describes."""
    lines = [line for line in section.splitlines() if line and not line.startswith(" ")]
    return [name.strip() for line in lines for name in line.partition(" : ")[0].split(",")]


def home(value):
    return getattr(value, "__module__", None) or ""


def public_modules():
    return [one for name in onelayer.__all__ if is_module(one := getattr(onelayer, name))]


def is_module(value):
    return isinstance(value, types.ModuleType)


def top_level():
    """Public functions and classes by name, also those of public modules."""
    found = {name: getattr(onelayer, name) for name in onelayer.__all__}
    for module in public_modules():
        names = getattr(module, "__all__", None) or [
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and home(value) == module.__name__
        ]
        short = module.__name__.rpartition(".")[2]
        found |= {f"{short}.{name}": getattr(module, name) for name in names}
    return {name: value for name, value in found.items() if callable(value)}


def methods(cls):
    """Public methods and properties, and __call__, that are written in this package."""
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if isinstance(member, classmethod | staticmethod):
            member = member.__func__
        function = member.fget if isinstance(member, property) else member
        ours = inspect.isfunction(function) and home(function).startswith("onelayer.")
        if ours and (not name.startswith("_") or name == "__call__"):
            yield name, member


TOP = top_level()
CLASSES = {name: value for name, value in TOP.items() if inspect.isclass(value)}
FUNCTIONS = {name: value for name, value in TOP.items() if inspect.isfunction(value)}
MEMBERS = {
    f"{name}.{member}": value for name, cls in CLASSES.items() for member, value in methods(cls)
}
PROPERTIES = {name: value for name, value in MEMBERS.items() if isinstance(value, property)}
CALLED = FUNCTIONS | {name: value for name, value in MEMBERS.items() if name not in PROPERTIES}


def arguments(function):
    names = list(inspect.signature(function).parameters)
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def raises(function):
    """Whether the body has a raise statement of its own."""
    body = ast.parse(textwrap.dedent(inspect.getsource(function)))
    return any(isinstance(node, ast.Raise) for node in ast.walk(body))


def test_the_walk_finds_functions_methods_and_classes():
    assert {"recover", "inputs.boolean", "theory.sample_size", "AttentionLayer.random"} <= {*CALLED}
    assert {"targets.average_power", "files.dask_arrays", "RandomFeatureMLP.fit"} <= {*CALLED}
    assert {"Recovery", "AttentionLayer", "targets.Target"} <= {*CLASSES}
    assert "AttentionLayer.heads" in PROPERTIES


@pytest.mark.parametrize("name", CALLED)
def test_a_function_has_all_sections_and_documents_its_parameters(name):
    function = CALLED[name]
    found, expected = sections(function), arguments(function)
    assert found[""].strip()
    assert entries(found.get("Parameters", "")) == expected
    if inspect.signature(function).return_annotation not in ("None", None):
        assert found.get("Returns", "").strip(), "no Returns"
    if raises(function):
        assert found.get("Raises", "").strip(), "no Raises"
    assert re.search(r">>> |^::", found.get("Examples", ""), re.MULTILINE), "no Examples"


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_documents_its_parameters_or_attributes(name):
    cls = CLASSES[name]
    found = sections(cls)
    assert found[""].strip()
    if issubclass(cls, enum.Enum):
        assert entries(found["Attributes"]) == ["value", "remedy", "good"]
        return
    assert ">>> " in found.get("Examples", ""), "no Examples"
    if "Parameters" in found:
        assert entries(found["Parameters"]) == arguments(cls.__init__)
    elif dataclasses.is_dataclass(cls):
        fields, documented = dataclasses.fields(cls), set(entries(found["Attributes"]))
        assert documented >= {field.name for field in fields if field.repr}
        assert documented <= {field.name for field in fields}


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_says_what_it_is(name):
    assert (inspect.getdoc(PROPERTIES[name]) or "").strip()


def test_summaries_are_one_line():
    long = [
        name
        for name, value in (CALLED | CLASSES).items()
        if "\n" in (inspect.getdoc(value) or "").split("\n\n")[0].strip()
    ]
    assert long == []
