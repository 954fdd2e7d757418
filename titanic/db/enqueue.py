"""Submit a request to Titanic within a database transaction of the caller's."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Unpack

from ...clients.calls.ask import checked_body
from ...mdp.codecs import Codec
from ...mdp.codes import Code
from ...mdp.errors import SettingError, TitanicError
from ...mdp.wire import service_name
from ..api.steps import ServiceOrName, body_of, name_of, options_of
from ..api.submission import OWNER_OPTION, MalformedRequest, SubmissionOptions, encode_options, parse_submission

if TYPE_CHECKING:
    from sqlalchemy.engine import Connection
    from sqlalchemy.orm import Session, scoped_session


def enqueue(
    session: "Session | scoped_session[Any] | Connection",
    service: ServiceOrName,
    *frames: Any,
    codec: str | Codec | None = None,
    headers: Mapping[str, str] | None = None,
    owner: str | None = None,
    **options: Unpack[SubmissionOptions],
) -> str:
    """Submit a request as part of the transaction of `session`, and return its UUID.

    Titanic executes the request only if that transaction commits, so the request and the program's other writes succeed
    or fail together.  With asyncio: `await session.run_sync(enqueue, "service", b"…")`.

        with Session(engine) as session, session.begin():
            session.add(Order(number=18, uuid=enqueue(session, "invoice", b"18")))

    Args:
        session: A SQLAlchemy Session or Connection to Titanic's database (`titanic db upgrade --db URL` creates its
            tables beside your own).
        service: The service to call: its name, or a `Service` or `Streaming`.
        frames: The body; without frames, one empty frame.  For a service with types, or with `codec`, its value.
        codec: With a name: the codec of the value.
        headers: Headers for the service's handler.
        owner: At a broker with access control, the role that the request belongs to, and on whose behalf Titanic sends
            it.  By default Titanic sends it with its own role, and only admins can fetch the reply through the broker.
        options: Those of `Titanic.submit`.

    Returns:
        The request's UUID, with which its reply can be fetched.

    Raises:
        SettingError: An argument is invalid.
        TitanicError: The database does not have Titanic's tables.
    """
    from sqlalchemy.engine import Connection  # noqa: PLC0415 - programs that only call Titanic need no SQLAlchemy
    from sqlalchemy.exc import OperationalError, ProgrammingError  # noqa: PLC0415

    from . import store  # noqa: PLC0415
    from .store.models import StoredRequest  # noqa: PLC0415

    encoded = encode_options(options_of(service, options))
    if headers:
        encoded["headers"] = dict(headers)
    try:
        role = "" if owner is None else OWNER_OPTION.from_wire("owner", owner)
        submission = parse_submission(
            [service_name(name_of(service)), *checked_body(body_of(service, frames, codec))], encoded, time.time(), role
        )
    except MalformedRequest as error:
        raise SettingError(str(error)) from None
    if isinstance(session, Connection):
        connection = session
    elif not callable(getattr(session, "connection", None)):
        raise SettingError(f"{session!r:.100} is not a session: enqueue needs a SQLAlchemy Session or Connection")
    else:
        connection = session.connection(bind_arguments={"mapper": StoredRequest})
    if connection.dialect.name not in {"sqlite", "postgresql"}:
        raise SettingError(f"the session's database is {connection.dialect.name}: Titanic needs SQLite or PostgreSQL")
    try:
        (uuid,) = store.accept(connection, [submission])
    except (OperationalError, ProgrammingError) as error:
        if "titanic_" in str(error.orig):
            missing = f"the session's database lacks Titanic's tables (run `titanic db upgrade`): {error.orig}"
            raise TitanicError(missing, code=int(Code.FAILED)) from error
        raise
    assert uuid is not None  # noqa: S101 - it is new, or that of a key of the same owner
    return uuid.hex
