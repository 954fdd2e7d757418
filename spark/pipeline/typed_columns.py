"""Columns for services with types: which columns fit a request, and the type of the reply's column."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from functools import cached_property, partial
from itertools import accumulate, chain, count
from typing import Any, Final, Literal, Optional
from uuid import UUID

import msgspec
import pyarrow as pa
from msgspec import inspect
from msgspec.structs import astuple
from pyspark.sql import types as T  # noqa: N812 - as in PySpark's documentation

from ...clients.rows.arrow import OK, Outcome, answer
from ...mdp.codes import Code
from ...mdp.errors import CodecError, SettingError
from ...mdp.services import BaseService, Service, Streaming
from ...mdp.services.type_parts import show

AnyService = BaseService[Any, Any]
Shape = tuple[str, Any]
"""The structure of a reply: `("value", TYPE)`, the shape of what is in an `"optional"`, `"list"` or `"dict"`, or the
fields of an `"object"`: name, shape and, unless it is required, default."""

_SCALARS: Final[Sequence[tuple[type, type, T.DataType, tuple[type, ...]]]] = (
    (inspect.BoolType, bool, T.BooleanType(), (T.BooleanType,)),
    (inspect.IntType, int, T.LongType(), (T.IntegralType,)),
    (inspect.FloatType, float, T.DoubleType(), (T.NumericType,)),
    (inspect.StrType, str, T.StringType(), (T.StringType,)),
    (inspect.BytesType, bytes, T.BinaryType(), (T.BinaryType,)),
    (inspect.DateTimeType, datetime, T.TimestampType(), (T.TimestampType, T.TimestampNTZType)),
    (inspect.DateType, date, T.DateType(), (T.DateType,)),
    (inspect.DecimalType, Decimal, T.DecimalType(38, 18), (T.NumericType,)),
    (inspect.UUIDType, UUID, T.StringType(), (T.StringType,)),
)
"""Types of values, the type of a column of replies, and those of columns that can be sent."""
_LISTS: Final = (
    inspect.ListType, inspect.SetType, inspect.FrozenSetType, inspect.VarTupleType, inspect.CollectionType,
)  # fmt: skip
_OBJECTS: Final = (inspect.StructType, inspect.DataclassType, inspect.TypedDictType)
SLICE_ROWS: Final = 256
"""How many replies become values at a time: more of them would leave the processor's cache and occupy the collector."""
_NO_VALUE: Final = (msgspec.DecodeError, RecursionError, TypeError, ValueError)
"""Raised by decoding an outcome without a value: `TypeError` for None and errors, which are no list of frames."""
_KEPT: Final = (bytes, datetime, date, Decimal)
"""Values that Arrow takes as they are."""


def check_service(service: AnyService) -> None:
    """Raise `SettingError` for a service whose values cannot be columns."""
    if isinstance(service, Streaming):
        raise SettingError(f"service {service.name!r} streams its reply, but a row has one reply")
    if service.request.codec != "json":
        raise SettingError(f"service {service.name!r} has the codec {service.request.codec}; expected json")
    if service.request.kind is type(None):
        raise SettingError(f"service {service.name!r} takes no value, so there is no input to send")


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def check_input(service: AnyService, column: str, found: T.DataType) -> None:
    """Raise `SettingError`, which names the column or its field, unless values of type `found` can be sent."""
    wrong = _misfit(inspect.type_info(service.request.kind), found, column)
    if wrong is not None:
        raise SettingError(f"{wrong}, as service {service.name!r} takes {show(service.request.kind)}")


