"""Visitors of the pages: tokens, sessions of browsers, and protection against requests forged by other sites."""

import hmac
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from http.cookies import CookieError, SimpleCookie
from typing import Any, ClassVar, Final

from starlette.requests import HTTPConnection

from ...mdp.http.limits import ServerLimits
from ...mdp.security.access import bearer, digest_of

SESSION_SECONDS: Final = 12 * 3600
"""How long a session lasts after its last use."""
MAX_SESSIONS: Final = 1000
LIMITS: Final = ServerLimits(max_body=64 << 10, max_header_bytes=16 << 10, body_timeout=10.0, keep_alive=30.0)
"""The limits of a server of pages."""


@dataclass(frozen=True)
class Visitor:
    """A visitor, and their permissions."""

    role: str
    look: bool
    act: bool

    anybody: ClassVar["Visitor"]


Visitor.anybody = Visitor("", look=True, act=True)


class Visitors:
    """All visitors.  `access` has the visitor of each token, by its digest; None admits everybody."""

    def __init__(self, access: Mapping[bytes, Visitor] | None) -> None:
        self.access = access
        self._secret = secrets.token_bytes(32)
        self._sessions: dict[str, tuple[bytes, float]] = {}
        """The digest of the token of each session, and when it ends."""

    def identify(self, connection: HTTPConnection) -> Visitor | None:
        """Return the visitor who sends this request; None if unknown."""
        if self.access is None:
            return Visitor.anybody
        authorization = connection.headers.get("authorization")
        if authorization is not None:
            token = bearer(authorization.encode("latin-1"))
            return None if token is None else self.access.get(digest_of(token))
        session = self.session(connection)
        digest, until = self._sessions.get(session, (b"", 0.0))
        now = time.monotonic()
        if until < now:
            self._sessions.pop(session, None)
            return None
        self._sessions[session] = digest, now + SESSION_SECONDS
        return self.access.get(digest)

    def log_in(self, token: str) -> str | None:
        """Return a new session for the holder of a token; None if the token is unknown or its role may not look."""
        digest = digest_of(token.strip().encode())
        visitor = None if self.access is None else self.access.get(digest)
        if visitor is None or not visitor.look:
            return None
        while len(self._sessions) >= MAX_SESSIONS:
            self._sessions.pop(next(iter(self._sessions)))
        session = new_session()
        self._sessions[session] = digest, time.monotonic() + SESSION_SECONDS
        return session

    def log_out(self, connection: HTTPConnection) -> None:
        """End the session of this request."""
        self._sessions.pop(self.session(connection), None)

    def session(self, connection: HTTPConnection) -> str:
        """Return the session in the cookie, which may have ended; empty if there is none."""
        try:
            found = SimpleCookie(connection.headers.get("cookie", "")).get(cookie_name(connection))
        except CookieError:
            return ""
        return "" if found is None else found.value

    def form_token(self, session: str) -> str:
        """Return the token in every form of a session, which another site cannot know."""
        return hmac.new(self._secret, session.encode(), "sha256").hexdigest()

    def is_own_form(self, connection: HTTPConnection, token: str) -> bool:
        """Return whether a form with this token comes from one of our pages."""
        if connection.headers.get("sec-fetch-site", "same-origin") not in {"same-origin", "none"}:
            return False
        session = self.session(connection)
        return bool(session) and hmac.compare_digest(self.form_token(session).encode(), token.encode())


def new_session() -> str:
    """Return a name for a session."""
    return secrets.token_urlsafe(32)


def cookie_name(connection: HTTPConnection) -> str:
    """Return the name of our cookie.  It has the port: browsers send a cookie to all ports of its host."""
    server: Any = connection.scope.get("server") or ("", 0)
    return f"zmdp_{server[1]}"


def visitors_of(told: Mapping[str, Mapping[str, Any]] | None) -> dict[bytes, Visitor] | None:
    """Return the visitors by the digests of their tokens, as in the settings that `mdp-broker` sends."""
    if told is None:
        return None
    return {bytes.fromhex(digest): Visitor(each["role"], each["look"], each["act"]) for digest, each in told.items()}


def limits_for(*, everybody: bool, local: bool) -> ServerLimits:
    """Return the limits of a server that admits `everybody`, or holders of tokens, and that is only for `local` users.

    If both are true, URLs must have a name of this machine: otherwise another site could let its own name point here,
    and read the pages in the browser of a visitor.
    """
    return replace(LIMITS, hosts=frozenset()) if everybody and local else LIMITS
