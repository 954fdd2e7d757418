"""The code that `mdclient stub` writes: it runs, has the types of the service, and type checkers accept it."""

import datetime
import decimal
import enum
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from types import ModuleType
from typing import Annotated, Any, Literal, NotRequired, TypedDict

import msgspec
import pydantic
import pytest
from support.schemas import TELLS_EMPTY_DEFAULTS

from zmdp import Services
from zmdp.clients import CodecError
from zmdp.clients.command import stubs
from zmdp.mdp.services import About, Description


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(msgspec.Struct, tag=True):
    lives: int = 9
    names: list[str] = []


class Dog(msgspec.Struct, tag=True):
    tricks: list[str]


Odd = TypedDict("Odd", {"class": int, "content-type": NotRequired[str]})


class Model(pydantic.BaseModel):
    """Checked by Pydantic."""

    number: int = pydantic.Field(3, description="how many")
    parent: "Model | None" = None


@dataclass
class Everything:
    """All that a type may have,
    "in two lines".
    """

    path: str
    color: Color
    pet: Cat | Dog
    odd: Odd
    model: Model
    when: Annotated[datetime.datetime, msgspec.Meta(tz=True)]
    price: decimal.Decimal
    key: uuid.UUID
    pair: tuple[int, str]
    width: int = 80
    ratio: float = 1
    mode: Literal["fast", "good"] = "good"
    tags: list[str] = field(default_factory=list)
    data: bytes = b"x"
    numbers: dict[str, float] = field(default_factory=dict)
    anything: Any = None
    next: "Everything | None" = None


@dataclass
class Item:
    name: str
    amount: int | None = None
    tags: list[str] = field(default_factory=list)


services = Services()


@services.service("all.everything")
def everything(value: Everything) -> Everything:
    """Return it."""
    return value


@services.service("other.everything", codec="msgpack", retries=3, backoff=0.5)
def same(value: Item) -> list[Item]:
    return [value]


@services.service("find")
async def find(text: str) -> AsyncIterator[Item | None]:
    yield None


@services.service("raw")
def raw(data: bytes) -> None:
    return None


@services.service("plain")
def plain(value):  # type: ignore[no-untyped-def]
    return value


@services.service("now")
def now() -> float:
    return 0.0


def described(*offered: Any) -> list[Description]:
    """Return what clients learn about services."""
    abouts = {
        each.name: About.read(msgspec.json.decode(msgspec.json.encode(each.about().as_option()))) for each in offered
    }
    return [Description(name, 1, (about,)) for name, about in abouts.items()]


def loaded(code: str) -> ModuleType:
    module = ModuleType("stub")
    sys.modules["stub"] = module
    exec(compile(code, "stub.py", "exec"), module.__dict__)
    return module


CODE = stubs.stub(described(*services))


def test_values_of_a_stub_are_those_of_the_service():
    stub = loaded(CODE)
    sent = stub.Everything(
        path="a", color="red", pet=stub.Cat(lives=1), odd={"class": 1}, model=stub.Model(),
        when=datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC), price=decimal.Decimal("1.5"), key=uuid.UUID(int=1),
        pair=(1, "x"), data=b"x", next=None,
    )  # fmt: skip
    got = everything.request.decode(stub.everything.encode_request([sent]))
    assert got == Everything(
        "a", Color.RED, Cat(1), {"class": 1}, Model(), sent.when, sent.price, sent.key, (1, "x")
    )  # fmt: skip
    back = stub.everything.decode_reply(everything.reply.encode(got))
    assert (back.path, back.pet, back.model.number, back.data) == ("a", stub.Cat(1, []), 3, b"x")


def test_the_types_of_several_services_are_told_apart():
    stub = loaded(CODE)
    assert (stub.everything.name, stub.other_everything.name) == ("all.everything", "other.everything")
    assert stub.other_everything.request.codec == "msgpack"
    assert stub.other_everything.submission == {"retries": 3, "backoff": 0.5}
    tags = [] if TELLS_EMPTY_DEFAULTS else msgspec.UNSET
    assert asdict(stub.Item("a")) == {"name": "a", "amount": None, "tags": tags}
    assert stub.find.decode_reply([b'{"name":"b"}']).name == "b"
    assert stub.raw.encode_request([b"\x00"]) == [b"\x00"]
    assert stub.plain.encode_request([{"any": 1}]) == [b'{"any":1}']