def _misfit(expected: inspect.Type, found: T.DataType, column: str) -> str | None:
    """Return why a column does not fit values of type `expected`, or None if it does."""
    expected = _without_metadata(expected)
    if isinstance(expected, inspect.AnyType | inspect.CustomType) or isinstance(found, T.NullType):
        return None
    if isinstance(expected, inspect.UnionType):
        wrong = [_misfit(each, found, column) for each in expected.types if not isinstance(each, inspect.NoneType)]
        return None if None in wrong else wrong[0] if len(wrong) == 1 else _differs(expected, found, column)
    if isinstance(expected, _OBJECTS) and isinstance(found, T.StructType):
        return _object_misfit(expected.fields, {each.name: each.dataType for each in found.fields}, column)
    if isinstance(expected, _LISTS) and isinstance(found, T.ArrayType):
        return _misfit(expected.item_type, found.elementType, f"{column}[]")
    if isinstance(expected, inspect.DictType) and isinstance(found, T.MapType):
        return _misfit(expected.value_type, found.valueType, f"{column}[]")
    if isinstance(expected, inspect.DictType) and isinstance(found, T.StructType):
        wrong = [_misfit(expected.value_type, each.dataType, f"{column}.{each.name}") for each in found.fields]
        return next(filter(None, wrong), None)
    fitting = _fitting(expected)
    return None if isinstance(found, fitting) else _differs(expected, found, column)


def _object_misfit(fields: Sequence[Any], found: Mapping[str, T.DataType], column: str) -> str | None:
    for each in fields:
        name = f"{column}.{each.encode_name}"
        if each.encode_name in found:
            wrong = _misfit(each.type, found[each.encode_name], name)
        else:
            wrong = f"{name} is missing; expected {_name(each.type)}" if each.required else None
        if wrong is not None:
            return wrong
    return None


def _fitting(expected: inspect.Type) -> tuple[type, ...]:
    """Return the types of columns that fit a value that has no parts."""
    if isinstance(expected, inspect.EnumType | inspect.LiteralType):
        return (T.StringType,) if isinstance(_values(expected)[0], str) else (T.IntegralType,)
    return next((fitting for kind, _, _, fitting in _SCALARS if isinstance(expected, kind)), ())


def _differs(expected: inspect.Type, found: T.DataType, column: str) -> str:
    return f"{column} is of type {found.simpleString()}; expected {_name(expected)}"


# ── replies ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def reply_type(service: AnyService) -> tuple[T.DataType, Shape]:
    """Return the type of the column of replies, and their shape.

    Raises `SettingError` for a type that Spark has no equivalent of.
    """
    return _column(inspect.type_info(service.reply.kind), f"the reply of service {service.name!r}", ())


def _column(kind: inspect.Type, path: str, outer: tuple[int, ...]) -> tuple[T.DataType, Shape]:
    kind, optional = _optional(kind)
    column, shape = _column_of_values(kind, path, outer)
    return column, ("optional", shape) if optional else shape


def _column_of_values(kind: inspect.Type, path: str, outer: tuple[int, ...]) -> tuple[T.DataType, Shape]:
    """Return the type of a column of values that are not None; `outer` are the ids of the types that contain them."""
    for scalar, value, column, _ in _SCALARS:
        if isinstance(kind, scalar):
            return column, ("value", value)
    if isinstance(kind, inspect.EnumType | inspect.LiteralType):
        values = _values(kind)
        return T.StringType() if isinstance(values[0], str) else T.LongType(), ("value", Literal[tuple(values)])
    if isinstance(kind, inspect.NoneType):
        return T.NullType(), ("value", None)
    if isinstance(kind, _LISTS):
        item, shape = _column(kind.item_type, f"{path}[]", outer)
        return T.ArrayType(item, shape[0] == "optional"), ("list", shape)
    if isinstance(kind, inspect.DictType) and isinstance(_optional(kind.key_type)[0], inspect.StrType):
        item, shape = _column(kind.value_type, f"{path}[]", outer)
        return T.MapType(T.StringType(), item, shape[0] == "optional"), ("dict", shape)
    if isinstance(kind, _OBJECTS) and not getattr(kind, "array_like", False) and id(kind) not in outer:
        struct, fields = T.StructType(), []
        for each in kind.fields:
            column, shape = _column(each.type, f"{path}.{each.encode_name}", (*outer, id(kind)))
            struct.add(each.encode_name, column)
            fields.append((each.encode_name, shape, *(() if each.required else (_default(each),))))
        return struct, ("object", fields)
    raise SettingError(f"{path} is of type {_name(kind)}, which has no equivalent in Spark")


