"""Values of all kinds of types come back as they were, on every way to a service and back."""

import datetime
import decimal
import enum
import ipaddress
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Generic, Literal, NamedTuple, NewType, TypeVar

import httpx
import msgspec
import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, RootModel, alias_generators
from support.http_gateways import await_services, http_gateway
from support.offered import offered
from support.processes import TIMEOUT_SECONDS
from typing_extensions import TypedDict

from zmdp import Client, Services, Titanic
from zmdp.clients.command import stubs
from zmdp.testing import running_broker, running_titanic

T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.IntFlag):
    READ = 1
    WRITE = 2


class Pair(NamedTuple):
    first: int
    second: str = "x"


class Settings(TypedDict, total=False):
    color: Color
    when: datetime.date


class UserId(str):
    __slots__ = ()


Amount = NewType("Amount", decimal.Decimal)


@dataclass
class Bytes:
    data: bytes
    key: uuid.UUID


@dataclass
class BankTransfer:
    iban: str
    amount: int = 1


@dataclass(frozen=True)
class Card:
    number: str
    tags: list[str] = field(default_factory=list)
    checks: int = field(init=False, default=0)


@dataclass
class Order:
    paid_by: BankTransfer | Card
    tried: list[Card | BankTransfer | None] = field(default_factory=list)
    known: dict[str, Card] = field(default_factory=dict)


@dataclass
class Node:
    children: "list[Node | Leaf]"


@dataclass
class Leaf:
    kind: str


@dataclass
class Circle:
    kind: Literal["circle"] = "circle"
    size: int = 1


@dataclass
class Square:
    kind: Literal["square"] = "square"
    size: int = 1


class Struct(msgspec.Struct, tag=True):
    user_id: int


class Tuple(msgspec.Struct, tag=True):
    numbers: tuple[int, ...] = ()


class Alias(BaseModel):
    user_id: int = Field(alias="userId")


class Camel(BaseModel):
    model_config = ConfigDict(alias_generator=alias_generators.to_camel, populate_by_name=True)
    user_id: int
    alias: Alias | None = None


class Either(BaseModel):
    user_id: int = Field(validation_alias=pydantic.AliasChoices("user_id", "userId"))


class Unmasked(BaseModel):
    token: pydantic.SecretStr

    @pydantic.field_serializer("token", when_used="json")
    def write(self, token: pydantic.SecretStr) -> str:
        return token.get_secret_value()


