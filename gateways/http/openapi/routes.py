"""The document at `/openapi.json`, and the page `/docs`, on which people try services."""

from pathlib import Path
from typing import Final

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from ....mdp.program.control_services import SPARK
from ...gateway import Gateway
from .document import document

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
    """Return the routes of the document and of the page, to which `/` leads."""

    async def openapi(request: Request) -> Response:
        caller = gateway.caller(request.scope)
        found = await gateway.list_services(caller)
        names = [row["name"] for row in found["services"] if not row["name"].startswith(SPARK)]
        abouts = await gateway.descriptions.of_all(names)
        return JSONResponse(document(abouts, secured=gateway.access is not None))

    return [
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/", _to_docs, methods=["GET"]),
        *(Route(path, _docs, methods=["GET"]) for path in _DOCS),
    ]


async def _to_docs(request: Request) -> Response:
    del request
    return RedirectResponse("/docs")


async def _docs(request: Request) -> Response:
    """Return a file of the page, which reads the document itself."""
    name, kind = _DOCS[request.url.path]
    return Response((_FOLDER / name).read_bytes(), media_type=kind, headers=_DOCS_HEADERS)