def _default(field: inspect.Field) -> Any:
    """Return the value of a field that a reply lacks."""
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.to_builtins(field.default_factory(), builtin_types=_KEPT)
    if field.default is msgspec.NODEFAULT or field.default is msgspec.UNSET:  # of a TypedDict, or of a Struct
        return None
    return msgspec.to_builtins(field.default, builtin_types=_KEPT)


def _type_of(shape: Shape, name: str = "Value") -> Any:
    """Return a type whose values have this shape; it has a `name`, as msgspec tells types apart by theirs."""
    match shape:
        case "value", kind:
            return kind
        case "optional", inner:
            return Optional[_type_of(inner, name)]  # noqa: UP045 - the other form is for types only
        case "list", inner:
            return list[_type_of(inner, name)]  # type: ignore[misc]
        case "dict", inner:
            return dict[str, _type_of(inner, name)]  # type: ignore[misc]
    fields: list[Any] = []
    for at, (_, inner, *default) in enumerate(shape[1]):
        kind = _type_of(inner, f"{name}_{at}")
        values = [each if each is None else msgspec.convert(each, kind) for each in default]
        given = [msgspec.field(default_factory=partial(values.__getitem__, 0))] if default else []
        fields.append((f"f{at}", kind, *given))
    rename = {f"f{at}": sent for at, (sent, *_) in enumerate(shape[1])}  # which need not be valid in Python
    return msgspec.defstruct(name, fields, rename=rename, kw_only=True, gc=False)


@dataclass(frozen=True)
class ValueColumns:
    """Makes reply, code and error of rows, as arrays; Spark ships it to executors.

    A reply that has another shape is an error of its row.  The types themselves are not shipped: msgspec prevents that,
    and executors may not have the modules in which they are declared.
    """

    name: str
    """The service's."""
    shape: Shape
    column: pa.DataType

    def __call__(self, outcomes: Sequence[Outcome]) -> list[pa.Array]:
        """Return the arrays, made of `SLICE_ROWS` rows at a time."""
        others: dict[int, tuple[int | None, str | None]] = {}
        starts = range(0, len(outcomes) or 1, SLICE_ROWS)
        replies = pa.concat_arrays([self._replies(outcomes[at : at + SLICE_ROWS], at, others) for at in starts])
        rows = len(outcomes)
        if not others:
            return [replies, pa.repeat(pa.scalar(OK, pa.int32()), rows), pa.nulls(rows, pa.string())]
        codes, errors = zip(*[others.get(at, (OK, None)) for at in range(rows)], strict=True)
        return [replies, pa.array(codes, pa.int32()), pa.array(errors, pa.string())]

    def _replies(
        self, outcomes: Sequence[Outcome], first: int, others: dict[int, tuple[int | None, str | None]]
    ) -> pa.Array:
        """Return the replies of the rows from `first` on; add code and error of those without a value to `others`."""
        decode, shape = self._decode, self.shape
        try:
            values = [decode(reply) for (reply,) in outcomes]  # type: ignore[misc]
        except _NO_VALUE:  # find out which
            values, shape = [], ("optional", self.shape)
            for at, outcome in enumerate(outcomes, first):
                try:
                    (reply,) = outcome  # type: ignore[misc]
                    values.append(decode(reply))
                except _NO_VALUE:
                    values.append(None)
                    others[at] = self._without_value(outcome)
        try:
            return _array(values, shape, self.column)
        except (pa.ArrowException, OverflowError) as wrong:  # such as a number that is too large: find out which
            if len(outcomes) > 1:
                return pa.concat_arrays([self._replies([each], at, others) for at, each in enumerate(outcomes, first)])
            others[first] = int(Code.FAILED), f"the reply of service {self.name!r} does not fit: {wrong}"
            return pa.nulls(1, self.column)

    @cached_property
    def _service(self) -> AnyService:
        return Service(self.name, None, _type_of(self.shape))

    @cached_property
    def _decode(self) -> Callable[[bytes], Any]:
        return bytes if self._service.reply.raw else msgspec.json.Decoder(self._service.reply.kind).decode

    def _without_value(self, outcome: Outcome) -> tuple[int | None, str | None]:
        """Return code and error of a row that has no value: it was not sent, has failed, or its reply does not fit."""
        reply, code, error = answer(outcome, "binary")
        try:  # for an error that names the service; or the reply is empty, which is None
            if isinstance(reply, bytes):
                self._service.decode_reply([reply])
        except CodecError as wrong:
            return int(Code.FAILED), str(wrong)
        return code, error


