"""Values of a declared type: converted to a frame and back, validated, and described by a JSON schema.

msgspec does the work: it knows dataclasses, TypedDicts, Structs, attrs classes, enums, dates, UUIDs, bytes and unions.
Dataclasses in unions get a tag (unions.py), and Pydantic reads and writes what is its own (models.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from enum import Flag
from functools import lru_cache
from typing import Any, Final, Protocol

import msgspec

from ..builtin_values import TEXTS, as_builtin
from ..errors import CodecError, SettingError, flaw
from .json_schemas import RAW
from .misfits import Misfit, check_fields, check_keys, problem_in, refused_union
from .models import Adapter, adapter_of, is_of_pydantic
from .type_parts import is_model, parts, show
from .unions import Tagging, unions_in

CODECS: Final[Mapping[str, Any]] = {"json": msgspec.json, "msgpack": msgspec.msgpack}
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_BASES: Final[Mapping[type, str]] = {str: "string", int: "integer", float: "number"}
"""Types of whose subclasses values can be made, and their names in JSON schemas."""


class ValueType:
    """A type whose values fit into one frame.

    A value of type `bytes` is the frame itself, with either codec.  An empty frame stands for None.

    Args:
        kind: Any type that msgspec or Pydantic knows; `Any` for plain values.
        codec: `"json"` or `"msgpack"`.

    Raises `SettingError` for a type whose values cannot be sent, or would not come back as they were.
    """

    def __init__(self, kind: Any, codec: str = "json") -> None:
        if codec not in CODECS:
            raise SettingError(f"codec is {codec!r}: a service with types has one of {', '.join(CODECS)}")
        self.kind = type(None) if kind is None else kind
        self.codec = codec
        self.raw = kind is bytes
        """Whether the value is the frame itself."""
        try:
            self._conversion = conversion = _conversion_of(self.kind, codec)
            self._schema = dict(RAW) if self.raw else conversion.schema()
        except (TypeError, NotImplementedError, NameError, SyntaxError) as error:  # the last: annotations as text
            raise SettingError(f"values of type {show(kind)} cannot be sent: {error}") from None
        self._encode, self._decode = conversion.encode, conversion.decode
        self.nothing = [b"" if self.raw else CODECS[codec].encode(None)]
        """The frame with which a stream ends that has no last value."""

    def encode(self, value: Any) -> list[bytes]:
        """Return the frame of `value`.  Raises `CodecError`."""
        try:
            if self.raw:
                return [bytes(memoryview(value))]
            return [self._encode(value)]
        except Exception as error:  # whatever a value's own methods raise
            raise CodecError(f"{_shown(value)} cannot be sent as {self.codec}: {error}") from error

    def decode(self, frames: Sequence[bytes]) -> Any:
        """Return the value in `frames`.  Raises `Misfit` if it is of another type, `CodecError` if it is unreadable."""
        if len(frames) != 1:
            raise CodecError(f"expected one value, got {len(frames)} frames")
        frame = frames[0]
        if self.raw:
            return frame
        try:
            return self._decode(frame) if frame else self._conversion.convert(None)
        except msgspec.ValidationError as error:
            raise Misfit(problem_in(error)) from None
        except _UNREADABLE as error:
            raise CodecError(f"the body cannot be read as {self.codec}: {flaw(error)}") from None

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the values."""
        return self._schema


def converted(value: Any, kind: Any) -> Any:
    """Return a decoded value as one of type `kind`.

    Raises `Misfit`, `CodecError` if the type's own methods fail, and `TypeError` or `NotImplementedError` if it is none
    of those that values are converted to.
    """
    return _made(_conversion_of(kind, "json").convert, value, kind)


def read(text: bytes, kind: Any) -> Any:
    """Return JSON as a value of type `kind`, from numbers with all their digits.  Raises as `converted`."""
    return _made(_conversion_of(kind, "json").decode, text, kind)


