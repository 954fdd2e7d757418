"""What the gateway says of itself: `/openapi.json`, the page `/docs` that tries services, and links at `/`."""

from html import escape
from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from .... import __version__
from ....mdp.program.control import SPARK
from ...gateway import Gateway
from .document import document

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


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes of the document and of the page."""

    async def openapi(request: Request) -> Response:
        caller = gateway.caller(request.scope)
        found = await gateway.list_services(caller)
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
