"""Python code for callers of services, written from the workers' descriptions: dataclasses and `Service` objects.

What workers say is untrusted: names in the code are identifiers, and everything else is in literals, so that nothing
of it is run.
"""

import inspect
import json
import keyword
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ...mdp.errors import CodecError
from ...mdp.services import Description
from ...mdp.services.json_schemas import RAW, REFERENCE, Schema, definitions

_SIMPLE: Final[Mapping[str, str]] = {
    "string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None", "object": "dict[str, Any]",
    "array": "list[Any]",
}  # fmt: skip
_FORMATS: Final[Mapping[str, str]] = {
    "date-time": "datetime.datetime", "date": "datetime.date", "time": "datetime.time",
    "duration": "datetime.timedelta", "uuid": "uuid.UUID", "decimal": "decimal.Decimal",
}  # fmt: skip
_TYPING: Final = ("Any", "Literal", "NotRequired", "TypedDict", "cast")
_RESERVED: Final = {
    *_TYPING, "datetime", "decimal", "uuid", "msgspec", "dataclass", "field", "Service", "Streaming", "annotations",
    "str", "int", "float", "bool", "bytes", "dict", "list", "tuple",
}  # fmt: skip
"""Names that the code uses."""
MAX_TYPES: Final = 10_000
"""Maximum number of types in the code of one schema, which may nest them; further ones are `Any`."""
LINE: Final = 88
"""The length of lines that Black and ruff format by default."""
_TYPE: Final = re.compile(r"(?!Any$)[\w.]+|(?:dict|list|tuple)\[[^|]*\]")
"""The expressions that a type checker accepts as a `type`."""


def stub(descriptions: Sequence[Description]) -> str:
    """Return a module with these services and their types.  Raises `CodecError` if workers do not tell the types."""
    for each in descriptions:
        if not each.about.codec:
            text = f"the workers of {each.service!r} do not tell its types: it takes frames, or they are too large"
            raise CodecError(text)
    code = _Code()
    requests = [code.type_of(each.service, each.about.request, sent=True) for each in descriptions]
    replies = [code.type_of(each.service, each.about.part or each.about.reply, sent=False) for each in descriptions]
    services = [code.service(*row) for row in zip(descriptions, requests, replies, strict=True)]
    head = '"""Services and their types, written by `mdclient stub`."""\n\nfrom __future__ import annotations\n\n'
    return "\n\n\n".join([head + _imports(code.used), *code.classes(), "\n".join(services)]) + "\n"


def types(description: Description) -> str:
    """Return the types of a service as code: its classes, and comments about its request and reply."""
    about, code, lines = description.about, _Code(), []
    for title, schema in (("request", about.request), ("reply", about.reply), ("part", about.part)):
        if schema is not None:
            lines.append(f"{title + ':':8} {code.type_of(description.service, schema, sent=title == 'request')}")
    return "\n\n".join(["\n".join(lines), *code.classes()])