def _made(make: Callable[[Any], Any], value: Any, kind: Any) -> Any:
    try:
        return make(value)
    except msgspec.ValidationError as error:
        raise Misfit(problem_in(error)) from None
    except (CodecError, TypeError, NotImplementedError):
        raise  # the latter two: this type is none of those that values are converted to
    except Exception as error:  # whatever a value's own methods raise
        raise CodecError(f"no value of type {show(kind)} can be made: {type(error).__name__}: {error}") from error


def _shown(value: Any) -> str:
    """Return how a value looks; if it cannot even be shown, its type."""
    try:
        return f"{value!r:.100}"
    except Exception:  # noqa: BLE001 - its own methods may be what is wrong with it
        return f"a value of type {show(type(value))}"


# ── who converts ─────────────────────────────────────────────────────────────────────────────────────────────────────


class _Conversion(Protocol):
    """Converts the values of one type."""

    def encode(self, value: Any, /) -> bytes:
        """Return the frame of a value."""

    def decode(self, frame: bytes, /) -> Any:
        """Return the value in a frame."""

    def convert(self, value: Any, /) -> Any:
        """Return a decoded value as one of the type."""

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema."""


def _conversion_of(kind: Any, codec: str) -> _Conversion:
    """Return what converts values.  Raises `TypeError`, `NotImplementedError`, `NameError`, `SyntaxError`."""
    try:
        hash(kind)
    except TypeError:  # metadata of `Annotated`
        return _new_conversion(kind, codec, "")
    return _kept_conversion(kind, codec, repr(kind))  # unions are equal in any order, in which Pydantic tries them


def _new_conversion(kind: Any, codec: str, _shown: str) -> _Conversion:
    outside_models = [each for each in parts(kind, inside_models=False) if is_of_pydantic(each)]
    if is_model(kind) or not all(map(is_model, outside_models)):
        return _Pydantic(kind, codec)
    try:
        check_fields(kind)
        check_keys(kind, codec, made_from_texts=False)
        unions = unions_in(kind)
        return _Tagged(kind, codec, unions) if unions else _Plain(kind, codec)
    except TypeError:
        if outside_models:  # a union, for example, of which msgspec knows less
            return _Pydantic(kind, codec)
        raise


_kept_conversion = lru_cache(maxsize=256)(_new_conversion)


class _Plain:
    """Conversion by msgspec, whose hooks know some types more."""

    def __init__(self, kind: Any, codec: str) -> None:
        self._kind = kind
        module = CODECS[codec]
        self.encode = module.Encoder(enc_hook=_to_json if codec == "json" else _to_builtin).encode
        try:
            self.decode = module.Decoder(kind, dec_hook=_from_builtin).decode
        except TypeError as error:
            raise TypeError(refused_union(kind) or str(error)) from None

    def convert(self, value: Any) -> Any:
        return msgspec.convert(value, self._kind, dec_hook=_from_builtin)

    def schema(self) -> dict[str, Any]:
        return _schema(self._kind)


class _Tagged:
    """Conversion of a type in which there are unions of dataclasses."""

    def __init__(self, kind: Any, codec: str, unions: Sequence[tuple[type, ...]]) -> None:
        self._tagging = Tagging(kind, unions)
        self._plain = _Plain(self._tagging.kind, codec)
        self.schema = self._plain.schema

    def encode(self, value: Any) -> bytes:
        frame: bytes = self._plain.encode(self._tagging.to_wire(value))
        return frame

    def decode(self, frame: bytes) -> Any:
        return self._made(self._plain.decode(frame))

    def convert(self, value: Any) -> Any:
        return self._made(self._plain.convert(value))

    def _made(self, value: Any) -> Any:
        try:
            return self._tagging.from_wire(value)
        except (TypeError, ValueError) as error:  # as msgspec has it, if the dataclass itself refuses its values
            raise Misfit(f"$: {error}") from None


class _Pydantic:
    """Conversion by Pydantic; in MessagePack, a value consists of what it would be in JSON."""

    def __init__(self, kind: Any, codec: str) -> None:
        self._packed = codec == "msgpack"
        self._adapter = adapter_of(kind) if is_model(kind) else Adapter(kind)

    def encode(self, value: Any) -> bytes:
        text = self._adapter.write(value)
        packed: bytes = msgspec.msgpack.encode(msgspec.json.decode(text)) if self._packed else text
        return packed

    def decode(self, frame: bytes) -> Any:
        if self._packed:
            return self.convert(msgspec.msgpack.decode(frame))
        msgspec.json.decode(frame, type=msgspec.Raw)  # Pydantic accepts what is not JSON, such as NaN
        return self._adapter.read(frame)

    def convert(self, value: Any) -> Any:
        return self._adapter.read(msgspec.json.encode(value, enc_hook=as_builtin))

    def schema(self) -> dict[str, Any]:
        return _without_odd_defaults(self._adapter.schema)


# ── msgspec's hooks for types that it does not know ──────────────────────────────────────────────────────────────────


def _to_json(value: Any) -> Any:
    kind: Any = type(value)
    return msgspec.Raw(adapter_of(kind).write(value)) if is_model(kind) else as_builtin(value)


def _to_builtin(value: Any) -> Any:
    kind: Any = type(value)
    return msgspec.json.decode(adapter_of(kind).write(value)) if is_model(kind) else as_builtin(value)


def _from_builtin(kind: Any, value: Any) -> Any:
    """Return a value of a type that msgspec does not know.  It adds to the text of a ValueError where the value is."""
    if is_model(kind):
        try:
            return adapter_of(kind).read(msgspec.json.encode(value))
        except Misfit as error:
            raise ValueError(str(error).removeprefix("$").removeprefix(": ")) from None
    base = str if issubclass(kind, tuple(TEXTS)) else next((each for each in _BASES if issubclass(kind, each)), None)
    if base is None:
        raise NotImplementedError
    if type(value) is not base and not (base is float and type(value) is int):
        raise ValueError(f"expected {base.__name__}, got {type(value).__name__}")
    return kind(value)


def _schema_of(kind: Any, inner: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type that msgspec does not know, and add the definitions to which it refers."""
    if is_model(kind):
        schema = dict(adapter_of(kind).schema)
        inner.update(schema.pop("$defs", {}))  # its references point to the root, where msgspec's are too
        return schema
    for base, form in TEXTS.items():
        if isinstance(kind, type) and issubclass(kind, base):
            return {"type": "string", "format": form}
    for base, name in _BASES.items():
        if isinstance(kind, type) and issubclass(kind, base):
            return {"type": name}
    raise TypeError(f"{show(kind)} is unknown to msgspec: {_INSTEAD}")


_INSTEAD: Final = "use builtin types, dataclasses, or models of Pydantic"


def _schema(kind: Any) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    schema = msgspec.json.schema(kind, schema_hook=lambda each: _schema_of(each, inner))
    if inner:
        schema["$defs"] = {**inner, **schema.get("$defs", {})}
    flags = {each.__name__ for each in parts(kind) if isinstance(each, type) and issubclass(each, Flag)}
    for name in flags & schema.get("$defs", {}).keys():  # msgspec names the single flags only
        schema["$defs"][name] = {"title": name, "type": "integer"}
    return _without_odd_defaults(schema)


def _without_odd_defaults(schema: dict[str, Any]) -> dict[str, Any]:
    _leave_out_defaults(schema)
    return schema


def _leave_out_defaults(schema: Any) -> None:
    """Remove the defaults that are not JSON, which has no infinity, for example."""
    for each in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _leave_out_defaults(each)
    if isinstance(schema, dict) and "default" in schema:
        try:
            json.dumps(schema["default"], allow_nan=False)
        except (TypeError, ValueError):
            del schema["default"]
