"""Titanic for Python programs: hand a request over, come back for its reply, whenever that is.

    with Client() as client:
        ticket = Titanic(client).submit("resize", image, key="image-17")
        print(ticket.uuid)          # all that is needed to come back, from anywhere
        ...
        reply = Titanic(client).ticket(uuid).result()
        ticket.close()

Times are seconds.  All that is raised is in `zmdp.mdp.errors`.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing, suppress
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self
from uuid import UUID

from ..clients import (
    AsyncClient,
    BrokerUnreachable,
    Client,
    Reply,
    RequestTimeout,
    ServiceError,
    ServiceNotFound,
    SettingError,
    StreamInterrupted,
)
from ..clients.arguments import checked_body
from ..mdp.codes import Code
from ..mdp.errors import TitanicError, UnknownTicket
from ..mdp.wire import service_name
from .submission import Malformed, parse_uuid, submission

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session, scoped_session

PATIENCE: Final = 15.0
"""Seconds after which somebody who waits for a reply looks whether there is a Titanic at all."""
POLL: Final = (0.05, 1.0)
"""Seconds between two questions where Titanic cannot be asked to wait: at first, and at most."""
_REQUEST, _REPLY, _CLOSE = "titanic.request", "titanic.reply", "titanic.close"


def request_options(
    *,
    key: str | None = None,
    key_ttl: float | None = None,
    delay: float | None = None,
    at: datetime | float | None = None,
    priority: int = 0,
    retries: int = 0,
    backoff: float | None = None,
    ttl: float | None = None,
) -> dict[str, Any]:
    """The options of titanic.request, as they go on the wire.  See `Titanic.submit`."""
    times = {"key_ttl": key_ttl, "delay": delay, "backoff": backoff, "result_ttl": ttl}
    options: dict[str, Any] = {name: _milliseconds(name, value) for name, value in times.items() if value is not None}
    if isinstance(at, datetime):
        if at.tzinfo is None:
            raise SettingError(f"at is {at!r}, which is a different time in each time zone: give it a tzinfo")
        options["at"] = at.isoformat()
    elif at is not None:
        options["at"] = _milliseconds("at", at)
    if key is not None:
        options["key"] = key
    if priority:
        options["priority"] = priority
    if retries:
        options["retries"] = retries
    return options


def _milliseconds(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"{name} is {value!r}: it takes a number of seconds")
    return round(value * 1000, 3)


def enqueue(
    session: "Session | scoped_session[Any] | Connection",
    service: str | bytes,
    *frames: bytes,
    key: str | None = None,
    key_ttl: float | None = None,
    delay: float | None = None,
    at: datetime | float | None = None,
    priority: int = 0,
    retries: int = 0,
    backoff: float | None = None,
    ttl: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> str:
    """Hand a request over within the transaction of `session`; returns its uuid.

    Titanic finds it if that transaction commits, and only then: what the program writes and what it asks for are one
    thing.  The session's database must be Titanic's own (`titanic db upgrade --db URL` makes the tables beside others);
    a `Connection` will do as well.  All else is as in `Titanic.submit`.  With asyncio:
    `await session.run_sync(enqueue, "service", b"…")`.

    Raises `SettingError` for what cannot be stored, `TitanicError` if the database has not Titanic's tables.
    """
    from sqlalchemy.engine import Connection  # noqa: PLC0415 - who only calls Titanic needs no SQLAlchemy
    from sqlalchemy.exc import OperationalError, ProgrammingError  # noqa: PLC0415

    from .store import models, store  # noqa: PLC0415

    options = request_options(
        key=key, key_ttl=key_ttl, delay=delay, at=at, priority=priority, retries=retries, backoff=backoff, ttl=ttl
    )
    if headers:
        options["headers"] = dict(headers)
    try:
        asked = submission([service_name(service), *checked_body(frames)], options, time.time())
    except Malformed as error:
        raise SettingError(str(error)) from None
    if isinstance(session, Connection):
        connection = session
    elif not callable(getattr(session, "connection", None)):
        raise SettingError(f"{session!r:.100} is no session: enqueue takes a SQLAlchemy Session or Connection")
    else:
        connection = session.connection(bind_arguments={"mapper": models.Request})
    if connection.dialect.name not in {"sqlite", "postgresql"}:
        raise SettingError(f"the session's database is {connection.dialect.name}: Titanic's is SQLite or PostgreSQL")
    try:
        (uuid,) = store.accept(connection, [asked])
    except (OperationalError, ProgrammingError) as error:
        if "titanic_" in str(error.orig):
            told = (
                f"the session's database has not the tables of Titanic (`titanic db upgrade` makes them): {error.orig}"
            )
            raise TitanicError(told, code=int(Code.FAILED)) from error
        raise
    return uuid.hex


# ── what both twins do with what Titanic says ────────────────────────────────────────────────────────────────────────


def _uuid_text(uuid: str | bytes | UUID) -> str:
    text = uuid.hex if isinstance(uuid, UUID) else uuid.decode(errors="replace") if isinstance(uuid, bytes) else uuid
    found = parse_uuid(text.replace("-", "").encode(errors="replace"))
    if found is None:
        raise SettingError(f"{uuid!r} is no uuid: it takes 32 hex digits")
    return found.hex


def _status(reply: Sequence[bytes]) -> tuple[int, str]:
    code, text = reply[0][:3], reply[0][4:]
    return int(code) if code.isdigit() else int(Code.FAILED), text.decode(errors="replace")


def _check(reply: Reply, uuid: str = "") -> None:
    """Raise what Titanic has to say against it."""
    code, text = _status(reply)
    if code in {200, 300}:
        return
    if code == Code.MALFORMED and (text.startswith("unknown uuid") or (uuid and not text)):  # 0.2 gets no text (C37)
        known = f"Titanic knows no request {uuid}: it was closed, its reply has expired, or there never was one"
        raise UnknownTicket(known, service=reply.service, code=code, text=text)
    if code == Code.MALFORMED:
        raise SettingError(f"Titanic takes it not: {text}")
    raise TitanicError(f"Titanic could not do it: {text} ({code})", service=reply.service, code=code, text=text)


def _result(reply: Reply, uuid: str, service: str) -> Reply | None:
    """The reply that was fetched, None if it is not there yet.  Raises `ServiceError`, `UnknownTicket`."""
    code, text = _status(reply)
    if code == Code.FAILED and len(reply) > 1 and reply[1].isdigit():  # else it is Titanic that failed
        raise ServiceError(int(reply[1]), text, reply[2] if len(reply) > 2 else None, service=service)
    _check(reply, uuid)
    return None if code == 300 else Reply(reply[1:], service=reply.service, final=True)


def _partials_from(start: int) -> dict[str, Any]:
    return {"partials": True, "from": start, "wait": True}


def _nobody(service: str) -> ServiceNotFound:
    return ServiceNotFound(f"no Titanic serves {service!r}: start one with `titanic serve`", service=service)


def _too_late(uuid: str, timeout: float) -> RequestTimeout:
    return RequestTimeout(f"request {uuid} has no reply within {timeout:g} s", service=_REPLY)


class _Deadline:
    """A number of seconds from now, or no end."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None and (isinstance(timeout, bool) or not isinstance(timeout, int | float) or timeout < 0):
            raise SettingError(f"timeout is {timeout!r}: it takes a number of seconds, 0 for not to wait, or None")
        self.timeout = timeout
        self._at = None if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float:
        return PATIENCE if self._at is None else self._at - time.monotonic()

    def check(self, uuid: str) -> None:
        """Raises `RequestTimeout` if they have passed."""
        if self.timeout is not None and self.left <= 0:
            raise _too_late(uuid, self.timeout)

    @property
    def step(self) -> float:
        """For how long to ask at a time."""
        return min(self.left, PATIENCE) if self.left > 0 else PATIENCE


