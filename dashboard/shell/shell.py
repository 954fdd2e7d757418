"""The frame of all pages: navigation, live updates, log-in, security headers, /metrics and health.

A program mounts `Section`s in a `Shell`: pages, actions, metrics and reasons not to be ready.  `Shell.application` is
an ASGI application.
"""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qsl

import jinja2
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.responses import StreamingResponse as Streaming
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send

from ...version import __version__
from .formats import FILTERS, link
from .visitors import SESSION_SECONDS, Visitor, Visitors, cookie_name, new_session

FOLDER: Final = Path(__file__).parents[1]
MAX_FORM_BYTES: Final = 16 << 10
MAX_STREAMS: Final = 50
"""Maximum number of pages that are kept up to date at the same time."""
KEEP_ALIVE_SECONDS: Final = 15.0
"""Interval at which a comment is sent to an unchanged page, so that a closed one is noticed."""
_TOKEN_PLACE: Final = "token-of-the-form"  # noqa: S105 - stands for the token in pages that several visitors share
_HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class NotFoundError(Exception):
    """Nothing can be shown at this URL; the text says why."""


@dataclass(frozen=True)
class View:
    """A visitor's request for a page."""

    path: str
    query: Mapping[str, str]
    visitor: Visitor

    @property
    def service(self) -> str:
        """The service to which the page is limited; empty if it is not."""
        return self.query.get("service", "")


@dataclass(frozen=True)
class Page:
    """A page: its path, its template, and the template's context.  `title` is its entry in the navigation."""

    path: str
    template: str
    context: Callable[[View], Awaitable[Mapping[str, Any]]]
    title: str = ""
    key: str = ""
    """The key that opens it, after g."""
    part_of: str = ""
    """The path of the entry in the navigation that is highlighted instead."""


@dataclass(frozen=True)
class Action:
    """The action of a form: gets the form's fields, and returns the URL of the next page."""

    path: str
    run: Callable[[Mapping[str, str]], Awaitable[str]]


async def _nothing() -> list[str]:
    return []


@dataclass(frozen=True)
class Section:
    """The pages, metrics and health of one program."""

    pages: Sequence[Page] = ()
    actions: Sequence[Action] = ()
    templates: Path | None = None
    """A folder with more templates."""
    collectors: Callable[[], Sequence[Collector]] = field(default=lambda: ())
    version: Callable[[], object] = time.monotonic
    """Changes when the metrics and pages do."""
    troubles: Callable[[], Awaitable[list[str]]] = _nothing
    """Returns why the program is not ready; nothing if it is."""
    is_alive: Callable[[], Awaitable[bool]] | None = None
    until_changed: Callable[[float], Awaitable[None]] = asyncio.sleep
    """Waits until the pages have changed, for a limited time."""