class _Code:
    """The classes of a module, and the names that are taken."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}
        """The content of each name: for a class, the JSON of all that it consists of."""
        self._classes: dict[str, str] = {}
        self.used: set[str] = set()
        """The names that have to be imported, and others."""

    def classes(self) -> list[str]:
        """Return the code of all classes."""
        return list(self._classes.values())

    def type_of(self, service: str, schema: Schema | None, *, sent: bool) -> str:
        """Return the type of the values of a service; `sent` if callers send them, and so may leave fields out."""
        return _Types(self, service, schema or {}, sent=sent).root()

    def service(self, described: Description, request: str, reply: str) -> str:
        """Return the statement that makes a service."""
        about, given = described.about, described.service
        kind = "Service" if about.part is None else "Streaming"
        name = self.free_name(given.rpartition(".")[2], given, content=given)
        arguments = [self._argument(each) for each in (request, reply)]
        settings = {**({} if about.codec == "json" else {"codec": about.codec}), **about.submission}
        keywords = [f"{setting}={_quoted(value)}" for setting, value in settings.items()]
        self.used.add(kind)
        made = _call(f"{name}: {kind}[{request}, {reply}] = {kind}", [_quoted(given), *arguments, *keywords])
        return made + _documented(about.description)

    def _argument(self, kind: str) -> str:
        """Return a type as an argument of `Service`."""
        if _TYPE.fullmatch(kind):
            return kind
        self.used |= {"cast", "Any"}
        return f"cast(Any, {kind})"

    def free_name(self, wanted: str, otherwise: str, *, content: str) -> str:
        """Return an identifier like `wanted`, or `otherwise`, that is free or stands for the same content."""
        name = _identifier(wanted)
        if self._names.get(name, content) != content:
            name = _identifier(otherwise)
        while self._names.setdefault(name, content) != content:
            name += "_"
        return name

    def add(self, name: str, code: str) -> None:
        """Add a class."""
        self._classes[name] = code

    def has(self, name: str) -> bool:
        """Return whether there is a class of that name."""
        return name in self._classes


class _Types:
    """Writes the types of one schema, and the classes that it defines."""

    def __init__(self, code: _Code, service: str, schema: Schema, *, sent: bool) -> None:
        self._code = code
        self._service = service
        self._schema = schema
        self._sent = sent
        self._defined = definitions(schema)
        self._tags: dict[str, tuple[str, Any]] = {}
        """The field and the value by which a class in a union is told from the others, by definition."""
        self._find_tags(schema)
        self._inlined: list[str] = []
        """The definitions without a class of which the current type is a part."""
        self._left = MAX_TYPES

    def root(self) -> str:
        """Return the type of the whole schema."""
        return self._type({name: value for name, value in self._schema.items() if name != "$defs"})

    def _find_tags(self, value: Any) -> None:
        for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            self._find_tags(each)
        told = value.get("discriminator") if isinstance(value, dict) else None
        if isinstance(told, dict) and isinstance(told.get("mapping"), dict):
            for tag, reference in told["mapping"].items():
                self._tags[str(reference).removeprefix(REFERENCE)] = str(told.get("propertyName")), tag

    def _type(self, schema: Any) -> str:
        self._left -= 1
        kind = self._expression(schema) if self._left >= 0 else "Any"
        self._code.used.update(re.findall(r"\w+", kind))
        return kind

    def _expression(self, schema: Any) -> str:
        if not isinstance(schema, dict):
            return "Any"
        reference, kind = schema.get("$ref"), schema.get("type")
        if isinstance(reference, str):
            name = reference.removeprefix(REFERENCE)
            return self._named(name, self._defined.get(name))
        if isinstance(options := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
            literal = all(each is None or isinstance(each, str | int) for each in options) and options
            return f"Literal[{', '.join(map(_quoted, options))}]" if literal else "Any"
        for name in ("anyOf", "oneOf", "allOf"):
            if isinstance(options := schema.get(name), list):
                return self._union(options, tagged="discriminator" in schema)
        if isinstance(kind, list):
            return self._union([{**schema, "type": each} for each in kind])
        if "contentEncoding" in schema or schema.get("contentMediaType") == RAW["contentMediaType"]:
            return "bytes"
        if kind == "object" and isinstance(schema.get("properties"), dict):
            return self._named(str(schema.get("title", "Value")), schema)
        return self._plain(schema, str(kind))

    def _plain(self, schema: dict[str, Any], kind: str) -> str:
        """Return the type for a schema that is neither a union nor a class."""
        if kind == "array" and isinstance(items := schema.get("prefixItems"), list):
            return f"tuple[{', '.join(map(self._type, items)) or '()'}]"
        if kind == "array" and "items" in schema:
            return f"list[{self._type(schema['items'])}]"
        if kind == "object" and isinstance(values := schema.get("additionalProperties"), dict):
            return f"dict[str, {self._type(values)}]"
        return _FORMATS.get(str(schema.get("format")), _SIMPLE.get(kind, "Any"))

    def _union(self, options: Iterable[Any], *, tagged: bool = False) -> str:
        kinds = list(dict.fromkeys(map(self._type, options)))
        if not tagged and sum(map(self._code.has, kinds)) > 1:  # msgspec could not tell them apart
            kinds = list(dict.fromkeys("dict[str, Any]" if self._code.has(each) else each for each in kinds))
        return "Any" if "Any" in kinds or not kinds else " | ".join(kinds)

    # ── classes ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _named(self, title: str, schema: Any) -> str:
        """Return the type for a definition: a class, if it has fields."""
        if not isinstance(schema, dict):
            return "Any"
        if not isinstance(schema.get("properties"), dict):
            if title in self._inlined:  # it contains itself
                return "Any"
            self._inlined.append(title)
            kind = self._type(schema)
            self._inlined.pop()
            return kind
        name = self._code.free_name(title, f"{self._service}_{title}", content=self._content(schema))
        if not self._code.has(name):
            self._code.add(name, "")  # it may contain itself
            self._code.add(name, self._class(name, schema, self._tags.get(title)))
        return name

    def _content(self, schema: Any) -> str:
        """Return the JSON of a definition, with those that it refers to."""
        found: dict[str, Any] = {}
        left = [json.dumps(schema, sort_keys=True)]
        text = left[0]
        while left:
            for name in re.findall(rf'"{re.escape(REFERENCE)}([^"]*)"', left.pop()):
                if name not in found:
                    found[name] = json.dumps(self._defined.get(name), sort_keys=True)
                    left.append(found[name])
        return text + json.dumps(found, sort_keys=True)

    def _class(self, name: str, schema: dict[str, Any], tag: tuple[str, Any] | None) -> str:
        fields = {field: value for field, value in schema["properties"].items() if tag is None or field != tag[0]}
        needed = schema.get("required")
        needed = set(needed) if isinstance(needed, list) and all(isinstance(each, str) for each in needed) else set()
        if not all(map(_is_field, fields)):
            kinds = {field: self._type(value) for field, value in fields.items()}
            kinds = {field: kind if field in needed else f"NotRequired[{kind}]" for field, kind in kinds.items()}
            self._code.used |= {"TypedDict", "NotRequired"}
            listed = ", ".join(f"{_quoted(field)}: {_quoted(kind)}" for field, kind in kinds.items())
            return _call(f"{name} = TypedDict", [_quoted(name), f"{{{listed}}}"])
        self._code.used.add("dataclass" if tag is None else "msgspec")
        factory = "field" if tag is None else "msgspec.field"
        required: list[str] = []
        others: list[str] = []
        for field, value in fields.items():
            kind = self._type(value)
            line = f"{field}: {kind}" if field in needed else f"{field}: {self._with_default(kind, value, factory)}"
            text = value.get("description") if isinstance(value, dict) else None
            (required if field in needed else others).append(line + _documented(text))
        head = f"@dataclass\nclass {name}:"
        if tag is not None:
            head = f"class {name}(msgspec.Struct, tag_field={_quoted(tag[0])}, tag={_quoted(tag[1])}):"
        lines = [_literal(text), ""] if isinstance(text := schema.get("description"), str) and text else []
        body = "\n".join([*lines, *required, *others]).rstrip() or "pass"
        return f"{head}\n{textwrap.indent(body, '    ')}"

    def _with_default(self, kind: str, schema: Any, factory: str) -> str:
        """Return type and default of a field that may be left out."""
        given = schema.get("default", ...) if isinstance(schema, dict) else ...
        if given is None or (isinstance(given, bool | int | float | str) and _fits(given, kind)):
            return f"{kind} = {_quoted(given)}"
        for empty in (list, dict):
            if kind.startswith(f"{empty.__name__}[") and (given == empty() or (given is ... and not self._sent)):
                self._code.used.add("field")
                return f"{kind} = {factory}(default_factory={empty.__name__})"
        self._code.used.add("msgspec")
        return f"{kind} | msgspec.UnsetType = msgspec.UNSET"


def _fits(value: Any, kind: str) -> bool:
    """Return whether a default of JSON is one of that type."""
    names = kind.split(" | ")
    if kind.startswith("Literal["):
        return _quoted(value) in kind
    return type(value).__name__ in names or (type(value) is int and "float" in names)


def _identifier(text: str) -> str:
    name = re.sub(r"\W", "_", text)
    return f"{name}_" if keyword.iskeyword(name) or name in _RESERVED else name if name.isidentifier() else f"_{name}"


def _is_field(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name) and name not in _RESERVED and not name.startswith("__")


def _literal(text: str) -> str:
    """Return a text as a literal that can be read as well as possible."""
    text = inspect.cleandoc(text)
    plain = "\\" not in text and '"""' not in text and not text.endswith('"')
    plain = plain and all(line.isprintable() for line in text.split("\n"))
    return f'"""{text}"""' if plain else _quoted(text)


