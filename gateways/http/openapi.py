"""The description of the gateway, with the services that exist now: `/openapi.json`, a page for people, and links."""

from collections.abc import Collection, Mapping
from html import escape
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ...mdp.http.problems import KINDS
from ...mdp.program.control_services import SPARK
from ...mdp.services import About
from ...mdp.services.json_schemas import RAW, example
from ...titanic.api.options import DurationOption, IntegerOption, Option, TimeOption
from ...version import __version__
from .gateway import Gateway
from .job_options import QUERY
from .problems import SERVICE_ERROR
from .rows import own_types, stream_types
from .schemas import Components
from .service_list import list_services
from .translation import JSON

_PAGE: Final = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>mdp-gateway</title>
<h1>mdp-gateway {version}</h1>
<ul>{links}</ul>
</html>
"""
_LINKS: Final = {
    "/services": "the services that exist now",
    "/docs": "what they take and return, and a form to try them",
    "/openapi.json": "what this gateway offers, as OpenAPI",
    "/readyz": "whether the broker answers",
}
_FOLDER: Final = Path(__file__).parent / "static"
_DOCS: Final = {
    "/docs": ("docs.html", "text/html"),
    "/docs.js": ("docs.js", "text/javascript"),
    "/docs.css": ("docs.css", "text/css"),
}
_DOCS_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_NOT_AS_JOBS: Final = ("titanic.", "mmi.")
"""Services that Titanic does not call."""


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes of the document and of the page."""

    async def openapi(request: Request) -> Response:
        caller = gateway.caller(request.scope)
        found = await list_services(gateway, caller)
        names = [row["name"] for row in found["services"] if not row["name"].startswith(SPARK)]
        abouts = await gateway.descriptions.of_all(names)
        return JSONResponse(document(abouts, secured=gateway.access is not None))

    async def page(request: Request) -> Response:
        del request
        links = "".join(f'<li><a href="{path}">{path}</a>: {escape(text)}' for path, text in _LINKS.items())
        return HTMLResponse(_PAGE.format(version=escape(__version__), links=links))

    return [
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/", page, methods=["GET"]),
        *(Route(path, _docs, methods=["GET"]) for path in _DOCS),
    ]


async def _docs(request: Request) -> Response:
    """Return a file of the page that shows the document, and tries services; the page gets everything else itself."""
    name, kind = _DOCS[request.url.path]
    return Response((_FOLDER / name).read_bytes(), media_type=kind, headers=_DOCS_HEADERS)


# ── the document ─────────────────────────────────────────────────────────────────────────────────────────────────────


def document(services: Mapping[str, About], *, secured: bool) -> dict[str, Any]:
    """Return the OpenAPI document of a gateway at which these services exist, with what their workers say of them.

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
