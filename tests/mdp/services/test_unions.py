"""Unions of dataclasses: each value is sent with a tag."""

import datetime
from dataclasses import InitVar, dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import pytest

from zmdp.mdp.errors import CodecError, SettingError
from zmdp.mdp.services.misfits import Misfit
from zmdp.mdp.services.value_types import ValueType, converted


@dataclass
class BankTransfer:
    """From an account."""

    iban: str
    amount: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    number: str
    valid: datetime.date = datetime.date(2026, 1, 1)
    tags: list[str] = field(default_factory=lambda: ["new"])

    def __post_init__(self) -> None:
        if not self.number:
            raise ValueError("a card has a number")


@dataclass
class Order:
    paid_by: BankTransfer | Card
    known: dict[str, Card] = field(default_factory=dict)


@dataclass
class Circle:
    kind: Literal["circle"]
    size: int = 1


@dataclass
class Square:
    kind: Literal["square"] = field(default="square", init=False)
    size: int = 1


PAYMENT = ValueType(BankTransfer | Card)


def test_the_tag_is_the_name_of_the_class():
    assert PAYMENT.encode(BankTransfer("a")) == [b'{"type":"BankTransfer","iban":"a","amount":1}']
    body = b'{"type":"Card","number":"1","new":true}'
    assert PAYMENT.decode([body]) == Card(number="1", valid=datetime.date(2026, 1, 1), tags=["new"])
    assert converted(msgspec.json.decode(body), BankTransfer | Card) == Card(number="1")
    assert ValueType(Order).encode(Order(Card(number="1", tags=[]), {"a": Card(number="2", tags=[])})) == [
        b'{"paid_by":{"type":"Card","number":"1","valid":"2026-01-01","tags":[]},'
        b'"known":{"a":{"type":"Card","number":"2","valid":"2026-01-01","tags":[]}}}'
    ]


def test_a_field_that_differs_is_the_tag():
    shapes = ValueType(list[Circle | Square])
    frames = shapes.encode([Circle("circle"), Square()])
    assert frames == [b'[{"kind":"circle","size":1},{"kind":"square","size":1}]']
    assert shapes.decode(frames) == [Circle("circle"), Square()]
    with pytest.raises(CodecError, match="kind of a Circle is 'square': it must be 'circle'"):
        shapes.encode([Circle("square")])  # type: ignore[arg-type]


def test_a_subclass_is_sent_as_the_class_of_the_union():
    @dataclass
    class Instant(BankTransfer):
        seconds: int = 10

    assert PAYMENT.decode(PAYMENT.encode(Instant("a"))) == BankTransfer("a")


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b'{"iban": "a"}', "$: object missing required field type"),
        (b'{"type": "Cash"}', "$.type: invalid value 'Cash'"),
        (b'{"type": "BankTransfer", "iban": 1}', "$.iban: expected str, got int"),
        (b'{"type": "Card", "number": ""}', "$: a card has a number"),
        (b"", "$: expected object, got null"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_place(body, problem):
    with pytest.raises(Misfit) as caught:
        PAYMENT.decode([body])
    assert str(caught.value) == problem


def test_the_schema_names_the_tag():
    schema = PAYMENT.schema()
    assert schema["discriminator"]["propertyName"] == "type"
    assert schema["$defs"]["BankTransfer"] == {
        "title": "BankTransfer",
        "description": "From an account.",
        "type": "object",
        "properties": {
            "type": {"enum": ["BankTransfer"]},
            "iban": {"type": "string"},
            "amount": {"type": "integer", "default": 1},
        },
        "required": ["type", "iban"],
    }
    assert "description" not in schema["$defs"]["Card"]


@dataclass
class Typed:
    type: str


@dataclass
class WithArgument:
    number: int
    more: InitVar[int] = 0


class Tuple(NamedTuple):
    paid_by: BankTransfer | Card


class Struct(msgspec.Struct):
    number: int


class Other(msgspec.Struct):
    number: int


def namesake() -> Any:
    @dataclass
    class Card:
        number: str

    return Card


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Typed | Card, 'give each a field such as kind: Literal["card"] = "card"'),
        (Card | namesake(), 'give each a field such as kind: Literal["card"] = "card"'),
        (tuple[Typed | Circle, Circle | Square], 'give each a field such as kind: Literal["card"] = "card"'),
        (Card | WithArgument, "dataclass WithArgument has an InitVar"),
        (Tuple, "Tuple contains a union of dataclasses: use a dataclass in its place"),
        (Struct | Other, "give each Struct a tag, as in class Card"),
        (Card | dict[str, int], "a union may have several dataclasses, but otherwise only one type"),
        (int | str | datetime.date, "one of texts"),
        (Annotated[list[int] | set[int], "a"], "one of arrays"),
    ],
)
def test_a_union_that_cannot_be_sent_says_what_to_write(kind, problem):
    with pytest.raises(SettingError, match=r"values of type .* cannot be sent: ") as caught:
        ValueType(kind)
    assert problem in str(caught.value)