def _quoted(value: object) -> str:
    """Return a value as a literal, a text in double quotes unless it has some itself."""
    if isinstance(value, str) and '"' not in value and "'" not in value:
        return f'"{repr(value)[1:-1]}"'
    return repr(value)


def _call(function: str, arguments: Sequence[str]) -> str:
    """Return a call as formatters break its line."""
    together = ", ".join(arguments)
    if len(line := f"{function}({together})") <= LINE:
        return line
    if len(together) + 4 <= LINE:
        return f"{function}(\n    {together}\n)"
    return "\n".join([f"{function}(", *(f"    {each}," for each in arguments), ")"])


def _documented(text: object) -> str:
    """Return the line that describes what is declared above, if there is anything to say."""
    return f"\n{_literal(text)}" if isinstance(text, str) and text else ""


def _imports(used: set[str]) -> str:
    """Return the statements that import these names."""
    lines = [f"import {name}" for name in ("datetime", "decimal", "uuid") if name in used]
    for module, names in (("dataclasses", ("dataclass", "field")), ("typing", _TYPING)):
        if found := [name for name in names if name in used]:
            lines.append(f"from {module} import {', '.join(found)}")
    lines += ["", "import msgspec"] if "msgspec" in used else []
    return "\n".join([*lines, "", f"from zmdp import {', '.join(sorted(used & {'Service', 'Streaming'}))}"])
