"""Services as tools: names, schemas, arguments and results."""

import json
import re
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zmdp import Services, Tool
from zmdp.gateways.mcp.tools import ServiceTool, service_name, tool_name
from zmdp.mdp.errors import CodecError
from zmdp.mdp.services import About, Description


@dataclass
class Node:
    name: str
    children: "list[Node]"


@dataclass
class Size:
    width: int


def tool_of(function, **settings):
    offered = Services().service("s", tool=True, **settings)(function)
    return ServiceTool("s", About.read(json.loads(json.dumps(offered.about().as_option()))))


def takes_text(text: str) -> int: ...
def takes_size(size: Size) -> Size: ...
def takes_node(node: Node) -> list[Node]: ...
def takes_nothing() -> None: ...
def takes_optional(limit: int | None = None) -> Size | None: ...
def takes_bytes(data: bytes) -> bytes: ...
def takes_anything(value): ...
def streams(text: str) -> "Iterator[Size]":  # noqa: F821 - below
    yield Size(1)


INTEGER, SIZE = {"type": "integer"}, {"title": "Size", "type": "object", "properties": {"width": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("function", "properties", "required", "output"),
    [
        (takes_text, {"text": {"type": "string"}}, ["text"], {"result": INTEGER}),
        (takes_size, {"width": INTEGER}, ["width"], {"width": INTEGER}),
        (takes_nothing, {}, None, {"result": {"type": "null"}}),
        (takes_optional, {"limit": {"anyOf": [INTEGER, {"type": "null"}]}}, [], None),
        (takes_bytes, {"data": {"type": "string"}}, ["data"], ...),
        (takes_anything, {"value": {}}, ["value"], {"result": {}}),
    ],
)
def test_schemas(function, properties, required, output):
    described = tool_of(function).described(as_task=False)
    assert described.input_schema["type"] == "object"
    assert described.input_schema["properties"] == properties
    assert described.input_schema.get("required") == required
    if output is ...:
        assert described.output_schema is None
    elif output is not None:
        assert described.output_schema["properties"] == output


def test_a_type_that_contains_itself_keeps_its_definitions():
    schema = tool_of(takes_node).described(as_task=False).input_schema
    assert schema["type"] == "object"
    assert schema["$defs"]["Node"]["properties"]["children"]["items"] == {"$ref": "#/$defs/Node"}


def test_a_service_without_types_takes_text():
    tool = ServiceTool("raw", About())
    assert tool.described(as_task=False).input_schema["required"] == ["text"]
    assert tool.body({"text": "é"}) == ["é".encode()]
    assert tool.result(tool.value([b"done"])).content[0].text == "done"
    assert tool.result(tool.value([b"\xff"])).content[0].text == "/w=="
    with pytest.raises(CodecError, match="must be text"):
        tool.body({"text": 1})


def test_hints_are_told():
    offered = Services().service("s", tool=Tool(title="Title", read_only=True, destructive=False))(takes_text)
    described = ServiceTool("s", About.read(offered.about().as_option())).described(as_task=False)
    assert described.title == "Title"
    assert (described.annotations.read_only_hint, described.annotations.destructive_hint) == (True, False)


@pytest.mark.parametrize(
    ("function", "arguments", "body"),
    [
        (takes_text, {"text": "a b"}, [b'"a b"']),
        (takes_text, {}, [b""]),
        (takes_size, {"width": 3}, [b'{"width":3}']),
        (takes_nothing, {}, [b""]),
    ],
)
def test_the_body_of_a_request(function, arguments, body):
    assert tool_of(function).body(arguments) == body


def test_an_argument_that_does_not_exist():
    with pytest.raises(CodecError, match="there is no argument 'nope': s takes text"):
        tool_of(takes_text).body({"nope": 1})


def test_the_value_of_a_stream_is_a_list():
    from collections.abc import Iterator

    streams.__annotations__["return"] = Iterator[Size]
    tool = tool_of(streams)
    assert tool.joined([{"width": 1}], None) == [{"width": 1}]
    assert tool.joined([], {"width": 2}) == [{"width": 2}]
    assert tool.result([{"width": 1}]).structured_content == {"result": [{"width": 1}]}


def test_the_result_of_a_service_whose_workers_are_gone():
    tool = ServiceTool("s", About(codec="json"))
    assert tool.result(tool.value([b'{"a":1}'])).structured_content == {"a": 1}
    assert tool.result(tool.value([b"3"])).structured_content == {"result": 3}
    assert tool.result(tool.value([b"no json"])).content[0].text == "no json"
    assert tool.joined([1, 2], None) == [1, 2]


@pytest.mark.parametrize("versions", [["1.9", "1.10", ""], ["2", "10"], ["b", "a"], ["", "0.1"]])
def test_two_versions_show_the_newer(versions):
    abouts = tuple(About(version=each) for each in versions)
    assert Description("s", 2, abouts).newest.version == {"1.9": "1.10", "2": "10", "b": "b", "": "0.1"}[versions[0]]
    assert Description("s", 0, ()).newest == About()


@pytest.mark.parametrize(
    ("service", "tool"),
    [
        ("echo", "echo"),
        ("words.count", "words-count"),
        ("word_count", "word_count"),
        ("a-b", "a--2db"),
        ("a..b", "a--2e-b"),
        ("a.", "a--2e"),
        ("é/x", "--c3--a9--2fx"),
        ("task_result", "--74ask_result"),
        ("task.result", "task-result"),
    ],
)
def test_the_name_of_a_service(service, tool):
    assert tool_name(service) == tool
    assert service_name(tool) == service


@given(st.text(min_size=1))
def test_a_name_stands_for_one_service(text):
    service = text.encode("utf-8", "ignore").decode()
    tool = tool_name(service)
    assert re.fullmatch(r"[A-Za-z0-9_-]*", tool)
    assert service_name(tool) == service


@given(st.text(alphabet="ab.-_0123456789cdef"))
def test_no_service_has_two_names(tool):
    service = service_name(tool)
    assert service is None or tool_name(service) == tool


@pytest.mark.parametrize("tool", ["a.b", "a--zz", "--61", "--ff", "task_result", "é", "-"])
def test_what_is_not_a_name(tool):
    assert service_name(tool) is None
