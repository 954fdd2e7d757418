"""The walks in ARCHITECTURE.md: every step names a function that exists, and that an earlier step calls.

A walk is a numbered list below a comment `<!-- walk: NAME -->`.  Each step begins with a file and a function:

    1. `titanic/api/client.py` `AsyncTitanic.submit` encodes the body.
    2. `titanic/api/steps.py` `Conversation.submit` calls Titanic.
    3. `titanic/server/accept.py` `Submissions.request`, through `titanic.request`, checks it.

The function must be mentioned by that of an earlier step, or by a function of the same file that this one mentions, and
so on.  Where a message or an event lies between, the function is followed by ", through" and a text that both files
contain.
"""

import ast
import re
from functools import cache
from typing import NamedTuple

import pytest
from imports import ROOT

MAX_STEPS = 12
WALK = re.compile(r"<!-- walk: (.+) -->\n\n?((?:.+\n)+)")
STEP = re.compile(r"`(?P<file>[^`]+\.py)`\s+`(?P<function>[\w.]+)`(?:,\s+through\s+`(?P<through>[^`]+)`)?")


class Step(NamedTuple):
    """A step of a walk."""

    file: str
    function: str
    through: str | None = None


def walks(text):
    """Return the steps of each walk in a page, by name."""
    found = {}
    for name, items in WALK.findall(text):
        steps = [STEP.match(item) for item in re.split(r"^\d+\. ", items, flags=re.MULTILINE)[1:]]
        assert all(steps), f"{name}: a step must begin with a file and a function"
        found[name] = [Step(**step.groupdict()) for step in steps]
    return found


@cache
def functions(file):
    """Return the names that each function of a file mentions, by its name with and without that of its class."""
    found = {}

    def enter(node, prefix=""):
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.ClassDef):
                enter(each, f"{each.name}.")
            elif isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
                names = {inner.id for inner in ast.walk(each) if isinstance(inner, ast.Name)}
                names |= {inner.attr for inner in ast.walk(each) if isinstance(inner, ast.Attribute)}
                for name in {each.name, prefix + each.name}:
                    found[name] = found.get(name, set()) | names

    enter(ast.parse((ROOT / file).read_text()))
    return found


def mentioned(step):
    """Return the names that the function of a step mentions, also through other functions of its file."""
    known = functions(step.file)
    found, new = set(), {step.function}
    while new:
        names = set().union(*(known.get(name, ()) for name in new))
        new = names - found
        found |= names
    return found


def problem(before, step):
    """Return what is wrong with a step, if anything is, after those `before` it."""
    if step.function not in functions(step.file):
        return f"{step.file} has no {step.function}"
    if step.through is not None:
        files = {each.file for each in before if step.through in (ROOT / each.file).read_text()}
        if not files or step.through not in (ROOT / step.file).read_text():
            return f"{step.function} is not reached through {step.through}"
    elif before and not any(step.function.rpartition(".")[2] in mentioned(each) for each in before):
        return f"no earlier step calls {step.function}"
    return None


WALKS = walks((ROOT / "ARCHITECTURE.md").read_text())


@pytest.mark.parametrize("name", WALKS)
def test_a_walk_goes_from_function_to_function(name):
    steps = WALKS[name]
    assert len(steps) <= MAX_STEPS
    assert [found for at, step in enumerate(steps) if (found := problem(steps[:at], step))] == []


def test_a_walk_with_a_gap_is_noticed():
    first, second, *_, last = WALKS["a durable request"]
    assert problem([first], second) is None
    assert problem([first], last) == f"no earlier step calls {last.function}"
    assert problem([], first._replace(function="Titanic.nothing")) == f"{first.file} has no Titanic.nothing"
    assert problem([first], second._replace(through="pigeons")) == f"{second.function} is not reached through pigeons"
