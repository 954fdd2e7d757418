"""Types of Pydantic: models, its dataclasses, its own types, and constraints such as `Annotated[int, Field(gt=0)]`.

Pydantic reads and writes them, by its `TypeAdapter`, always as JSON, and writes a value as it is read again: by alias,
and without computed fields.  A type whose values would not come back unchanged is refused.
"""

import dataclasses
import importlib
import sys
from collections.abc import Iterable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from typing import Any, Final, get_args, get_origin
from uuid import UUID

import msgspec

from ..errors import CodecError
from .misfits import Misfit, check_keys
from .type_parts import arguments_of, bare, fields_of, is_model, is_union, parts, show

_PACKAGES: Final = frozenset({"pydantic", "pydantic_core", "annotated_types"})
"""The packages whose types and metadata Pydantic understands."""
_HOOK: Final = "__get_pydantic_core_schema__"
"""The method by which classes tell Pydantic about their values."""
_TEXTS: Final = (str, bytes, datetime, date, time, timedelta, Decimal, UUID, PurePath)
"""Types whose values JSON has as texts."""
_MASK: Final = "**********"
"""How Pydantic writes secrets."""
_UNMASKED: Final = "declare it as str, or write its value with @field_serializer"
_BASE64: Final = 'set model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")'


def is_of_pydantic(part: Any) -> bool:
    """Return whether a part of a type is something that Pydantic understands, and msgspec does not."""
    if is_model(part):
        return True
    kind = get_origin(part) or part
    if not isinstance(kind, type):
        kind = type(part)
    if any(base.__module__.partition(".")[0] in _PACKAGES for base in kind.__mro__) or hasattr(kind, _HOOK):
        return True
    module = sys.modules.get("pydantic.dataclasses")
    return module is not None and module.is_pydantic_dataclass(kind)


class Adapter:
    """Reads and writes the values of one type.

    Raises `TypeError` if Pydantic does not know it, or would change values.
    """

    def __init__(self, kind: Any) -> None:
        pydantic = _pydantic(kind)
        try:
            _check(kind)
            self._adapter = pydantic.TypeAdapter(kind)
            self.schema: dict[str, Any] = self._adapter.json_schema()
        except (pydantic.PydanticUserError, pydantic.PydanticUndefinedAnnotation) as error:
            raise TypeError(_unknown(kind) or str(error)) from None
        self._error: type[ValueError] = pydantic.ValidationError

    def write(self, value: Any) -> bytes:
        """Return a value as JSON.  One of another type is written as well as possible: its reader refuses it."""
        written: bytes = self._adapter.dump_json(value, by_alias=True, round_trip=True, warnings=False)
        return written

    def read(self, text: bytes) -> Any:
        """Return the value in JSON.  Raises `Misfit`, and what the type's own methods raise."""
        try:
            return self._adapter.validate_json(text)
        except self._error as error:
            details: Any = error
            first = details.errors(include_url=False, include_context=False, include_input=False)[0]
        problem = str(first["msg"])
        if first["type"] == "json_invalid":
            raise CodecError(f"the body cannot be read as json: {problem}")
        path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise Misfit(f"${path}: {problem[:1].lower()}{problem[1:]}")


@lru_cache(maxsize=256)
def adapter_of(model: Any) -> Adapter:
    """Return the adapter of a model.  Raises `TypeError`."""
    return Adapter(model)


def _pydantic(kind: Any) -> Any:
    try:
        return importlib.import_module("pydantic")
    except ImportError:
        raise TypeError(f"{show(kind)} needs Pydantic: pip install pydantic") from None


def _unknown(kind: Any) -> str:
    """Return what Pydantic does not know, if it is what msgspec alone knows."""
    for part in parts(kind):
        if (isinstance(part, type) and issubclass(part, msgspec.Struct)) or hasattr(part, "__attrs_attrs__"):
            return f"Pydantic checks what it contains, but does not know {show(part)}: make that a dataclass or a model"
    return ""


# ── what would be changed ────────────────────────────────────────────────────────────────────────────────────────────


def _check(kind: Any) -> None:
    """Raise `TypeError` if values of a type would not come back as they were."""
    _check_leaves(None, "", [kind])
    check_keys(kind, "json", made_from_texts=True)
    for part in parts(kind):
        if is_union(part):
            _check_union(part)
        if fields := fields_of(part):
            owner = get_origin(part) or part
            _check_names(owner)
            for name, kinds in fields.items():
                _check_leaves(owner, name, kinds)


def _check_names(owner: Any) -> None:
    """Check that each field is written under a name under which it is read."""
    for name, written, read in _names_of_model(owner) if is_model(owner) else _names_of_dataclass(owner):
        field = f"{name} of {show(owner)}"
        if written is None:
            raise TypeError(f"{field} is excluded from what is sent, and would be lost: remove exclude=True")
        if written != read:
            elsewhere = repr(read) if read else "part of another field"
            raise TypeError(f"{field} is sent as {written!r}, but read as {elsewhere}: give it one alias=… for both")


def _names_of_model(model: Any) -> Iterator[tuple[str, str | None, str]]:
    """Yield the name of each field, that under which it is written, and that under which its schema says it is read."""
    by_alias = model.model_config.get("validate_by_alias", True)
    for name, field in model.model_fields.items():
        aliases = getattr(field.validation_alias, "choices", [field.validation_alias]) if by_alias else [None]
        read = [name if each is None else each for each in aliases if each is None or isinstance(each, str)]
        yield name, None if field.exclude else field.serialization_alias or name, read[0] if read else ""


