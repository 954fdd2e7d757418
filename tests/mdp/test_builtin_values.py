"""Values of subclasses of builtin types are sent as values of the builtin type."""

import collections
import datetime
import decimal
import enum
from pathlib import Path

import msgspec
import pytest
from support.results import package

from zmdp.mdp.builtin_values import as_builtin
from zmdp.mdp.codecs import Coder
from zmdp.mdp.errors import CodecError
from zmdp.mdp.services.value_types import ValueType


class Safe(str):
    __slots__ = ()

    def __str__(self):
        return "not this"


class Whole(int):
    def __int__(self):
        return -1


class Part(float):
    pass


class Data(bytes):
    pass


class Day(datetime.date):
    pass


class Moment(datetime.datetime):
    pass


class Length(datetime.timedelta):
    pass


class Exact(decimal.Decimal):
    pass


class Level(enum.IntEnum):
    LOW = 1


VALUES = [
    (Safe("a"), b'"a"'),
    (Whole(1), b"1"),
    (Part(0.5), b"0.5"),
    (Data(b"x"), b'"eA=="'),
    (Day(2026, 1, 2), b'"2026-01-02"'),
    (Moment(2026, 1, 2, tzinfo=datetime.UTC), b'"2026-01-02T00:00:00Z"'),
    (Length(1), b'"P1D"'),
    (Exact("1.10"), b'"1.10"'),
    (Path("/a"), b'"/a"'),
    ([Level.LOW, True], b"[1,true]"),
    ({Whole(1): [Safe("a"), (Part(0.5),)], Safe("b"): {Safe("c")}}, b'{"1":["a",[0.5]],"b":["c"]}'),
    (collections.OrderedDict({Path("a"): Whole(2)}), b'{"a":2}'),
]


@pytest.mark.parametrize(("value", "text"), VALUES, ids=str)
def test_a_value_is_sent_as_what_it_stands_for(value, text):
    assert ValueType(dict | list | None).encode(value) == [text]
    assert Coder("json").encode(value) == [text]


def test_messagepack_too():
    value = {"a": [Safe("b"), Whole(1), Part(0.5), Level.LOW, Path("c")]}
    packed = msgspec.msgpack.encode({"a": ["b", 1, 0.5, 1, "c"]})
    assert ValueType(dict, "msgpack").encode(value) == [packed]
    assert Coder("msgpack").decode(Coder("msgpack").encode(value)) == {"a": ["b", 1, 0.5, 1, "c"]}


def test_scalars_of_numpy():
    numpy = package("numpy")
    value = [numpy.float64(0.5), numpy.float32(0.5), numpy.int64(1), numpy.bool_(True), numpy.str_("a")]
    assert ValueType(list).encode(value) == [b'[0.5,0.5,1,true,"a"]']
    assert ValueType(dict).encode({numpy.int64(1): numpy.float64(0.5)}) == [b'{"1":0.5}']
    with pytest.raises(CodecError, match="type longdouble is not supported"):
        ValueType(list).encode([numpy.longdouble(1)])


@pytest.mark.parametrize("value", [object(), range(3), {1: 2}.keys(), datetime.date, datetime.datetime(2026, 1, 1)])
def test_a_value_that_stands_for_nothing_else(value):
    with pytest.raises(NotImplementedError, match=r"type \w+ is not supported"):
        as_builtin(value)


@pytest.mark.parametrize("key", [True, None, (1, 2), frozenset()], ids=str)
def test_a_key_that_json_does_not_have(key):
    with pytest.raises(CodecError, match="only texts and numbers can be keys"):
        ValueType(dict).encode({key: 1})
