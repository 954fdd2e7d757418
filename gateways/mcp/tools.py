"""A service as a tool: its name, its schemas, its arguments and its results; pure functions.

The name has the characters that agents' programs and models accept.  Letters, digits and underscores stay, and a dot
between them is a hyphen: `words.count` is the tool `words-count`.  Any other byte is two hyphens and its hexadecimal
number.  So each tool's name stands for one service.

Tools take and return objects.  A service whose value is not an object takes it as one argument, named as in the
function, and its reply is the member `result`.  The values of a stream are a list.  A service without types
takes text, and its reply is text.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import mcp_types as types
import msgspec

from ...clients.json_values import encoded, is_text, json_of
from ...mdp.errors import CodecError
from ...mdp.services import About
from ...mdp.services.json_schemas import RAW, REFERENCE, Schema, definitions

MAX_NAME: Final = 128
"""Characters of a tool's name (MCP, "Tool Names")."""
TASK_RESULT: Final = "task_result"
TASK_CANCEL: Final = "task_cancel"
"""The gateway's own tools; services of these names get other ones."""
_SPECIAL: Final = re.compile(rb"(\.)(?=[A-Za-z0-9_])|[^A-Za-z0-9_]", re.DOTALL)
_WRITTEN: Final = re.compile(r"--([0-9a-f]{2})|-")
RESULT: Final = "result"
"""The member of a result that is not an object."""
_TEXT: Final[Schema] = {"type": "string"}
TASK: Final[Mapping[str, Any]] = {
    "type": "object",
    "properties": {"task_id": {"type": "string", "description": "What task_result and task_cancel need."}},
    "required": ["task_id"],
}
"""The schema of the result of a durable tool for a client that does not know tasks."""


class ServiceTool:
    """A service that agents may call.

    Args:
        service: Its name.
        about: Its description.
    """

    def __init__(self, service: str, about: About) -> None:
        self.service = service
        self.about = about
        self.durable = about.tool is not None and about.tool.durable
        self._plain = not about.codec or about.request == RAW
        request = _TEXT if self._plain else _inlined(about.request or {})
        self._argument = "" if _is_object(request) else about.argument or ("text" if self._plain else "value")
        self._request = request
        value = about.reply if about.part is None else {"type": "array", "items": about.part}
        self._reply = None if not about.codec or RAW in (about.reply, about.part) else _inlined(value or {})
        self._wraps = self._reply is None or not _is_object(self._reply)

    @property
    def name(self) -> str:
        """The tool's name."""
        return tool_name(self.service)

    def described(self, *, as_task: bool) -> types.Tool:
        """Return the tool as agents see it.  With `as_task`, calls return the id of a task instead of the result."""
        tool = self.about.tool
        return types.Tool(
            name=self.name,
            title=(tool and tool.title) or self.service,
            description=self.about.description or None,
            input_schema=self._input(),
            output_schema=dict(TASK) if as_task else self._output(),
            annotations=None if tool is None else types.ToolAnnotations(
                read_only_hint=tool.read_only, destructive_hint=tool.destructive
            ),
        )  # fmt: skip

    def _input(self) -> dict[str, Any]:
        if not self._argument:
            return dict(self._request)
        if self._request.get("type") == "null":
            return {"type": "object", "properties": {}}
        value = {name: each for name, each in self._request.items() if name != "$defs"}
        optional = {"type": "null"} in value.get("anyOf", ())
        return {
            "type": "object",
            "properties": {self._argument: value},
            "required": [] if optional else [self._argument],
            **_definitions(self._request),
        }

    def _output(self) -> dict[str, Any] | None:
        if self._reply is None or not self._wraps:
            return None if self._reply is None else dict(self._reply)
        value = {name: each for name, each in self._reply.items() if name != "$defs"}
        return {
            "type": "object", "properties": {RESULT: value}, "required": [RESULT], **_definitions(self._reply),
        }  # fmt: skip

    def body(self, arguments: Mapping[str, Any]) -> Sequence[bytes]:
        """Return the body of a request with these arguments.  Raises `CodecError`."""
        if not self._argument:
            return encoded(self.about, msgspec.json.encode(arguments))
        if others := [name for name in arguments if name != self._argument]:
            raise CodecError(f"there is no argument {others[0]!r:.100}: {self.name} takes {self._argument}")
        if self._argument not in arguments:
            return [b""]
        value = arguments[self._argument]
        if not self._plain:
            return encoded(self.about, msgspec.json.encode(value))
        if not isinstance(value, str):
            raise CodecError(f"the argument {self._argument} must be text")
        return [value.encode()]

    def value(self, frames: Sequence[bytes]) -> Any:
        """Return the value in a reply, or in a part of one; text if it is not one of the service's types."""
        text = json_of(self.about, frames)
        if text is not None and self._reply is not None:
            with suppress(msgspec.DecodeError):
                return msgspec.json.decode(text)
        data = b"".join(frames)
        return data.decode() if is_text(data) else base64.b64encode(data).decode()

    def joined(self, parts: list[Any], last: Any) -> Any:
        """Return the value of a reply: that of the FINAL, or all values of a stream, whose FINAL may be empty."""
        if self.about.part is None and (last is not None or not parts or self.about.reply is not None):
            return last
        return parts if last is None else [*parts, last]

    def result(self, value: Any) -> types.CallToolResult:
        """Return the result of a call whose reply has this value."""
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        if self._reply is None:
            return text_result(text)
        wraps = self._wraps and not (self._reply == {} and isinstance(value, dict))
        return text_result(text, {RESULT: value} if wraps else value)


