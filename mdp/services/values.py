"""Values of a declared type: converted to a frame and back, validated, and described by a JSON schema.

msgspec does the work: it knows dataclasses, TypedDicts, Structs, attrs classes, enums, dates, UUIDs, bytes and unions.
Models of Pydantic, recognized by their methods, validate themselves.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from ..errors import CodecError, SettingError, flaw
from .schemas import RAW

CODECS: Final[Mapping[str, Any]] = {"json": msgspec.json, "msgpack": msgspec.msgpack}
_PATH: Final = re.compile(r"(.*) - at `([^`]*)`", re.DOTALL)
_INNER_PATH: Final = re.compile(r"([.\[][^ ]*): (.*)", re.DOTALL)


class Misfit(CodecError):
    """A value is readable but is not of the declared type; the text says where: `$.width: expected int, got str`."""


class ValueType:
    """A type whose values fit into one frame.

    A value of type `bytes` is the frame itself, with either codec.  An empty frame stands for None.

    Args:
        kind: Any type that msgspec knows, or a model of Pydantic; `Any` for plain values.
        codec: `"json"` or `"msgpack"`.

    Raises `SettingError` for a type whose values cannot be sent.
    """

    def __init__(self, kind: Any, codec: str = "json") -> None:
        if codec not in CODECS:
            raise SettingError(f"codec is {codec!r}: a service with types has one of {', '.join(CODECS)}")
        self.kind = type(None) if kind is None else kind
        self.codec = codec
        self.raw = kind is bytes
        """Whether the value is the frame itself."""
        module = CODECS[codec]
        try:
            self._schema = dict(RAW) if self.raw else _schema(self.kind)
            self._encoder = module.Encoder(enc_hook=_to_builtin)
            self._decoder = module.Decoder(self.kind, dec_hook=_from_builtin)
        except (TypeError, NotImplementedError, NameError, SyntaxError) as error:  # the last: annotations as text
            raise SettingError(f"values of type {show(kind)} cannot be sent: {error}") from None

        self.nothing = [b"" if self.raw else self._encoder.encode(None)]
        """The frame with which a stream ends that has no last value."""

    def encode(self, value: Any) -> list[bytes]:
        """Return the frame of `value`.  Raises `CodecError`."""
        try:
            if self.raw:
                return [bytes(memoryview(value))]
            return [self._encoder.encode(value)]
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
            return self._decoder.decode(frame) if frame else msgspec.convert(None, self.kind)
        except msgspec.ValidationError as error:
            raise Misfit(problem_in(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise CodecError(f"the body cannot be read as {self.codec}: {flaw(error)}") from None

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of the values."""
        return self._schema


def converted(value: Any, kind: Any) -> Any:
    """Return a decoded value as one of type `kind`.

    Raises `Misfit`, `CodecError` if the type's own methods fail, and `TypeError` or `NotImplementedError` if it is none
    of those that values are converted to.
    """
    try:
        return msgspec.convert(value, kind, dec_hook=_from_builtin)
    except msgspec.ValidationError as error:
        raise Misfit(problem_in(error)) from None
    except (TypeError, NotImplementedError):
        raise  # this type is none of those that values are converted to
    except Exception as error:  # whatever a value's own methods raise
        raise CodecError(f"no value of type {show(kind)} can be made: {type(error).__name__}: {error}") from error


def show(kind: Any) -> str:
    """Return the name of a type as people write it."""
    return str(getattr(kind, "__qualname__", None) or kind).replace("typing.", "")


def _shown(value: Any) -> str:
    """Return how a value looks; if it cannot even be shown, its type."""
    try:
        return f"{value!r:.100}"
    except Exception:  # noqa: BLE001 - its own methods may be what is wrong with it
        return f"a value of type {show(type(value))}"


def problem_in(error: msgspec.ValidationError) -> str:
    """Return what msgspec says about a value, the path first."""
    text = str(error)
    found = _PATH.fullmatch(text)
    path, text = (found[2], found[1]) if found else ("$", text)
    if inner := _INNER_PATH.fullmatch(text):  # a model's own path, inside of msgspec's
        path, text = path + inner[1], inner[2]
    return f"{path}: {text[:1].lower()}{text[1:]}".replace("`", "")


# ── models of Pydantic ───────────────────────────────────────────────────────────────────────────────────────────────


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and hasattr(kind, "model_validate") and hasattr(kind, "model_json_schema")


# msgspec's hooks for types that it does not know: NotImplementedError says that they do not know them either.


def _to_builtin(value: Any) -> Any:
    if _is_model(type(value)):
        return value.model_dump(mode="json")
    raise NotImplementedError(f"type {show(type(value))} is not supported")


def _from_builtin(kind: Any, value: Any) -> Any:
    if not _is_model(kind):
        raise NotImplementedError
    try:
        return kind.model_validate(value)
    except ValueError as error:
        details: Any = getattr(error, "errors", None)
        if details is None:  # not Pydantic's own
            raise
        first = details(include_url=False)[0]
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise ValueError(f"{path}: {first['msg']}" if path else first["msg"]) from None


def _schema(kind: Any) -> dict[str, Any]:
    inner: dict[str, Any] = {}

    def of_model(model: Any) -> dict[str, Any]:
        if not _is_model(model):
            raise NotImplementedError
        schema: dict[str, Any] = model.model_json_schema()
        inner.update(schema.pop("$defs", {}))  # its references point to the root, where msgspec's are too
        return schema

    schema = msgspec.json.schema(kind, schema_hook=of_model)
    if inner:
        schema["$defs"] = {**inner, **schema.get("$defs", {})}
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
