"""Values of declared types: what fits travels and comes back the same, what does not is refused with its place."""

import datetime
import enum
import json
import math
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.results import package
from support.schemas import TELLS_EMPTY_DEFAULTS

from zmdp.mdp.errors import CodecError, SettingError
from zmdp.mdp.services import Service
from zmdp.mdp.services.misfits import Misfit
from zmdp.mdp.services.value_types import ValueType, converted


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: float = 0.0
    tags: list[str] = field(default_factory=list)


class Struct(msgspec.Struct):
    points: dict[str, Point]


class Dictionary(TypedDict):
    colour: Colour


VALUES = [
    (int, 2**63),
    (str, "größe"),
    (Point, Point(1, 2.5, ["a"])),
    (Struct, Struct({"a": Point(1)})),
    (Dictionary, {"colour": Colour.RED}),
    (list[Point] | None, [Point(1)]),
    (datetime.datetime, datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)),
    (uuid.UUID, uuid.UUID(int=5)),
    (tuple[int, str], (1, "a")),
    (list[bytes], [b"\xff"]),
    (bytes, b"\xff\x00"),
    (None, None),
    (Any, {"a": [1, None]}),
]


@pytest.mark.parametrize("codec", ["json", "msgpack"])
@pytest.mark.parametrize(("kind", "value"), VALUES, ids=str)
def test_a_value_comes_back_the_same(kind, value, codec):
    values = ValueType(kind, codec)
    frames = values.encode(value)
    assert len(frames) == 1
    assert type(frames[0]) is bytes
    assert values.decode(frames) == value


def test_json_has_integers_of_any_size():
    values = ValueType(int)
    assert values.decode(values.encode(2**80)) == 2**80


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v)
    )
)
def test_any_value_of_json_comes_back_the_same(value):
    values = ValueType(Any)
    assert values.decode(values.encode(value)) == value
    assert json.loads(values.encode(value)[0]) == value


@pytest.mark.parametrize(
    ("kind", "body", "problem"),
    [
        (Point, b'{"x": "1"}', "$.x: expected int, got str"),
        (Point, b"{}", "$: object missing required field x"),
        (Point, b"5", "$: expected object, got int"),
        (list[Point], b'[{"x": 1}, {"x": null}]', "$[1].x: expected int, got null"),
        (Struct, b'{"points": {"a": {"x": 1.5}}}', "$.points[...].x: expected int, got float"),
        (Dictionary, b'{"colour": "blue"}', "$.colour: invalid enum value 'blue'"),
        (None, b"1", "$: expected null, got int"),
    ],
)
def test_a_value_of_another_type_is_refused_with_its_place(kind, body, problem):
    with pytest.raises(Misfit) as caught:
        ValueType(kind).decode([body])
    assert str(caught.value) == problem


@pytest.mark.parametrize("body", [b"{", b"\xff", b'"\xff"', b"NaN", b"1 2", b"[" * 100_000])
def test_bytes_that_are_not_json_are_not_a_misfit(body):
    with pytest.raises(CodecError, match="the body cannot be read as json") as caught:
        ValueType(Any).decode([body])
    assert not isinstance(caught.value, Misfit)


def test_an_empty_frame_is_no_value():
    assert ValueType(int | None).decode([b""]) is None
    assert ValueType(bytes).decode([b""]) == b""
    with pytest.raises(Misfit, match=r"\$: expected int, got null"):
        ValueType(int).decode([b""])


@pytest.mark.parametrize("frames", [[], [b"1", b"2"]], ids=len)
def test_a_value_is_one_frame(frames):
    with pytest.raises(CodecError, match=r"expected one value, got \d frames"):
        ValueType(int).decode(frames)


def test_unknown_fields_are_ignored_so_that_types_can_grow():
    assert ValueType(Point).decode([b'{"x": 1, "new": true}']) == Point(1)


@dataclass
class Unresolved:
    value: "Nowhere"  # noqa: F821


@dataclass
class Misspelt:
    value: "int |"  # noqa: F722


@pytest.mark.parametrize("kind", [object, int | str | Point | Struct, type, Unresolved, list[Misspelt]])
def test_a_type_that_cannot_be_sent_is_refused_when_it_is_declared(kind):
    with pytest.raises(SettingError, match=r"values of type .* cannot be sent"):
        ValueType(kind)


@pytest.mark.parametrize(
    ("kind", "codec", "problem"),
    [
        (dict[tuple[int, int], int], "json", r"keys of .* would be texts in JSON: use dict\[str, …\] or codec="),
        (list[dict[int | str, int]], "json", r"keys of dict\[int | str, int\] would be texts in JSON"),
        (dict[bool, int], "json", "keys of .* would be texts in JSON"),
        (dict[Path, int], "msgpack", r"keys of dict\[.*Path, int\] are not made from texts again: use dict\[str, …\]"),
        (range, "json", "range is unknown to msgspec: use builtin types, dataclasses, or models of Pydantic"),
        (list[complex], "json", "complex is unknown to msgspec"),
    ],
)
def test_a_type_whose_values_would_be_changed_is_refused_with_the_remedy(kind, codec, problem):
    with pytest.raises(SettingError, match=rf"values of type .* cannot be sent: {problem}"):
        ValueType(kind, codec)


