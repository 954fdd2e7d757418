"""The states of a worker's connection are those that the documentation of `states.py` shows."""

import ast
import re
from pathlib import Path

import pytest

from zmdp.mdp.errors import SettingError
from zmdp.workers.session import states
from zmdp.workers.session.states import TRANSITIONS, SessionSettings, SessionState

pytestmark = pytest.mark.unit


def documented() -> dict[str, dict[str, str]]:
    """The table in the docstring: what follows in each state, by what happens."""
    assert states.__doc__ is not None
    lines = states.__doc__.splitlines()
    (start,) = [at for at, line in enumerate(lines) if re.fullmatch(r"(\s+[a-z]+){4}", line)]
    columns = [(match.group(), match.start()) for match in re.finditer(r"[a-z]+", lines[start])]
    table = {}
    for line in lines[start + 1 : start + 1 + len(SessionState)]:
        fields = {at: name for name, at in ((match.group(), match.start()) for match in re.finditer(r"[A-Z]+", line))}
        (state, *_) = fields.values()
        table[state] = {trigger: fields[at] for trigger, at in columns if at in fields}
    return table


def test_the_table_in_the_documentation() -> None:
    assert documented() == {
        state.name: {trigger: then.name for trigger, then in row.items()} for state, row in TRANSITIONS.items()
    }


def test_each_state_is_explained() -> None:
    assert re.findall(r"^    ([A-Z]+)   .*\.$", states.__doc__ or "", re.MULTILINE) == [
        each.name for each in SessionState
    ]


def test_the_connection_only_ends_by_its_end() -> None:
    for before, row in TRANSITIONS.items():
        for trigger, after in row.items():
            if before.connected != after.connected:
                assert trigger == ("connect" if after.connected else "end")
            assert after.leaving >= before.leaving  # it is left for good


def test_the_state_changes_in_one_place() -> None:
    """Everywhere else, the session gives the reason (a trigger), and the table decides."""
    source = (Path(__file__).parents[3] / "workers" / "session" / "session.py").read_text()  # also if it is compiled
    changing = {
        function.name
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if ast.unparse(target) == "self.state"
    }
    assert changing == {"__init__", "_change"}


def test_a_handlers_time_is_above_0():
    assert SessionSettings(handler_timeout=0.5).handler_timeout == 0.5
    with pytest.raises(SettingError, match="handler_timeout is 0: it must be a number of seconds above 0, or None"):
        SessionSettings(handler_timeout=0)
