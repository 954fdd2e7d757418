"""The OpenAPI document of a gateway, with the services that exist now; pure functions."""

from collections.abc import Collection, Mapping
from typing import Any, Final
from urllib.parse import quote

from ....mdp.http.problems import KINDS, SERVICE_ERROR
from ....mdp.services import About
from ....mdp.services.json_schemas import RAW, example
from ....titanic.api.submission import DurationOption, IntegerOption, Option, TimeOption
from ....version import __version__
from ..jobs.query import QUERY
from ..services.rows import own_types, stream_types
from ..services.translation import JSON
from .components import Components

_NOT_AS_JOBS: Final = ("titanic.", "mmi.")
"""Prefixes of services that cannot be called through Titanic."""


def document(services: Mapping[str, About], *, secured: bool) -> dict[str, Any]:
    """Return the OpenAPI document of a gateway with these services and their descriptions.

    `secured` if it requires tokens.
    """
    components = Components(Problem=_PROBLEM)
    paths: dict[str, Any] = {
        "/services": {"get": _operation("List the services that exist now", {"200": _json("The services")})},
        "/livez": {"get": _operation("Check whether the gateway runs", {"200": _json("It does")})},
        "/readyz": {
            "get": _operation(
                "Check whether requests can be answered",
                {"200": _json("They can"), "503": _json("They cannot, for these reasons")},
            )
        },
        "/jobs/{uuid}": {
            "parameters": [_parameter("path", "uuid", "UUID of the job", {"type": "string"}, required=True)],
            "get": _operation(
                "Return the reply of a job, or stream it",
                {"200": _reply("The reply"), "202": _json("There is no reply yet")},
                *_FAILURES,
                parameters=[_PREFER, _parameter("header", "Last-Event-ID", "Continue a stream", {"type": "string"})],
            ),
            "delete": _operation("Cancel and delete a job", {"204": {"description": "There is no such job now"}}),
        },
    }
    for name in sorted(services):
        path, about = quote(name, safe=""), services[name]
        body, reply = _bodies(name, about, components)
        more = {"description": about.description} if about.description else {}
        paths[f"/services/{path}"] = {
            "post": _operation(
                f"Call {name}",
                {"200": {"description": "The reply", "content": reply}},
                *_FAILURES,
                *(("406",) if about.part is not None or about.media_types else ()),
                parameters=[_TIMEOUT, _PREFER],
                requestBody=body,
                **more,
            )
        }
        if not name.startswith(_NOT_AS_JOBS):
            paths[f"/jobs/{path}"] = {
                "post": _operation(
                    f"Store a request for {name}",
                    {"200": _reply("The reply, within the time that Prefer allows"), "202": _json("The job is stored")},
                    *_FAILURES,
                    parameters=[_PREFER, _KEY, *(_query(*item) for item in QUERY.items())],
                    requestBody=body if about.codec == "json" else _BODY,
                    **more,
                )
            }
    schemes = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "mdp-gateway", "version": __version__, "summary": "Services at a ZeroMQ Majordomo broker"},
        "paths": paths,
        "components": {"schemas": components.schemas, **({"securitySchemes": schemes} if secured else {})},
        **({"security": [{"token": []}]} if secured else {}),
    }


def _bodies(service: str, about: About, components: Components) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the body of a request for a service, and the contents of its reply."""
    if not about.codec:
        own: dict[str, Any] = {each.decode(): {} for each in own_types(about)}
        return _BODY, {**own, "text/event-stream": {}} if own else _reply("")["content"]
    content: dict[str, Any] = {"application/octet-stream": {}}
    if about.request is not None and about.request != RAW:
        taken = components.add(service, about.request)
        content = {"application/json": {"schema": taken, "example": example(about.request)}}
    replies: dict[str, Any] = {} if about.part is None else {"text/event-stream": {}}
    if about.reply is not None:
        kind = "application/octet-stream" if about.reply == RAW else "application/json"
        replies[kind] = {} if about.reply == RAW else {"schema": components.add(service, about.reply)}
    if about.part is not None and (kinds := stream_types(about)):
        schema = components.add(service, about.part)
        replies |= {each.decode(): {"schema": schema} for each in kinds}  # of each line
        replies[JSON.decode()] = {"schema": {"type": "array", "items": schema}}
    return {"content": content}, replies or {"application/octet-stream": {}}


def _operation(
    summary: str, responses: Mapping[str, Any], *failures: str, parameters: Collection[Any] = (), **more: Any
) -> dict[str, Any]:
    failed = {status: _problem(_TITLES[status]) for status in failures}
    listed = {"parameters": list(parameters)} if parameters else {}
    responses = {**responses, **failed, "default": _problem("Another problem")}
    return {"summary": summary, **listed, **more, "responses": responses}


def _parameter(
    where: str, name: str, text: str, schema: Mapping[str, Any], *, required: bool = False
) -> dict[str, Any]:
    return {"in": where, "name": name, "description": text, "required": required, "schema": dict(schema)}


def _query(name: str, option: Option) -> dict[str, Any]:
    match option:
        case IntegerOption():
            schema: dict[str, Any] = {"type": "integer", "minimum": 0, "maximum": option.maximum}
        case DurationOption():
            schema = {"type": "string", "examples": ["30s", "12h"]}
        case TimeOption():
            schema = {"type": "string", "format": "date-time"}
        case _:
            schema = {"type": "string"}
    return _parameter("query", name, option.help, schema)


def _json(text: str) -> dict[str, Any]:
    return {"description": text, "content": {"application/json": {"schema": {"type": "object"}}}}


def _reply(text: str) -> dict[str, Any]:
    types = ("application/octet-stream", "multipart/mixed", "text/event-stream")
    return {"description": text, "content": {each: {} for each in types}}


def _problem(text: str) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Problem"}
    return {"description": text, "content": {"application/problem+json": {"schema": schema}}}


_TITLES: Final[Mapping[str, str]] = {
    str(status): "; ".join(kind.title for kind in KINDS.values() if kind.status == status)
    for status in sorted({kind.status for kind in KINDS.values()})
}
_FAILURES: Final = tuple(str(kind.status) for kind in KINDS.values() if kind.code is not None)
_BODY: Final = {"content": {"*/*": {}, "multipart/form-data": {"schema": {"type": "object"}}}}
_TIMEOUT: Final = _parameter(
    "header", "Request-Timeout", "Seconds until the reply must have arrived, or 500ms", {"type": "string"}
)
_PREFER: Final = _parameter("header", "Prefer", "wait=N: wait up to N seconds", {"type": "string"})
_KEY: Final = _parameter(
    "header", "Idempotency-Key", "Storing again with the same key returns the first job", {"type": "string"}
)
_PROBLEM: Final = {
    "type": "object",
    "required": ["type", "title", "status", "detail"],
    "properties": {
        "type": {"type": "string", "format": "uri", "description": f"Its last part is the kind, or {SERVICE_ERROR}"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "service": {"type": "string"},
        "code": {"type": "integer", "description": "The code of X1's ERROR"},
    },
}