def test_a_stub_is_formatted(tmp_path):
    path = tmp_path / "stub.py"
    numbers = {"type": "object", "additionalProperties": {"type": "integer"}}
    for length in (20, 28):  # its arguments fit into a line of their own, or not
        about = About(codec="json", request=numbers, reply=numbers, submission={"retries": 3, "backoff": 0.5})
        path.write_text(stubs.stub([*described(*services), Description("n." + "x" * length, 1, (about,))]))
        formatted = subprocess.run(
            [sys.executable, "-m", "ruff", "format", "--isolated", "--diff", str(path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (formatted.returncode, formatted.stdout) == (0, "")


def test_type_checkers_accept_a_stub(tmp_path):
    path = tmp_path / "stub.py"
    use = """
from typing import assert_type
from zmdp import Client

def use(client: Client) -> None:
    assert_type(client.call(now), float)
    assert_type(client.call(other_everything, Item("a")), list[Item])
    for each in client.stream(find, "a"):
        assert_type(each, Item | None)
"""
    path.write_text(CODE + use)
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", str(path)],
        capture_output=True, text=True, cwd=tmp_path, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + CODE


def test_what_workers_say_does_not_become_code():
    hostile = {
        "type": "object",
        "title": "X:\n    import os; os.abort()\nclass Y",
        "description": '"""\nraise SystemExit\n"""\\',
        "properties": {"a\nraise SystemExit": {"type": "string"}},
    }
    about = About.read({
        "codec": "json", "description": "\\\"\"\"\nraise SystemExit", "request": hostile,
        "reply": {"enum": ["'] + exit() + ['", '\x1b"""']},
        "submission": {"retries": "exit()", "exit()": 3},
    })  # fmt: skip
    code = stubs.stub([Description('x"); exit(); ("', 1, (about,))])
    stub = loaded(code)
    (service,) = (each for each in vars(stub).values() if isinstance(each, stub.Service))
    assert service.name == 'x"); exit(); ("'
    assert "\x1b" not in code


@pytest.mark.parametrize(
    "schema", [{}, {"$ref": 5}, {"$ref": "#/$defs/none"}, {"type": 5}, {"anyOf": []}, {"type": []}]
)
def test_a_schema_that_says_nothing_is_any(schema):
    about = About.read({"codec": "json", "request": schema, "reply": {}})
    assert "echo: Service[Any, Any]" in stubs.stub([Description("echo", 1, (about,))])


def test_types_that_contain_themselves_without_a_class():
    defined = {"me": {"type": "array", "items": {"$ref": "#/$defs/me"}}, "you": {"$ref": "#/$defs/you"}}
    defined |= {
        str(level): {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{level + 1}"}] * 9} for level in range(40)
    }
    schemas = [{"$ref": f"#/$defs/{name}", "$defs": defined} for name in ("me", "you", "0")]
    kinds = [
        stubs.stub([Description("echo", 1, (About.read({"codec": "json", "request": each, "reply": {}}),))])
        for each in schemas
    ]
    assert "Service[list[Any], Any]" in kinds[0]
    assert "Service[Any, Any]" in kinds[1]
    assert len(kinds[2]) < 40 * stubs.MAX_TYPES


def test_a_service_of_frames_has_no_types():
    with pytest.raises(CodecError, match="the workers of 'echo' do not tell its types"):
        stubs.stub([Description("echo", 1, ())])


def test_types_are_shown_to_people():
    (description,) = described(find)
    assert stubs.types(description) == (
        "request: str\npart:    Item | None\n\n"
        "@dataclass\nclass Item:\n    name: str\n    amount: int | None = None\n"
        "    tags: list[str] = field(default_factory=list)"
    )
