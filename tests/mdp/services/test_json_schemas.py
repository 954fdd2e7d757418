import json
from dataclasses import dataclass, field
from datetime import date
from typing import Annotated, Any, Literal

import msgspec
import pytest
from support.schemas import TELLS_EMPTY_DEFAULTS

from zmdp.mdp.services.json_schemas import MAX_VALUES, example
from zmdp.mdp.services.value_types import ValueType


@dataclass
class Node:
    name: str
    day: date
    kind: Literal["leaf", "inner"]
    count: Annotated[int, msgspec.Meta(ge=3)]
    pair: tuple[int, bool]
    child: "Node | None"
    weight: float = 1.5
    tags: list[str] = field(default_factory=list)


@pytest.mark.parametrize(
    "kind", [Node, list[Node], dict[str, Node], int | None, Annotated[str, msgspec.Meta(examples=["x"])], Any, None]
)
def test_an_example_fits_its_type(kind):
    values = ValueType(kind)
    values.decode([msgspec.json.encode(example(values.schema()))])


def test_an_example_is_the_simplest_value_with_defaults():
    assert example(ValueType(Node).schema()) == {
        "name": "", "day": "2026-01-31", "kind": "inner", "count": 3, "pair": [0, False], "child": None,
        "weight": 1.5, "tags": [] if TELLS_EMPTY_DEFAULTS else [""],
    }  # fmt: skip


@pytest.mark.parametrize(
    "schema", [None, {}, {"type": 5}, {"$ref": "#/$defs/none"}, {"$defs": 1, "$ref": "x"}, {"anyOf": [7]}, {"type": []}]
)
def test_a_schema_that_says_nothing(schema):
    assert example(schema) is None


@pytest.mark.parametrize("schema", [{"type": "object", "properties": 1}, {"type": "array", "items": {"type": "null"}}])
def test_a_schema_that_says_little(schema):
    assert example(schema) in ({}, [None])


def test_a_hostile_schema_does_not_make_a_large_example():
    names = [f"f{number}" for number in range(20)]
    defined = {
        str(level): {"type": "object", "properties": {name: {"$ref": f"#/$defs/{level + 1}"} for name in names}}
        for level in range(20)
    }
    shown = example({"$ref": "#/$defs/0", "$defs": defined})
    assert len(json.dumps(shown).split(":")) <= MAX_VALUES * 21
    itself = {"$ref": "#/$defs/me", "$defs": {"me": {"type": "array", "items": {"$ref": "#/$defs/me"}}}}
    assert example(itself) == [None]