def _names_of_dataclass(owner: Any) -> Iterator[tuple[str, str | None, str]]:
    """Yield the same for a dataclass of Pydantic, as far as its schemas tell."""
    if not is_of_pydantic(owner):
        return
    adapter = _pydantic(owner).TypeAdapter(owner)
    read, written = (
        [name for name, field in _root(adapter.json_schema(mode=mode)).items() if not field.get("readOnly")]
        for mode in ("validation", "serialization")
    )
    yield from ((name, None, name) for name in read if len(written) < len(read) and name not in written)
    yield from ((new, old, new) for new, old in zip(read, written, strict=False))


def _root(schema: Any) -> Any:
    if "$ref" in schema:
        schema = schema["$defs"][schema["$ref"].rpartition("/")[2]]
    return schema.get("properties", {})


def _check_leaves(owner: Any, name: str, kinds: Iterable[Any]) -> None:
    """Check the types of a field that are not classes with fields of their own."""
    pydantic = _pydantic(owner)
    leaves = list(_leaves(kinds))
    serializers = (pydantic.PlainSerializer, pydantic.WrapSerializer, pydantic.EncodedBytes)
    if any(isinstance(each, serializers) for each in leaves):
        return  # it is written as somebody wants
    secrets = (pydantic.SecretStr, pydantic.SecretBytes, *((pydantic.Secret,) if hasattr(pydantic, "Secret") else ()))
    for leaf in leaves:
        kind = get_origin(leaf) or leaf
        if not isinstance(kind, type):
            continue
        field = f"{name} of {show(owner)}" if owner is not None else "it"
        if issubclass(kind, secrets) and not _is_written(owner, name, kind("probe")):
            raise TypeError(f"{field} is a {show(leaf)}, which Pydantic writes as asterisks: {_UNMASKED}")
        if issubclass(kind, bytes | bytearray) and not _survives(owner, name):
            raise TypeError(f"{field} has bytes, which Pydantic writes as UTF-8: {_BASE64}, or declare Base64Bytes")


def _leaves(kinds: Iterable[Any]) -> Iterator[Any]:
    for each in kinds:
        if not fields_of(each):
            yield each
        yield from _leaves(arguments_of(each))


def _survives(owner: Any, name: str) -> bool:
    """Return whether bytes come back as they were."""
    config = getattr(owner, "model_config" if is_model(owner) else "__pydantic_config__", {})
    written, read = config.get("ser_json_bytes", "utf8"), config.get("val_json_bytes", "utf8")
    if (written, read) != ("utf8", "utf8"):
        return bool(written == read)
    return _is_written(owner, name, b"\xff")


def _is_written(owner: Any, name: str, value: Any) -> bool:
    """Return whether a model has a serializer that writes such a value, unmasked."""
    if not is_model(owner):
        return False
    field = owner.model_fields[name]
    alias = field.validation_alias
    kind = bare(field.annotation)
    for each in get_args(kind) if is_union(kind) else [kind]:
        origin = get_origin(each) or each
        sample: Any = value
        if isinstance(origin, type) and not isinstance(value, origin):
            if each is type(None):
                continue
            sample = {"probe": value} if issubclass(origin, dict) else [value]
        try:
            made = owner.model_construct(**{alias if isinstance(alias, str) else name: sample})
            written = made.model_dump(mode="json", include={name}, by_alias=True, round_trip=True, warnings=False)
        except Exception:  # noqa: BLE001 - also what a serializer raises that expects something else
            return False
        if not written or _MASK in str(written):
            return False
    return True


# ── unions ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _check_union(union: Any) -> None:
    """Check that no value of a union arrives as one of another of its types."""
    if any(isinstance(each, _pydantic(union).Tag) for kind in get_args(union) for each in arguments_of(kind)):
        return  # a function tells them apart
    kinds = [bare(each) for each in get_args(union)]
    if len(texts := [each for each in kinds if _is_text(each)]) > 1:
        names = ", ".join(map(show, texts))
        raise TypeError(f"a union has several types that are texts in JSON, {names}: declare one of them")
    classes = [each for each in kinds if fields_of(each)]
    for number, kind in enumerate(classes):
        for earlier in classes[:number]:
            if _is_taken_for(kind, earlier):
                raise TypeError(
                    f"values of {show(kind)} in a union would be taken for {show(earlier)}: give each of them a field "
                    'such as kind: Literal["card"] = "card"'
                )


def _is_text(kind: Any) -> bool:
    if isinstance(kind, type) and issubclass(kind, Enum):
        return any(isinstance(each.value, str) for each in kind)
    return isinstance(kind, type) and issubclass(kind, _TEXTS)


def _is_taken_for(kind: Any, other: Any) -> bool:
    """Return whether whatever values of a class have is enough for another class, of which they have nothing less."""
    own, others = fields_of(kind), fields_of(other)
    fits = all(name in others and kinds == others[name] for name, kinds in own.items())
    return fits and not any(_is_required(other, name) for name in others.keys() - own.keys())


def _is_required(kind: Any, name: str) -> bool:
    kind = get_origin(kind) or kind
    if is_model(kind):
        return bool(kind.model_fields[name].is_required())
    if dataclasses.is_dataclass(kind):
        defaults = {each.name: (each.default, each.default_factory) for each in dataclasses.fields(kind)}
        return defaults.get(name) == (dataclasses.MISSING, dataclasses.MISSING)
    return name in getattr(kind, "__required_keys__", ())