class Base64(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")
    data: bytes
    other: pydantic.Base64Bytes


class Computed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    number: int

    @pydantic.computed_field
    def twice(self) -> int:
        return 2 * self.number


class Strict(BaseModel):
    model_config = ConfigDict(strict=True)
    day: datetime.date
    price: decimal.Decimal
    numbers: set[int]
    path: Path
    pair: Pair
    parsed: pydantic.Json[list[int]]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    lives: int


class Owner(BaseModel):
    pet: Cat | Dog
    told: Annotated[Cat | Dog, Field(discriminator="kind")]
    shape: Circle | Square
    odd: dict[uuid.UUID, list[Dog]] = {}


class Ids(RootModel[list[int]]):
    pass


class Page(BaseModel, Generic[T]):
    items: list[T]


@pydantic.dataclasses.dataclass
class Even:
    number: Annotated[int, Field(gt=0)]
    day: datetime.date = Field(alias="theDay", default=datetime.date(2026, 1, 1))


@dataclass
class Mixed:
    number: int
    data: bytes
    alias: Alias
    struct: Struct | Tuple
    paid_by: Card | BankTransfer
    optional: Camel | None = None


UTC = datetime.UTC
VALUES: list[tuple[Any, Any]] = [
    (None, None),
    (int, 2**63 - 1),
    (bool, True),
    (float, 0.5),
    (str, "größe\u2028\x00"),
    (bytes, b"\xff\x00"),
    (list[bytes], [b"\xff"]),
    (Bytes, Bytes(b"\xff\x00", uuid.UUID(int=1))),
    (Annotated[datetime.datetime, msgspec.Meta(tz=True)], datetime.datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)),
    (datetime.datetime, datetime.datetime(2026, 1, 2, 3, 4, 5)),
    (datetime.date, datetime.date(2026, 1, 2)),
    (datetime.time, datetime.time(3, 4, 5, 6)),
    (datetime.timedelta, datetime.timedelta(days=-2, microseconds=3)),
    (uuid.UUID, uuid.UUID(int=5)),
    (decimal.Decimal, decimal.Decimal("1.10")),
    (Amount, decimal.Decimal("1.10")),
    (Color, Color.RED),
    (list[Level], [Level.LOW]),
    (Access, Access.READ | Access.WRITE),
    (Pair, Pair(1, "a")),
    (Settings, {"color": Color.RED, "when": datetime.date(2026, 1, 2)}),
    (set[int], {1, 2}),
    (frozenset[str], frozenset("ab")),
    (tuple[int, str], (1, "a")),
    (tuple[int, ...], (1, 2)),
    (dict[Color, str], {Color.RED: "a"}),
    (dict[uuid.UUID, float], {uuid.UUID(int=1): 0.5}),
    (int | str | list[int] | None, "1"),
    (Literal["fast", "good"] | None, "good"),
    (Path, Path("/a/b")),
    (list[Path | None], [Path("a"), None]),
    (ipaddress.IPv4Address, ipaddress.ip_address("127.0.0.1")),
    (UserId, UserId("a")),
    (Struct | Tuple, Tuple((1, 2))),
    (BankTransfer | Card, Card("1", ["a"])),
    (Order, Order(Card("1"), [BankTransfer("2"), None, Card("3")], {"a": Card("4")})),
    (list[Card | BankTransfer] | None, [BankTransfer("1", 2)]),
    (Node, Node([Leaf("a"), Node([Leaf("b")])])),
    (Circle | Square, Square(size=3)),
    (Alias, Alias(userId=1)),
    (list[Alias], [Alias(userId=1)]),
    (Camel, Camel(user_id=1, alias=Alias(userId=2))),
    (Either, Either(user_id=1)),
    (Unmasked, Unmasked(token=pydantic.SecretStr("a"))),
    (Base64, Base64(data=b"\xff\xfb", other=b"YQ==")),
    (Computed, Computed(number=1)),
    (
        Strict,
        Strict(
            day=datetime.date(2026, 1, 2), price=decimal.Decimal("1.10"), numbers={1}, path=Path("a"),
            pair=Pair(1, "a"), parsed="[1, 2]",
        ),
    ),
    (Cat | Dog, Dog(lives=2)),
    (dict[str, Cat | Dog | None], {"a": Dog(lives=2), "b": None}),
    (
        Owner,
        Owner(pet=Dog(lives=1), told=Cat(lives=2), shape=Square(), odd={uuid.UUID(int=1): [Dog(lives=2)]}),
    ),
    (Ids, Ids([1, 2])),
    (Page[Alias], Page[Alias](items=[Alias(userId=1)])),
    (Even, Even(number=2, theDay=datetime.date(2026, 1, 3))),
    (Annotated[int, Field(gt=0)], 5),
    (list[pydantic.PositiveInt], [1]),
    (Mixed, Mixed(1, b"\xff", Alias(userId=1), Tuple((1,)), Card("1"), Camel(user_id=2))),
]  # fmt: skip


def services_of(kind: Any, codec: str) -> tuple[Services, Any, Any]:
    """Return a service that returns its value, and one that streams it twice."""
    services = Services(codec=codec)

    def echo(value: Any) -> Any:
        return value

    def twice(value: Any) -> Iterator[Any]:
        yield value
        yield value

    echo.__annotations__ = {"value": kind, "return": kind}
    twice.__annotations__ = {"value": kind, "return": Iterator[kind]}
    return services, services.service("echo")(echo), services.service("twice")(twice)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Yield the endpoint of a broker, a client, a Titanic, and the URL of a gateway."""
    with running_broker(drain_timeout=0.0) as server:
        at = server.endpoints[0]
        with (
            running_titanic(at, str(tmp_path_factory.mktemp("titanic") / "titanic.db")),
            http_gateway(at) as gateway,
            Client(at, timeout=TIMEOUT_SECONDS) as client,
        ):
            await_services(at, "titanic.request")
            yield at, client, Titanic(client), gateway.url


@pytest.mark.parametrize("codec", ["json", "msgpack"])
@pytest.mark.parametrize(("kind", "value"), VALUES, ids=range(len(VALUES)))
def test_a_value_comes_back_as_it_was(site, kind, value, codec):
    at, client, titanic, url = site
    services, echo, twice = services_of(kind, codec)
    with services.test_client() as inside:
        assert inside.call(echo, value) == value
    with offered(services, at):
        assert client.call(echo, value) == value
        assert list(client.stream(twice, value)) == [value, value]
        assert titanic.submit(echo, value).result(TIMEOUT_SECONDS) == value

        (body,) = echo.encode_request([value])
        answer = httpx.post(f"{url}/services/echo", content=body, timeout=TIMEOUT_SECONDS)
        assert echo.decode_reply([answer.content]) == value
        if codec == "json" and kind is not bytes:
            answer = httpx.post(f"{url}/services/twice", content=body, timeout=TIMEOUT_SECONDS)
            assert [twice.decode_reply([line]) for line in answer.content.split(b"\n")[:-1]] == [value, value]

        code = stubs.stub([client.describe("echo")])
        stub = ModuleType("stub")
        sys.modules["stub"] = stub
        exec(code, stub.__dict__)
        sent = stub.echo.encode_request([stub.echo.decode_reply([body])])
        assert echo.request.decode(sent) == value, code