def text_result(text: str, structured: Any = None, *, failed: bool = False) -> types.CallToolResult:
    """Return the result of a call: a text for the agent, and the same as a JSON value."""
    content = types.TextContent(type="text", text=text)
    return types.CallToolResult(content=[content], structured_content=structured, is_error=failed)


def failure(text: str) -> types.CallToolResult:
    """Return the result of a call that failed, with the reason for the agent."""
    return text_result(text, failed=True)


def _is_object(schema: Schema) -> bool:
    return schema.get("type") == "object"


def _definitions(schema: Schema) -> dict[str, Any]:
    found = definitions(schema)
    return {"$defs": dict(found)} if found else {}


def _inlined(schema: Schema) -> Schema:
    """Return the schema with definitions at its root, which is no reference: clients require that."""
    items = schema.get("items")
    if isinstance(items, dict) and "$defs" in items:
        inner = {name: each for name, each in items.items() if name != "$defs"}
        return {**schema, "items": inner, "$defs": items["$defs"]}
    others = dict(definitions(schema))
    name = str(schema.get("$ref", "")).removeprefix(REFERENCE)
    found = others.pop(name, None)
    if not isinstance(found, dict):
        return schema
    root = {**found, "$defs": others} if others else found
    recursive = msgspec.json.encode(REFERENCE + name) in msgspec.json.encode(root)
    return {**found, "$defs": schema["$defs"]} if recursive else root


# ── names ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def tool_name(service: str) -> str:
    """Return the name of a service as a tool."""
    if service in (TASK_RESULT, TASK_CANCEL):
        return f"--{ord(service[0]):02x}{service[1:]}"
    return _SPECIAL.sub(_write, service.encode()).decode()


def service_name(tool: str) -> str | None:
    """Return the service that a tool's name stands for; None if it is not a valid name."""
    try:
        found = _WRITTEN.sub(lambda match: chr(int(match[1], 16)) if match[1] else ".", tool)
        service = found.encode("latin-1").decode()
    except UnicodeError:
        return None
    return service if tool_name(service) == tool else None


def _write(match: re.Match[bytes]) -> bytes:
    return b"-" if match[1] else b"--%02x" % ord(match[0])