# ── for threads ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Titanic:
    """Hands requests to Titanic through `client`, a `zmdp.clients.Client`.

    With a client whose protocol is `"0.2"` there are no options, and who waits for a reply asks again and again.
    """

    def __init__(self, client: Client) -> None:
        self.client = client

    def submit(
        self,
        service: str | bytes,
        *frames: bytes,
        key: str | None = None,
        key_ttl: float | None = None,
        delay: float | None = None,
        at: datetime | float | None = None,
        priority: int = 0,
        retries: int = 0,
        backoff: float | None = None,
        ttl: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "Ticket":
        """Hand over a request for `service`; when this returns, it is on stable storage.

        `key` makes it safe to repeat: the same key and service give the first request's ticket again, for `key_ttl`
        seconds or for ever.  It is not done before `delay` seconds have passed, or `at` (a datetime with its time
        zone, or seconds since 1970).  `priority` is 0 to 9; 9 goes first.  If the handler fails it is tried again
        `retries` times, after `backoff` seconds (default: 1) and then twice as long each time.  `ttl` is for how long
        the reply is kept (default: until it is closed).  `headers` reach the handler.

        Raises `TitanicError` if it was not stored, `ServiceNotFound` if there is no Titanic, else as `Client.request`.
        """
        options = request_options(
            key=key, key_ttl=key_ttl, delay=delay, at=at, priority=priority, retries=retries, backoff=backoff, ttl=ttl
        )
        body = (service_name(service), *(frames or (b"",)))
        reply = self._ask(_REQUEST, *body, headers=headers, options=options or None)
        _check(reply)
        return Ticket(self, reply[1].decode(), body[0].decode())

    def ticket(self, uuid: str | bytes | UUID) -> "Ticket":
        """The ticket of a request that was handed over before.  Raises `SettingError` for what is no uuid."""
        return Ticket(self, _uuid_text(uuid))

    def _ask(self, service: str, *frames: bytes, **settings: Any) -> Reply:
        try:
            return self.client.request(service, *frames, **settings)
        except RequestTimeout as error:
            if not isinstance(error, BrokerUnreachable) and not self.client.available(service):
                raise _nobody(service) from None
            raise


class Ticket:
    """A request that Titanic has.  `uuid` is all that is needed to come back for it; keep it to yourself.

    As a context manager it closes the request at the end of the block.
    """

    def __init__(self, titanic: Titanic, uuid: str, service: str = "") -> None:
        self.uuid = uuid
        self.service = service
        """Whose it is, if it was submitted here."""
        self._titanic = titanic
        self._client = titanic.client

    def __repr__(self) -> str:
        return f"Ticket({self.uuid!r})"

    def ready(self) -> bool:
        """Whether it has ended.  Raises `UnknownTicket`."""
        with suppress(ServiceError):
            return _result(self._titanic._ask(_REPLY, self.uuid.encode()), self.uuid, self.service) is not None
        return True

    def result(self, timeout: float | None = None) -> Reply:
        """The frames of the reply's FINAL, once it is there; it can be fetched any number of times.

        `timeout` is in seconds: 0 does not wait, None waits for as long as there is a Titanic.

        Raises `ServiceError` if the request failed, `RequestTimeout` (a `TimeoutError`) if it has not ended in time,
        `UnknownTicket` if it was closed or has expired, `BrokerUnreachable`, `ServiceNotFound`.
        """
        deadline = _Deadline(timeout)
        if timeout == 0:
            found = _result(self._titanic._ask(_REPLY, self.uuid.encode()), self.uuid, self.service)
            if found is None:
                raise _too_late(self.uuid, timeout)
            return found
        options = {"wait": True} if self._client.protocol == "X1" else None
        pauses = _pauses()
        while True:
            try:
                reply = self._titanic._ask(
                    _REPLY, self.uuid.encode(), timeout=deadline.step, retries=0, options=options
                )
            except BrokerUnreachable:
                raise
            except RequestTimeout:
                pass
            else:
                found = _result(reply, self.uuid, self.service)
                if found is not None:
                    return found
                time.sleep(max(0.0, min(next(pauses), deadline.left)))
            deadline.check(self.uuid)

    def partials(self, start: int = 0, *, timeout: float | None = None) -> Generator[Reply, None, None]:
        """The PARTIALs of the reply from number `start` on, as they come, until it has ended.

        They are kept, so it can be done again.  If the service was interrupted and began anew, those of the new attempt
        follow on from the same number.  `timeout` (seconds) is for how long none may come.  Raises as `result`.
        """
        deadline = _Deadline(timeout)
        pauses = _pauses()
        while True:
            try:
                asked = self._client.stream(
                    _REPLY, self.uuid.encode(), timeout=deadline.step, retries=0, options=_partials_from(start)
                )
                with closing(asked) as parts:
                    for part in parts:
                        if part.final and _result(part, self.uuid, self.service) is not None:
                            return
                        if not part.final:
                            start += 1
                            deadline, pauses = _Deadline(timeout), _pauses()
                            yield part
                time.sleep(
                    max(0.0, min(next(pauses), deadline.left))
                )  # it says 300: it is about to end, or too many wait
            except BrokerUnreachable:
                raise
            except (RequestTimeout, StreamInterrupted):
                if not self._client.available(_REPLY):
                    raise _nobody(_REPLY) from None
            deadline.check(self.uuid)

    def close(self) -> None:
        """Have Titanic forget the request and its reply; what is under way of it is cancelled.

        Harmless when repeated.  Raises `TitanicError` if Titanic could not, else as `Client.request`.
        """
        _check(self._titanic._ask(_CLOSE, self.uuid.encode()))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pauses() -> Iterator[float]:
    pause, most = POLL
    while True:
        yield pause
        pause = min(2 * pause, most)


# ── for asyncio ──────────────────────────────────────────────────────────────────────────────────────────────────────


class AsyncTitanic:
    """`Titanic` for asyncio, through an `AsyncClient`."""

    def __init__(self, client: AsyncClient) -> None:
        self.client = client

    async def submit(
        self,
        service: str | bytes,
        *frames: bytes,
        key: str | None = None,
        key_ttl: float | None = None,
        delay: float | None = None,
        at: datetime | float | None = None,
        priority: int = 0,
        retries: int = 0,
        backoff: float | None = None,
        ttl: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "AsyncTicket":
        """Hand over a request for `service`; when this returns, it is on stable storage.  As `Titanic.submit`."""
        options = request_options(
            key=key, key_ttl=key_ttl, delay=delay, at=at, priority=priority, retries=retries, backoff=backoff, ttl=ttl
        )
        body = (service_name(service), *(frames or (b"",)))
        reply = await self._ask(_REQUEST, *body, headers=headers, options=options or None)
        _check(reply)
        return AsyncTicket(self, reply[1].decode(), body[0].decode())

    def ticket(self, uuid: str | bytes | UUID) -> "AsyncTicket":
        """The ticket of a request that was handed over before.  Raises `SettingError` for what is no uuid."""
        return AsyncTicket(self, _uuid_text(uuid))

    async def _ask(self, service: str, *frames: bytes, **settings: Any) -> Reply:
        try:
            return await self.client.request(service, *frames, **settings)
        except RequestTimeout as error:
            if not isinstance(error, BrokerUnreachable) and not await self.client.available(service):
                raise _nobody(service) from None
            raise


class AsyncTicket:
    """`Ticket` for asyncio."""

    def __init__(self, titanic: AsyncTitanic, uuid: str, service: str = "") -> None:
        self.uuid = uuid
        self.service = service
        self._titanic = titanic
        self._client = titanic.client

    def __repr__(self) -> str:
        return f"AsyncTicket({self.uuid!r})"

    async def ready(self) -> bool:
        """Whether it has ended.  Raises `UnknownTicket`."""
        with suppress(ServiceError):
            return _result(await self._titanic._ask(_REPLY, self.uuid.encode()), self.uuid, self.service) is not None
        return True

    async def result(self, timeout: float | None = None) -> Reply:
        """The frames of the reply's FINAL, once it is there.  As `Ticket.result`."""
        deadline = _Deadline(timeout)
        if timeout == 0:
            found = _result(await self._titanic._ask(_REPLY, self.uuid.encode()), self.uuid, self.service)
            if found is None:
                raise _too_late(self.uuid, timeout)
            return found
        options = {"wait": True} if self._client.protocol == "X1" else None
        pauses = _pauses()
        while True:
            try:
                reply = await self._titanic._ask(_REPLY, self.uuid.encode(), timeout=deadline.step, options=options)
            except BrokerUnreachable:
                raise
            except RequestTimeout:
                pass
            else:
                found = _result(reply, self.uuid, self.service)
                if found is not None:
                    return found
                await asyncio.sleep(max(0.0, min(next(pauses), deadline.left)))
            deadline.check(self.uuid)

    async def partials(self, start: int = 0, *, timeout: float | None = None) -> AsyncGenerator[Reply, None]:
        """The PARTIALs of the reply from number `start` on, until it has ended.  As `Ticket.partials`."""
        deadline = _Deadline(timeout)
        pauses = _pauses()
        while True:
            try:
                asked = self._client.stream(
                    _REPLY, self.uuid.encode(), timeout=deadline.step, options=_partials_from(start)
                )
                async with aclosing(asked) as parts:
                    async for part in parts:
                        if part.final and _result(part, self.uuid, self.service) is not None:
                            return
                        if not part.final:
                            start += 1
                            deadline, pauses = _Deadline(timeout), _pauses()
                            yield part
                await asyncio.sleep(
                    max(0.0, min(next(pauses), deadline.left))
                )  # it says 300: it is about to end, or too many wait
            except BrokerUnreachable:
                raise
            except (RequestTimeout, StreamInterrupted):
                if not await self._client.available(_REPLY):
                    raise _nobody(_REPLY) from None
            deadline.check(self.uuid)

    async def close(self) -> None:
        """Have Titanic forget the request and its reply.  As `Ticket.close`."""
        _check(await self._titanic._ask(_CLOSE, self.uuid.encode()))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