def _array(values: Sequence[Any], shape: Shape, column: pa.DataType) -> pa.Array:
    """Return values of this shape as an array, made field by field: Arrow takes several times as long row by row."""
    if not values:
        return pa.array([], column)
    match shape:
        case ("value", kind) | ("optional", ("value", kind)) if kind is not UUID:
            return pa.array(values, column)
        case "value", _:
            return pa.array(msgspec.to_builtins(values), column)
        case "optional", inner:
            found = _array([each for each in values if each is not None], inner, column)
            if len(found) == len(values):
                return found
            places = count()
            return found.take(pa.array([None if each is None else next(places) for each in values], pa.int64()))
        case "list", inner:
            items = _array(list(chain.from_iterable(values)), inner, column.value_type)
            return pa.ListArray.from_arrays(_offsets(values), items, column)
        case "dict", inner:
            keys = pa.array(list(chain.from_iterable(values)), column.key_type)
            items = _array(list(chain.from_iterable(map(dict.values, values))), inner, column.item_type)
            return pa.MapArray.from_arrays(_offsets(values), keys, items, column)
    arrays = []
    for each, (_, inner, *default), part in zip(zip(*map(astuple, values), strict=True), shape[1], column, strict=True):
        lacking = default == [None] and inner[0] != "optional"
        arrays.append(_array(each, ("optional", inner) if lacking else inner, part.type))
    return pa.Array.from_buffers(column, len(values), [None], 0, children=arrays)


def _offsets(values: Sequence[Any]) -> pa.Array:
    return pa.array(list(accumulate(map(len, values), initial=0)), pa.int32())


# ── types ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _without_metadata(kind: inspect.Type) -> inspect.Type:
    return _without_metadata(kind.type) if isinstance(kind, inspect.Metadata) else kind


def _optional(kind: inspect.Type) -> tuple[inspect.Type, bool]:
    """Return the type of the values that are not None, and whether None is allowed."""
    kind = _without_metadata(kind)
    if not isinstance(kind, inspect.UnionType):
        return kind, False
    others = [_without_metadata(each) for each in kind.types if not isinstance(each, inspect.NoneType)]
    if {type(each) for each in others} == {inspect.IntType, inspect.FloatType}:
        return inspect.FloatType(), kind.includes_none
    return (others[0] if len(others) == 1 else kind), kind.includes_none


def _values(kind: inspect.EnumType | inspect.LiteralType) -> Sequence[Any]:
    return [each.value for each in kind.cls] if isinstance(kind, inspect.EnumType) else kind.values


def _name(kind: inspect.Type) -> str:
    """Return the name of a type as people write it."""
    kind = _without_metadata(kind)
    if isinstance(kind, inspect.UnionType):
        return " | ".join(map(_name, kind.types))
    found = getattr(kind, "cls", None)
    return show(found) if found is not None else type(kind).__name__.removesuffix("Type").lower()