@pytest.mark.parametrize("codec", ["json", "msgpack"])
def test_attrs_whose_values_would_be_lost(codec):
    attrs = package("attrs")
    private = attrs.make_class("Private", {"_number": attrs.field(type=int)})
    with pytest.raises(SettingError, match="_number of Private would be lost, as its name begins with _: rename it"):
        ValueType(list[private], codec)


def test_messagepack_has_keys_of_other_types():
    values = ValueType(dict[tuple[int, int] | str, int], "msgpack")
    assert values.decode(values.encode({(1, 2): 3, "a": 4})) == {(1, 2): 3, "a": 4}


def test_types_that_msgspec_does_not_know():
    class UserId(str):
        __slots__ = ()

    assert type(ValueType(UserId).decode([b'"a"'])) is UserId
    assert ValueType(list[Path]).schema() == {"type": "array", "items": {"type": "string", "format": "path"}}
    assert ValueType(dict[UserId, int]).decode([b'{"a": 1}']) == {UserId("a"): 1}
    with pytest.raises(Misfit, match=r"\$\[0\]: expected str, got int"):
        ValueType(list[Path]).decode([b"[1]"])


def test_the_schema_of_flags_allows_several():
    class Access(enum.IntFlag):
        READ = 1
        WRITE = 2

    assert ValueType(list[Access]).schema()["$defs"]["Access"] == {"title": "Access", "type": "integer"}


def test_an_unknown_codec():
    with pytest.raises(SettingError, match="codec is 'pickle': a service with types has one of json, msgpack"):
        ValueType(int, "pickle")


def test_values_that_cannot_be_encoded():
    with pytest.raises(CodecError, match="cannot be sent as json"):
        ValueType(Any).encode(object())
    with pytest.raises(CodecError, match="cannot be sent as json"):
        ValueType(bytes).encode("text")


def test_a_value_that_cannot_be_shown_either():
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(CodecError, match=r"a value of type .*Broken cannot be sent as json"):
        ValueType(Any).encode(Broken())


def test_schemas():
    default = {"default": []} if TELLS_EMPTY_DEFAULTS else {}
    assert ValueType(Point).schema()["$defs"]["Point"] == {
        "title": "Point",
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "y": {"type": "number", "default": 0.0},
            "tags": {"type": "array", "items": {"type": "string"}, **default},
        },
        "required": ["x"],
    }
    assert ValueType(Any).schema() == {}


@dataclass
class Limits:
    least: float = -math.inf
    most: float = math.inf
    unknown: list[float] | float = math.nan
    default: float = 0.5


def test_a_default_that_is_not_json_is_not_told():
    properties = ValueType(list[Limits]).schema()["$defs"]["Limits"]["properties"]
    assert properties["least"] == properties["most"] == {"type": "number"}
    assert "default" not in properties["unknown"]
    assert properties["default"] == {"type": "number", "default": 0.5}


def test_a_decoded_value_is_converted():
    assert converted({"x": 1}, Point) == Point(1)
    assert converted("2026-01-02", datetime.date) == datetime.date(2026, 1, 2)
    with pytest.raises(Misfit, match=r"\$.x: expected int, got str"):
        converted({"x": "1"}, Point)


def test_a_reply_whose_type_fails_to_take_it():
    @dataclass
    class Failing:
        x: int

        def __post_init__(self) -> None:
            raise KeyError(self.x)

    with pytest.raises(CodecError, match="the reply of service 'fail' does not fit: KeyError: 1"):
        Service("fail", None, Failing).decode_reply([b'{"x": 1}'])
    with pytest.raises(CodecError, match=r"no value of type .*Failing can be made: KeyError: 1"):
        converted({"x": 1}, Failing)


def test_models_of_pydantic():
    pydantic = package("pydantic")
    inner = pydantic.create_model("Inner", n=(int, ...))
    model = pydantic.create_model("Model", inner=(inner, ...), when=(datetime.date, ...))
    values = ValueType(list[model])
    value = [model(inner={"n": 1}, when="2026-01-02")]
    assert values.decode(values.encode(value)) == value
    with pytest.raises(Misfit, match=r"\$\[0\]\.inner\.n: input should be a valid integer"):
        values.decode([b'[{"inner": {"n": "x"}, "when": "2026-01-02"}]'])
    schema = values.schema()
    assert schema["items"]["properties"]["inner"] == {"$ref": "#/$defs/Inner"}
    assert schema["$defs"]["Inner"]["properties"]["n"]["type"] == "integer"
