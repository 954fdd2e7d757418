"""What the reference says about the public API: everything is on a page, and is explained completely.

A class or function has Args, Returns or Yields, Raises, and an example.  A method may also be in the example of its
class.
"""

import ast
import importlib
import inspect
import re
import textwrap
import typing
from pathlib import Path

import pytest

from zmdp.mdp.cli.console import EXIT_CODES, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE

PAGES = Path(__file__).parents[2] / "docs" / "reference"
MODULES = [
    "zmdp", "zmdp.clients", "zmdp.interop.freelance.client", "zmdp.mdp.services", "zmdp.testing", "zmdp.spark.client",
    "zmdp.titanic", "zmdp.workers", "zmdp.interop.freelance.worker", "zmdp.workers.services",
    "zmdp.workers.services.test_client",
]  # fmt: skip
NEEDING_SPARK = ["zmdp.spark.pipeline"]
EXCEPTIONS = {
    name for name, value in vars(importlib.import_module("zmdp.mdp.errors")).items() if isinstance(value, type)
}


def public(modules):
    """Return the public classes and functions of modules by name, each once; exceptions apart, which have a page."""
    found = {}
    for name in modules:
        module = importlib.import_module(name)
        for each in getattr(module, "__all__", ["TestClient"]):
            value = getattr(module, each)
            known = value in found.values() if isinstance(value, type) or callable(value) else True
            if (inspect.isclass(value) or inspect.isfunction(value)) and not known and each not in EXCEPTIONS:
                found[f"{name}.{each}"] = value
    return found


def methods(cls):
    """Return the public methods of a class that zmdp has written, with those that it inherits."""
    return {
        name: method
        for name in dir(cls)
        if name[0] != "_"
        and inspect.isfunction(method := inspect.unwrap(getattr(cls, name)))
        and method.__module__.startswith("zmdp.")
    }


API = public(MODULES)
WITH_METHODS = {
    **API,
    **{
        f"{name}.{method}": f for name, cls in API.items() if inspect.isclass(cls) for method, f in methods(cls).items()
    },
}


def section(doc, title):
    """Return the section of a docstring, or None."""
    found = re.search(rf"^{title}:\n((?: +.*\n?|\n)+)", doc, re.MULTILINE)
    return None if found is None else found[1]


def has_example(doc):
    """Return whether there is a paragraph of code, before the sections."""
    before = re.split(r"^(?:Args|Returns|Yields|Raises):$", doc, maxsplit=1, flags=re.MULTILINE)[0]
    return re.search(r"\n\n    \S", before) is not None


def raises(function):
    """Return whether the code of a function raises an error that it creates."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    raised = (each.exc for each in ast.walk(definition) if isinstance(each, ast.Raise))
    return any(isinstance(each, ast.Call) and ast.unparse(each.func).endswith("Error") for each in raised)


def missing(name, value):
    """Return what the docstring of a class or function lacks."""
    doc = inspect.getdoc(value) or ""
    args = section(doc, "Args") or ""
    parameters = [p for p in inspect.signature(value).parameters.values() if p.name != "self"]
    lacking = [f"Args: {p.name}" for p in parameters if not explains(args, p, value)]
    if inspect.isfunction(value):
        returns = inspect.signature(value).return_annotation
        if returns is not None and not (section(doc, "Returns") or section(doc, "Yields")):
            lacking.append("Returns")
        if raises(value) and not section(doc, "Raises"):
            lacking.append("Raises")
    if re.search(r"\bRaises `", doc):
        lacking.append("Raises as a section")
    *_, last = name.rpartition(".")
    of_class = inspect.getdoc(API.get(name.rpartition(".")[0])) or ""
    if not has_example(doc) and f".{last}(" not in of_class:
        lacking.append("an example")
    return lacking


def explains(args, parameter, value):
    """Return whether the section explains a parameter, or each of the settings that it stands for."""
    if re.search(rf"^ +{parameter.name}: \S", args, re.MULTILINE):
        return True
    if parameter.kind is not parameter.VAR_KEYWORD:
        return False
    (settings,) = typing.get_args(parameter.annotation)
    return all(re.search(rf"^ +{name}: \S", args, re.MULTILINE) for name in settings.__annotations__)


@pytest.mark.parametrize("name", sorted(WITH_METHODS))
def test_everything_public_is_explained(name):
    assert missing(name, WITH_METHODS[name]) == []


def test_so_are_the_functions_that_need_spark():
    pytest.importorskip("pyspark")
    assert {name: missing(name, value) for name, value in public(NEEDING_SPARK).items() if missing(name, value)} == {}


def test_everything_public_is_on_a_page():
    shown = set(
        re.findall(r"^::: ([\w.]+)$", "".join(p.read_text() for p in (PAGES / "api").glob("*.md")), re.MULTILINE)
    )
    objects = [resolved(name) for name in shown if not name.startswith("zmdp.spark.pipeline")]
    assert [name for name, value in API.items() if value not in objects] == []
    assert {"zmdp.mdp.errors", "zmdp.spark.pipeline.call_service", "zmdp.spark.pipeline.register_function"} <= shown


def resolved(name):
    """Return the object of a dotted name."""
    parent, _, last = name.rpartition(".")
    try:
        return getattr(importlib.import_module(parent), last)
    except ModuleNotFoundError:
        return getattr(resolved(parent), last)


def test_every_exception_has_a_cause_and_a_remedy():
    page = (PAGES / "errors.md").read_text()
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL))
    assert set(sections) == EXCEPTIONS - {"ZmdpError", "RequestError"}
    for name, text in sections.items():
        assert re.search(r"^- \*\*Cause\.\*\* \S.*^- \*\*Remedy\.\*\* \S", text, re.MULTILINE | re.DOTALL), name


def test_every_exit_code_has_an_anchor():
    page = (PAGES / "errors.md").read_text()
    codes = {0, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, *EXIT_CODES.values()}
    assert {int(code) for code in re.findall(r'^\| <a id="exit-(\d+)"></a>\1 \| \S', page, re.MULTILINE)} == codes
    for error, code in EXIT_CODES.items():
        (told,) = re.findall(rf"^\| \[`{error.__name__}`\]\(#\w+\) \| [^|]+ \| (.*) \|$", page, re.MULTILINE)
        assert str(code) in told
