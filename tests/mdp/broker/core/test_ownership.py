"""Each field of a record is assigned in one file beside that of the records, so it is known who keeps it right."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

from zmdp.mdp.broker.core import records
from zmdp.mdp.broker.federation import link

BROKER = Path(__file__).parents[4] / "mdp" / "broker"  # where compiled modules have their sources too
RECORDS = {
    "attempt": records.Attempt, "client": records.Client, "collected": records.Collected, "link": link.Link,
    "remote": records.Remote, "request": records.Request, "service": records.Service, "way": records.Way,
    "worker": records.Worker,
}  # fmt: skip
"""By the names of variables; an attribute has the name of its class too."""


def assigned(path):
    """Yield the record's name and the field for each assignment to a field of a record in a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if not isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
            continue
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(each, ast.Attribute) and (record := name_of(each.value)) in RECORDS:
                    yield record, each.attr


def name_of(node):
    """Return the last name of an expression such as `attempt.request`, or None."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else None


def owners():
    found = defaultdict(set)
    for path in BROKER.rglob("*.py"):
        if path.name not in {"records.py", "link.py"}:
            for record, field in assigned(path):
                found[record, field].add(path.name)
    return found


@pytest.mark.parametrize(("record", "field"), sorted(owners()))
def test_a_field_has_one_owner(record, field):
    assert len(owners()[record, field]) == 1


def test_fields_of_requests_belong_to_the_registry():
    own_ids = {("request", "tag")}  # `Watch` gives a request its id once somebody asks for it
    found = {key for key, files in owners().items() if key[0] in {"request", "attempt"} and files != {"registry.py"}}
    assert found - own_ids == {("attempt", "streamed")}