class Shell:
    """Serves sections to visitors.  `name` is in the title of every page."""

    def __init__(self, name: Callable[[], str], sections: Sequence[Section], visitors: Visitors) -> None:
        self._name = name
        self._sections = sections
        self._visitors = visitors
        self._streams = 0
        self._exposed: dict[str, tuple[object, tuple[bytes, str]]] = {}
        self._shown: dict[tuple[object, ...], str] = {}
        """Recently rendered pages, for other visitors of the same."""
        folders = [FOLDER / "templates", *(each.templates for each in sections if each.templates is not None)]
        self._templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(folders), autoescape=True, undefined=jinja2.StrictUndefined,
            trim_blocks=True, lstrip_blocks=True,
        )  # fmt: skip
        self._templates.filters.update(FILTERS)
        self._templates.globals.update(link=link, version=__version__, shell=self)
        self.navigation = [page for section in sections for page in section.pages if page.title]
        self.application: ASGIApp = _Guard(Starlette(routes=self._routes()))

    def _routes(self) -> list[BaseRoute]:
        routes: list[BaseRoute] = [
            Route("/metrics", self._metrics),
            Route("/livez", self._livez),
            Route("/readyz", self._readyz),
            Route("/login", self._login, methods=["GET", "POST"]),
            Route("/logout", self._logout, methods=["POST"]),
            # In an editable installation, the files are links.
            Mount("/static", StaticFiles(directory=FOLDER / "static", follow_symlink=True)),
        ]
        for section in self._sections:
            for page in section.pages:
                routes.append(Route(page.path, self._page(section, page)))
                routes.append(Route(f"/live{page.path}", self._live(section, page)))
            routes += [Route(action.path, self._action(action), methods=["POST"]) for action in section.actions]
        routes.append(Route("/{path:path}", self._missing))
        return routes

    # ── pages ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _page(self, section: Section, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def show(request: Request) -> Response:
            visitor = self._visitors.identify(request)
            if visitor is None:
                return RedirectResponse(link("/login", next=str(request.url.replace(scheme="", netloc=""))), 303)
            if not visitor.look:
                return self._problem(request, 403, f"The role {visitor.role} may not look at the broker.")
            session = self._visitors.session(request) or new_session()
            view = _view(page, request, visitor)
            try:
                main = await self._main(section, page, view)
            except NotFoundError as error:
                return self._problem(request, 404, str(error))
            html = self._templates.get_template("shell.html").render(
                main=main, page=page, visitor=visitor, live=f"/live{page.path}", title=self._title(page, view)
            )
            response = HTMLResponse(html.replace(_TOKEN_PLACE, self._visitors.form_token(session)))
            if session != self._visitors.session(request):
                _set_cookie(response, request, session)
            return response

        return show

    def _title(self, page: Page, view: View) -> str:
        """Return the title of a page: the name of its subject, and its entry in the navigation."""
        entry = page.title or next((each.title for each in self.navigation if each.path == page.part_of), page.path)
        name = next((view.query[each] for each in ("name", "id", "uuid") if view.query.get(each)), "")
        return entry if page.title or not name else f"{name} · {entry}"

    async def _main(self, section: Section, page: Page, view: View) -> str:
        """Return the page without its frame."""
        version = section.version()
        key = (page.path, tuple(sorted(view.query.items())), view.visitor, version)
        known = self._shown.get(key)
        if known is not None:
            return known
        context = await page.context(view)
        found = self._templates.get_template(page.template).render(
            view=view, form_token=_TOKEN_PLACE, may_act=view.visitor.act, **context
        )
        for old in [each for each in self._shown if each[-1] != version or len(self._shown) > 2 * MAX_STREAMS]:
            del self._shown[old]
        self._shown[key] = found
        return found

    def _live(self, section: Section, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def stream(request: Request) -> Response:
            visitor = self._visitors.identify(request)
            if visitor is None or not visitor.look:
                return PlainTextResponse("log in first", 401)
            if self._streams >= MAX_STREAMS:
                return PlainTextResponse("too many pages are open", 503, {"retry-after": "10"})
            view, session = _view(page, request, visitor), self._visitors.session(request)
            return Streaming(
                self._updates(section, page, view, request, session), media_type="text/event-stream",
                headers={"cache-control": "no-store", "x-accel-buffering": "no"},
            )  # fmt: skip

        return stream

    async def _updates(
        self, section: Section, page: Page, view: View, request: Request, session: str
    ) -> AsyncIterator[str]:
        self._streams += 1
        try:
            sent, sent_at = "", time.monotonic()
            token = self._visitors.form_token(session)
            yield "retry: 2000\n\n"
            while self._visitors.identify(request) == view.visitor:
                try:
                    main = (await self._main(section, page, view)).replace(_TOKEN_PLACE, token)
                except NotFoundError:
                    break
                if main != sent:
                    sent, sent_at = main, time.monotonic()
                    yield f"data: {json.dumps(main)}\n\n"
                elif time.monotonic() - sent_at > KEEP_ALIVE_SECONDS:
                    sent_at = time.monotonic()
                    yield ": nothing has changed\n\n"
                await section.until_changed(KEEP_ALIVE_SECONDS)
            yield "event: end\ndata: \n\n"
        finally:
            self._streams -= 1

    def _action(self, action: Action) -> Callable[[Request], Awaitable[Response]]:
        async def act(request: Request) -> Response:
            visitor = self._visitors.identify(request)
            if visitor is None:
                return RedirectResponse("/login", 303)
            if not visitor.act:
                return self._problem(request, 403, f"The role {visitor.role} may look, but not act: that takes admin.")
            fields = await _form(request)
            if fields is None or not self._visitors.is_own_form(request, fields.get("form_token", "")):
                return self._problem(request, 403, "This form is out of date. Go back, load the page again, and retry.")
            return RedirectResponse(await action.run(fields), 303)

        return act

    async def _missing(self, request: Request) -> Response:
        return self._problem(request, 404, "There is nothing at this address.")

    def _problem(self, request: Request, status: int, text: str) -> Response:
        visitor = self._visitors.identify(request)
        html = self._templates.get_template("problem.html").render(text=text, status=status, visitor=visitor)
        return HTMLResponse(html, status)

    # ── who looks ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _login(self, request: Request) -> Response:
        after, problem = _own_path(request.query_params.get("next", "")), ""
        if request.method == "POST":
            fields = await _form(request) or {}
            after = _own_path(fields.get("next", ""))
            session = self._visitors.log_in(fields.get("token", ""))
            if session is not None:
                response: Response = RedirectResponse(after, 303)
                _set_cookie(response, request, session)
                return response
            problem = "No role that may look at the broker has this token."
        elif self._visitors.access is None:
            return RedirectResponse("/", 303)
        html = self._templates.get_template("login.html").render(next=after, problem=problem, visitor=None)
        return HTMLResponse(html, 401 if problem else 200)

    async def _logout(self, request: Request) -> Response:
        fields = await _form(request) or {}
        if self._visitors.is_own_form(request, fields.get("form_token", "")):
            self._visitors.log_out(request)
        response = RedirectResponse("/login", 303)
        response.delete_cookie(cookie_name(request))
        return response

    def name(self) -> str:
        """Return the name of the program that the pages show."""
        return self._name()

    # ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _metrics(self, request: Request) -> Response:
        visitor = self._visitors.identify(request)
        if visitor is None:
            return PlainTextResponse("a token is required\n", 401, {"www-authenticate": 'Bearer realm="zmdp"'})
        if not visitor.look:
            return PlainTextResponse(f"the role {visitor.role} may not look at the broker\n", 403)
        accept = request.headers.get("accept", "")
        version = tuple(section.version() for section in self._sections)
        known = self._exposed.get("openmetrics" if "openmetrics" in accept else "text")
        if known is None or known[0] != version:
            collectors = [each for section in self._sections for each in section.collectors()]
            known = version, exposition(collectors, accept)
            self._exposed["openmetrics" if "openmetrics" in accept else "text"] = known
        body, content_type = known[1]
        return Response(body, headers={"content-type": content_type, "cache-control": "no-store"})

    async def _livez(self, request: Request) -> Response:
        del request
        alive = [await section.is_alive() for section in self._sections if section.is_alive is not None]
        return JSONResponse({"live": all(alive)}, 200 if all(alive) else 503)

    async def _readyz(self, request: Request) -> Response:
        del request
        reasons = [reason for section in self._sections for reason in await section.troubles()]
        return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


def exposition(collectors: Sequence[Collector], accept: str) -> tuple[bytes, str]:
    """Return the metrics in the format that the header Accept prefers, and its content type."""
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    encode, content_type = choose_encoder(accept)
    return encode(registry), content_type


class _Guard:
    """Adds the security headers."""

    def __init__(self, application: ASGIApp) -> None:
        self._application = application

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                new = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                if b"cache-control" not in present and not scope["path"].startswith("/static/"):
                    new.append((b"cache-control", b"no-store"))
                message["headers"] = [*message["headers"], *new]
            await send(message)

        await self._application(scope, receive, guarded)


def _view(page: Page, request: Request, visitor: Visitor) -> View:
    return View(page.path, dict(request.query_params), visitor)


def _set_cookie(response: Response, request: Request, session: str) -> None:
    response.set_cookie(cookie_name(request), session, max_age=SESSION_SECONDS, httponly=True, samesite="strict")


def _own_path(url: str) -> str:
    """Return `url` if it is a path of this server, otherwise the path of the first page."""
    return url if url.startswith("/") and not url.startswith(("//", "/\\")) and url.isprintable() else "/"


async def _form(request: Request) -> dict[str, str] | None:
    """Return the fields of a form; None if it is too large, or not a form."""
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_FORM_BYTES:
            return None
    try:
        return dict(parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=100))
    except ValueError:
        return None
