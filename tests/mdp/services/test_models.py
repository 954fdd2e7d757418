"""Types of Pydantic; tests/workers/services/test_round_trips.py has those that come back as they were."""

import datetime
import decimal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import pydantic
import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr

from zmdp.mdp.errors import CodecError, SettingError
from zmdp.mdp.services.misfits import Misfit
from zmdp.mdp.services.value_types import ValueType, converted


class Alias(BaseModel):
    user_id: int = Field(alias="userId")


class Inner(BaseModel):
    alias: Alias
    day: datetime.date


class Validated(BaseModel):
    number: int
    other: int = Field(validation_alias="Other", default=1)


class Written(BaseModel):
    number: int = Field(serialization_alias="Number")


class Nested(BaseModel):
    number: int = Field(validation_alias=pydantic.AliasPath("numbers", 0))


class Excluded(BaseModel):
    number: int = Field(exclude=True, default=1)


class Secret(BaseModel):
    tokens: list[SecretStr] | None = None


class Masked(BaseModel):
    token: pydantic.Secret[datetime.date]


class Raw(BaseModel):
    data: dict[str, bytes]


class HalfRaw(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64")
    data: bytes


class Keys(BaseModel):
    counts: dict[int | str, int]


class Text(BaseModel):
    when: datetime.date | str


class Person(BaseModel):
    name: str


class Employee(BaseModel):
    name: str
    boss: Person | None = None


@pydantic.dataclasses.dataclass
class Even:
    number: Annotated[int, Field(gt=0)]

    @pydantic.field_validator("number")
    @classmethod
    def is_even(cls, number: int) -> int:
        if number % 2:
            raise ValueError("must be even")
        return number


@pydantic.dataclasses.dataclass
class EvenAlias:
    number: int = Field(validation_alias="Number")


@pydantic.dataclasses.dataclass
class EvenExcluded:
    number: int
    other: int = Field(default=1, exclude=True)


@pydantic.dataclasses.dataclass
class EvenSecret:
    token: SecretStr


class Struct(msgspec.Struct):
    number: Annotated[int, Field(gt=0)]


class Called(BaseModel):
    call: Callable[[int], int]


class Holder(BaseModel):
    item: Secret


@dataclass
class Around:
    item: list[Secret]


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        (Validated, "other of Validated is sent as 'other', but read as 'Other': give it one alias=… for both"),
        (Written, "number of Written is sent as 'Number', but read as 'number': give it one alias=… for both"),
        (Nested, "number of Nested is sent as 'number', but read as part of another field: give it one alias=…"),
        (Excluded, "number of Excluded is excluded from what is sent, and would be lost: remove exclude=True"),
        (Secret, "tokens of Secret is a SecretStr, which Pydantic writes as asterisks: declare it as str, or"),
        (Holder, "tokens of Secret is a SecretStr"),
        (Around, "tokens of Secret is a SecretStr"),
        (SecretStr, "it is a SecretStr, which Pydantic writes as asterisks"),
        (Masked, "token of Masked is a .*, which Pydantic writes as asterisks"),
        (Raw, r"data of Raw has bytes, which Pydantic writes as UTF-8: set model_config = ConfigDict\(ser_json"),
        (HalfRaw, "data of HalfRaw has bytes, which Pydantic writes as UTF-8"),
        (Keys, r"keys of dict\[int | str, int\] would be texts in JSON: use dict\[str, …\]$"),
        (Text, "a union has several types that are texts in JSON, date, str: declare one of them"),
        (list[Employee | Person], "values of Person in a union would be taken for Employee: give each of them a field"),
        (EvenAlias, "Number of EvenAlias is sent as 'number', but read as 'Number': give it one alias=… for both"),
        (EvenExcluded, "other of EvenExcluded is excluded from what is sent"),
        (EvenSecret, "token of EvenSecret is a SecretStr"),
        (Struct, "Pydantic checks what it contains, but does not know Struct: make that a dataclass or a model"),
        (Called, "Cannot generate a JsonSchema"),
    ],
)
def test_a_type_whose_values_would_be_changed_is_refused(kind, problem):
    with pytest.raises(SettingError, match=rf"values of type .* cannot be sent: {problem}"):
        ValueType(kind)


@pytest.mark.parametrize(
    ("kind", "body", "problem"),
    [
        (Even, b'{"number": -2}', "$.number: input should be greater than 0"),
        (Even, b'{"number": 3}', "$.number: value error, must be even"),
        (Annotated[int, Field(gt=0)], b"-5", "$: input should be greater than 0"),
        (list[Annotated[str, Field(max_length=1)]], b'["a", "bc"]', "$[1]: string should have at most 1 character"),
        (Alias, b'{"user_id": 1}', "$.userId: field required"),
        (Alias, b"", "$: input should be an object"),
        (
            list[Inner],
            b'[{"alias": {"userId": "x"}, "day": "2026-01-02"}]',
            "$[0].alias.userId: input should be a valid",
        ),
        (list[dict[str, list[Alias]]], b'[{"item": 1}]', "$[0][...]: expected array, got int"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_place(kind, body, problem):
    with pytest.raises(Misfit) as caught:
        ValueType(kind).decode([body])
    assert str(caught.value).startswith(problem)


@pytest.mark.parametrize("body", [b"{", b'{"userId": NaN}', b'{"userId": "\xff"}'])
def test_bytes_that_are_not_json_are_not_a_misfit(body):
    with pytest.raises(CodecError, match="the body cannot be read as json") as caught:
        ValueType(Alias).decode([body])
    assert not isinstance(caught.value, Misfit)


def test_schemas_have_aliases_and_constraints():
    assert ValueType(Alias).schema()["properties"].keys() == {"userId"}
    assert ValueType(list[Alias]).schema()["items"]["properties"].keys() == {"userId"}
    assert ValueType(Annotated[int, Field(gt=0)]).schema() == {"exclusiveMinimum": 0, "type": "integer"}
    assert ValueType(Inner | None).schema()["$defs"]["Alias"]["required"] == ["userId"]


def test_a_decoded_value_is_converted():
    assert converted({"userId": 1}, Alias) == Alias(userId=1)
    assert converted({"number": 2}, Even) == Even(2)
    with pytest.raises(Misfit, match=r"\$.number: input should be greater than 0"):
        converted({"number": -2}, Even)


def test_a_model_among_plain_values():
    class Price(BaseModel):
        amount: decimal.Decimal = Field(alias="theAmount")

    value = {"prices": [Price(theAmount="1.10")]}
    assert ValueType(Any).encode(value) == [b'{"prices":[{"theAmount":"1.10"}]}']
    assert ValueType(dict, "msgpack").encode(value) == [msgspec.msgpack.encode({"prices": [{"theAmount": "1.10"}]})]
    with pytest.raises(CodecError, match="tokens of Secret is a SecretStr, which Pydantic writes as asterisks"):
        ValueType(Any).encode([Secret(tokens=["a"])])


def test_pydantic_is_imported_only_if_it_is_used():
    program = """
import sys
from dataclasses import dataclass
from zmdp import Service
@dataclass
class Job:
    number: int
Service("job", Job | None, list[Job])
assert "pydantic" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)
